// test/unit/streams.h   What the tests of streams share.
#pragma once
#include <string>
#include <vector>

#include "kernels/stream.h"

namespace trifold::stream_test {

template <class T>
BufferAccess access(Access a, const std::vector<T>& v, size_t first, size_t count) {
    return {reinterpret_cast<const std::byte*>(v.data() + first), static_cast<int64_t>(count * sizeof(T)), a};
}
template <class T>
BufferAccess reads(const std::vector<T>& v) {
    return access(Access::read, v, 0, v.size());
}
template <class T>
BufferAccess writes(const std::vector<T>& v) {
    return access(Access::write, v, 0, v.size());
}

inline bool mentions(const std::string& sentence, const std::vector<std::string>& words) {
    for (const std::string& w : words) {
        if (sentence.find(w) == std::string::npos) return false;
    }
    return true;
}

inline const auto nothing = [] {};

// Two streams under the checker and some bytes that they fight over.
struct Checked {
    std::vector<char> buffer = std::vector<char>(64);
    StreamEngine engine{StreamMode::adversarial};
    Stream& compute = engine.add("compute", StreamKind::compute);
    Stream& dp = engine.add("dp", StreamKind::communication);
    const std::vector<std::string>& findings() const { return engine.findings(); }
};

}  // namespace trifold::stream_test
