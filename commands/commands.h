// commands/commands.h   The sub-commands beside `train`. argv[0] is the command's name; each returns the exit code and throws Problem.
#pragma once

namespace trifold {

int eval_command(int argc, char** argv);    // loss and perplexity of a model on a token file
int sample_command(int argc, char** argv);  // text from a model

}  // namespace trifold
