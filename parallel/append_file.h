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

namespace trifold {

class AppendFile {
public:
    enum class Start : uint8_t {
        empty,      // what was in the file is gone
        next_line,  // behind what is there; a line that was cut off is ended
    };
    // Throws Problem(Exit::usage) when the file cannot be opened. Complaints go to `complaints`.
    AppendFile(std::string path, Start start, std::FILE* complaints);
    ~AppendFile();
    AppendFile(const AppendFile&) = delete;
    AppendFile& operator=(const AppendFile&) = delete;

    // False: some of it is still waiting (or, with too much waiting already, the record is lost).
    bool append(std::string_view record);
    int64_t failures() const { return failures_; }  // records after which something was left waiting
    int64_t lost() const { return lost_; }          // records that were given up
    const std::string& path() const { return path_; }

    static constexpr size_t max_waiting_bytes = 4 << 20;

private:
    bool flush();
    void complain(const std::string& sentence) const;

    std::string path_;
    std::FILE* complaints_;
    int fd_ = -1;
    std::string waiting_;
    int64_t waiting_records_ = 0, failures_ = 0, lost_ = 0;
};

}  // namespace trifold
