#include "test/emulation/block.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "test/emulation/race_detector.h"

// Static shared memory of all kernels; compilers that ignore the section attribute leave it empty.
extern "C" std::byte __start_emulation_shared[] __attribute__((weak)), __stop_emulation_shared[] __attribute__((weak));

namespace trifold::emulation {
namespace {

Fiber host;
int64_t stop_count = 0;
uint64_t random_state = 0;
std::vector<BufferAccess> declared;

constexpr const char* schedule_names[] = {"random", "fifo", "lifo", "warp_priority"};

Settings from_environment() {
    Settings s;
    if (const char* name = std::getenv("EMULATION_SCHEDULE")) {
        const auto found = std::find(std::begin(schedule_names), std::end(schedule_names), std::string_view(name));
        if (found == std::end(schedule_names)) die("EMULATION_SCHEDULE must be random, fifo, lifo or warp_priority");
        s.schedule = static_cast<Schedule>(found - std::begin(schedule_names));
    }
    if (const char* seed = std::getenv("EMULATION_SEED")) s.seed = std::strtoull(seed, nullptr, 10);
    return s;
}

Settings& configured() {
    static Settings s = [] {
        const Settings first = from_environment();
        random_state = first.seed;
        return first;
    }();
    return s;
}

std::string coordinates(unsigned x, unsigned y, unsigned z) {
    return "(" + std::to_string(x) + "," + std::to_string(y) + "," + std::to_string(z) + ")";
}

// "3 threads from 5 on wait for __syncwarp at k.cu:12", one line for each place.
std::string waiting_threads() {
    std::map<std::string, std::pair<int, int>> places;  // threads, first
    for (int i = 0; i < block.threads; ++i) {
        const Thread& t = block.thread[static_cast<size_t>(i)];
        if (t.wait == Wait::none || t.wait == Wait::ended) continue;
        auto& [count, first] = places.try_emplace(t.site.text(), 0, i).first->second;
        ++count;
    }
    std::string text;
    for (const auto& [place, threads] : places) {
        text += "\n  " + std::to_string(threads.first) + " threads (first: number " + std::to_string(threads.second) + ") wait in " + place;
    }
    return text;
}

// ---------------------------------------------------------------- one thread after the other

Thread& next_thread() {
    if (block.ready.empty()) die("deadlock: no thread of the block can run" + waiting_threads());
    return block.thread[static_cast<size_t>(block.ready.pop())];
}

void go_to(Thread& next) {
    ++stop_count;
    current = &next;
}

void release_barrier_if_complete() {
    if (block.arrived == 0 || block.arrived < block.live) return;
    block.completed_arrivals = std::exchange(block.arrived, 0);
    block.completed_votes = std::exchange(block.votes, 0);
    races::block_barrier();
    for (int i = 0; i < block.threads; ++i) {
        Thread& t = block.thread[static_cast<size_t>(i)];
        if (t.wait == Wait::block) wake(t);
    }
}

void end_thread() {
    Thread& t = *current;
    if (!t.copies.empty()) die("a thread ends with cp.async copies that it has not waited for");
    t.wait = Wait::ended;
    Warp& warp = block.warps[static_cast<size_t>(t.warp)];
    warp.ended |= 1u << t.lane;
    for (int i = 0; i < warp.open; ++i) {
        const Collective& c = warp.collectives[static_cast<size_t>(i)];
        if (c.mask & warp.ended) die("a lane ends although others wait for it in " + c.site.text());
    }
    --block.live;
    release_barrier_if_complete();
    if (block.live == 0) {
        current = nullptr;
        Fiber::change(t.fiber, host, Fiber::Leaving::for_ever);
    } else {
        Thread& next = next_thread();
        go_to(next);
        Fiber::change(t.fiber, next.fiber, Fiber::Leaving::for_ever);
    }
}

void thread_entry() {
    Fiber::arrived(current->fiber);
    block.launch->thread();
    end_thread();
}

// ---------------------------------------------------------------- blocks

void prepare_threads() {
    const int warps = (block.threads + warp_lanes - 1) / warp_lanes;
    block.ready.clear(configured().schedule, warps);
    for (int w = 0; w < warps; ++w) block.warps[static_cast<size_t>(w)].ended = 0;
    if (block.threads % warp_lanes) block.warps[static_cast<size_t>(warps - 1)].ended = ~0u << block.threads % warp_lanes;
    for (int i = 0; i < block.threads; ++i) {
        Thread& t = block.thread[static_cast<size_t>(i)];
        const unsigned n = static_cast<unsigned>(i);
        t.index = {n % block.dim.x, n / block.dim.x % block.dim.y, n / (block.dim.x * block.dim.y)};
        t.number = i;
        t.warp = i / warp_lanes;
        t.lane = i % warp_lanes;
        t.open_group = 0;
        t.fiber.start(thread_entry, i);
        wake(t);
    }
}

void run_block(uint3 index) {
    constexpr int nan_bytes = 0xff;  // as fp32, bf16 and fp64 a NaN, as an integer -1
    block.index = index;
    block.live = block.threads;
    block.arrived = block.votes = 0;
    if (__start_emulation_shared)
        std::memset(__start_emulation_shared, nan_bytes, static_cast<size_t>(__stop_emulation_shared - __start_emulation_shared));
    std::memset(block.dynamic_shared, nan_bytes, block.launch->shared_bytes);
    races::block_begins();
    prepare_threads();
    Thread& first = next_thread();
    go_to(first);
    Fiber::change(host, first.fiber);
}

std::vector<uint64_t> block_order(uint64_t blocks) {
    std::vector<uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), uint64_t{0});
    const Schedule schedule = configured().schedule;
    if (schedule == Schedule::lifo) std::reverse(order.begin(), order.end());
    if (schedule == Schedule::random || schedule == Schedule::warp_priority) {
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(static_cast<uint32_t>(i))]);
    }
    return order;
}

}  // namespace

// ---------------------------------------------------------------- launches

void run_grid(const Launch& launch) {
    if (current) die("a kernel starts inside a kernel");
    block.launch = &launch;
    block.dim = launch.threads;
    block.grid = launch.blocks;
    block.threads = static_cast<int>(launch.threads.x * launch.threads.y * launch.threads.z);
    void* memory = nullptr;  // a fresh piece of exactly this size, so that the address sanitizer knows its ends
    if (posix_memalign(&memory, 128, std::max<size_t>(launch.shared_bytes, 1)) != 0) die("no memory for dynamic shared memory");
    const std::unique_ptr<void, decltype(&std::free)> owner(memory, &std::free);
    block.dynamic_shared = static_cast<std::byte*>(memory);
    races::grid_begins();
    const uint64_t row = launch.blocks.x, plane = row * launch.blocks.y;
    for (const uint64_t b : block_order(plane * launch.blocks.z)) {
        run_block({static_cast<unsigned>(b % row), static_cast<unsigned>(b % plane / row), static_cast<unsigned>(b / plane)});
    }
    block.dynamic_shared = nullptr;
    block.launch = nullptr;
}

void enqueue(CUstream_st* stream, Launch launch) {
    const dim3 b = launch.blocks, t = launch.threads;
    const auto refuse = [&](const std::string& why) {
        die(std::string(launch.kernel) + " cannot be launched with " + coordinates(b.x, b.y, b.z) + " blocks of " +
            coordinates(t.x, t.y, t.z) + " threads: " + why);
    };
    if (uint64_t{t.x} * t.y * t.z > max_threads || t.z > 64) refuse("a block has at most 1024 threads, 64 in z");
    if (t.x * t.y * t.z == 0 || b.x == 0 || b.y == 0 || b.z == 0) refuse("nothing may be empty");
    if (b.x > 0x7fffffffu || b.y > 65535 || b.z > 65535) refuse("a grid has at most 2^31 - 1 blocks in x and 65535 in y and z");
    if (launch.shared_bytes > static_cast<size_t>(configured().shared_bytes)) refuse(std::to_string(launch.shared_bytes) + " bytes of shared memory are too many");
    launch.declared = declared;
    const char* kernel = launch.kernel;
    submit(stream, kernel, [launch = std::make_shared<const Launch>(std::move(launch))] { run_grid(*launch); });
}

__attribute__((weak)) void submit(CUstream_st*, const char*, std::function<void()> run) { run(); }

void declare_accesses(std::span<const BufferAccess> accesses) { declared.assign(accesses.begin(), accesses.end()); }

// ---------------------------------------------------------------- waiting

void pause() {
    Thread& here = *current;
    Thread& next = next_thread();
    go_to(next);
    if (&next != &here) Fiber::change(here.fiber, next.fiber);
}

void wake(Thread& t) {
    t.wait = Wait::none;
    block.ready.push(t.number);
}

Votes block_barrier(int vote, const Site& site) {
    if (block.arrived && !(block.barrier == site))
        die("threads of one block meet at different barriers: " + block.barrier.text() + " and " + site.text());
    block.barrier = site;
    ++block.arrived;
    block.votes += vote != 0;
    current->wait = Wait::block;
    current->site = site;
    release_barrier_if_complete();
    pause();
    return {block.completed_arrivals, block.completed_votes};
}

// ---------------------------------------------------------------- schedules

void ReadyThreads::clear(Schedule schedule, int warps) {
    schedule_ = schedule;
    count_ = first_ = 0;
    warps_ = warps;
    lanes_.fill(0);
    std::iota(order_.begin(), order_.begin() + warps, uint8_t{0});
    for (int i = warps; i > 1; --i) std::swap(order_[static_cast<size_t>(i - 1)], order_[random_below(static_cast<uint32_t>(i))]);
}

void ReadyThreads::push(int thread) {
    if (schedule_ == Schedule::warp_priority) lanes_[static_cast<size_t>(thread / warp_lanes)] |= 1u << thread % warp_lanes;
    else ring_[static_cast<size_t>((first_ + count_) % max_threads)] = static_cast<uint16_t>(thread);
    ++count_;
}

int ReadyThreads::pop() {
    --count_;
    if (schedule_ == Schedule::warp_priority) return pop_of_highest_warp();
    if (schedule_ == Schedule::lifo) return ring_[static_cast<size_t>((first_ + count_) % max_threads)];
    uint16_t& head = ring_[static_cast<size_t>(first_)];
    if (schedule_ == Schedule::random) {
        const int chosen = static_cast<int>(random_below(static_cast<uint32_t>(count_ + 1)));
        std::swap(head, ring_[static_cast<size_t>((first_ + chosen) % max_threads)]);
    }
    first_ = (first_ + 1) % max_threads;
    return head;
}

// Any lane of the warp that may run ahead of all others. Now and then two warps change places, so that each order of two
// warps at any pair of places has its chance.
int ReadyThreads::pop_of_highest_warp() {
    if (random_below(64) == 0) {
        const auto any = [&] { return static_cast<size_t>(random_below(static_cast<uint32_t>(warps_))); };
        std::swap(order_[any()], order_[any()]);
    }
    const auto highest = std::find_if(order_.begin(), order_.begin() + warps_, [&](uint8_t w) { return lanes_[w] != 0; });
    const int turn = static_cast<int>(random_below(warp_lanes));
    const int lane = (std::countr_zero(std::rotr(lanes_[*highest], turn)) + turn) % warp_lanes;
    lanes_[*highest] &= ~(1u << lane);
    return *highest * warp_lanes + lane;
}

// ---------------------------------------------------------------- small things

void configure(const Settings& s) {
    configured() = s;
    random_state = s.seed;
}

Settings settings() { return configured(); }

int64_t stops() { return stop_count; }

// SplitMix64.
uint32_t random_below(uint32_t n) {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>((z >> 32) * n >> 32);
}

bool is_shared(const void* p, size_t bytes) {
    const auto inside = [&](const std::byte* begin, size_t size) {
        return p >= begin && static_cast<const std::byte*>(p) + bytes <= begin + size;
    };
    return inside(block.dynamic_shared, block.launch->shared_bytes) || !__start_emulation_shared ||
           inside(__start_emulation_shared, static_cast<size_t>(__stop_emulation_shared - __start_emulation_shared));
}

bool Site::operator==(const Site& o) const {
    return line == o.line && call == o.call && (file == o.file || std::strcmp(file, o.file) == 0);
}

std::string Site::text() const { return std::string(call) + " at " + file + ":" + std::to_string(line); }

void die(const std::string& what) {
    std::string text = "emulation: " + what;
    if (current) {
        text += std::string("\n  in ") + block.launch->kernel + ", block " + coordinates(block.index.x, block.index.y, block.index.z) +
                ", thread " + coordinates(current->index.x, current->index.y, current->index.z);
    }
    std::fprintf(stderr, "%s\n", text.c_str());
    std::fflush(stderr);  // not stdout: a forked child would print its parent's text again
    _exit(death_exit_code);
}

}  // namespace trifold::emulation
