// test/unit/test_layouts.cpp   Any layout trains the same model: gradients of every parameter, losses and norms of 20 steps against one rank,
// over tensor, pipeline and data parallelism, virtual stages, schedules, ZeRO, recomputation and overlap. Ranks are threads.
#include "test/catch.h"
#include "test/unit/layout_training.h"

namespace trifold::test {
namespace {

const Args gpt = {"--model.tied=on"};
const Args llama = {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.kv_heads=4", "--model.tied=off", "--model.bias=none", "--model.ffn_hidden=96"};
const Args parallel_window = {"--model.block=parallel", "--model.position=rope", "--model.window=7", "--model.full_attention_every=2", "--model.tied=on"};
const Args isolated_parallel = {"--model.block=parallel", "--model.tied=off", "--model.bias=qkv", "--model.qk_norm=on", "--data.documents=isolated", "--model.norm=rmsnorm"};
const Args llama_lamb = {"--model.norm=rmsnorm", "--model.position=rope", "--model.activation=swiglu", "--model.kv_heads=6", "--model.tied=on", "--model.bias=none", "--model.ffn_hidden=96", "--optim.name=lamb"};

struct Layout {
    int ranks;
    Args args;
};

void compare(const LayoutResult& one, const Args& model, const Layout& layout, int steps = 20) {
    std::string text;
    for (const std::string& a : layout.args) text += " " + a;
    INFO(layout.ranks << " ranks:" << text);
    const LayoutRun run{layout.ranks, with(model, layout.args), steps};
    const LayoutResult many = train_layout(run);
    CHECK((many.initial == one.initial));
    const Difference gradients = worst_difference_of(layout_config(run).model, one.gradients, many.gradients);
    INFO("worst gradient: " << gradients.tensor);
    CHECK(gradients.relative < 1e-5);
    for (size_t i = 0; i < static_cast<size_t>(steps); ++i) {
        INFO("step " << i + 1);
        CHECK(many.loss[i] == Approx(one.loss[i]).epsilon(1e-5));
        CHECK(many.grad_norm[i] == Approx(one.grad_norm[i]).epsilon(1e-5));
    }
}

void compare_all(const Args& model, const std::vector<Layout>& layouts) {
    const LayoutResult one = train_layout({1, model});
    REQUIRE(one.loss.back() < one.loss.front());
    for (const Layout& layout : layouts) compare(one, model, layout);
}

}  // namespace

TEST_CASE("serial block, learned positions, tied embedding") {
    compare_all(gpt, {{2, {"--mesh.dp=2"}},
                      {4, {"--mesh.dp=4", "--optim.zero=0"}},
                      {3, {"--mesh.tp=3"}},
                      {4, {"--mesh.tp=4", "--overlap.tp_chunks=3"}},
                      {2, {"--mesh.pp=2"}},
                      {3, {"--mesh.pp=3"}},
                      {4, {"--mesh.pp=4", "--train.recompute=selective"}},
                      {2, {"--mesh.pp=2", "--mesh.virtual_stages=2"}},
                      {2, {"--mesh.pp=2", "--mesh.virtual_stages=3", "--train.recompute=full"}},
                      {4, {"--mesh.pp=2", "--mesh.layers_per_stage=1,5"}},
                      {4, {"--mesh.pp=4", "--mesh.schedule=zero_bubble"}},
                      {8, {"--mesh.tp=2", "--mesh.pp=2"}},
                      {8, {"--mesh.tp=2", "--mesh.pp=2", "--mesh.schedule=zero_bubble", "--optim.zero=0"}},
                      {8, {"--mesh.tp=2", "--mesh.pp=2", "--overlap.tp=off", "--overlap.pp=off", "--overlap.dp=off"}}});
}

TEST_CASE("rmsnorm, rotary positions, SwiGLU, grouped queries, untied head") {
    compare_all(llama, {{4, {"--mesh.dp=4"}},
                        {4, {"--mesh.dp=4", "--optim.zero=2"}},
                        {2, {"--mesh.tp=2", "--train.recompute=full"}},
                        {4, {"--mesh.tp=4"}},
                        {3, {"--mesh.pp=3", "--mesh.schedule=zero_bubble", "--train.recompute=selective"}},
                        {4, {"--mesh.tp=2", "--optim.zero=2"}},
                        {4, {"--mesh.tp=2", "--mesh.pp=2", "--mesh.virtual_stages=3"}},
                        {6, {"--mesh.pp=3", "--mesh.virtual_stages=2", "--optim.zero=0", "--train.micro_batch=2", "--train.global_batch=8"}},
                        {8, {"--mesh.tp=2", "--mesh.pp=2", "--train.recompute=selective"}},
                        {8, {"--mesh.tp=4", "--mesh.pp=2", "--mesh.schedule=zero_bubble"}},
                        {8, {"--mesh.tp=4", "--overlap.tp=off"}}});
}

TEST_CASE("parallel block, sliding window, tied embedding") {
    compare_all(parallel_window, {{2, {"--mesh.tp=2"}},
                                  {6, {"--mesh.tp=3", "--mesh.pp=2"}},
                                  {4, {"--mesh.pp=2", "--mesh.virtual_stages=3"}},
                                  {4, {"--mesh.pp=2", "--mesh.schedule=zero_bubble"}},
                                  {4, {"--mesh.tp=4", "--train.recompute=selective", "--overlap.tp_chunks=2"}},
                                  {8, {"--mesh.tp=2", "--mesh.pp=4"}},
                                  {8, {"--mesh.tp=2", "--optim.zero=2"}},
                                  {8, {"--mesh.dp=8", "--overlap.dp=off"}}});
}

TEST_CASE("parallel block, QK-norm, isolated documents, learned positions, untied head") {
    compare_all(isolated_parallel, {{2, {"--mesh.tp=2", "--overlap.tp=off"}},
                                    {4, {"--mesh.tp=2", "--mesh.pp=2", "--train.recompute=full"}},
                                    {4, {"--mesh.pp=4", "--overlap.pp=off"}},
                                    {4, {"--mesh.dp=4", "--optim.zero=2", "--overlap.dp=off", "--train.micro_batch=2"}},
                                    {8, {"--mesh.tp=2", "--mesh.pp=2", "--mesh.virtual_stages=2"}}});
}

TEST_CASE("LAMB: trust ratios of whole tensors in every layout") {
    compare_all(llama_lamb, {{3, {"--mesh.tp=3"}},
                             {4, {"--mesh.dp=4", "--optim.zero=1"}},
                             {4, {"--mesh.dp=2", "--mesh.pp=2", "--optim.zero=0"}},
                             {8, {"--mesh.tp=2", "--mesh.pp=2"}},
                             {8, {"--mesh.tp=2", "--optim.zero=2"}}});
}

TEST_CASE("the same layout twice, and with overlap off, gives the same bits") {
    for (const Layout& layout : std::vector<Layout>{{8, {"--mesh.tp=2", "--mesh.pp=2"}}, {4, {"--mesh.dp=4", "--optim.zero=2"}}, {4, {"--mesh.pp=4", "--mesh.schedule=zero_bubble"}},
                                                    {4, {"--mesh.tp=4", "--overlap.tp_chunks=2"}}, {4, {"--mesh.pp=4", "--overlap.pp_ahead=2"}}, {2, {"--mesh.dp=2", "--optim.zero=0"}}}) {
        INFO(layout.args[0]);
        const LayoutResult a = train_layout({layout.ranks, with(gpt, layout.args), 5}), b = train_layout({layout.ranks, with(gpt, layout.args), 5});
        CHECK((a.final == b.final));
        CHECK((a.loss == b.loss));
        const LayoutResult off = train_layout({layout.ranks, with(with(gpt, layout.args), {"--overlap.tp=off", "--overlap.pp=off", "--overlap.dp=off"}), 5});
        CHECK((a.final == off.final));
        CHECK((a.grad_norm == off.grad_norm));
    }
    const LayoutResult one = train_layout({4, with(gpt, {"--mesh.pp=4"}), 5}), ahead = train_layout({4, with(gpt, {"--mesh.pp=4", "--overlap.pp_ahead=1"}), 5});
    CHECK((one.final == ahead.final));
}

TEST_CASE("bf16 layouts stay together") {
    const Args model = with(llama, {"--train.dtype=bf16"});
    const LayoutResult one = train_layout({1, model, 10});
    for (const Layout& layout : std::vector<Layout>{{4, {"--mesh.dp=4"}}, {4, {"--mesh.tp=2", "--mesh.pp=2"}}, {4, {"--mesh.dp=2", "--mesh.pp=2", "--optim.zero=0"}}}) {
        const LayoutResult many = train_layout({layout.ranks, with(model, layout.args), 10});
        CHECK((many.initial == one.initial));
        // A bf16 value is off by up to 2^-9 = 2e-3; layouts round other intermediate values, and ten steps add up.
        for (size_t i = 0; i < one.loss.size(); ++i) CHECK(many.loss[i] == Approx(one.loss[i]).epsilon(5e-3));
    }
}

}  // namespace trifold::test
