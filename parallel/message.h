// parallel/message.h   What travels between a rank and the store: a header of 24 bytes, then the body.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace trifold {

enum class Verb : uint32_t {
    // From a rank. All but put and cancel are answered once.
    ping,     // job key -> time of the store's host, its host id
    join,     // rank, size, build, place (PeerAddress) -> everybody's place
    put,      // key, value
    take,     // key, readers -> value
    cancel,   // the id of a take that is no longer wanted
    meet,     // everybody calls this: number, kind, what, value, code, seconds -> rank 0's value
    fail,     // a failure -> the job's failure, which says whether this rank speaks for the job
    goodbye,  // seconds -> nothing; rank 0's answer comes when all others have said it
    // From the store.
    answer,
    refusal,  // a failure
    news,     // a failure: a rank has failed
};

struct Message {
    Verb verb = Verb::answer;
    uint64_t id = 0;                           // of a question and its answer
    std::shared_ptr<const std::string> body;  // shared, because many ranks get the same one
};
Message make_message(Verb verb, uint64_t id, std::string body);

// Header of a message that is followed by its body.
std::string header_of(const Message& message);

// Cuts a stream of bytes into messages.
class MessageCutter {
public:
    // Reads what is there without waiting, and appends the messages that are complete. False: the connection has ended, or these are no messages,
    // or one is longer than `most_bytes`.
    bool read(int fd, size_t most_bytes, std::vector<Message>& messages);

private:
    bool cut(size_t most_bytes, std::vector<Message>& messages);
    std::string pending_;
};

// A body: its fields one after the other. Numbers and enumerators take 8 bytes, texts their length and themselves.
template <class... Fields>
std::string pack(const Fields&... fields) {
    std::string body;
    const auto add = [&](auto value) { body.append(reinterpret_cast<const char*>(&value), sizeof value); };
    const auto add_field = [&]<class T>(const T& field) {
        if constexpr (std::is_convertible_v<T, std::string_view>) {
            add(static_cast<uint64_t>(std::string_view(field).size()));
            body += std::string_view(field);
        } else if constexpr (std::is_floating_point_v<T>) {
            add(static_cast<double>(field));
        } else {
            add(static_cast<int64_t>(field));
        }
    };
    (add_field(fields), ...);
    return body;
}

struct BadMessage : std::runtime_error {
    BadMessage() : std::runtime_error("a message of the control plane ends too early") {}
};

// Takes the fields out again, in the same order and of the same types. Throws BadMessage.
class Unpacker {
public:
    explicit Unpacker(std::string_view body) : body_(body) {}
    template <class... Fields>
    Unpacker& operator()(Fields&... fields) {
        (take(fields), ...);
        return *this;
    }

private:
    std::string_view next(size_t bytes) {
        if (bytes > body_.size()) throw BadMessage();
        const std::string_view part = body_.substr(0, bytes);
        body_.remove_prefix(bytes);
        return part;
    }
    template <class T>
    void take(T& field) {
        std::conditional_t<std::is_floating_point_v<T>, double, int64_t> value;
        std::memcpy(&value, next(sizeof value).data(), sizeof value);
        if constexpr (std::is_same_v<T, std::string>)
            field = next(static_cast<size_t>(value));
        else
            field = static_cast<T>(value);
    }
    std::string_view body_;
};

}  // namespace trifold
