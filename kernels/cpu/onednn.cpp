#include "kernels/cpu/onednn.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <vector>

namespace trifold::cpu {
namespace {

constexpr size_t most_primitives = 256;  // sampling sees many lengths

using Description = dnnl::memory::desc;
using Attributes = dnnl::primitive_attr;

dnnl::memory::data_type type_of(const Tensor& t) {
    TRIFOLD_ASSERT(t.dtype == DType::f32 || t.dtype == DType::bf16);
    return t.dtype == DType::f32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

struct Descriptions {
    Description a, b, bias, c;
    explicit Descriptions(const Gemm& g)
        : a({g.rows, g.depth}, type_of(g.a.data), strides(g.a.stride, g.a.along == Along::depth)),
          b({g.depth, g.cols}, type_of(g.b.data), strides(g.b.stride, g.b.along == Along::outer)),
          c({g.rows, g.cols}, type_of(g.c_RC), strides(g.cols, true)) {
        if (g.bias_C) bias = Description({1, g.cols}, type_of(g.bias_C), strides(g.cols, true));
    }
    static dnnl::memory::dims strides(int64_t stride, bool row_major) {
        return row_major ? dnnl::memory::dims{stride, 1} : dnnl::memory::dims{1, stride};
    }
};

// The one place where versions 2 and 3 of the library differ for us.
dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Descriptions& d, const Attributes& attributes,
                                      bool bias) {
#if DNNL_VERSION_MAJOR >= 3
    if (bias) return {engine, d.a, d.b, d.bias, d.c, attributes};
    return {engine, d.a, d.b, d.c, attributes};
#else
    if (bias) return {dnnl::matmul::desc(d.a, d.b, d.bias, d.c), attributes, engine};
    return {dnnl::matmul::desc(d.a, d.b, d.c), attributes, engine};
#endif
}

Attributes attributes_for(const Gemm& g) {
    Attributes attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (g.accumulate == Accumulate::add) {
        dnnl::post_ops add;
        add.append_sum(1.0f);
        attributes.set_post_ops(add);
    }
    return attributes;
}

using Key = std::array<int64_t, 12>;
Key key_of(const Gemm& g) {
    const auto number = [](auto e) { return static_cast<int64_t>(e); };
    return {g.rows,
            g.cols,
            g.depth,
            g.a.stride,
            g.b.stride,
            number(g.a.along),
            number(g.b.along),
            number(g.a.data.dtype),
            number(g.c_RC.dtype),
            g.bias_C ? number(g.bias_C.dtype) : -1,
            number(g.accumulate),
            omp_get_max_threads()};
}

}  // namespace

bool onednn_has_amx() {
    const auto amx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);  // a set of bits that larger sets contain
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & amx) == amx;
}

struct OnednnProducts::Cache {
    struct Entry {
        dnnl::matmul primitive;
        std::unordered_map<int, dnnl::memory> arguments;
        Description scratchpad;
    };
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
    std::map<Key, Entry> entries;
    std::vector<std::byte> scratchpad;

    Entry make(const Gemm& g) {
        const Descriptions d(g);
        const auto about = describe(engine, d, attributes_for(g), static_cast<bool>(g.bias_C));
        Entry e{dnnl::matmul(about), {}, about.scratchpad_desc()};
        const auto argument = [&](int name, const Description& of) {
            e.arguments.emplace(name, dnnl::memory(of, engine, nullptr));
        };
        argument(DNNL_ARG_SRC, d.a);
        argument(DNNL_ARG_WEIGHTS, d.b);
        argument(DNNL_ARG_DST, d.c);
        argument(DNNL_ARG_SCRATCHPAD, e.scratchpad);
        if (g.bias_C) argument(DNNL_ARG_BIAS, d.bias);
        scratchpad.resize(std::max(scratchpad.size(), e.scratchpad.get_size() + 64));
        return e;
    }
    // Null where the library has no implementation.
    Entry* find(const Gemm& g) {
        const Key key = key_of(g);
        if (const auto found = entries.find(key); found != entries.end()) return &found->second;
        if (entries.size() >= most_primitives) entries.clear();
        try {
            return &entries.emplace(key, make(g)).first->second;
        } catch (const dnnl::error& e) {
            if (e.status == dnnl_unimplemented) return nullptr;
            throw;
        }
    }
    void* aligned_scratchpad() {
        return scratchpad.data() + (64 - reinterpret_cast<uintptr_t>(scratchpad.data()) % 64) % 64;
    }
};

OnednnProducts::OnednnProducts() : cache_(std::make_unique<Cache>()) {}
OnednnProducts::~OnednnProducts() = default;

bool OnednnProducts::run(const Gemm& g) {
    TRIFOLD_ASSERT(g.a.data.dtype == g.b.data.dtype && g.rows > 0 && g.cols > 0 && g.depth > 0);
    Cache::Entry* const entry = cache_->find(g);
    if (!entry) return false;
    Cache::Entry& e = *entry;
    e.arguments.at(DNNL_ARG_SRC).set_data_handle(g.a.data.data);
    e.arguments.at(DNNL_ARG_WEIGHTS).set_data_handle(g.b.data.data);
    e.arguments.at(DNNL_ARG_DST).set_data_handle(g.c_RC.data);
    e.arguments.at(DNNL_ARG_SCRATCHPAD).set_data_handle(cache_->aligned_scratchpad());
    if (g.bias_C) e.arguments.at(DNNL_ARG_BIAS).set_data_handle(g.bias_C.data);
    e.primitive.execute(cache_->stream, e.arguments);
    cache_->stream.wait();
    return true;
}

int64_t OnednnProducts::scratch_bytes() const { return static_cast<int64_t>(cache_->scratchpad.size()); }

}  // namespace trifold::cpu
