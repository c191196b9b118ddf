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

// Block of keys `number`, or negative steps: there are no more.
template <class Traits>
__device__ __forceinline__ void write_block(KeyBlock& work, const BackwardArguments& args,
                                            int number) {
  if (number < args.order.row_tiles * args.order.heads) {
    work = key_block_of<Traits>(args, number);
  } else {
    work.steps = -1;
  }
}

// One thread: a block of keys with steps, and what it visits.
template <class Traits, class Position>
__device__ __forceinline__ void load_block(BackwardStorage<Traits>& shared,
                                           const BackwardArguments& args, const KeyBlock& work,
                                           Position stage) {
  const Sequence& sequence = work.sequence;
  const int key = sequence.key_origin + work.first_key;
  shared.k.load(&args.k_map, shared.kv_full, key, work.kv_head, sequence.entry, ptx::kEvictFirst);
  shared.v.load(&args.v_map, shared.kv_full, key, work.kv_head, sequence.entry, ptx::kEvictFirst);
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
      write_metadata<Traits>(shared, args, work, stage, step, next.head == args.heads_per_kv);
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
        load_bias<Traits>(shared, args, work, stage);
      }
    }

    stage.advance();
    step = next;
  }
}

// One thread.
template <class Traits>
__device__ __forceinline__ void load_blocks(BackwardStorage<Traits>& shared,
                                            const BackwardArguments& args) {
  using Position = RingPosition<Traits::kStages>;
  if constexpr (!Traits::kPersistent) {
    load_block<Traits, Position>(shared, args, shared.works[0], {});
  } else {
    Position stage;
    // The next block of keys is drawn when this one has been loaded. It waits for earlier ones
    // alone (dq.cuh), and thread blocks take blocks of keys in order: one can always continue.
    RingPosition<Traits::kWorks> block;
    RingPosition<1> loaded;
#pragma unroll 1
    while (true) {
      const KeyBlock& work = shared.works[block.index()];
      shared.persistent.steps[block.index()] = stage.passed;
      shared.persistent.parity[block.index()] = loaded.phase();
      shared.persistent.slots[block.index()].full.arrive();
      if (work.steps < 0) {
        break;
      }
      if (work.steps > 0) {
        shared.persistent.kv_empty.wait(loaded.phase() ^ 1);
        loaded.advance();
        load_block<Traits, Position&>(shared, args, work, stage);
      }
      block.advance();
      const int number = atomicAdd(args.counter, 1);
      shared.persistent.slots[block.index()].empty.wait(block.phase() ^ 1);
      write_block<Traits>(shared.works[block.index()], args, number);
    }
  }
}

}  // namespace fastattn::attention
