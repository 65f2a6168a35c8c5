// parallel/append_file.h   A log file that never gets in the way of training.
//
// Records go to the system at once, so they survive the process. When a write fails (full disk, quota, lost mount),
// training goes on: the failure is reported once, what could not be written is kept (up to a limit) and tried again
// with each record. Bytes that were cut off in the middle are continued, so a record is never torn by a full disk.
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "base/fd.h"

namespace trifold {

class AppendFile {
public:
    enum class Start : uint8_t {
        empty,      // what was in the file is gone
        next_line,  // behind what is there; a line that was cut off is ended
    };
    // Throws Problem(Exit::usage) when the file cannot be opened. Complaints go to `complaints`: the first failure, and how many records are lost
    // in the end.
    AppendFile(std::string path, Start start, std::FILE* complaints);
    ~AppendFile();
    AppendFile(const AppendFile&) = delete;
    AppendFile& operator=(const AppendFile&) = delete;

    // False: some of it is still waiting (or, with too much waiting already, the record is lost).
    bool append(std::string_view record);

    static constexpr size_t max_waiting_bytes = 4 << 20;

private:
    bool flush();
    void complain(const std::string& sentence) const;

    std::string path_;
    std::FILE* complaints_;
    Fd fd_;
    std::string waiting_;
    int64_t waiting_records_ = 0, lost_ = 0;
    bool complained_ = false;
};

}  // namespace trifold
