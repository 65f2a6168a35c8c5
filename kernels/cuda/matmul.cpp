// kernels/cuda/matmul.cpp   See matmul.h. cuBLASLt is column-major: it is given c^T = b @ a^T, whose operands need no copies.
#include "kernels/cuda/matmul.h"

#include <cublasLt.h>
#include <fmt/format.h>

#include <array>
#include <map>
#include <optional>

#include "kernels/cuda/check.h"

namespace trifold::cuda {
namespace {

void check_blas(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    throw Problem(Exit::fault, fmt::format("cuBLASLt: {} in {} at {}:{}; if `nvidia-smi` shows a healthy GPU with free memory, please report it, and compute with "
                                           "--run.device=cpu meanwhile", cublasLtGetStatusString(status), call, file, line));
}
#define BLAS_CHECK(call) check_blas((call), #call, __FILE__, __LINE__)

cudaDataType_t type_of(const Tensor& t) {
    TRIFOLD_ASSERT(t.dtype == DType::f32 || t.dtype == DType::bf16);
    return t.dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

// What the pointer is a multiple of, up to 16 (and for none at all). No algorithm asks for more, and pieces of a product, which
// begin at other rows than the whole, must not get another one. The distance between rows is in the layouts.
uint32_t alignment_of(const void* p) {
    const auto address = reinterpret_cast<uintptr_t>(p) | 16u;
    return static_cast<uint32_t>(address & -address);
}

// Owners of cuBLASLt's descriptors.
class Layout {
public:
    // Column-major [height, width] with `height` elements between columns.
    Layout(cudaDataType_t type, int64_t height, int64_t width) {
        BLAS_CHECK(cublasLtMatrixLayoutCreate(&layout_, type, static_cast<uint64_t>(height), static_cast<uint64_t>(width), height));
    }
    ~Layout() { cublasLtMatrixLayoutDestroy(layout_); }
    Layout(const Layout&) = delete;
    operator cublasLtMatrixLayout_t() const { return layout_; }

private:
    cublasLtMatrixLayout_t layout_ = nullptr;
};

class Description {
public:
    Description() { BLAS_CHECK(cublasLtMatmulDescCreate(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F)); }
    ~Description() { cublasLtMatmulDescDestroy(desc_); }
    Description(const Description&) = delete;
    operator cublasLtMatmulDesc_t() const { return desc_; }
    template <class T> void set(cublasLtMatmulDescAttributes_t what, const T& value) {
        BLAS_CHECK(cublasLtMatmulDescSetAttribute(desc_, what, &value, sizeof value));
    }

private:
    cublasLtMatmulDesc_t desc_ = nullptr;
};

class Preference {
public:
    Preference() { BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference_)); }
    ~Preference() { cublasLtMatmulPreferenceDestroy(preference_); }
    Preference(const Preference&) = delete;
    operator cublasLtMatmulPreference_t() const { return preference_; }
    template <class T> void set(cublasLtMatmulPreferenceAttributes_t what, const T& value) {
        BLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference_, what, &value, sizeof value));
    }

private:
    cublasLtMatmulPreference_t preference_ = nullptr;
};

// What decides the algorithm: everything but the number of tokens.
struct Kind {
    DType in, out;
    Stored a_stored, b_stored;
    int64_t size0, size1;  // the two sizes that are not tokens
    bool add, bias;
    std::array<uint32_t, 4> alignments;  // of a, b, c and the bias
    auto operator<=>(const Kind&) const = default;
};

Kind kind_of(const Matmul& m) {
    const int64_t size0 = m.tokens == Tokens::rows ? m.cols : m.rows, size1 = m.tokens == Tokens::rows ? m.depth : m.cols;
    return {m.a.dtype, m.c.dtype, m.a_stored, m.b_stored, size0, size1, m.accumulate == Accumulate::add, static_cast<bool>(m.bias),
            {alignment_of(m.a.data), alignment_of(m.b.data), alignment_of(m.c.data), alignment_of(m.bias.data)}};
}

struct Choice {
    cublasLtMatmulAlgo_t algo;
    std::string text;
};

// cuBLASLt's handle and the choices made so far. One for the process: making it takes a tenth of a second, and it belongs to the GPU.
struct Library {
    cublasLtHandle_t handle = nullptr;
    std::map<Kind, Choice> choices;
    Library() { BLAS_CHECK(cublasLtCreate(&handle)); }
    ~Library() { cublasLtDestroy(handle); }
};
Library& library() {
    static Library instance;
    return instance;
}

struct Call {
    const Matmul& m;
    Description desc;
    Layout b, a, c;  // in the order in which cuBLASLt takes them

    explicit Call(const Matmul& matmul)
        : m(matmul),
          b(type_of(m.b), m.b_stored == Stored::outer_depth ? m.depth : m.cols, m.b_stored == Stored::outer_depth ? m.cols : m.depth),
          a(type_of(m.a), m.a_stored == Stored::outer_depth ? m.depth : m.rows, m.a_stored == Stored::outer_depth ? m.rows : m.depth),
          c(type_of(m.c), m.cols, m.rows) {
        const auto operation = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
        desc.set(CUBLASLT_MATMUL_DESC_TRANSA, operation(m.b_stored == Stored::outer_depth));
        desc.set(CUBLASLT_MATMUL_DESC_TRANSB, operation(m.a_stored == Stored::depth_outer));
        if (!m.bias) return;
        desc.set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        desc.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type_of(m.bias));
        desc.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(m.bias.data));
    }

    bool works(const cublasLtMatmulAlgo_t& algo) const {
        cublasLtMatmulHeuristicResult_t result{};
        return cublasLtMatmulAlgoCheck(library().handle, desc, b, a, c, c, &algo, &result) == CUBLAS_STATUS_SUCCESS &&
               result.workspaceSize <= static_cast<size_t>(matmul_workspace);
    }
    std::optional<cublasLtMatmulAlgo_t> first_of_heuristic() const;
};

// Nothing: the library knows no algorithm for this.
std::optional<cublasLtMatmulAlgo_t> Call::first_of_heuristic() const {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(matmul_workspace));
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(m.b.data));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(m.a.data));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(m.c.data));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(m.c.data));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(library().handle, desc, b, a, c, c, preference, 1, &result, &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) return std::nullopt;
    BLAS_CHECK(status);
    return result.algo;
}

std::string describe(const Matmul& m, const cublasLtMatmulAlgo_t& algo) {
    const auto value = [&](cublasLtMatmulAlgoConfigAttributes_t what) {
        int32_t v = -1;
        size_t written = 0;
        cublasLtMatmulAlgoConfigGetAttribute(&algo, what, &v, sizeof v, &written);
        return v;
    };
    return fmt::format("{} x {} x {} {} -> {}{}{}: algorithm {}, tile {}, stages {}", m.rows, m.cols, m.depth, name_of(m.a.dtype), name_of(m.c.dtype),
                       m.bias ? " + bias" : "", m.accumulate == Accumulate::add ? " added" : "", value(CUBLASLT_ALGO_CONFIG_ID),
                       value(CUBLASLT_ALGO_CONFIG_TILE_ID), value(CUBLASLT_ALGO_CONFIG_STAGES_ID));
}

// Most often the cached one; another when that does not work for this number of tokens.
std::optional<cublasLtMatmulAlgo_t> algorithm_for(const Call& call) {
    const Kind kind = kind_of(call.m);
    auto& choices = library().choices;
    const auto known = choices.find(kind);
    if (known != choices.end() && call.works(known->second.algo)) return known->second.algo;
    const std::optional<cublasLtMatmulAlgo_t> algo = call.first_of_heuristic();
    if (algo && known == choices.end()) choices.emplace(kind, Choice{*algo, describe(call.m, *algo)});
    return algo;
}

}  // namespace

bool matmul(CUstream_st* stream, const Matmul& m) {
    TRIFOLD_ASSERT(m.a.dtype == m.b.dtype && (!m.bias || m.bias.dtype == m.c.dtype));
    TRIFOLD_ASSERT(m.workspace.bytes() >= matmul_workspace);
    const Call call(m);
    const std::optional<cublasLtMatmulAlgo_t> algo = algorithm_for(call);
    if (!algo && m.bias) return false;
    if (!algo)
        throw Problem(Exit::fault, fmt::format("cuBLASLt knows no algorithm for a product of {} x {} x {} ({} to {}); compute on the processor with --run.device=cpu",
                                               m.rows, m.cols, m.depth, name_of(m.a.dtype), name_of(m.c.dtype)));
    const float one = 1, beta = m.accumulate == Accumulate::add ? 1 : 0;
    BLAS_CHECK(cublasLtMatmul(library().handle, call.desc, &one, m.b.data, call.b, m.a.data, call.a, &beta, m.c.data, call.c, m.c.data, call.c, &*algo,
                              m.workspace.data, static_cast<size_t>(matmul_workspace), stream));
    return true;
}

std::vector<std::string> matmul_choices() {
    std::vector<std::string> lines;
    for (const auto& [kind, choice] : library().choices) lines.push_back(choice.text);
    return lines;
}

}  // namespace trifold::cuda
