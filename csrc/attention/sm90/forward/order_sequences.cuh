// Sorts packed sequences by their number of keys, longest first. The tile scheduler uses this order
// so that no long tile starts last. Lengths are sorted into 256 buckets; the order within a bucket
// is arbitrary and does not change results.
#pragma once

#include "attention/attention.h"

namespace fastattn::attention {

constexpr int kOrderThreads = 512, kOrderBuckets = 256;

// Bucket 0 has the longest. Blocks of 64 keys keep products within 32 bits.
__device__ __forceinline__ int bucket_of(const Packing& packing, int sequence) {
  constexpr int kBlock = 64;
  const int keys = packing.key_offsets[sequence + 1] - packing.key_offsets[sequence];
  const int most = larger(ceil_div(packing.max_keys, kBlock), 1);
  const int blocks = smaller(ceil_div(keys, kBlock), most);
  return (kOrderBuckets - 1) - blocks * (kOrderBuckets - 1) / most;
}

// One thread block: a counting sort of the sequences by bucket.
static __global__ void __launch_bounds__(kOrderThreads)
    order_sequences_kernel(const Packing packing) {
  constexpr int kLanes = 32, kLaneBuckets = kOrderBuckets / kLanes;
  __shared__ int next[kOrderBuckets];
  for (int i = threadIdx.x; i < kOrderBuckets; i += kOrderThreads) {
    next[i] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < packing.sequences; i += kOrderThreads) {
    atomicAdd(&next[bucket_of(packing, i)], 1);
  }
  __syncthreads();
  if (threadIdx.x < kLanes) {
    const int lane = threadIdx.x;
    int own = 0;
    for (int i = 0; i < kLaneBuckets; ++i) {
      own += next[lane * kLaneBuckets + i];
    }
    int end = own;  // of this lane's buckets
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int before = __shfl_sync(~0u, end, larger(lane - distance, 0));
      end += lane >= distance ? before : 0;
    }
    int begin = end - own;
    for (int i = 0; i < kLaneBuckets; ++i) {
      const int count = next[lane * kLaneBuckets + i];
      next[lane * kLaneBuckets + i] = begin;
      begin += count;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < packing.sequences; i += kOrderThreads) {
    packing.order[atomicAdd(&next[bucket_of(packing, i)], 1)] = i;
  }
}

}  // namespace fastattn::attention
