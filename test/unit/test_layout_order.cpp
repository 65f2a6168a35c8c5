// test/unit/test_layout_order.cpp   What orders a training step: with streams that run as late as they may, every access to a buffer is ordered
// in every layout; and each single ordering of a step is needed, because without it the checker finds an access that nothing orders.
#include "test/catch.h"
#include "test/unit/layout_training.h"

namespace trifold::test {
namespace {

const Args tiny = {"--model.layers=4", "--model.hidden=24", "--model.heads=4", "--model.vocab=30", "--train.seq=8", "--train.global_batch=4", "--overlap.dp_bucket=2000", "--debug.streams=adversarial"};
const Args rotary = {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.tied=off", "--model.bias=none", "--model.ffn_hidden=32", "--model.qk_norm=on"};

struct Layout {
    int ranks;
    Args args;
};

}  // namespace

TEST_CASE("adversarial streams: every access of a training step is ordered, and the bits are the same") {
    const std::vector<Layout> layouts = {{1, {}},
                                         {2, {"--mesh.tp=2"}},
                                         {4, {"--mesh.tp=4", "--overlap.tp_chunks=2"}},
                                         {4, {"--mesh.dp=4"}},
                                         {4, {"--mesh.dp=4", "--optim.zero=0"}},
                                         {2, {"--mesh.dp=2", "--optim.zero=2"}},
                                         {2, {"--mesh.pp=2"}},
                                         {4, {"--mesh.pp=4", "--mesh.schedule=zero_bubble"}},
                                         {2, {"--mesh.pp=2", "--mesh.virtual_stages=2"}},
                                         {8, {"--mesh.tp=2", "--mesh.pp=2"}},
                                         {8, {"--mesh.tp=2", "--mesh.pp=2", "--train.recompute=selective", "--optim.name=lamb"}},
                                         {4, {"--mesh.tp=2", "--mesh.pp=2", "--overlap.tp=off", "--overlap.pp=off", "--overlap.dp=off"}}};
    for (const Args& model : {Args{}, rotary, Args{"--model.block=parallel"}})
        for (const Layout& layout : layouts) {
            std::string text;
            for (const std::string& a : with(model, layout.args)) text += " " + a;
            INFO(layout.ranks << " ranks:" << text);
            const LayoutResult late = train_layout({layout.ranks, with(with(tiny, model), layout.args), 3});
            CHECK(late.findings == std::vector<std::string>{});
            const LayoutResult normal = train_layout({layout.ranks, with(with(with(tiny, model), layout.args), {"--debug.streams=normal"}), 3});
            CHECK((late.final == normal.final));
        }
}

TEST_CASE("each ordering of a step is needed") {
    const std::vector<Layout> layouts = {{2, {"--mesh.tp=2", "--overlap.tp_chunks=2"}}, {2, {"--mesh.dp=2"}},  {2, {"--mesh.dp=2", "--optim.zero=2"}}, {2, {"--mesh.dp=2", "--optim.zero=0", "--optim.name=lamb"}},
                                         {2, {"--mesh.pp=2"}}, {2, {"--mesh.pp=2", "--mesh.virtual_stages=2"}}, {2, {"--mesh.pp=2", "--mesh.schedule=zero_bubble"}},
                                         {4, {"--mesh.tp=2", "--mesh.pp=2", "--model.block=parallel"}}, {4, {"--mesh.dp=2", "--mesh.pp=2"}}};
    for (const Layout& layout : layouts) {
        const Args args = with(tiny, layout.args);
        const LayoutResult whole = train_layout({layout.ranks, args, 3});
        REQUIRE(whole.findings.empty());
        std::string unneeded;
        for (int64_t n = 1; n <= whole.orderings; ++n) {
            const LayoutResult without = train_layout({layout.ranks, args, 3, n});
            if (without.unordered.find("nothing orders") == std::string::npos) unneeded += " " + std::to_string(n) + " " + without.unordered;
        }
        INFO(layout.args[0] << ": " << whole.orderings << " orderings");
        CHECK(unneeded == "");
    }
}

}  // namespace trifold::test
