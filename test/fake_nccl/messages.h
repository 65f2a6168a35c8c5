// test/fake_nccl/messages.h   What ranks and hub of the fake NCCL say to each other: frames of {bytes, kind, body} on a stream socket.
#pragma once
#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace trifold::fake_nccl {

enum class OpKind : uint8_t { all_gather, reduce_scatter, all_reduce, broadcast, send, receive };

// One operation of one rank. `data` is what the rank contributes, `result` what it gets.
struct Operation {
    OpKind kind = OpKind::all_reduce;
    int type = ncclFloat32, reduction = ncclSum;
    int peer = 0;        // root, destination or source
    uint64_t count = 0;  // the argument of the call
    std::string data, result;
    bool done = false;

    bool collective() const { return kind != OpKind::send && kind != OpKind::receive; }
    // Whether two ranks' parts belong to the same operation.
    bool agrees(const Operation& o) const {
        return kind == o.kind && type == o.type && count == o.count && (kind != OpKind::broadcast || peer == o.peer) &&
               ((kind != OpKind::all_reduce && kind != OpKind::reduce_scatter) || reduction == o.reduction);
    }
};
// "all_reduce(sum) of 4 fp32", "send of 3 bf16 to rank 1"
std::string describe(const Operation& op);
uint64_t type_bytes(int type);

// Sums or maxima of `parts`, which are of `count` elements, in their order.
std::string reduced(const std::vector<const std::string*>& parts, uint64_t first, uint64_t count, int type, int reduction);

// hello: rank, size, name;  batch: operations, all of one ncclGroupEnd;  finalize;  leave: how
// ready, done: results;  finalized;  error: a sentence
enum class Message : uint8_t { hello, batch, finalize, leave, ready, done, finalized, error };
struct Frame {
    Message kind = Message::hello;
    std::string body;
};
void put_number(std::string& to, uint64_t v);
void put_text(std::string& to, const std::string& v);
// Takes them from the front of `from`.
uint64_t take_number(std::string& from);
std::string take_text(std::string& from);
std::string encode_batch(const std::vector<Operation>& ops);
std::vector<Operation> decode_batch(std::string body);

// One end of a connection.
class Wire {
public:
    Wire() = default;
    explicit Wire(int fd) : fd_(fd) {}
    ~Wire();
    Wire(Wire&& o) noexcept;
    Wire& operator=(Wire&& o) noexcept;
    int fd() const { return fd_; }
    void close();
    void put(Message kind, const std::string& body = "");  // a peer that has gone is not an error
    // Reads what is there, without waiting; false when the other end has closed.
    bool pump();
    bool take(Frame& frame);

private:
    int fd_ = -1;
    std::string in_;
};
// The hub's name as an abstract address: listening (hub) or connected (rank) socket; -1 when it cannot be had.
int listen_at(const std::string& name);
int connect_to(const std::string& name);

}  // namespace trifold::fake_nccl
