// test/unit/test_loader.cpp   Samples, epochs, shuffles, blends, documents and prompt masks of the loader, against plain recomputation.
#include "test/catch.h"

#include <numeric>
#include <set>

#include "data/loader.h"
#include "data/sampling.h"
#include "data/token_writer.h"
#include "test/unit/data_files.h"

using namespace trifold;

namespace {

using Ids = std::vector<int32_t>;

std::vector<uint16_t> counting(int tokens, int first = 0) {
    std::vector<uint16_t> ids(static_cast<size_t>(tokens));
    std::iota(ids.begin(), ids.end(), static_cast<uint16_t>(first));
    return ids;
}

std::vector<uint64_t> ids_of(const GlobalBatch& batch) {
    std::vector<uint64_t> ids;
    for (const MicroBatch& micro : batch.micro) ids.insert(ids.end(), micro.sample_ids.begin(), micro.sample_ids.end());
    return ids;
}

std::vector<int> blend_choices(Blend blend, int count) {
    std::vector<int> choices;
    for (int i = 0; i < count; ++i) choices.push_back(blend.next().source);
    return choices;
}

}  // namespace

TEST_CASE("blending follows Megatron's rule") {
    CHECK(blend_choices(Blend({0.3, 0.7}), 12) == std::vector<int>{1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1});
    CHECK(blend_choices(Blend({0.5, 0.3, 0.2}), 12) == std::vector<int>{0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1});
    CHECK(blend_choices(Blend({5, 3, 2}), 12) == blend_choices(Blend({0.5, 0.3, 0.2}), 12));
}

TEST_CASE("blending can be entered anywhere") {
    Blend straight({0.2, 0.45, 0.35});
    std::vector<Blend::Choice> choices;
    for (int i = 0; i < 5000; ++i) choices.push_back(straight.next());
    Blend jumping({0.2, 0.45, 0.35});
    for (const int at : {4000, 10, 11, 4999, 0, 2500}) {
        jumping.seek(at);
        const Blend::Choice choice = jumping.next();
        CHECK(choice.source == choices[at].source);
        CHECK(choice.index == choices[at].index);
    }
    // Beyond the distance of snapshots, forwards and back.
    Blend far({0.6, 0.4});
    far.seek(9'000'000);
    const Blend::Choice there = far.next();
    far.seek(5'000'000);
    far.seek(9'000'000);
    const Blend::Choice again = far.next();
    CHECK(there.source == again.source);
    CHECK(there.index == again.index);
    Blend single({3.0});
    single.seek(int64_t{1} << 40);
    CHECK(single.next().index == int64_t{1} << 40);
}

TEST_CASE("a permutation hits everything once and depends on its key") {
    for (const uint64_t n : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097, 65537}) {
        const Permutation permutation(n, 42);
        std::vector<bool> hit(n, false);
        for (uint64_t i = 0; i < n; ++i) {
            const uint64_t at = permutation(i);
            REQUIRE(at < n);
            REQUIRE_FALSE(hit[at]);
            hit[at] = true;
        }
    }
    const uint64_t n = 1000;
    const Permutation a(n, 1), b(n, 2);
    int same = 0, fixed = 0, near = 0;
    for (uint64_t i = 0; i < n; ++i) {
        same += a(i) == b(i);
        fixed += a(i) == i;
        if (i > 0) near += a(i) == a(i - 1) + 1;
    }
    CHECK(same < 10);
    CHECK(fixed < 10);
    CHECK(near < 10);
    // Every value comes to every place about equally often.
    std::vector<int> first(8, 0);
    for (uint64_t key = 0; key < 8000; ++key) ++first[Permutation(8, mix(key))(0)];
    for (const int count : first) CHECK((count > 850 && count < 1150));
    const uint64_t huge = (uint64_t{1} << 61) + 12345;
    CHECK(Permutation(huge, 7)(huge - 1) < huge);
}

TEST_CASE("samples are seq + 1 tokens that overlap by one, in order without shuffling") {
    const TemporaryFolder folder;
    write_file(folder / "a.bin", llmc_bytes(counting(14)));
    Loader loader({{folder / "a.bin"}},
                  {.seq = 4, .micro_batch = 2, .global_batch = 2, .vocab = 100, .shuffle = false});
    CHECK(loader.samples_per_epoch() == 3);
    CHECK(loader.description().find(": 14 tokens in 1 file") != std::string::npos);
    const GlobalBatch first = loader.next();
    REQUIRE(first.micro.size() == 1);
    const MicroBatch& micro = first.micro[0];
    CHECK(micro.sequences == 2);
    CHECK(micro.tokens == Ids{0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(micro.targets == Ids{1, 2, 3, 4, 5, 6, 7, 8});
    CHECK(micro.positions == Ids{0, 1, 2, 3, 0, 1, 2, 3});
    CHECK(micro.doc_start.empty());
    CHECK(micro.valid == 8);
    CHECK(first.valid_tokens == 8);
    // The third sample, then the next epoch.
    CHECK(ids_of(loader.next()) == std::vector<uint64_t>{2, 0});
    CHECK(loader.position() == 2);
    CHECK(loader.description().find("14 tokens in 1 file, 3 samples of 4 tokens") != std::string::npos);
}

TEST_CASE("every epoch has every sample once, in an order of its own") {
    const TemporaryFolder folder;
    write_file(folder / "a.bin", llmc_bytes(counting(401)));
    Loader loader({{folder / "a.bin"}}, {.seq = 4, .global_batch = 10, .vocab = 65536});
    std::vector<std::vector<uint64_t>> epochs;
    for (int e = 0; e < 3; ++e) {
        std::vector<uint64_t> seen;
        for (int k = 0; k < 10; ++k) {
            const GlobalBatch batch = loader.next();
            for (const MicroBatch& micro : batch.micro) {
                CHECK(micro.tokens[0] == static_cast<int32_t>(4 * micro.sample_ids[0]));
                seen.push_back(micro.sample_ids[0]);
            }
        }
        epochs.push_back(seen);
        CHECK(std::set<uint64_t>(seen.begin(), seen.end()).size() == 100);
    }
    CHECK(epochs[0] != epochs[1]);
    CHECK(epochs[1] != epochs[2]);
    Loader other({{folder / "a.bin"}}, {.seq = 4, .global_batch = 100, .seed = 5, .vocab = 65536});
    CHECK(ids_of(other.next()) != epochs[0]);
}

TEST_CASE("seek gives what reading up to there gives, across epochs and sources") {
    const TemporaryFolder folder;
    write_file(folder / "a.bin", llmc_bytes(counting(50)));
    write_file(folder / "b.bin", llmc_bytes(counting(90, 1000)));
    const std::vector<DataSource> sources = {{folder / "a.bin", 0.3}, {folder / "b.bin", 0.7}};
    const LoaderOptions options{.seq = 5, .micro_batch = 2, .global_batch = 6, .vocab = 65536};
    Loader straight(sources, options);
    std::vector<GlobalBatch> batches;
    for (int k = 0; k < 30; ++k) batches.push_back(straight.next());
    Loader jumping(sources, options);
    for (const int64_t k : {29, 0, 7, 8, 3, 3, 20}) {
        jumping.seek(k);
        const GlobalBatch batch = jumping.next();
        CHECK(batch.index == k);
        CHECK(ids_of(batch) == ids_of(batches[static_cast<size_t>(k)]));
        for (size_t m = 0; m < batch.micro.size(); ++m)
            CHECK(batch.micro[m].tokens == batches[static_cast<size_t>(k)].micro[m].tokens);
        CHECK(jumping.position() == k + 1);
    }
}

TEST_CASE("the samples of a global batch do not depend on the layout") {
    const TemporaryFolder folder;
    write_file(folder / "a.bin", llmc_bytes(counting(1000)));
    const auto samples = [&](int64_t micro, int64_t first, int64_t count) {
        Loader loader({{folder / "a.bin"}}, {.seq = 8,
                                             .micro_batch = micro,
                                             .global_batch = 12,
                                             .first_sequence = first,
                                             .sequence_count = count,
                                             .vocab = 65536});
        loader.seek(3);
        const GlobalBatch batch = loader.next();
        CHECK(batch.valid_tokens == 96);
        return ids_of(batch);
    };
    const std::vector<uint64_t> whole = samples(1, 0, 0);
    CHECK(samples(4, 0, 0) == whole);
    std::vector<uint64_t> parts;
    for (int rank = 0; rank < 3; ++rank) {
        for (const uint64_t id : samples(2, 4 * rank, 4)) parts.push_back(id);
    }
    CHECK(parts == whole);
}

TEST_CASE("several files of a glob: samples do not cross files") {
    const TemporaryFolder folder;
    write_file(folder / "s_0.bin", llmc_bytes(counting(10)));
    write_file(folder / "s_1.bin", llmc_bytes(counting(3, 100)));  // too short for a sample
    write_file(folder / "s_2.bin", llmc_bytes(counting(9, 200)));
    Loader loader({{folder / "s_*.bin"}},
                  {.seq = 4, .micro_batch = 4, .global_batch = 4, .vocab = 65536, .shuffle = false});
    CHECK(loader.samples_per_epoch() == 4);
    const MicroBatch micro = loader.next().micro[0];
    CHECK(micro.tokens == Ids{0, 1, 2, 3, 4, 5, 6, 7, 200, 201, 202, 203, 204, 205, 206, 207});
    CHECK(micro.targets.back() == 208);
}

TEST_CASE("isolated documents: positions and starts at every boundary") {
    const TemporaryFolder folder;
    // Documents [1 2 9], [3 9], [9] and [4 5 6 7 ...], 9 ends one; longer than a sequence at last.
    write_file(folder / "a.bin", llmc_bytes({1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8}));
    Loader loader({{folder / "a.bin"}}, {.seq = 8,
                                         .micro_batch = 2,
                                         .global_batch = 2,
                                         .vocab = 10,
                                         .shuffle = false,
                                         .documents = Documents::isolated,
                                         .end_of_document = 9});
    const MicroBatch micro = loader.next().micro[0];
    CHECK(micro.tokens == Ids{1, 2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8});
    CHECK(micro.doc_start == Ids{0, 0, 0, 3, 3, 5, 6, 6, 0, 0, 0, 0, 0, 0, 0, 0});
    CHECK(micro.positions == Ids{0, 1, 2, 0, 1, 0, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7});
    CHECK(micro.targets == Ids{2, 9, 3, 9, 9, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8});

    // A Megatron index says where documents begin, without any id.
    TokenWriter writer({.prefix = folder / "m", .format = TokenFormat::megatron});
    for (const Ids& document : {Ids{1, 2, 3}, Ids{4}, Ids{5, 6, 7, 8}, Ids{1, 1}}) {
        writer.append(document);
        writer.end_document();
    }
    writer.finish();
    writer.commit();
    Loader listed(
        {{folder / "m"}},
        {.seq = 8, .vocab = 10, .shuffle = false, .documents = Documents::isolated, .end_of_document = 9});
    CHECK(listed.next().micro[0].doc_start == Ids{0, 0, 0, 3, 4, 4, 4, 4});
}

TEST_CASE("prompt tokens are no targets, and valid tokens are counted over the whole global batch") {
    const TemporaryFolder folder;
    {
        TokenWriter writer({.prefix = folder / "a", .mask = true});
        writer.append(Ids{1, 2, 3, 4, 5, 6, 7, 8, 9}, std::vector<uint8_t>{1, 1, 1, 0, 0, 1, 1, 0, 1});
        writer.finish();
        writer.commit();
    }
    LoaderOptions options{.seq = 4,
                          .micro_batch = 1,
                          .global_batch = 2,
                          .vocab = 10,
                          .shuffle = false,
                          .mask_prompt = true};
    Loader loader({{folder / "a.bin"}}, options);
    const GlobalBatch batch = loader.next();
    CHECK(batch.micro[0].tokens == Ids{1, 2, 3, 4});
    CHECK(batch.micro[0].targets == Ids{-1, -1, 4, 5});
    CHECK(batch.micro[0].valid == 2);
    CHECK(batch.micro[1].targets == Ids{-1, -1, 8, -1});
    CHECK(batch.micro[1].valid == 1);
    CHECK(batch.valid_tokens == 3);
    options.first_sequence = 1;
    options.sequence_count = 1;
    const GlobalBatch slice = Loader({{folder / "a.bin"}}, options).next();
    CHECK(slice.micro.size() == 1);
    CHECK(slice.valid_tokens == 3);
    options = {.seq = 4, .vocab = 10, .shuffle = false};
    CHECK(Loader({{folder / "a.bin"}}, options).next().micro[0].targets == Ids{2, 3, 4, 5});
}

TEST_CASE("bad data and bad sources are one sentence each") {
    const TemporaryFolder folder;
    write_file(folder / "a.bin", llmc_bytes({1, 2, 3, 4, 300, 6, 7, 8, 9}));
    const LoaderOptions options{.seq = 4, .vocab = 100, .shuffle = false};
    Loader loader({{folder / "a.bin"}}, options);
    const std::string bad =
        "token 4 (byte 1032) of " + (folder / "a.bin") + " has the id 300, but the vocabulary has 100 ids";
    CHECK_PROBLEM(loader.next(), bad);
    CHECK_PROBLEM(loader.next(), bad);  // and again
    LoaderOptions long_sequence = options;
    long_sequence.seq = 1000;
    CHECK_PROBLEM(Loader({{folder / "a.bin"}}, long_sequence),
                  "3: data.train: " + (folder / "a.bin") + " has 9 tokens, but one sequence needs 1,001");
    CHECK_PROBLEM(Loader({}, options), "2: data.train names no data");
    CHECK_PROBLEM(Loader({{folder / "a.bin", -1.0}}, options), "2: data.train: the weight of");
    CHECK_PROBLEM(Loader({{folder / "a.bin", 0.0}}, options), "weights must be positive");
    CHECK_PROBLEM(Loader({{folder / "none.bin"}}, options), "3: there is no token file");
    LoaderOptions masked = options;
    masked.mask_prompt = true;
    CHECK_PROBLEM(Loader({{folder / "a.bin"}}, masked), "cannot open the prompt mask");
}

TEST_CASE("the content hash follows the data, not its place") {
    const TemporaryFolder folder;
    const LoaderOptions options{.seq = 4, .vocab = 65536};
    write_file(folder / "a.bin", llmc_bytes(counting(100)));
    write_file(folder / "other/a.bin", llmc_bytes(counting(100)));
    write_file(folder / "b.bin", llmc_bytes(counting(100, 1)));
    const auto hash = [&](const std::vector<DataSource>& sources) { return Loader(sources, options).content_hash(); };
    CHECK(hash({{folder / "a.bin"}}) == hash({{folder / "other/a.bin"}}));
    CHECK(hash({{folder / "a.bin"}}) != hash({{folder / "b.bin"}}));
    CHECK(hash({{folder / "a.bin", 1.0}, {folder / "b.bin", 2.0}}) ==
          hash({{folder / "a.bin", 2.0}, {folder / "b.bin", 4.0}}));
    CHECK(hash({{folder / "a.bin", 1.0}, {folder / "b.bin", 2.0}}) !=
          hash({{folder / "a.bin", 2.0}, {folder / "b.bin", 2.0}}));
}

TEST_CASE("more than 2^32 samples") {
    const TemporaryFolder folder;
    const int64_t length = (int64_t{1} << 31) - 1;
    write_file(folder / "big.bin", "");
    std::filesystem::resize_file(folder / "big.bin", static_cast<uintmax_t>(3 * length));  // sparse, u8
    std::string idx =
        std::string("MMIDIDX\0\0", 9) + raw(std::vector<uint64_t>{1}) + '\1' + raw(std::vector<uint64_t>{3, 2});
    idx += raw(std::vector<int32_t>(3, static_cast<int32_t>(length))) +
           raw(std::vector<int64_t>{0, length, 2 * length, 0, 3});
    write_file(folder / "big.idx", idx);
    Loader loader({{folder / "big"}}, {.seq = 1, .global_batch = 4, .vocab = 2, .shuffle = false});
    const int64_t samples = 3 * length - 1;
    REQUIRE(samples > int64_t{1} << 32);
    CHECK(loader.samples_per_epoch() == samples);
    loader.seek(samples / 4 - 1);
    CHECK(ids_of(loader.next())[0] == static_cast<uint64_t>(samples / 4 * 4 - 4));
    Loader shuffled({{folder / "big"}}, {.seq = 1, .global_batch = 64, .vocab = 2});
    shuffled.seek(1'000'000'000);
    const std::vector<uint64_t> ids = ids_of(shuffled.next());
    CHECK(std::set<uint64_t>(ids.begin(), ids.end()).size() == 64);
    CHECK(*std::max_element(ids.begin(), ids.end()) > uint64_t{1} << 32);
}
