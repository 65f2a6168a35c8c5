// parallel/identity.h   Which host and which program this is.
#pragma once
#include <string>

namespace trifold {

std::string host_name();

// Version and hash of the executable: ranks with the same one run the same program, whenever and wherever it was copied.
std::string build_id();

}  // namespace trifold
