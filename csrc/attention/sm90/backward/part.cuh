// A consumer warpgroup's share of every tile of the backward's main kernel, and its position in the
// ring. The argument of the functions in bias.cuh, masks.cuh, weights.cuh and consumer.cuh.
#pragma once

#include "attention/sm90/backward/storage.cuh"
#include "sm90/ptx/wgmma.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

using sm90::AccumulatorThread;

template <class Traits>
struct BackwardPart {
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;
  // Scores^T: 64 keys x kScoreRows. As operands, P and dS, they take half the registers.
  static constexpr int kScoreRows = Traits::kScoreRows;
  using Scores = float[kScoreRows / 2];
  using ScoreOperand = uint32_t[kScoreRows / 4];

  BackwardStorage<Traits>& shared;
  const BackwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  RingPosition<Traits::kStages> stage;

  __device__ __forceinline__ BackwardPart(BackwardStorage<Traits>& storage,
                                          const BackwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp} {}

  __device__ __forceinline__ int first_own_key() const {
    return kSplitsKeys ? group * kMmaRows : 0;
  }
  __device__ __forceinline__ int first_score_row() const {
    return kSplitsKeys ? 0 : group * kScoreRows;
  }

  // With an additive mask there are no registers for values derived from the lane: pinned, they are
  // recomputed where they are needed.
  __device__ __forceinline__ AccumulatorThread thread_here() const {
    uint32_t lane[] = {static_cast<uint32_t>(thread.lane)};
    if constexpr (Traits::kBias) {
      ptx::pin(lane);
    }
    return {thread.warp, static_cast<int>(lane[0])};
  }

  // Under a dense mask: metadata of the step.
  __device__ __forceinline__ const StepMetadata& metadata() const {
    return shared.dense.metadata[stage.index()];
  }
  // Whether a dense mask changes this warpgroup's scores.
  __device__ __forceinline__ bool is_changed() const {
    return metadata().flags >> (kSplitsKeys ? group : 0) & 1;
  }

  // Barrier of the warpgroup's four warps, and of all consumer warpgroups.
  __device__ __forceinline__ void sync() const { ptx::bar_sync(kGroupBarrier + group, kWarpgroup); }
  __device__ __forceinline__ void sync_all() const {
    ptx::bar_sync(kScoresBarrier, Traits::kGroups * kWarpgroup);
  }
};

}  // namespace fastattn::attention
