// The backward's arguments; what a thread block computes (a block of keys of one sequence, and the
// blocks of rows that it visits); the tile scheduler. All warp roles call the same functions.
#pragma once

#include "attention/attention.h"
#include "attention/sm90/common.cuh"
#include "attention/sm90/masks/mask_classes.h"
#include "attention/sm90/masks/row_range.h"
#include "attention/sm90/masks/score_modifications.cuh"
#include "attention/sm90/packed_blocks.h"
#include "sm90/tile/scheduler.h"

namespace fastattn::attention {

struct BackwardArguments : LengthsAndBounds {
  CUtensorMap q_map, k_map, v_map, dout_map;
  CUtensorMap bias_map;              // an additive mask as 16-bit columns, two per float
  TensorView out, dout, dq, dk, dv;  // a gradient that is not needed has null data
  const float *lse, *dlse;           // [batch, heads, queries]; dlse may be null
  // [batch, heads, row_blocks * rows of a block]; under an additive mask lse2 is in natural units.
  float *lse2, *delta;
  uint32_t* row_keys;  // dropout's, a word for every two rows
  float* dq_sum;       // [batch, heads, row_blocks, groups, kChunkFloats]
  int* dq_semaphores;  // [batch, heads, row_blocks, groups]: the blocks of keys that have added
  bool in_order;       // otherwise 1 as soon as the first one has
  int* counter;
  int heads, heads_per_kv;
  int queries, keys, head_dim, value_dim;
  int row_blocks;  // of a head, of packed sequences together
  Dropout dropout;
  DenseMask mask;
  bool bias_by_tma;  // otherwise consumers load it
  float scale, scale_log2;
  sm90::TileOrder order;
  const float* sinks;  // [heads], or null
  float* sink_terms;   // one for each element of delta; null: dsinks is not needed
  DeviceScoreModifications modifications;
};

// Whether blocks of keys add to dQ in fp32; otherwise there is one, which writes the result.
FASTATTN_PURE bool sums_dq([[maybe_unused]] const BackwardArguments& args) {
#ifdef FASTATTN_TRIAL_BWD_DQ_ONCE
  return args.dq_sum;
#else
  return true;
#endif
}

// A batch entry or a packed sequence; positions count from its start.
struct Sequence {
  int number;
  int entry;                     // batch entry of the tensors
  int query_origin, key_origin;  // its first rows in the tensors
  int query_rows, key_rows;      // its rows in the tensors
  int queries, keys;             // of these, the computed ones
  int first_row_block;           // index of its first block of rows within a head
  Bounds bounds;
};

// Packed sequence number packing.sequences is the rest of the rows, where nothing is computed.
__device__ __forceinline__ Sequence sequence_of(const BackwardArguments& args, int batch,
                                                int block_rows) {
  const Packing& packing = args.packing;
  if (!packing.query_offsets) {
    const int queries = computed_queries(args, batch, args.queries);
    const int keys = computed_keys(args, batch, args.keys);
    return {batch,     batch,   0,    0, args.queries,
            args.keys, queries, keys, 0, bounds_of(args, queries, keys)};
  }
  const bool rest = batch == packing.sequences;
  const int query_origin = packing.query_offsets[batch], key_origin = packing.key_offsets[batch];
  const int queries = (rest ? args.queries : packing.query_offsets[batch + 1]) - query_origin;
  const int keys = (rest ? args.keys : packing.key_offsets[batch + 1]) - key_origin;
  return {batch,
          0,
          query_origin,
          key_origin,
          queries,
          keys,
          rest ? 0 : queries,
          rest ? 0 : keys,
          first_block(packing.query_offsets, batch, block_rows),
          bounds_of(args, queries, keys)};
}

// Work of a thread block.
struct KeyBlock {
  Sequence sequence;
  int first_key;
  int kv_head;
  RowPlan plan;
  int steps;  // under a dense mask only 0 or 1: none, or some
#ifdef FASTATTN_TRIAL_BWD_ROTATION
  int first_row_block;  // of the steps of a head, without a dense mask
#endif
};

// A block of rows of a query head, by its index among all of them.
struct RowBlock {
  Sequence sequence;
  int head;  // of the batch entry
  int row_block;
};
__device__ __forceinline__ RowBlock row_block_of(const BackwardArguments& args, int number,
                                                 int block_rows) {
  const Packing& packing = args.packing;
  const int head = number / args.row_blocks;
  const int block = number - head * args.row_blocks;
  const int batch = packing.query_offsets ? sequence_of_block(packing.query_offsets,
                                                              packing.sequences, block_rows, block)
                                          : head / args.heads;
  const Sequence sequence = sequence_of(args, batch, block_rows);
  return {sequence, head - sequence.entry * args.heads, block - sequence.first_row_block};
}

// The index of a step's block of rows.
__device__ __forceinline__ int row_block_number(const BackwardArguments& args, const KeyBlock& work,
                                                Step step) {
  const int head = work.sequence.entry * args.heads + work.kv_head * args.heads_per_kv + step.head;
  return head * args.row_blocks + work.sequence.first_row_block + step.row_block;
}

// Under a dense mask: the classes of the blocks of rows, for one of the work's heads.
template <class Traits>
__device__ __forceinline__ const BlockClass* classes_of(const BackwardArguments& args,
                                                        const KeyBlock& work, int head) {
  const MaskLayout& layout = args.mask.layout;
  const int64_t of_class =
      class_head(layout, work.sequence.number, work.kv_head * args.heads_per_kv + head);
  return args.mask.classes + classes_at(layout, of_class, work.first_key / Traits::kKeys);
}

// `step`, or under a dense mask the first step with work from there on. Head args.heads_per_kv:
// there are no more steps.
template <class Traits>
__device__ __forceinline__ Step with_work(const BackwardArguments& args, const KeyBlock& work,
                                          Step step) {
  if constexpr (Traits::kDense) {
    const Range visited = work.plan.visited;
    for (; step.head < args.heads_per_kv; step = {step.head + 1, visited.end - 1}) {
      const BlockClass* classes = classes_of<Traits>(args, work, step.head);
      const int n = last_with_work(classes, step.row_block, visited.begin);
      if (n >= 0) {
        return {step.head, n};
      }
    }
  }
  return step;
}
template <class Traits>
__device__ __forceinline__ Step first_step(const BackwardArguments& args, const KeyBlock& work) {
#ifdef FASTATTN_TRIAL_BWD_ROTATION
  if constexpr (!Traits::kDense) {
    return {0, work.first_row_block};
  }
#endif
  return with_work<Traits>(args, work, first_step(work.plan.visited));
}
template <class Traits>
__device__ __forceinline__ Step next_step(const BackwardArguments& args, const KeyBlock& work,
                                          Step step) {
#ifdef FASTATTN_TRIAL_BWD_ROTATION
  if constexpr (!Traits::kDense) {
    const Range visited = work.plan.visited;
    const int next = (step.row_block > visited.begin ? step.row_block : visited.end) - 1;
    return {next == work.first_row_block ? step.head + 1 : step.head, next};
  }
#endif
  return with_work<Traits>(args, work, next_step(step, work.plan.visited));
}

// -- tile scheduler -------------------------------------------------------------------------------
// Block of keys number `number`, first keys first: under a causal mask they have the most rows.
template <class Traits>
__device__ __forceinline__ KeyBlock key_block_of(const BackwardArguments& args, int number) {
  constexpr int kNoEnd = INT32_MAX;
  const sm90::TilePlace place = sm90::tile_place(args.order, number);
  const Packing& packing = args.packing;
  const int kv_heads = args.heads / args.heads_per_kv;
  int block = args.order.row_tiles - 1 - place.row_tile;
  int batch = place.head / kv_heads;
  KeyBlock work;
  work.kv_head = place.head - batch * kv_heads;
  if (packing.key_offsets) {
    batch = sequence_of_block(packing.key_offsets, packing.sequences, Traits::kKeys, block);
    block -= first_block(packing.key_offsets, batch, Traits::kKeys);
  }
  work.first_key = block * Traits::kKeys;
  const Sequence sequence = sequence_of(args, batch, Traits::kRows);
  work.sequence = sequence;
  // The rows after a packed sequence's last one are not zero.
  work.plan =
      plan_rows(work.first_key, Traits::kKeys, sequence.bounds, sequence.queries, sequence.keys,
                packing.query_offsets ? kNoEnd : args.queries, Traits::kRows);
  const Range visited = work.plan.visited;
  work.steps = is_empty(visited) ? 0 : args.heads_per_kv * (visited.end - visited.begin);
#ifdef FASTATTN_TRIAL_BWD_ROTATION
  // Blocks of keys that are computed at the same time begin at different rows.
  const int count = larger(visited.end - visited.begin, 1);
  work.first_row_block = visited.end - 1 - (args.in_order ? 0 : block % count);
#endif
  if (Traits::kDense && work.steps > 0) {
    work.steps = first_step<Traits>(args, work).head < args.heads_per_kv ? 1 : 0;
  }
  return work;
}

}  // namespace fastattn::attention
