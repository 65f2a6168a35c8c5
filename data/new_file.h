// data/new_file.h   A file that is written as PATH.tmp and gets its name when all is complete, or disappears.
#pragma once
#include <cstdio>
#include <filesystem>
#include <string>

#include "base/file.h"

namespace trifold {

class NewFile {
public:
    explicit NewFile(const std::string& path)
        : temporary_(with_folder(path) + ".tmp"), out(temporary_, Exit::data, "; nothing was kept: free space or choose another --out") {}
    ~NewFile() {
        if (!temporary_.empty()) std::remove(temporary_.c_str());
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;

    // The file, which must be finished, appears as `path` and replaces what had that name.
    void commit_as(const std::string& path) {
        std::error_code error;
        std::filesystem::rename(temporary_, path, error);
        if (error) refuse_file(Exit::data, "rename " + temporary_ + " to", path, error.value());
        temporary_.clear();
    }

private:
    static std::string with_folder(const std::string& path) {
        std::error_code ignored;  // a failure shows when the file is opened
        const auto folder = std::filesystem::path(path).parent_path();
        if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
        return path;
    }
    std::string temporary_;

public:
    OutputFile out;
};

}  // namespace trifold
