// test/unit/test_options.cpp   Reading options: precedence, bad values, suggestions, JSON there and back, help.
#include "test/catch.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "model/options.h"
#include "model/options_table.h"
#include "test/unit/options.h"

using namespace trifold;
using namespace trifold::test;

namespace {

struct TemporaryFolder {
    std::filesystem::path path;
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "trifold-options-XXXXXX").string();
        path = mkdtemp(name.data());
    }
    ~TemporaryFolder() { std::filesystem::remove_all(path); }
    std::string file(const std::string& name, const std::string& text) const {
        std::ofstream(path / name) << text;
        return (path / name).string();
    }
};

}  // namespace

TEST_CASE("flags come as --name=value and --name value, booleans also alone") {
    const Config c = parse_config({"--optim.lr=3e-4", "--train.steps", "1e3", "--run.trace", "--model.tied", "off",
                                   "--run.tensorboard=false", "--optim.name=lamb", "--run.dir", "-x",
                                   "--train.seed=18446744073709551615", "--data.shuffle", "--optim.zero=2"});
    CHECK(c.optim.lr == 3e-4);
    CHECK(c.train.steps == 1000);
    CHECK(c.run.trace);
    CHECK_FALSE(c.model.tied);
    CHECK_FALSE(c.run.tensorboard);
    CHECK(c.optim.name == OptimizerKind::lamb);
    CHECK(c.run.dir == "-x");
    CHECK(c.train.seed == 18446744073709551615u);
    CHECK(c.data.shuffle);
    CHECK(c.optim.zero == 2);
    CHECK(c.origin.at("optim.lr") == "flag");
    CHECK(c.origin.at("optim.beta1") == "default");
}

TEST_CASE("precedence: defaults, init.from, preset, files in order, flags") {
    const TemporaryFolder folder;
    const std::string a =
        folder.file("a.json", R"({"model": {"layers": 3, "norm_eps": 1e-3}, "optim": {"lr": 1, "beta1": 0.5}})");
    const std::string b =
        folder.file("b.json", R"({"optim": {"lr": 2, "eps": 1e-4}, "model": {"preset": "llama2-7b"}})");
    ParseContext context;
    context.read_model = [](const std::string& path) {
        CHECK(path == "weights");
        ModelConfig m;
        m.layers = 77, m.qk_norm = true, m.vocab = 5;
        return m;
    };

    const Config c = parse_config({"--optim.eps=1e-5", "--config", a, "--config=" + b, "--init.from=weights"}, context);
    CHECK(c.optim.beta1 == 0.5);    // a file
    CHECK(c.optim.lr == 2);         // a later file
    CHECK(c.optim.eps == 1e-5);     // a flag, though it stands first
    CHECK(c.model.layers == 3);     // a file over the preset that a later file names
    CHECK(c.model.hidden == 4096);  // the preset
    CHECK_FALSE(c.model.qk_norm);   // a preset is a whole model: nothing of init.from shows through
    CHECK(c.origin.at("optim.lr") == b);
    CHECK(c.origin.at("optim.eps") == "flag");
    CHECK(c.origin.at("model.hidden") == "preset llama2-7b");
    CHECK(c.origin.at("optim.beta2") == "default");

    const Config d = parse_config({"--init.from=weights", "--model.layers=2"}, context);
    CHECK(d.model.layers == 2);
    CHECK(d.model.qk_norm);
    CHECK(d.model.vocab == 5);
    CHECK(d.origin.at("model.vocab") == "init.from weights");

    ParseContext from_checkpoint;
    from_checkpoint.base.optim.lr = 9;
    from_checkpoint.base.origin["optim.lr"] = "step-5";
    const Config e = parse_config({}, from_checkpoint);
    CHECK(e.optim.lr == 9);
    CHECK(e.origin.at("optim.lr") == "step-5");
}

TEST_CASE("data sources: a path, or a list with weights") {
    CHECK(parse_config({"--data.train=dir/a,b.bin"}).data.train.at(0).path == "dir/a,b.bin");
    const Config c = parse_config({R"(--data.val=["a.bin", {"path": "b", "weight": 0.25}])"});
    REQUIRE(c.data.val.size() == 2);
    CHECK(c.data.val[0].weight == 1);
    CHECK(c.data.val[1].path == "b");
    CHECK(c.data.val[1].weight == 0.25);
    CHECK(config_from_json(R"({"data": {"train": "x"}})", "a").data.train.at(0).path == "x");
    CHECK(config_from_json(R"({"data": {"train": {"path": "y", "weight": 3}}})", "a").data.train.at(0).weight == 3);
    CHECK(contains(refusal_of({"--data.train="}), "must not have an empty path"));
    CHECK(contains(refusal_of_json(R"({"data": {"train": [{"weight": 1}]}})"), "must not have an empty path"));
    CHECK(contains(refusal_of_json(R"({"data": {"train": [{"path": "a", "weight": 0}]}})"), "weights above 0"));
    CHECK(contains(refusal_of_json(R"({"data": {"train": [{"path": "a", "wieght": 1}]}})"), "unknown key wieght"));
    CHECK(contains(refusal_of_json(R"({"data": {"train": [3]}})"), "must be a path"));
    CHECK(contains(refusal_of({"--data.train=[1"}), "--data.train, line 1, column 3"));
}

TEST_CASE("unknown names are refused with a suggestion") {
    CHECK(refusal_of({"--optim.lrr=1"}) == "unknown option --optim.lrr: did you mean --optim.lr?");
    CHECK(refusal_of({"--lr=1"}) == "unknown option --lr: did you mean --optim.lr?");
    CHECK(contains(refusal_of({"--dir", "x"}), "--checkpoint.dir or --run.dir"));
    CHECK(refusal_of({"--confg=a"}) == "unknown option --confg: did you mean --config?");
    CHECK(contains(refusal_of({"--zzzzzz"}), "--help lists all options"));
    CHECK(contains(refusal_of({"--model.rope_scaling=llama3"}), "--model.rope_scaling.kind"));
    CHECK(contains(refusal_of({"-x"}), "unknown option -x"));
    CHECK(contains(refusal_of({"stray"}), "unexpected argument \"stray\""));
    CHECK(refusal_of_json(R"({"optim": {"lrr": 1}})") == "a.json: unknown key optim.lrr: did you mean optim.lr?");
    CHECK(refusal_of_json(R"({"optin": {"lr": 1}})") == "a.json: unknown key optin: did you mean optim?");
    CHECK(
        contains(refusal_of_json(R"({"optim": {"momentum_constant": 1}})"), "the keys of optim are name, lr, min_lr"));
    CHECK(contains(refusal_of_json(R"({"optim.lr": 1})"), "sections nest"));
    CHECK(contains(refusal_of({"--model.preset=gpt2-125m"}), "unknown preset \"gpt2-125m\": did you mean gpt2-124m"));
}

TEST_CASE("documented names of later versions are not called unknown") {
    for (const char* name :
         {"model.moe.experts", "overlap.ep", "overlap.ep_chunks", "resilience.restarts", "resilience.heartbeat_s", "gpu"})
        CHECK(refusal_of({std::string("--") + name + "=1"}) ==
              std::string("--") + name + " is not available in this build yet");
    CHECK(contains(refusal_of_json(R"({"model": {"moe": {"experts": 8}}})"),
                   "model.moe is not available in this build yet"));
    CHECK(contains(refusal_of_json(R"({"gpu": {"streams": 2}})"), "gpu is not available in this build yet"));
}

TEST_CASE("values of a wrong type or outside the range are refused") {
    CHECK(refusal_of({"--train.steps=3.5"}) == "--train.steps must be an integer, not 3.5");
    CHECK(refusal_of({"--train.steps=many"}) == "--train.steps must be an integer, not \"many\"");
    CHECK(contains(refusal_of({"--train.steps=1e300"}), "--train.steps must be an integer"));
    CHECK(contains(refusal_of({"--train.steps=99999999999999999999"}), "must be"));
    CHECK(contains(refusal_of({"--train.steps="}), "must be an integer"));
    CHECK(contains(refusal_of({"--train.steps"}), "--train.steps needs a value"));
    CHECK(contains(refusal_of({"--train.steps", "--run.trace"}), "--train.steps needs a value"));
    CHECK(contains(refusal_of({"--train.seed=-1"}), "at least 0"));
    CHECK(contains(refusal_of({"--train.seed=1.5"}), "must be an integer"));
    CHECK(contains(refusal_of({"--optim.lr=nan"}), "--optim.lr must be a number, not \"nan\""));
    CHECK(contains(refusal_of({"--optim.lr=inf"}), "must be a number"));
    CHECK(contains(refusal_of({"--optim.lr=0.1x"}), "must be a number"));
    CHECK(refusal_of({"--optim.beta2=1"}) == "--optim.beta2 must be at least 0 and below 1, not 1");
    CHECK(contains(refusal_of({"--optim.eps=0"}), "must be above 0"));
    CHECK(contains(refusal_of({"--model.window=-1"}), "must be at least 0"));
    CHECK(contains(refusal_of({"--model.heads=0"}), "must be at least 1"));
    CHECK(contains(refusal_of({"--model.tied=maybe"}), "must be on or off"));
    CHECK(refusal_of({"--model.norm=batchnorm"}) ==
          "--model.norm must be one of layernorm or rmsnorm, not \"batchnorm\"");
    CHECK(refusal_of_json(R"({"train": {"steps": "10"}})") == "train.steps in a.json must be an integer, not \"10\"");
    CHECK(contains(refusal_of_json(R"({"train": {"steps": null}})"), "must be an integer, not null"));
    CHECK(contains(refusal_of_json(R"({"optim": {"lr": true}})"), "must be a number, not true"));
    CHECK(contains(refusal_of_json(R"({"run": {"dir": 3}})"), "must be text, not 3"));
    CHECK(contains(refusal_of_json(R"({"optim": 3})"), "must be an object"));
    CHECK(contains(refusal_of({"--run.dir=\xff"}), "must be valid UTF-8"));
    CHECK(config_from_json(R"({"train": {"steps": 1e6, "seed": 7.0}})", "a").train.steps == 1000000);
}

TEST_CASE("planted faults") {
    const Config c = parse_config({"--inject", "step=3,kind=nan"});
    CHECK(c.debug.inject.kind == InjectKind::nan);
    CHECK(c.debug.inject.step == 3);
    CHECK(config_from_json(to_json(c), "a").debug.inject.step == 3);
    CHECK(config_from_json(to_json(Config{}), "a").debug.inject.kind == InjectKind::none);
    for (const char* bad :
         {"kind=nan", "step=3", "kind=nan,step=0", "kind=nan,step=-1", "kind=nan,step=x", "kind=nan,step=99999999999999999999", "kind=nan,step= 3", "step=+3,kind=nan", "step=1", "7", "kind=rain,step=1", "nan"}) {
        INFO(bad);
        CHECK(contains(refusal_of({std::string("--debug.inject=") + bad}), "--debug.inject "));
    }
}

TEST_CASE("broken JSON is refused with its place") {
    CHECK(contains(refusal_of_json("{\"optim\":\n  {\"lr\": 1,,}}"), "a.json, line 2, column 12: syntax error"));
    CHECK(contains(refusal_of_json(""), "a.json, line 1, column 1"));
    CHECK(contains(refusal_of_json("{\"optim\": {"), "a.json, line 1, column 12"));
    CHECK(contains(refusal_of_json("[1]"), "must hold one JSON object"));
    CHECK(contains(refusal_of_json("{} {}"), "a.json, line 1, column 4"));
    CHECK(contains(refusal_of_json(R"({"optim": {"lr": 1e999}})"), "number overflow"));
    CHECK(refusal_of_json(R"({"optim": {"lr": 1, "eps": 1, "lr": 2}})") ==
          "a.json: the key optim.lr appears twice; keep one");
    CHECK(contains(refusal_of_json(R"({"data": {"train": [{"path": "a"}, {"path": "b", "path": "c"}]}})"),
                   "data.train.path appears twice"));
    CHECK(refusal_of_json("{ // a comment\n \"optim\": {\"lr\": 1 /* another */}}").empty());
    CHECK(contains(refusal_of({"--config=/no/such/file.json"}), "/no/such/file.json: No such file"));
    CHECK(contains(refusal_of({"--config", std::filesystem::temp_directory_path().string()}), "is a folder"));
}

TEST_CASE("flags of one command and positional arguments") {
    bool json = false;
    int64_t count = 0;
    double heat = 0;
    std::string prompt;
    std::vector<std::string> rest;
    ParseContext context;
    context.flags = {{"json", "", "", &json},
                     {"tokens", "N", "", &count},
                     {"temperature", "X", "", &heat},
                     {"prompt", "TEXT", "", &prompt}};
    context.positional = &rest;
    parse_config({"in.txt", "--json", "--tokens=12", "--temperature", "0.5", "--prompt", "a b", "more"}, context);
    CHECK(json);
    CHECK(count == 12);
    CHECK(heat == 0.5);
    CHECK(prompt == "a b");
    CHECK(rest == std::vector<std::string>{"in.txt", "more"});
    CHECK(contains(refusal([&] { parse_config({"--promt=x"}, context); }), "did you mean --prompt?"));
    CHECK(contains(refusal([&] { parse_config({"--tokens=1.5"}, context); }), "--tokens must be an integer"));
    CHECK(contains(refusal([&] { parse_config({"--json=7"}, context); }), "--json must be on or off"));
    CHECK(contains(help_text(context.flags), "--prompt TEXT"));
    CHECK(wants_help({"--json", "-h"}));
    CHECK_FALSE(wants_help({"--json"}));
}

TEST_CASE("resolve fills in what was not given") {
    const Config c =
        resolved({"--model.layers=2", "--model.hidden=96", "--model.heads=3", "--model.vocab=257", "--model.max_seq=32",
                  "--model.activation=swiglu", "--train.steps=100", "--train.micro_batch=4", "--run.dir=r"});
    CHECK(c.model.kv_heads == 3);
    CHECK(c.model.head_dim == 32);
    CHECK(c.model.ffn_hidden == 256);
    CHECK(c.train.seq == 32);
    CHECK(c.train.global_batch == 4);
    CHECK(c.optim.min_lr == c.optim.lr / 10);
    CHECK(c.optim.decay_steps == 100);
    CHECK(c.checkpoint.dir == "r/checkpoints");
    CHECK(c.run.threads >= 1);
    CHECK(c.origin.at("model.head_dim") == "derived");
    CHECK(c.origin.at("run.dir") == "flag");

    Config again = c;
    resolve(again);
    CHECK(to_json(again, Origins::with) == to_json(c, Origins::with));

    CHECK(resolved({"--model.preset=tiny-gpt2"}).model.ffn_hidden == 1024);
    CHECK(resolved({"--model.preset=tiny-gpt2", "--optim.schedule=wsd", "--train.steps=103"}).optim.decay_steps == 20);
    CHECK(resolved({"--model.preset=tiny-gpt2", "--train.steps=5", "--optim.warmup_steps=50"}).optim.decay_steps == 50);
    const Config d = resolved({"--model.preset=tiny-gpt2"});
    CHECK(d.run.dir.starts_with("runs/20"));
    CHECK(d.origin.at("run.dir") == "derived");
}

TEST_CASE("resolve refuses what cannot work") {
    const std::string incomplete = refusal([] {
        Config c = parse_config({"--model.layers=2", "--model.heads=2", "--model.max_seq=8"});
        resolve(c);
    });
    CHECK(contains(incomplete, "model.hidden and model.vocab are not given"));
    CHECK(refusal_of_resolve({}).empty());
    CHECK(contains(refusal_of_resolve({"--model.hidden=258", "--model.heads=4"}),
                   "model.hidden = 258 is not divisible by model.heads = 4"));
    CHECK(
        contains(refusal_of_resolve({"--model.kv_heads=3"}), "model.heads = 4 is not divisible by model.kv_heads = 3"));
    CHECK(contains(refusal_of_resolve({"--model.position=rope", "--model.head_dim=65"}), "model.head_dim = 65 is odd"));
    CHECK(contains(refusal_of_resolve({"--model.rope_scaling.kind=linear"}), "needs model.position=rope"));
    CHECK(contains(refusal_of_resolve({"--model.position=rope", "--model.rope_scaling.kind=llama3",
                                       "--model.rope_scaling.low_freq_factor=4"}),
                   "must be below high_freq_factor"));
    CHECK(contains(refusal_of_resolve({"--model.heads=16384", "--model.kv_heads=1", "--model.head_dim=4096"}),
                   "is more than 1048576"));
    CHECK(contains(refusal_of_resolve({"--train.seq=129"}), "train.seq = 129 is longer than model.max_seq = 128"));
    CHECK(contains(refusal_of_resolve({"--train.seq=129", "--model.position=rope"}), "--model.max_seq=129"));
    CHECK(contains(refusal_of_resolve({"--train.micro_batch=3", "--train.global_batch=8"}), "try 6 or 9"));
    CHECK(contains(refusal_of_resolve({"--train.micro_batch=4", "--train.global_batch=2"}), "try 4"));
    CHECK(contains(refusal_of_resolve({"--train.micro_batch=16777216"}), "at once"));
    CHECK(contains(refusal_of_resolve({"--optim.min_lr=1"}), "optim.min_lr = 1 is above optim.lr"));
    CHECK(contains(refusal_of_resolve({"--train.steps=10", "--optim.schedule=wsd", "--optim.decay_steps=11"}),
                   "wsd warms up, then decays"));
    CHECK(contains(refusal_of_resolve({"--train.steps=10", "--optim.warmup_steps=6", "--optim.decay_steps=5"}),
                   "which includes the warm-up"));
    CHECK(contains(refusal_of_resolve({"--data.eval_every=5"}), "needs data.val"));
    CHECK(contains(refusal_of_resolve({"--run.device=cuda", "--model.head_dim=8"}), "--run.device=cpu"));  // says why, with or without CUDA

    // Values that came neither from a file nor from a flag are checked as well.
    Config c = parse_config({"--model.preset=tiny-gpt2"});
    c.model.norm_eps = -1;
    CHECK(contains(refusal([&] { resolve(c); }), "model.norm_eps (from preset tiny-gpt2) must be above 0, not -1.0"));
}

TEST_CASE("a configuration survives JSON bit for bit") {
    Config c = resolved({"--model.preset=tiny-mistral", "--train.steps=7", "--optim.lr=0.1",
                         "--optim.eps=1.2345678901234567e-9", "--train.seed=18446744073709551615",
                         R"(--data.train=["a\"b", {"path": "\u00e9", "weight": 0.3333333333333333}])",
                         "--model.rope_scaling.kind=linear", "--model.rope_scaling.factor=2.7",
                         "--debug.streams=adversarial", "--run.dir=x/y"});
    c.model.init_std = 0.1 + 0.2;
    c.origin["model.init_std"] = "flag";
    const std::string text = to_json(c);
    const Config back = config_from_json(text, "manifest");
    CHECK(to_json(back) == text);
    CHECK(back.model.init_std == c.model.init_std);
    CHECK(back.optim.eps == c.optim.eps);
    CHECK(back.optim.lr == 0.1);
    CHECK(back.train.seed == c.train.seed);
    CHECK(back.data.train.at(1).weight == c.data.train.at(1).weight);
    CHECK(back.data.train.at(0).path == "a\"b");
    CHECK(back.debug.streams == StreamMode::adversarial);
    CHECK(back.origin.at("optim.lr") == "manifest");
    CHECK(differences(back.model, c.model).empty());

    const Config unresolved = parse_config({"--model.preset=gpt2-124m"});
    CHECK(config_from_json(to_json(unresolved), "x").model.kv_heads == 0);

    const std::string with = to_json(c, Origins::with);
    CHECK(contains(with, "\"optim.lr\": \"flag\""));
    CHECK(contains(with, "\"optim.beta1\": \"default\""));
    // What was derived is derived again, not given: another run.dir must not write into the first run's checkpoints.
    Config again = config_from_json(with, "config.json");
    CHECK(again.checkpoint.dir.empty());
    resolve(again);
    CHECK(to_json(again) == text);
}

TEST_CASE("models are compared by what their weights depend on") {
    const ModelConfig a = resolved({"--model.preset=tiny-llama"}).model;
    ModelConfig b = a;
    b.preset = "other", b.init_std = 1, b.max_seq = 4096;
    CHECK(differences(a, b).empty());
    b.layers = 3, b.norm = NormKind::layernorm, b.tied = !a.tied;
    CHECK(differences(a, b) == std::vector<std::string>{"model.layers: 2 and 3", "model.norm: rmsnorm and layernorm",
                                                        "model.tied: off and on"});
    b = a;
    b.position = Position::learned, b.max_seq = 4096;
    CHECK(differences(a, b).size() == 2);
}

TEST_CASE("help lists every option, with its default, and every preset") {
    const std::string help = help_text();
    for (const std::string& name : option_names()) {
        INFO(name);
        CHECK(contains(help, "--" + name + " "));
    }
    CHECK(contains(help, "[0.0006]"));
    CHECK(contains(help, "adamw|lamb: "));
    CHECK(contains(help, "gpt2-124m"));
    CHECK(contains(help, "--train.seq TOKENS "));
}

TEST_CASE("the table itself: names and choices are unique, defaults are legal or unset") {
    const Config defaults;
    std::vector<std::string> names = option_names();
    std::sort(names.begin(), names.end());
    CHECK(std::adjacent_find(names.begin(), names.end()) == names.end());
    for (const Option& o : option_table()) {
        INFO(o.name);
        CHECK_FALSE(o.help.empty());
        CHECK(not_available_yet(o.name).empty());
        CHECK(is_unset(o, defaults) <= !o.details.derived.empty());  // what has no value yet says where it comes from
        CHECK(std::holds_alternative<Getter<uint8_t>>(o.field) == !o.details.choices.empty());
    }
}

TEST_CASE("the start of a run says what was chosen") {
    const std::string text =
        describe(resolved({"--model.preset=tiny-mistral", "--train.steps=20000", "--train.global_batch=8"}));
    CHECK(contains(
        text, "tiny-mistral: 2 layers, width 256, 4 heads on 2 keys of 64, ffn swiglu 704, rmsnorm, rope positions"));
    CHECK(contains(text, "window 48"));
    CHECK(contains(text, "20,000 steps of 8 x 128 = 1,024 tokens"));
}
