#include "parallel/identity.h"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <random>

#include "base/file.h"

namespace trifold {

std::string host_name() {
    char name[256] = "";
    return ::gethostname(name, sizeof(name) - 1) == 0 && name[0] ? name : "unknown host";
}

std::string build_id() {
    const MappedFile program("/proc/self/exe", Exit::fault, "this program");
    return fmt::format("{}-{:016x}", TRIFOLD_VERSION, XXH3_64bits(program.at(0), static_cast<size_t>(program.bytes())));
}

uint64_t random_key() {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
}

}  // namespace trifold
