// Attention backward for Hopper, in three launches.
//
//   prepare   delta = rowsum(out dout) - dlse and lse in base 2, padded to whole blocks of rows
//   main      a thread block owns 64 or 128 keys of one key/value head and walks over the rows that
//   may
//             attend them, in all query heads that share the head:
//               P^T = exp(K Q^T - lse),  dP^T = V dO^T,  dS^T = P^T (dP^T - delta)
//               dV += P^T dO,  dK += dS^T Q,  dQ += dS K
//   finish    dQ from the order of its registers and fp32 to the result's own
//
// Up to head dim 128 each of two consumer warpgroups owns 64 of the keys: its dK and dV stay in
// registers for the whole walk, P and dS become operands without leaving them; only dQ, which sums
// over keys, needs dS in shared memory. Beyond, registers hold dK and dV of 64 keys in all: each
// warpgroup owns columns of them, computes the scores of some rows and shares them with the others
// through shared memory. dQ leaves by asynchronous additions to global memory, in the order of the
// keys: the same bits in every run. Lengths, causal masks and windows set the bounds of the walk;
// blocks at their edges are masked in place.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>

#include "attention/attention.h"
#include "attention/backward_layout.h"
#include "attention/launch_sm90.cuh"
#include "attention/mask.cuh"
#include "attention/row_range.h"
#include "common/cuda_launch.cuh"
#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/grid.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/scheduler.h"
#include "sm90/tile/shared_tile.cuh"
#include "sm90/tile/tensor_map.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;
using sm90::AccumulatorThread;
using sm90::Barrier;
using sm90::kMmaK;
using sm90::kMmaRows;
using sm90::kWarp;
using sm90::kWarpgroup;
using sm90::RingPosition;
using sm90::SharedTile;
using sm90::Slot;

// -- configuration -------------------------------------------------------------------------------
// How consumer warpgroups share a step.
enum class Split {
  kKeysAndRows,     // scores, dK and dV by keys, dQ by rows
  kKeysAndColumns,  // scores, dK and dV by keys, dQ^T = K^T dS^T by columns
  kRowsAndColumns,  // scores by rows, dK, dV and dQ^T by columns
};

// TFLOP/s were measured on an H200 with bf16, 16384 tokens, 2048 / head dim heads, without masks.
struct BackwardConfig {
  int groups;  // consumer warpgroups
  int rows;    // queries of a block
  int stages;  // blocks of rows in shared memory
  Split split;
  int mover_registers, consumer_registers;
};

template <int kHeadDim>
constexpr BackwardConfig backward_config() {
  switch (kHeadDim) {
    case 64:  // 517
      return {2, 128, 2, Split::kKeysAndRows, 40, 232};
    case 96:   // as 128, whose shared memory it needs
    case 128:  // 593; 64 rows: 570; with 232 registers the compiler serialises the products
      return {2, 80, 2, Split::kKeysAndColumns, 24, 240};
    case 192:  // not measured: what fits
      return {3, 96, 1, Split::kRowsAndColumns, 32, 160};
    case 256:  // not measured: what fits
      return {2, 64, 1, Split::kRowsAndColumns, 40, 232};
  }
  return {};
}

template <class ElementType, int kDim>
struct BackwardTraits {
  using Element = ElementType;
  static constexpr BackwardConfig kConfig = backward_config<kDim>();
  static constexpr int kHeadDim = kDim;
  static constexpr int kGroups = kConfig.groups;
  static constexpr int kRows = kConfig.rows;
  static constexpr int kStages = kConfig.stages;
  static constexpr bool kSplitsKeys = kConfig.split != Split::kRowsAndColumns;
  static constexpr bool kTransposesDq = kConfig.split != Split::kKeysAndRows;
  static constexpr int kKeys = kSplitsKeys ? kGroups * kMmaRows : kMmaRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Shared memory holds whole chunks of 64 columns.
  static constexpr int kColumns =
      (kHeadDim + sm90::kChunkColumns - 1) / sm90::kChunkColumns * sm90::kChunkColumns;
  // Where columns are shared out, whole chunks of them.
  static constexpr int kGroupColumns = kColumns / kGroups;
  static constexpr int kGroupChunks = kGroupColumns / sm90::kChunkColumns;
  // Rows of a warpgroup's scores.
  static constexpr int kScoreRows = kSplitsKeys ? kRows : kRows / kGroups;
  // What one warpgroup adds to dQ in a step.
  static constexpr int kChunkFloats = kRows * kColumns / kGroups;

  using RowTile = SharedTile<Element, kRows, kColumns>;
  using KeyTile = SharedTile<Element, kKeys, kColumns>;
  using ScoreTile = SharedTile<Element, kRows, kKeys>;

  static_assert(kRows % kMmaK == 0, "dV and dK take 16 rows at a time");
  static_assert(kHeadDim % kMmaK == 0, "K Q^T and V dO^T take 16 columns at a time");
  static_assert(kScoreRows % kMmaK == 0, "matrices are stored 16 rows at a time");
  static_assert(kTransposesDq ? kGroupColumns % sm90::kChunkColumns == 0
                              : kRows == kGroups * kMmaRows,
                "a warpgroup computes whole chunks of columns or 64 rows of dQ");
  static_assert(kSplitsKeys || kHeadDim == kColumns, "columns are shared out without remainder");
  static_assert(kSplitsKeys ? kStages == 2 : kStages == 1,
                "there are two buffers of dS, or the only Q guards the only P and dS");
  static_assert(!kTransposesDq || !kSplitsKeys || kGroupChunks == 1);
  static_assert(kGroups <= 3, "the mover warpgroup has a dQ warp for each of them");
};

constexpr int kWarpsPerGroup = kWarpgroup / kWarp;

// -- arguments -----------------------------------------------------------------------------------
struct BackwardArguments {
  CUtensorMap q_map, k_map, v_map, dout_map;
  TensorView out, dout, dq, dk, dv;  // data of a gradient may be null: nobody wants it
  const float *lse, *dlse;           // [batch, heads, queries]; dlse may be null
  float *lse2, *delta;               // [batch, heads, row_blocks * rows of a block]
  float* dq_sum;                     // [batch, heads, row_blocks, groups, kChunkFloats]
  int* turns;                        // [batch, heads, row_blocks, groups]; null: in any order
  int* counter;
  int heads, heads_per_kv;
  int queries, keys, head_dim, value_dim;
  int row_blocks;  // of a head
  Lengths query_lengths, key_lengths;
  Band band;
  float scale, scale_log2;
  sm90::TileOrder order;
};

// What a thread block computes.
struct KeyBlock {
  int first_key;
  int batch, kv_head;
  int queries, keys;  // of the sequence
  RowPlan plan;
  int steps;
};

// Number of a query head's block of rows among all of them.
__device__ __forceinline__ int row_block_number(const BackwardArguments& args, const KeyBlock& work,
                                                Step step) {
  const int head = work.batch * args.heads + work.kv_head * args.heads_per_kv + step.head;
  return head * args.row_blocks + step.row_block;
}

// -- shared memory -------------------------------------------------------------------------------
template <class Traits, bool kSharesWeights = !Traits::kSplitsKeys>
struct WeightStage {
  typename Traits::ScoreTile tile;
};
template <class Traits>
struct WeightStage<Traits, false> {};

template <class Traits>
struct BackwardStorage {
  typename Traits::KeyTile k, v;
  typename Traits::RowTile q[Traits::kStages], dout[Traits::kStages];
  typename Traits::ScoreTile ds[Traits::kStages];
  WeightStage<Traits> p;
  alignas(16) float dq[Traits::kGroups][Traits::kChunkFloats];
  alignas(16) float lse2[Traits::kStages][Traits::kRows], delta[Traits::kStages][Traits::kRows];

  // Full when TMA has brought the bytes of both tiles, or of a tile and its rows' statistics;
  // empty when one thread of each consumer warpgroup has seen the products that read it complete.
  Barrier kv_full;
  Slot q_slots[Traits::kStages], dout_slots[Traits::kStages];
  // Full when the four warps have written, empty when the addition has read.
  Slot dq_slots[Traits::kGroups];
  // Complete from the start: a wait that always passes, see weigh.
  Barrier passed;
  KeyBlock work;
};

// Named barriers; 0 is __syncthreads.
constexpr int kScoresBarrier = 1;  // all warpgroups have written dS
constexpr int kMeetBarrier = 2;    // + warpgroup: its four warps meet

// 16 bytes of a row, one access to memory.
template <class Element>
struct alignas(sm90::kPieceBytes) Piece {
  static constexpr int kColumns = sm90::kPieceBytes / sizeof(Element);
  Element data[kColumns];
};

// -- prepare -------------------------------------------------------------------------------------
constexpr int kPrepareThreads = 256;

// A thread block computes the statistics of one block of rows. A dead row, and one past the end,
// gets lse +inf, which makes its weights 0, and delta 0.
template <class Traits>
__global__ void __launch_bounds__(kPrepareThreads)
    attention_bwd_prepare_kernel(const __grid_constant__ BackwardArguments args) {
  using Element = typename Traits::Element;
  constexpr int kPieceColumns = Piece<Element>::kColumns;
  // Powers of 2.
  constexpr int kRowThreads = Traits::kColumns <= 128 ? Traits::kColumns / kPieceColumns : kWarp;
  constexpr int kRowsAtOnce = kPrepareThreads / kRowThreads;
  const int head = blockIdx.x / args.row_blocks;
  const int first_row = (blockIdx.x - head * args.row_blocks) * Traits::kRows;
  const int batch = head / args.heads;
  const int head_of_batch = head - batch * args.heads;
  const Range live =
      rows_of_some({0, clamped_length(args.key_lengths, batch, args.keys)}, args.band,
                   clamped_length(args.query_lengths, batch, args.queries));
  const int column = threadIdx.x % kRowThreads * kPieceColumns;
  ptx::griddepcontrol_launch_dependents();

  const auto piece = [&](const TensorView& x, int row) {
    const Element* first = static_cast<const Element*>(x.data) + batch * x.batch_stride +
                           head_of_batch * x.head_stride + row * x.row_stride;
    return *reinterpret_cast<const Piece<Element>*>(first + column);
  };
#pragma unroll 1
  for (int i = threadIdx.x / kRowThreads; i < Traits::kRows; i += kRowsAtOnce) {
    const int row = first_row + i;
    const int64_t at = static_cast<int64_t>(head) * args.queries + row;
    const float lse = contains(live, row) ? args.lse[at] : kMinusInfinity;
    float sum = 0.0f;
    if (lse != kMinusInfinity && column < args.value_dim) {
      const Piece<Element> out = piece(args.out, row), dout = piece(args.dout, row);
#pragma unroll
      for (int j = 0; j < kPieceColumns; ++j) {
        sum = fmaf(static_cast<float>(out.data[j]), static_cast<float>(dout.data[j]), sum);
      }
    }
    for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (column == 0) {
      const int64_t to = static_cast<int64_t>(blockIdx.x) * Traits::kRows + i;
      const bool dead = lse == kMinusInfinity;
      args.lse2[to] = dead ? -kMinusInfinity : lse * kLog2e;
      args.delta[to] = dead || !args.dlse ? sum : sum - args.dlse[at];
    }
  }
  if (args.turns) {
    if (threadIdx.x < Traits::kGroups) {
      args.turns[static_cast<int64_t>(blockIdx.x) * Traits::kGroups + threadIdx.x] = 0;
    }
  } else {
    constexpr int kBlockFloats = Traits::kGroups * Traits::kChunkFloats;
    float4* block = reinterpret_cast<float4*>(args.dq_sum + int64_t{kBlockFloats} * blockIdx.x);
    for (int i = threadIdx.x; i < kBlockFloats / 4; i += kPrepareThreads) {
      block[i] = {};
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *args.counter = 0;
  }
}

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
  shared.k.load(&args.k_map, shared.kv_full, work.first_key, work.kv_head, work.batch,
                ptx::kEvictFirst);
  shared.v.load(&args.v_map, shared.kv_full, work.first_key, work.kv_head, work.batch,
                ptx::kEvictFirst);
  RingPosition<Traits::kStages> stage;
  Step step = first_step(work.plan.visited);
#pragma unroll 1
  for (int left = work.steps; left > 0; --left) {
    const int head = work.kv_head * args.heads_per_kv + step.head;
    const int row = step.row_block * Traits::kRows;
    const int64_t statistics =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kRows;

    Slot& q_slot = shared.q_slots[stage.index()];
    q_slot.empty.wait(stage.phase() ^ 1);
    shared.q[stage.index()].load(&args.q_map, q_slot.full, row, head, work.batch, ptx::kEvictLast);
    load_statistics(shared.lse2[stage.index()], args.lse2 + statistics, q_slot.full);

    Slot& dout_slot = shared.dout_slots[stage.index()];
    dout_slot.empty.wait(stage.phase() ^ 1);
    shared.dout[stage.index()].load(&args.dout_map, dout_slot.full, row, head, work.batch,
                                    ptx::kEvictLast);
    load_statistics(shared.delta[stage.index()], args.delta + statistics, dout_slot.full);

    stage.advance();
    step = next_step(step, work.plan.visited);
  }
}

// -- dQ warps ------------------------------------------------------------------------------------
// One thread for each consumer warpgroup: adds its part of dQ to the sum in global memory. Blocks
// of keys take turns in their order, the first one stores. Blocks are drawn in this order too, so
// that whoever is waited for is running.
template <class Traits>
__device__ __forceinline__ void add_dq(BackwardStorage<Traits>& shared,
                                       const BackwardArguments& args, int group) {
  constexpr int kBytes = Traits::kChunkFloats * sizeof(float);
  const KeyBlock& work = shared.work;
  const int key_block = work.first_key / Traits::kKeys;
  const uint32_t from = ptx::shared_address(shared.dq[group]);
  Slot& slot = shared.dq_slots[group];
  RingPosition<1> position;
  Step step = first_step(work.plan.visited);
#pragma unroll 1
  for (int left = work.steps; left > 0; --left) {
    const int64_t chunk =
        static_cast<int64_t>(row_block_number(args, work, step)) * Traits::kGroups + group;
    float* to = args.dq_sum + chunk * Traits::kChunkFloats;
    slot.full.wait(position.phase());
    if (args.turns) {
      int* turn = args.turns + chunk;
      const int rank = key_block - visitors(step.row_block, Traits::kRows, args.band, work.queries,
                                            work.keys, Traits::kKeys)
                                       .begin;
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
    step = next_step(step, work.plan.visited);
  }
  ptx::cp_async_bulk_wait_group();
}

// -- consumers -----------------------------------------------------------------------------------
// One warpgroup. Products are issued by all of its threads together; one of them, the leader, hands
// slots back, because a wgmma that is complete for one warp is complete for the warpgroup.
template <class Traits>
struct BackwardConsumer {
  using Element = typename Traits::Element;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;
  static constexpr uint32_t kLowHalf = 0xFFFF;
  // This warpgroup's part of everything, in units of the 64 rows of a wgmma: scores^T 64 keys x
  // kScoreRows, dK and dV 64 keys x kOwnColumns, dQ kDqParts times 64 x kDqWidth.
  static constexpr int kScoreRows = Traits::kScoreRows;
  static constexpr int kOwnColumns = kSplitsKeys ? kHeadDim : Traits::kGroupColumns;
  static constexpr int kDqParts = kSplitsKeys ? 1 : Traits::kGroupChunks;
  static constexpr int kDqWidth = Traits::kTransposesDq ? kRows : kHeadDim;
  using ScoreMma = ptx::Wgmma<kScoreRows>;
  using GradientMma = ptx::Wgmma<kOwnColumns>;
  using DqMma = ptx::Wgmma<kDqWidth>;
  using DqPart = float[kDqWidth / 2];

  BackwardStorage<Traits>& shared;
  const BackwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  const bool leader;

  // Descriptors of slot 0; the others are added to. Each begins at this warpgroup's part.
  const uint64_t k_rows, v_rows, q_rows, dout_rows;  // operands of scores: columns contiguous
  const uint64_t q_columns, dout_columns;            // operands of dK and dV: the same, transposed
  const uint64_t k_dq, ds_dq;                        // operands of dQ
  RingPosition<Traits::kStages> stage;

  float rDk[kOwnColumns / 2], rDv[kOwnColumns / 2];

  __device__ __forceinline__ BackwardConsumer(BackwardStorage<Traits>& storage,
                                              const BackwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp},
        leader(threadIdx.x % kWarpgroup == 0),
        k_rows(rows_from(shared.k.address(), first_own_key())),
        v_rows(rows_from(shared.v.address(), first_own_key())),
        q_rows(rows_from(shared.q[0].address(), first_score_row())),
        dout_rows(rows_from(shared.dout[0].address(), first_score_row())),
        q_columns(columns_from(shared.q[0], kSplitsKeys ? 0 : first_own_chunk())),
        dout_columns(columns_from(shared.dout[0], kSplitsKeys ? 0 : first_own_chunk())),
        k_dq(columns_from(shared.k, Traits::kTransposesDq ? first_own_chunk() : 0)),
        ds_dq(rows_from(shared.ds[0].address(), Traits::kTransposesDq ? 0 : warpgroup * kMmaRows)) {
  }

  __device__ __forceinline__ int first_own_key() const {
    return kSplitsKeys ? group * kMmaRows : 0;
  }
  __device__ __forceinline__ int first_score_row() const {
    return kSplitsKeys ? 0 : group * kScoreRows;
  }
  __device__ __forceinline__ int first_own_chunk() const { return group * Traits::kGroupChunks; }

  static __device__ __forceinline__ uint64_t rows_from(uint32_t tile, int row) {
    return sm90::descriptor_k_major(tile + row * sm90::kRowBytes);
  }
  template <class Tile>
  static __device__ __forceinline__ uint64_t columns_from(const Tile& tile, int chunk) {
    return sm90::descriptor_n_major(tile.address() + chunk * Tile::kChunkBytes, Tile::kChunkBytes);
  }

  __device__ __forceinline__ void run() {
    const RowPlan& plan = shared.work.plan;
    clear(rDk);
    clear(rDv);
    if (shared.work.steps > 0) {
      shared.kv_full.wait(0);
      clear_dead_keys();
    }
    int row_block = plan.visited.end - 1;
#pragma unroll 1
    while (static_cast<int>(stage.passed) < shared.work.steps) {
      take_rows(row_block);
      row_block = row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1;
    }
    write_gradients();
  }

  // -- a step --------------------------------------------------------------------------------
  __device__ __forceinline__ void take_rows(int row_block) {
    float rS[kScoreRows / 2], rDp[kScoreRows / 2];     // scores, then weights, and dP
    uint32_t rP[kScoreRows / 4], rDs[kScoreRows / 4];  // weights and dS as A operands
    DqPart rDq[kDqParts];
    if (!contains(shared.work.plan.clean, row_block)) {
      clear_dead_rows(row_block * kRows);
    }
    shared.q_slots[stage.index()].full.wait(stage.phase());
    issue_product(rS, k_rows, q_rows);
    shared.dout_slots[stage.index()].full.wait(stage.phase());
    issue_product(rDp, v_rows, dout_rows);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rS);
    weigh(rS);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDp);
    differentiate(rP, rDs, rS, rDp);
    if (!contains(shared.work.plan.full, row_block)) {
      mask_operands(rP, rDs, row_block * kRows);
    }
    if constexpr (kSplitsKeys) {
      store_scores(shared.ds[stage.index()], rDs);
      issue_gradient(rDv, rP, dout_columns);
      show_scores();
    } else {
      // Nobody reads the last step's P and dS any more: this step's Q came into the only buffer
      // after every warpgroup had handed it back.
      store_scores(shared.p.tile, rP);
      store_scores(shared.ds[stage.index()], rDs);
      show_scores();
      issue_gradient(rDv, shared.p.tile, dout_columns);
    }
    issue_dq(rDq);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rDv);
    ptx::pin(rP);
    release(shared.dout_slots[stage.index()]);
    if constexpr (kSplitsKeys) {
      issue_gradient(rDk, rDs, q_columns);
    } else {
      issue_gradient(rDk, shared.ds[stage.index()], q_columns);
    }
    ptx::wgmma_wait_group<1>();
    for (DqPart& part : rDq) {
      ptx::pin(part);
    }
    hand_over_dq(rDq);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDk);
    ptx::pin(rDs);
    release(shared.q_slots[stage.index()]);
    stage.advance();
  }

  // 64 keys x kScoreRows: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_product(float (&acc)[kScoreRows / 2], uint64_t keys,
                                                uint64_t rows) {
    rows = sm90::descriptor_at(rows, stage.index() * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          acc, sm90::descriptor_at(keys, sm90::k_major_step(step, kKeys)),
          sm90::descriptor_at(rows, sm90::k_major_step(step, kRows)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Scores become weights: 2^(s scale_log2 - lse2).
  __device__ __forceinline__ void weigh(float (&s)[kScoreRows / 2]) {
    const float* lse2 = shared.lse2[stage.index()] + first_score_row() + thread.first_column();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kScoreRows / 8; ++i) {
      const float2 shift = *reinterpret_cast<const float2*>(lse2 + 8 * i);
      s[4 * i] = ptx::ex2(fmaf(s[4 * i], args.scale_log2, -shift.x));
      s[4 * i + 1] = ptx::ex2(fmaf(s[4 * i + 1], args.scale_log2, -shift.y));
      s[4 * i + 2] = ptx::ex2(fmaf(s[4 * i + 2], args.scale_log2, -shift.x));
      s[4 * i + 3] = ptx::ex2(fmaf(s[4 * i + 3], args.scale_log2, -shift.y));
    }
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) {
      sum += s[i];
    }
    // Passes at once, but only when the weights are there: without it the compiler puts the
    // exponentials after the wait for dP, where nothing runs beside them. A sum of weights has no
    // such bits, but the compiler does not know: it does know that none is negative.
    constexpr uint32_t kNoSum = 0x80000001;
    shared.passed.wait(__float_as_uint(sum) == kNoSum);
  }

  // dS = P (dP - delta), and both as operands: in one pass, so that P in fp32 and as an operand
  // do not live side by side.
  __device__ __forceinline__ void differentiate(uint32_t (&rP)[kScoreRows / 4],
                                                uint32_t (&rDs)[kScoreRows / 4],
                                                const float (&p)[kScoreRows / 2],
                                                const float (&dp)[kScoreRows / 2]) {
    const float* delta = shared.delta[stage.index()] + first_score_row() + thread.first_column();
#pragma unroll
    for (int i = 0; i < kScoreRows / 8; ++i) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * i + 2 * half;
        rP[2 * i + half] = ptx::pack<Element>(p[at], p[at + 1]);
        rDs[2 * i + half] =
            ptx::pack<Element>(p[at] * (dp[at] - d.x), p[at + 1] * (dp[at + 1] - d.y));
      }
    }
  }

  // P and dS become 0 where the pair is not allowed, whatever they are: a weight that no row knows
  // of may be inf. As operands they take half the registers, and nothing else is alive.
  __device__ __forceinline__ void mask_operands(uint32_t (&rP)[kScoreRows / 4],
                                                uint32_t (&rDs)[kScoreRows / 4], int first_row) {
    const KeyBlock& work = shared.work;
    const int origin = first_row + first_score_row() + thread.first_column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = work.first_key + first_own_key() + thread.upper_row() + half * sm90::kRowStep;
      const RowMask mask = row_mask(key, origin, args.band, work.queries, work.keys);
#pragma unroll
      for (int i = 0; i < kScoreRows / 8; ++i) {
        const uint32_t allowed =
            (allows(mask, 8 * i) ? kLowHalf : 0) | (allows(mask, 8 * i + 1) ? ~kLowHalf : 0);
        rP[2 * i + half] &= allowed;
        rDs[2 * i + half] &= allowed;
      }
    }
  }

  // P^T or dS^T in registers becomes P or dS in shared memory, a row a query.
  __device__ __forceinline__ void store_scores(typename Traits::ScoreTile& tile,
                                               const uint32_t (&scores)[kScoreRows / 4]) {
    constexpr int kChunkBytes = Traits::ScoreTile::kChunkBytes;
    const uint32_t to = tile.address() + (kSplitsKeys ? group * kChunkBytes : 0) +
                        first_score_row() * sm90::kRowBytes +
                        scores_offset(thread.warp, thread.lane);
#pragma unroll
    for (int i = 0; i < kScoreRows / kMmaK; ++i) {
      ptx::stmatrix_x4_trans(to + sm90::n_major_step(i), scores[4 * i], scores[4 * i + 1],
                             scores[4 * i + 2], scores[4 * i + 3]);
    }
  }

  // What this warpgroup has stored is there for all of them, and the others' for it.
  __device__ __forceinline__ void show_scores() {
    ptx::fence_proxy_async();
    ptx::bar_sync(kScoresBarrier, Traits::kGroups * kWarpgroup);
  }

  // dV += P^T dO or dK += dS^T Q, from this warpgroup's scores ...
  __device__ __forceinline__ void issue_gradient(float (&acc)[kOwnColumns / 2],
                                                 uint32_t (&scores)[kScoreRows / 4],
                                                 uint64_t rows) {
    rows = sm90::descriptor_at(rows, stage.index() * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / kMmaK; ++step) {
      GradientMma::template rs<Element, ptx::kMajorN>(
          acc, scores[4 * step], scores[4 * step + 1], scores[4 * step + 2], scores[4 * step + 3],
          sm90::descriptor_at(rows, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  // ... or from everybody's.
  __device__ __forceinline__ void issue_gradient(float (&acc)[kOwnColumns / 2],
                                                 const typename Traits::ScoreTile& scores,
                                                 uint64_t rows) {
    const uint64_t keys = columns_from(scores, 0);
    rows = sm90::descriptor_at(rows, stage.index() * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / kMmaK; ++step) {
      GradientMma::template ss<Element, ptx::kMajorN, ptx::kMajorN>(
          acc, sm90::descriptor_at(keys, sm90::n_major_step(step)),
          sm90::descriptor_at(rows, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_dq(DqPart (&parts)[kDqParts]) {
    const uint64_t ds = sm90::descriptor_at(ds_dq, stage.index() * Traits::ScoreTile::kBytes);
    for (DqPart& part : parts) {
      ptx::pin(part);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < kDqParts; ++part) {
      const uint64_t k = sm90::descriptor_at(k_dq, part * Traits::KeyTile::kChunkBytes);
#pragma unroll
      for (int step = 0; step < kKeys / kMmaK; ++step) {
        const uint64_t keys = sm90::descriptor_at(k, sm90::n_major_step(step));
        const uint64_t scores = sm90::descriptor_at(ds, sm90::k_major_step(step, kRows));
        if constexpr (Traits::kTransposesDq) {
          DqMma::template ss<Element, ptx::kMajorK, ptx::kMajorN>(parts[part], keys, scores,
                                                                  step > 0);
        } else {
          DqMma::template ss<Element, ptx::kMajorN>(parts[part], scores, keys, step > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  // Four floats of every thread side by side: no bank is asked twice.
  __device__ __forceinline__ void hand_over_dq(const DqPart (&parts)[kDqParts]) {
    Slot& slot = shared.dq_slots[group];
    slot.empty.wait(dq_position().phase() ^ 1);
    float4* to = reinterpret_cast<float4*>(shared.dq[group]) + threadIdx.x % kWarpgroup;
#pragma unroll
    for (const DqPart& acc : parts) {
#pragma unroll
      for (int i = 0; i < kDqWidth / 8; ++i) {
        to[i * kWarpgroup] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
      }
      to += kDqWidth / 8 * kWarpgroup;
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (thread.lane == 0) {
      slot.full.arrive();
    }
  }

  // A step fills one stage and one buffer of dQ: both count steps.
  __device__ __forceinline__ RingPosition<1> dq_position() const { return {stage.passed}; }

  __device__ __forceinline__ void release(Slot& slot) {
    if (leader) {
      slot.empty.arrive();
    }
  }

  // -- what nothing may read -----------------------------------------------------------------
  // Weights of dead rows and keys are 0, but 0 * NaN is NaN: they are zeroed. Every warpgroup does
  // it for itself before it reads a block; they write the same.
  __device__ __forceinline__ void clear_dead_keys() {
    const Range live = shared.work.plan.keys;
    // Past the tensor's end TMA has zeroed already.
    const int rows = smaller(args.keys - shared.work.first_key, kKeys);
    if (live.begin > 0 || live.end < rows) {
      for (auto* tile : {&shared.k, &shared.v}) {
        clear_outside(*tile, live);
      }
      show_writes_to_wgmma();
    }
  }

  __device__ __forceinline__ void clear_dead_rows(int first_row) {
    const KeyBlock& work = shared.work;
    const Range live = rows_of_some({0, work.keys}, args.band, work.queries);
    const Range own = {larger(live.begin - first_row, 0), smaller(live.end - first_row, kRows)};
    shared.q_slots[stage.index()].full.wait(stage.phase());
    shared.dout_slots[stage.index()].full.wait(stage.phase());
    clear_outside(shared.q[stage.index()], own);
    clear_outside(shared.dout[stage.index()], own);
    show_writes_to_wgmma();
  }

  template <class Tile>
  static __device__ __forceinline__ void clear_outside(Tile& tile, Range live) {
    tile.clear_rows(0, live.begin, threadIdx.x % kWarpgroup, kWarpgroup);
    tile.clear_rows(live.end, Tile::kRows, threadIdx.x % kWarpgroup, kWarpgroup);
  }

  __device__ __forceinline__ void show_writes_to_wgmma() {
    ptx::fence_proxy_async();
    ptx::bar_sync(kMeetBarrier + group, kWarpgroup);
  }

  // -- the end -------------------------------------------------------------------------------
  __device__ __forceinline__ void write_gradients() {
    const float factors[2] = {args.scale, args.scale};
    sm90::scale_rows(rDk, factors);
    write_gradient(args.dv, args.value_dim, rDv);
    write_gradient(args.dk, args.head_dim, rDk);
  }

  __device__ __forceinline__ void write_gradient(const TensorView& view, int columns,
                                                 const float (&acc)[kOwnColumns / 2]) {
    if (!view.data) {
      return;
    }
    const KeyBlock& work = shared.work;
    const int key = work.first_key + first_own_key() + thread.upper_row();
    const int column = kSplitsKeys ? 0 : group * kOwnColumns;
    Element* to = static_cast<Element*>(view.data) + work.batch * view.batch_stride +
                  work.kv_head * view.head_stride + key * view.row_stride + column;
    sm90::store_global(to, view.row_stride, args.keys - key, columns - column, acc, thread);
  }

  template <int kCount>
  static __device__ __forceinline__ void clear(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      registers[i] = 0.0f;
    }
  }
};

// -- main kernel ---------------------------------------------------------------------------------
template <class Traits>
__device__ __forceinline__ void init_barriers(BackwardStorage<Traits>& shared) {
  constexpr int kTwoAnnouncements = 2;
  shared.kv_full.init(kTwoAnnouncements);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    for (Slot* slot : {&shared.q_slots[stage], &shared.dout_slots[stage]}) {
      slot->full.init(kTwoAnnouncements);
      slot->empty.init(Traits::kGroups);
    }
  }
  for (Slot& slot : shared.dq_slots) {
    slot.full.init(kWarpsPerGroup);
    slot.empty.init(1);
  }
  shared.passed.init(1);
  shared.passed.arrive();
  ptx::fence_mbarrier_init();
}

// Block of keys number `number`: the first keys come first, which under a causal mask have the most
// rows.
template <class Traits>
__device__ __forceinline__ KeyBlock describe(const BackwardArguments& args, int number) {
  const sm90::TilePlace place = sm90::tile_place(args.order, number);
  const int kv_heads = args.heads / args.heads_per_kv;
  KeyBlock work;
  work.batch = place.head / kv_heads;
  work.kv_head = place.head - work.batch * kv_heads;
  work.first_key = (args.order.row_tiles - 1 - place.row_tile) * Traits::kKeys;
  work.queries = clamped_length(args.query_lengths, work.batch, args.queries);
  work.keys = clamped_length(args.key_lengths, work.batch, args.keys);
  work.plan = plan_rows(work.first_key, Traits::kKeys, args.band, work.queries, work.keys,
                        args.queries, Traits::kRows);
  const Range visited = work.plan.visited;
  work.steps = is_empty(visited) ? 0 : args.heads_per_kv * (visited.end - visited.begin);
  return work;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ BackwardArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<Traits>*>(shared_memory);

  // Through a shuffle the compiler knows that these are the same for the whole warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_barriers<Traits>(shared);
    for (const CUtensorMap* map : {&args.q_map, &args.k_map, &args.v_map, &args.dout_map}) {
      ptx::prefetch_tensormap(map);
    }
  }
  ptx::griddepcontrol_wait();
  if (threadIdx.x == 0) {
    shared.work = describe<Traits>(args, atomicAdd(args.counter, 1));
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Traits::kConfig.mover_registers>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (shared.work.steps > 0 && warp <= Traits::kGroups && ptx::elect_one()) {
      if (warp == 0) {
        load_blocks<Traits>(shared, args);
      } else {
        add_dq<Traits>(shared, args, warp - 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kConfig.consumer_registers>();
    BackwardConsumer<Traits>(shared, args, warpgroup - 1).run();
  }
}

// -- finish --------------------------------------------------------------------------------------
constexpr int kFinishThreads = 256;

// Rows of dQ. Each is a piece longer: neighbouring rows begin at different banks.
template <class Traits>
using RowStage =
    typename Traits::Element[Traits::kRows]
                            [Traits::kColumns + Piece<typename Traits::Element>::kColumns];

// A thread block turns one block of rows of dQ, a sum in the order of the consumers' registers,
// into rows of the result.
template <class Traits>
__global__ void __launch_bounds__(kFinishThreads)
    attention_bwd_finish_kernel(const __grid_constant__ BackwardArguments args) {
  using Element = typename Traits::Element;
  constexpr int kPieceColumns = Piece<Element>::kColumns;
  constexpr int kRowPieces = Traits::kColumns / kPieceColumns;
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& rows = *reinterpret_cast<RowStage<Traits>*>(shared_memory);
  static_assert(sizeof(rows) <= 48 * 1024, "more would have to be asked for");

  const int head = blockIdx.x / args.row_blocks;
  const int row_block = blockIdx.x - head * args.row_blocks;
  const int first_row = row_block * Traits::kRows;
  const int batch = head / args.heads;
  const Range added = visitors(row_block, Traits::kRows, args.band,
                               clamped_length(args.query_lengths, batch, args.queries),
                               clamped_length(args.key_lengths, batch, args.keys), Traits::kKeys);
  ptx::griddepcontrol_wait();

  if (!is_empty(added)) {
    constexpr int kFours = Traits::kChunkFloats / 4;
    constexpr int kPartFloats =
        kMmaRows * (Traits::kTransposesDq ? Traits::kRows : Traits::kColumns);
    constexpr int kParts = Traits::kChunkFloats / kPartFloats;
    const float4* sum = reinterpret_cast<const float4*>(args.dq_sum) +
                        int64_t{Traits::kGroups * kFours} * blockIdx.x;
    for (int at = threadIdx.x; at < Traits::kGroups * kFours; at += kFinishThreads) {
      const float4 four = sum[at];
      const float values[] = {four.x, four.y, four.z, four.w};
      const int group = at / kFours;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int number = 4 * (at - group * kFours) + i;
        const int part = number / kPartFloats;
        const SumElement element = sum_element(number - part * kPartFloats);
        const int along = (group * kParts + part) * kMmaRows + element.row;
        Element& to =
            Traits::kTransposesDq ? rows[element.column][along] : rows[along][element.column];
        to = static_cast<Element>(values[i] * args.scale);
      }
    }
  }
  __syncthreads();

  const int count = smaller(args.queries - first_row, Traits::kRows);
  Element* dq = static_cast<Element*>(args.dq.data) + batch * args.dq.batch_stride +
                (head - batch * args.heads) * args.dq.head_stride + first_row * args.dq.row_stride;
  for (int at = threadIdx.x; at < count * kRowPieces; at += kFinishThreads) {
    const int row = at / kRowPieces;
    const int column = at % kRowPieces * kPieceColumns;
    if (column < args.head_dim) {
      const auto* from = reinterpret_cast<const Piece<Element>*>(&rows[row][column]);
      auto* to = reinterpret_cast<Piece<Element>*>(dq + row * args.dq.row_stride + column);
      *to = is_empty(added) ? Piece<Element>{} : *from;
    }
  }
}

// -- launcher ------------------------------------------------------------------------------------
// Key/value heads whose queries, output gradients and sums of dQ fit into the L2 cache together.
inline int section_heads(const BackwardProblem& p) {
  constexpr int64_t kCacheBytes = int64_t{40} << 20;
  const int64_t row_bytes = int64_t{2} * (p.head_dim + p.value_dim) + int64_t{4} * p.head_dim;
  const int64_t head_bytes = std::max<int64_t>(1, row_bytes * p.queries * (p.heads / p.kv_heads));
  const int64_t fitting = std::max<int64_t>(1, kCacheBytes / head_bytes);
  return static_cast<int>(std::min<int64_t>(fitting, int64_t{p.batch} * p.kv_heads));
}

// dependent: the kernel waits for the one before it by itself.
template <class Kernel>
cudaError_t launch(Kernel kernel, int blocks, int threads, int shared_bytes, cudaStream_t stream,
                   const BackwardArguments& args, bool dependent) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <DType kType, int kHeadDim>
const char* attention_bwd_sm90(const BackwardProblem& p, cudaStream_t stream) {
  using Traits = BackwardTraits<typename TypeOf<kType>::Element, kHeadDim>;
  using Shared = BackwardStorage<Traits>;
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

  BackwardArguments args;
  const bool encoded =
      sm90::encode_tensor_map(&args.q_map, kMapType, p.q, {p.batch, p.heads, p.queries, p.head_dim},
                              Traits::kRows) &&
      sm90::encode_tensor_map(&args.k_map, kMapType, p.k, {p.batch, p.kv_heads, p.keys, p.head_dim},
                              Traits::kKeys) &&
      sm90::encode_tensor_map(&args.v_map, kMapType, p.v,
                              {p.batch, p.kv_heads, p.keys, p.value_dim}, Traits::kKeys) &&
      sm90::encode_tensor_map(&args.dout_map, kMapType, p.dout,
                              {p.batch, p.heads, p.queries, p.value_dim}, Traits::kRows);
  if (!encoded) {
    return "the driver refused a tensor map: addresses and strides must be multiples of 16 bytes";
  }
  args.out = p.out;
  args.dout = p.dout;
  args.dq = p.dq;
  args.dk = p.dk;
  args.dv = p.dv;
  args.lse = p.lse;
  args.dlse = p.dlse;
  args.dq_sum = p.dq_sum;
  args.turns = p.turns;
  args.counter = p.counter;
  args.heads = p.heads;
  args.heads_per_kv = p.heads / p.kv_heads;
  args.queries = p.queries;
  args.keys = p.keys;
  args.head_dim = p.head_dim;
  args.value_dim = p.value_dim;
  args.row_blocks = (p.queries + Traits::kRows - 1) / Traits::kRows;
  args.query_lengths = p.query_lengths;
  args.key_lengths = p.key_lengths;
  args.band = p.band;
  args.scale = p.scale;
  args.scale_log2 = p.scale * kLog2e;
  const int row_blocks = args.row_blocks * p.batch * p.heads;
  args.lse2 = p.statistics;
  args.delta = p.statistics + int64_t{row_blocks} * Traits::kRows;
  const int key_blocks = (p.keys + Traits::kKeys - 1) / Traits::kKeys;
  args.order = {key_blocks, p.batch * p.kv_heads, section_heads(p)};

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_bwd_kernel<Traits>;
  if (cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), index, allowed)) {
    return cudaGetErrorString(error);
  }
  cudaError_t error = launch(attention_bwd_prepare_kernel<Traits>, row_blocks, kPrepareThreads, 0,
                             stream, args, false);
  if (!error) {
    error = launch(kernel, key_blocks * p.batch * p.kv_heads, Traits::kThreads, sizeof(Shared),
                   stream, args, true);
  }
  if (!error && p.dq.data) {
    error = launch(attention_bwd_finish_kernel<Traits>, row_blocks, kFinishThreads,
                   sizeof(RowStage<Traits>), stream, args, true);
  }
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
