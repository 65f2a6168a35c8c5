// model/config.h   The resolved configuration: one struct per section, names and defaults as in `trifold train --help`.
//
// Every option is declared once, in model/options_table.cpp (name, type, unit, help); the parser, --help, the resolved
// config.json and "did you mean" all read that table. "Derived" marks a value that resolve() fills in when it was not given.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "parallel/schedule.h"

namespace trifold {

enum class Position : uint8_t { learned, rope };
enum class BlockKind : uint8_t { serial, parallel };
enum class Bias : uint8_t { all, none, qkv };
enum class RopeScalingKind : uint8_t { none, linear, llama3 };

struct RopeScaling {
    RopeScalingKind kind = RopeScalingKind::none;
    double factor = 1.0;                    // linear, llama3
    double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
    int64_t original_max_seq = 8192;        // llama3
};

struct ModelConfig {
    std::string preset = "";
    int64_t layers = 0, hidden = 0, heads = 0;
    int64_t kv_heads = 0;    // derived: heads
    int64_t head_dim = 0;    // derived: hidden / heads
    int64_t ffn_hidden = 0;  // derived: 4 * hidden; swiglu: 8/3 * hidden rounded up to 64
    int64_t vocab = 0, max_seq = 0;
    NormKind norm = NormKind::layernorm;
    double norm_eps = 1e-5;
    Position position = Position::learned;
    double rope_base = 10000.0;
    RopeScaling rope_scaling = {};
    ActivationKind activation = ActivationKind::gelu_tanh;
    BlockKind block = BlockKind::serial;
    int64_t window = 0, full_attention_every = 0;
    Bias bias = Bias::all;
    bool qk_norm = false, tied = true;
    double init_std = 0.02;

    // The window of global layer l (0: full attention).
    int64_t window_of(int64_t l) const { return full_attention_every > 0 && (l + 1) % full_attention_every == 0 ? 0 : window; }
    // How many layers have which window.
    std::map<int64_t, int64_t> layers_by_window() const {
        std::map<int64_t, int64_t> layers_of;
        for (int64_t l = 0; l < layers; ++l) ++layers_of[window_of(l)];
        return layers_of;
    }
    bool swiglu() const { return activation == ActivationKind::swiglu; }
    bool has_bias(bool qkv) const { return bias == Bias::all || (bias == Bias::qkv && qkv); }
};

enum class Recompute : uint8_t { none, selective, full };

struct TrainConfig {
    int64_t steps = 0, seq = 0;        // seq derived: model.max_seq
    int64_t micro_batch = 1;           // sequences
    int64_t global_batch = 0;          // sequences; derived: micro_batch
    DType dtype = DType::bf16;
    uint64_t seed = 1234;
    Recompute recompute = Recompute::none;
};

enum class OptimizerKind : uint8_t { adamw, lamb };
enum class LrSchedule : uint8_t { cosine, linear, constant, wsd };

struct OptimConfig {
    OptimizerKind name = OptimizerKind::adamw;
    double lr = 6e-4, min_lr = -1;     // min_lr derived: lr / 10
    int64_t warmup_steps = 0;
    LrSchedule schedule = LrSchedule::cosine;
    int64_t decay_steps = 0;           // derived: cosine, linear: train.steps; wsd: the last fifth
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, clip = 1.0;
    int64_t zero = 1;
};

struct DataSource {
    std::string path;   // file, glob, or Megatron prefix
    double weight = 1.0;
};
enum class Documents : uint8_t { joined, isolated };

struct DataConfig {
    std::vector<DataSource> train, val;
    std::string tokenizer = "bytes";
    Documents documents = Documents::joined;
    bool mask_prompt = false, shuffle = true;
    int64_t eval_every = 0, eval_batches = 20;
};

struct CheckpointConfig {
    std::string dir;                   // derived: run.dir/checkpoints
    int64_t every = 0, keep = 3, keep_every = 0;
    bool async = true;
    std::string resume = "auto";       // auto, none, or a path
};

struct MeshConfig {
    int64_t tp = 1, pp = 1;
    int64_t dp = 0;                    // derived: ranks / (tp * pp * cp)
    int64_t cp = 1, ep = 1, etp = 1, virtual_stages = 1;
    ScheduleKind schedule = ScheduleKind::one_f_one_b;
    std::vector<int64_t> layers_per_stage;  // empty: balanced
};

// Communication folded under computation; off: each waits where it is issued.
struct OverlapConfig {
    bool dp = true, tp = true, pp = true, checkpoint = true;
    int64_t pp_ahead = 0;              // micro-batches more in flight for each stage behind
    int64_t tp_chunks = 1;             // pieces that each tensor-parallel rank's rows are sent in
    int64_t dp_bucket = 4 << 20;       // elements of layers that are gathered and reduced at once, at least
};

enum class OnNan : uint8_t { skip, stop };
struct ResilienceConfig {
    OnNan on_nan = OnNan::skip;
    int64_t max_skips = 10;            // in a row
    double stall_s = 60, start_s = 60; // deadlines of a collective, of the first meeting of all ranks
};

enum class Comm : uint8_t { automatic, nccl, host };
struct LaunchConfig {
    std::string store, interface;
};

struct RunConfig {
    std::string dir;                   // derived: runs/DATE-TIME
    Device device = Device::automatic;
    Comm comm = Comm::automatic;
    AttentionProvider attention = AttentionProvider::automatic;  // derived; what is left is decided on the GPU (commands/attention.h)
    int64_t threads = 0;               // derived: cores this process may use / ranks on this host
    int64_t log_every = 1;
    bool trace = false, tensorboard = true, deterministic = true;
};

// A planted fault (debug.inject, --inject): 'kind=nan,step=3' makes a gradient of step 3 NaN.
enum class InjectKind : uint8_t { none, nan };
struct Inject {
    InjectKind kind = InjectKind::none;
    int64_t step = 0;
};

struct DebugConfig {
    std::string dump_grads, dump_params;
    StreamMode streams = StreamMode::normal;
    Inject inject;
};

struct Config {
    ModelConfig model;
    std::string init_from;             // init.from
    MeshConfig mesh;
    TrainConfig train;
    OptimConfig optim;
    DataConfig data;
    CheckpointConfig checkpoint;
    OverlapConfig overlap;
    ResilienceConfig resilience;
    RunConfig run;
    LaunchConfig launch;
    DebugConfig debug;
    // Where each value came from ("default", "preset gpt2-124m", "a.json", "flag", ...), keyed by dotted name.
    std::map<std::string, std::string> origin;
};

}  // namespace trifold
