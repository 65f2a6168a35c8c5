// parallel/identity.h   Which host and which program this is.
#pragma once
#include <cstdint>
#include <string>

namespace trifold {

std::string host_name();

// Version and hash of the executable: ranks with the same one run the same program, whenever and wherever it was copied.
std::string build_id();

// 64 bits that nobody can guess.
uint64_t random_key();

}  // namespace trifold
