// commands/data.h   `trifold data tokenize | inspect | convert`.
#pragma once

namespace trifold {

// argv[0] is "data". Results go to standard output, progress and remarks to standard error. Returns 0, or throws a
// Problem.
int data_command(int argc, char** argv);

}  // namespace trifold
