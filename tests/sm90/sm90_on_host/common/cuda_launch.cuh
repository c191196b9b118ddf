// A device with two multiprocessors.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fastattn::cuda {

struct Device {
  int multiprocessors, capability;
};
inline cudaError_t current_device(int* index, Device* device) {
  *index = 0;
  *device = {2, 90};
  return cudaSuccess;
}
template <class Kernel>
cudaError_t allow_shared_memory(Kernel, int, int, std::atomic<uint64_t>&) {
  return cudaSuccess;
}

}  // namespace fastattn::cuda
