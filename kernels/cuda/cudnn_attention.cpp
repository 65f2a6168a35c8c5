// kernels/cuda/cudnn_attention.cpp   See cudnn_attention.h. Graphs are described through cuDNN's front end (header only), which loads the library itself.
#include "kernels/cuda/cudnn_attention.h"

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels/cuda/check.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where the front end looks for cuDNN's functions
}

namespace trifold::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using TensorPtr = std::shared_ptr<Tensor_attributes>;

// Names of the tensors of a graph; the same in both passes.
enum Uid : int64_t { q = 1, k, v, o, lse, d_o, dq, dk, dv };
using Pointers = std::unordered_map<int64_t, void*>;

enum class Pass : uint8_t { forward, backward };

// What a plan is made for.
struct Shape {
    Pass pass;
    bool repeatable;
    int64_t B, T, H, K, D, q_stride, kv_stride, q_batch_stride, kv_batch_stride, window;
    float scale;
    auto operator<=>(const Shape&) const = default;
};
template <class Args> Shape shape_of(Pass pass, int64_t T, const Args& a) {
    return {pass, a.by.repeatable, a.B, T, a.H, a.K, a.D, a.q_stride, a.kv_stride, a.q_batch_stride, a.kv_batch_stride, a.window < T ? a.window : 0, a.scale};
}
Shape shape_of(const AttentionForward& a) {
    Shape s = shape_of(Pass::forward, a.Tq, a);
    s.repeatable = true;  // always
    return s;
}
Shape shape_of(const AttentionBackward& a) { return shape_of(Pass::backward, a.T, a); }

[[noreturn]] void refuse(Exit code, const std::string& why) {
    throw Problem(code, "cuDNN's attention: " + why + "; --run.attention=own computes with our own");
}
void check(fe::error_object e, Exit code = Exit::usage) {
    if (e.is_bad()) refuse(code, e.get_message().substr(0, e.get_message().find('\n')));
}

// The library, its version, and why it cannot be used.
struct Library {
    std::string problem, version;
    Library() {
        // The front end calls the CUDA runtime through a library of its own choice, and warns where it finds two.
        const std::string runtime = "libcudart.so." + std::to_string(CUDART_VERSION / 1000);
        setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", runtime.c_str(), 0);
        fe::cudnn_dlhandle = load("libcudnn.so.9");
        if (!fe::cudnn_dlhandle || !load(std::getenv("CUDNN_FRONTEND_CUDART_LIB_NAME"))) return;
        const size_t n = fe::detail::get_backend_version();
        version = std::to_string(n / 10000) + "." + std::to_string(n / 100 % 100) + "." + std::to_string(n % 100);
        if (n < 91800) problem = "cuDNN " + version + " is here, and 9.18 or newer is needed";
    }

private:
    void* load(const char* name) {
        void* const handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!handle) problem = std::string(name) + " cannot be loaded (" + dlerror() + ")";
        return handle;
    }
};
const Library& library() {
    static const Library instance;
    return instance;
}

// The graph of one pass over tensors as models lay them out: rows of heads, q and k, v with strides of their own, o and do dense.
class Graph {
public:
    Graph(const Shape& shape, int compute_capability) : s_(shape) {
        graph_.set_sm_version(compute_capability);  // first: parts of a graph take what it knows when they are made
        graph_.set_io_data_type(fe::DataType_t::BFLOAT16).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
        s_.pass == Pass::forward ? describe_forward() : describe_backward();
    }
    // For the GPU of `handle`, or one that is only described.
    void plan(cudnnHandle_t handle) {
        check(graph_.validate());
        check(graph_.build_operation_graph(handle));
        make_plan();
    }
    void plan(const std::shared_ptr<fe::DeviceProperties>& device) {
        graph_.set_device_properties(device);
        check(graph_.validate());
        check(graph_.build_operation_graph());
        make_plan();
    }
    int64_t workspace() const { return workspace_; }
    void run(cudnnHandle_t handle, Pointers pointers, void* workspace) const { check(graph_.execute(handle, pointers, workspace), Exit::fault); }

private:
    using Dims = std::vector<int64_t>;
    Dims heads(int64_t n) const { return {s_.B, n, s_.T, s_.D}; }
    Dims q_strides() const { return {s_.q_batch_stride, s_.D, s_.q_stride, 1}; }
    Dims kv_strides() const { return {s_.kv_batch_stride, s_.D, s_.kv_stride, 1}; }
    Dims o_strides() const { return {s_.T * s_.H * s_.D, s_.D, s_.H * s_.D, 1}; }

    TensorPtr input(Uid uid, const Dims& dims, const Dims& strides) {
        return graph_.tensor(Tensor_attributes().set_uid(uid).set_dim(dims).set_stride(strides));
    }
    static Tensor_attributes& output(const TensorPtr& t, Uid uid, const Dims& dims, const Dims& strides) {
        return t->set_output(true).set_uid(uid).set_dim(dims).set_stride(strides);
    }
    // Query i sees key j iff 0 <= i - j < window.
    template <class Options> void mask(Options& options) const {
        options.set_attn_scale(s_.scale).set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
        if (s_.window > 0) options.set_diagonal_band_left_bound(s_.window);
    }
    Dims lse_dims() const { return {s_.B, s_.H, s_.T, 1}; }
    Dims lse_strides() const { return {s_.H * s_.T, s_.T, 1, 1}; }

    void describe_forward() {
        const TensorPtr qt = input(q, heads(s_.H), q_strides()), kt = input(k, heads(s_.K), kv_strides()), vt = input(v, heads(s_.K), kv_strides());
        auto options = fe::graph::SDPA_attributes().set_generate_stats(true);
        mask(options);
        const auto [out, stats] = graph_.sdpa(qt, kt, vt, options);
        output(out, o, heads(s_.H), o_strides());
        output(stats, lse, lse_dims(), lse_strides()).set_data_type(fe::DataType_t::FLOAT);
    }
    void describe_backward() {
        const TensorPtr qt = input(q, heads(s_.H), q_strides()), kt = input(k, heads(s_.K), kv_strides()), vt = input(v, heads(s_.K), kv_strides());
        const TensorPtr ot = input(o, heads(s_.H), o_strides()), dot = input(d_o, heads(s_.H), o_strides()), stats = input(lse, lse_dims(), lse_strides());
        stats->set_data_type(fe::DataType_t::FLOAT);
        auto options = fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(s_.repeatable);
        mask(options);
        const auto [dqt, dkt, dvt] = graph_.sdpa_backward(qt, kt, vt, ot, dot, stats, options);
        output(dqt, dq, heads(s_.H), q_strides());
        output(dkt, dk, heads(s_.K), kv_strides());
        output(dvt, dv, heads(s_.K), kv_strides());
    }
    void make_plan() {
        check(graph_.create_execution_plans({fe::HeurMode_t::A}));
        check(graph_.check_support());
        check(graph_.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE));
        check(graph_.get_workspace_size(workspace_));
    }

    Shape s_;
    fe::graph::Graph graph_;
    int64_t workspace_ = 0;  // bytes
};

// The front end also throws.
template <class Body> auto guarded(const Body& body) {
    if (!library().problem.empty()) refuse(Exit::usage, library().problem);
    try {
        return body();
    } catch (const Problem&) {
        throw;
    } catch (const std::exception& e) {
        refuse(Exit::fault, e.what());
    }
}

// cuDNN's handle of the GPU that this process computes on, and the plans made so far.
class Plans {
public:
    Plans() {
        int device = 0, major = 0, minor = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        compute_capability_ = 10 * major + minor;
        if (const cudnnStatus_t status = fe::detail::create_handle(&handle_); status != CUDNN_STATUS_SUCCESS)
            refuse(Exit::fault, std::string("cudnnCreate: ") + fe::detail::get_error_string(status));
    }
    Plans(const Plans&) = delete;

    const Graph& at(const Shape& shape) {
        const auto known = plans_.find(shape);
        if (known != plans_.end()) return known->second;
        Graph graph(shape, compute_capability_);
        graph.plan(handle_);
        return plans_.emplace(shape, std::move(graph)).first->second;
    }
    void run(CUstream_st* stream, const Shape& shape, const Pointers& pointers, const Tensor& workspace) {
        const Graph& graph = at(shape);
        TRIFOLD_ASSERT(workspace.bytes() >= graph.workspace());
        if (const cudnnStatus_t status = fe::detail::set_stream(handle_, stream); status != CUDNN_STATUS_SUCCESS)
            refuse(Exit::fault, std::string("cudnnSetStream: ") + fe::detail::get_error_string(status));
        graph.run(handle_, pointers, workspace.data);
    }

private:
    cudnnHandle_t handle_ = nullptr;
    int compute_capability_ = 0;
    std::map<Shape, Graph> plans_;
};
Plans& plans() {
    static Plans& instance = *new Plans;  // never destroyed: when a process ends, CUDA may be gone before it
    return instance;
}

template <class Args> int64_t workspace_on(const std::string& device, int compute_capability, const Args& a) {
    return guarded([&] {
        const auto properties = std::make_shared<fe::DeviceProperties>();
        check(properties->deserialize({device.begin(), device.end()}));
        Graph graph(shape_of(a), compute_capability);
        graph.plan(properties);
        return graph.workspace();
    });
}

}  // namespace

std::string cudnn_problem() { return library().problem; }
std::string cudnn_version() { return library().version; }

int64_t cudnn_attention_workspace(const AttentionForward& a) {
    return guarded([&] { return plans().at(shape_of(a)).workspace(); });
}
int64_t cudnn_attention_workspace(const AttentionBackward& a) {
    return guarded([&] { return plans().at(shape_of(a)).workspace(); });
}
int64_t cudnn_attention_workspace_on(const std::string& device, int compute_capability, const AttentionForward& a) { return workspace_on(device, compute_capability, a); }
int64_t cudnn_attention_workspace_on(const std::string& device, int compute_capability, const AttentionBackward& a) { return workspace_on(device, compute_capability, a); }

void cudnn_attention_forward(CUstream_st* stream, const AttentionForward& a) {
    TRIFOLD_ASSERT(a.lse_BHT);
    guarded([&] {
        plans().run(stream, shape_of(a), {{q, a.q_NHD.data}, {k, a.k_NKD.data}, {v, a.v_NKD.data}, {o, a.o_NHD.data}, {lse, a.lse_BHT.data}}, a.workspace);
    });
}
void cudnn_attention_backward(CUstream_st* stream, const AttentionBackward& a) {
    guarded([&] {
        plans().run(stream, shape_of(a),
                    {{q, a.q_NHD.data}, {k, a.k_NKD.data}, {v, a.v_NKD.data}, {o, a.o_NHD.data}, {lse, a.lse_BHT.data}, {d_o, a.do_NHD.data},
                     {dq, a.dq_NHD.data}, {dk, a.dk_NKD.data}, {dv, a.dv_NKD.data}},
                    a.workspace);
    });
}

}  // namespace trifold::cuda
