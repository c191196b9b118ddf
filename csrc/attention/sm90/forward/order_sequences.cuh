// Packed sequences by their number of keys, the longest first: their tiles are drawn in this order,
// so that no long one is left at the end. Lengths count in 256 steps; among those of one step any
// order is as good, and none changes a result.
#pragma once

#include "attention/attention.h"

namespace fastattn::attention {

constexpr int kOrderThreads = 512, kOrderSteps = 256;

// Step 0 has the longest. Blocks of 64 keys, so that products stay inside 32 bits.
__device__ __forceinline__ int step_of(const Packing& packing, int sequence) {
  constexpr int kBlock = 64;
  const int keys = packing.key_offsets[sequence + 1] - packing.key_offsets[sequence];
  const int most = larger(ceil_div(packing.max_keys, kBlock), 1);
  const int blocks = smaller(ceil_div(keys, kBlock), most);
  return (kOrderSteps - 1) - blocks * (kOrderSteps - 1) / most;
}

// One thread block: counts the sequences of every step, finds where each step begins, places.
static __global__ void __launch_bounds__(kOrderThreads)
    order_sequences_kernel(const Packing packing) {
  constexpr int kLanes = 32, kLaneSteps = kOrderSteps / kLanes;
  __shared__ int next[kOrderSteps];
  for (int i = threadIdx.x; i < kOrderSteps; i += kOrderThreads) {
    next[i] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < packing.sequences; i += kOrderThreads) {
    atomicAdd(&next[step_of(packing, i)], 1);
  }
  __syncthreads();
  if (threadIdx.x < kLanes) {
    const int lane = threadIdx.x;
    int own = 0;
    for (int i = 0; i < kLaneSteps; ++i) {
      own += next[lane * kLaneSteps + i];
    }
    int end = own;  // of this lane's steps
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int before = __shfl_sync(~0u, end, larger(lane - distance, 0));
      end += lane >= distance ? before : 0;
    }
    int begin = end - own;
    for (int i = 0; i < kLaneSteps; ++i) {
      const int count = next[lane * kLaneSteps + i];
      next[lane * kLaneSteps + i] = begin;
      begin += count;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < packing.sequences; i += kOrderThreads) {
    packing.order[atomicAdd(&next[step_of(packing, i)], 1)] = i;
  }
}

}  // namespace fastattn::attention
