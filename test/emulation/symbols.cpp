#include "test/emulation/symbols.h"

#include <cxxabi.h>
#include <elf.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <vector>

namespace trifold::emulation {
namespace {

// Mangled names of the functions by their address in the file. dladdr() knows exported functions only, and kernels have
// internal linkage.
std::map<uintptr_t, std::string> read_symbol_table() {
    std::ifstream file("/proc/self/exe", std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    std::map<uintptr_t, std::string> names;
    if (bytes.size() < sizeof(ElfW(Ehdr))) return names;
    const auto* header = reinterpret_cast<const ElfW(Ehdr)*>(bytes.data());
    const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes.data() + header->e_shoff);
    for (int s = 0; s < header->e_shnum; ++s) {
        if (sections[s].sh_type != SHT_SYMTAB) continue;
        const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(bytes.data() + sections[s].sh_offset);
        const char* strings = bytes.data() + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; ++i) {
            if ((symbols[i].st_info & 0xf) == STT_FUNC && symbols[i].st_value) names[symbols[i].st_value] = strings + symbols[i].st_name;
        }
    }
    return names;
}

// "void (anonymous namespace)::norm<float>(float*)" becomes "norm<float>".
std::string short_name(const std::string& mangled) {
    int status = 0;
    char* demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    std::string name = demangled ? demangled : mangled;
    std::free(demangled);
    const std::string anonymous = "(anonymous namespace)::";
    for (size_t at; (at = name.find(anonymous)) != std::string::npos;) name.erase(at, anonymous.size());
    size_t begin = 0, end = 0, depth = 0;  // the last space or "::" before the arguments, outside angle brackets
    for (; end < name.size() && (depth > 0 || name[end] != '('); ++end) {
        if (name[end] == '<') ++depth;
        if (name[end] == '>') --depth;
        if (depth == 0 && (name[end] == ' ' || name[end] == ':')) begin = end + 1;
    }
    return name.substr(begin, end - begin);
}

}  // namespace

uintptr_t program_base() {
    static const uintptr_t base = [] {
        uintptr_t found = 0;  // the program itself is the first object
        dl_iterate_phdr([](dl_phdr_info* info, size_t, void* out) { return *static_cast<uintptr_t*>(out) = info->dlpi_addr, 1; }, &found);
        return found;
    }();
    return base;
}

const char* function_name(const void* function) {
    static const std::map<uintptr_t, std::string> symbols = read_symbol_table();
    static std::map<const void*, std::string> known;
    const auto [entry, is_new] = known.try_emplace(function, "a kernel");
    if (is_new) {
        const auto symbol = symbols.find(reinterpret_cast<uintptr_t>(function) - program_base());
        if (symbol != symbols.end()) entry->second = short_name(symbol->second);
    }
    return entry->second.c_str();
}

std::string source_of(uintptr_t instruction) {
    char command[160];
    std::snprintf(command, sizeof command, "addr2line -Cfips -e /proc/%d/exe %#lx 2>/dev/null", getpid(), instruction - program_base());
    std::string text;
    if (FILE* lines = popen(command, "r")) {
        char part[512];
        while (std::fgets(part, sizeof part, lines)) text += part;
        pclose(lines);
    }
    return text;
}

}  // namespace trifold::emulation
