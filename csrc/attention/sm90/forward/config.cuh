// The forward's tile shapes and what follows from them: the first file to read of its kernel, whose
// overview is in attention_fwd_sm90.cuh.
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

// Measured on an H200 with bf16, 16384 tokens, 2048 / head dim heads, against its neighbours.
struct ForwardConfig {
  int groups;          // consumer warpgroups
  int block;           // keys of a block
  int query_buffers;   // 2: the next tile's Q comes while this one is computed
  bool stages_output;  // output through shared memory and TMA, otherwise from registers
  bool ping_pong;      // warpgroups issue their products in order
};

constexpr ForwardConfig forward_config(int head_dim, Variant variant) {
  switch (head_dim) {
    case 64:
      if (is_additive(variant)) {  // three groups have too few registers for it
        return {2, 128, 2, false, true};
      }
      // 2 groups with 192-key blocks are 11 % slower; a third K/V stage gains nothing
      return {3, 128, 2, true, false};
    case 96:  // as 128, whose shared memory it needs
    case 128:
      if (is_additive(variant)) {  // the mask's pieces take the room
        return {2, 128, 1, false, true};
      }
      // turns: +4 % up to 1k keys; 176-key blocks: -4 % at 4k keys, +4 % at 16k
      return {2, 128, 2, true, true};
    case 192:  // what fits beside Q: 2 x 2 blocks of 112 keys, no output stage
      return {2, is_additive(variant) ? 64 : 112, 1, false, false};
    case 256:  // 64-key blocks are 3 % slower
      return {2, is_additive(variant) ? 64 : 80, 1, false, false};
  }
  return {};
}

// Registers a thread has at launch are redistributed: 504 or 512 for the threads that share a
// register lane, one of each warpgroup. 40 + 2 x 232 and 32 + 3 x 160 fit; a sum above what the
// launch gave never returns from setmaxnreg.
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
  static constexpr bool kBias = is_additive(kVariant);
  // Dropout and dense masks belong to training, which has tiles enough.
  static constexpr bool kSplits = kVariant == Variant::kFull || kVariant == Variant::kBounded;
  static constexpr bool kDense = is_dense(kVariant);
  // Blocks that only a dense mask changes are spared lengths and bounds; this instance has no
  // register left for the choice.
  static constexpr bool kChoosesMasks = !kBias || kHeadDim < 256;
  static constexpr int kGroups = kConfig.groups;
  static constexpr int kBlock = kConfig.block;
  static constexpr int kQueryBuffers = kConfig.query_buffers;
  static constexpr bool kStagesOutput = kConfig.stages_output;
  static constexpr bool kPingPong = kConfig.ping_pong;
  // Under a bounds a warpgroup passes over blocks that only the others need; with turns all do the
  // same number of blocks. Which blocks of a dense mask come is for all of them to compute.
  static constexpr bool kSkips = kBounded && !kPingPong && !kDense;
  static constexpr int kStages = 2;
  // What comes with a block's keys and is read until its values are asked for: their slot is free
  // again earlier, that of the values is filled later.
  static constexpr int kMetadataSlots = 2 * kStages;
  // Pieces of an additive mask, 64 rows x 128 bytes, that a warpgroup has room for: at least a
  // block of floats.
  static constexpr int kBiasPieces = kHeadDim <= 192 ? 4 : 2;
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
  static_assert(kTileRows == forward_tile_rows(kDim, kVariant));
  static_assert(kBlock == forward_block(kDim, kVariant));
  static_assert(!kBias || !kStagesOutput, "a producer warp has one thing to do");
  static_assert(!kBias ||
                kBiasPieces * sm90::kRowBytes >= kBlock * static_cast<int>(sizeof(float)));
  static_assert(kGroups <= 3, "the producer warpgroup has a store warp for each of them");
};

}  // namespace fastattn::attention
