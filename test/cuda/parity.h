// test/cuda/parity.h   An operation on the device against the same operation on the CPU, with the same operands.
//
// Units    1 is what the two may differ by: `sums` times the largest value of the tensor (fp32 sums in another order,
//          fused multiply-adds, other last bits of exp), and one rounding step of the type (both round once, from fp32
//          values that differ by so little; when these lie on two sides of a boundary, the results are neighbours):
//          2^-7 of a bf16, 2^-22 of an fp32 (two steps: it is not rounded from something wider).
// Repeats  The device runs twice; other bytes the second time count as infinitely far.
// A NaN anywhere in what either side wrote counts as infinitely far, so outputs that start as NaN must be written.
#pragma once
#include "test/cuda/on_device.h"
#include "test/unit/operands.h"

namespace trifold::test {

// The bytes of all views that an operation writes, workspace excepted: saved, compared, put back.
template <class Args>
class Written {
public:
    explicit Written(const Args& args) {
        const void* workspace = nullptr;
        if constexpr (requires { args.workspace; }) workspace = args.workspace.data;
        const auto add = [&](const auto& view) {
            if (view && view.access != Access::read && view.data != workspace) views_.push_back(view);
        };
        std::apply([&](const auto&... v) { (add(v), ...); }, args.views());
        for (const Tensor& t : views_) {
            const auto* begin = static_cast<const std::byte*>(t.data);
            saved_.emplace_back(begin, begin + t.bytes());
        }
    }
    void restore() const {
        for (size_t i = 0; i < views_.size(); ++i)
            std::copy(saved_[i].begin(), saved_[i].end(), static_cast<std::byte*>(views_[i].data));
    }
    bool operator==(const Written& b) const { return saved_ == b.saved_; }

    // How far these bytes are from `want`, in units.
    double units_from(const Written& want, double sums) const {
        double result = 0;
        for (size_t i = 0; i < views_.size(); ++i)
            result = std::max(result, units(views_[i].dtype, saved_[i], want.saved_[i], sums));
        return result;
    }

private:
    static Values values(DType type, const std::vector<std::byte>& bytes) {
        Operand o(type, static_cast<int64_t>(bytes.size()) / size_of(type));
        std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(o.tensor().data));
        return o.values();
    }
    static double units(DType type, const std::vector<std::byte>& got_bytes, const std::vector<std::byte>& want_bytes,
                        double sums) {
        const Values got = values(type, got_bytes), want = values(type, want_bytes);
        const double step = type == DType::bf16 ? 0x1p-7 : type == DType::f32 ? 0x1p-22 : 0x1p-50;
        double largest = 0, result = 0;
        for (const double w : want) largest = std::max(largest, std::abs(w));
        for (size_t i = 0; i < want.size(); ++i) {
            const double unit = std::abs(got[i] - want[i]) / (step * std::abs(want[i]) + sums * largest + 1e-37);
            if (!(unit <= result)) result = std::isnan(unit) ? std::numeric_limits<double>::infinity() : unit;
        }
        return result;
    }

    std::vector<Tensor> views_;
    std::vector<std::vector<std::byte>> saved_;
};

// Runs the operation on both. What the device wrote is left in the operands. on_gpu(stream, args) launches it.
template <class OnGpu, class Args>
double parity_of(void (*on_cpu)(const Args&), const OnGpu& on_gpu, const Args& args, double sums) {
    const Written<Args> before(args);
    on_cpu(args);
    const Written<Args> want(args);
    before.restore();
    on_device(on_gpu, args);
    const Written<Args> got(args);
    before.restore();
    on_device(on_gpu, args);
    return got == Written<Args>(args) ? got.units_from(want, sums) : std::numeric_limits<double>::infinity();
}

template <class Args>
double parity(void (*on_cpu)(const Args&), void (*on_gpu)(CUstream_st*, const Args&), const Args& args, double sums) {
    return parity_of(on_cpu, on_gpu, args, sums);
}

// An operation whose floating-point views begin one element behind an aligned address; they must not overlap.
template <auto operation, class Args>
void unaligned(CUstream_st* stream, const Args& args) {
    Args shifted = args;
    std::vector<void*> copies;
    const auto each = [](const Args& a, auto&& visit) {
        std::apply([&](const auto&... v) { (visit(v), ...); }, a.views());
    };
    const auto moves = [](const Tensor& t) { return t && (t.dtype == DType::f32 || t.dtype == DType::bf16); };
    each(shifted, [&](const Tensor& t) {
        if (!moves(t)) return;
        CUDA_CHECK(cudaMalloc(&copies.emplace_back(), static_cast<size_t>(t.bytes() + size_of(t.dtype))));
        void* const to = static_cast<std::byte*>(copies.back()) + size_of(t.dtype);
        CUDA_CHECK(cudaMemcpyAsync(to, t.data, static_cast<size_t>(t.bytes()), cudaMemcpyDeviceToDevice, stream));
        const_cast<Tensor&>(t).data = to;
    });
    cuda::operation_begin("unaligned", accesses_of(shifted));
    operation(stream, shifted);
    cuda::operation_end();
    size_t next = 0;
    each(args, [&](const auto& v) {
        if (!moves(v)) return;
        const std::byte* const from = static_cast<std::byte*>(copies[next++]) + size_of(v.dtype);
        if (v.access != Access::read)
            CUDA_CHECK(cudaMemcpyAsync(v.data, from, static_cast<size_t>(v.bytes()), cudaMemcpyDeviceToDevice, stream));
    });
    CUDA_CHECK(cudaStreamSynchronize(stream));
    for (void* copy : copies) CUDA_CHECK(cudaFree(copy));
}

// Scratch memory that is large enough on both sides.
inline Operand scratch(int64_t cpu_bytes, int64_t cuda_bytes) {
    return Operand::filled(DType::u8, std::max<int64_t>({1, cpu_bytes, cuda_bytes}), 255);
}

}  // namespace trifold::test
