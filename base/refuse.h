// base/refuse.h   Throws a problem whose sentence has numbers in it. For .cpp files: it brings fmt along.
#pragma once
#include <fmt/format.h>

#include <utility>

#include "base/error.h"

namespace trifold {

template <class... Args>
[[noreturn]] void refuse(Exit code, fmt::format_string<Args...> sentence, Args&&... args) {
    throw Problem(code, fmt::format(sentence, std::forward<Args>(args)...));
}

}  // namespace trifold
