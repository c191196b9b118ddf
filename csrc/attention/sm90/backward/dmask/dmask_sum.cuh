// Results of the kernel of an additive mask's gradient: the sum of a tile, and the launch that adds
// splits. See dmask.cuh.
#pragma once

#include "attention/sm90/backward/dmask/dmask_tiles.cuh"
#include "sm90/ptx/warp.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;

__device__ __forceinline__ void store_element(const MaskGradient& dmask, int64_t at, float value) {
  switch (dmask.type) {
    case MaskType::kBFloat16:
      static_cast<__nv_bfloat16*>(dmask.data)[at] = __nv_bfloat16(value);
      break;
    case MaskType::kFloat16:
      static_cast<__half*>(dmask.data)[at] = __half(value);
      break;
    default:
      static_cast<float*>(dmask.data)[at] = value;
  }
}

// Stores into the result, or into the split's partial gradient.
__device__ __forceinline__ void store_sum(const MaskGradient& dmask, int split, const DmaskItem& at,
                                          float value) {
  const int* sizes = dmask.sizes;
  if (dmask.splits > 1) {
    const int64_t head = (int64_t{split} * sizes[0] + at.batch) * sizes[1] + at.head;
    dmask.partial[(head * sizes[2] + at.row) * sizes[3] + at.key] = value;
    return;
  }
  store_element(dmask,
                at.batch * dmask.strides[0] + at.head * dmask.strides[1] +
                    at.row * dmask.strides[2] + at.key * dmask.strides[3],
                value);
}

// Through shared memory, to sum over rows and keys and to coalesce the stores.
template <class Traits>
__device__ __forceinline__ void write_sum(DmaskStorage<Traits>& shared, const DmaskArguments& args,
                                          const DmaskLoop& loop, int group,
                                          AccumulatorThread thread,
                                          const float (&rSum)[Traits::kKeys / 2]) {
  constexpr int kKeys = Traits::kKeys, kConsumers = Traits::kGroups * kWarpgroup;
  // Waits until both warpgroups' products are complete.
  ptx::bar_sync(kDmaskSumBarrier, kConsumers);
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int row = group * kMmaRows + thread.upper_row() + i / 2 % 2 * sm90::kRowStep;
    shared.sum[row][i / 4 * kOctet + thread.first_column() + i % 2] = rSum[i];
  }
  ptx::bar_sync(kDmaskSumBarrier, kConsumers);
  const MaskGradient& dmask = args.dmask;
  const bool sums_rows = dmask.sizes[2] == 1, sums_keys = dmask.sizes[3] == 1;
  const int rows =
      sums_rows ? 1 : smaller(dmask.sizes[2] - loop.row_tile * Traits::kRows, Traits::kRows);
  const int keys = sums_keys ? 1 : smaller(dmask.sizes[3] - loop.key_tile * kKeys, kKeys);
#pragma unroll 1
  for (int i = threadIdx.x - kWarpgroup; i < rows * kKeys; i += kConsumers) {
    const int row = i / kKeys, key = i % kKeys;
    if (key >= keys) {
      continue;
    }
    float sum = 0.0f;
#pragma unroll 1
    for (int j = row; j < (sums_rows ? Traits::kRows : row + 1); ++j) {
#pragma unroll 1
      for (int n = key; n < (sums_keys ? kKeys : key + 1); ++n) {
        sum += shared.sum[j][n];
      }
    }
    const DmaskItem at = {loop.batch, loop.head, loop.row_tile * Traits::kRows + row,
                          loop.key_tile * kKeys + key};
    if (args.dlse) {
      const int64_t head = int64_t{1} * at.batch * args.heads + at.head;
      sum -= args.dlse[head * args.queries + at.row];
    }
    store_sum(dmask, blockIdx.x % dmask.splits, at, sum);
  }
}

// -- splits ---------------------------------------------------------------------------------------
constexpr int kAddSplitsThreads = 256;

// A thread: an element of the gradient.
template <class Traits>
__global__ void __launch_bounds__(kAddSplitsThreads)
    add_dmask_splits_kernel(const __grid_constant__ MaskGradient dmask) {
  const int* sizes = dmask.sizes;
  const int64_t count = int64_t{1} * sizes[0] * sizes[1] * sizes[2] * sizes[3];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kAddSplitsThreads + threadIdx.x;
  if (number >= count) {
    return;
  }
  float sum = 0.0f;
  for (int split = 0; split < dmask.splits; ++split) {
    sum += dmask.partial[split * count + number];
  }
  int64_t rest = number, at = 0;
  for (int dim = 3; dim >= 0; --dim) {
    at += rest % sizes[dim] * dmask.strides[dim];
    rest /= sizes[dim];
  }
  store_element(dmask, at, sum);
}

}  // namespace fastattn::attention
