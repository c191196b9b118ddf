// The producer warps of the Hopper attention backward: one thread loads, another one for each
// consumer warpgroup adds its part of dQ to the sum in global memory. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/sm90/backward/storage.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/grid.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

// -- load warp -----------------------------------------------------------------------------------
// One thread: arrives at `full` and starts the copy of lse or delta of a block of rows.
template <class Buffer>
__device__ __forceinline__ void load_row_values(Buffer& to, const float* from, Barrier& full) {
  full.arrive_expect_bytes(Buffer::kBytes);
  to.load(from, full);
}

// One thread: loads an additive mask for the groups of keys whose scores it changes.
template <class Traits>
__device__ __forceinline__ void load_bias(BackwardStorage<Traits>& shared,
                                          const BackwardArguments& args,
                                          RingPosition<Traits::kStages> stage) {
  constexpr int kKeyGroups = Traits::kKeys / kMaskRows;
  const KeyBlock& work = shared.work;
  const StepMetadata& metadata = shared.dense.metadata[stage.index()];
  const MaskLayout& layout = args.mask.layout;
  const int halves = is_wide(args.mask) ? 2 : 1;
  const bool one_row = has_one_row(args.mask);
  if (Traits::kSplitsKeys && halves == 2) {
    const RingPosition<1> step = {stage.passed};
    shared.bias.scores_read.wait(step.phase() ^ 1);  // of the step before
  }
  // Heads that share a mask are computed at about the same time.
  const uint64_t policy = layout.heads > 1 ? ptx::kEvictFirst : ptx::kEvictLast;
  Barrier& full = shared.bias.full[stage.index()];
  const int row = one_row ? 0 : metadata.step.row_block * Traits::kRows;
  const int head = layout.heads > 1 ? work.kv_head * args.heads_per_kv + metadata.step.head : 0;
  const int batch = layout.batches > 1 ? work.sequence.number : 0;
  const int bytes = (one_row ? 1 : Traits::kRows) * sm90::kRowBytes * halves;
  int changed = 0;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    changed += metadata.flags >> group & 1;
  }
  full.arrive_expect_bytes(changed * bytes);
#pragma unroll 1
  for (int i = 0; i < kKeyGroups * halves; ++i) {
    const int group = i / halves, half = i - group * halves;
    if (metadata.flags >> group & 1) {
      const int column = work.first_key * halves + i * sm90::kChunkColumns;
      ptx::cp_async_bulk_tensor_load(
          ptx::shared_address(shared.bias_place(stage.index(), group, half)), &args.bias_map,
          full.address(), column, row, head, batch, policy);
    }
  }
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
    const int64_t row_offset =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kRows;

    Slot& q_slot = shared.q_slots[stage.index()];
    q_slot.empty.wait(stage.phase() ^ 1);
    const Step next = next_step<Traits>(args, work, step);
    if constexpr (Traits::kDense) {
      const BlockClass& now = classes_of<Traits>(args, work, step.head)[step.row_block];
      shared.dense.metadata[stage.index()] = {step,
                                              next.head == args.heads_per_kv,
                                              now.flags,
                                              {now.live[0], now.live[1], now.live[2], now.live[3]}};
    }
    if constexpr (Traits::kDropout) {
      auto& row_keys = shared.dropout.rows[stage.index()];
      q_slot.full.expect_bytes(row_keys.kBytes);
      row_keys.load(args.row_keys + row_offset / Traits::kRows * dropout::units(Traits::kRows),
                    q_slot.full);
    }
    shared.q[stage.index()].load(&args.q_map, q_slot.full, row, head, sequence.entry,
                                 ptx::kEvictLast);
    load_row_values(shared.lse2[stage.index()], args.lse2 + row_offset, q_slot.full);

    Barrier& dout_full = shared.dout_full[stage.index()];
    shared.dout[stage.index()].load(&args.dout_map, dout_full, row, head, sequence.entry,
                                    ptx::kEvictLast);
    load_row_values(shared.delta[stage.index()], args.delta + row_offset, dout_full);
    if constexpr (Traits::kBias) {
      if (args.bias_by_tma) {
        load_bias<Traits>(shared, args, stage);
      }
    }

    stage.advance();
    step = next;
  }
}

// -- dQ warps ------------------------------------------------------------------------------------
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

// One thread for each consumer warpgroup: adds its part of dQ to the sum in global memory. A dQ
// semaphore makes the blocks of keys add in order; the first one stores. Thread blocks draw blocks
// of keys in the same order, so that the block that is waited for is already running.
template <class Traits>
__device__ __forceinline__ void add_dq(BackwardStorage<Traits>& shared,
                                       const BackwardArguments& args, int group) {
  constexpr int kBytes = Traits::kChunkFloats * sizeof(float);
  const KeyBlock& work = shared.work;
  const uint32_t from = shared.dq[group].address();
  Slot& slot = shared.dq_slots[group];
  RingPosition<1> position;
  Step step = first_step<Traits>(args, work);
#pragma unroll 1
  while (step.head < args.heads_per_kv) {
    const int64_t chunk =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kGroups + group;
    float* to = args.dq_sum + chunk * Traits::kChunkFloats;
    if (args.dq_semaphores) {
      int* semaphore = args.dq_semaphores + chunk;
      const int rank = rank_among_visitors<Traits>(args, work, step);
      // Polls before dQ is ready: the latency overlaps with the products.
      while (ptx::load_acquire(semaphore) != rank) {
      }
      ptx::fence_proxy_async_global();
      slot.full.wait(position.phase());
      if (rank == 0) {
        ptx::cp_async_bulk_store(to, from, kBytes);
      } else {
        ptx::cp_reduce_async_bulk_add(to, from, kBytes);
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read();
      slot.empty.arrive();
      ptx::cp_async_bulk_wait_group();
      ptx::store_release(semaphore, rank + 1);
    } else {
      slot.full.wait(position.phase());
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
