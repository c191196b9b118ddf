// Enough of CUDA for a C++ compiler to run kernels without a GPU: each thread of a block is a fiber
// of the simulator (sm90_on_host/engine.h). Lanes of a warp must execute the same warp-wide
// operations.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "engine.h"

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
// Static inside functions, and allowed behind `extern`.
#define __shared__ thread_local
// Truly: what a function that is not inlined returns is written behind the back of the machine.
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace on_host {

template <class T>
uint32_t bits_of(T value) {
  static_assert(sizeof(T) == sizeof(uint32_t));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
// The value of another lane.
template <class T>
T from_lane(T value, unsigned lane) {
  const uint32_t bits = exchange({{bits_of(value)}})[lane].word[0];
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
// Result of `join` on the warp's values.
template <class Join>
uint32_t joined(uint32_t value, Join join) {
  const Words* words = exchange({{value}});
  uint32_t result = words[0].word[0];
  for (int i = 1; i < kWarpLanes; ++i) {
    result = join(result, words[i].word[0]);
  }
  return result;
}

}  // namespace on_host

inline __attribute__((always_inline)) void __syncthreads() {
  on_host::bar_sync(0, static_cast<int>(blockDim.x));
}
inline __attribute__((always_inline)) void __syncwarp() {
  on_host::syncwarp();
}
inline int __syncthreads_and(int value) {
  return on_host::syncthreads_and(value);
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  return on_host::joined(value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline int __any_sync(unsigned, int value) {
  return on_host::joined(value != 0, [](uint32_t a, uint32_t b) { return a | b; });
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return on_host::from_lane(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int lanes) {
  return on_host::from_lane(value, threadIdx.x % on_host::kWarpLanes ^ lanes);
}
inline uint32_t atomicOr(uint32_t* at, uint32_t bits) {
  return on_host::atomic_or(at, bits);
}
inline int atomicAdd(int* at, int value) {
  return on_host::atomic_add(at, value);
}
inline int atomicCAS(int* at, int compared, int value) {
  return on_host::atomic_cas(at, compared, value);
}
// A clock that is fast enough for loops that wait; the simulator does not check its memory.
__attribute__((noinline, no_sanitize("thread"))) inline int64_t clock64() {
  static int64_t now = 0;
  return now += 1 << 20;
}
template <class T>
inline __attribute__((always_inline)) T __ldg(const T* at) {
  return *at;
}
template <class T>
inline __attribute__((always_inline)) void __stwb(T* at, T value) {
  *at = value;
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline uint32_t __float_as_uint(float x) {
  return on_host::bits_of(x);
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
