// test/unit/test_options_mesh.cpp   Options of jobs with many ranks: the mesh, stages, and what does not fit.
#include "test/unit/options.h"

#include "model/options_table.h"

using namespace trifold;
using namespace trifold::test;

TEST_CASE("layers per stage: a list, in a flag or a file") {
    using Layers = std::vector<int64_t>;
    CHECK(parse_config({}).mesh.layers_per_stage.empty());
    CHECK(parse_config({"--mesh.layers_per_stage=12,13,12"}).mesh.layers_per_stage == Layers{12, 13, 12});
    CHECK(parse_config({"--mesh.layers_per_stage", "[3, 4]"}).mesh.layers_per_stage == Layers{3, 4});
    CHECK(parse_config({"--mesh.layers_per_stage=7"}).mesh.layers_per_stage == Layers{7});
    CHECK(parse_config({"--mesh.layers_per_stage=7,8", "--mesh.layers_per_stage=balanced"}).mesh.layers_per_stage.empty());
    const auto in_file = [](const std::string& value) { return config_from_json(R"({"mesh": {"layers_per_stage": )" + value + "}}", "a").mesh.layers_per_stage; };
    CHECK(in_file("[1, 2.0, 3]") == Layers{1, 2, 3});
    CHECK(in_file("\"1,2\"") == Layers{1, 2});
    CHECK(in_file("5") == Layers{5});
    CHECK(in_file("[]").empty());
    CHECK(in_file("\"balanced\"").empty());
    CHECK(contains(help_text(), "--mesh.layers_per_stage "));

    const auto entry = [](const std::string& text) { return refusal_of({"--mesh.layers_per_stage=" + text}); };
    CHECK(entry("1,x") == "an entry of --mesh.layers_per_stage must be an integer, not \"x\"");
    for (const char* text : {"", ",1", "1,", "1,,2"}) CHECK(entry(text) == "an entry of --mesh.layers_per_stage must be an integer, not \"\"");
    CHECK(contains(entry("2,0"), "must be at least 1 and at most 4096, not 0"));
    CHECK(contains(entry("1.5"), "must be an integer, not 1.5"));
    CHECK(contains(entry("[1"), "--mesh.layers_per_stage, line 1, column 3"));
    CHECK(contains(refusal_of_json(R"({"mesh": {"layers_per_stage": {"0": 1}}})"), "must be a list of integers, such as 12,13,12"));
    CHECK(contains(refusal_of_json(R"({"mesh": {"layers_per_stage": true}})"), "must be a list of integers"));
    CHECK(contains(refusal_of_json(R"({"mesh": {"layers_per_stage": [[1]]}})"), "must be an integer, not [1]"));
}

TEST_CASE("options of jobs with many ranks are read") {
    const Config c = parse_config({"--mesh.schedule=1f1b", "--overlap.dp=off", "--overlap.tp", "off", "--overlap.pp=off", "--overlap.checkpoint=off", "--overlap.tp_chunks=4", "--overlap.pp_ahead=2",
                                   "--overlap.dp_bucket=1e6", "--run.comm=host", "--launch.store=10.0.0.1:4000", "--launch.interface=eth0", "--resilience.stall_s=2.5",
                                   "--resilience.start_s=120"});
    CHECK(c.mesh.schedule == ScheduleKind::one_f_one_b);
    CHECK_FALSE(c.overlap.dp);
    CHECK_FALSE(c.overlap.tp);
    CHECK_FALSE(c.overlap.pp);
    CHECK_FALSE(c.overlap.checkpoint);
    CHECK(c.overlap.tp_chunks == 4);
    CHECK(c.overlap.pp_ahead == 2);
    CHECK(c.overlap.dp_bucket == 1000000);
    CHECK(c.run.comm == Comm::host);
    CHECK(c.launch.store == "10.0.0.1:4000");
    CHECK(c.launch.interface == "eth0");
    CHECK(c.resilience.stall_s == 2.5);
    CHECK(c.resilience.start_s == 120);
    CHECK(config_from_json(to_json(c), "a").launch.store == c.launch.store);
    const Config defaults;
    CHECK((defaults.overlap.dp && defaults.overlap.tp && defaults.overlap.pp && defaults.overlap.checkpoint));
    CHECK(defaults.run.comm == Comm::automatic);
    CHECK(contains(refusal_of({"--mesh.schedule=gpipe"}), "must be one of 1f1b, interleaved or zero_bubble"));
    CHECK(contains(refusal_of({"--run.comm=ucx"}), "must be one of auto, nccl or host"));
    CHECK(contains(refusal_of({"--overlap.tp_chunks=0"}), "must be at least 1 and at most 64"));
    CHECK(contains(refusal_of({"--resilience.stall_s=0"}), "must be above 0"));
    for (const char* axis : {"tp", "pp", "dp", "cp", "ep", "etp"}) {  // products of sizes stay inside 64 bits
        CHECK(contains(refusal_of({std::string("--mesh.") + axis + "=0"}), "must be at least 1"));
        CHECK(contains(refusal_of({std::string("--mesh.") + axis + "=4611686018427387904"}), "at most 32768"));
    }
}

TEST_CASE("the mesh follows from the number of ranks") {
    const std::vector<std::string> four_layers = {"--model.preset=tiny-gpt2", "--model.layers=4", "--train.micro_batch=3", "--run.device=cpu"};
    const auto with = [&](std::vector<std::string> args, int ranks, int local_ranks = 1) {
        args.insert(args.begin(), four_layers.begin(), four_layers.end());
        return resolved(args, ranks, local_ranks);
    };
    const Config alone = with({}, 1);
    CHECK(alone.mesh.dp == 1);
    CHECK(alone.mesh.schedule == ScheduleKind::one_f_one_b);
    const Config c = with({"--mesh.tp=2", "--mesh.pp=2"}, 12);
    CHECK(c.mesh.dp == 3);
    CHECK(c.train.global_batch == 9);
    CHECK(c.origin.at("mesh.dp") == "derived");
    CHECK(with({"--mesh.dp=3"}, 3).origin.at("mesh.dp") == "flag");
    CHECK(with({"--run.threads=3"}, 8, 8).run.threads == 3);
    CHECK(with({}, 1024, 1024).run.threads == 1);  // more ranks than processors
    CHECK(with({"--mesh.pp=2", "--mesh.layers_per_stage=3,1"}, 2).mesh.layers_per_stage == std::vector<int64_t>{3, 1});

    Config again = c;
    resolve(again, 12);
    CHECK(to_json(again, Origins::with) == to_json(c, Origins::with));
}

TEST_CASE("virtual stages mean the interleaved schedule") {
    const std::vector<std::string> args = {"--model.preset=tiny-gpt2", "--model.layers=4", "--run.dir=r", "--mesh.pp=2", "--mesh.virtual_stages=2"};
    Config c = resolved(args, 2);
    CHECK(c.mesh.schedule == ScheduleKind::interleaved);
    CHECK(c.origin.at("mesh.schedule") == "derived");
    const std::string before = to_json(c, Origins::with);
    resolve(c, 2);
    CHECK(to_json(c, Origins::with) == before);
    // Derived again from a run's config.json, not given by it: the same file with one chunk per stage is a plain pipeline.
    Config read = config_from_json(before, "config.json");
    CHECK(read.mesh.virtual_stages == 2);
    resolve(read, 2);
    CHECK(read.mesh.schedule == ScheduleKind::interleaved);
    auto given = args;
    given.push_back("--mesh.schedule=interleaved");
    CHECK(resolved(given, 2).origin.at("mesh.schedule") == "flag");
    given.back() = "--mesh.schedule=1f1b";
    CHECK(refusal([&] { resolved(given, 2); }) == "mesh.schedule=1f1b runs one part of the model per stage, but mesh.virtual_stages=2: choose mesh.schedule=interleaved, or mesh.virtual_stages=1");
}

TEST_CASE("a mesh that does not fit the ranks or the model is refused with the numbers") {
    CHECK(refusal_of_resolve({"--mesh.tp=1", "--mesh.dp=1"}).empty());
    CHECK(refusal_of_resolve({"--mesh.tp=2"}) ==
          "mesh.tp * pp * cp = 2 * 1 * 1 = 2, but the job has 1 rank: change the mesh, or start a multiple of 2 ranks (mpirun -n)");
    CHECK(contains(refusal_of_resolve({"--mesh.tp=2", "--mesh.pp=2"}, 6), "mesh.tp * pp * cp = 2 * 2 * 1 = 4, but the job has 6 ranks: "));
    CHECK(refusal_of_resolve({"--mesh.dp=3", "--mesh.tp=2"}, 4) ==
          "mesh.dp * tp * pp * cp = 3 * 2 * 1 * 1 = 6, but the job has 4 ranks: leave mesh.dp out, or start 6 ranks");
    CHECK(contains(refusal_of_resolve({"--mesh.dp=2"}), "but the job has 1 rank: leave mesh.dp out"));

    CHECK(refusal_of_resolve({"--mesh.cp=2"}, 2) == "mesh.cp = 2, but this axis is not available yet: it must be 1");
    CHECK(refusal_of_resolve({"--mesh.ep=2"}, 2) == "mesh.ep = 2, but this axis is not available yet: it must be 1");
    CHECK(refusal_of_resolve({"--mesh.etp=2"}) == "mesh.etp = 2, but this axis is not available yet: it must be 1");
    CHECK(contains(refusal_of_resolve({"--mesh.tp=3", "--train.seq=96"}, 3), "model.heads = 4 is not divisible by mesh.tp = 3: "));
    CHECK(contains(refusal_of_resolve({"--mesh.tp=4", "--model.kv_heads=2"}, 4), "model.kv_heads = 2 is not divisible by mesh.tp = 4: "));
    CHECK(contains(refusal_of_resolve({"--mesh.tp=4", "--model.kv_heads=4", "--model.ffn_hidden=1026"}, 4), "model.ffn_hidden = 1026 is not divisible by mesh.tp = 4: "));
    CHECK(contains(refusal_of_resolve({"--mesh.tp=4", "--model.kv_heads=4", "--train.seq=30"}, 4), "train.micro_batch * train.seq = 30 is not divisible by mesh.tp = 4: "));
    CHECK(contains(refusal_of_resolve({"--mesh.dp=2", "--train.global_batch=3"}, 2), "is not a multiple of train.micro_batch * mesh.dp = 1 * 2 = 2: try 2 or 4"));

    CHECK(refusal_of_resolve({"--mesh.virtual_stages=2"}) == "mesh.virtual_stages = 2 needs a pipeline: give mesh.pp > 1");
    CHECK(refusal_of_resolve({"--mesh.schedule=zero_bubble"}) == "mesh.schedule = zero_bubble needs a pipeline: give mesh.pp > 1");
    CHECK(contains(refusal_of_resolve({"--mesh.schedule=zero_bubble", "--mesh.pp=2", "--train.recompute=full"}, 2), "use selective or none"));
    CHECK(refusal_of_resolve({"--mesh.schedule=zero_bubble", "--mesh.pp=2", "--train.recompute=selective"}, 2).empty());
    CHECK(contains(refusal_of_resolve({"--optim.zero=2", "--mesh.pp=2"}, 2), "optim.zero = 2 is not available with pipeline stages (mesh.pp = 2)"));
    CHECK(refusal_of_resolve({"--optim.zero=2"}, 2).empty());

    CHECK(contains(refusal_of_resolve({"--mesh.pp=4"}, 4), "model.layers = 2 is less than mesh.pp * mesh.virtual_stages = 4 * 1: "));
    CHECK(contains(refusal_of_resolve({"--mesh.pp=2", "--mesh.layers_per_stage=2,1"}, 2), "adds up to 3 layers, but model.layers = 2"));
    CHECK(contains(refusal_of_resolve({"--mesh.pp=2", "--mesh.layers_per_stage=2"}, 2), "has 1 numbers; it takes one per stage (2)"));
    CHECK(contains(refusal_of_resolve({"--model.layers=8", "--mesh.pp=2", "--mesh.virtual_stages=2", "--mesh.layers_per_stage=2,2,4"}, 2),
                   "has 3 numbers; it takes one per stage (2) or one per part (4)"));
    CHECK(contains(refusal_of_resolve({"--model.layers=8", "--mesh.pp=2", "--mesh.virtual_stages=2", "--mesh.layers_per_stage=7,1"}, 2),
                   "gives stage 1 1 layers for 2 virtual stages"));
    CHECK(refusal_of_resolve({"--model.layers=8", "--mesh.pp=2", "--mesh.virtual_stages=2", "--mesh.layers_per_stage=1,2,2,3"}, 2).empty());

    CHECK(contains(refusal_of_resolve({"--run.comm=nccl", "--run.device=cpu"}), "run.comm = nccl carries data between GPUs"));
    CHECK(refusal_of_resolve({"--run.comm=host", "--run.device=cpu"}).empty());
    CHECK(contains(refusal_of_resolve({"--run.attention=cudnn", "--run.device=cpu"}), "run.attention = cudnn is for GPUs, in bf16, on joined documents (here: cpu, "));
    CHECK(refusal_of_resolve({"--run.attention=own", "--run.device=cpu"}).empty());
}
