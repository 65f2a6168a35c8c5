#include "model/stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace trifold {

void fill_rotary_tables(Stream& s, const ModelConfig& m, const Tensor& cos, const Tensor& sin) {
    const int64_t R = m.head_dim / 2;
    std::vector<float> cos_TR(static_cast<size_t>(cos.elems)), sin_TR(static_cast<size_t>(sin.elems));
    const RopeScaling& scaling = m.rope_scaling;
    constexpr double pi = 3.14159265358979323846;
    for (int64_t r = 0; r < R; ++r) {
        double frequency = std::pow(m.rope_base, -2.0 * static_cast<double>(r) / static_cast<double>(m.head_dim));
        if (scaling.kind == RopeScalingKind::linear) frequency /= scaling.factor;
        if (scaling.kind == RopeScalingKind::llama3) {
            const double turns = static_cast<double>(scaling.original_max_seq) * frequency / (2 * pi);  // over the original context
            if (turns < scaling.low_freq_factor) {
                frequency /= scaling.factor;
            } else if (turns <= scaling.high_freq_factor) {
                const double smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
                frequency *= (1 - smooth) / scaling.factor + smooth;
            }
        }
        for (int64_t t = 0; t < m.max_seq; ++t) {
            cos_TR[static_cast<size_t>(t * R + r)] = static_cast<float>(std::cos(static_cast<double>(t) * frequency));
            sin_TR[static_cast<size_t>(t * R + r)] = static_cast<float>(std::sin(static_cast<double>(t) * frequency));
        }
    }
    copy(s, {.x = Tensor{cos_TR.data(), DType::f32, cos.elems}, .y = cos});
    s.engine().wait(copy(s, {.x = Tensor{sin_TR.data(), DType::f32, sin.elems}, .y = sin}));
}

template <class Hook>
void Stage::for_buckets(int chunk, bool Bucket::*has, Hook hook) const {
    if (!sharding_) return;
    const auto& buckets = table_.buckets();
    for (size_t b = 0; b < buckets.size(); ++b)
        if (buckets[b].chunk == chunk && buckets[b].*has) hook(b);
}

Stage::Stage(const ModelConfig& m, const ParameterTable& table, const FlatBuffers& flat, const StageOptions& options, TensorParallel tp,
             Sharding* sharding, const Tensor& loss_sum, Arena& arena)
    : model_(m),
      table_(table),
      options_(options),
      tp_(std::move(tp)),
      sharding_(sharding),
      token_embedding_(padded_matrix(m, table, flat, "embedding.token")),
      bucket_of_layer_(static_cast<size_t>(m.layers), -1),
      loss_sum_(loss_sum) {
    const int64_t N = options.B * options.T;
    const bool backward = options.passes == Passes::forward_and_backward;
    const auto scratch = [&](DType t, int64_t elems) { return arena.reserve(MemoryClass::workspace, t, elems); };
    if (const Parameter* p = table.find("embedding.position.weight")) {
        position_weight_ = flat.weight_of(*p, p->elems);
        position_grad_ = flat.grad_of(table, *p, p->elems);
    }
    for (const Bucket& b : table.buckets())
        for (int l = b.first_layer; l >= 0 && l < b.last_layer; ++l) bucket_of_layer_[static_cast<size_t>(l)] = static_cast<int>(&b - table.buckets().data());
    if (m.position == Position::rope) {
        cos_TR_ = scratch(DType::f32, m.max_seq * m.head_dim / 2);
        sin_TR_ = scratch(DType::f32, m.max_seq * m.head_dim / 2);
    }
    const BlockShape shape = block_shape();
    const BlockActivations* shared = nullptr;
    chunks_.reserve(table.placement().chunks.size());
    for (const Part& part : table.placement().chunks) {
        Chunk& c = chunks_.emplace_back(Chunk{.part = part});
        for (int l = part.first_layer; l < part.last_layer; ++l) c.blocks.emplace_back(m, table, flat, l, options.attention);
        if (part.head) head_ = std::make_unique<Head>(m, table, flat, options.type, N, options.passes, tp_, arena);
        const int slots = options.slots[chunks_.size() - 1];
        c.slots.reserve(static_cast<size_t>(slots));
        for (int i = 0; i < slots; ++i) c.slots.push_back(make_slot(part, shared, arena));
    }
    workspace_ = reserve_workspace(m, shape, options.passes, arena);
    if (backward) dresidual_nC_ = scratch(options.type, shape.n() * m.hidden);
    if (backward && table.placement().chunks.front().embedding) {
        const int64_t positions = tp_.alone() ? 0 : embedding_backward_workspace(arena.device(), N / tp_.size(), m.max_seq);
        embedding_workspace_ = scratch(DType::u8, std::max(positions, embedding_backward_workspace(arena.device(), N, table.rows())));
    }
}

// `shared`: the parts of activations that recomputation redoes, once there are any.
Stage::Slot Stage::make_slot(const Part& part, const BlockActivations*& shared, Arena& arena) const {
    const BlockShape shape = block_shape();
    const int64_t N = shape.N();
    const auto ids = [&](bool needed) { return needed ? arena.reserve(MemoryClass::workspace, DType::i32, N) : Tensor{}; };
    const bool backward = options_.passes == Passes::forward_and_backward, rope = model_.position == Position::rope;
    Slot slot;
    slot.sequence = {.B = options_.B, .T = options_.T, .position_N = ids(rope || part.embedding), .doc_start_N = ids(options_.documents == Documents::isolated),
                     .cos_TR = cos_TR_, .sin_TR = sin_TR_};
    slot.token_N = ids(part.embedding);
    slot.target_N = ids(part.head);
    // Without a backward pass one set of activations serves all layers but for their inputs.
    const Recompute kept = backward ? options_.recompute : Recompute::full;
    slot.layers.reserve(static_cast<size_t>(part.layers()));
    for (int l = 0; l < part.layers(); ++l) {
        slot.layers.push_back(reserve_activations(model_, shape, kept, shared, arena));
        if (!shared) shared = &slot.layers.front();
        if (backward && options_.weight_gradients == WeightGradients::apart) slot.deferred.push_back(reserve_deferred(model_, shape, arena));
    }
    if (part.head) slot.head = reserve_head_activations(model_, shape, arena);
    return slot;
}

void Stage::reserve_uploads(int64_t micros, Arena& host) {
    constexpr int64_t arrays = 4;  // of a TokenBatch
    uploads_ = host.reserve(MemoryClass::workspace, DType::i32, arrays * micros * std::ssize(chunks_) * options_.B * options_.T);
}

void Stage::fill_constants(Stream& s) const {
    if (cos_TR_) fill_rotary_tables(s, model_, cos_TR_, sin_TR_);
}

void Stage::begin_step(Stream& s) {
    zero(s, {.y = loss_sum_});
    for (Chunk& c : chunks_) c.backwards = c.weight_backwards = 0;
    if (sharding_) sharding_->begin_step();
}

void Stage::load(Stream& s, const Slot& slot, const Part& part, const TokenBatch& batch) {
    const auto upload = [&](const int32_t* ids, const Tensor& to) {
        if (!to) return;
        Tensor from{const_cast<int32_t*>(ids), DType::i32, slot.sequence.tokens()};
        if (uploads_) {
            const Tensor place = uploads_.slice(uploaded_, from.elems);
            std::memcpy(place.data, from.data, static_cast<size_t>(from.bytes()));
            uploaded_ = (uploaded_ + from.elems) % uploads_.elems;
            from = place;
        }
        copy(s, {.x = from, .y = to});
    };
    if (part.embedding) upload(batch.tokens, slot.token_N);
    upload(batch.targets, slot.target_N);
    upload(batch.positions, slot.sequence.position_N);
    upload(batch.doc_start, slot.sequence.doc_start_N);
}

void Stage::acquire(Stream& s, int bucket) const {
    if (sharding_) sharding_->acquire(s, static_cast<size_t>(bucket));
}

int Stage::layer_bucket(const Chunk& c, size_t layer) const { return bucket_of_layer_[static_cast<size_t>(c.part.first_layer) + layer]; }

// Each rank looks up the ids it has; one of the sums over ranks is not zero. Positions are added by the rank that keeps the row.
void Stage::embed(Stream& s, const Slot& slot) {
    const int64_t C = model_.hidden, N = slot.sequence.tokens(), n = N / tp_.size();
    const Tensor& x = slot.layers.front().x_nC;
    const Tensor partial = tp_.partial(x);
    tp_.scatter(s, N, [&](int64_t first, int64_t rows) {
        const bool own = first / n == tp_.rank();
        embedding_forward(s, {.token_N = slot.token_N.slice(first, rows), .position_N = slot.sequence.position_N.slice(first, rows), .wte_VC = token_embedding_.w,
                              .wpe_TC = own ? position_weight_ : Tensor{}, .x_NC = partial.slice(first * C, rows * C), .N = rows, .C = C,
                              .first = table_.first_row(), .V = table_.rows()});
    });
    tp_.finish(s, x);
}

void Stage::forward(Stream& s, int chunk, int slot_index, const TokenBatch& batch, const Tensor& in, const Tensor& out) {
    Chunk& c = chunks_[static_cast<size_t>(chunk)];
    const Slot& slot = c.slots[static_cast<size_t>(slot_index)];
    load(s, slot, c.part, batch);
    if (c.part.embedding) {
        for (const auto has : {&Bucket::position, &Bucket::token}) for_buckets(chunk, has, [&](size_t b) { acquire(s, static_cast<int>(b)); });  // the later one first
        embed(s, slot);
    } else {
        copy(s, {.x = in, .y = slot.layers.front().x_nC});
    }
    Tensor x = slot.layers.front().x_nC, delta;
    for (size_t l = 0; l < c.blocks.size(); ++l) {
        acquire(s, layer_bucket(c, l));
        x = c.blocks[l].forward(s, x, delta, slot.sequence, slot.layers[l], workspace_, tp_);
        delta = workspace_.delta_nC;
    }
    last_forward_ = {chunk, slot_index};
    if (c.part.head) {
        for (const auto has : {&Bucket::head, &Bucket::token}) for_buckets(chunk, has, [&](size_t b) { acquire(s, static_cast<int>(b)); });
        return head_->norm_forward(s, x, delta, slot.head, slot.sequence.tokens() / tp_.size());
    }
    add_into(s, {.x = x, .y = out, .accumulate = Accumulate::overwrite});
    add_into(s, {.x = delta, .y = out});
}

void Stage::loss(Stream& s, int slot) const {
    const Slot& last = chunks_.back().slots[static_cast<size_t>(slot)];
    head_->loss(s, last.target_N, last.head, last.sequence.tokens(), tp_, loss_sum_);
}

void Stage::backward(Stream& s, int chunk, int slot_index, float grad_scale, const Tensor& din, const Tensor& dout) {
    Chunk& c = chunks_[static_cast<size_t>(chunk)];
    const Slot& slot = c.slots[static_cast<size_t>(slot_index)];
    const Accumulate accumulate = sharding_->accumulate(c.backwards++ == 0);
    const auto begin = [&](size_t b) { sharding_->begin(s, b); };
    const auto written = [&](size_t b) { sharding_->written(s, b); };
    if (c.part.head) {
        for (const auto has : {&Bucket::token, &Bucket::head}) for_buckets(chunk, has, begin);
        head_->loss_and_backward(s, slot.target_N, slot.head, slot.sequence.tokens(), grad_scale, tp_, loss_sum_, dresidual_nC_, accumulate);
        for_buckets(chunk, &Bucket::head, written);
        if (!c.part.embedding) for_buckets(chunk, &Bucket::token, written);
    } else {
        copy(s, {.x = din, .y = dresidual_nC_});
    }
    for (size_t l = c.blocks.size(); l-- > 0;) {
        const Bucket& bucket = table_.buckets()[static_cast<size_t>(layer_bucket(c, l))];
        const int layer = c.part.first_layer + static_cast<int>(l);
        const bool apart = !slot.deferred.empty();
        if (layer + 1 == bucket.last_layer) begin(static_cast<size_t>(layer_bucket(c, l)));
        if (std::pair(chunk, slot_index) != last_forward_ || l + 1 != c.blocks.size()) recompute(s, c, slot, l);
        c.blocks[l].backward(s, dresidual_nC_, slot.sequence, slot.layers[l], workspace_, tp_, accumulate, apart ? &slot.deferred[l] : nullptr);
        if (layer == bucket.first_layer && !apart) written(static_cast<size_t>(layer_bucket(c, l)));
    }
    if (options_.recompute != Recompute::none) last_forward_ = {-1, -1};
    if (!c.part.embedding) {
        copy(s, {.x = dresidual_nC_, .y = dout});
        return;
    }
    if (!(c.part.head && model_.tied)) for_buckets(chunk, &Bucket::token, begin);
    for_buckets(chunk, &Bucket::position, begin);
    embed_backward(s, slot, accumulate);
    for (const auto has : {&Bucket::token, &Bucket::position}) for_buckets(chunk, has, written);
}

void Stage::backward_weights(Stream& s, int chunk, int slot_index) {
    Chunk& c = chunks_[static_cast<size_t>(chunk)];
    const Slot& slot = c.slots[static_cast<size_t>(slot_index)];
    const Accumulate accumulate = sharding_->accumulate(c.weight_backwards++ == 0);
    last_forward_ = {-1, -1};  // recomputation writes the shared parts
    for (size_t l = c.blocks.size(); l-- > 0;) {
        recompute(s, c, slot, l);
        c.blocks[l].backward_weights(s, slot.sequence, slot.layers[l], workspace_, tp_, accumulate, slot.deferred[l]);
        const auto bucket = static_cast<size_t>(layer_bucket(c, l));
        if (c.part.first_layer + static_cast<int>(l) == table_.buckets()[bucket].first_layer) sharding_->written(s, bucket);
    }
}

void Stage::embed_backward(Stream& s, const Slot& slot, Accumulate accumulate) {
    const int64_t C = model_.hidden, N = slot.sequence.tokens(), n = N / tp_.size();
    const bool head_wrote = model_.tied && head_ && chunks_.front().part.head;  // a tied embedding already holds the head's gradient
    EmbeddingBackward args{.token_N = slot.token_N, .position_N = slot.sequence.position_N, .dx_NC = dresidual_nC_, .dwte_VC = token_embedding_.dw,
                           .dwpe_TC = position_grad_, .workspace = embedding_workspace_, .accumulate_wte = head_wrote ? Accumulate::add : accumulate,
                           .accumulate_wpe = accumulate, .N = N, .C = C, .first = table_.first_row(), .V = table_.rows(), .positions = model_.max_seq};
    if (tp_.alone()) {
        embedding_backward(s, args);
        return;
    }
    tp_.follow(s);
    const TensorParallel::Gathered dx = tp_.gather(s, dresidual_nC_, N, TensorParallel::Buffer::gradients);
    // Positions: this rank's rows alone, looked up like tokens.
    if (position_grad_)
        embedding_backward(s, {.token_N = slot.sequence.position_N.slice(tp_.rank() * n, n), .dx_NC = dresidual_nC_, .dwte_VC = position_grad_,
                               .workspace = embedding_workspace_, .accumulate_wte = accumulate, .N = n, .C = C, .V = model_.max_seq});
    tp_.arrive(s, dx);
    args.dx_NC = dx.full_NC;
    args.dwpe_TC = {};
    embedding_backward(s, args);
}

// Activations that are not shared are still there from forward, and so are the last layer's while nothing else went forward since.
void Stage::recompute(Stream& s, const Chunk& c, const Slot& slot, size_t l) {
    if (options_.recompute == Recompute::none) return;
    if (options_.recompute == Recompute::selective) return c.blocks[l].recompute(s, slot.sequence, slot.layers[l]);
    c.blocks[l].forward(s, slot.layers[l].x_nC, {}, slot.sequence, slot.layers[l], workspace_, tp_);
}

double Stage::loss_sum(Stream& s) const {
    double sum = 0;
    read_back(s, {{loss_sum_, Tensor{&sum, DType::f64, 1}}}, "loss_sum");
    return sum;
}

}  // namespace trifold
