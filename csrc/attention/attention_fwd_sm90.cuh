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
// nothing of lengths, masks and windows: these only set its bounds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "attention/attention.h"
#include "attention/key_range.h"
#include "attention/mask.cuh"
#include "attention/online_softmax.cuh"
#include "common/cuda_launch.cuh"
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

template <int kHeadDim>
constexpr ForwardConfig forward_config() {
  switch (kHeadDim) {
    case 64:  // 2 groups with 192-key blocks are 11 % slower; a third K/V stage gains nothing
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

template <class ElementType, int kDim, bool kBandedMask>
struct ForwardTraits {
  using Element = ElementType;
  static constexpr ForwardConfig kConfig = forward_config<kDim>();
  static constexpr RegisterBudget kRegisters = register_budget(kConfig.groups);
  static constexpr int kHeadDim = kDim;
  static constexpr bool kBanded = kBandedMask;
  static constexpr int kGroups = kConfig.groups;
  static constexpr int kBlock = kConfig.block;
  static constexpr int kQueryBuffers = kConfig.query_buffers;
  static constexpr bool kStagesOutput = kConfig.stages_output;
  static constexpr bool kTakesTurns = kConfig.takes_turns;
  // Under a band a warpgroup passes over blocks that only the others need; with turns all do the
  // same number of blocks.
  static constexpr bool kSkips = kBanded && !kTakesTurns;
  static constexpr int kStages = 2;
  static constexpr int kTileRows = kGroups * kMmaRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Shared memory holds whole chunks of 64 columns.
  static constexpr int kColumns =
      (kHeadDim + sm90::kChunkColumns - 1) / sm90::kChunkColumns * sm90::kChunkColumns;

  using QueryTile = SharedTile<Element, kMmaRows, kColumns>;
  using KeyTile = SharedTile<Element, kBlock, kColumns>;

  static_assert(kBlock % kMmaK == 0, "P V takes 16 keys at a time");
  static_assert(kHeadDim % kMmaK == 0, "Q K^T takes 16 columns at a time");
  static_assert(kGroups <= 3, "the mover warpgroup has a store warp for each of them");
};

// -- shared memory -------------------------------------------------------------------------------
template <class Traits, bool kStagesOutput = Traits::kStagesOutput>
struct OutputStage {
  typename Traits::QueryTile tiles[Traits::kGroups];
};
template <class Traits>
struct OutputStage<Traits, false> {};

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
};

constexpr int kMaxSharedBytes = 227 * 1024;

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
  Band band;
  float scale_log2;  // positive
  bool negate;       // the scale is negative: Q changes sign instead
  sm90::TileOrder order;
  int tiles;
  sm90::TileSource source;
};

__device__ __forceinline__ int clamped_length(const Lengths& lengths, int batch, int most) {
  if (!lengths.data) {
    return most;
  }
  const int64_t length = lengths.wide ? static_cast<const int64_t*>(lengths.data)[batch]
                                      : static_cast<const int32_t*>(lengths.data)[batch];
  return length < 0 ? 0 : length > most ? most : static_cast<int>(length);
}

template <class Traits>
__device__ __forceinline__ Range tile_rows(const TileMessage& tile) {
  return {tile.row, smaller(tile.row + Traits::kTileRows, tile.queries)};
}

template <class Traits>
__device__ __forceinline__ BlockPlan plan_for_group(const ForwardArguments& args,
                                                    const TileMessage& tile, int group) {
  const int row = tile.row + group * kMmaRows;
  const Range own_rows = {row, smaller(row + kMmaRows, tile.queries)};
  if constexpr (Traits::kBanded) {
    return plan_blocks(tile_rows<Traits>(tile), own_rows, args.band, tile.keys, Traits::kBlock,
                       Traits::kSkips);
  } else {
    const Range keys = {0, is_empty(tile_rows<Traits>(tile)) ? 0 : tile.keys};
    const Range blocks = blocks_touching(keys, Traits::kBlock);
    return {blocks, blocks, blocks_inside(keys, Traits::kBlock)};
  }
}

// -- load warp -----------------------------------------------------------------------------------
// Tile number `tile` as every role needs it.
template <class Traits>
__device__ __forceinline__ TileMessage describe(const ForwardArguments& args, int tile) {
  if (tile >= args.tiles) {
    return {-1, 0, 0, 0, 0};
  }
  const sm90::TilePlace place = sm90::tile_place(args.order, tile);
  const int batch = place.head / args.heads;
  return {place.row_tile * Traits::kTileRows, batch, place.head - batch * args.heads,
          clamped_length(args.query_lengths, batch, args.queries),
          clamped_length(args.key_lengths, batch, args.keys)};
}

// One thread.
template <class Traits>
__device__ __forceinline__ void load_tiles(SharedStorage<Traits>& shared,
                                           const ForwardArguments& args) {
  RingPosition<Traits::kQueryBuffers> query;
  RingPosition<Traits::kStages> stage;
  TileQueue::Position position;
  int number = blockIdx.x;
#pragma unroll 1
  while (true) {
    const TileMessage tile = describe<Traits>(args, number);
    shared.queue.put(position, tile);
    if (tile.row < 0) {
      return;
    }
    const Range blocks = plan_for_group<Traits>(args, tile, 0).loaded;
    const int kv_head = tile.head / args.heads_per_kv;
    // The next number is on its way while this tile is loaded.
    number = args.source.draw(number);

    const auto load_query = [&] {
#pragma unroll 1
      for (int group = 0; group < Traits::kGroups; ++group) {
        Slot& slot = shared.q_slots[query.index()][group];
        slot.empty.wait(query.phase() ^ 1);
        shared.q[query.index()][group].load(&args.q, slot.full, tile.row + group * kMmaRows,
                                            tile.head, tile.batch, ptx::kEvictFirst);
      }
      query.advance();
    };
    // The only Q buffer may still be in use: the first K goes before.
    constexpr bool kKeyFirst = Traits::kQueryBuffers == 1;
    if (!kKeyFirst && !is_empty(blocks)) {
      load_query();
    }
#pragma unroll 1
    for (int n = blocks.end - 1; n >= blocks.begin; --n) {
      Slot& k_slot = shared.k_slots[stage.index()];
      k_slot.empty.wait(stage.phase() ^ 1);
      shared.k[stage.index()].load(&args.k, k_slot.full, n * Traits::kBlock, kv_head, tile.batch,
                                   ptx::kEvictLast);
      if (kKeyFirst && n == blocks.end - 1) {
        load_query();
      }
      Slot& v_slot = shared.v_slots[stage.index()];
      v_slot.empty.wait(stage.phase() ^ 1);
      shared.v[stage.index()].load(&args.v, v_slot.full, n * Traits::kBlock, kv_head, tile.batch,
                                   ptx::kEvictLast);
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
    slot.full.wait(output.phase());
    shared.out.tiles[group].store(&args.out_map, args.value_dim, tile.row + group * kMmaRows,
                                  tile.head, tile.batch);
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
  OnlineSoftmax softmax;

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
        v_base(sm90::descriptor_n_major(shared.v[0].address(), Traits::KeyTile::kChunkBytes)) {}

  __device__ __forceinline__ void run() {
    if (Traits::kTakesTurns && group == Traits::kGroups - 1) {
      pass_turn();  // the first turn is warpgroup 0's
    }
#pragma unroll 1
    while (true) {
      const TileMessage tile = shared.queue.take_warp(position, thread.lane);
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
    }
  }

  // O = unnormalised output of the tile's rows, `factor` what normalises it.
  __device__ __forceinline__ void attend(const TileMessage& tile, const BlockPlan& plan,
                                         float (&factor)[2]) {
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
    softmax.update<true>(rS, alpha, args.scale_log2);
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
    softmax.update<kEdge>(rS, alpha, args.scale_log2);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rO);
    ptx::pin(rP);
    release_value();
    sm90::to_operand<Element>(rP, rS);
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
      sm90::scale_rows(rO, alpha);
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
    mask_block<Traits::kBanded>(rS, n * kBlock, row, args.band, tile.keys, thread);
  }

  // Keys that no query may attend have weight 0, but 0 * NaN is NaN: their values are zeroed. Every
  // warpgroup does it for itself before it reads the block; they write the same.
  __device__ __forceinline__ void clear_dead_values(const TileMessage& tile, int n) {
    const Range live = Traits::kBanded ? keys_of_some({0, tile.queries}, args.band, tile.keys)
                                       : Range{0, tile.keys};
    const int first_key = n * kBlock;
    const int begin = larger(live.begin - first_key, 0);
    const int end = smaller(live.end - first_key, kBlock);
    // Past the tensor's end TMA has zeroed already.
    const int rows = smaller(args.keys - first_key, kBlock);
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
    const int64_t head = static_cast<int64_t>(tile.batch) * args.heads + tile.head;
    float* lse = args.lse + head * args.queries + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int below = half * sm90::kRowStep;
      if (row + below >= tile.queries) {
        softmax.forget(half);
      }
      if (thread.leads_row() && row + below < args.queries) {
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
    } else {
      Element* out = static_cast<Element*>(args.out.data) + tile.batch * args.out.batch_stride +
                     tile.head * args.out.head_stride + row * args.out.row_stride;
      sm90::store_global(out, args.out.row_stride, args.queries - row, args.value_dim, rO, thread);
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
    Consumer<Traits>(shared, args, warpgroup - 1).run();
  }
}

// -- launcher ------------------------------------------------------------------------------------
// Heads whose keys and values fit into half of the L2 cache together.
inline int section_heads(const ForwardProblem& p) {
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t head_bytes =
      std::max<int64_t>(1, int64_t{2} * p.keys * (p.head_dim + p.value_dim) / group);
  int section = 1;
  while (int64_t{2} * section * head_bytes <= kCacheBytes && section < p.batch * p.heads) {
    section *= 2;
  }
  return std::min(section, p.batch * p.heads);
}

template <DType kType>
struct TypeOf;
template <>
struct TypeOf<DType::kBFloat16> {
  using Element = __nv_bfloat16;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};
template <>
struct TypeOf<DType::kFloat16> {
  using Element = __half;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
};

template <DType kType, int kHeadDim, bool kBanded>
const char* attention_fwd_sm90(const ForwardProblem& p, cudaStream_t stream) {
  using Traits = ForwardTraits<typename TypeOf<kType>::Element, kHeadDim, kBanded>;
  using Shared = SharedStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  constexpr CUtensorMapDataType kMapType = TypeOf<kType>::kMapType;
  constexpr int kHopper = 90;
  constexpr float kLog2e = 1.44269504088896341f;

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
  args.band = p.band;
  // At scale 0 the smallest factor gives the same weights, and keeps -inf * scale_log2 from being
  // NaN.
  args.scale_log2 = std::max(std::abs(p.scale) * kLog2e, std::numeric_limits<float>::min());
  args.negate = p.scale < 0.0f;
  const int row_tiles = (p.queries + Traits::kTileRows - 1) / Traits::kTileRows;
  args.order = {row_tiles, p.batch * p.heads, kBanded ? section_heads(p) : 1};
  args.tiles = row_tiles * p.batch * p.heads;
  const int blocks = std::min(args.tiles, device.processors);
  args.source = {p.counter, blocks};

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_fwd_kernel<Traits>;
  if (cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), index, allowed)) {
    return cudaGetErrorString(error);
  }
  kernel<<<blocks, Traits::kThreads, sizeof(Shared), stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
