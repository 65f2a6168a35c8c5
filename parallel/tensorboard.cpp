// parallel/tensorboard.cpp   Protobuf wire format: each field is a varint key (number * 8 + type) and its value.
#include "parallel/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>

#include "parallel/identity.h"

namespace trifold {
namespace {

static_assert(std::endian::native == std::endian::little, "fixed-width fields are copied as they lie in memory");

template <class T>
std::string raw(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string varint(uint64_t value) {
    std::string bytes;
    for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
    return bytes + static_cast<char>(value);
}

enum Wire : uint64_t { as_varint = 0, as_64_bits = 1, as_bytes = 2, as_32_bits = 5 };
std::string key(uint64_t number, Wire wire) { return varint(number * 8 + wire); }
std::string field(uint64_t number, double v) { return key(number, as_64_bits) + raw(v); }
std::string field(uint64_t number, float v) { return key(number, as_32_bits) + raw(v); }
std::string field(uint64_t number, int64_t v) { return key(number, as_varint) + varint(static_cast<uint64_t>(v)); }
std::string field(uint64_t number, const std::string& v) { return key(number, as_bytes) + varint(v.size()) + v; }

double seconds_since_1970() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// `content` is one of the fields 3, 5 and 7.
std::string event(int64_t step, const std::string& content) {
    return field(1, seconds_since_1970()) + field(2, step) + content;
}

std::string framed(const std::string& message) {
    const auto masked = [](std::string_view bytes) { return raw(std::rotr(crc32c(bytes), 15) + 0xa282ead8u); };
    const std::string length = raw(static_cast<uint64_t>(message.size()));
    return length + masked(length) + message + masked(message);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
    static constexpr auto table = [] {
        std::array<uint32_t, 256> t{};
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t c = i;
            for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) != 0 ? 0x82f63b78u : 0u);
            t[i] = c;
        }
        return t;
    }();
    uint32_t crc = ~0u;
    for (const char b : bytes) crc = (crc >> 8) ^ table[(crc ^ static_cast<uint8_t>(b)) & 0xff];
    return ~crc;
}

std::string tensorboard_file_name() {
    return fmt::format("events.out.tfevents.{:017.6f}.{}.{}", seconds_since_1970(), host_name(), ::getpid());
}

std::string tensorboard_start(int64_t first_step) {
    const int64_t session_start = 1;
    return framed(event(0, field(3, std::string("brain.Event:2")))) + framed(event(first_step, field(7, field(1, session_start))));
}

std::string tensorboard_scalars(int64_t step, const std::vector<Scalar>& values) {
    std::string summary;
    for (const Scalar& s : values) summary += field(1, field(1, std::string(s.tag)) + field(2, static_cast<float>(s.value)));
    return framed(event(step, field(5, summary)));
}

}  // namespace trifold
