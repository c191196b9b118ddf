// Attention forward for Hopper.
//
// A persistent thread block takes one tile after the other: 64 query rows of one head for each of
// two or three consumer warpgroups. A fourth kind of work, moving data, has a warpgroup of its own:
//
//   load warp     draws tiles, brings Q, K and V by TMA, two K/V blocks ahead
//   consumers     S = Q K^T, online softmax, O += P V; P stays in registers
//   store warps   send finished output tiles to global memory, one warp for each consumer warpgroup
//
// Two things hide the softmax, which the tensor cores cannot do: a warpgroup issues Q K^T of the
// next block before P V of this one and computes its softmax while P V runs, and the warpgroups
// take turns in issuing where that pays. Blocks of keys come last one first. The edge blocks, which
// need masks, are computed by a copy of the loop body of their own, so that the steady loop knows
// nothing of lengths, masks and windows: these only set its bounds. A dense mask is looked at
// beforehand (mask_classes.h): its empty blocks never come, its full ones go the steady way.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/attention.h"
#include "attention/dense_mask.cuh"
#include "attention/dropout_sm90.cuh"
#include "attention/key_range.h"
#include "attention/launch_sm90.cuh"
#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "common/cuda_launch.cuh"
#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/scheduler.h"
#include "sm90/tile/shared_tile.cuh"
#include "sm90/tile/tensor_map.cuh"
#include "sm90/tile/tile_queue.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;
using sm90::Barrier;
using sm90::kMmaK;
using sm90::kMmaRows;
using sm90::kWarp;
using sm90::kWarpgroup;
using sm90::RingPosition;
using sm90::SharedTile;
using sm90::Slot;
using sm90::TileMessage;
using sm90::TileQueue;

// -- configuration -------------------------------------------------------------------------------
// Measured on an H200 with bf16, 16384 tokens, 2048 / head dim heads, against its neighbours.
struct ForwardConfig {
  int groups;          // consumer warpgroups
  int block;           // keys of a block
  int query_buffers;   // 2: the next tile's Q comes while this one is computed
  bool stages_output;  // output through shared memory and TMA, otherwise from registers
  bool takes_turns;    // warpgroups issue their products in order
};

constexpr ForwardConfig forward_config(int head_dim, Variant variant) {
  switch (head_dim) {
    case 64:
      if (variant == Variant::kBias) {  // three groups have too few registers for it
        return {2, 128, 2, true, true};
      }
      // 2 groups with 192-key blocks are 11 % slower; a third K/V stage gains nothing
      return {3, 128, 2, true, false};
    case 96:  // as 128, whose shared memory it needs
      return {2, 128, 2, true, true};
    case 128:  // turns: +4 % up to 1k keys; 176-key blocks: -4 % at 4k keys, +4 % at 16k
      return {2, 128, 2, true, true};
    case 192:  // what fits beside Q: 2 x 2 blocks of 112 keys, no output stage
      return {2, 112, 1, false, false};
    case 256:  // 64-key blocks are 3 % slower
      return {2, 80, 1, false, false};
  }
  return {};
}

// Registers a thread has at launch are redistributed: 504 or 512 for the threads that share a
// register lane, one of each warpgroup. 40 + 2 x 232 and 32 + 3 x 160 fit; a sum above what the
// launch gave never returns from setmaxnreg.
struct RegisterBudget {
  int mover, consumer;
};
constexpr RegisterBudget register_budget(int groups) {
  return groups == 3 ? RegisterBudget{32, 160} : RegisterBudget{40, 232};
}

template <class ElementType, int kDim, Variant kVariant>
struct ForwardTraits {
  using Element = ElementType;
  static constexpr ForwardConfig kConfig = forward_config(kDim, kVariant);
  static constexpr RegisterBudget kRegisters = register_budget(kConfig.groups);
  static constexpr int kHeadDim = kDim;
  static constexpr bool kBanded = kVariant != Variant::kFull;
  static constexpr bool kDropout = kVariant == Variant::kDropout;
  static constexpr bool kBias = kVariant == Variant::kBias;
  static constexpr bool kDense = kBias || kVariant == Variant::kMask;
  static constexpr int kGroups = kConfig.groups;
  static constexpr int kBlock = kConfig.block;
  static constexpr int kQueryBuffers = kConfig.query_buffers;
  static constexpr bool kStagesOutput = kConfig.stages_output;
  static constexpr bool kTakesTurns = kConfig.takes_turns;
  // Under a band a warpgroup passes over blocks that only the others need; with turns all do the
  // same number of blocks.
  // Which blocks of a dense mask come is for all of them to compute.
  static constexpr bool kSkips = kBanded && !kTakesTurns && !kDense;
  static constexpr int kStages = 2;
  static constexpr int kTileRows = kGroups * kMmaRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Shared memory holds whole chunks of 64 columns.
  static constexpr int kColumns =
      (kHeadDim + sm90::kChunkColumns - 1) / sm90::kChunkColumns * sm90::kChunkColumns;

  using Softmax = std::conditional_t<kBias, BiasedSoftmax, OnlineSoftmax>;
  using QueryTile = SharedTile<Element, kMmaRows, kColumns>;
  using KeyTile = SharedTile<Element, kBlock, kColumns>;

  static_assert(kBlock % kMmaK == 0, "P V takes 16 keys at a time");
  static_assert(kHeadDim % kMmaK == 0, "Q K^T takes 16 columns at a time");
  static_assert(kTileRows == forward_tile_rows(kDim, kVariant) && kBlock == forward_block(kDim));
  static_assert(kGroups <= 3, "the mover warpgroup has a store warp for each of them");
};

// -- shared memory -------------------------------------------------------------------------------
template <class Traits, bool kStagesOutput = Traits::kStagesOutput>
struct OutputStage {
  typename Traits::QueryTile tiles[Traits::kGroups];
};
template <class Traits>
struct OutputStage<Traits, false> {};

// Dropout's column keys of the block that lies in the same slot of V, with which they come.
template <class Traits, bool kDropout = Traits::kDropout>
struct DropoutKeys {
  alignas(16) uint32_t columns[Traits::kStages][dropout::units(Traits::kBlock)];
};
template <class Traits>
struct DropoutKeys<Traits, false> {};

// Under a dense mask: the block in the same slots of K and V, and the next one.
struct BlockNote {
  int block, next;  // -1: the tile's last block
  uint32_t flags, next_flags;
  uint32_t live[kMaxBlockWords];
};
template <class Traits, bool kDense = Traits::kDense>
struct BlockNotes {
  BlockNote notes[Traits::kStages];
};
template <class Traits>
struct BlockNotes<Traits, false> {};

template <class Traits>
struct SharedStorage {
  typename Traits::QueryTile q[Traits::kQueryBuffers][Traits::kGroups];
  typename Traits::KeyTile k[Traits::kStages], v[Traits::kStages];
  OutputStage<Traits> out;

  // Q, K, V: full when TMA has brought the bytes, empty when one thread of every warpgroup that
  // reads them has seen its products complete. Out: full when the four warps have written, empty
  // when the store has read.
  Slot q_slots[Traits::kQueryBuffers][Traits::kGroups];
  Slot k_slots[Traits::kStages], v_slots[Traits::kStages];
  Slot out_slots[Traits::kGroups];
  TileQueue queue;
  DropoutKeys<Traits> dropout;
  BlockNotes<Traits> dense;
};

// Named barriers; 0 is __syncthreads.
constexpr int kTurnBarrier = 1;   // + warpgroup: its turn to issue
constexpr int kGroupBarrier = 4;  // + warpgroup: its four warps meet
constexpr int kWarpsPerGroup = kWarpgroup / kWarp;

// -- arguments -----------------------------------------------------------------------------------
struct ForwardArguments {
  CUtensorMap q, k, v, out_map;
  TensorView out;
  float* lse;
  int heads, heads_per_kv;
  int queries, keys, value_dim;
  Lengths query_lengths, key_lengths;
  Packing packing;
  Band band;
  Dropout dropout;
  DenseMask mask;
  float scale_log2;  // positive
  bool negate;       // the scale is negative: Q changes sign instead
  sm90::TileOrder order;
  int tiles;
  sm90::TileSource source;
};

template <class Traits>
__device__ __forceinline__ Range tile_rows(const TileMessage& tile) {
  return {tile.row, smaller(tile.row + Traits::kTileRows, tile.queries)};
}

// The diagonal of packed sequences depends on their own lengths.
__device__ __forceinline__ Band band_of(const ForwardArguments& args, const TileMessage& tile) {
  Band band = args.band;
  if (args.packing.ends_meet) {
    band.diagonal = tile.keys - tile.queries;
  }
  return band;
}

// Packed sequences are rows of one batch entry.
__device__ __forceinline__ int batch_entry(const ForwardArguments& args, const TileMessage& tile) {
  return args.packing.query_offsets ? 0 : tile.batch;
}

template <class Traits>
__device__ __forceinline__ BlockPlan plan_for_group(const ForwardArguments& args,
                                                    const TileMessage& tile, int group) {
  const int row = tile.row + group * kMmaRows;
  const Range own_rows = {row, smaller(row + kMmaRows, tile.queries)};
  if constexpr (Traits::kBanded) {
    return plan_blocks(tile_rows<Traits>(tile), own_rows, band_of(args, tile), tile.keys,
                       Traits::kBlock, Traits::kSkips);
  } else {
    const Range keys = {0, is_empty(tile_rows<Traits>(tile)) ? 0 : tile.keys};
    const Range blocks = blocks_touching(keys, Traits::kBlock);
    return {blocks, blocks, blocks_inside(keys, Traits::kBlock)};
  }
}

// Whether a warpgroup's 64 rows of a tile leave through shared memory: TMA would write rows that
// belong to the next of packed sequences.
template <class Traits>
__device__ __forceinline__ bool is_staged(const ForwardArguments& args, const TileMessage& tile,
                                          int group) {
  return !args.packing.query_offsets || tile.row + (group + 1) * kMmaRows <= tile.queries;
}

// -- load warp -----------------------------------------------------------------------------------
constexpr TileMessage kNoTile = {-1, 0, 0, 0, 0, 0};

template <class Traits>
__device__ __forceinline__ TileMessage describe_packed(const ForwardArguments& args,
                                                       sm90::PackedWalk& walk, int tile) {
  const Packing& packing = args.packing;
  sm90::walk_to(walk, packing.query_offsets, packing.sequences, args.heads, Traits::kTileRows,
                tile);
  if (walk.sequence >= packing.sequences) {
    return kNoTile;
  }
  const sm90::TilePlace place =
      sm90::tile_place({walk.row_tiles, args.heads, args.order.section}, tile - walk.first);
  const int* queries = packing.query_offsets + walk.sequence;
  const int* keys = packing.key_offsets + walk.sequence;
  return {place.row_tile * Traits::kTileRows,
          walk.sequence,
          place.head,
          queries[1] - queries[0],
          keys[1] - keys[0],
          queries[0]};
}

// Tile number `tile` as every role needs it.
template <class Traits>
__device__ __forceinline__ TileMessage describe(const ForwardArguments& args,
                                                sm90::PackedWalk& walk, int tile) {
  if (args.packing.query_offsets) {
    return describe_packed<Traits>(args, walk, tile);
  }
  if (tile >= args.tiles) {
    return kNoTile;
  }
  const sm90::TilePlace place = sm90::tile_place(args.order, tile);
  const int batch = place.head / args.heads;
  return {place.row_tile * Traits::kTileRows,
          batch,
          place.head - batch * args.heads,
          clamped_length(args.query_lengths, batch, args.queries),
          clamped_length(args.key_lengths, batch, args.keys),
          0};
}

// One thread.
template <class Traits>
__device__ __forceinline__ void load_tiles(SharedStorage<Traits>& shared,
                                           const ForwardArguments& args) {
  RingPosition<Traits::kQueryBuffers> query;
  RingPosition<Traits::kStages> stage;
  TileQueue::Position position;
  sm90::PackedWalk walk = {};
  int number = blockIdx.x;
#pragma unroll 1
  while (true) {
    TileMessage tile = describe<Traits>(args, walk, number);
    Range blocks = {0, 0};
    const BlockClass* classes = nullptr;
    if (tile.row >= 0) {
      blocks = plan_for_group<Traits>(args, tile, 0).loaded;
      if constexpr (Traits::kDense) {
        const MaskLayout& layout = args.mask.layout;
        classes = args.mask.classes + classes_at(layout, class_head(layout, tile.batch, tile.head),
                                                 tile.row / Traits::kTileRows);
        blocks.end = last_with_work(classes, blocks.end - 1, blocks.begin) + 1;
        if (is_empty(blocks)) {
          tile.queries = 0;  // for the others: none of the rows has a key
        }
      }
    }
    shared.queue.put(position, tile);
    if (tile.row < 0) {
      return;
    }
    const int kv_head = tile.head / args.heads_per_kv;
    const int batch = batch_entry(args, tile);
    const int first_key = args.packing.key_offsets ? args.packing.key_offsets[tile.batch] : 0;
    // The next number is on its way while this tile is loaded.
    number = args.source.draw(number);

    const auto load_query = [&] {
#pragma unroll 1
      for (int group = 0; group < Traits::kGroups; ++group) {
        Slot& slot = shared.q_slots[query.index()][group];
        slot.empty.wait(query.phase() ^ 1);
        shared.q[query.index()][group].load(&args.q, slot.full,
                                            tile.origin + tile.row + group * kMmaRows, tile.head,
                                            batch, ptx::kEvictFirst);
      }
      query.advance();
    };
    // The only Q buffer may still be in use: the first K goes before.
    constexpr bool kKeyFirst = Traits::kQueryBuffers == 1;
    if (!kKeyFirst && !is_empty(blocks)) {
      load_query();
    }
    int next = 0;
#pragma unroll 1
    for (int n = blocks.end - 1; n >= blocks.begin; n = next) {
      next = Traits::kDense ? last_with_work(classes, n - 1, blocks.begin) : n - 1;
      Slot& k_slot = shared.k_slots[stage.index()];
      k_slot.empty.wait(stage.phase() ^ 1);
      shared.k[stage.index()].load(&args.k, k_slot.full, first_key + n * Traits::kBlock, kv_head,
                                   batch, ptx::kEvictLast);
      if (kKeyFirst && n == blocks.end - 1) {
        load_query();
      }
      Slot& v_slot = shared.v_slots[stage.index()];
      v_slot.empty.wait(stage.phase() ^ 1);
      if constexpr (Traits::kDense) {
        const BlockClass& now = classes[n];
        shared.dense.notes[stage.index()] = {n,
                                             next,
                                             now.flags,
                                             next < 0 ? 0 : classes[next].flags,
                                             {now.live[0], now.live[1], now.live[2], now.live[3]}};
      }
      if constexpr (Traits::kDropout) {
        uint32_t (&keys)[dropout::units(Traits::kBlock)] = shared.dropout.columns[stage.index()];
        v_slot.full.expect_bytes(sizeof(keys));
        ptx::cp_async_bulk_load(ptx::shared_address(keys),
                                args.dropout.column_keys + n * dropout::units(Traits::kBlock),
                                sizeof(keys), v_slot.full.address());
      }
      shared.v[stage.index()].load(&args.v, v_slot.full, first_key + n * Traits::kBlock, kv_head,
                                   batch, ptx::kEvictLast);
      stage.advance();
    }
    number = args.source.drawn(number);
  }
}

// -- store warps ---------------------------------------------------------------------------------
// One thread for each consumer warpgroup.
template <class Traits>
__device__ __forceinline__ void store_tiles(SharedStorage<Traits>& shared,
                                            const ForwardArguments& args, int group) {
  RingPosition<1> output;
  TileQueue::Position position;
  Slot& slot = shared.out_slots[group];
#pragma unroll 1
  while (true) {
    const TileMessage tile = shared.queue.take(position);
    if (tile.row < 0) {
      break;
    }
    if (!is_staged<Traits>(args, tile, group)) {
      continue;
    }
    slot.full.wait(output.phase());
    shared.out.tiles[group].store(&args.out_map, args.value_dim,
                                  tile.origin + tile.row + group * kMmaRows, tile.head,
                                  batch_entry(args, tile));
    ptx::cp_async_bulk_wait_group_read();
    slot.empty.arrive();
    output.advance();
  }
  ptx::cp_async_bulk_wait_group();
}

// -- consumers -----------------------------------------------------------------------------------
// One warpgroup: 64 query rows. Products are issued by all of its threads together; one of them,
// the leader, hands slots back, because a wgmma that is complete for one warp is complete for the
// warpgroup.
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kBlock = Traits::kBlock;
  using ScoreMma = ptx::Wgmma<kBlock>;
  using OutputMma = ptx::Wgmma<Traits::kHeadDim>;

  SharedStorage<Traits>& shared;
  const ForwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  const bool leader;

  // Descriptors of slot 0; the others are added to.
  const uint64_t q_base, k_base, v_base;
  RingPosition<Traits::kQueryBuffers> query;
  // The block whose scores come next, and the one whose values do: one behind.
  RingPosition<Traits::kStages> key, value;
  RingPosition<1> output;
  TileQueue::Position position;

  float rS[kBlock / 2];            // scores, then weights, of 64 x kBlock
  uint32_t rP[kBlock / 4];         // weights as A operand
  float rO[Traits::kHeadDim / 2];  // output of 64 x kHeadDim
  typename Traits::Softmax softmax;
  // Dropout: the hash that rows continue, and this tile's row key; the thread's two rows share it.
  uint32_t row_stream = 0, row_key = 0;
  // Dense masks: whether this warpgroup must mask the block that comes next.
  bool needs_mask = false;

  __device__ __forceinline__ Consumer(SharedStorage<Traits>& storage,
                                      const ForwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp},
        leader(threadIdx.x % kWarpgroup == 0),
        q_base(sm90::descriptor_k_major(shared.q[0][warpgroup].address())),
        k_base(sm90::descriptor_k_major(shared.k[0].address())),
        v_base(sm90::descriptor_n_major(shared.v[0].address(), Traits::KeyTile::kChunkBytes)) {
    if constexpr (Traits::kDropout) {
      row_stream = dropout::stream_key(dropout::kRowTag, *args.dropout.seed, args.dropout.stream);
    }
  }

  __device__ __forceinline__ void run() {
    if (Traits::kTakesTurns && group == Traits::kGroups - 1) {
      pass_turn();  // the first turn is warpgroup 0's
    }
#pragma unroll 1
    while (true) {
      const TileMessage& tile = shared.queue.look(position);
      if (tile.row < 0) {
        return;
      }
      const BlockPlan plan = plan_for_group<Traits>(args, tile, group);
      float factor[2];
      clear(rO);
      softmax.start();
      if (is_empty(plan.loaded)) {
        close_rows(tile, factor);
      } else {
        attend(tile, plan, factor);
      }
      write_output(tile, factor);
      shared.queue.release_warp(position, thread.lane);
    }
  }

  // O = unnormalised output of the tile's rows, `factor` what normalises it.
  __device__ __forceinline__ void attend(const TileMessage& tile, const BlockPlan& plan,
                                         float (&factor)[2]) {
    if constexpr (Traits::kDropout) {
      const int row = tile.row + group * kMmaRows + thread.upper_row();
      row_key = dropout::absorb(dropout::absorb(dropout::absorb(row_stream, tile.batch), tile.head),
                                dropout::lattice_unit(row));
    }
    if constexpr (Traits::kDense) {
      attend_dense(tile, factor);
      return;
    }
    skip_blocks(plan.loaded.end - plan.own.end);
    first_block(tile, plan);
    int n = plan.own.end - 2;
    if constexpr (Traits::kBanded) {
      // Blocks at the right edge of the band, full ones, blocks at its left edge.
#pragma unroll 1
      while (n >= plan.own.begin) {
#pragma unroll 1
        for (; n >= plan.own.begin && !contains(plan.full, n); --n) {
          next_block<true>(tile, plan, n);
        }
#pragma unroll 1
        for (; n >= larger(plan.own.begin, plan.full.begin); --n) {
          next_block<false>(tile, plan, n);
        }
      }
    } else {
#pragma unroll 1
      for (; n >= 0; --n) {
        next_block<false>(tile, plan, n);
      }
    }
    last_values(tile, plan, factor);
    skip_blocks(plan.own.begin - plan.loaded.begin);
  }

  // The same under a dense mask: the load warp has looked which blocks there are.
  __device__ __forceinline__ void attend_dense(const TileMessage& tile, float (&factor)[2]) {
    if constexpr (Traits::kDense) {
      int n = first_dense_block(tile);
#pragma unroll 1
      while (n >= 0) {
#pragma unroll 1
        while (n >= 0 && needs_mask) {
          n = next_dense_block<true>(tile, n);
        }
#pragma unroll 1
        while (n >= 0 && !needs_mask) {
          n = next_dense_block<false>(tile, n);
        }
      }
      issue_output();
      close_rows(tile, factor);
      ptx::wgmma_wait_group<0>();
      ptx::pin(rO);
      release_value();
      query.advance();
    }
  }

  // -- a block -------------------------------------------------------------------------------
  // Weights of the tile's first block; nothing runs beside it.
  __device__ __forceinline__ void first_block(const TileMessage& tile, const BlockPlan& plan) {
    const int n = plan.own.end - 1;
    shared.q_slots[query.index()][group].full.wait(query.phase());
    if (args.negate) {
      shared.q[query.index()][group].negate(threadIdx.x % kWarpgroup, kWarpgroup);
      show_writes_to_wgmma();
    }
    shared.k_slots[key.index()].full.wait(key.phase());
    issue_scores();
    ptx::wgmma_wait_group<0>();
    ptx::pin(rS);
    release_key(n == plan.own.begin);
    if (!contains(plan.full, n)) {
      mask_scores(tile, n);
    }
    float alpha[2];
    softmax.template update<true>(rS, alpha, args.scale_log2);
    drop_weights(value);
    sm90::to_operand<Element>(rP, rS);
    clear_dead_values(tile, n);
  }

  // Weights of block n while O takes up the values of block n + 1.
  template <bool kEdge>
  __device__ __forceinline__ void next_block(const TileMessage& tile, const BlockPlan& plan,
                                             int n) {
    shared.k_slots[key.index()].full.wait(key.phase());
    await_turn();
    issue_scores();
    issue_output();
    pass_turn();
    ptx::wgmma_wait_group<1>();
    ptx::pin(rS);
    release_key(n == plan.own.begin);
    if constexpr (kEdge) {
      mask_scores(tile, n);
    }
    float alpha[2];
    softmax.template update<kEdge>(rS, alpha, args.scale_log2);
    drop_weights(value.next());
    ptx::wgmma_wait_group<0>();
    ptx::pin(rO);
    ptx::pin(rP);
    release_value();
    sm90::to_operand<Element>(rP, rS);
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
      sm90::scale_rows(rO, alpha);
    }
  }

  // Under a dense mask: as above; the result is the number of the block that comes next, -1 for
  // none. The notes have come with the values, whose slot they share.
  __device__ __forceinline__ int first_dense_block(const TileMessage& tile) {
    shared.q_slots[query.index()][group].full.wait(query.phase());
    if (args.negate) {
      shared.q[query.index()][group].negate(threadIdx.x % kWarpgroup, kWarpgroup);
      show_writes_to_wgmma();
    }
    shared.k_slots[key.index()].full.wait(key.phase());
    issue_scores();
    const BlockNote& note = read_note(value);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rS);
    release_key(note.next < 0);
    mask_dense_scores(tile, note.block, note.flags >> group & 1);
    float alpha[2];
    softmax.template update<true>(rS, alpha, args.scale_log2);
    sm90::to_operand<Element>(rP, rS);
    return take_note(value);
  }

  template <bool kEdge>
  __device__ __forceinline__ int next_dense_block(const TileMessage& tile, int n) {
    shared.k_slots[key.index()].full.wait(key.phase());
    await_turn();
    issue_scores();
    issue_output();
    pass_turn();
    const BlockNote& note = read_note(value.next());
    ptx::wgmma_wait_group<1>();
    ptx::pin(rS);
    release_key(note.next < 0);
    if constexpr (kEdge) {
      mask_dense_scores(tile, n, true);
    }
    float alpha[2];
    softmax.template update<kEdge>(rS, alpha, args.scale_log2);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rO);
    ptx::pin(rP);
    release_value();
    sm90::to_operand<Element>(rP, rS);
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
      sm90::scale_rows(rO, alpha);
    }
    return take_note(value);
  }

  __device__ __forceinline__ const BlockNote& read_note(RingPosition<Traits::kStages> at) {
    shared.v_slots[at.index()].full.wait(at.phase());
    return shared.dense.notes[at.index()];
  }

  // After the block: zeroes its dead values, see clear_dead_values, and looks at what comes next.
  __device__ __forceinline__ int take_note(RingPosition<Traits::kStages> at) {
    const BlockNote& note = shared.dense.notes[at.index()];
    if (note.flags & kHasDead) {
      shared.v[at.index()].clear_unmarked_rows(note.live, threadIdx.x % kWarpgroup, kWarpgroup);
      show_writes_to_wgmma();
    }
    needs_mask = note.next_flags >> group & 1;
    return note.next;
  }

  // The mask on scores that are still unscaled; after an additive one they are in natural units,
  // as BiasedSoftmax wants them of edge blocks, masked or not.
  __device__ __forceinline__ void mask_dense_scores(const TileMessage& tile, int n, bool masked) {
    const int row = tile.row + group * kMmaRows + thread.upper_row();
    if constexpr (Traits::kBias) {
      if (masked) {
        const int64_t start =
            tile.batch * args.mask.batch_stride + tile.head * args.mask.head_stride;
        add_bias<Element>(rS, args.mask, start, row, args.queries, n * kBlock, args.keys,
                          args.scale_log2 * kLn2, thread);
      } else {
        const float scale = args.scale_log2 * kLn2;
        sm90::scale_rows(rS, {scale, scale});
      }
    } else if (masked) {
      const MaskLayout& layout = args.mask.layout;
      mask_bits(rS, args.mask.bits, layout, mask_head(layout, tile.batch, tile.head), row,
                args.queries, n, thread);
    }
    if (masked) {
      mask_scores(tile, n);
    }
  }

  // The values of the tile's last block; the row statistics are completed meanwhile.
  __device__ __forceinline__ void last_values(const TileMessage& tile, const BlockPlan& plan,
                                              float (&factor)[2]) {
    if constexpr (Traits::kBanded) {
      clear_dead_values(tile, plan.own.begin);
    }
    issue_output();
    close_rows(tile, factor);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rO);
    release_value();
    query.advance();
  }

  __device__ __forceinline__ void issue_scores() {
    const uint64_t q =
        sm90::descriptor_at(q_base, query.index() * Traits::kGroups * Traits::QueryTile::kBytes);
    const uint64_t k = sm90::descriptor_at(k_base, key.index() * Traits::KeyTile::kBytes);
    ptx::pin(rS);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          rS, sm90::descriptor_at(q, sm90::k_major_step(step, kMmaRows)),
          sm90::descriptor_at(k, sm90::k_major_step(step, kBlock)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_output() {
    shared.v_slots[value.index()].full.wait(value.phase());
    const uint64_t v = sm90::descriptor_at(v_base, value.index() * Traits::KeyTile::kBytes);
    ptx::pin(rO);
    ptx::pin(rP);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlock / kMmaK; ++step) {
      OutputMma::template rs<Element, ptx::kMajorN>(
          rO, rP[4 * step], rP[4 * step + 1], rP[4 * step + 2], rP[4 * step + 3],
          sm90::descriptor_at(v, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void mask_scores(const TileMessage& tile, int n) {
    const int row = tile.row + group * kMmaRows + thread.upper_row();
    mask_block<Traits::kBanded>(rS, n * kBlock, row, band_of(args, tile), tile.keys, thread);
  }

  // The weights of the block whose values are in slot `at`, after the row sums have counted them.
  // The slot is handed back when P V is complete, which all four warps issue after they read here.
  __device__ __forceinline__ void drop_weights(RingPosition<Traits::kStages> at) {
    if constexpr (Traits::kDropout) {
      shared.v_slots[at.index()].full.wait(at.phase());
      drop_block(rS, shared.dropout.columns[at.index()], row_key, args.dropout.threshold, thread);
    }
  }

  // Keys that no query may attend have weight 0, but 0 * NaN is NaN: their values are zeroed. Every
  // warpgroup does it for itself before it reads the block; they write the same.
  __device__ __forceinline__ void clear_dead_values(const TileMessage& tile, int n) {
    const Range live = Traits::kBanded
                           ? keys_of_some({0, tile.queries}, band_of(args, tile), tile.keys)
                           : Range{0, tile.keys};
    const int first_key = n * kBlock;
    const int begin = larger(live.begin - first_key, 0);
    const int end = smaller(live.end - first_key, kBlock);
    // Past the tensor's end TMA has zeroed already; the end of a packed sequence is another's
    // beginning.
    const int rows = args.packing.key_offsets ? kBlock : smaller(args.keys - first_key, kBlock);
    if (begin > 0 || end < rows) {
      shared.v_slots[value.index()].full.wait(value.phase());
      sm90::SharedTile<Element, kBlock, Traits::kColumns>& tile_v = shared.v[value.index()];
      tile_v.clear_rows(0, begin, threadIdx.x % kWarpgroup, kWarpgroup);
      tile_v.clear_rows(end, kBlock, threadIdx.x % kWarpgroup, kWarpgroup);
      show_writes_to_wgmma();
    }
  }

  // -- the end of a tile ---------------------------------------------------------------------
  __device__ __forceinline__ void close_rows(const TileMessage& tile, float (&factor)[2]) {
    const int row = tile.row + group * kMmaRows + thread.upper_row();
    softmax.finish(factor);
    if constexpr (Traits::kDropout) {
      factor[0] *= args.dropout.keep_scale;
      factor[1] *= args.dropout.keep_scale;
    }
    const int64_t head = static_cast<int64_t>(batch_entry(args, tile)) * args.heads + tile.head;
    float* lse = args.lse + head * args.queries + tile.origin + row;
    const int rows = args.packing.query_offsets ? tile.queries : args.queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int below = half * sm90::kRowStep;
      if (row + below >= tile.queries) {
        softmax.forget(half);
      }
      if (thread.leads_row() && row + below < rows) {
        lse[below] = softmax.lse(half, args.scale_log2);
      }
    }
  }

  __device__ __forceinline__ void write_output(const TileMessage& tile, const float (&factor)[2]) {
    const int first_row = tile.row + group * kMmaRows;
    const int row = first_row + thread.upper_row();
    sm90::scale_rows(rO, factor);
    if (first_row + kMmaRows > tile.queries) {
      // Rows that are not computed may hold NaN by now.
#pragma unroll
      for (int i = 0; i < Traits::kHeadDim / 2; ++i) {
        rO[i] = row + i / 2 % 2 * sm90::kRowStep < tile.queries ? rO[i] : 0.0f;
      }
    }
    if (Traits::kStagesOutput && is_staged<Traits>(args, tile, group)) {
      stage_output();
      return;
    }
    Element* out = static_cast<Element*>(args.out.data) +
                   batch_entry(args, tile) * args.out.batch_stride +
                   tile.head * args.out.head_stride + (tile.origin + row) * args.out.row_stride;
    const int rows = args.packing.query_offsets ? tile.queries : args.queries;
    sm90::store_global(out, args.out.row_stride, rows - row, args.value_dim, rO, thread);
  }

  __device__ __forceinline__ void stage_output() {
    if constexpr (Traits::kStagesOutput) {
      Slot& slot = shared.out_slots[group];
      slot.empty.wait(output.phase() ^ 1);
      sm90::store_shared<Element>(shared.out.tiles[group].address(), rO, thread);
      ptx::fence_proxy_async();
      __syncwarp();
      if (thread.lane == 0) {
        slot.full.arrive();
      }
      output.advance();
    }
  }

  // -- barriers ------------------------------------------------------------------------------
  __device__ __forceinline__ void await_turn() {
    if constexpr (Traits::kTakesTurns) {
      ptx::bar_sync(kTurnBarrier + group, 2 * kWarpgroup);
    }
  }

  __device__ __forceinline__ void pass_turn() {
    if constexpr (Traits::kTakesTurns) {
      ptx::bar_arrive(kTurnBarrier + (group + 1) % Traits::kGroups, 2 * kWarpgroup);
    }
  }

  __device__ __forceinline__ void meet_group() { ptx::bar_sync(kGroupBarrier + group, kWarpgroup); }

  __device__ __forceinline__ void show_writes_to_wgmma() {
    ptx::fence_proxy_async();
    meet_group();
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

  // Hands back blocks that only other warpgroups need. No wgmma holds the four warps together here:
  // without the meeting a late one could miss that its slot was full and wait for ever.
  __device__ __forceinline__ void skip_blocks(int count) {
    if constexpr (Traits::kSkips) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        shared.k_slots[key.index()].full.wait(key.phase());
        shared.v_slots[value.index()].full.wait(value.phase());
        meet_group();
        release_key(false);
        release_value();
      }
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void clear(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      registers[i] = 0.0f;
    }
  }
};

// -- kernel --------------------------------------------------------------------------------------
// Rows behind the last of packed sequences: output 0, lse -inf. Consumers do it while the first
// tiles are on their way.
template <class Traits>
__device__ __forceinline__ void clear_rest(const ForwardArguments& args) {
  constexpr int kPieceColumns = sm90::kPieceBytes / sizeof(typename Traits::Element);
  const int first = args.packing.query_offsets[args.packing.sequences];
  const int pieces = args.value_dim / kPieceColumns;
  const int64_t count = static_cast<int64_t>(args.queries - first) * args.heads * pieces;
  const int consumers = Traits::kGroups * kWarpgroup;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * consumers + threadIdx.x - kWarpgroup;
#pragma unroll 1
  for (int64_t i = start; i < count; i += static_cast<int64_t>(gridDim.x) * consumers) {
    const int64_t place = i / pieces;
    const int piece = static_cast<int>(i - place * pieces);
    const int64_t row = first + place / args.heads;
    const int64_t head = place % args.heads;
    typename Traits::Element* out = static_cast<typename Traits::Element*>(args.out.data) +
                                    row * args.out.row_stride + head * args.out.head_stride;
    *reinterpret_cast<uint4*>(out + piece * kPieceColumns) = {};
    if (piece == 0) {
      args.lse[head * args.queries + row] = kMinusInfinity;
    }
  }
}

template <class Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (auto& buffer : shared.q_slots) {
    for (Slot& slot : buffer) {
      slot.full.init(1);
      slot.empty.init(1);
    }
  }
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    for (Slot* slot : {&shared.k_slots[stage], &shared.v_slots[stage]}) {
      slot->full.init(1);
      slot->empty.init(Traits::kGroups);
    }
  }
  for (Slot& slot : shared.out_slots) {
    slot.full.init(kWarpsPerGroup);
    slot.empty.init(1);
  }
  shared.queue.init(Traits::kGroups * (kWarpsPerGroup + (Traits::kStagesOutput ? 1 : 0)));
  ptx::fence_mbarrier_init();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_fwd_kernel(const __grid_constant__ ForwardArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_memory);

  // Through a shuffle the compiler knows that these are the same for the whole warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_barriers<Traits>(shared);
    for (const CUtensorMap* map : {&args.q, &args.k, &args.v}) {
      ptx::prefetch_tensormap(map);
    }
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Traits::kRegisters.mover>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    const bool elected = ptx::elect_one();
    if (warp == 0) {
      if (elected) {
        load_tiles<Traits>(shared, args);
      }
    } else if constexpr (Traits::kStagesOutput) {
      if (warp <= Traits::kGroups && elected) {
        store_tiles<Traits>(shared, args, warp - 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kRegisters.consumer>();
    if (args.packing.query_offsets) {
      clear_rest<Traits>(args);
    }
    Consumer<Traits>(shared, args, warpgroup - 1).run();
  }
}

// -- launcher ------------------------------------------------------------------------------------
// Heads whose keys and values fit into half of the L2 cache together.
inline int section_heads(const ForwardProblem& p) {
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
  const int64_t head_bytes =
      std::max<int64_t>(1, int64_t{2} * keys * (p.head_dim + p.value_dim) / group);
  int section = 1;
  while (int64_t{2} * section * head_bytes <= kCacheBytes && section < p.batch * p.heads) {
    section *= 2;
  }
  return std::min(section, p.batch * p.heads);
}

template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_fwd_sm90(const ForwardProblem& p, cudaStream_t stream) {
  using Traits = ForwardTraits<typename TypeOf<kType>::Element, kHeadDim, kVariant>;
  using Shared = SharedStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  constexpr CUtensorMapDataType kMapType = TypeOf<kType>::kMapType;

  int index = 0;
  cuda::Device device;
  if (cudaError_t error = cuda::current_device(&index, &device)) {
    return cudaGetErrorString(error);
  }
  if (device.capability != kHopper) {
    return "this kernel is built for Hopper (compute capability 9.0) only";
  }

  ForwardArguments args;
  const bool encoded =
      sm90::encode_tensor_map(&args.q, kMapType, p.q, {p.batch, p.heads, p.queries, p.head_dim},
                              kMmaRows) &&
      sm90::encode_tensor_map(&args.k, kMapType, p.k, {p.batch, p.kv_heads, p.keys, p.head_dim},
                              Traits::kBlock) &&
      sm90::encode_tensor_map(&args.v, kMapType, p.v, {p.batch, p.kv_heads, p.keys, p.value_dim},
                              Traits::kBlock) &&
      (!Traits::kStagesOutput ||
       sm90::encode_tensor_map(&args.out_map, kMapType, p.out,
                               {p.batch, p.heads, p.queries, p.value_dim}, kMmaRows));
  if (!encoded) {
    return "the driver refused a tensor map: addresses and strides must be multiples of 16 bytes";
  }
  args.out = p.out;
  args.lse = p.lse;
  args.heads = p.heads;
  args.heads_per_kv = p.heads / p.kv_heads;
  args.queries = p.queries;
  args.keys = p.keys;
  args.value_dim = p.value_dim;
  args.query_lengths = p.query_lengths;
  args.key_lengths = p.key_lengths;
  args.packing = p.packing;
  args.band = p.band;
  args.dropout = p.dropout;
  args.mask = p.mask;
  // At scale 0 the smallest factor gives the same weights, and keeps -inf * scale_log2 from being
  // NaN.
  args.scale_log2 = std::max(std::abs(p.scale) * kLog2e, std::numeric_limits<float>::min());
  args.negate = p.scale < 0.0f;
  // Of packed sequences each may end in a tile of its own; the kernel finds out.
  const int row_tiles =
      (p.queries + Traits::kTileRows - 1) / Traits::kTileRows + p.packing.sequences;
  args.order = {row_tiles, p.batch * p.heads, Traits::kBanded ? section_heads(p) : 1};
  args.tiles = row_tiles * p.batch * p.heads;
  const int blocks = std::min(args.tiles, device.processors);
  args.source = {p.counter, blocks};

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_fwd_kernel<Traits>;
  if (cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), index, allowed)) {
    return cudaGetErrorString(error);
  }
  if constexpr (Traits::kDense) {
    if (const char* failure = classify_mask(p.mask, p.query_lengths, p.key_lengths, p.band,
                                            p.queries, p.keys, stream)) {
      return failure;
    }
  }
  if constexpr (Traits::kDropout) {
    const int keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
    const int columns = (keys + Traits::kBlock - 1) / Traits::kBlock * Traits::kBlock;
    if (const char* failure = hash_columns(p.dropout, dropout::units(columns), stream)) {
      return failure;
    }
  }
  kernel<<<blocks, Traits::kThreads, sizeof(Shared), stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
