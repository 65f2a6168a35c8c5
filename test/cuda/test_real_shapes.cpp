// test/cuda/test_real_shapes.cpp   Operations at the shapes of real models. For GPUs only: hidden, run with the tag [real].
//
// Bounds as in the tests of the single operations (parity.h); sums of thousands of terms in fp32 differ by more in the last bits,
// and a few of a million results lie on the other side of a rounding boundary.
#include "test/catch.h"

#include <cmath>
#include <numeric>

#include "kernels/cuda/room.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr DType f32 = DType::f32, half = DType::bf16;
constexpr int64_t N = 2048, V = 50257, P = 50304;

Operand random_ids(int64_t count, int64_t below) {
    std::vector<int32_t> ids;
    test::Numbers numbers(7);
    for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>((numbers.next() + 1) / 2 * static_cast<double>(below)));
    return Operand::integers(ids);
}
Operand positions(int64_t count) {
    std::vector<int32_t> all(static_cast<size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    return Operand::integers(all);
}

}  // namespace

TEST_CASE("norms at real shapes", "[.][real]") {
    for (const int64_t C : {768, 2048, 4096, 12288}) {
        CAPTURE(C);
        const int64_t rows = 512;
        Operand x = Operand::random(half, rows * C, 1), delta = Operand::random(half, rows * C, 2), w = Operand::random(half, C, 3, 0.5, 1), b = Operand::random(half, C, 4);
        Operand sum = Operand::nans(half, rows * C), y = sum, mean = Operand::nans(f32, rows), rstd = mean;
        CHECK(parity(cpu::norm_forward, cuda::norm_forward,
                     NormForward{.x_NC = x.tensor(), .delta_NC = delta.tensor(), .sum_NC = sum.tensor(), .weight_C = w.tensor(), .bias_C = b.tensor(), .y_NC = y.tensor(),
                                 .mean_N = mean.tensor(), .rstd_N = rstd.tensor(), .N = rows, .C = C}, 1e-5) <= 1);
        Operand dy = Operand::random(half, rows * C, 5), dres = Operand::random(half, rows * C, 6), dx = Operand::nans(half, rows * C), dw = Operand::nans(f32, C), db = dw;
        Operand scratch = test::scratch(cpu::norm_backward_workspace(rows, C), cuda::norm_backward_workspace(rows, C));
        CHECK(parity(cpu::norm_backward, cuda::norm_backward,
                     NormBackward{.dy_NC = dy.tensor(), .x_NC = sum.tensor(), .weight_C = w.tensor(), .mean_N = mean.tensor(), .rstd_N = rstd.tensor(), .dresidual_NC = dres.tensor(),
                                  .dx_NC = dx.tensor(), .dweight_C = dw.tensor(), .dbias_C = db.tensor(), .workspace = scratch.tensor(), .N = rows, .C = C}, 1e-5) <= 1);
    }
}

TEST_CASE("embedding and cross-entropy at real shapes", "[.][real]") {
    const int64_t C = 768;
    Operand tokens = random_ids(N, V), place = positions(N), wte = Operand::random(half, P * C, 1), wpe = Operand::random(half, N * C, 2), x = Operand::nans(half, N * C);
    CHECK(parity(cpu::embedding_forward, cuda::embedding_forward,
                 EmbeddingForward{.token_N = tokens.tensor(), .position_N = place.tensor(), .wte_VC = wte.tensor(), .wpe_TC = wpe.tensor(), .x_NC = x.tensor(), .N = N, .C = C,
                                  .V = P}, 0) <= 1);
    Operand dx = Operand::random(half, N * C, 3), dwte = Operand::nans(f32, P * C), dwpe = Operand::nans(f32, N * C);
    Operand scratch = test::scratch(cpu::embedding_backward_workspace(N, P), cuda::embedding_backward_workspace(N, P));
    CHECK(parity(cpu::embedding_backward, cuda::embedding_backward,
                 EmbeddingBackward{.token_N = tokens.tensor(), .position_N = place.tensor(), .dx_NC = dx.tensor(), .dwte_VC = dwte.tensor(), .dwpe_TC = dwpe.tensor(),
                                   .workspace = scratch.tensor(), .N = N, .C = C, .V = P, .positions = N}, 1e-6) <= 1);
    const int64_t rows = 256;
    Operand logits = Operand::random(half, rows * P, 4, 4.0), target = random_ids(rows, V), loss = Operand::nans(f32, rows), dlogits = Operand::nans(half, rows * P);
    CHECK(parity(cpu::cross_entropy, cuda::cross_entropy,
                 CrossEntropy{.logits_NP = logits.tensor(), .target_N = target.tensor(), .loss_N = loss.tensor(), .dlogits_NP = dlogits.tensor(), .grad_scale = 1.0f / 1024,
                              .N = rows, .V = V, .P = P}, 2e-5) <= 1);
    // Half of the vocabulary, whose other half is another rank's: tables, statistics and gradients.
    const int64_t half_P = P / 2, first = half_P, own = V - first;
    Operand half_x = Operand::nans(half, N * C), half_dwte = Operand::nans(f32, half_P * C);
    CHECK(parity(cpu::embedding_forward, cuda::embedding_forward,
                 EmbeddingForward{.token_N = tokens.tensor(), .wte_VC = wte.tensor().from(first * C), .x_NC = half_x.tensor(), .N = N, .C = C, .first = first, .V = half_P}, 0) <= 1);
    CHECK(parity(cpu::embedding_backward, cuda::embedding_backward,
                 EmbeddingBackward{.token_N = tokens.tensor(), .dx_NC = dx.tensor(), .dwte_VC = half_dwte.tensor(), .workspace = scratch.tensor(), .N = N, .C = C, .first = first,
                                   .V = half_P}, 1e-6) <= 1);
    Operand stats = Operand::nans(f32, 2 * rows * 3);
    for (int64_t rank = 0; rank < 2; ++rank)
        CHECK(parity(cpu::cross_entropy_stats, cuda::cross_entropy_stats,
                     CrossEntropyStats{.logits_NP = logits.tensor().slice(rank * rows * half_P, rows * half_P), .target_N = target.tensor(),
                                       .stats_N3 = stats.tensor().slice(rank * rows * 3, rows * 3), .N = rows, .V = rank == 0 ? half_P : own, .P = half_P, .first = rank * first}, 2e-5) <= 1);
    CHECK(parity(cpu::cross_entropy_combine, cuda::cross_entropy_combine,
                 CrossEntropyCombine{.logits_NP = logits.tensor().slice(rows * half_P, rows * half_P), .target_N = target.tensor(), .stats_RN3 = stats.tensor(), .loss_N = loss.tensor(),
                                     .dlogits_NP = dlogits.tensor().slice(0, rows * half_P), .grad_scale = 1.0f / 1024, .N = rows, .V = own, .P = half_P, .first = first, .ranks = 2}, 2e-5) <= 1);
    const int64_t n = rows * P / 4;
    Operand sum = Operand::nans(half, n);
    CHECK(parity(cpu::sum_parts, cuda::sum_parts,
                 SumParts{.own = logits.tensor().slice(0, n), .others = logits.tensor().slice(n, 3 * n), .y = sum.tensor(), .rank = 2, .ranks = 4}, 0) <= 1);
}

TEST_CASE("linear layers at real shapes", "[.][real]") {
    for (const auto& [I, O] : {std::pair<int64_t, int64_t>{768, 2304}, {3072, 768}, {4096, 4096}}) {
        const int64_t rows = 1024;
        CAPTURE(I, O);
        Operand x = Operand::random(half, rows * I, 1), w = Operand::random(half, O * I, 2), b = Operand::random(half, O, 3), y = Operand::nans(half, rows * O);
        Operand scratch = test::scratch(0, cuda::linear_workspace(rows, O));
        CHECK(parity(cpu::linear_forward, cuda::linear_forward,
                     LinearForward{.x_NI = x.tensor(), .w_OI = w.tensor(), .bias_O = b.tensor(), .y_NO = y.tensor(), .workspace = scratch.tensor(), .N = rows, .I = I, .O = O}, 1e-5) <= 1);
        Operand dy = Operand::random(half, rows * O, 4), dx = Operand::nans(half, rows * I), dw = Operand::nans(f32, O * I), db = Operand::nans(f32, O);
        CHECK(parity(cpu::linear_backward_input, cuda::linear_backward_input,
                     LinearBackwardInput{.dy_NO = dy.tensor(), .w_OI = w.tensor(), .dx_NI = dx.tensor(), .workspace = scratch.tensor(), .N = rows, .I = I, .O = O}, 1e-5) <= 1);
        CHECK(parity(cpu::linear_backward_weight, cuda::linear_backward_weight,
                     LinearBackwardWeight{.dy_NO = dy.tensor(), .x_NI = x.tensor(), .dw_OI = dw.tensor(), .dbias_O = db.tensor(), .workspace = scratch.tensor(), .N = rows, .I = I, .O = O},
                     1e-5) <= 1);
    }
}

// Against the CPU's bf16 attention. The device also rounds P and dS to bf16 before they are multiplied: by half a step of 2^-8 each, so
// sums are within 2^-8 of the magnitudes they add up, which the largest value bounds; gradients have two such sums.
TEST_CASE("attention at real shapes", "[.][real]") {
    const auto in_every_room = [](auto on_cpu, const auto& args, double sums) {
        for (const int room : {cuda::small_room, cuda::medium_room, cuda::large_room}) {
            const auto on_gpu = [room](CUstream_st* stream, const auto& a) {
                if constexpr (requires { a.do_NHD; }) cuda::attention_backward(stream, a, room);
                else cuda::attention_forward(stream, a, room);
            };
            CAPTURE(room);
            if (room <= cuda::room_of_gpu()) CHECK(test::parity_of(on_cpu, on_gpu, args, sums) <= 1);
        }
    };
    for (const auto& [H, K, D, window] : {std::tuple<int64_t, int64_t, int64_t, int64_t>{12, 12, 64, 0}, {8, 2, 128, 0}, {4, 4, 96, 300}}) {
        const int64_t T = 1024, S = (H + 2 * K) * D;
        CAPTURE(H, K, D, window);
        Operand qkv = Operand::random(half, T * S, 1), o = Operand::nans(half, T * H * D), lse = Operand::nans(f32, H * T);
        AttentionForward f{.q_NHD = qkv.tensor(), .k_NKD = qkv.tensor().from(H * D), .v_NKD = qkv.tensor().from((H + K) * D), .doc_start_N = {}, .o_NHD = o.tensor(),
                           .lse_BHT = lse.tensor(), .workspace = {}, .B = 1, .Tq = T, .Tk = T, .H = H, .K = K, .D = D, .q_stride = S, .kv_stride = S, .q_batch_stride = T * S,
                           .kv_batch_stride = T * S, .window = window, .scale = 1.0f / std::sqrt(static_cast<float>(D))};
        Operand scratch = test::scratch(cpu::attention_workspace(f), cuda::attention_workspace(f));
        f.workspace = scratch.tensor();
        in_every_room(cpu::attention_forward, f, 4e-3);
        Operand dout = Operand::random(half, T * H * D, 2), dqkv = Operand::nans(half, T * S);
        AttentionBackward g{.q_NHD = f.q_NHD, .k_NKD = f.k_NKD, .v_NKD = f.v_NKD, .o_NHD = o.tensor(), .do_NHD = dout.tensor(), .lse_BHT = lse.tensor(), .doc_start_N = {},
                            .dq_NHD = dqkv.tensor(), .dk_NKD = dqkv.tensor().from(H * D), .dv_NKD = dqkv.tensor().from((H + K) * D), .workspace = {}, .B = 1, .T = T, .H = H, .K = K,
                            .D = D, .q_stride = S, .kv_stride = S, .q_batch_stride = T * S, .kv_batch_stride = T * S, .window = window, .scale = f.scale};
        Operand more = test::scratch(cpu::attention_workspace(g), cuda::attention_workspace(g));
        g.workspace = more.tensor();
        // The three gradients share rows of one buffer, and `parity` compares each view as a whole, so all three are seen.
        in_every_room(cpu::attention_backward, g, 8e-3);
    }
}
