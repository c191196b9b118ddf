// The forward's tile shapes and the constants derived from them. Read this file first; the overview
// of the kernel is in attention_fwd_sm90.cuh.
#pragma once

#include <type_traits>

#include "attention/attention.h"
#include "attention/sm90/forward/online_softmax.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/shared_tile.cuh"

namespace fastattn::attention {

using sm90::kMmaK;
using sm90::kMmaRows;
using sm90::kWarpgroup;
using sm90::SharedTile;

// The percentages below were measured for an earlier kernel on an H200, with bf16, 16384 tokens and
// 2048 / head dim heads; this one's throughput is on docs/pages/results.md.
struct ForwardConfig {
  int groups;          // consumer warpgroups
  int block;           // keys of a block
  int query_buffers;   // 2: the next tile's Q is loaded while this tile is computed
  bool stages_output;  // output through shared memory and TMA, otherwise from registers
  bool ping_pong;      // warpgroups issue wgmma in ping-pong order
  // Exponentials before the wait for P V: in the earlier kernel, with this order, 526 TFLOP/s. The
  // compiler's own order, with the exponentials behind it, was faster at 128 and 256.
  bool exponentials_first;
};

constexpr ForwardConfig forward_config(int head_dim, Variant variant) {
  switch (head_dim) {
    case 64:
      if (is_additive(variant)) {  // three groups would not have enough registers
        return {2, 128, 2, false, true, true};
      }
      if (modifies_scores(variant)) {
        return {2, 128, 2, true, true, true};
      }
      // 2 groups with 192-key blocks: 11 % slower; a third K/V stage: no gain
      return {3, 128, 2, true, false, true};
    case 128:
      if (is_additive(variant)) {  // the mask needs shared memory
        return {2, 128, 1, false, true, false};
      }
      // ping-pong: +4 % up to 1k keys; 176-key blocks: -4 % at 4k keys, +4 % at 16k
      return {2, 128, 2, true, true, false};
    case 192:  // shared memory: Q, 2 x 2 blocks of 112 keys, no output stage
      return {2, forward_block(head_dim, variant), 1, false, false, false};
    case 256:  // 64-key blocks: 3 % slower
      return {2, forward_block(head_dim, variant), 1, false, false, false};
  }
  return {};
}

// Registers per thread after setmaxnreg. Their sum over the warpgroups must not exceed the
// allocation at launch, 504 or 512, or setmaxnreg never returns: 40 + 2 x 232 and 32 + 3 x 160.
struct RegisterBudget {
  int producer, consumer;
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
  static constexpr bool kBounded = kVariant != Variant::kFull;
  static constexpr bool kDropout = has_dropout(kVariant);
  static constexpr bool kChoosesDropout = kVariant == Variant::kScoresDense;
  static constexpr bool kBias = is_additive(kVariant);
  static constexpr bool kScores = modifies_scores(kVariant);
  static constexpr bool kPaged = is_paged(kVariant);
  static constexpr bool kSinks = kScores || kPaged || kVariant == Variant::kSinks;
  // No split-KV with dropout and dense masks: they occur in training, which has enough tiles.
  static constexpr bool kSplits = kVariant == Variant::kFull || kVariant == Variant::kBounded ||
                                  kVariant == Variant::kSinks || kVariant == Variant::kScores ||
                                  kPaged;
  static constexpr bool kDense = is_dense(kVariant);
  // Blocks that only the dense mask changes skip the masking by lengths and bounds, except in the
  // instance that has no register left for the test.
  static constexpr bool kChoosesMasks = !kBias || kHeadDim < 256;
  static constexpr bool kRecomputesLane =
      kHeadDim >= 128 && (kHeadDim == 256 ? kScores || (kDropout && !kDense) : kScores && kDense);
  static constexpr int kGroups = kConfig.groups;
  static constexpr int kBlock = kConfig.block;
  static constexpr int kQueryBuffers = kConfig.query_buffers;
  static constexpr bool kStagesOutput = kConfig.stages_output;
  static constexpr bool kPingPong = kConfig.ping_pong;
  // In the instances that always drop weights the compiler chooses this order by itself.
  static constexpr bool kPinsExponentials =
      kConfig.exponentials_first && (!kDropout || kChoosesDropout);
  // With bounds, a warpgroup skips blocks that only the other warpgroups need. In ping-pong order,
  // and under a dense mask, all warpgroups process the same blocks.
#if defined FASTATTN_TRIAL_FWD_SKIP && !defined FASTATTN_TRIAL_FWD_ACROSS_TILES
  static constexpr bool kSkips = kBounded && !kDense;
#else
  static constexpr bool kSkips = kBounded && !kPingPong && !kDense;
#endif
#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
  // Whether the first block of a tile may be multiplied with the first half of its keys. Other
  // instances, with dropout or of head dim 64, have too few registers.
  static constexpr bool kHalves = kVariant == Variant::kBounded && kHeadDim == 128;
#endif
  // Whether the load warp computes the block plans of all warpgroups. Other instances would spill
  // 12 to 24 bytes.
#ifdef FASTATTN_TRIAL_FWD_PLAN
  static constexpr bool kPlansAhead = kBounded && !kDense && !(kHeadDim == 256 && kScores) &&
                                      !(kHeadDim == 64 && kVariant == Variant::kDropout);
#else
  static constexpr bool kPlansAhead = false;
#endif
#ifdef FASTATTN_TRIAL_FWD_ACROSS_TILES
  // Not with one Q buffer, which is loaded too late. At head dim 64, three groups with sinks would
  // spill 16 bytes.
  static constexpr bool kAcrossTiles = !kDense && kQueryBuffers == 2 && !(kSinks && kGroups == 3);
#else
  static constexpr bool kAcrossTiles = false;
#endif
  static constexpr int kStages = 2;
  // Slots of what is loaded with K and read until P V is issued (block metadata, column keys). The
  // slot of K is released earlier and that of V is filled later, so neither could hold it.
  static constexpr int kMetadataSlots = 2 * kStages;
  // Slots of a warpgroup's ring for an additive mask, 64 rows x 128 bytes: at least a block.
  static constexpr int kBiasPieces = kHeadDim <= 192 ? 4 : 2;
  static constexpr int kTileRows = kGroups * kMmaRows;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  // Shared memory holds whole chunks of 64 columns.
  static constexpr int kColumns =
      (kHeadDim + sm90::kChunkColumns - 1) / sm90::kChunkColumns * sm90::kChunkColumns;

  using Softmax = std::conditional_t<kBias && !kScores, BiasedSoftmax, OnlineSoftmax>;
  using QueryTile = SharedTile<Element, kMmaRows, kColumns>;
  using KeyTile = SharedTile<Element, kBlock, kColumns>;

  static_assert(kBlock % kMmaK == 0, "P V takes 16 keys at a time");
  static_assert(kHeadDim % kMmaK == 0, "Q K^T takes 16 columns at a time");
  static_assert(kTileRows == forward_tile_rows(kDim, kVariant));
  static_assert(kBlock == forward_block(kDim, kVariant));
  static_assert(!kBias || !kStagesOutput, "a producer warp stores output or loads the mask");
  static_assert(!kBias ||
                kBiasPieces * sm90::kRowBytes >= kBlock * static_cast<int>(sizeof(float)));
  static_assert(kGroups <= 3, "the producer warpgroup has a store warp for each of them");
};

#ifdef FASTATTN_TRIAL_FWD_ONE_WARPGROUP
// For up to 64 queries: one consumer warpgroup, instead of a second one without rows. Both
// warpgroups of the launch have enough registers. Nothing but P V overlaps the softmax.
template <class Traits>
struct OneWarpgroup : Traits {
  static constexpr int kGroups = 1;
  static constexpr bool kPingPong = false, kPinsExponentials = true;
  static constexpr int kTileRows = kMmaRows, kThreads = 2 * kWarpgroup;
};
#endif

}  // namespace fastattn::attention
