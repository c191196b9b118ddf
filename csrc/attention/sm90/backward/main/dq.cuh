// The dQ warps of the Hopper attention backward: one thread for each consumer warpgroup adds its
// part of dQ to the sum in global memory. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/sm90/backward/main/bwd_storage.cuh"
#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/grid.cuh"

namespace fastattn::attention {

// The number of blocks of keys that add to a step's block of rows before this one.
template <class Traits>
__device__ __forceinline__ int rank_among_visitors(const BackwardArguments& args,
                                                   const KeyBlock& work, Step step) {
  if constexpr (Traits::kDense) {
    return classes_of<Traits>(args, work, step.head)[step.row_block].rank;
  }
  const Sequence& sequence = work.sequence;
  const Range added = visitors(step.row_block, Traits::kRows, sequence.bounds, sequence.queries,
                               sequence.keys, Traits::kKeys);
  return work.first_key / Traits::kKeys - added.begin;
}

#ifdef FASTATTN_TRIAL_DQ_LIMIT
// Half a minute or more, at a quarter of a microsecond or more for a poll: an estimate. A thread
// block waits at most as long as others take for the same rows; a semaphore that is never set is
// an error, and otherwise a hang.
constexpr uint32_t kMaxPolls = 1u << 27;
#endif

#ifdef FASTATTN_TRIAL_BWD_ROTATION
// In any order, the semaphore says who stores: the first block of keys whose dQ is ready.
constexpr int kClaimed = -1, kStored = 1;
#endif

// The first block of keys stores instead of adding, and the others wait for it: setting the sums to
// zero first would write and read them once more. They add in any order, or in the order of the
// keys. Thread blocks draw blocks of keys in this order, so that the one that is waited for is
// already running.
template <class Traits, class Position>
__device__ __forceinline__ void add_block(BackwardStorage<Traits>& shared,
                                          const BackwardArguments& args, const KeyBlock& work,
                                          int group, Position position) {
  constexpr int kBytes = Traits::kPieceFloats * sizeof(float);
  const uint32_t from = shared.dq[group].address();
  Slot& slot = shared.dq_slots[group];
  Step step = first_step<Traits>(args, work);
#pragma unroll 1
  while (step.head < args.heads_per_kv) {
    const int64_t chunk =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kGroups + group;
    float* to = args.dq_sum + chunk * Traits::kChunkFloats;
    int* semaphore = args.dq_semaphores + chunk;
    int rank = rank_among_visitors<Traits>(args, work, step);
    // Polls before dQ is ready: the latency overlaps with the products.
#ifdef FASTATTN_TRIAL_DQ_LIMIT
    uint32_t polls = 0;
#endif
#ifdef FASTATTN_TRIAL_BWD_ROTATION
    bool ready = false;
    if (!args.in_order) {
      ready = ptx::load_acquire(semaphore) == kStored;
      slot.full.wait(position.phase());
      rank = ready || atomicCAS(semaphore, 0, kClaimed) != 0 ? kStored : 0;
      ready = ready || rank == 0;
    }
    while (!ready && ptx::load_acquire(semaphore) < rank) {
#else
    while (ptx::load_acquire(semaphore) < (args.in_order ? rank : smaller(rank, 1))) {
#endif
#ifdef FASTATTN_TRIAL_DQ_LIMIT
      if (++polls == kMaxPolls) {
        __trap();
      }
#endif
    }
    ptx::fence_proxy_async_global();
#pragma unroll
    for (int piece = 0; piece < Traits::kDqPieces; ++piece) {
      float* piece_to = to + piece * Traits::kPieceFloats;
      slot.full.wait(position.phase());
      if (rank == 0) {
        ptx::cp_async_bulk_store(piece_to, from, kBytes);
      } else {
        ptx::cp_reduce_async_bulk_add(piece_to, from, kBytes);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<0>();
      slot.empty.arrive();
      position.advance();
    }
    if (args.in_order || rank == 0) {
      ptx::cp_async_bulk_wait_group();
      ptx::store_release(semaphore, rank + 1);
    }
    step = next_step<Traits>(args, work, step);
  }
}

template <class Traits>
__device__ __forceinline__ void add_dq(BackwardStorage<Traits>& shared,
                                       const BackwardArguments& args, int group) {
  if constexpr (!Traits::kPersistent) {
    add_block<Traits, RingPosition<1>>(shared, args, shared.works[0], group, {});
  } else {
    RingPosition<1> position;
    RingPosition<Traits::kWorks> block;
#pragma unroll 1
    while (true) {
      const KeyBlock& work = shared.works[block.index()];
      shared.persistent.slots[block.index()].full.wait(block.phase());
      if (work.steps < 0) {
        break;
      }
      if (work.steps > 0 && sums_dq(args)) {
        add_block<Traits, RingPosition<1>&>(shared, args, work, group, position);
      }
      shared.persistent.slots[block.index()].empty.arrive();
      block.advance();
    }
  }
  ptx::cp_async_bulk_wait_group();
}

}  // namespace fastattn::attention
