// kernels/cuda/matmul.h   Dense products through cuBLASLt, with a choice of algorithm that is fixed, cached and printable.
//
//   c[rows, cols] (+)= a[rows, depth] @ b[cols, depth]^T (+ bias[cols])      row-major; either operand may be stored transposed
//
// Numerics   fp32 products are fp32 (no TF32), bf16 products are summed in fp32. Without split-K, so that the order of a sum does not
//            depend on how many rows there are. The algorithm is what cuBLASLt's heuristic puts first for the first product of
//            its kind; later ones with another number of tokens keep it, so chunks of a product agree with the whole.
// Workspace  matmul_workspace bytes, shared by all products of a stream.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace trifold::cuda {

inline constexpr int64_t matmul_workspace = int64_t{32} << 20;  // what NVIDIA recommends for Hopper

// How an operand lies in memory: its rows are outer index by depth, or depth by outer index.
enum class Stored : uint8_t { outer_depth, depth_outer };
// Which of the three sizes is the number of tokens; the algorithm does not depend on it.
enum class Tokens : uint8_t { rows, depth };

struct Matmul {
    Tensor a, b, c, bias;  // bias empty, or like c
    Stored a_stored = Stored::outer_depth, b_stored = Stored::outer_depth;
    Accumulate accumulate = Accumulate::overwrite;
    Tokens tokens = Tokens::rows;
    int64_t rows = 0, cols = 0, depth = 0;
    Tensor workspace;
};
// False, and nothing is done, where the library cannot add this bias. Throws Problem(Exit::fault) when it cannot multiply at all.
bool matmul(CUstream_st*, const Matmul&);

// One line for each kind of product so far: sizes, types, and the algorithm that was chosen.
std::vector<std::string> matmul_choices();

}  // namespace trifold::cuda
