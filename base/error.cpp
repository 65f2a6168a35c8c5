#include "base/error.h"

#include <cstdio>
#include <cstdlib>
#include <unistd.h>

namespace trifold {

void bug(const char* file, int line, const char* condition, const std::string& detail) {
    std::fprintf(stderr, "trifold: internal error at %s:%d: %s%s%s\nThis is a bug in trifold, not in your configuration; "
                 "please report it with the command line.\n", file, line, condition, detail.empty() ? "" : ": ", detail.c_str());
    std::fflush(stderr);
    _exit(static_cast<int>(Exit::bug));
}

}  // namespace trifold
