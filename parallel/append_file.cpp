// parallel/append_file.cpp   Writes that may fail, and are tried again.
#include "parallel/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/refuse.h"

namespace trifold {

AppendFile::AppendFile(std::string path, Start start, std::FILE* complaints)
    : path_(std::move(path)), complaints_(complaints) {
    const int keep = start == Start::empty ? O_TRUNC : 0;
    fd_ = Fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | keep, 0644));
    if (!fd_) refuse(Exit::usage, "cannot open {} for writing: {}; choose another --run.dir or make room", path_, std::strerror(errno));
    char last = '\n';
    const off_t bytes = ::lseek(fd_.get(), 0, SEEK_END);
    if (start == Start::next_line && bytes > 0 && ::pread(fd_.get(), &last, 1, bytes - 1) == 1 && last != '\n')
        waiting_ = "\n";
}

AppendFile::~AppendFile() {
    if (!flush()) lost_ += waiting_records_;
    if (lost_ > 0) complain(fmt::format("{}: {} records are lost", path_, lost_));
}

bool AppendFile::append(std::string_view record) {
    const bool room = waiting_.size() + record.size() <= max_waiting_bytes;
    if (room) {
        waiting_ += record;
        ++waiting_records_;
    } else {
        ++lost_;
    }
    return flush() && room;
}

bool AppendFile::flush() {
    size_t written = 0;
    int error = 0;
    while (written < waiting_.size() && error == 0) {
        const ssize_t n = ::write(fd_.get(), waiting_.data() + written, waiting_.size() - written);
        if (n > 0) {
            written += static_cast<size_t>(n);
        } else if (n == 0 || errno != EINTR) {
            error = n == 0 ? ENOSPC : errno;
        }
    }
    waiting_.erase(0, written);
    if (error == 0) {
        waiting_records_ = 0;
        return true;
    }
    if (!std::exchange(complained_, true)) {
        complain(fmt::format("cannot write {}: {}; the run goes on, up to {} MiB are kept back and tried again", path_,
                             std::strerror(error), max_waiting_bytes >> 20));
    }
    return false;
}

void AppendFile::complain(const std::string& sentence) const {
    std::fprintf(complaints_, "%s\n", sentence.c_str());
    std::fflush(complaints_);
}

}  // namespace trifold
