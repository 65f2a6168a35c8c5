#include "parallel/message.h"

#include <cstring>
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
    std::string bytes(sizeof(header), '\0');
    std::memcpy(bytes.data(), &header, sizeof(header));
    return bytes;
}

bool MessageCutter::cut(std::string_view bytes, size_t most_bytes, std::vector<Message>& messages) {
    pending_ += bytes;
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

Packer& Packer::number(int64_t value) {
    char bytes[sizeof(value)];
    std::memcpy(bytes, &value, sizeof(value));
    bytes_.append(bytes, sizeof(value));
    return *this;
}

Packer& Packer::text(std::string_view value) {
    number(static_cast<int64_t>(value.size()));
    bytes_ += value;
    return *this;
}

std::string_view Unpacker::next(size_t bytes) {
    if (bytes > bytes_.size()) throw BadMessage();
    const std::string_view part = bytes_.substr(0, bytes);
    bytes_.remove_prefix(bytes);
    return part;
}

int64_t Unpacker::number() {
    int64_t value = 0;
    std::memcpy(&value, next(sizeof(value)).data(), sizeof(value));
    return value;
}

std::string Unpacker::text() { return std::string(next(static_cast<size_t>(number()))); }

}  // namespace trifold
