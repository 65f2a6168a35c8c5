// commands/commands.h   The sub-commands beside `train`. Each takes the arguments behind its name, returns the exit code and throws Problem.
#pragma once
#include <string>
#include <vector>

namespace trifold {

using Words = std::vector<std::string>;

int data_command(const Words& args);    // tokenize, inspect, convert, unigram; results go to standard output, progress and remarks to standard error
int eval_command(const Words& args);    // loss and perplexity of a model on a token file
int export_command(const Words& args);  // the weights of a checkpoint as a folder that other programs read
int plan_command(const Words& args);    // what a run needs, without running it
int sample_command(const Words& args);  // text from a model

}  // namespace trifold
