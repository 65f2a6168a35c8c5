// checkpoint/files.h   Small files and directories that are either whole or not there. Failures are Problem(Exit::checkpoint).
#pragma once
#include <cstdint>
#include <string>

#include "base/file.h"

namespace trifold {

// Writes `path` through `path`.tmp; after return either the old or the new content survives a crash.
void replace_text(const std::string& path, const std::string& text);

void make_directories(const std::string& path);  // with parents, durably
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);     // a file or a folder with all that is in it; nothing there is fine
void sync_directory(const std::string& path);  // makes renames inside it durable

}  // namespace trifold
