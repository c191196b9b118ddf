// A consumer warpgroup's share of every tile of the backward's main kernel, and its position in the
// ring. The argument of the functions in bwd_masks.cuh, bwd_dense.cuh, bias.cuh, bwd_scores.cuh,
// weights.cuh and gradients.cuh.
#pragma once

#include "attention/sm90/backward/main/bwd_storage.cuh"
#include "sm90/ptx/wgmma.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;

template <class Traits>
struct BackwardPart {
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;
  // In units of the 64 rows of a wgmma: scores^T 64 keys x kScoreRows, dK and dV 64 keys x
  // kOwnColumns, dQ kDqParts times 64 x kDqWidth.
  static constexpr int kScoreRows = Traits::kScoreRows;
  static constexpr int kOwnColumns = kSplitsKeys ? Traits::kHeadDim : Traits::kGroupColumns;
  static constexpr int kDqParts = kSplitsKeys ? 1 : Traits::kGroupChunks;
  static constexpr int kDqWidth = Traits::kTransposesDq ? Traits::kRows : Traits::kHeadDim;
  using Scores = float[kScoreRows / 2];
  using ScoreOperand = uint32_t[kScoreRows / 4];  // of P or dS: half the registers
  using Gradient = float[kOwnColumns / 2];
  using Dq = float[kDqParts][kDqWidth / 2];

  BackwardStorage<Traits>& shared;
  const BackwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  // One thread, which releases slots: a wgmma that is complete for one warp is complete for the
  // warpgroup.
  const bool leader;
  RingPosition<Traits::kStages> stage;
  RingPosition<Traits::kWorks> block = {};

  __device__ __forceinline__ BackwardPart(BackwardStorage<Traits>& storage,
                                          const BackwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp},
        leader(threadIdx.x % kWarpgroup == 0) {}

  __device__ __forceinline__ const KeyBlock& work() const { return shared.works[block.index()]; }
  // Steps of this block of keys so far.
  __device__ __forceinline__ int passed() const {
    if constexpr (Traits::kPersistent) {
      return static_cast<int>(stage.passed) - shared.persistent.steps[block.index()];
    }
    return static_cast<int>(stage.passed);
  }
  __device__ __forceinline__ uint32_t kv_parity() const {
    if constexpr (Traits::kPersistent) {
      return shared.persistent.parity[block.index()];
    }
    return 0;
  }
  // The slot of Q and of what is loaded with it, and that of dO and dS.
  __device__ __forceinline__ int slot() const { return stage.index(); }
  __device__ __forceinline__ RingPosition<Traits::kDoutStages> dout_stage() const {
    return {stage.passed};
  }
  __device__ __forceinline__ int dout_slot() const { return dout_stage().index(); }
  __device__ __forceinline__ int first_own_key() const {
    return kSplitsKeys ? group * kMmaRows : 0;
  }
  __device__ __forceinline__ int first_score_row() const {
    return kSplitsKeys ? 0 : group * kScoreRows;
  }
  __device__ __forceinline__ int first_own_chunk() const { return group * Traits::kGroupChunks; }

  // With an additive mask, score modifications, persistent thread blocks, or a mask and dropout
  // there are no registers for values derived from the lane: pinned, they are recomputed where they
  // are needed.
  __device__ __forceinline__ AccumulatorThread thread_here() const {
    uint32_t lane[] = {static_cast<uint32_t>(thread.lane)};
    if constexpr (Traits::kBias || Traits::kScores || Traits::kPersistent ||
                  (Traits::kDense && Traits::kDropout)) {
      ptx::pin(lane);
    }
    return {thread.warp, static_cast<int>(lane[0])};
  }

  // -- barriers -----------------------------------------------------------------------------
  __device__ __forceinline__ void sync_group() const {
    ptx::bar_sync(kGroupBarrier + group, kWarpgroup);
  }
  __device__ __forceinline__ void sync_consumers() const {
    ptx::bar_sync(kScoresBarrier, Traits::kGroups * kWarpgroup);
  }
  // After this warpgroup has written operands into shared memory that it alone reads.
  __device__ __forceinline__ void fence_for_wgmma() const {
    ptx::fence_proxy_async();
    sync_group();
  }

  __device__ __forceinline__ void await_rows() { shared.q_slots[slot()].full.wait(stage.phase()); }
  __device__ __forceinline__ void await_dout() const {
    shared.dout_full[dout_slot()].wait(dout_stage().phase());
  }
  // dO and delta, where they are not released with Q.
  __device__ __forceinline__ void release_dout() const {
    if (Traits::kDoutStages < Traits::kStages && leader) {
      shared.dout_empty.arrive();
    }
  }
  __device__ __forceinline__ void release_rows() {
    if (leader) {
      shared.q_slots[slot()].empty.arrive();
    }
    stage.advance();
  }
};

}  // namespace fastattn::attention
