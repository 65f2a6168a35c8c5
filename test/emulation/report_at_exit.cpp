// test/emulation/report_at_exit.cpp   Linked into programs that are no tests: unordered accesses on the emulated GPU are printed at the
// end and turn the exit code into race_exit_code.
#include <cstdio>
#include <cstdlib>

#include "test/emulation/cuda_runtime.h"
#include "test/emulation/emulator.h"

namespace trifold::emulation {
namespace {

struct Report {
    ~Report() {
        const std::vector<std::string> found = unordered_accesses();
        for (const std::string& sentence : found) std::fprintf(stderr, "unordered access on the emulated GPU: %s\n", sentence.c_str());
        std::fflush(nullptr);
        if (!found.empty()) std::_Exit(race_exit_code);
    }
};
const Report at_exit;

}  // namespace
}  // namespace trifold::emulation
