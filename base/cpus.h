// base/cpus.h   How many CPUs this process may use.
#pragma once
#include <string>

namespace trifold {

// The CPUs of the affinity mask, or fewer where a control group limits CPU time: its quota is rounded down, because
// more threads than quota are put to sleep in the middle of a parallel loop. At least 1.
int usable_cpus();

// The affinity mask of this thread as text, "0-3,8": processes with the same text may use the same CPUs.
std::string cpu_list();

// The smallest CPU quota, in CPUs, of this process's control group and those above it (version 1 or 2); 0: no limit.
// `root` stands before /proc and /sys, for tests.
double cpu_quota(const std::string& root = "");

}  // namespace trifold
