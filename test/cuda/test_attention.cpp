// test/cuda/test_attention.cpp   Attention on CUDA against the CPU and against softmax(q k^T) v in double precision.
#include "test/catch.h"

#include <cmath>
#include <vector>

#include "kernels/cuda/room.h"
#include "test/cuda/attention_reference.h"
#include "test/cuda/on_device.h"

using namespace trifold;
using test::AttentionOperands;
using test::AttentionReference;
using test::AttentionShape;
using test::on_device;
using test::Operand;
using test::Rounds;
using test::worst_error;

namespace {

// fp32 sums of up to a few hundred terms and one exponential: 0.4e-6 in the emulator; the GPU's ex2 may add 2^-22.
constexpr double fp32_sums = 2e-6;

#if defined(TRIFOLD_EMULATION)
constexpr bool emulated = true;
#else
constexpr bool emulated = false;
#endif

// The rooms that this GPU has: the tiles of each are tested. What takes the emulator long is left to the largest of them.
std::vector<int> rooms(const AttentionShape& s, int64_t longest) {
    std::vector<int> all;
    for (const int room : {cuda::large_room, cuda::medium_room, cuda::small_room})
        if (room <= cuda::room_of_gpu() && (!emulated || all.empty() || s.Tk() <= longest)) all.push_back(room);
    return all;
}

// With the tiles of a room; 0: as models call it.
void run_forward(AttentionOperands& x, int room = 0) {
    AttentionForward a = x.forward();
    a.workspace = x.workspace_of(cuda::attention_workspace(a));
    on_device([room](CUstream_st* stream, const AttentionForward& args) {
        room == 0 ? cuda::attention_forward(stream, args) : cuda::attention_forward(stream, args, room);
    }, a);
}
void run_forward_on_cpu(AttentionOperands& x) {
    AttentionForward a = x.forward();
    a.workspace = x.workspace_of(cpu::attention_workspace(a) + 64);
    a.workspace.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(a.workspace.data) + 63) / 64 * 64);
    a.workspace.elems -= 64;
    cpu::attention_forward(a);
}
void run_backward(AttentionOperands& x, int room = 0) {
    AttentionBackward a = x.backward();
    a.workspace = x.workspace_of(cuda::attention_workspace(a));
    on_device([room](CUstream_st* stream, const AttentionBackward& args) {
        room == 0 ? cuda::attention_backward(stream, args) : cuda::attention_backward(stream, args, room);
    }, a);
}
void run_backward_on_cpu(AttentionOperands& x) {
    AttentionBackward a = x.backward();
    a.workspace = x.workspace_of(cpu::attention_workspace(a) + 64);
    a.workspace.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(a.workspace.data) + 63) / 64 * 64);
    a.workspace.elems -= 64;
    cpu::attention_backward(a);
}

Rounds of_cuda(DType type) { return type == DType::bf16 ? Rounds::operands : Rounds::nothing; }
Rounds of_cpu(DType type) { return type == DType::bf16 ? Rounds::results : Rounds::nothing; }

// Between two versions each may be wrong by its own share.
double worst_difference(const Operand& a, const Operand& b, test::Bounded bound, DType type) {
    for (size_t i = 0; i < bound.value.size(); ++i) {
        bound.rounded[i] += std::abs(bound.value[i]);  // of the CPU's result
        bound.value[i] = b[static_cast<int64_t>(i)];
        bound.added[i] *= 2;
    }
    return worst_error(a, bound, of_cuda(type), fp32_sums);
}

double worst_lse(const Operand& lse, const test::Values& want) {
    double worst = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
        const double error = std::abs(lse[static_cast<int64_t>(i)] - want[i]) / (2e-6 * (1.0 + std::abs(want[i])));
        worst = error <= worst ? worst : std::isnan(error) ? INFINITY : error;
    }
    return worst;
}

// Whatever is no head of a row keeps its bytes.
void check_padding(const AttentionOperands& x) {
    const AttentionShape& s = x.s;
    for (int64_t i = 0; i < x.dqkv.elems(); ++i) {
        const int64_t in_batch = i % s.batch_stride();
        if (in_batch < s.Tk() * s.stride() && in_batch % s.stride() < (s.H + 2 * s.K) * s.D) continue;
        if (!std::isnan(x.dqkv[i])) FAIL("padding was written at " << i);
    }
}

void check_forward(const AttentionShape& s, DType type) {
    INFO("forward, " << name_of(type) << ", " << s.name());
    AttentionOperands on_cpu(s, type);
    const AttentionReference reference(on_cpu);
    run_forward_on_cpu(on_cpu);
    CHECK(worst_error(on_cpu.o, reference.o, of_cpu(type), fp32_sums) <= 1.0);
    for (const int room : rooms(s, s.cached > 0 ? 320 : 200)) {
        INFO("tiles for " << room << " bytes");
        AttentionOperands x(s, type);
        run_forward(x, room);
        CHECK(worst_error(x.o, reference.o, of_cuda(type), fp32_sums) <= 1.0);
        CHECK(worst_lse(x.lse, reference.lse) <= 1.0);
        CHECK(worst_difference(x.o, on_cpu.o, reference.o, type) <= 1.0);
    }
}

void check_backward(const AttentionShape& s, DType type) {
    INFO("backward, " << name_of(type) << ", " << s.name());
    AttentionOperands given(s, type);
    AttentionReference reference(given);
    run_forward_on_cpu(given);
    reference.add_gradients(given);
    AttentionOperands on_cpu(given);
    run_backward_on_cpu(on_cpu);
    CHECK(worst_error(on_cpu.dqkv, reference.dqkv, of_cpu(type), 2 * fp32_sums) <= 1.0);
    for (const int room : rooms(s, 200)) {
        INFO("tiles for " << room << " bytes");
        AttentionOperands x(given);
        run_backward(x, room);
        CHECK(worst_error(x.dqkv, reference.dqkv, of_cuda(type), 2 * fp32_sums) <= 1.0);
        CHECK(worst_difference(x.dqkv, on_cpu.dqkv, reference.dqkv, type) <= 1.0);
        check_padding(x);
    }
}

// Tiles of 64 and 128; every head size; groups of 1, 2 and 4 heads; windows; documents that begin inside, at the border
// of and far before a tile; lengths that fill no tile, one, and several. With windows 2 and 63 the one key that a group
// of queries sees, or does not see, is the last or the first of a step of keys.
std::vector<AttentionShape> training_shapes() {
    return {{.B = 2, .Tq = 1, .H = 2, .K = 1, .D = 64},
            {.B = 3, .Tq = 17, .H = 4, .K = 2, .D = 64, .window = 1},
            {.B = 1, .Tq = 65, .H = 4, .K = 1, .D = 64, .window = 5},
            {.B = 2, .Tq = 130, .H = 2, .K = 2, .D = 64, .documents = {40, 64, 129}},
            {.B = 1, .Tq = 300, .H = 2, .K = 1, .D = 64, .window = 40},
            {.B = 1, .Tq = 257, .H = 1, .K = 1, .D = 64},
            {.B = 2, .Tq = 17, .H = 2, .K = 1, .D = 96, .documents = {3}},
            {.B = 1, .Tq = 200, .H = 2, .K = 2, .D = 96, .window = 63},
            {.B = 1, .Tq = 64, .H = 4, .K = 1, .D = 128, .documents = {1, 2, 33}},
            {.B = 2, .Tq = 130, .H = 2, .K = 1, .D = 128, .window = 2, .documents = {100}},
            {.B = 1, .Tq = 300, .H = 1, .K = 1, .D = 128}};
}

// A few queries read a long cache in parts; more of them tile by tile.
std::vector<AttentionShape> cache_shapes() {
    return {{.B = 2, .Tq = 1, .cached = 600, .H = 4, .K = 2, .D = 64},
            {.B = 1, .Tq = 3, .cached = 700, .H = 2, .K = 1, .D = 128, .window = 300},
            {.B = 1, .Tq = 16, .cached = 300, .H = 2, .K = 2, .D = 96, .documents = {280, 310}},
            {.B = 2, .Tq = 5, .cached = 100, .H = 2, .K = 1, .D = 64},
            {.B = 1, .Tq = 70, .cached = 94, .H = 2, .K = 2, .D = 64, .window = 100, .documents = {50}}};
}

}  // namespace

TEST_CASE("cuda attention forward agrees with the CPU and with double precision", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16})
        for (const AttentionShape& s : training_shapes()) check_forward(s, type);
}

TEST_CASE("cuda attention reads a key/value cache", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16})
        for (const AttentionShape& s : cache_shapes()) check_forward(s, type);
}

TEST_CASE("cuda attention backward agrees with the CPU and with double precision", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16})
        for (const AttentionShape& s : training_shapes()) check_backward(s, type);
}

TEST_CASE("cuda attention gives the same bytes again, with the largest tiles that the GPU has room for", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16}) {
        AttentionOperands x({.B = 1, .Tq = 260, .H = 2, .K = 1, .D = 64, .window = 150, .documents = {100}}, type);
        run_forward(x);
        AttentionOperands again(x);
        again.o = Operand::nans(type, x.o.elems());
        run_forward(again, rooms(x.s, 0).front());
        CHECK(x.o.bytes() == again.o.bytes());
        CHECK(x.lse.bytes() == again.lse.bytes());
        run_backward(x);
        run_backward(again, rooms(x.s, 0).front());
        CHECK(x.dqkv.bytes() == again.dqkv.bytes());
    }
}

TEST_CASE("cuda attention keeps documents apart", "[cuda][attention]") {
    const int64_t border = 75;
    for (const DType type : {DType::f32, DType::bf16}) {
        const AttentionShape s{.B = 1, .Tq = 150, .H = 2, .K = 1, .D = 64, .documents = {border}};
        AttentionOperands before(s, type), after(s, type);
        test::Numbers numbers(77);
        for (int64_t t = 0; t < border; ++t) {
            for (int64_t i = 0; i < 3 * s.D; ++i) after.qkv.set(s.at(0, t, 0) + i, 30.0 * numbers.next());
            // So large that even the smallest probability of it would show.
            for (int64_t i = 0; i < s.D; ++i) after.qkv.set(s.at(0, t, s.v_head(0)) + i, 1e30 * numbers.next());
        }
        run_forward(before);
        run_forward(after);
        run_backward(before);
        run_backward(after);
        bool same = true;
        for (int64_t i = s.dense(0, border, 0); i < before.o.elems(); ++i) same = same && before.o[i] == after.o[i];
        for (int64_t t = border; t < s.Tq; ++t)
            for (int64_t i = s.at(0, t, 0); i < s.at(0, t, 4); ++i) same = same && before.dqkv[i] == after.dqkv[i];
        CHECK(same);
        CHECK(before.o[0] != after.o[0]);
    }
}

TEST_CASE("cuda attention survives large scores", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16}) {
        AttentionOperands x({.B = 1, .Tq = 100, .H = 2, .K = 1, .D = 64, .amplitude = 120.0},
                            type);  // scores up to about 1e4
        AttentionReference reference(x);
        run_forward(x);
        // fp32 scores of that size are known to about 1e-3, and so are probabilities.
        CHECK(worst_error(x.o, reference.o, of_cuda(type), 2e-3) <= 1.0);
        reference.add_gradients(x);
        run_backward(x);
        CHECK(worst_error(x.dqkv, reference.dqkv, of_cuda(type), 4e-3) <= 1.0);
    }
}

TEST_CASE("cuda attention passes NaN on", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16}) {
        const AttentionShape s{.B = 1, .Tq = 70, .H = 2, .K = 2, .D = 64};
        AttentionOperands clean(s, type), broken(s, type);
        broken.qkv.set(s.at(0, 1, 0) + 5, NAN);  // one query of head 0
        run_forward(clean);
        run_forward(broken);
        run_backward(broken);
        for (int64_t d = 0; d < s.D; ++d) {
            CHECK(std::isnan(broken.o[s.dense(0, 1, 0) + d]));
            CHECK(std::isnan(broken.dqkv[s.at(0, 1, 0) + d]));
        }
        bool same = true;
        for (int64_t i = s.dense(0, 2, 0); i < clean.o.elems(); ++i) same = same && clean.o[i] == broken.o[i];
        CHECK(same);
    }
}

TEST_CASE("cuda attention writes no lse where none is wanted", "[cuda][attention]") {
    for (const int64_t cached : {int64_t{0}, int64_t{300}}) {
        AttentionOperands x({.Tq = 2, .cached = cached, .D = 64}, DType::bf16), y(x);
        run_forward(x);
        AttentionForward a = y.forward();
        a.lse_BHT = {};
        a.workspace = y.workspace_of(cuda::attention_workspace(a));
        on_device([](CUstream_st* stream, const AttentionForward& args) { cuda::attention_forward(stream, args); }, a);
        CHECK(x.o.bytes() == y.o.bytes());
        CHECK(std::isnan(y.lse[0]));
    }
}

TEST_CASE("cuda attention says which head sizes it has", "[cuda][attention]") {
    for (const DType type : {DType::f32, DType::bf16}) {
        AttentionOperands x({.Tq = 4, .D = 80}, type);
        for (const bool forward : {true, false}) {
            std::string message;
            try {
                forward ? run_forward(x) : run_backward(x);
            } catch (const Problem& p) {
                CHECK(p.code() == Exit::usage);
                message = p.what();
            }
            CHECK(message.find("64, 96 and 128") != std::string::npos);
            CHECK(message.find("80") != std::string::npos);
        }
    }
}

TEST_CASE("cuda attention workspace serves fewer queries and more keys", "[cuda][attention]") {
    AttentionForward train{};
    train.B = 4, train.Tq = train.Tk = 1024, train.H = train.K = 12, train.D = 64;
    AttentionForward decode = train;
    decode.Tq = 1, decode.Tk = 100000;
    CHECK(cuda::attention_workspace(train) == cuda::attention_workspace(decode));
    CHECK(cuda::attention_workspace(train) % 16 == 0);
}
