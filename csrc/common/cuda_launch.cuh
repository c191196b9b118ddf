// For launchers: properties of the device, queried once, and plain launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/cuda_stream.h"

namespace fastattn::cuda {

// The most thread blocks of a launch.
constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;

// The most devices that are supported.
constexpr int kMaxDevices = 64;

struct Device {
  int multiprocessors;  // streaming multiprocessors
  int capability;       // 10 * major + minor
};

// The current device. `index` is its number.
inline cudaError_t current_device(int* index, Device* device) {
  static std::atomic<uint32_t> known[kMaxDevices];  // multiprocessors << 8 | capability
  constexpr int kCapabilityBits = 8;
  if (cudaError_t error = cudaGetDevice(index)) {
    return error;
  }
  if (*index >= kMaxDevices) {
    return cudaErrorInvalidDevice;
  }
  uint32_t packed = known[*index].load(std::memory_order_relaxed);
  if (packed == 0) {
    int multiprocessors = 0, major = 0, minor = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, *index);
    error =
        error ? error : cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, *index);
    error =
        error ? error : cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, *index);
    if (error) {
      return error;
    }
    packed = static_cast<uint32_t>(multiprocessors) << kCapabilityBits | (10 * major + minor);
    known[*index].store(packed, std::memory_order_relaxed);
  }
  device->multiprocessors = packed >> kCapabilityBits;
  device->capability = packed & ((1u << kCapabilityBits) - 1);
  return cudaSuccess;
}

// The bytes of shared memory of a multiprocessor of the current device.
inline const char* shared_memory(int* bytes) {
  int index = 0;
  cudaError_t error = cudaGetDevice(&index);
  error = error ? error
                : cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
  return error ? cudaGetErrorString(error) : nullptr;
}

// Returns nullptr or an error message. shared_bytes: of dynamic shared memory.
template <class Kernel, class Problem>
const char* launch(Kernel kernel, int64_t blocks, int threads, Stream stream,
                   const Problem& problem, int shared_bytes = 0) {
  if (blocks > kMaxBlocks) {
    return "the call needs more thread blocks than a launch can have";
  }
  // Static shared memory of a thread block, at most.
  constexpr int kStatic = 1 << 10;
  if (shared_bytes + kStatic > 48 << 10) {
    // Always as much as a thread block can have: other threads may launch the kernel, too.
    int index = 0, bytes = 0;
    cudaError_t error = cudaGetDevice(&index);
    error = error ? error
                  : cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    error = error ? error
                  : cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         bytes - kStatic);
    if (error) {
      return cudaGetErrorString(error);
    }
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(problem);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

// Lets a kernel take `bytes` of dynamic shared memory, once per device. `done` has a bit per device
// and belongs to the kernel.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, int bytes, int device, std::atomic<uint64_t>& done) {
  const uint64_t bit = uint64_t{1} << device;
  if (done.load(std::memory_order_relaxed) & bit) {
    return cudaSuccess;
  }
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error) {
    done.fetch_or(bit, std::memory_order_relaxed);
  }
  return error;
}

}  // namespace fastattn::cuda
