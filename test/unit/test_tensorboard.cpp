// test/unit/test_tensorboard.cpp   TensorBoard event files, byte for byte where the format fixes them.
#include "test/catch.h"

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "parallel/tensorboard.h"
#include "test/unit/run_folder.h"

using namespace trifold;
using namespace trifold::telemetry_test;

namespace {

// An independent reader of TensorBoard's files

uint32_t slow_crc32c(const std::string& bytes) {
    uint32_t crc = 0xffffffffu;
    for (const char b : bytes) {
        crc ^= static_cast<uint8_t>(b);
        for (int i = 0; i < 8; ++i) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
    }
    return crc ^ 0xffffffffu;
}

template <class T>
T read_as(const std::string& bytes, size_t at) {
    T value;
    REQUIRE(at + sizeof value <= bytes.size());
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

std::vector<std::string> messages_of(const std::string& file) {
    const auto check = [&](size_t at, const std::string& bytes) {
        const uint32_t crc = slow_crc32c(bytes);
        CHECK(read_as<uint32_t>(file, at) == ((crc >> 15) | (crc << 17)) + 0xa282ead8u);
    };
    std::vector<std::string> messages;
    for (size_t at = 0; at < file.size();) {
        const auto bytes = static_cast<size_t>(read_as<uint64_t>(file, at));
        check(at + 8, file.substr(at, 8));
        messages.push_back(file.substr(at + 12, bytes));
        check(at + 12 + bytes, messages.back());
        at += 16 + bytes;
    }
    return messages;
}

// Field number -> raw values (varints and fixed-width values as 8 bytes).
using Fields = std::multimap<uint64_t, std::string>;
Fields fields_of(const std::string& message) {
    Fields fields;
    size_t at = 0;
    const auto varint = [&] {
        uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            const auto b = static_cast<uint8_t>(message.at(at++));
            value |= static_cast<uint64_t>(b & 0x7f) << shift;
            if (b < 0x80) return value;
        }
    };
    while (at < message.size()) {
        const uint64_t key = varint();
        std::string value(8, '\0');
        if (key % 8 == 0) {
            const uint64_t v = varint();
            std::memcpy(value.data(), &v, 8);
        } else {
            const size_t bytes = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : static_cast<size_t>(varint());
            value = message.substr(at, bytes);
            at += bytes;
        }
        fields.emplace(key / 8, value);
    }
    return fields;
}

std::string only_tensorboard_file(const std::string& run_dir) {
    std::vector<std::string> files;
    for (const auto& f : fs::directory_iterator(run_dir + "/tensorboard")) files.push_back(f.path().string());
    REQUIRE(files.size() == 1);
    CHECK(files[0].find("events.out.tfevents.") != std::string::npos);
    return content(files[0]);
}

}  // namespace

TEST_CASE("TensorBoard files parse, with their checksums", "[telemetry]") {
    CHECK(crc32c("123456789") == 0xe3069283u);
    Setup s(10);
    {
        Telemetry t(s.run_dir(), s.options);
        t.step(record(11));
        t.evaluation(128, 2.5);  // the smallest number of two bytes
    }
    const auto messages = messages_of(only_tensorboard_file(s.run_dir()));
    REQUIRE(messages.size() == 4);
    CHECK(fields_of(messages[0]).find(3)->second == "brain.Event:2");
    const Fields start = fields_of(messages[1]);
    CHECK(read_as<int64_t>(start.find(2)->second, 0) == 11);
    CHECK(read_as<int64_t>(fields_of(start.find(7)->second).find(1)->second, 0) == 1);
    std::map<std::string, float> values;
    for (size_t m : {2u, 3u}) {
        const Fields event = fields_of(messages[m]);
        CHECK(read_as<double>(event.find(1)->second, 0) > 1.6e9);
        CHECK(read_as<int64_t>(event.find(2)->second, 0) == (m == 2 ? 11 : 128));
        const Fields summary = fields_of(event.find(5)->second);
        for (auto [v, end] = summary.equal_range(1); v != end; ++v) {
            const Fields value = fields_of(v->second);
            values[value.find(1)->second] = read_as<float>(value.find(2)->second, 0);
        }
    }
    CHECK(values == std::map<std::string, float>{{"loss", 4.0f / 11},
                                                 {"grad_norm", 0.1f},
                                                 {"lr", 6e-4f},
                                                 {"tokens_per_s", 8192.0f},
                                                 {"mfu", 0.451f},
                                                 {"val_loss", 2.5f}});
}

TEST_CASE("TensorBoard can be switched off", "[telemetry]") {
    Setup s;
    s.options.tensorboard = false;
    Telemetry t(s.run_dir(), s.options);
    t.step(record(1));
    CHECK_FALSE(fs::exists(s.run_dir() + "/tensorboard"));
}
