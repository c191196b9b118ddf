// Enough of CUDA for a C++ compiler to run kernels without a GPU: each thread of a block is a fiber
// that runs until it must wait for others. One block after the other; a block in which all threads
// wait for ever ends the process. Lanes of a warp must meet at the same warp-wide operations.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

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
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool done = false;
};
// Complete when `expected` threads have arrived.
struct Meeting {
  unsigned here = 0, generation = 0;
};
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<uint32_t> slots;
inline std::map<int, Meeting> meetings;
inline const std::function<void()>* body;
inline int64_t changes;  // whatever somebody may wait for

inline void pause() {
  const unsigned self = threadIdx.x;
  swapcontext(&fibers[self].context, &scheduler);
  threadIdx.x = self;
}

inline void arrive(int id, unsigned expected) {
  Meeting& meeting = meetings[id];
  if (++meeting.here == expected) {
    meeting.here = 0;
    ++meeting.generation;
    ++changes;
  }
}
inline void meet(int id, unsigned expected) {
  const unsigned generation = meetings[id].generation;
  arrive(id, expected);
  while (meetings[id].generation == generation) {
    pause();
  }
}
constexpr int kWarpMeeting = 1000, kWarpLanes = 32;
inline void meet_warp() {
  meet(kWarpMeeting + threadIdx.x / kWarpLanes, kWarpLanes);
}

inline void enter() {
  const unsigned self = threadIdx.x;
  (*body)();
  fibers[self].done = true;
  ++changes;
}

inline void launch(int64_t blocks, int threads, const std::function<void()>& kernel) {
  body = &kernel;
  slots.assign(threads, 0);
  fibers.resize(threads);
  blockDim.x = threads;
  gridDim.x = static_cast<unsigned>(blocks);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    meetings.clear();
    for (Fiber& fiber : fibers) {
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, enter, 0);
    }
    for (bool live = true; live;) {
      live = false;
      const int64_t before = changes;
      for (threadIdx.x = 0; threadIdx.x < static_cast<unsigned>(threads); ++threadIdx.x) {
        const unsigned self = threadIdx.x;
        if (!fibers[self].done) {
          swapcontext(&scheduler, &fibers[self].context);
          threadIdx.x = self;
          live = live || !fibers[self].done;
        }
      }
      if (live && changes == before) {
        std::fprintf(stderr, "all threads wait for ever\n");
        std::abort();
      }
    }
  }
}

// What `join` makes of the values of threads [begin, end), who meet by `meet_all`.
template <class Meet, class Join>
uint32_t joined(uint32_t value, unsigned begin, unsigned end, Meet meet_all, Join join) {
  slots[threadIdx.x] = value;
  meet_all();
  uint32_t result = slots[begin];
  for (unsigned i = begin + 1; i < end; ++i) {
    result = join(result, slots[i]);
  }
  meet_all();
  return result;
}
template <class Join>
uint32_t joined_in_warp(uint32_t value, Join join) {
  const unsigned first = threadIdx.x / kWarpLanes * kWarpLanes;
  return joined(value, first, first + kWarpLanes, meet_warp, join);
}
// The value of another lane.
template <class T>
T from_lane(T value, unsigned lane) {
  static_assert(sizeof(T) == sizeof(uint32_t));
  std::memcpy(&slots[threadIdx.x], &value, sizeof(T));
  meet_warp();
  std::memcpy(&value, &slots[threadIdx.x / kWarpLanes * kWarpLanes + lane], sizeof(T));
  meet_warp();
  return value;
}

}  // namespace on_host

inline void __syncthreads() {
  on_host::meet(0, blockDim.x);
}
inline void __syncwarp() {
  on_host::meet_warp();
}
inline int __syncthreads_and(int value) {
  return on_host::joined(value != 0, 0, blockDim.x, __syncthreads,
                         [](uint32_t a, uint32_t b) { return a & b; });
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  return on_host::joined_in_warp(value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline int __any_sync(unsigned, int value) {
  return on_host::joined_in_warp(value != 0, [](uint32_t a, uint32_t b) { return a | b; });
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
  const uint32_t before = *at;
  *at |= bits;
  return before;
}
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
