// A consumer warpgroup's share of a tile, 64 query rows, and its positions in the rings of shared
// memory. The argument of the functions in fwd_blocks.cuh and output.cuh.
#pragma once

#include "attention/sm90/forward/fwd_storage.cuh"
#include "attention/sm90/forward/fwd_tiles.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;
using sm90::RingPosition;

// Factor that the softmax applies to scores before exp2.
template <class Traits>
__device__ __forceinline__ float scale_log2(const ForwardArguments& args) {
  return Traits::kScores ? 1.0f : args.scale_log2;
}

template <class Traits>
struct ForwardPart {
  SharedStorage<Traits>& shared;
  const ForwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  // One thread, which releases slots: a wgmma that is complete for one warp is complete for the
  // warpgroup.
  const bool leader;

  RingPosition<Traits::kQueryBuffers> query;
  // The block whose scores are computed next, and the block of the next P V, which is one behind.
  RingPosition<Traits::kStages> key, value;
  RingPosition<1> output;
  RingPosition<Traits::kBiasPieces> bias;
  // Dropout: the hash that row keys continue, and the row key of the thread's two rows in this
  // tile.
  uint32_t row_stream = 0, row_key = 0;

  __device__ __forceinline__ ForwardPart(SharedStorage<Traits>& storage,
                                         const ForwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp},
        leader(threadIdx.x % kWarpgroup == 0) {
    if (drops<Traits>(args.dropout)) {
      row_stream = dropout::stream_key(dropout::kRowTag, *args.dropout.seed, args.dropout.stream);
    }
  }

  // In the instances that have the fewest registers left, what is derived from the lane is
  // recomputed at each use.
  __device__ __forceinline__ AccumulatorThread thread_here() const {
    uint32_t lane[] = {static_cast<uint32_t>(thread.lane)};
    if constexpr (Traits::kRecomputesLane) {
      ptx::pin(lane);
    }
    return {thread.warp, static_cast<int>(lane[0])};
  }

  // The warpgroup's blocks of the tile at a position of the queue.
  __device__ __forceinline__ decltype(auto) plan_of(const TileInfo& tile,
                                                    [[maybe_unused]] TileQueue::Position at) const {
    if constexpr (Traits::kPlansAhead) {
      return (shared.plans[at.index()][group]);  // stays there, to save registers
    } else {
      return plan_for_group<Traits>(args, tile, group);
    }
  }

  __device__ __forceinline__ int first_row(const TileInfo& tile) const {
    return tile.row + group * kMmaRows;
  }
  __device__ __forceinline__ int upper_row(const TileInfo& tile) const {
    return first_row(tile) + thread_here().upper_row();
  }

  // -- barriers -----------------------------------------------------------------------------
  __device__ __forceinline__ void wait_ping_pong() const {
    if constexpr (Traits::kPingPong) {
      ptx::bar_sync(kPingPongBarrier + group, 2 * kWarpgroup);
    }
  }
  __device__ __forceinline__ void arrive_ping_pong() const {
    if constexpr (Traits::kPingPong) {
      ptx::bar_arrive(kPingPongBarrier + (group + 1) % Traits::kGroups, 2 * kWarpgroup);
    }
  }

  __device__ __forceinline__ void sync_group() const {
    ptx::bar_sync(kGroupBarrier + group, kWarpgroup);
  }
  // After this warpgroup has written operands into shared memory.
  __device__ __forceinline__ void fence_for_wgmma() const {
    ptx::fence_proxy_async();
    sync_group();
  }

  __device__ __forceinline__ void release_key(bool last_of_tile) {
    if (leader) {
      shared.k_slots[key.index()].empty.arrive();
      if (last_of_tile) {
        shared.q_slots[query.index()][group].empty.arrive();
      }
    }
    key.advance();
  }
  __device__ __forceinline__ void release_value() {
    if (leader) {
      shared.v_slots[value.index()].empty.arrive();
    }
    value.advance();
  }

  // Releases blocks that only other warpgroups need. No wgmma synchronises the four warps here:
  // without the barrier a late warp could miss a phase of `full` and wait forever.
  __device__ __forceinline__ void skip_blocks(int count) {
    if constexpr (Traits::kSkips) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        wait_ping_pong();
        arrive_ping_pong();
        shared.k_slots[key.index()].full.wait(key.phase());
        shared.v_slots[value.index()].full.wait(value.phase());
        sync_group();
        release_key(false);
        release_value();
      }
    }
  }
};

}  // namespace fastattn::attention
