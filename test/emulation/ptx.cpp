#include "test/emulation/ptx.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "test/emulation/race_detector.h"

namespace trifold::emulation {
namespace {

constexpr size_t copy_bytes = 16, row_bytes = 16;
constexpr unsigned whole_warp = ~0u;

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

float bf16_of(uint32_t pair, int half) { return std::bit_cast<float>(half ? pair & 0xffff0000u : pair << 16); }

}  // namespace

void cp_async(const Site& site, void* shared, const void* global, bool copy) {
    if (!aligned(shared) || (copy && !aligned(global))) die("misaligned address (" + site.text() + ")");
    if (!is_shared(shared, copy_bytes)) die("the target is not shared memory of this block (" + site.text() + ")");
    Thread& t = *current;
    races::record(t, shared, copy_bytes, races::Kind::write, site);
    if (copy) races::record(t, global, copy_bytes, races::Kind::read, site);
    std::memset(shared, 0xff, copy_bytes);
    t.copies.push_back({site, shared, copy ? global : nullptr, t.open_group});
}

void cp_async_wait(int groups_left) {
    Thread& t = *current;
    size_t landed = 0;
    for (; landed < t.copies.size() && t.copies[landed].group < t.open_group - groups_left; ++landed) {
        const AsyncCopy& c = t.copies[landed];
        races::record(t, c.shared, copy_bytes, races::Kind::write, c.site);
        if (c.global) std::memcpy(c.shared, c.global, copy_bytes);
        else std::memset(c.shared, 0, copy_bytes);
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(landed));
}

void ldmatrix(const Site& site, uint32_t* registers, int matrices, Layout layout, const void* row) {
    struct Lane {
        Site site;
        const Thread* thread;
        uint32_t* registers;
        int matrices;
        Layout layout;
        const void* row;
    } mine{site, current, registers, matrices, layout, row};
    warp_collective(site, whole_warp, &mine, [](const Operands& operands, unsigned) {
        const auto lane = [&](int l) { return static_cast<const Lane*>(operands[static_cast<size_t>(l)]); };
        for (int i = 0; i < 8 * lane(0)->matrices; ++i) {
            if (!aligned(lane(i)->row)) die("lane " + std::to_string(i) + " gives a misaligned row (" + lane(i)->site.text() + ")");
            if (!is_shared(lane(i)->row, row_bytes)) die("lane " + std::to_string(i) + " gives a row outside shared memory (" + lane(i)->site.text() + ")");
        }
        for (int l = 0; l < warp_lanes; ++l) {
            for (int m = 0; m < lane(l)->matrices; ++m) {
                uint16_t pair[2];
                for (int e = 0; e < 2; ++e) {
                    const int along = 2 * (l % 4) + e, across = l / 4;
                    const bool rows = lane(l)->layout == Layout::rows;
                    const uint16_t* element = static_cast<const uint16_t*>(lane(8 * m + (rows ? across : along))->row) + (rows ? along : across);
                    races::record(*lane(l)->thread, element, sizeof *element, races::Kind::read, lane(l)->site);
                    pair[e] = *element;
                }
                std::memcpy(&lane(l)->registers[m], pair, sizeof pair);
            }
        }
    });
}

void mma_m16n8k16_bf16(const Site& site, MmaFragments& fragments) {
    warp_collective(site, whole_warp, &fragments, [](const Operands& operands, unsigned) {
        float a[16][16], b[16][8], d[16][8];
        for (int l = 0; l < warp_lanes; ++l) {
            const MmaFragments& f = *static_cast<const MmaFragments*>(operands[static_cast<size_t>(l)]);
            const int g = l / 4, t = l % 4;
            for (int half = 0; half < 2; ++half) {
                for (int r = 0; r < 4; ++r) a[g + 8 * (r % 2)][2 * t + 8 * (r / 2) + half] = bf16_of(f.a[r], half);
                for (int r = 0; r < 2; ++r) b[2 * t + 8 * r + half][g] = bf16_of(f.b[r], half);
                for (int r = 0; r < 2; ++r) d[g + 8 * r][2 * t + half] = f.d[2 * r + half];
            }
        }
        for (int i = 0; i < 16; ++i)
            for (int k = 0; k < 16; ++k)
                for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
        for (int l = 0; l < warp_lanes; ++l) {
            MmaFragments& f = *static_cast<MmaFragments*>(operands[static_cast<size_t>(l)]);
            for (int e = 0; e < 4; ++e) f.d[e] = d[l / 4 + 8 * (e / 2)][2 * (l % 4) + e % 2];
        }
    });
}

float exp2_approx(float x) {
    const float y = std::exp2(x);
    return std::fabs(y) < 0x1p-126f ? 0.0f : y;
}

int load_acquire(const Site& site, const int* p) {
    struct Poll {
        const int* p = nullptr;
        int value = 0;
        int64_t times = 0;
    };
    static Poll last;
    constexpr int64_t too_often = 1 << 20;
    Thread& t = *current;
    races::record(t, p, sizeof *p, races::Kind::atomic, site);
    races::acquire(t, p);
    last = {p, *p, last.p == p && last.value == *p ? last.times + 1 : 0};
    if (last.times > too_often) die("a thread waits for a value that no block that ran before this one stores (" + site.text() + ")");
    const int value = *p;
    wake(t);
    pause();
    return value;
}

void store_release(const Site& site, int* p, int value) {
    races::record(*current, p, sizeof *p, races::Kind::atomic, site);
    races::release(*current, p);
    *p = value;
}

}  // namespace trifold::emulation
