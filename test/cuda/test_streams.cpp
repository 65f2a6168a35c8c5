// test/cuda/test_streams.cpp   Streams, tickets and memory of the device through the stream engine.
//
// In the emulator every wait that is missing must show: the tests plant such faults and look for the report.
#include "test/catch.h"

#include <atomic>

#include "kernels/arena.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"
#if defined(TRIFOLD_EMULATION)
#include "test/emulation/cuda_runtime.h"
#endif
#include "test/unit/operands.h"

using namespace trifold;
using test::Operand;

namespace {

struct Buffers {
    Tensor a, b, c;
    explicit Buffers(Arena& arena)
        : a(arena.reserve(MemoryClass::workspace, DType::f32, 64)), b(arena.reserve(MemoryClass::workspace, DType::f32, 64)),
          c(arena.reserve(MemoryClass::workspace, DType::f32, 64)) {}
};

// Three of them, of 64 elements, on the device.
class Memory {
    Arena plan_{Device::cuda};
    Buffers planned_{plan_};
    Arena arena_{plan_, "test"};

public:
    Buffers buffers{arena_};
};

struct TwoStreams {
    StreamEngine engine{StreamMode::normal, Device::cuda};
    Stream& compute = engine.add("compute", StreamKind::compute);
    Stream& dp = engine.add("dp", StreamKind::communication);
};

}  // namespace

TEST_CASE("memory of the device starts as zero and copies both ways", "[streams]") {
    const Memory memory;
    const Buffers& buffers = memory.buffers;
    TwoStreams s;
    Operand numbers = Operand::random(DType::f32, 64, 1), back = Operand::nans(DType::f32, 64), zeros = back;
    copy(s.compute, {.x = numbers.tensor(), .y = buffers.a});
    copy(s.compute, {.x = buffers.b, .y = zeros.tensor()});
    s.engine.wait(copy(s.compute, {.x = buffers.a, .y = back.tensor()}));
    CHECK(back.bytes() == numbers.bytes());
    CHECK(zeros.values() == test::Values(64, 0.0));
}

TEST_CASE("a stream that follows a ticket sees what it wrote", "[streams]") {
    const Memory memory;
    const Buffers& buffers = memory.buffers;
    TwoStreams s;
    Operand numbers = Operand::random(DType::f32, 64, 1), back = Operand::nans(DType::f32, 64);
    for (int round = 0; round < 200; ++round) {  // more rounds than events are kept
        const Ticket filled = copy(s.compute, {.x = numbers.tensor(), .y = buffers.a});
        s.dp.follow(filled);
        const Ticket moved = copy(s.dp, {.x = buffers.a, .y = buffers.b});
        s.compute.follow(moved);
        copy(s.compute, {.x = buffers.b, .y = buffers.c});
    }
    s.engine.wait(copy(s.compute, {.x = buffers.c, .y = back.tensor()}));
    CHECK(back.bytes() == numbers.bytes());
    s.engine.wait(Ticket());
    s.engine.wait_all();
}

TEST_CASE("communication by the host takes its place between kernels", "[streams]") {
    const Memory memory;
    const Buffers& buffers = memory.buffers;
    TwoStreams s;
    Stream& by_host = s.engine.add("by the host", StreamKind::host_communication);
    const cuda::Copier copier;
    Operand numbers = Operand::random(DType::f32, 64, 1), back = Operand::nans(DType::f32, 64);
    copy(s.compute, {.x = numbers.tensor(), .y = buffers.a});
    for (int round = 0; round < 100; ++round) {
        by_host.follow(copy(s.compute, {.x = buffers.a, .y = buffers.b}));
        const Ticket doubled = by_host.submit("doubled", {}, [&] {
            float x[64];
            copier.copy(x, buffers.b.data, sizeof x);
            for (float& v : x) v = round == 0 ? 2 * v : v;
            copier.copy(buffers.c.data, x, sizeof x);
        });
        s.compute.follow(doubled);
        copy(s.compute, {.x = buffers.c, .y = buffers.a});
    }
    s.engine.wait(copy(s.compute, {.x = buffers.a, .y = back.tensor()}));
    for (size_t i = 0; i < 64; ++i) CHECK(back.values()[i] == 2 * numbers.values()[i]);

    // What such a thread throws reaches whoever waits.
    const Ticket failed = by_host.submit("fails", {}, [] { throw Problem(Exit::fault, "no peer"); });
    CHECK_THROWS_AS(s.compute.follow(failed), Problem);
    s.engine.abandon();
}

TEST_CASE("a wait for the GPU is watched", "[streams]") {
    const Memory memory;
    const Buffers& buffers = memory.buffers;
    TwoStreams s;
    int waits = 0;
    bool broken = false;
    s.engine.watch([&](double waited_s, bool over) {
        CHECK(waited_s >= 0);
        waits += over;
        if (broken) throw Problem(Exit::fault, "a group has failed");
    });
    s.engine.wait(zero(s.compute, {.y = buffers.a}));
    CHECK(waits == 1);
    broken = true;
    CHECK_THROWS_AS(s.engine.wait(zero(s.compute, {.y = buffers.b})), Problem);  // a failed collective looks finished
    s.engine.abandon();
}

TEST_CASE("threads that communicate watch their waits for the GPU", "[streams]") {
    const Memory memory;
    const Buffers& buffers = memory.buffers;
    TwoStreams s;
    Stream& by_host = s.engine.add("by the host", StreamKind::host_communication);
    std::atomic<bool> ran = false;
    s.engine.watch([](double, bool) { throw Problem(Exit::fault, "a rank has failed"); });
    by_host.follow(zero(s.compute, {.y = buffers.a}));
    const Ticket after = by_host.submit("sends", {}, [&] { ran = true; });
    CHECK_THROWS_AS(s.engine.wait(after), Problem);
    CHECK(!ran);
    s.engine.abandon();
}

TEST_CASE("operations are timed for the observer", "[streams]") {
    const Memory memory;
    const Buffers& buffers = memory.buffers;
    TwoStreams s;
    std::vector<std::string> seen;
    s.engine.observe([&](const Stream& stream, const char* name, StreamTime begin, StreamTime end) {
        CHECK(begin <= end);
        seen.push_back(stream.name() + " " + name);
    });
    s.dp.follow(zero(s.compute, {.y = buffers.a}));
    copy(s.dp, {.x = buffers.a, .y = buffers.b});
    s.engine.wait_all();
    s.engine.wait_all();
    std::sort(seen.begin(), seen.end());
    CHECK(seen == std::vector<std::string>{"compute zero", "dp copy"});
}

TEST_CASE("a GPU that does not have enough memory is refused with sizes", "[streams]") {
    Arena plan(Device::cuda);
    plan.reserve(MemoryClass::params, DType::f32, int64_t{1} << 50);
    try {
        Arena arena(plan, "this model");
        FAIL("not refused");
    } catch (const Problem& p) {
        CHECK(p.code() == Exit::usage);
        CHECK(std::string(p.what()).find("this model needs 4194304.00 GiB on the GPU (params 4194304.00)") == 0);
    }
}

#if defined(TRIFOLD_EMULATION)
TEST_CASE("a missing wait between streams is reported", "[streams]") {
    for (const bool planted : {false, true}) {
        const Memory memory;
        const Buffers& buffers = memory.buffers;
        TwoStreams s;
        const size_t before = emulation::unordered_accesses().size();
        Operand numbers = Operand::random(DType::f32, 64, 1), back = Operand::nans(DType::f32, 64);
        s.engine.wait(copy(s.compute, {.x = numbers.tensor(), .y = buffers.a}));
        const Ticket moved = copy(s.dp, {.x = buffers.a, .y = buffers.b});
        if (!planted) s.compute.follow(moved);
        s.engine.wait(copy(s.compute, {.x = buffers.b, .y = back.tensor()}));
        s.engine.wait_all();
        const std::vector<std::string> findings = emulation::unordered_accesses();
        REQUIRE(findings.size() == before + planted);
        CHECK((back.bytes() == numbers.bytes()) == !planted);  // the copy really was too early
        if (planted) CHECK(findings.back().find("cudaMemcpyAsync") != std::string::npos);
    }
}

TEST_CASE("device memory that is freed too early is reported", "[streams]") {
    TwoStreams s;
    const size_t before = emulation::unordered_accesses().size();
    float host[64] = {};
    void* memory = cuda::allocate(256);
    copy(s.dp, {.x = Tensor{memory, DType::f32, 64}, .y = Tensor{host, DType::f32, 64}});
    cuda::release(memory);
    CHECK(emulation::unordered_accesses().size() == before + 1);
    memory = cuda::allocate(256);
    s.engine.wait(copy(s.dp, {.x = Tensor{memory, DType::f32, 64}, .y = Tensor{host, DType::f32, 64}}));
    cuda::release(memory);
    CHECK(emulation::unordered_accesses().size() == before + 1);
}
#endif
