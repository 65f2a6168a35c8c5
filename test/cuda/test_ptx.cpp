// test/cuda/test_ptx.cpp   Each wrapper of kernels/cuda/ptx.h against what the PTX manual says, as plain loops. In the emulator this
// tests the emulation; on a GPU it tests our reading of the manual, on which the emulation rests.
#include "test/catch.h"

#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <limits>

#include "kernels/cuda/check.h"
#include "kernels/tensor.h"
#include "test/cuda/ptx_kernels.h"
#include "test/unit/operands.h"

using namespace trifold;

namespace {

// Device memory with a host copy.
template <class T>
class Mirror {
public:
    explicit Mirror(std::vector<T> values) : host(std::move(values)) {
        CUDA_CHECK(cudaMalloc(&device_, bytes()));
        CUDA_CHECK(cudaMemcpy(device_, host.data(), bytes(), cudaMemcpyHostToDevice));
    }
    ~Mirror() { cudaFree(device_); }
    Mirror(const Mirror&) = delete;
    T* device() { return static_cast<T*>(device_); }
    const std::vector<T>& fetch() {
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(host.data(), device_, bytes(), cudaMemcpyDeviceToHost));
        return host;
    }
    std::vector<T> host;

private:
    size_t bytes() const { return host.size() * sizeof(T); }
    void* device_ = nullptr;
};

uint16_t half(double v) { return bf16(static_cast<float>(v)).bits; }
double value(uint16_t bits) { return static_cast<float>(std::bit_cast<bf16>(bits)); }

}  // namespace

TEST_CASE("ldmatrix hands out rows, or columns when transposed", "[ptx]") {
    std::vector<uint16_t> tile(4 * 64);
    for (size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<uint16_t>(i * 251 + 17);
    Mirror<uint16_t> in(tile);
    Mirror<uint32_t> out(std::vector<uint32_t>(384, 0xffffffffu));
    test::run_ldmatrix(nullptr, in.device(), out.device());
    const std::vector<uint32_t>& got = out.fetch();
    const auto at = [&](size_t matrix, size_t row, size_t column) { return static_cast<uint32_t>(tile[64 * matrix + 8 * row + column]); };
    for (size_t lane = 0; lane < 32; ++lane)
        for (size_t m = 0; m < 4; ++m) {
            CAPTURE(lane, m);
            const size_t g = lane / 4, t = lane % 4;
            const uint32_t plain = at(m, g, 2 * t) | at(m, g, 2 * t + 1) << 16, transposed = at(m, 2 * t, g) | at(m, 2 * t + 1, g) << 16;
            CHECK(got[4 * lane + m] == plain);
            CHECK(got[128 + 4 * lane + m] == transposed);
            if (m >= 2) continue;
            CHECK(got[256 + 2 * lane + m] == plain);
            CHECK(got[320 + 2 * lane + m] == transposed);
        }
}

// Small whole numbers: every product and sum is exact, whatever the order.
TEST_CASE("mma multiplies and adds", "[ptx]") {
    std::vector<uint16_t> a(256), b(128);
    std::vector<float> d(128);
    for (size_t i = 0; i < a.size(); ++i) a[i] = half(static_cast<double>(i * 37 % 23) - 11);
    for (size_t i = 0; i < b.size(); ++i) b[i] = half(static_cast<double>(i * 53 % 19) - 9);
    for (size_t i = 0; i < d.size(); ++i) d[i] = static_cast<float>(i) - 60;
    Mirror<uint16_t> da(a), db(b);
    Mirror<float> dd(d);
    test::run_mma(nullptr, da.device(), db.device(), dd.device());
    const std::vector<float>& got = dd.fetch();
    for (size_t i = 0; i < 16; ++i)
        for (size_t j = 0; j < 8; ++j) {
            double want = d[8 * i + j];
            for (size_t k = 0; k < 16; ++k) want += value(a[16 * i + k]) * value(b[8 * k + j]);
            CHECK(got[8 * i + j] == want);
        }
}

TEST_CASE("asynchronous copies land by their wait, zeros where nothing is copied", "[ptx]") {
    std::vector<uint32_t> numbers(128);
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint32_t>(i * 2654435761u + 1);
    Mirror<uint32_t> in(numbers), out(std::vector<uint32_t>(256, 7));
    test::run_cp_async(nullptr, in.device(), out.device());
    const std::vector<uint32_t>& got = out.fetch();
    for (size_t lane = 0; lane < 32; ++lane)
        for (size_t i = 0; i < 4; ++i) {
            const size_t from = 31 - lane;
            CHECK(got[4 * lane + i] == numbers[4 * from + i]);
            CHECK(got[128 + 4 * lane + i] == (from % 2 == 0 ? numbers[4 * from + i] : 0));
        }
}

TEST_CASE("exp2_approx is good to 2^-22", "[ptx]") {
    std::vector<float> x = {0, 1, -1, 0.5f, -126, 127, -std::numeric_limits<float>::infinity()};
    test::Numbers numbers(3);
    for (int i = 0; i < 300; ++i) x.push_back(static_cast<float>(60 * numbers.next()));
    Mirror<float> in(x), out(std::vector<float>(x.size(), -1));
    test::run_exp2(nullptr, in.device(), out.device(), static_cast<int>(x.size()));
    const std::vector<float>& got = out.fetch();
    for (size_t i = 0; i < x.size(); ++i) {
        const double want = std::exp2(static_cast<double>(x[i]));
        CAPTURE(x[i]);
        CHECK(std::abs(got[i] - want) <= 0x1p-22 * want);
    }
}

TEST_CASE("blocks take turns by release and acquire", "[ptx]") {
    constexpr int blocks = 40;
    Mirror<int> turn({0, 0}), order(std::vector<int>(blocks, -1));
    test::run_turns(nullptr, blocks, turn.device(), order.device());
    const std::vector<int>& got = order.fetch();
    for (int i = 0; i < blocks; ++i) CHECK(got[static_cast<size_t>(i)] == i + 1);
}
