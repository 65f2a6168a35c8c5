// test/unit/fake_run.h   A run at some step without a model: what the tests of checkpoints save and load.
#pragma once
#include "test/catch.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/load.h"
#include "model/options.h"
#include "test/unit/problems.h"
#include "test/unit/temporary_folder.h"

namespace trifold {

inline ModelConfig tiny_model() {
    ModelConfig m;
    m.layers = 1;
    m.hidden = 12;
    m.heads = m.kv_heads = 3;
    m.head_dim = 4;
    m.ffn_hidden = 20;
    m.vocab = 37;
    m.max_seq = 9;
    return m;
}

inline std::string config_of(const ModelConfig& model) {
    Config c;
    c.model = model;
    return to_json(c);
}

// A run at some step: tensors of random bits (NaN payloads included), padding zero.
struct FakeRun {
    ModelConfig model = tiny_model();
    ParameterTable table{model};
    std::vector<float> master, m, v;
    TrainingState state;

    explicit FakeRun(int64_t step = 0, const ModelConfig& of = tiny_model()) : model(of), table(of) { become(step); }
    // The same model at another step; its table stays where it is, as that of a trainer does.
    void become(int64_t step) {
        std::mt19937 random(static_cast<uint32_t>(step));
        for (auto* buffer : {&master, &m, &v}) {
            buffer->resize(static_cast<size_t>(table.flat_elems()));
            for (const Parameter& p : table.all())
                for (int64_t i = 0; i < p.elems; ++i) {
                    const uint32_t bits = random();
                    std::memcpy(&(*buffer)[static_cast<size_t>(p.offset + i)], &bits, 4);
                }
        }
        state = {.step = step,
                 .updates = step - 1,
                 .skipped = 1,
                 .samples = 8 * step,
                 .tokens = 800 * step,
                 .seed = UINT64_MAX - 3,
                 .config_json = config_of(model),
                 .data_hash = "d1"};
    }
    std::vector<StateSlice> slices() { return whole_state(table, master.data(), m.data(), v.data()); }
    bool same_bits(const FakeRun& other) const {
        const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
            return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
        };
        return same(master, other.master) && same(m, other.m) && same(v, other.v);
    }
};

inline StoreOptions store_options(const std::string& dir) {
    return {.dir = dir, .keep = 3, .keep_every = 0, .threads = 1, .shard_bytes = 4000, .tool = "test"};
}

inline SaveOutcome save(const std::string& dir, int64_t step) {
    FakeRun run(step);
    CheckpointStore store(store_options(dir));
    SaveOutcome outcome = store.save(run.model, run.slices(), run.state);
    INFO(outcome.problem);
    REQUIRE(outcome.ok());
    return outcome;
}

// Loads the newest one and checks that it is exactly what was saved at its step. Returns the step, -1 for none.
inline int64_t load_exactly(const std::string& dir, std::vector<std::string>* damaged = nullptr) {
    const FoundCheckpoint found = find_newest(dir);
    if (damaged) *damaged = found.damaged;
    if (!found.found()) return -1;
    FakeRun loaded(-1);
    load_state(found, loaded.model, loaded.slices());
    const FakeRun expected(found.state.step);
    REQUIRE(loaded.same_bits(expected));
    REQUIRE(found.state.samples == expected.state.samples);
    return found.state.step;
}

inline std::vector<std::string> names_in(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir))
        if (entry.path().filename() != ".writer") names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

}  // namespace trifold
