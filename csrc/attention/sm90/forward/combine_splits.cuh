// Combines the splits of split-KV (KeySplits in attention.h). One warp computes a row:
//
//   weight of a split   2^(m - M) l, where m and l are the split's maximum and sum, M the largest m
//   out, lse            the splits' outputs by weight, the logarithm of the sum of weights; a sink
//                       is added to this sum
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention.h"
#include "attention/sm90/common.cuh"
#include "attention/sm90/forward/sinks.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/ptx/grid.cuh"
#include "sm90/ptx/warp.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

constexpr int kCombineWarps = 4, kCombineLanes = 32;
constexpr int kCombineThreads = kCombineWarps * kCombineLanes;
// Resident blocks per SM. Without this bound the compiler loads splits one after the other.
constexpr int kCombineBlocks = 4;

struct CombineArguments {
  KeySplits splits;
  TensorView out;
  float* lse;
  int64_t rows;  // of all heads and batch entries
  int heads, queries, value_dim;
  const int* last_offset;  // where packed sequences end, or null
  Sinks sinks;
  Lengths query_lengths;
};

inline CombineArguments combine_arguments(const ForwardProblem& p) {
  const Packing& packing = p.packing;
  return {p.splits,    p.out,
          p.lse,       int64_t{p.batch} * p.heads * p.queries,
          p.heads,     p.queries,
          p.value_dim, packing.query_offsets ? packing.query_offsets + packing.sequences : nullptr,
          p.sinks,     p.query_lengths};
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = kCombineLanes / 2; lanes > 0; lanes /= 2) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  }
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = kCombineLanes / 2; lanes > 0; lanes /= 2) {
    x += __shfl_xor_sync(~0u, x, lanes);
  }
  return x;
}

// The weights of a row's splits: lane i holds those of splits i, i + 32 and so on.
struct SplitWeights {
  static constexpr int kOwn = kMaxSplits / kCombineLanes;
  float own[kOwn];
  float sum, highest;

  __device__ __forceinline__ SplitWeights(const KeySplits& splits, int64_t rows, int64_t row,
                                          int lane) {
    RowMaxSum max_sum[kOwn];
    highest = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int split = i * kCombineLanes + lane;
      max_sum[i] = {kMinusInfinity, 0.0f};
      if (split < splits.count) {
        max_sum[i] = splits.max_sum[split * rows + row];
      }
      highest = fmaxf(highest, max_sum[i].highest);
    }
    highest = warp_max(highest);
    // -inf - (-inf) is NaN: without any key all sums are 0.
    const float finite = highest == kMinusInfinity ? 0.0f : highest;
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i] = ptx::ex2(max_sum[i].highest - finite) * max_sum[i].sum;
      sum += own[i];
    }
    sum = warp_sum(sum);
  }
};

// Each lane computes four adjacent columns at a time, at most twice for up to 256 columns.
template <class Element>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocks)
    combine_splits_kernel(const CombineArguments args) {
  constexpr int kColumns = 4, kLaneColumns = kCombineLanes * kColumns, kShares = 2;
  constexpr int kAtOnce = 8;  // splits whose loads are in flight together
  ptx::griddepcontrol_wait();
  const int lane = threadIdx.x % kCombineLanes;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * kCombineWarps + threadIdx.x / kCombineLanes;
  if (row >= args.rows) {
    return;
  }
  const int64_t head = row / args.queries;
  const int query = static_cast<int>(row - head * args.queries);
  if (args.last_offset && query >= *args.last_offset) {
    return;  // written by the forward kernel
  }
  const SplitWeights weights(args.splits, args.rows, row, lane);
  const int64_t batch = head / args.heads;
  float lse = (weights.highest + ptx::lg2(weights.sum)) * kLn2;
  float normalise = weights.sum == 0.0f ? 0.0f : 1.0f / weights.sum;
  if (args.sinks.data &&
      query < clamped_length(args.query_lengths, static_cast<int>(batch), args.queries)) {
    const int head_here = static_cast<int>(head - batch * args.heads);
    lse = add_sink(lse, sink_of(args.sinks, head_here, args.queries, query), normalise);
  }
  if (lane == 0) {
    args.lse[row] = lse;
  }

  float4 total[kShares] = {};
#pragma unroll
  for (int i = 0; i < SplitWeights::kOwn; ++i) {
    const int first = i * kCombineLanes;
    const int last = smaller(args.splits.count, first + kCombineLanes);
#pragma unroll 1
    for (int split = first; split < last; split += kAtOnce) {
      float4 splits[kAtOnce][kShares];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float* from = args.splits.out + ((split + j) * args.rows + row) * args.value_dim;
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const int column = share * kLaneColumns + lane * kColumns;
          splits[j][share] = {};
#ifdef FASTATTN_TRIAL_FWD_SPLITS
          // A split without weight may not have been written.
          const bool exists = __shfl_sync(~0u, weights.own[i], split - first + j) > 0.0f;
          if (split + j < last && column < args.value_dim && exists) {
#else
          if (split + j < last && column < args.value_dim) {
#endif
            splits[j][share] = *reinterpret_cast<const float4*>(from + column);
          }
        }
      }
      // Splits past the last one have weight 0.
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float weight = __shfl_sync(~0u, weights.own[i], split - first + j) * normalise;
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const float4& x = splits[j][share];
          total[share].x = fmaf(weight, x.x, total[share].x);
          total[share].y = fmaf(weight, x.y, total[share].y);
          total[share].z = fmaf(weight, x.z, total[share].z);
          total[share].w = fmaf(weight, x.w, total[share].w);
        }
      }
    }
  }

  Element* out = static_cast<Element*>(args.out.data) + batch * args.out.batch_stride +
                 (head - batch * args.heads) * args.out.head_stride + query * args.out.row_stride;
#pragma unroll
  for (int share = 0; share < kShares; ++share) {
    const int column = share * kLaneColumns + lane * kColumns;
    if (column < args.value_dim) {
      *reinterpret_cast<uint2*>(out + column) = {
          ptx::pack<Element>(total[share].x, total[share].y),
          ptx::pack<Element>(total[share].z, total[share].w)};
    }
  }
}

}  // namespace fastattn::attention
