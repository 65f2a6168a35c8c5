// test/emulation/device_array.h   Device memory of exactly the size asked for, filled by a formula.
#pragma once
#include <cstdlib>

#include "test/emulation/emulator.h"

namespace trifold::test {

template <class T>
class DeviceArray {
public:
    template <class F>
    DeviceArray(int64_t elems, F value) : elems_(elems) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 256, static_cast<size_t>(elems) * sizeof(T)) != 0) std::abort();
        data_ = static_cast<T*>(memory);
        for (int64_t i = 0; i < elems; ++i) data_[i] = value(i);
        emulation::device_memory_added(data_, static_cast<size_t>(elems) * sizeof(T));
    }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    ~DeviceArray() {
        emulation::device_memory_removed(data_);
        std::free(data_);
    }
    T* data() const { return data_; }
    T& operator[](int64_t i) const { return data_[i]; }
    int64_t elems() const { return elems_; }

private:
    T* data_;
    int64_t elems_;
};

}  // namespace trifold::test
