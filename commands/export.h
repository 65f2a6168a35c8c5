// commands/export.h   trifold export: the weights of a checkpoint as a folder that other programs read.
#pragma once

namespace trifold {

// argv[0] is "export". Returns the exit code; throws Problem.
int export_command(int argc, char** argv);

}  // namespace trifold
