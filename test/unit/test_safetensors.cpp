// test/unit/test_safetensors.cpp   Round trips, conversions, and every way in which a file can be wrong.
#include "test/catch.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "checkpoint/safetensors.h"
#include "test/unit/problems.h"
#include "test/unit/temporary_folder.h"

using namespace trifold;

namespace {

std::string with_length(const std::string& header, const std::string& data = "") {
    const uint64_t n = header.size();
    return std::string(reinterpret_cast<const char*>(&n), 8) + header + data;
}

// The sentence with which the reader refuses these bytes; empty when it takes them.
std::string refusal(const TemporaryFolder& folder, const std::string& bytes) {
    write_bytes(folder / "bad.safetensors", bytes);
    const std::string sentence = problem_of([&] { SafetensorsFile(folder / "bad.safetensors"); });
    CHECK((sentence.empty() || has(sentence, "bad.safetensors")));
    return sentence;
}

SafeTensor tensor_of(SafeType type, const void* data, int64_t count) {
    SafeTensor t{.name = "t", .type = type, .shape = {count}};
    t.data = static_cast<const std::byte*>(data);
    t.elems = count;
    t.bytes = count * size_of(type);
    return t;
}

}  // namespace

TEST_CASE("a safetensors file is read back as it was written") {
    const TemporaryFolder folder;
    std::vector<float> a(6);
    std::iota(a.begin(), a.end(), 0.5f);
    const std::vector<uint8_t> b = {1, 2, 3};
    const std::vector<int64_t> c = {-1, INT64_MAX};
    SafetensorsWriter writer(folder / "x.safetensors",
                             {{"a", SafeType::f32, {2, 3}},
                              {"b", SafeType::u8, {3}},
                              {"none", SafeType::bf16, {0, 7}},
                              {"c \"quoted\"", SafeType::i64, {2}}},
                             {{"format", "pt"}});
    writer.write(a.data(), 24);
    writer.write(b.data(), 3);
    writer.write(c.data(), 16);
    const FileDigest digest = writer.finish();

    const SafetensorsFile file(folder / "x.safetensors");
    REQUIRE(file.tensors().size() == 4);
    CHECK(file.metadata().at("format") == "pt");
    const SafeTensor* t = file.find("a");
    REQUIRE(t);
    CHECK(t->shape == std::vector<int64_t>{2, 3});
    CHECK(t->offset % 64 == 0);
    CHECK(std::memcmp(t->data, a.data(), 24) == 0);
    CHECK(std::memcmp(file.find("b")->data, b.data(), 3) == 0);
    CHECK(std::memcmp(file.find("c \"quoted\"")->data, c.data(), 16) == 0);
    CHECK(file.find("none")->bytes == 0);
    CHECK(file.find("d") == nullptr);

    CHECK(digest.bytes == static_cast<int64_t>(file_bytes(folder / "x.safetensors").size()));
    CHECK(digest.xxh3 == xxh3(file_bytes(folder / "x.safetensors")));
}

TEST_CASE("values become fp32 exactly") {
    float out[8];
    const uint16_t half[] = {0x0000, 0x8000, 0x3c00, 0xc000, 0x0001, 0x83ff, 0x7bff, 0x7c00};
    to_float(tensor_of(SafeType::f16, half, 8), 0, 8, out);
    const float expected[] = {0.0f, -0.0f, 1.0f, -2.0f, 0x1p-24f, -0x1.ff8p-15f, 65504.0f, INFINITY};
    for (int i = 0; i < 8; ++i) CHECK(std::bit_cast<uint32_t>(out[i]) == std::bit_cast<uint32_t>(expected[i]));
    const uint16_t nan = 0x7e01;
    to_float(tensor_of(SafeType::f16, &nan, 1), 0, 1, out);
    CHECK(std::isnan(out[0]));

    const uint16_t brain[] = {0x3f80, 0xc049, 0xff80};
    to_float(tensor_of(SafeType::bf16, brain, 3), 1, 2, out);
    CHECK(out[0] == -3.140625f);
    CHECK(out[1] == -INFINITY);
    const double wide[] = {0.1, 1e300};
    to_float(tensor_of(SafeType::f64, wide, 2), 0, 2, out);
    CHECK(out[0] == 0.1f);
    const int32_t whole[] = {1};
    CHECK_THROWS_AS(to_float(tensor_of(SafeType::i32, whole, 1), 0, 1, out), Problem);
}

TEST_CASE("every half precision number") {
    std::vector<uint16_t> bits(1 << 16);
    std::iota(bits.begin(), bits.end(), uint16_t{0});
    std::vector<float> out(bits.size());
    to_float(tensor_of(SafeType::f16, bits.data(), 1 << 16), 0, 1 << 16, out.data());
    int wrong = 0;
    for (uint32_t h = 0; h < 1u << 16; ++h) {
        const int exponent = static_cast<int>(h >> 10 & 31), mantissa = static_cast<int>(h & 1023);
        if (exponent == 31) continue;
        const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
        wrong += out[h] != static_cast<float>(h & 0x8000 ? -magnitude : magnitude);
    }
    CHECK(wrong == 0);
}

TEST_CASE("safetensors files that are not right are refused with the byte") {
    const TemporaryFolder folder;
    const std::string good =
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})";
    const std::string data(12, 'd');
    CHECK(refusal(folder, with_length(good, data)).empty());

    // every truncation, and trailing bytes
    const std::string whole = with_length(good, data);
    for (size_t n = 0; n < whole.size(); ++n) CHECK_FALSE(refusal(folder, whole.substr(0, n)).empty());
    CHECK(has(refusal(folder, whole + "x"), "the last tensor ends at byte"));

    // the header's length
    CHECK(has(refusal(folder, std::string("\0\0\0\0\0\0\0\x80", 8)),
              "the header length at byte 0 is 9223372036854775808"));
    CHECK(has(refusal(folder, std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8)), "more than the limit of 100000000"));
    CHECK(has(refusal(folder, std::string("\x01\xe1\xf5\x05\0\0\0\0", 8)), "more than the limit"));     // 100,000,001
    CHECK(has(refusal(folder, std::string("\x00\xe1\xf5\x05\0\0\0\0", 8)), "but the file at byte 8"));  // 100,000,000
    CHECK(has(refusal(folder, with_length("")), "not a safetensors file"));
    CHECK(has(refusal(folder, with_length("[1]")), "not a safetensors file"));
    CHECK(has(refusal(folder, with_length(R"({"a":})")), "byte 13: syntax error"));
    CHECK(has(refusal(folder, with_length(std::string(1000, '{'))), "byte 9: syntax error"));
    CHECK(has(refusal(folder, with_length(R"({"a":)" + std::string(100, '[') + std::string(100, ']') + "}")),
              "nested deeper"));

    const auto one = [&](const std::string& entry, const std::string& bytes = "12345678") {
        return refusal(folder, with_length(R"({"a":)" + entry + "}", bytes));
    };
    CHECK(has(one(R"({"dtype":"F33","shape":[2],"data_offsets":[0,8]})"), R"(the unknown dtype "F33")"));
    CHECK(has(one(R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})"), "the unknown dtype 7"));
    CHECK(has(one(R"({"shape":[2],"data_offsets":[0,8]})"), "has no dtype"));
    CHECK(has(one("3"), "has no dtype"));
    CHECK(has(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), "takes 8 bytes at byte"));
    CHECK(has(one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "not a list of sizes"));
    CHECK(
        has(one(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})"), "does not fit its shape"));
    CHECK(has(one(R"({"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8]})"), "does not fit its shape"));
    CHECK(has(one(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]})"), "not a list of sizes"));
    CHECK(has(one(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), "not a list of sizes"));
    CHECK(has(one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "not [begin, end]"));
    CHECK(has(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})"), "not [begin, end]"));
    CHECK(has(one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,16]})"), "but the file at byte"));
    CHECK(has(one(R"({"dtype":"F32","shape":[2],"data_offsets":[9223372036854775799,9223372036854775807]})"),
              "but the file at byte"));
    CHECK(has(one(R"({"dtype":"U8","shape":[4],"data_offsets":[4,8]})"), "belong to no tensor"));
    CHECK(has(one(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})"), "the last tensor ends at byte"));
    CHECK(has(refusal(folder, with_length(R"({"__metadata__":{"x":1}})")), "metadata 'x' is not a text"));

    const auto two = [&](const std::string& b) {
        return refusal(folder, with_length(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)" + b + "}",
                                           std::string(12, 'd')));
    };
    CHECK(has(two(R"("b":{"dtype":"U8","shape":[8],"data_offsets":[4,12]})"), "overlaps the one before it"));
    CHECK(has(two(R"("b":{"dtype":"U8","shape":[3],"data_offsets":[9,12]})"), "belong to no tensor"));
    CHECK(has(two(R"("a":{"dtype":"U8","shape":[4],"data_offsets":[8,12]})"), "the key a appears twice"));
    CHECK(has(two(R"("b":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[8,12]})"),
              "the key b.shape appears twice"));
}

TEST_CASE("a flipped bit in the header never reads outside the file") {
    const TemporaryFolder folder;
    const std::string whole = with_length(
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[8,12]}})",
        std::string(12, 'd'));
    for (size_t bit = 0; bit < (whole.size() - 12) * 8; ++bit) {
        std::string bad = whole;
        bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
        write_bytes(folder / "bad.safetensors", bad);
        try {
            const SafetensorsFile file(folder / "bad.safetensors");
            for (const SafeTensor& t : file.tensors()) REQUIRE(t.offset + t.bytes <= static_cast<int64_t>(bad.size()));
        } catch (const Problem&) {
        }
    }
}

TEST_CASE("a missing file and a folder are refused") {
    const TemporaryFolder folder;
    CHECK_THROWS_AS(SafetensorsFile(folder / "none"), Problem);
    CHECK_THROWS_AS(SafetensorsFile(folder.path()), Problem);
}
