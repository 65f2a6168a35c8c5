// parallel/tensorboard.h   Scalars for TensorBoard: one event file, protobuf messages in TFRecord frames, written by
// hand.
//
// Frame     u64 length, u32 masked crc32c(length), message, u32 masked crc32c(message); little-endian
//           masked = rotate_right(crc, 15) + 0xa282ead8
// Messages  Event {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary, 7: SessionLog}
//           Summary {1: repeated Value {1: string tag, 2: float simple_value}},  SessionLog {1: status, START = 1}
// Source    tensorflow/core/util/event.proto, summary.proto, lib/io/record_writer.h
#pragma once
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/append_file.h"

namespace trifold {

struct Scalar {
    const char* tag;
    double value;
};

class TensorboardFile {
public:
    // A new file in `directory`. Steps from `first_step` on in older files there are dropped by TensorBoard.
    TensorboardFile(const std::string& directory, int64_t first_step, std::FILE* complaints);
    void scalars(int64_t step, const std::vector<Scalar>& values);
    int64_t failures() const { return file_.failures(); }
    const std::string& path() const { return file_.path(); }

private:
    AppendFile file_;
};

// Castagnoli's polynomial, reflected.
uint32_t crc32c(std::string_view bytes);

}  // namespace trifold
