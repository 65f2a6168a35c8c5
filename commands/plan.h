// commands/plan.h   trifold plan: what a run needs, without running it.
#pragma once

namespace trifold {

// argv[0] is "plan", its arguments follow. Returns the exit code; throws Problem for bad options.
int plan_command(int argc, char** argv);

}  // namespace trifold
