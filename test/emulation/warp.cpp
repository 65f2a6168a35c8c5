// test/emulation/warp.cpp   What the lanes of a warp do together.
//
// Every lane brings a pointer to its operand, on its own stack, and sleeps; the last lane to come works for all and leaves
// each result where the operand was. So nobody sees a value of a later call, whatever the schedule.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "test/emulation/block.h"
#include "test/emulation/race_detector.h"

namespace trifold::emulation {
namespace {

std::string hexadecimal(unsigned mask) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", mask);
    return text;
}

template <class F>
void for_lanes(unsigned mask, F f) {
    for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
}

Thread& lane_of(const Thread& t, int lane) { return block.thread[static_cast<size_t>(t.warp * warp_lanes + lane)]; }

// The collective with this mask that other lanes of the warp wait in, or a new one. Lanes may wait in several at a time, but
// not for each other: then neither would ever be complete.
Collective& collective_of(const Site& site, unsigned mask) {
    const Thread& t = *current;
    Warp& warp = block.warps[static_cast<size_t>(t.warp)];
    Collective* mine = nullptr;
    for (int i = 0; i < warp.open; ++i) {
        Collective& c = warp.collectives[static_cast<size_t>(i)];
        const bool waits_for_me = c.mask >> t.lane & 1, has_my_lanes = c.arrived & mask;
        if (c.mask == mask) mine = &c;
        if (waits_for_me && has_my_lanes && !(c.mask == mask && c.site == site)) {
            die("lanes of one warp meet at different collectives or with different masks: " + c.site.text() + " with " +
                hexadecimal(c.mask) + ", and " + site.text() + " with " + hexadecimal(mask));
        }
    }
    if (!mine) {
        mine = &warp.collectives[static_cast<size_t>(warp.open++)];
        *mine = {mask, 0, site};
    }
    return *mine;
}

// The lane's wait begins; true: all lanes of the mask are here.
bool join(const Site& site, unsigned mask) {
    Thread& t = *current;
    Warp& warp = block.warps[static_cast<size_t>(t.warp)];
    if (!(mask >> t.lane & 1)) die("lane " + std::to_string(t.lane) + " is not in its own mask " + hexadecimal(mask) + " (" + site.text() + ")");
    if (const unsigned gone = warp.ended & mask)
        die("the mask " + hexadecimal(mask) + " names lanes that have ended: " + hexadecimal(gone) + " (" + site.text() + ")");
    Collective& c = collective_of(site, mask);
    c.arrived |= 1u << t.lane;
    t.wait = Wait::warp;
    t.site = site;
    if (c.arrived != mask) return false;
    c = warp.collectives[static_cast<size_t>(--warp.open)];
    return true;
}

}  // namespace

void warp_collective(const Site& site, unsigned mask, void* operand, Complete complete) {
    Thread& t = *current;
    t.operand = operand;
    if (join(site, mask)) {
        Operands operands{};
        for_lanes(mask, [&](int l) { operands[static_cast<size_t>(l)] = lane_of(t, l).operand; });
        complete(operands, mask);
        for_lanes(mask, [&](int l) { wake(lane_of(t, l)); });
    }
    pause();
}

void warp_barrier(const Site& site, unsigned mask) {
    Thread& t = *current;
    if (join(site, mask)) {
        races::warp_barrier(t.warp, mask);
        for_lanes(mask, [&](int l) { wake(lane_of(t, l)); });
    }
    pause();
}

void shuffle(const Site& site, unsigned mask, void* value, size_t bytes, int from) {
    struct Lane {
        void* value;
        size_t bytes;
        int from;
    } mine{value, bytes, from};
    if (!(mask >> from & 1)) die("lane " + std::to_string(from) + " is read but not in the mask " + hexadecimal(mask) + " (" + site.text() + ")");
    warp_collective(site, mask, &mine, [](const Operands& operands, unsigned lanes) {
        alignas(16) std::byte brought[warp_lanes][16];
        const auto lane = [&](int l) { return static_cast<const Lane*>(operands[static_cast<size_t>(l)]); };
        for_lanes(lanes, [&](int l) { std::memcpy(brought[l], lane(l)->value, lane(l)->bytes); });
        for_lanes(lanes, [&](int l) { std::memcpy(lane(l)->value, brought[lane(l)->from], lane(l)->bytes); });
    });
}

unsigned ballot(const Site& site, unsigned mask, bool vote) {
    unsigned mine = vote;
    warp_collective(site, mask, &mine, [](const Operands& operands, unsigned lanes) {
        const auto lane = [&](int l) -> unsigned& { return *static_cast<unsigned*>(operands[static_cast<size_t>(l)]); };
        unsigned result = 0;
        for_lanes(lanes, [&](int l) { result |= lane(l) << l; });
        for_lanes(lanes, [&](int l) { lane(l) = result; });
    });
    return mine;
}

int64_t reduce(const Site& site, unsigned mask, int64_t value, Reduction reduction) {
    struct Lane {
        int64_t value;
        Reduction reduction;
    } mine{value, reduction};
    warp_collective(site, mask, &mine, [](const Operands& operands, unsigned lanes) {
        const auto lane = [&](int l) { return static_cast<Lane*>(operands[static_cast<size_t>(l)]); };
        const int first = std::countr_zero(lanes);
        int64_t result = lane(first)->value;
        for_lanes(lanes & (lanes - 1), [&](int l) {
            const int64_t v = lane(l)->value;
            switch (lane(l)->reduction) {
                case Reduction::add: result += v; break;
                case Reduction::min: result = std::min(result, v); break;
                case Reduction::max: result = std::max(result, v); break;
                case Reduction::bit_and: result &= v; break;
                case Reduction::bit_or: result |= v; break;
                case Reduction::bit_xor: result ^= v; break;
            }
        });
        for_lanes(lanes, [&](int l) { lane(l)->value = result; });
    });
    return mine.value;
}

unsigned match_any(const Site& site, unsigned mask, uint64_t value) {
    struct Lane {
        uint64_t value;
        unsigned same;
    } mine{value, 0};
    warp_collective(site, mask, &mine, [](const Operands& operands, unsigned lanes) {
        const auto lane = [&](int l) { return static_cast<Lane*>(operands[static_cast<size_t>(l)]); };
        for_lanes(lanes, [&](int l) {
            for_lanes(lanes, [&](int other) { lane(l)->same |= unsigned{lane(l)->value == lane(other)->value} << other; });
        });
    });
    return mine.same;
}

}  // namespace trifold::emulation
