// data/loader.cpp
#include "data/loader.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <optional>
#include <span>
#include <thread>

#include "base/queue.h"
#include "base/refuse.h"
#include "base/text.h"
#include "data/sampling.h"
#include "data/token_file.h"

namespace trifold {
namespace {

struct Shard {
    TokenFile file;
    std::optional<MaskFile> mask;
    int64_t first_sample;  // within its source
    int64_t samples;
};

struct Source {
    std::string path;
    double weight;
    std::vector<Shard> shards;
    int64_t samples = 0, tokens = 0;
    int64_t first_sample = 0;  // among all sources
};

struct Place {
    const Shard* shard;
    int64_t token;  // of the first input, in the shard's file
    uint64_t sample_id;
};

}  // namespace

// The files, and the map from sample numbers to places in them. Never changes, so threads may share it.
struct Loader::Samples {
    Samples(const std::vector<DataSource>& from, const LoaderOptions& given) : options(given) {
        TRIFOLD_ASSERT(options.seq > 0 && options.vocab > 0 && options.micro_batch > 0 && options.global_batch > 0);
        if (options.sequence_count == 0) options.sequence_count = options.global_batch;
        TRIFOLD_ASSERT(options.first_sequence >= 0 && options.first_sequence + options.sequence_count <= options.global_batch);
        TRIFOLD_ASSERT(options.sequence_count % options.micro_batch == 0);
        if (from.empty()) refuse(Exit::usage, "{} names no data: give a token file made by `trifold data tokenize`", options.name);
        int64_t samples = 0;
        for (const DataSource& source : from) {
            sources.push_back(open(source));
            sources.back().first_sample = samples;
            samples += sources.back().samples;
        }
    }

    // Global batch number blend.position() / global_batch; moves `blend` behind it.
    GlobalBatch batch(Blend& blend) const {
        GlobalBatch batch;
        batch.index = blend.position() / options.global_batch;
        for (int64_t s = 0; s < options.global_batch; ++s) {
            const Place at = place(blend.next());
            batch.valid_tokens += valid_targets(at);
            const int64_t mine = s - options.first_sequence;
            if (mine < 0 || mine >= options.sequence_count) continue;
            if (mine % options.micro_batch == 0) {
                MicroBatch& micro = batch.micro.emplace_back();
                micro.seq = options.seq;
                const auto tokens = static_cast<size_t>(options.micro_batch * options.seq);
                for (auto* values : {&micro.tokens, &micro.targets, &micro.positions}) values->reserve(tokens);
            }
            append_sequence(at, batch.micro.back());
        }
        return batch;
    }

    Blend blend() const {
        std::vector<double> weights;
        for (const Source& source : sources) weights.push_back(source.weight);
        return Blend(std::move(weights));
    }

    double weights() const {  // their sum
        double sum = 0;
        for (const Source& source : sources) sum += source.weight;
        return sum;
    }
    LoaderOptions options;
    std::vector<Source> sources;

private:
    Source open(const DataSource& from) const {
        if (!(from.weight > 0) || !std::isfinite(from.weight))
            refuse(Exit::usage, "{}: the weight of {} is {}; weights must be positive numbers", options.name, from.path, from.weight);
        Source source{.path = from.path, .weight = from.weight, .shards = {}};
        for (TokenFile& file : open_token_files(from.path)) {
            Shard shard{std::move(file), std::nullopt, source.samples, 0};
            shard.samples = std::max<int64_t>(0, shard.file.tokens() - 1) / options.seq;
            if (options.mask_prompt) shard.mask.emplace(mask_path(shard.file.path()), shard.file.tokens());
            source.samples += shard.samples;
            source.tokens += shard.file.tokens();
            source.shards.push_back(std::move(shard));
        }
        if (source.samples == 0)
            refuse(Exit::data, "{}: {} has {} tokens{}, but one sequence needs {} (train.seq + 1): use more data or a shorter train.seq",
                   options.name, from.path, with_commas(source.tokens),
                   source.shards.size() > 1 ? fmt::format(" in {} files", source.shards.size()) : "", with_commas(options.seq + 1));
        return source;
    }

    Place place(Blend::Choice choice) const {
        const Source& source = sources[choice.source];
        const auto samples = static_cast<uint64_t>(source.samples), index = static_cast<uint64_t>(choice.index);
        auto sample = static_cast<int64_t>(index % samples);
        if (options.shuffle) {
            const uint64_t key = mix(mix(mix(options.seed) ^ static_cast<uint64_t>(choice.source)) ^ index / samples);
            sample = static_cast<int64_t>(Permutation(samples, key)(static_cast<uint64_t>(sample)));
        }
        const auto behind = std::upper_bound(source.shards.begin(), source.shards.end(), sample,
                                             [](int64_t s, const Shard& shard) { return s < shard.first_sample; });
        const Shard& shard = *std::prev(behind);
        return {&shard, (sample - shard.first_sample) * options.seq, static_cast<uint64_t>(source.first_sample + sample)};
    }

    int64_t valid_targets(const Place& place) const {
        return options.seq - (place.shard->mask ? place.shard->mask->count(place.token + 1, options.seq) : 0);
    }

    void append_sequence(const Place& place, MicroBatch& micro) const {
        std::vector<int32_t> ids(static_cast<size_t>(options.seq + 1));
        place.shard->file.read(place.token, ids);
        check_ids(*place.shard, place.token, ids);
        micro.tokens.insert(micro.tokens.end(), ids.begin(), ids.end() - 1);
        micro.targets.insert(micro.targets.end(), ids.begin() + 1, ids.end());
        if (place.shard->mask) {
            int32_t* targets = &micro.targets[micro.targets.size() - static_cast<size_t>(options.seq)];
            for (int64_t t = 0; t < options.seq; ++t)
                if (place.shard->mask->is_prompt(place.token + 1 + t)) targets[t] = -1;
        }
        append_positions(place, ids, micro);
        micro.valid += valid_targets(place);
        micro.sample_ids.push_back(place.sample_id);
        ++micro.sequences;
    }

    void check_ids(const Shard& shard, int64_t first, std::span<const int32_t> ids) const {
        const auto is_outside = [&](int32_t id) { return id < 0 || id >= options.vocab; };
        const auto bad = std::find_if(ids.begin(), ids.end(), is_outside);
        if (bad == ids.end()) return;
        const int64_t token = first + (bad - ids.begin());
        refuse(Exit::data,
               "{}: token {} (byte {}) of {} has the id {}, but the vocabulary has {} ids (model.vocab): the file was made with another tokenizer, "
               "or is damaged",
               options.name, token, shard.file.byte_offset(token), shard.file.path(), shard.file.at(token), options.vocab);
    }

    void append_positions(const Place& place, std::span<const int32_t> ids, MicroBatch& micro) const {
        const bool isolated = options.documents == Documents::isolated;
        int64_t listed = isolated ? place.shard->file.next_listed_document(place.token) : 0;
        int32_t start = 0;
        for (int32_t t = 0; t < options.seq; ++t) {
            if (isolated && t > 0) {
                const bool begins = place.token + t == listed;
                if (begins) listed = place.shard->file.next_listed_document(listed);
                if (begins || ids[t - 1] == options.end_of_document) start = t;
            }
            micro.positions.push_back(t - start);
            if (isolated) micro.doc_start.push_back(start);
        }
    }
};

// Keeps two batches ready. The thread starts with the first next(), so a loader that is only asked about its data has none.
struct Loader::State {
    struct Entry {
        GlobalBatch batch;
        std::exception_ptr error;  // in place of a batch, and the last one
    };
    const Samples samples;
    Blend blend = samples.blend();  // of the thread, while there is one
    std::thread thread;
    int64_t position = 0;  // of the caller
    std::optional<Queue<Entry>> ready;

    ~State() { stop(); }
    void produce(int64_t first) {
        try {
            blend.seek(first * samples.options.global_batch);
            while (ready->push({samples.batch(blend), nullptr})) {
            }
        } catch (...) {
            ready->push({{}, std::current_exception()});
        }
    }
    void stop() {
        if (!thread.joinable()) return;
        ready->close();
        thread.join();
    }
};

Loader::Loader(const std::vector<DataSource>& sources, const LoaderOptions& options) : state_(new State{Samples(sources, options)}) {}
Loader::~Loader() = default;
Loader::Loader(Loader&&) noexcept = default;

GlobalBatch Loader::next() {
    State& s = *state_;
    if (!s.thread.joinable()) {
        s.ready.emplace(1);  // the second one waits in the thread
        s.thread = std::thread([&s, first = s.position] { s.produce(first); });
    }
    std::optional<State::Entry> entry = s.ready->pop();
    if (entry->error) {
        s.stop();
        std::rethrow_exception(entry->error);
    }
    ++s.position;
    return std::move(entry->batch);
}

void Loader::seek(int64_t k) {
    TRIFOLD_ASSERT(k >= 0);
    if (k != state_->position) state_->stop();
    state_->position = k;
}

int64_t Loader::position() const { return state_->position; }

int64_t Loader::samples_per_epoch() const {
    const Source& last = state_->samples.sources.back();
    return last.first_sample + last.samples;
}

uint64_t Loader::content_hash() const {
    uint64_t hash = 0;
    const auto add = [&](uint64_t value) { hash = XXH3_64bits_withSeed(&value, sizeof(value), hash); };
    for (const Source& source : state_->samples.sources) {
        add(std::bit_cast<uint64_t>(source.weight / state_->samples.weights()));
        add(source.shards.size());
        for (const Shard& shard : source.shards) {
            add(shard.file.sampled_hash());
            if (shard.mask) add(sampled_hash(shard.mask->file()));
        }
    }
    return hash;
}

std::string Loader::description() const {
    std::string text;
    for (const Source& source : state_->samples.sources) {
        const size_t files = source.shards.size();
        text +=
            fmt::format("{}{}: {} tokens in {} file{}, {} samples of {} tokens per epoch", text.empty() ? "" : "\n", source.path,
                        with_commas(source.tokens), files, files == 1 ? "" : "s", with_commas(source.samples), with_commas(state_->samples.options.seq));
        if (state_->samples.sources.size() > 1) text += fmt::format(", {:.4g} % of the blend", 100 * source.weight / state_->samples.weights());
    }
    return text;
}

}  // namespace trifold
