// parallel/host_collectives.cpp   n ranks, B bytes of the whole tensor, per rank and direction:
//
//   all_gather      (n-1)/n B   everybody sends its part to everybody, into place
//   reduce_scatter  (n-1)/n B   everybody sends to everybody what that one sums up. Piece by piece, so that scratch memory is
//                               bounded and the next piece travels while one is summed
//   all_reduce    2 (n-1)/n B   one after the other, over parts that differ by one element at most; small ones: (n-1) B, all
//                               gathered and summed by everybody, in one step instead of two
//   broadcast     2 (n-1)/n B   the root scatters, then all gather; small ones: (n-1) B from the root
//   all_to_all                  what the counts say
// Every message is sent even when it is empty, so that ranks which disagree about a size find out, and an empty all_reduce is a
// barrier.
#include "parallel/host_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <numeric>
#include <span>

#include "base/error.h"

namespace trifold {
namespace {

constexpr int64_t small_bytes = 16 << 10;   // where one step that moves more is faster than two
constexpr int64_t scratch_bytes = 8 << 20;  // of each of the two halves, for up to 512 ranks
constexpr int64_t most_piece_bytes =
    256 << 10;  // two of each rank stay in the second-level cache: a third faster than pieces of 2 MiB
constexpr int64_t align_bytes = 64;
constexpr int64_t sum_elems = 32 << 10;          // summed between two looks at the sockets
constexpr uint32_t point_to_point = 0xffffffff;  // tag of messages that pair up in order

enum class Combine : uint8_t { sum, max };

// NaN wins, so that no rank overlooks one.
struct Larger {
    template <class T>
    T operator()(T a, T b) const {
        return b > a || b != b ? b : a;
    }
};
// Integers wrap around.
struct Plus {
    template <class T>
    T operator()(T a, T b) const {
        if constexpr (std::is_integral_v<T>)
            return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
        else
            return a + b;
    }
};

// out[i] = in[0][i] + in[1][i] + ..., from left to right in Sum, rounded once. `out` may be one of the inputs.
template <class T, class Sum, class Op>
void combine_as(Op op, std::span<const void* const> in, void* out, int64_t first, int64_t elems) {
    constexpr int64_t block = 2048;  // of sums, in the first-level cache
    alignas(64) Sum sums[block];
    for (int64_t done = 0; done < elems; done += block) {
        const int64_t n = std::min(block, elems - done);
        const auto at = [&](const void* x) { return static_cast<const T*>(x) + first + done; };
        const T* x = at(in[0]);
        for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<Sum>(x[i]);
        for (const void* next : in.subspan(1)) {
            x = at(next);
            for (int64_t i = 0; i < n; ++i) sums[i] = op(sums[i], static_cast<Sum>(x[i]));
        }
        T* y = static_cast<T*>(out) + first + done;
        for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(sums[i]);
    }
}

template <class Op>
void combine_with(Op op, std::span<const void* const> in, const Tensor& out, int64_t first, int64_t elems) {
    switch (out.dtype) {
        case DType::f32:
            return combine_as<float, float>(op, in, out.data, first, elems);
        case DType::bf16:
            return combine_as<bf16, float>(op, in, out.data, first, elems);
        case DType::f64:
            return combine_as<double, double>(op, in, out.data, first, elems);
        case DType::i32:
            return combine_as<int32_t, int32_t>(op, in, out.data, first, elems);
        case DType::u8:
            return combine_as<uint8_t, uint8_t>(op, in, out.data, first, elems);
    }
}

struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{align_bytes}); }
};

// A message between stages is posted long before its peer can send it: while a pipeline fills, other micro-batches are computed first.
constexpr double message_stalls = 10;

int64_t piece_bytes(int ranks) {
    return std::clamp(scratch_bytes / std::max(1, ranks - 1) / align_bytes * align_bytes, small_bytes, most_piece_bytes);
}

class HostCollectives final : public Collectives {
public:
    HostCollectives(std::unique_ptr<Net> net, double stall_s)
        : net_(std::move(net)),
          me_(net_->index()),
          size_(net_->size()),
          stall_s_(stall_s),
          piece_bytes_(piece_bytes(size_)),
          scratch_(new (std::align_val_t{align_bytes}) std::byte[static_cast<size_t>(host_collectives_bytes(size_))]) {}

    void all_gather(CUstream_st*, const Tensor& shard, const Tensor& full) override {
        TRIFOLD_ASSERT(shard.dtype == full.dtype && shard.elems * size_ == full.elems);
        begin("all_gather");
        gather(shard, full);
    }

    void reduce_scatter(CUstream_st*, const Tensor& full, const Tensor& shard) override {
        TRIFOLD_ASSERT(shard.dtype == full.dtype && shard.elems * size_ == full.elems);
        TRIFOLD_ASSERT(full.dtype != DType::u8);
        begin("reduce_scatter");
        reduce(Combine::sum, full, shard);
    }

    void all_reduce(CUstream_st*, const Tensor& x) override {
        begin("all_reduce");
        all_reduce(Combine::sum, x);
    }

    void all_reduce_max(CUstream_st*, const Tensor& x) override {
        begin("all_reduce_max");
        all_reduce(Combine::max, x);
    }

    void broadcast(CUstream_st*, const Tensor& x, int root) override {
        TRIFOLD_ASSERT(root >= 0 && root < size_);
        begin("broadcast");
        const Tensor bytes{x.data, DType::u8, x.bytes()};
        if (size_ == 2 || bytes.elems <= small_bytes) return from_root(bytes, root);
        if (me_ == root) {
            scatter(bytes);
        } else {
            const Tensor mine = part(bytes, me_);
            Net::Pending pending;
            net_->receive(root, tag(0), mine.data, mine.bytes(), pending);
            net_->wait(pending, stall_s_);
        }
        share(bytes, root);
    }

    void all_to_all(CUstream_st*, const Tensor& to, std::span<const int64_t> to_counts, const Tensor& from,
                    std::span<const int64_t> from_counts) override {
        const auto total = [](std::span<const int64_t> counts) {
            return std::accumulate(counts.begin(), counts.end(), int64_t{0});
        };
        const auto size = static_cast<size_t>(size_);
        TRIFOLD_ASSERT(to.dtype == from.dtype && to_counts.size() == size && from_counts.size() == size);
        TRIFOLD_ASSERT(total(to_counts) == to.elems && total(from_counts) == from.elems &&
                       to_counts[static_cast<size_t>(me_)] == from_counts[static_cast<size_t>(me_)]);
        begin("all_to_all");
        const auto slice = [&](const Tensor& x, std::span<const int64_t> counts, int p) {
            return x.slice(total(counts.first(static_cast<size_t>(p))), counts[static_cast<size_t>(p)]);
        };
        Net::Pending pending;
        for_peers([&](int p) { receive(p, tag(0), slice(from, from_counts, p), pending); });
        for_peers([&](int p) { send(p, tag(0), slice(to, to_counts, p), pending); });
        copy(slice(to, to_counts, me_), slice(from, from_counts, me_));
        net_->wait(pending, stall_s_);
    }

    void send(CUstream_st*, int to, const Tensor& x) override {
        Net::Pending pending;
        net_->label("send", ++messages_);
        send(to, point_to_point, x, pending);
        net_->wait(pending, message_stalls * stall_s_);
    }

    void receive(CUstream_st*, int from, const Tensor& x) override {
        Net::Pending pending;
        net_->label("receive", ++messages_);
        receive(from, point_to_point, x, pending);
        net_->wait(pending, message_stalls * stall_s_);
    }

    void exchange(CUstream_st*, int to, const Tensor& x, int from, const Tensor& y) override {
        Net::Pending pending;
        net_->label("exchange", ++messages_);
        if (y) receive(from, point_to_point, y, pending);
        if (x) send(to, point_to_point, x, pending);
        net_->wait(pending, stall_s_);
    }

    void abort() noexcept override { net_->abort(); }

private:
    // Of one step of the present collective.
    uint32_t tag(uint32_t step) const { return (calls_ << 2 | step) & 0x7fffffff; }
    void begin(const char* name) { net_->label(name, ++calls_); }

    void send(int to, uint32_t tag, const Tensor& x, Net::Pending& pending) { net_->send(to, tag, x.data, x.bytes(), pending); }
    void receive(int from, uint32_t tag, const Tensor& x, Net::Pending& pending) {
        net_->receive(from, tag, x.data, x.bytes(), pending);
    }

    // Everybody begins with the next one, so that not all talk to rank 0 at first.
    template <class Act>
    void for_peers(Act act) const {
        for (int i = 1; i < size_; ++i) act((me_ + i) % size_);
    }

    // What rank r sums up, or knows.
    Tensor part(const Tensor& x, int r) const {
        const int64_t begin = x.elems * r / size_, end = x.elems * (r + 1) / size_;
        return x.slice(begin, end - begin);
    }

    static void copy(const Tensor& from, const Tensor& to) {
        if (from.elems > 0 && from.data != to.data) std::memcpy(to.data, from.data, static_cast<size_t>(from.bytes()));
    }

    // Room for a piece from rank r. Two halves, so that the next piece arrives while one is summed.
    std::byte* slot(int64_t half, int r) const { return scratch_.get() + (half * size_ + r) * piece_bytes_; }

    // The parts of all ranks into place; `mine` may be there already.
    void gather(const Tensor& mine, const Tensor& full) {
        Net::Pending pending;
        for_peers([&](int p) { receive(p, tag(1), part(full, p), pending); });
        for_peers([&](int p) { send(p, tag(1), mine, pending); });
        copy(mine, part(full, me_));
        net_->wait(pending, stall_s_);
    }

    // mine = the sum of everybody's part for this rank.
    void reduce(Combine how, const Tensor& full, const Tensor& mine) {
        const int64_t piece = piece_bytes_ / size_of(full.dtype), longest = (full.elems + size_ - 1) / size_;
        const int64_t pieces = std::max<int64_t>(1, (longest + piece - 1) / piece);
        const auto range = [&](const Tensor& x, int64_t k) {
            const int64_t first = std::min(x.elems, k * piece);
            return x.slice(first, std::min(piece, x.elems - first));
        };
        std::array<Net::Pending, 2> arriving;
        Net::Pending leaving;
        const auto post = [&](int64_t k) {
            if (k >= pieces) return;
            const int64_t bytes = range(mine, k).bytes();
            for_peers([&](int p) { net_->receive(p, tag(0), slot(k % 2, p), bytes, arriving[static_cast<size_t>(k % 2)]); });
            for_peers([&](int p) { send(p, tag(0), range(part(full, p), k), leaving); });
        };
        post(0);
        post(1);
        for (int64_t k = 0; k < pieces; ++k) {
            net_->wait(arriving[static_cast<size_t>(k % 2)], stall_s_);
            combine(how, k % 2, range(part(full, me_), k).data, range(mine, k));
            post(k + 2);
        }
        net_->wait(leaving, stall_s_);
    }

    // out = the slots of all ranks in rank order, with this rank's own values in its place.
    void combine(Combine how, int64_t half, const void* own, const Tensor& out) {
        std::vector<const void*> in;
        for (int r = 0; r < size_; ++r) in.push_back(r == me_ ? own : slot(half, r));
        for (int64_t first = 0; first < out.elems; first += sum_elems) {
            const int64_t elems = std::min(sum_elems, out.elems - first);
            if (how == Combine::sum)
                combine_with(Plus(), in, out, first, elems);
            else
                combine_with(Larger(), in, out, first, elems);
            if (out.elems > sum_elems) net_->progress();
        }
    }

    void all_reduce(Combine how, const Tensor& x) {
        TRIFOLD_ASSERT(how == Combine::max || x.dtype != DType::u8);
        if (x.bytes() > small_bytes) {
            const Tensor mine = part(x, me_);
            reduce(how, x, mine);
            return gather(mine, x);
        }
        Net::Pending pending;
        for_peers([&](int p) { net_->receive(p, tag(0), slot(0, p), x.bytes(), pending); });
        for_peers([&](int p) { send(p, tag(0), x, pending); });
        net_->wait(pending, stall_s_);
        combine(how, 0, x.data, x);
    }

    void from_root(const Tensor& x, int root) {
        Net::Pending pending;
        if (me_ == root)
            for_peers([&](int p) { send(p, tag(0), x, pending); });
        else
            receive(root, tag(0), x, pending);
        net_->wait(pending, stall_s_);
    }

    // Each rank gets its part; it is not waited for here, since the parts leave in order with what share() sends.
    void scatter(const Tensor& x) {
        Net::Pending pending;
        for_peers([&](int p) { send(p, tag(0), part(x, p), pending); });
        net_->wait(pending, stall_s_);
    }

    // Everybody has its part; the root has all.
    void share(const Tensor& x, int root) {
        Net::Pending pending;
        for_peers([&](int p) {
            if (me_ != root) receive(p, tag(1), part(x, p), pending);
            if (p != root) send(p, tag(1), part(x, me_), pending);
        });
        net_->wait(pending, stall_s_);
    }

    const std::unique_ptr<Net> net_;
    const int me_, size_;
    const double stall_s_;
    const int64_t piece_bytes_;                         // that a message of reduce() has at most
    const std::unique_ptr<std::byte[], Free> scratch_;  // [2, size, piece]; pages that nobody touches cost nothing
    uint32_t calls_ = 0, messages_ = 0;
};

}  // namespace

int64_t host_collectives_bytes(int ranks) { return 2 * ranks * piece_bytes(ranks); }

std::unique_ptr<Collectives> connect_host_collectives(Listener& listener, const NetOptions& options, double stall_s) {
    return std::make_unique<HostCollectives>(std::make_unique<Net>(listener, options), stall_s);
}

}  // namespace trifold
