// test/unit/test_loader_layouts.cpp   A ledger of samples: whatever the number of data-parallel ranks and the size of micro-batches, and wherever a
// run was resumed in another layout, every global batch is the same, and every sample is seen once per epoch.
#include "test/catch.h"

#include <algorithm>
#include <numeric>

#include "data/loader.h"
#include "data/token_writer.h"
#include "test/unit/data_files.h"

using namespace trifold;

namespace {

constexpr int64_t seq = 4, global = 16;

// What the ranks of one layout read of one global batch, ranks in order.
struct Entry {
    std::vector<uint64_t> samples;
    std::vector<int32_t> tokens, targets;
    int64_t valid = 0;             // counted by the micro-batches
    std::vector<int64_t> claimed;  // GlobalBatch::valid_tokens of each rank
    bool operator==(const Entry& o) const { return samples == o.samples && tokens == o.tokens && targets == o.targets && valid == o.valid; }
};

// The loaders of all data-parallel ranks.
class Layout {
public:
    Layout(const std::vector<DataSource>& sources, LoaderOptions options, int dp, int64_t micro) : micro_(micro) {
        options.micro_batch = micro;
        options.sequence_count = global / dp;
        for (int d = 0; d < dp; ++d) {
            options.first_sequence = d * options.sequence_count;
            ranks_.emplace_back(sources, options);
        }
    }
    void seek(int64_t k) {
        for (Loader& rank : ranks_) rank.seek(k);
    }
    Entry next() {
        Entry e;
        for (Loader& rank : ranks_) {
            const GlobalBatch batch = rank.next();
            REQUIRE(static_cast<int64_t>(batch.micro.size()) * micro_ * static_cast<int64_t>(ranks_.size()) == global);
            for (const MicroBatch& m : batch.micro) {
                REQUIRE(m.sequences == micro_);
                e.samples.insert(e.samples.end(), m.sample_ids.begin(), m.sample_ids.end());
                e.tokens.insert(e.tokens.end(), m.tokens.begin(), m.tokens.end());
                e.targets.insert(e.targets.end(), m.targets.begin(), m.targets.end());
                CHECK(m.valid == std::count_if(m.targets.begin(), m.targets.end(), [](int32_t t) { return t >= 0; }));
                e.valid += m.valid;
            }
            e.claimed.push_back(batch.valid_tokens);
        }
        return e;
    }

private:
    int64_t micro_;
    std::vector<Loader> ranks_;
};

// Two files of 60 and 41 samples, some of whose tokens are prompts: six and a bit global batches are one epoch.
std::vector<DataSource> write_sources(const TemporaryFolder& folder) {
    std::vector<DataSource> sources;
    for (const auto& [name, tokens] : {std::pair{"a", 60 * seq + 1}, {"b", 41 * seq + 1}}) {
        std::vector<int32_t> ids(static_cast<size_t>(tokens));
        std::iota(ids.begin(), ids.end(), name[0] == 'a' ? 0 : 1000);
        std::vector<uint8_t> counts;
        for (const int32_t id : ids) counts.push_back(id * 7 % 5 != 0);
        TokenWriter writer({.prefix = folder / name, .mask = true});
        writer.append(ids, counts);
        writer.finish();
        writer.commit();
    }
    return {{folder / "?.bin"}};
}

const LoaderOptions options{.seq = seq, .global_batch = global, .vocab = 65536, .mask_prompt = true};

}  // namespace

TEST_CASE("every layout reads the global batches of one rank") {
    const TemporaryFolder folder;
    const std::vector<DataSource> sources = write_sources(folder);
    Layout one(sources, options, 1, 1);
    std::vector<Entry> ledger;
    for (int k = 0; k < 15; ++k) ledger.push_back(one.next());  // two epochs and more
    for (const int dp : {1, 2, 4, 8})
        for (const int64_t micro : {1, 2}) {
            INFO(dp << " ranks, micro-batches of " << micro);
            Layout layout(sources, options, dp, micro);
            for (const Entry& expected : ledger) {
                const Entry got = layout.next();
                CHECK((got == expected));
                for (const int64_t claimed : got.claimed) CHECK(claimed == expected.valid);
            }
        }
}

TEST_CASE("a run that changes its layout sees every sample once per epoch") {
    const TemporaryFolder folder;
    const std::vector<DataSource> sources = write_sources(folder);
    Layout straight(sources, options, 1, 1);
    const int64_t samples = Loader(sources, options).samples_per_epoch();
    REQUIRE(samples == 101);
    REQUIRE(samples % global != 0);  // an epoch ends inside a global batch
    struct Stretch {
        int dp;
        int64_t micro, steps;
    };
    std::vector<uint64_t> order;
    int64_t k = 0;
    // The third stretch ends inside the batch in which the epoch ends, the last one two epochs later.
    for (const Stretch& s : {Stretch{4, 2, 3}, {8, 1, 2}, {1, 2, 2}, {2, 1, 5}, {8, 2, 7}}) {
        Layout layout(sources, options, s.dp, s.micro);
        layout.seek(k);
        for (int64_t i = 0; i < s.steps; ++i, ++k) {
            const Entry entry = layout.next();
            CHECK((entry == straight.next()));
            order.insert(order.end(), entry.samples.begin(), entry.samples.end());
        }
    }
    REQUIRE(static_cast<int64_t>(order.size()) == 19 * global);
    for (size_t first = 0; first + 101 <= order.size(); first += 101) {
        std::vector<uint64_t> epoch(order.begin() + static_cast<int64_t>(first), order.begin() + static_cast<int64_t>(first) + 101);
        std::sort(epoch.begin(), epoch.end());
        CHECK(std::adjacent_find(epoch.begin(), epoch.end()) == epoch.end());
        CHECK(epoch.back() == 100);
    }
}

TEST_CASE("a layout that reads from the wrong place is noticed") {
    const TemporaryFolder folder;
    const std::vector<DataSource> sources = write_sources(folder);
    Layout one(sources, options, 1, 1), late(sources, options, 2, 1);
    late.seek(1);
    CHECK_FALSE(one.next() == late.next());
    LoaderOptions other = options;
    other.seed = 5;
    Layout shuffled(sources, other, 1, 1);
    CHECK_FALSE(one.next() == shuffled.next());
}
