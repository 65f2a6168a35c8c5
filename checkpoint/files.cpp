// checkpoint/files.cpp   See files.h.
#include "checkpoint/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

namespace fs = std::filesystem;

namespace trifold {
namespace {

[[noreturn]] void fail(const std::string& what, const std::string& path, int error) { refuse_file(Exit::checkpoint, what, path, error); }

}  // namespace

void replace_text(const std::string& path, const std::string& text) {
    Unfinished unfinished(path, Exit::checkpoint);
    OutputFile file(unfinished.path(), Exit::checkpoint);
    file.write(text.data(), std::ssize(text));
    file.finish();
    unfinished.commit_as(path);
    sync_directory(fs::path(path).parent_path().string());
}

void make_directories(const std::string& path) {
    std::error_code error;
    std::vector<fs::path> parents_of_new;
    for (fs::path p = fs::absolute(path); !fs::exists(p, error) && p.has_relative_path(); p = p.parent_path())
        parents_of_new.push_back(p.parent_path());
    fs::create_directories(path, error);
    if (error) fail("create the directory", path, error.value());
    for (const fs::path& parent : parents_of_new) sync_directory(parent.string());
}

void rename_path(const std::string& from, const std::string& to) {
    std::error_code error;
    fs::rename(from, to, error);
    if (error) fail(fmt::format("rename {} to", from), to, error.value());
}

void remove_tree(const std::string& path) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) fail("remove", path, error.value());
}

void sync_directory(const std::string& path) {
    const std::string directory = path.empty() ? "." : path;
    const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd) fail("open the directory", directory, errno);
    // Some file systems keep directories durable by themselves and answer EINVAL.
    if (::fsync(fd.get()) != 0 && errno != EINVAL) fail("sync the directory", directory, errno);
}

}  // namespace trifold
