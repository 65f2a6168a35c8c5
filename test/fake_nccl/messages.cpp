#include "test/fake_nccl/messages.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/tensor.h"

namespace trifold::fake_nccl {
namespace {

std::string type_name(int type) {
    switch (type) {
        case ncclFloat32: return "fp32";
        case ncclBfloat16: return "bf16";
        case ncclFloat64: return "fp64";
        case ncclInt32: return "int32";
        case ncclUint8: return "uint8";
        default: return fmt::format("type {}", type);
    }
}

template <class T, class Sum>
std::string fold(const std::vector<const std::string*>& parts, uint64_t first, uint64_t count, int reduction) {
    std::string out(count * sizeof(T), '\0');
    for (uint64_t i = 0; i < count; ++i) {
        Sum total{};
        for (size_t q = 0; q < parts.size(); ++q) {
            T v;
            std::memcpy(&v, parts[q]->data() + (first + i) * sizeof(T), sizeof(T));
            const Sum x = static_cast<Sum>(v);
            total = q == 0 ? x : reduction == ncclMax ? std::max(total, x) : static_cast<Sum>(total + x);
        }
        const T rounded(total);
        std::memcpy(out.data() + i * sizeof(T), &rounded, sizeof(T));
    }
    return out;
}

sockaddr_un address_of(const std::string& name, socklen_t& bytes) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), std::min(name.size(), sizeof address.sun_path - 1));
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

}  // namespace

std::string describe(const Operation& op) {
    const std::string what = fmt::format("{} {}", op.count, type_name(op.type)), reduction = op.reduction == ncclMax ? "max" : op.reduction == ncclSum ? "sum" : "other";
    switch (op.kind) {
        case OpKind::all_gather: return "all_gather of " + what;
        case OpKind::reduce_scatter: return fmt::format("reduce_scatter({}) of {}", reduction, what);
        case OpKind::all_reduce: return fmt::format("all_reduce({}) of {}", reduction, what);
        case OpKind::broadcast: return fmt::format("broadcast of {} from rank {}", what, op.peer);
        case OpKind::send: return fmt::format("send of {} to rank {}", what, op.peer);
        case OpKind::receive: return fmt::format("receive of {} from rank {}", what, op.peer);
    }
    return "?";
}

uint64_t type_bytes(int type) {
    switch (type) {
        case ncclFloat32: case ncclInt32: return 4;
        case ncclBfloat16: return 2;
        case ncclFloat64: return 8;
        case ncclUint8: return 1;
        default: return 0;
    }
}

std::string reduced(const std::vector<const std::string*>& parts, uint64_t first, uint64_t count, int type, int reduction) {
    switch (type) {
        case ncclFloat32: return fold<float, float>(parts, first, count, reduction);
        case ncclBfloat16: return fold<bf16, float>(parts, first, count, reduction);
        case ncclFloat64: return fold<double, double>(parts, first, count, reduction);
        case ncclInt32: return fold<int32_t, int32_t>(parts, first, count, reduction);
        default: return fold<uint8_t, uint8_t>(parts, first, count, reduction);
    }
}

// ---------------------------------------------------------------- frames

void put_number(std::string& to, uint64_t v) { to.append(reinterpret_cast<const char*>(&v), sizeof v); }
void put_text(std::string& to, const std::string& v) {
    put_number(to, v.size());
    to += v;
}
uint64_t take_number(std::string& from) {
    uint64_t v = 0;
    std::memcpy(&v, from.data(), sizeof v);
    from.erase(0, sizeof v);
    return v;
}
std::string take_text(std::string& from) {
    const uint64_t bytes = take_number(from);
    std::string v = from.substr(0, bytes);
    from.erase(0, bytes);
    return v;
}

std::string encode_batch(const std::vector<Operation>& ops) {
    std::string body;
    put_number(body, ops.size());
    for (const Operation& op : ops) {
        for (const uint64_t v : {static_cast<uint64_t>(op.kind), static_cast<uint64_t>(op.type), static_cast<uint64_t>(op.reduction), static_cast<uint64_t>(op.peer), op.count})
            put_number(body, v);
        put_text(body, op.data);
    }
    return body;
}
std::vector<Operation> decode_batch(std::string body) {
    std::vector<Operation> ops(take_number(body));
    for (Operation& op : ops) {
        op.kind = static_cast<OpKind>(take_number(body));
        op.type = static_cast<int>(take_number(body));
        op.reduction = static_cast<int>(take_number(body));
        op.peer = static_cast<int>(take_number(body));
        op.count = take_number(body);
        op.data = take_text(body);
    }
    return ops;
}

Wire::~Wire() { close(); }
Wire::Wire(Wire&& o) noexcept : fd_(std::exchange(o.fd_, -1)), in_(std::move(o.in_)) {}
Wire& Wire::operator=(Wire&& o) noexcept {
    close();
    fd_ = std::exchange(o.fd_, -1);
    in_ = std::move(o.in_);
    return *this;
}
void Wire::close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void Wire::put(Message kind, const std::string& body) {
    std::string frame;
    put_number(frame, body.size());
    frame += static_cast<char>(kind);
    frame += body;
    for (size_t sent = 0; fd_ >= 0 && sent < frame.size();) {
        const ssize_t n = ::send(fd_, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;
        sent += static_cast<size_t>(n);
    }
}

bool Wire::pump() {
    char piece[65536];
    while (fd_ >= 0) {
        const ssize_t n = ::recv(fd_, piece, sizeof piece, MSG_DONTWAIT);
        if (n > 0) {
            in_.append(piece, static_cast<size_t>(n));
        } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return false;
        } else if (errno != EINTR) {
            return true;
        }
    }
    return false;
}

bool Wire::take(Frame& frame) {
    constexpr size_t head = sizeof(uint64_t) + 1;
    if (in_.size() < head) return false;
    uint64_t bytes = 0;
    std::memcpy(&bytes, in_.data(), sizeof bytes);
    if (in_.size() < head + bytes) return false;
    frame = {static_cast<Message>(in_[sizeof bytes]), in_.substr(head, bytes)};
    in_.erase(0, head + bytes);
    return true;
}

int listen_at(const std::string& name) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t bytes = 0;
    const sockaddr_un address = address_of(name, bytes);
    if (fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&address), bytes) == 0 && ::listen(fd, 64) == 0) return fd;
    if (fd >= 0) ::close(fd);
    return -1;
}
int connect_to(const std::string& name) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t bytes = 0;
    const sockaddr_un address = address_of(name, bytes);
    if (fd >= 0 && ::connect(fd, reinterpret_cast<const sockaddr*>(&address), bytes) == 0) return fd;
    if (fd >= 0) ::close(fd);
    return -1;
}

}  // namespace trifold::fake_nccl
