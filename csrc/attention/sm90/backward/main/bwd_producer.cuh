// The load warp of the Hopper attention backward: one thread loads K and V once, then Q and dO with
// what belongs to their rows, a step or two ahead. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/sm90/backward/main/bwd_storage.cuh"
#include "attention/sm90/backward/main/dense_loads.cuh"

namespace fastattn::attention {

// One thread: arrives at `full` and starts the copy of lse or delta of a block of rows.
template <class Buffer>
__device__ __forceinline__ void load_row_values(Buffer& to, const float* from, Barrier& full) {
  full.arrive_expect_bytes(Buffer::kBytes);
  to.load(from, full);
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
      write_metadata<Traits>(shared, args, stage, step, next.head == args.heads_per_kv);
    }
    if constexpr (Traits::kDropout) {
      if (drops<Traits>(args.dropout)) {
        auto& row_keys = shared.dropout.rows[stage.index()];
        q_slot.full.expect_bytes(row_keys.kBytes);
        row_keys.load(args.row_keys + row_offset / Traits::kRows * dropout::units(Traits::kRows),
                      q_slot.full);
      }
    }
    shared.q[stage.index()].load(&args.q_map, q_slot.full, row, head, sequence.entry,
                                 ptx::kEvictLast);
    load_row_values(shared.lse2[stage.index()], args.lse2 + row_offset, q_slot.full);

    const RingPosition<Traits::kDoutStages> dout_stage = {stage.passed};
    if constexpr (Traits::kDoutStages < Traits::kStages) {
      shared.dout_empty.wait(dout_stage.phase() ^ 1);
    }
    Barrier& dout_full = shared.dout_full[dout_stage.index()];
    shared.dout[dout_stage.index()].load(&args.dout_map, dout_full, row, head, sequence.entry,
                                         ptx::kEvictLast);
    load_row_values(shared.delta[dout_stage.index()], args.delta + row_offset, dout_full);
    if constexpr (Traits::kBias) {
      if (args.bias_by_tma) {
        load_bias<Traits>(shared, args, stage);
      }
    }

    stage.advance();
    step = next;
  }
}

}  // namespace fastattn::attention
