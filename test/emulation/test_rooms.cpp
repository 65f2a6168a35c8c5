// test/emulation/test_rooms.cpp   GPUs whose blocks have less shared memory than the emulated one: which are used, and with which tiles.
#include "test/catch.h"

#include <cmath>

#include "kernels/cuda/room.h"
#include "kernels/cuda/runtime.h"
#include "test/cuda/attention_reference.h"
#include "test/cuda/on_device.h"
#include "test/emulation/emulator.h"

using namespace trifold;

namespace {

// The emulated GPU has this much for a block until the end of the scope.
class RoomOfGpu {
public:
    explicit RoomOfGpu(int bytes) : before_(emulation::settings()) {
        emulation::Settings s = before_;
        s.shared_bytes = bytes;
        emulation::configure(s);
    }
    ~RoomOfGpu() { emulation::configure(before_); }
    RoomOfGpu(const RoomOfGpu&) = delete;

private:
    emulation::Settings before_;
};

// Attention forward and backward. A launch that needs more than the GPU has ends the program.
void run_attention(int64_t D, DType type) {
    test::AttentionOperands x({.B = 1, .Tq = 20, .H = 1, .K = 1, .D = D}, type);
    AttentionForward f = x.forward();
    f.workspace = x.workspace_of(cuda::attention_workspace(f));
    test::on_device([](CUstream_st* s, const AttentionForward& a) { cuda::attention_forward(s, a); }, f);
    AttentionBackward b = x.backward();
    b.workspace = x.workspace_of(cuda::attention_workspace(b));
    test::on_device([](CUstream_st* s, const AttentionBackward& a) { cuda::attention_backward(s, a); }, b);
    CHECK(!std::isnan(x.dqkv[0]));
}

int tiles_for(int bytes) {
    int chosen = 0;
    cuda::with_room(bytes, [&](auto room) { chosen = room; });
    return chosen;
}

}  // namespace

TEST_CASE("attention takes the largest tiles that the GPU has room for", "[attention][room]") {
    CHECK(tiles_for(cuda::large_room + 1) == cuda::large_room);
    CHECK(tiles_for(cuda::large_room) == cuda::large_room);
    CHECK(tiles_for(cuda::large_room - 1) == cuda::medium_room);
    CHECK(tiles_for(cuda::medium_room - 1) == cuda::small_room);
    CHECK(tiles_for(cuda::small_room) == cuda::small_room);
    for (const int bytes : {cuda::small_room, cuda::medium_room})
        for (const int64_t D : {64, 96, 128})
            for (const DType type : {DType::f32, DType::bf16}) {
                CAPTURE(bytes, D, name_of(type));
                const RoomOfGpu gpu(bytes);
                CHECK(cuda::room_of_gpu() == bytes);
                run_attention(D, type);
            }
}

TEST_CASE("a GPU whose blocks have too little shared memory is refused", "[room]") {
    CHECK(cuda::probe().state == cuda::GpuState::found);
    const RoomOfGpu least(cuda::small_room);
    CHECK(cuda::probe().state == cuda::GpuState::found);
    const RoomOfGpu less(cuda::small_room - 1024);
    const cuda::Gpu gpu = cuda::probe();
    CHECK(gpu.state == cuda::GpuState::unusable);
    CHECK(gpu.text.find("98 KiB of shared memory for a block: compute capability 8.0 and 99 KiB are the least") != std::string::npos);
}

TEST_CASE("a norm that is too wide for the shared memory of a GPU is refused", "[room]") {
    const RoomOfGpu gpu(cuda::small_room);
    const int64_t C = 13000;
    test::Operand x = test::Operand::random(DType::f32, C, 1), rstd = test::Operand::filled(DType::f32, 1, 1.0), dx(DType::f32, C), dw(DType::f32, C),
                  workspace(DType::u8, cuda::norm_backward_workspace(1, C));
    std::string message;
    try {
        test::on_device(cuda::norm_backward, NormBackward{.dy_NC = x.tensor(), .x_NC = x.tensor(), .weight_C = x.tensor(), .rstd_N = rstd.tensor(), .dx_NC = dx.tensor(),
                                                          .dweight_C = dw.tensor(), .workspace = workspace.tensor(), .kind = NormKind::rmsnorm, .N = 1, .C = C});
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        message = p.what();
    }
    CHECK(message.find("a norm over 13000 columns") != std::string::npos);
    CHECK(message.find("12544 would") != std::string::npos);
}
