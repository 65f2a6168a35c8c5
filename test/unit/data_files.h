// test/unit/data_files.h   Small files for the tests of the data part.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "data/tokenizer.h"

inline std::string text_of(const trifold::Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
    std::string text;
    for (const int32_t id : ids) text += tokenizer.piece(id);
    return text;
}

// A fresh folder that disappears with its contents.
class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "trifold-test-XXXXXX").string();
        path_ = ::mkdtemp(name.data());
    }
    ~TemporaryFolder() { std::filesystem::remove_all(path_); }
    TemporaryFolder(const TemporaryFolder&) = delete;
    std::string operator/(const std::string& name) const { return (path_ / name).string(); }
    std::string path() const { return path_.string(); }
    std::vector<std::string> names() const {
        std::vector<std::string> names;
        for (const auto& entry : std::filesystem::directory_iterator(path_))
            names.push_back(entry.path().filename().string());
        std::sort(names.begin(), names.end());
        return names;
    }

private:
    std::filesystem::path path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    std::ostringstream bytes;
    bytes << in.rdbuf();
    return bytes.str();
}

// "0a 0B" -> two bytes; spaces do not count.
inline std::string from_hex(const std::string& hex) {
    std::string digits, bytes;
    for (const char c : hex) {
        if (std::isxdigit(static_cast<unsigned char>(c))) digits += c;
    }
    for (size_t i = 0; i + 1 < digits.size(); i += 2)
        bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
    return bytes;
}

template <class T>
std::string raw(const std::vector<T>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The bytes of an llm.c file, version 1.
inline std::string llmc_bytes(const std::vector<uint16_t>& ids) {
    std::vector<int32_t> header(256, 0);
    header[0] = 20240520, header[1] = 1, header[2] = static_cast<int32_t>(ids.size());
    return raw(header) + raw(ids);
}

// The sentence of the Problem that `action` throws; its exit code in front.
inline std::string problem_of(const std::function<void()>& action) {
    try {
        action();
    } catch (const trifold::Problem& problem) {
        return std::to_string(static_cast<int>(problem.code())) + ": " + problem.what();
    }
    return "no problem";
}

#define CHECK_PROBLEM(action, part)                               \
    do {                                                          \
        const std::string sentence = problem_of([&] { action; }); \
        INFO(sentence);                                           \
        CHECK(sentence.find(part) != std::string::npos);          \
    } while (false)
