// The warps of the Hopper attention backward that move data: one thread loads, another one for each
// consumer warpgroup adds its part of dQ to the sum in global memory. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/backward_storage.cuh"
#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/grid.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

// -- load warp -----------------------------------------------------------------------------------
// One thread: announces a row of statistics to `full` and starts its copy.
template <int kCount>
__device__ __forceinline__ void load_statistics(float (&to)[kCount], const float* from,
                                                Barrier& full) {
  constexpr int kBytes = kCount * sizeof(float);
  full.arrive_expect_bytes(kBytes);
  ptx::cp_async_bulk_load(ptx::shared_address(to), from, kBytes, full.address());
}

// One thread.
template <class Traits>
__device__ __forceinline__ void load_blocks(BackwardStorage<Traits>& shared,
                                            const BackwardArguments& args) {
  const KeyBlock& work = shared.work;
  const Sequence& sequence = work.sequence;
  const int key = sequence.key_origin + work.first_key;
  shared.k.load(&args.k_map, shared.kv_full, key, work.kv_head, sequence.entry, ptx::kEvictFirst);
  shared.v.load(&args.v_map, shared.kv_full, key, work.kv_head, sequence.entry, ptx::kEvictFirst);
  RingPosition<Traits::kStages> stage;
  Step step = first_step<Traits>(args, work);
#pragma unroll 1
  while (step.head < args.heads_per_kv) {
    const int head = work.kv_head * args.heads_per_kv + step.head;
    const int row = sequence.query_origin + step.row_block * Traits::kRows;
    const int64_t statistics =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kRows;

    Slot& q_slot = shared.q_slots[stage.index()];
    q_slot.empty.wait(stage.phase() ^ 1);
    const Step next = next_step<Traits>(args, work, step);
    if constexpr (Traits::kDense) {
      const BlockClass& now = classes_of<Traits>(args, work, step.head)[step.row_block];
      shared.dense.notes[stage.index()] = {step,
                                           next.head == args.heads_per_kv,
                                           now.flags,
                                           {now.live[0], now.live[1], now.live[2], now.live[3]}};
    }
    if constexpr (Traits::kDropout) {
      constexpr int kUnits = dropout::units(Traits::kRows), kBytes = kUnits * sizeof(uint32_t);
      const uint32_t to = ptx::shared_address(shared.dropout.rows[stage.index()]);
      q_slot.full.expect_bytes(kBytes);
      ptx::cp_async_bulk_load(to, args.row_keys + statistics / Traits::kRows * kUnits, kBytes,
                              q_slot.full.address());
    }
    shared.q[stage.index()].load(&args.q_map, q_slot.full, row, head, sequence.entry,
                                 ptx::kEvictLast);
    load_statistics(shared.lse2[stage.index()], args.lse2 + statistics, q_slot.full);

    Slot& dout_slot = shared.dout_slots[stage.index()];
    dout_slot.empty.wait(stage.phase() ^ 1);
    shared.dout[stage.index()].load(&args.dout_map, dout_slot.full, row, head, sequence.entry,
                                    ptx::kEvictLast);
    load_statistics(shared.delta[stage.index()], args.delta + statistics, dout_slot.full);

    stage.advance();
    step = next;
  }
}

// -- dQ warps ------------------------------------------------------------------------------------
// How many blocks of keys add to a step's block of rows before this one.
template <class Traits>
__device__ __forceinline__ int rank_among_visitors(const BackwardArguments& args,
                                                   const KeyBlock& work, Step step) {
  if constexpr (Traits::kDense) {
    return classes_of<Traits>(args, work, step.head)[step.row_block].rank;
  }
  const Sequence& sequence = work.sequence;
  const Range added = visitors(step.row_block, Traits::kRows, sequence.band, sequence.queries,
                               sequence.keys, Traits::kKeys);
  return work.first_key / Traits::kKeys - added.begin;
}

// One thread for each consumer warpgroup: adds its part of dQ to the sum in global memory. Blocks
// of keys take turns in their order, the first one stores. Blocks are drawn in this order too, so
// that whoever is waited for is running.
template <class Traits>
__device__ __forceinline__ void add_dq(BackwardStorage<Traits>& shared,
                                       const BackwardArguments& args, int group) {
  constexpr int kBytes = Traits::kChunkFloats * sizeof(float);
  const KeyBlock& work = shared.work;
  const uint32_t from = ptx::shared_address(shared.dq[group]);
  Slot& slot = shared.dq_slots[group];
  RingPosition<1> position;
  Step step = first_step<Traits>(args, work);
#pragma unroll 1
  while (step.head < args.heads_per_kv) {
    const int64_t chunk =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kGroups + group;
    float* to = args.dq_sum + chunk * Traits::kChunkFloats;
    slot.full.wait(position.phase());
    if (args.turns) {
      int* turn = args.turns + chunk;
      const int rank = rank_among_visitors<Traits>(args, work, step);
      while (ptx::load_acquire(turn) != rank) {
      }
      ptx::fence_proxy_async_all();
      if (rank == 0) {
        ptx::cp_async_bulk_store(to, from, kBytes);
      } else {
        ptx::cp_reduce_async_bulk_add(to, from, kBytes);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read();
      slot.empty.arrive();
      ptx::cp_async_bulk_wait_group();
      ptx::fence_proxy_async_all();
      ptx::store_release(turn, rank + 1);
    } else {
      ptx::cp_reduce_async_bulk_add(to, from, kBytes);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read();
      slot.empty.arrive();
    }
    position.advance();
    step = next_step<Traits>(args, work, step);
  }
  ptx::cp_async_bulk_wait_group();
}

}  // namespace fastattn::attention
