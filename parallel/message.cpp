#include "parallel/message.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <utility>

namespace trifold {
namespace {

struct Header {
    uint32_t magic = 0x31727473;
    Verb verb = Verb::answer;
    uint64_t id = 0, bytes = 0;
};
static_assert(sizeof(Header) == 24);

}  // namespace

Message make_message(Verb verb, uint64_t id, std::string body) { return {verb, id, std::make_shared<const std::string>(std::move(body))}; }

std::string header_of(const Message& message) {
    const Header header{.verb = message.verb, .id = message.id, .bytes = message.body->size()};
    return {reinterpret_cast<const char*>(&header), sizeof header};
}

bool MessageCutter::read(int fd, size_t most_bytes, std::vector<Message>& messages) {
    std::array<char, 64 << 10> bytes;
    while (true) {
        const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return true;
        if (got <= 0) return false;
        pending_.append(bytes.data(), static_cast<size_t>(got));
        if (!cut(most_bytes, messages)) return false;
        if (static_cast<size_t>(got) < bytes.size()) return true;
    }
}

bool MessageCutter::cut(size_t most_bytes, std::vector<Message>& messages) {
    size_t at = 0;
    for (Header header; pending_.size() - at >= sizeof(header);) {
        std::memcpy(&header, pending_.data() + at, sizeof(header));
        if (header.magic != Header().magic || header.verb > Verb::news || header.bytes > most_bytes) return false;
        if (pending_.size() - at - sizeof(header) < header.bytes) break;
        messages.push_back(make_message(header.verb, header.id, pending_.substr(at + sizeof(header), header.bytes)));
        at += sizeof(header) + header.bytes;
    }
    pending_.erase(0, at);
    return true;
}

}  // namespace trifold
