// test/emulation/cublaslt.cpp   The calls of cuBLASLt that kernels/cuda/matmul.cpp makes: column-major products by plain loops,
// queued on the emulated stream. Checks what the library would check, and that an algorithm came from its heuristic.
#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "kernels/tensor.h"
#include "test/emulation/cuda_runtime.h"
#include "test/emulation/emulator.h"

using namespace trifold;

namespace {

constexpr uint64_t known_algorithm = 0x7472696c6f6e67ull;

struct Layout {
    cudaDataType type;
    int64_t rows, cols, ld;
};
struct Description {
    cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    cudaDataType bias_type = CUDA_R_32F;
    const void* bias = nullptr;
};

template <class Handle, class T>
cublasStatus_t create(Handle* handle, const T& value) {
    *handle = reinterpret_cast<Handle>(new T(value));
    return CUBLAS_STATUS_SUCCESS;
}
const Layout& layout(cublasLtMatrixLayout_t l) { return *reinterpret_cast<const Layout*>(l); }
const Description& description(cublasLtMatmulDesc_t d) { return *reinterpret_cast<const Description*>(d); }

float element(const void* p, cudaDataType type, int64_t i) {
    return type == CUDA_R_32F ? static_cast<const float*>(p)[i] : static_cast<float>(static_cast<const bf16*>(p)[i]);
}
void set(void* p, cudaDataType type, int64_t i, float value) {
    if (type == CUDA_R_32F)
        static_cast<float*>(p)[i] = value;
    else
        static_cast<bf16*>(p)[i] = bf16(value);
}

void require(bool fine, const char* what) {
    if (!fine) emulation::die(std::string("cuBLASLt: ") + what);
}

// The shapes of a product: c is [m, n], the sums are over k.
struct Shape {
    int64_t m, n, k;
};
Shape shape_of(const Description& d, const Layout& a, const Layout& b, const Layout& c) {
    const Shape s{c.rows, c.cols, d.a == CUBLAS_OP_N ? a.cols : a.rows};
    require((d.a == CUBLAS_OP_N ? a.rows : a.cols) == s.m, "the first operand and the result have different heights");
    require((d.b == CUBLAS_OP_N ? b.rows : b.cols) == s.k && (d.b == CUBLAS_OP_N ? b.cols : b.rows) == s.n, "the second operand does not fit");
    require(a.ld >= a.rows && b.ld >= b.rows && c.ld >= c.rows, "columns overlap");
    require(a.type == b.type, "operands of two types");
    require(!d.bias || d.bias_type == c.type, "a bias of another type than the result");
    return s;
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return create(handle, 1); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return delete reinterpret_cast<int*>(handle), CUBLAS_STATUS_SUCCESS; }
const char* cublasLtGetStatusString(cublasStatus_t) { return "an error of the emulated library"; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    return create(l, Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(cols), ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return delete &layout(l), CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t compute, cudaDataType_t scale) {
    require(compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F, "only fp32 sums are emulated");
    return create(d, Description{});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete &description(d), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t what, const void* value, size_t bytes) {
    auto& d = const_cast<Description&>(description(handle));
    const auto into = [&](auto& member) {
        require(bytes == sizeof member, "an attribute of the wrong size");
        std::memcpy(&member, value, bytes);
    };
    switch (what) {
        case CUBLASLT_MATMUL_DESC_TRANSA: into(d.a); break;
        case CUBLASLT_MATMUL_DESC_TRANSB: into(d.b); break;
        case CUBLASLT_MATMUL_DESC_EPILOGUE: into(d.epilogue); break;
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: into(d.bias_type); break;
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: into(d.bias); break;
        default: require(false, "an attribute that is not emulated");
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { return create(p, 1); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return delete reinterpret_cast<int*>(p), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int, cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
    const Shape s = shape_of(description(d), layout(a), layout(b), layout(c));
    results[0] = {};
    *found = 0;
    if (description(d).bias && s.m % 2 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;  // so that our way without the epilogue is taken, too
    results[0].algo.data[0] = known_algorithm;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t* algo, cublasLtMatmulHeuristicResult_t* result) {
    *result = {};
    return algo->data[0] == known_algorithm ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t*, cublasLtMatmulAlgoConfigAttributes_t, void* value, size_t bytes, size_t* written) {
    std::memset(value, 0, bytes);
    *written = bytes;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha_p, const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta_p, const void* c, cublasLtMatrixLayout_t c_layout, void* out,
                              cublasLtMatrixLayout_t out_layout, const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    const Description d = description(desc);
    const Layout la = layout(a_layout), lb = layout(b_layout), lc = layout(c_layout), lo = layout(out_layout);
    const Shape s = shape_of(d, la, lb, lc);
    require(algo->data[0] == known_algorithm, "an algorithm that no heuristic gave");
    require(lo.rows == lc.rows && lo.cols == lc.cols && lo.type == lc.type, "the result and what is added have different shapes");
    require((d.epilogue == CUBLASLT_EPILOGUE_BIAS) == (d.bias != nullptr), "a bias without its epilogue");
    float alpha, beta;
    std::memcpy(&alpha, alpha_p, 4);
    std::memcpy(&beta, beta_p, 4);
    emulation::submit(stream, "cublasLtMatmul", [=] {
        std::memset(workspace, 0xff, std::min<size_t>(workspace_bytes, 4096));  // nothing there may be relied upon
        for (int64_t j = 0; j < s.n; ++j)
            for (int64_t i = 0; i < s.m; ++i) {
                double sum = 0;
                for (int64_t k = 0; k < s.k; ++k)
                    sum += static_cast<double>(element(a, la.type, d.a == CUBLAS_OP_N ? k * la.ld + i : i * la.ld + k)) *
                           element(b, lb.type, d.b == CUBLAS_OP_N ? j * lb.ld + k : k * lb.ld + j);
                float value = static_cast<float>(alpha * sum);
                if (beta != 0) value += beta * element(c, lc.type, j * lc.ld + i);
                if (d.bias) value += element(d.bias, d.bias_type, i);
                set(out, lo.type, j * lo.ld + i, value);
            }
    });
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
