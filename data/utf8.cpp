// data/utf8.cpp   By utf8proc, which decodes as RFC 3629 says.
#include "data/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/refuse.h"

namespace trifold {
namespace {

const utf8proc_uint8_t* bytes_of(std::string_view text) { return reinterpret_cast<const utf8proc_uint8_t*>(text.data()); }

bool continues(std::string_view text, size_t i) { return (static_cast<uint8_t>(text[i]) & 0xC0) == 0x80; }

struct CodePoint {
    char32_t value;
    size_t bytes;  // 0: the text does not begin with a complete and valid one
};
CodePoint first_code_point(std::string_view text) {
    utf8proc_int32_t value = 0;
    const utf8proc_ssize_t bytes = utf8proc_iterate(bytes_of(text), std::ssize(text), &value);
    return {static_cast<char32_t>(value), bytes > 0 ? static_cast<size_t>(bytes) : 0};
}

// Combining marks and composing letters that Unicode 10 to 17 added. The package normalizes by the tables of Unicode 9,
// in which they do nothing; ids must be those that models were trained on.
constexpr std::array<std::array<char32_t, 2>, 53> newer_than_package = {
    {{0x5C8, 0x5C9},     {0x7FD, 0x7FD},     {0x897, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},     {0xD3B, 0xD3C},
     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1AF0},   {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x105C0, 0x105FF}, {0x10D24, 0x10D27},
     {0x10D69, 0x10D6D}, {0x10EAB, 0x10EAC}, {0x10ECB, 0x10ECF}, {0x10EF0, 0x10EFB}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50}, {0x10F82, 0x10F85},
     {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x11380, 0x113FF}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11900, 0x1195F}, {0x119E0, 0x119E0},
     {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
     {0x16100, 0x1613F}, {0x16D40, 0x16D7F}, {0x16FF0, 0x16FF1}, {0x1D127, 0x1D128}, {0x1D250, 0x1D252}, {0x1D25B, 0x1D25C}, {0x1D25F, 0x1D25F},
     {0x1D280, 0x1D281}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}, {0x1E5EE, 0x1E5EF},
     {0x1E6E3, 0x1E6E3}, {0x1E6E6, 0x1E6E6}, {0x1E6EE, 0x1E6EF}, {0x1E6F5, 0x1E6F5}}};

bool is_newer_than_package(char32_t c) {
    const auto range =
        std::upper_bound(newer_than_package.begin(), newer_than_package.end(), c, [](char32_t value, const auto& r) { return value < r[0]; });
    return range != newer_than_package.begin() && c <= (*std::prev(range))[1];
}

// Code points below U+0300 neither combine with what stands before them nor change their order.
bool surely_normal(std::string_view text) {
    return std::ranges::all_of(text, [](char c) { return static_cast<uint8_t>(c) < 0xCC; });
}

void append_normalized(std::string_view text, std::string& out) {
    if (text.empty()) return;
    utf8proc_uint8_t* normal = nullptr;
    const utf8proc_ssize_t bytes =
        utf8proc_map(bytes_of(text), std::ssize(text), &normal, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(normal, &std::free);
    if (bytes < 0) refuse(Exit::data, "Unicode normalization of {} bytes of text failed: {}", text.size(), utf8proc_errmsg(bytes));
    out.append(reinterpret_cast<const char*>(normal), static_cast<size_t>(bytes));
}

}  // namespace

size_t invalid_utf8(std::string_view text) {
    size_t i = 0;
    while (i < text.size()) {
        uint64_t eight;
        while (i + 8 <= text.size() && (std::memcpy(&eight, text.data() + i, 8), (eight & 0x8080808080808080u) == 0)) i += 8;
        if (i == text.size()) break;
        const size_t bytes = first_code_point(text.substr(i)).bytes;
        if (bytes == 0) return i;
        i += bytes;
    }
    return std::string_view::npos;
}

size_t incomplete_tail(std::string_view text) {
    for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
        const size_t i = text.size() - back;
        if (!continues(text, i)) return utf8proc_utf8class[static_cast<uint8_t>(text[i])] > static_cast<int>(back) ? back : 0;
    }
    return 0;
}

std::string nfc(std::string_view text) {
    if (surely_normal(text)) return std::string(text);
    std::string out;
    out.reserve(text.size());
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
        const CodePoint c = first_code_point(text.substr(i));
        if (is_newer_than_package(c.value)) {
            append_normalized(text.substr(begin, i - begin), out);
            out += text.substr(i, c.bytes);
            begin = i + c.bytes;
        }
        i += c.bytes;
    }
    append_normalized(text.substr(begin), out);
    return out;
}

bool is_white_space(char32_t c) {
    if (c < 0x80) return c == ' ' || (c >= 9 && c <= 13);
    return c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

char32_t last_code_point(std::string_view text) {
    size_t begin = text.size() - 1;
    while (begin > 0 && text.size() - begin < 4 && continues(text, begin)) --begin;
    return first_code_point(text.substr(begin)).value;
}

size_t leading_space(std::string_view text) {
    size_t i = 0;
    while (i < text.size()) {
        const CodePoint c = first_code_point(text.substr(i));
        if (!is_white_space(c.value)) break;
        i += c.bytes;
    }
    return i;
}

size_t trailing_space(std::string_view text) {
    size_t end = text.size();
    while (end > 0 && is_white_space(last_code_point(text.substr(0, end)))) do
            --end;
        while (end > 0 && continues(text, end));
    return text.size() - end;
}

void append_utf8(std::string& out, char32_t c) {
    std::array<utf8proc_uint8_t, 4> bytes;
    const utf8proc_ssize_t count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), bytes.data());
    out.append(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(count));
}

}  // namespace trifold
