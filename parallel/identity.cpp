#include "parallel/identity.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <memory>
#include <vector>

#include "base/error.h"
#include "parallel/socket.h"

namespace trifold {

std::string host_name() {
    char name[256] = "";
    return ::gethostname(name, sizeof(name) - 1) == 0 && name[0] ? name : "unknown host";
}

std::string build_id() {
    const Socket file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    const std::unique_ptr<XXH3_state_t, decltype(&::XXH3_freeState)> hash(XXH3_createState(), &::XXH3_freeState);
    XXH3_64bits_reset(hash.get());
    std::vector<char> bytes(1 << 20);
    ssize_t got = file ? 1 : -1;
    while (got > 0 && (got = ::read(file.fd(), bytes.data(), bytes.size())) > 0) XXH3_64bits_update(hash.get(), bytes.data(), static_cast<size_t>(got));
    if (got < 0) throw Problem(Exit::fault, "cannot read /proc/self/exe to compare the builds of the ranks: is /proc mounted?");
    return fmt::format("{}-{:016x}", TRIFOLD_VERSION, XXH3_64bits_digest(hash.get()));
}

}  // namespace trifold
