// test/cuda/test_embedding.cpp   The embedding tables on the device, forward and backward.
#include "test/catch.h"
#include "test/cuda/parity.h"

using namespace trifold;
using test::Operand;
using test::parity;

namespace {

constexpr DType f32 = DType::f32;
constexpr double exact = 0.0;  // the same sums in the same order; only the step of parity.h is left

struct Size {
    int64_t N, C, V, T;
};
// One sort round, two, several tiles; runs within a block, across blocks; strips that end inside a row.
const Size sizes[] = {{1, 8, 5, 3}, {3, 33, 70, 2}, {300, 40, 7, 33}, {700, 132, 3000, 600}, {4500, 4, 300000, 1500}};

std::vector<int32_t> some_integers(int64_t count, int64_t below, uint64_t seed) {
    test::Numbers numbers(seed);
    std::vector<int32_t> v;
    for (int64_t i = 0; i < count; ++i)
        v.push_back(static_cast<int32_t>((numbers.next() + 1) / 2 * static_cast<double>(below)));
    return v;
}

// A part of the vocabulary: rows [first, first + V) of `vocab`.
struct Part {
    Size s;
    int64_t first, vocab;
};
// The first rank, one in the middle, the last; one whose rows nobody asks for; one without rows; 512 rows, whose sort needs a
// second round for the tokens that belong elsewhere; runs that end where the others' tokens begin, within a block and not.
const Part parts[] = {{{50, 40, 13, 33}, 0, 37},    {{50, 40, 13, 33}, 13, 37},  {{51, 33, 11, 7}, 26, 37},
                      {{9, 8, 4, 3}, 5000, 37},     {{9, 8, 0, 3}, 13, 37},      {{700, 4, 512, 3}, 512, 1536},
                      {{1000, 36, 3, 3}, 1, 5},     {{2500, 4, 40, 3}, 10, 3000}};

// Of a table of s.V rows from `first` on.
struct Gradients {
    Size s;
    DType act;
    Accumulate mode;
    int64_t first = 0;
    Operand token, position, dx = Operand::random(act, s.N*s.C, 3), dwte = start(s.V, 5), dwpe = start(s.T, 6);
    Operand workspace =
        test::scratch(cpu::embedding_backward_workspace(s.N, s.V), cuda::embedding_backward_workspace(s.N, s.V));

    Operand start(int64_t rows, uint64_t seed) const {
        return mode == Accumulate::add ? Operand::random(f32, rows * s.C, seed) : Operand::nans(f32, rows * s.C);
    }
    EmbeddingBackward args(bool positions) {
        return {.token_N = token.tensor(),
                .position_N = position.tensor(),
                .dx_NC = dx.tensor(),
                .dwte_VC = dwte.tensor(),
                .dwpe_TC = positions ? dwpe.tensor() : Tensor{},
                .workspace = workspace.tensor(),
                .accumulate_wte = mode,
                .accumulate_wpe = mode,
                .N = s.N,
                .C = s.C,
                .first = first,
                .V = s.V,
                .positions = s.T};
    }
};

Gradients gradients(Size s, DType act, Accumulate mode, const std::vector<int32_t>& tokens, int64_t first = 0) {
    return {.s = s,
            .act = act,
            .mode = mode,
            .first = first,
            .token = Operand::integers(tokens),
            .position = Operand::integers(some_integers(s.N, s.T, 2))};
}

}  // namespace

TEST_CASE("embedding_forward on the device", "[embedding]") {
    for (const DType act : {f32, DType::bf16})
        for (const Size& s : {Size{1, 8, 5, 3}, Size{3, 33, 70, 2}, Size{50, 40, 7, 33}, Size{9, 1416, 20, 10}})
            for (const bool positions : {false, true}) {
                CAPTURE(name_of(act), s.N, s.C, positions);
                Operand token = Operand::integers(some_integers(s.N, s.V, 1)),
                        position = Operand::integers(some_integers(s.N, s.T, 2));
                Operand wte = Operand::random(act, s.V * s.C, 3), wpe = Operand::random(act, s.T * s.C, 4),
                        x = Operand::nans(act, s.N * s.C);
                CHECK(parity(cpu::embedding_forward, cuda::embedding_forward,
                             {.token_N = token.tensor(),
                              .position_N = position.tensor(),
                              .wte_VC = wte.tensor(),
                              .wpe_TC = positions ? wpe.tensor() : Tensor{},
                              .x_NC = x.tensor(),
                              .N = s.N,
                              .C = s.C,
                              .V = s.V},
                             exact) <= 1e-9);
            }
    const Size s{5, 40, 9, 1};
    Operand token = Operand::integers(some_integers(s.N, s.V, 1)), wte = Operand::random(f32, s.V * s.C, 3),
            x = Operand::nans(f32, s.N * s.C);
    CHECK(parity(cpu::embedding_forward, test::unaligned<cuda::embedding_forward, EmbeddingForward>,
                 {.token_N = token.tensor(),
                  .position_N = {},
                  .wte_VC = wte.tensor(),
                  .wpe_TC = {},
                  .x_NC = x.tensor(),
                  .N = s.N,
                  .C = s.C,
                  .V = s.V},
                 exact) <= 1e-9);
}

TEST_CASE("a part of the embedding table on the device", "[embedding]") {
    for (const DType act : {f32, DType::bf16})
        for (const Part& p : parts) {
            const Size& s = p.s;
            CAPTURE(name_of(act), s.N, s.C, s.V, p.first);
            const auto tokens = some_integers(s.N, p.vocab, 1);
            Operand token = Operand::integers(tokens), position = Operand::integers(some_integers(s.N, s.T, 2));
            Operand wte = Operand::random(act, s.V * s.C, 3), wpe = Operand::random(act, s.T * s.C, 4),
                    x = Operand::nans(act, s.N * s.C);
            EmbeddingForward a{.token_N = token.tensor(),
                               .position_N = position.tensor(),
                               .wte_VC = wte.tensor(),
                               .wpe_TC = {},
                               .x_NC = x.tensor(),
                               .N = s.N,
                               .C = s.C,
                               .first = p.first,
                               .V = s.V};
            CHECK(parity(cpu::embedding_forward, cuda::embedding_forward, a, exact) <= 1e-9);
            a.wpe_TC = wpe.tensor();
            CHECK(parity(cpu::embedding_forward, cuda::embedding_forward, a, exact) <= 1e-9);
            for (const Accumulate mode : {Accumulate::overwrite, Accumulate::add}) {
                // Runs of more than 64 tokens are summed in parts.
                const bool long_runs = s.N == 1000;
                CHECK(parity(cpu::embedding_backward, cuda::embedding_backward,
                             gradients(s, act, mode, tokens, p.first).args(s.N < 51), long_runs ? 4e-6 : exact) <=
                      (long_runs ? 1 : 1e-9));
            }
        }
}

TEST_CASE("embedding_backward on the device adds in token order", "[embedding]") {
    for (const DType act : {f32, DType::bf16})
        for (const Accumulate mode : {Accumulate::overwrite, Accumulate::add})
            for (const Size& s : sizes) {
                if (s.V > 10000 && (act == f32) != (mode == Accumulate::add)) continue;  // large tables: two are enough
                const bool positions = s.N != 3;
                CAPTURE(name_of(act), static_cast<int>(mode), s.N, s.C, s.V);
                Gradients g = gradients(s, act, mode, some_integers(s.N, s.V, 1));
                CHECK(parity(cpu::embedding_backward, cuda::embedding_backward, g.args(positions), exact) <= 1e-9);
            }
    Gradients g = gradients({40, 24, 9, 5}, DType::bf16, Accumulate::add, some_integers(40, 9, 1));
    CHECK(parity(cpu::embedding_backward, test::unaligned<cuda::embedding_backward, EmbeddingBackward>, g.args(true),
                 exact) <= 1e-9);
}

TEST_CASE("embedding_backward on the device with a token that is nearly everywhere", "[embedding]") {
    for (const DType act : {f32, DType::bf16})
        for (const Accumulate mode : {Accumulate::overwrite, Accumulate::add}) {
            const Size s{3000, mode == Accumulate::add ? 140 : 35, 600, 10};
            std::vector<int32_t> tokens = some_integers(s.N, s.V, 1);
            for (size_t i = 0; i < tokens.size(); ++i)
                if (i % 4 != 0) tokens[i] = 77;
            CAPTURE(name_of(act), static_cast<int>(mode), s.C);
            // The long run is summed in parts: 2250 terms, whose rounding errors are random.
            CHECK(parity(cpu::embedding_backward, cuda::embedding_backward, gradients(s, act, mode, tokens).args(false),
                         4e-6) <= 1);
        }
}
