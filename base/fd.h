// base/fd.h   A descriptor of a file or socket that closes itself.
#pragma once
#include <unistd.h>

#include <utility>

namespace trifold {

class Fd {
public:
    explicit Fd(int fd = -1) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(other.release()) {}
    Fd& operator=(Fd&& other) noexcept { return std::swap(fd_, other.fd_), *this; }
    ~Fd() {
        if (fd_ >= 0) ::close(fd_);
    }
    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    int release() { return std::exchange(fd_, -1); }

private:
    int fd_;
};

}  // namespace trifold
