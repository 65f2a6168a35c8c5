// parallel/message.h   What travels between a rank and the store: a header of 24 bytes, then the body.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trifold {

enum class Verb : uint32_t {
    // From a rank. All but put and cancel are answered once.
    ping,     // job key -> time of the store's host, its host id
    join,     // who, where, build -> everybody's place
    put,      // key, value
    take,     // key, readers -> value
    cancel,   // the id of a take that is no longer wanted
    meet,     // everybody calls this: number, kind, what, value, code, seconds -> rank 0's value
    fail,     // code, sentence -> whether this rank speaks for the job
    goodbye,  // seconds -> nothing; rank 0's answer comes when all others have said it
    // From the store.
    answer,
    refusal,  // code, sentence
    news,     // a rank has failed: code, sentence, rank, speaker
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
    // Appends the messages that are complete. False: these are not messages, or one is longer than `most_bytes`.
    bool cut(std::string_view bytes, size_t most_bytes, std::vector<Message>& messages);

private:
    std::string pending_;
};

// Fields of a body in a fixed order.
class Packer {
public:
    Packer& number(int64_t value);
    Packer& text(std::string_view value);
    std::string take() { return std::move(bytes_); }

private:
    std::string bytes_;
};

struct BadMessage : std::runtime_error {
    BadMessage() : std::runtime_error("a message of the control plane ends too early") {}
};

class Unpacker {
public:
    explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
    int64_t number();
    std::string text();

private:
    std::string_view next(size_t bytes);
    std::string_view bytes_;
};

}  // namespace trifold
