// test/unit/test_token_file.cpp   llm.c and Megatron token files and mask files: reading, writing, and what is refused.
#include "test/catch.h"
#include "data/dataset.h"
#include "data/token_file.h"
#include "data/token_writer.h"
#include "test/unit/data_files.h"

using namespace trifold;

namespace {

using Ids = std::vector<int32_t>;

// Three documents [1,2,3], [4,5], [6,7,8,9], as Megatron's own writer puts them on disk.
const std::string golden_bin = from_hex("010002000300040005000600070008000900");
const std::string golden_idx = from_hex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000 03000000 02000000 04000000"
    "0000000000000000 0600000000000000 0a00000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000");

void write_golden(const TemporaryFolder& folder) {
    write_file(folder / "g.bin", golden_bin);
    write_file(folder / "g.idx", golden_idx);
}

std::string patched(std::string bytes, size_t offset, const std::string& with) {
    return bytes.replace(offset, with.size(), with);
}

template <class T>
std::string little(T value) {
    return raw(std::vector<T>{value});
}

Ids all_of(const TokenFile& file) {
    Ids ids(static_cast<size_t>(file.tokens()));
    file.read(0, ids);
    return ids;
}

void write_documents(const std::string& prefix, TokenFormat format, TokenType type, const std::vector<Ids>& documents,
                     int64_t shard_tokens = LlmcHeader::max_tokens) {
    TokenWriter writer({.prefix = prefix, .format = format, .type = type, .shard_tokens = shard_tokens});
    for (const Ids& ids : documents) {
        writer.append(ids);
        writer.end_document();
    }
    writer.finish();
    writer.commit();
}

const std::vector<Ids> three_documents = {{1, 2, 3}, {4, 5}, {6, 7, 8, 9}};

// A sparse file: `bytes` long, zeros except for what is patched in.
void write_sparse(const std::string& path, int64_t bytes, const std::vector<std::pair<int64_t, std::string>>& patches) {
    write_file(path, "");
    std::filesystem::resize_file(path, static_cast<uintmax_t>(bytes));
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    for (const auto& [offset, patch] : patches) {
        file.seekp(offset);
        file << patch;
    }
}

}  // namespace

TEST_CASE("Megatron files: golden bytes, read and written") {
    const TemporaryFolder folder;
    write_golden(folder);
    for (const char* name : {"g", "g.bin", "g.idx"}) {
        const TokenFile file(folder / name);
        CHECK(file.format() == TokenFormat::megatron);
        CHECK(file.type() == TokenType::u16);
        CHECK(all_of(file) == Ids{1, 2, 3, 4, 5, 6, 7, 8, 9});
        CHECK(file.listed_documents() == 3);
        CHECK(file.next_listed_document(0) == 3);
        CHECK(file.next_listed_document(2) == 3);
        CHECK(file.next_listed_document(3) == 5);
        CHECK(file.next_listed_document(8) == 9);
    }
    write_documents(folder / "w", TokenFormat::megatron, TokenType::u16, three_documents);
    CHECK(read_file(folder / "w.bin") == golden_bin);
    CHECK(read_file(folder / "w.idx") == golden_idx);
    CHECK(folder.names() == std::vector<std::string>{"g.bin", "g.idx", "w.bin", "w.idx"});
}

TEST_CASE("llm.c files: golden bytes of both versions, read and written") {
    const TemporaryFolder folder;
    write_documents(folder / "a", TokenFormat::llmc, TokenType::u16, three_documents);
    const std::string a = read_file(folder / "a.bin");
    REQUIRE(a.size() == 1024 + 18);
    CHECK(a.substr(0, 12) == from_hex("88d83401 01000000 09000000"));
    CHECK(a.substr(12, 1012) == std::string(1012, '\0'));
    CHECK(a.substr(1024) == golden_bin);
    write_documents(folder / "b", TokenFormat::llmc, TokenType::u32, {{1, 128001}});
    const std::string b = read_file(folder / "b.bin");
    CHECK(b.substr(0, 12) == from_hex("a1d93401 07000000 02000000"));
    CHECK(b.substr(1024) == from_hex("01000000 01f40100"));
    CHECK(all_of(TokenFile(folder / "b.bin")) == Ids{1, 128001});
    CHECK(TokenFile(folder / "a").tokens() == 9);  // without .bin
    CHECK_FALSE(TokenFile(folder / "a.bin").listed_documents());
    CHECK(TokenFile(folder / "a.bin").byte_offset(2) == 1028);
}

TEST_CASE("types are those that the formats' own writers choose") {
    CHECK(token_type_for(TokenFormat::megatron, 65499) == TokenType::u16);
    CHECK(token_type_for(TokenFormat::megatron, 65500) == TokenType::i32);
    CHECK(token_type_for(TokenFormat::llmc, 65536) == TokenType::u16);
    CHECK(token_type_for(TokenFormat::llmc, 65537) == TokenType::u32);
}

TEST_CASE("every type of token is read, and what fits no vocabulary stays visible") {
    const TemporaryFolder folder;
    const auto write = [&](int code, const std::string& bin, int tokens) {
        write_file(folder / "t.bin", bin);
        std::string idx =
            golden_idx.substr(0, 17) + static_cast<char>(code) + little<uint64_t>(1) + little<uint64_t>(2);
        idx += little<int32_t>(tokens) + little<int64_t>(0) + little<int64_t>(0) + little<int64_t>(1);
        write_file(folder / "t.idx", idx);
    };
    write(1, raw(std::vector<uint8_t>{1, 255}), 2);
    CHECK(all_of(TokenFile(folder / "t")) == Ids{1, 255});
    write(2, raw(std::vector<int8_t>{1, -1}), 2);
    CHECK(all_of(TokenFile(folder / "t")) == Ids{1, -1});
    write(3, raw(std::vector<int16_t>{1, -2}), 2);
    CHECK(all_of(TokenFile(folder / "t")) == Ids{1, -2});
    write(4, raw(std::vector<int32_t>{1, 1 << 20}), 2);
    CHECK(all_of(TokenFile(folder / "t")) == Ids{1, 1 << 20});
    write(8, raw(std::vector<uint16_t>{1, 65535}), 2);
    CHECK(all_of(TokenFile(folder / "t")) == Ids{1, 65535});
    write(5, raw(std::vector<int64_t>{7, int64_t{1} << 40, -(int64_t{1} << 40)}), 3);
    const TokenFile wide(folder / "t");
    CHECK(all_of(wide) == Ids{7, 2147483647, -2147483648});
    CHECK(wide.at(1) == int64_t{1} << 40);
}

TEST_CASE("malformed llm.c files are one sentence each") {
    const TemporaryFolder folder;
    const std::string good = llmc_bytes({1, 2, 3, 4});
    const auto open = [&](const std::string& bytes) {
        write_file(folder / "x.bin", bytes);
        TokenFile(folder / "x.bin");
    };
    CHECK_PROBLEM(TokenFile(folder / "none.bin"), "3: there is no token file");
    CHECK_PROBLEM(TokenFile(folder.path()), "is a folder");
    CHECK_PROBLEM(open(""), "is empty");
    CHECK_PROBLEM(open(good.substr(0, 1000)), "cut off: 1000 bytes, but the header alone has 1024");
    CHECK_PROBLEM(open(good.substr(0, 1026)), "claims 4 tokens, which makes 1032 bytes, but it has 1026");
    CHECK_PROBLEM(open(good + "12"), "claims 4 tokens, which makes 1032 bytes, but it has 1034");
    CHECK_PROBLEM(open(good + "1"), "9 bytes of tokens, not a multiple of 2");
    CHECK_PROBLEM(open(patched(good, 0, "Once")), "is not llm.c's magic");
    CHECK_PROBLEM(open("ab"), "is not llm.c's magic");
    CHECK_PROBLEM(open(patched(good, 0, little<int32_t>(20240522))), "evaluation set");
    CHECK_PROBLEM(open(patched(good, 4, little<int32_t>(7))), "has version 7; with magic 20240520 it must be 1");
    CHECK_PROBLEM(open(patched(good, 8, little<int32_t>(-5))), "claims -5 tokens");
}

TEST_CASE("malformed Megatron files are one sentence each") {
    const TemporaryFolder folder;
    const auto open = [&](const std::string& bin, const std::string& idx) {
        write_file(folder / "x.bin", bin);
        write_file(folder / "x.idx", idx);
        TokenFile(folder / "x");
    };
    const auto index = [&](size_t offset, const std::string& with) {
        open(golden_bin, patched(golden_idx, offset, with));
    };
    CHECK_PROBLEM(open(golden_bin, ""), "x.idx is empty");
    CHECK_PROBLEM(open("", golden_idx), "x.bin is empty");
    CHECK_PROBLEM(open(golden_bin, golden_idx.substr(0, 20)), "cut off: 20 bytes, but the header alone has 34");
    CHECK_PROBLEM(open(golden_bin, golden_idx.substr(0, 101)),
                  "claims 3 sequences and 4 document entries, which does not make its 101 bytes");
    CHECK_PROBLEM(open(golden_bin, golden_idx + "\1\1\1"), "multi-modal");
    CHECK_PROBLEM(index(0, "X"), "MMIDIDX");
    CHECK_PROBLEM(index(9, "\2"), "has version 2");
    CHECK_PROBLEM(index(17, "\6"), "float64");
    CHECK_PROBLEM(index(17, "\7"), "float32");
    CHECK_PROBLEM(index(17, "\11"), "unknown type code 9");
    CHECK_PROBLEM(index(18, little<uint64_t>(~uint64_t{0})), "does not make its 102 bytes");
    CHECK_PROBLEM(index(26, little<uint64_t>(uint64_t{1} << 61)), "does not make its 102 bytes");
    CHECK_PROBLEM(index(34, little<int32_t>(-3)), "gives sequence 0 the length -3");
    CHECK_PROBLEM(index(42, little<int32_t>(2000000000)), "points beyond");
    CHECK_PROBLEM(index(46, little<int64_t>(-2)), "points beyond");
    CHECK_PROBLEM(index(54, little<int64_t>(int64_t{1} << 60)), "points beyond");
    CHECK_PROBLEM(index(54, little<int64_t>(8)), "gaps and other orders");
    CHECK_PROBLEM(open(golden_bin + "xx", golden_idx), "covers 18 bytes of");
    CHECK_PROBLEM(open(golden_bin.substr(0, 16), golden_idx), "points beyond");
    CHECK_PROBLEM(open(golden_bin.substr(0, 17), golden_idx), "17 bytes, not a multiple of 2");
    CHECK_PROBLEM(index(70, little<int64_t>(1)), "document 0 begin with sequence 1");
    CHECK_PROBLEM(index(86, little<int64_t>(0)), "document 2 begin with sequence 0");
    CHECK_PROBLEM(index(94, little<int64_t>(9)), "document 3 begin with sequence 9");
    CHECK_PROBLEM(index(94, little<int64_t>(2)), "lists documents up to sequence 2 of 3");
    std::filesystem::remove(folder / "x.bin");
    CHECK_PROBLEM(TokenFile(folder / "x"), "has no");
}

TEST_CASE("offsets beyond 4 GiB and counts beyond 2^32 tokens") {
    const TemporaryFolder folder;
    const int64_t length = (int64_t{1} << 31) - 2, tokens = 3 * length;  // u8: 6.4e9 tokens; sequence lengths are int32
    write_sparse(folder / "big.bin", tokens, {{tokens - 3, "\1\2\3"}, {2 * length, "\7"}});
    std::string idx = golden_idx.substr(0, 17) + '\1' + little<uint64_t>(3) + little<uint64_t>(3);
    for (int s = 0; s < 3; ++s) idx += little<int32_t>(static_cast<int32_t>(length));
    for (int s = 0; s < 3; ++s) idx += little<int64_t>(s * length);
    idx += little<int64_t>(0) + little<int64_t>(2) + little<int64_t>(3);
    write_file(folder / "big.idx", idx);
    const TokenFile file(folder / "big");
    CHECK(file.tokens() == tokens);
    Ids last(3);
    file.read(tokens - 3, last);
    CHECK(last == Ids{1, 2, 3});
    CHECK(file.next_listed_document(5'000'000) == 2 * length);
    CHECK(file.at(2 * length) == 7);
    CHECK(file.next_listed_document(2 * length) == tokens);

    // llm.c: 1.5e9 u16 tokens, so byte offsets go beyond 2^31.
    const int64_t many = 1'500'000'000;
    write_sparse(
        folder / "long.bin", 1024 + 2 * many,
        {{0, llmc_bytes({}).substr(0, 8) + little<int32_t>(many)}, {1024 + 2 * (many - 1), little<uint16_t>(777)}});
    const TokenFile flat(folder / "long.bin");
    CHECK(flat.tokens() == many);
    CHECK(flat.at(many - 1) == 777);
    CHECK(flat.byte_offset(many - 1) == 1024 + 2 * (many - 1));
}

TEST_CASE("long llm.c output becomes shards, which a glob reads in order") {
    const TemporaryFolder folder;
    write_file(folder / "s.idx", "stale");
    write_documents(folder / "s", TokenFormat::llmc, TokenType::u16, three_documents, 4);
    CHECK(folder.names() == std::vector<std::string>{"s_000000.bin", "s_000001.bin", "s_000002.bin"});
    Ids joined;
    for (const TokenFile& file : open_token_files(folder / "s_*.bin")) {
        for (const int32_t id : all_of(file)) joined.push_back(id);
    }
    CHECK(joined == Ids{1, 2, 3, 4, 5, 6, 7, 8, 9});
    CHECK_PROBLEM(write_documents(folder / "s", TokenFormat::llmc, TokenType::u16, three_documents),
                  "looks like a shard of an earlier output");
    CHECK_PROBLEM(open_token_files(folder / "t_*.bin"), "no token file matches");
}

TEST_CASE("an output that is not committed leaves nothing behind, and errors name the file") {
    const TemporaryFolder folder;
    {
        TokenWriter writer({.prefix = folder / "half", .mask = true});
        writer.append(Ids{1, 2});
    }
    CHECK(folder.names().empty());
    write_file(folder / "plain", "a file where a folder should be");
    CHECK_PROBLEM(TokenWriter({.prefix = folder / "plain/x"}), "3: cannot create");
    if (std::filesystem::exists("/dev/full")) {
        std::filesystem::create_symlink("/dev/full", folder / "full.bin.tmp");
        TokenWriter writer({.prefix = folder / "full"});
        CHECK_PROBLEM(writer.append(Ids(2'000'000, 1)), "No space left on device; nothing was kept");
    }
}

TEST_CASE("prompt masks: bits, counts, and masks of other data") {
    const TemporaryFolder folder;
    const std::vector<uint8_t> prompt = {1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 1};
    {
        MaskWriter writer(folder / "m.mask");
        writer.append(prompt, 11);
        writer.append({}, 3);
        writer.finish();
        writer.commit_as(folder / "m.mask");
    }
    CHECK(read_file(folder / "m.mask") == "TRIFMASK" + little<uint64_t>(1) + little<uint64_t>(14) + from_hex("23 05"));
    const MaskFile mask(folder / "m.mask", 14);
    for (int64_t i = 0; i < 14; ++i) CHECK(mask.is_prompt(i) == (i < 11 && prompt[i] == 1));
    for (int64_t first = 0; first <= 14; ++first) {
        for (int64_t count = 0; first + count <= 14; ++count) {
            int64_t expected = 0;
            for (int64_t i = first; i < first + count; ++i) expected += i < 11 && prompt[i] == 1;
            REQUIRE(mask.count(first, count) == expected);
        }
    }
    CHECK_PROBLEM(MaskFile(folder / "m.mask", 15), "is for 14 tokens");
    CHECK_PROBLEM(MaskFile(folder / "none.mask", 15), "cannot open the prompt mask");
    write_file(folder / "bad.mask", "TRIFMASX................");
    CHECK_PROBLEM(MaskFile(folder / "bad.mask", 0), "is not a prompt mask");
}

TEST_CASE("content hashes see every kind of change") {
    const TemporaryFolder folder;
    std::vector<uint16_t> ids(200'000);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i * 7919);
    const auto hash = [&] {
        write_file(folder / "h.bin", llmc_bytes(ids));
        return TokenFile(folder / "h.bin").sampled_hash();
    };
    const uint64_t before = hash();
    CHECK(hash() == before);
    ids.back() ^= 1;
    CHECK(hash() != before);
    ids.back() ^= 1;
    ids.front() ^= 1;
    CHECK(hash() != before);
    ids.front() ^= 1;
    ids.push_back(0);
    CHECK(hash() != before);
}

TEST_CASE("inspect and convert") {
    const TemporaryFolder folder;
    const std::vector<Ids> documents = {{1, 2, 256}, {256}, {3, 256}, {4, 5, 6}};
    write_documents(folder / "a", TokenFormat::llmc, TokenType::u16, documents, 5);
    const DatasetSummary a = inspect(folder / "a_*.bin", std::nullopt);
    CHECK(a.files == 2);
    CHECK(a.tokens == 9);
    CHECK(a.documents == 3);  // one without text does not count
    CHECK(a.vocab_max == 256);
    CHECK(a.end_of_document == 256);
    CHECK(inspect(folder / "a_*.bin", 3).documents == 2);

    const ConvertResult b =
        convert({.input = folder / "a_*.bin", .prefix = folder / "b", .format = TokenFormat::megatron});
    CHECK(b.documents == 3);
    CHECK(all_of(TokenFile(folder / "b")) == Ids{1, 2, 256, 256, 3, 256, 4, 5, 6});
    CHECK(TokenFile(folder / "b").next_listed_document(0) == 3);
    CHECK(TokenFile(folder / "b").next_listed_document(3) == 6);
    const DatasetSummary bs = inspect(folder / "b", std::nullopt);
    CHECK(bs.documents == 3);
    CHECK_FALSE(bs.end_of_document);

    CHECK_PROBLEM(convert({.input = folder / "b", .prefix = folder / "c", .format = TokenFormat::llmc}),
                  "do not end with one common id");
    const ConvertResult c =
        convert({.input = folder / "b", .prefix = folder / "c", .format = TokenFormat::llmc, .end_of_document = 256});
    CHECK(c.appended_ends == 1);
    CHECK(all_of(TokenFile(folder / "c")) == Ids{1, 2, 256, 256, 3, 256, 4, 5, 6, 256});
    CHECK_PROBLEM(convert({.input = folder / "c", .prefix = folder / "c", .format = TokenFormat::llmc}), "2: --out");

    write_documents(folder / "w", TokenFormat::megatron, TokenType::i32, {{70000, 2}, {3, 2}});
    convert({.input = folder / "w", .prefix = folder / "w7", .format = TokenFormat::llmc});
    CHECK(TokenFile(folder / "w7.bin").type() == TokenType::u32);
    CHECK(all_of(TokenFile(folder / "w7.bin")) == Ids{70000, 2, 3, 2});
    CHECK_PROBLEM(inspect(folder / "[aw]*.bin", std::nullopt), "differ in format or type");
}

TEST_CASE("convert takes the prompt mask along") {
    const TemporaryFolder folder;
    {
        TokenWriter writer({.prefix = folder / "a", .mask = true});
        writer.append(Ids{1, 2, 3, 256}, std::vector<uint8_t>{1, 1, 0, 0});
        writer.end_document();
        writer.append(Ids{4, 256});
        writer.end_document();
        writer.finish();
        writer.commit();
    }
    CHECK(inspect(folder / "a.bin", std::nullopt).prompt_tokens == 2);
    convert({.input = folder / "a.bin", .prefix = folder / "b", .format = TokenFormat::megatron});
    CHECK(read_file(folder / "b.mask") == read_file(folder / "a.mask"));
}
