// test/unit/test_export.cpp   trifold export: from a run directory to a Hugging Face folder, and what it refuses.
#include "test/catch.h"
#include "checkpoint/huggingface.h"
#include "commands/commands.h"
#include "test/unit/fake_run.h"

using namespace trifold;
namespace fs = std::filesystem;

namespace {

std::string usage_problem(const std::vector<std::string>& args) {
    try {
        export_command(args);
    } catch (const Problem& e) {
        CHECK(e.code() == Exit::usage);
        return e.what();
    }
    return "";
}

}  // namespace

TEST_CASE("export takes the newest undamaged checkpoint of a run") {
    const TemporaryFolder folder;
    save(folder / "run/checkpoints", 1);
    const std::string second = save(folder / "run/checkpoints", 2).path;
    CHECK(export_command({folder / "run", "--to", folder / "a", "--format", "hf"}) == 0);
    write_bytes(second + "/manifest.json", "{}");
    CHECK(export_command({folder / "run", "--to=" + folder / "b", "--dtype=bf16", "--file-bytes=2000"}) == 0);

    const ModelConfig model = read_hf_config(folder / "a");
    const ParameterTable table(model);
    std::vector<float> weights(static_cast<size_t>(table.flat_elems()));
    import_hf(folder / "a", model, whole_state(table, weights.data()));
    CHECK(std::memcmp(weights.data(), FakeRun(2).master.data(), weights.size() * 4) == 0);
    import_hf(folder / "b", model, whole_state(table, weights.data()));
    std::vector<float> first = FakeRun(1).master;
    for (float& x : first) x = static_cast<float>(bf16(x));
    CHECK(std::memcmp(weights.data(), first.data(), weights.size() * 4) == 0);
    CHECK(fs::exists(folder / "b/model.safetensors.index.json"));

    CHECK(has(problem_of([&] { export_command({folder / "run", "--to", folder / "a"}); }), "not an empty folder"));
    CHECK(has(problem_of([&] { export_command({second, "--to", folder / "c"}); }), "step-00000002 is damaged"));
    CHECK_FALSE(fs::exists(folder / "c"));
}

TEST_CASE("export refuses what it does not know") {
    CHECK(has(usage_problem({"x"}), "--to DIR"));
    CHECK(has(usage_problem({"--to", "y"}), "one checkpoint, not 0"));
    CHECK(has(usage_problem({"x", "z", "--to", "y"}), "one checkpoint, not 2"));
    CHECK(has(usage_problem({"x", "--to", "y", "--format", "gguf"}), "--format must be hf, not gguf"));
    CHECK(has(usage_problem({"x", "--to", "y", "--dtype", "fp16"}), "--dtype must be one of fp32 or bf16, not \"fp16\""));
    CHECK(has(usage_problem({"x", "--to", "y", "--file-bytes=0"}), "--file-bytes must be at least 1, not 0"));
    CHECK(has(usage_problem({"x", "--to", "y", "--model.layers=3"}), "leave out model.layers"));
    CHECK(has(usage_problem({"x", "--to", "y", "--dtyp", "bf16"}), "--dtype"));
}
