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
#include <string>
#include <string_view>
#include <vector>

namespace trifold {

struct Scalar {
    const char* tag;
    double value;
};

// A name that sorts behind those of older files: TensorBoard reads the files of a folder in the order of their names.
std::string tensorboard_file_name();
// How a file begins. Steps from `first_step` on in older files of the folder are dropped by TensorBoard.
std::string tensorboard_start(int64_t first_step);
std::string tensorboard_scalars(int64_t step, const std::vector<Scalar>& values);

// Castagnoli's polynomial, reflected.
uint32_t crc32c(std::string_view bytes);

}  // namespace trifold
