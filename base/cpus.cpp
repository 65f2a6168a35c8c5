// base/cpus.cpp   How many CPUs this process may use.
#include "base/cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

namespace trifold {
namespace {

constexpr double unlimited = std::numeric_limits<double>::infinity();

double ratio(std::istream& quotas, std::istream& periods) {
    double quota = 0, period = 0;
    return quotas >> quota && periods >> period && quota > 0 && period > 0 ? quota / period : unlimited;
}

// "max 100000" or "150000 100000" (version 2).
double quota_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    return ratio(file, file);
}

// Two files; a quota of -1 is no limit (version 1).
double quota_v1(const std::string& folder) {
    std::ifstream quotas(folder + "/cpu.cfs_quota_us"), periods(folder + "/cpu.cfs_period_us");
    return ratio(quotas, periods);
}

// The smallest limit on the way from mount + group up to the mount itself. Inside a container the group's path is often
// the host's and does not exist here; the walk then ends at the mount, which is the container's own group.
double smallest_quota(const std::string& mount, std::string group, double (*read)(const std::string&)) {
    double smallest = read(mount + group);
    while (!group.empty()) {
        const size_t slash = group.rfind('/');
        group.resize(slash == std::string::npos ? 0 : slash);
        smallest = std::min(smallest, read(mount + group));
    }
    return smallest;
}

bool lists(const std::string& controllers, const std::string& name) {
    return ("," + controllers + ",").find("," + name + ",") != std::string::npos;
}

}  // namespace

double cpu_quota(const std::string& root) {
    std::ifstream groups(root + "/proc/self/cgroup");  // hierarchy:controllers:path
    double smallest = unlimited;
    for (std::string line; std::getline(groups, line);) {
        std::istringstream fields(line);
        std::string hierarchy, controllers, path;
        std::getline(fields, hierarchy, ':');
        std::getline(fields, controllers, ':');
        std::getline(fields, path);
        if (controllers.empty()) smallest = std::min(smallest, smallest_quota(root + "/sys/fs/cgroup", path, quota_v2));
        if (lists(controllers, "cpu")) smallest = std::min(smallest, smallest_quota(root + "/sys/fs/cgroup/cpu", path, quota_v1));
    }
    return smallest == unlimited ? 0 : smallest;
}

int usable_cpus() {
    cpu_set_t mask;
    int cpus = static_cast<int>(std::thread::hardware_concurrency());
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) cpus = CPU_COUNT(&mask);
    const double quota = cpu_quota();
    if (quota > 0) cpus = std::min(cpus, static_cast<int>(quota));
    return std::max(1, cpus);
}

std::string cpu_list() {
    std::ifstream status("/proc/thread-self/status");
    const std::string name = "Cpus_allowed_list:";
    for (std::string line; std::getline(status, line);)
        if (line.starts_with(name)) return line.substr(line.find_first_not_of(" \t", name.size()));
    return "";
}

}  // namespace trifold
