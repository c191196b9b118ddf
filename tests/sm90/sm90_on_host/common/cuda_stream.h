// No streams: launches run where they are made. A stream is the index of its device.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace fastattn::cuda {

using Stream = CUstream_st*;

inline bool current_stream(int device, Stream* stream) {
  *stream = reinterpret_cast<Stream>(intptr_t{device});
  return true;
}

}  // namespace fastattn::cuda

namespace fastattn {

constexpr intptr_t kNoDevice = -2;  // tensors in memory of the host have device -1
inline intptr_t current_device = kNoDevice;
struct HostGuard {
  explicit HostGuard(int device) { current_device = device; }
  ~HostGuard() { current_device = kNoDevice; }
};
// Whether the stream's device is the current one.
inline bool is_guarded(cuda::Stream stream) {
  return current_device == reinterpret_cast<intptr_t>(stream);
}
constexpr const char* kUnguarded = "a launch needs the tensors' device to be the current one";

}  // namespace fastattn
