// The backward's blocks, their division among warpgroups, and the constants derived from them. Read
// this file first; the overview of the kernels is in attention_bwd_sm90.cuh.
#pragma once

#include "attention/attention.h"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/shared_tile.cuh"

namespace fastattn::attention {

using sm90::kMmaK;
using sm90::kMmaRows;
using sm90::kWarp;
using sm90::kWarpgroup;
using sm90::SharedTile;

// How a step is divided among consumer warpgroups.
enum class Split {
  kKeysAndRows,     // scores, dK and dV by keys, dQ by rows
  kKeysAndColumns,  // scores, dK and dV by keys, dQ^T = K^T dS^T by columns
  kRowsAndColumns,  // scores by rows, dK, dV and dQ^T by columns
};

// TFLOP/s below: of the whole backward on an H200, bf16, 2 sequences of 8192 tokens, 2048 / head
// dim heads, without masks.
struct BackwardConfig {
  int groups;  // consumer warpgroups
  int rows;    // queries of a block
  int stages;  // blocks of Q in shared memory
  Split split;
  int producer_registers, consumer_registers;
};

constexpr BackwardConfig backward_config(int head_dim, Variant variant, bool is_short) {
  switch (head_dim) {
    case 64:  // 499 TFLOP/s; with 232 registers lse could not be read early
#ifdef FASTATTN_TRIAL_BWD_REGISTERS
      if (variant == Variant::kBounded) {  // with 232 registers others would spill up to 28 bytes
        return {2, 128, 2, Split::kKeysAndRows, 40, 232};
      }
#endif
      return {2, 128, 2, Split::kKeysAndRows, 24, 240};
    case 128:
      if (is_short) {  // with score modifications, 80 rows would spill up to 76 bytes
        return {2, 64, 2, Split::kKeysAndColumns, 24, 240};
      }
      // 597 TFLOP/s; 232 registers would serialise wgmma
      return {2, 80, 2, Split::kKeysAndColumns, 24, 240};
    // 404 and 398 TFLOP/s: as much as fits. With one Q, a third of the warps' samples in a profile
    // were waits for the next. An additive mask is loaded into P and dS, which must not be in use.
    case 192:
      return {3, 96, is_additive(variant) ? 1 : 2, Split::kRowsAndColumns, 32, 160};
    case 256:
      return {2, 64, is_additive(variant) ? 1 : 2, Split::kRowsAndColumns, 40, 232};
  }
  return {};
}

template <class ElementType, int kDim, Variant kVariant, bool kShort = false>
struct BackwardTraits {
  using Element = ElementType;
  static constexpr bool kChoosesDropout = modifies_scores(kVariant);
  static constexpr bool kDropout = has_dropout(kVariant) || kChoosesDropout;
  static constexpr bool kBias = is_additive(kVariant);
  static constexpr bool kDense = is_dense(kVariant);
  static constexpr bool kScores = modifies_scores(kVariant);
  static constexpr BackwardConfig kConfig = backward_config(kDim, kVariant, kScores || kShort);
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
  // With columns divided among warpgroups: whole chunks of them.
  static constexpr int kGroupColumns = kColumns / kGroups;
  static constexpr int kGroupChunks = kGroupColumns / sm90::kChunkColumns;
  // Rows of a warpgroup's scores.
  static constexpr int kScoreRows = kSplitsKeys ? kRows : kRows / kGroups;
  // Buffers of dO and of dS.
  static constexpr int kDoutStages = kSplitsKeys ? kStages : 1;
  // Floats that one warpgroup adds to dQ in a step, and how many pieces they are written in. With a
  // buffer of one of two pieces, a second block of Q fits into shared memory.
  static constexpr int kChunkFloats = kRows * kColumns / kGroups;
  static constexpr int kDqPieces = kStages > kDoutStages ? 2 : 1;
  static constexpr int kPieceFloats = kChunkFloats / kDqPieces;

#ifdef FASTATTN_TRIAL_BWD_PERSISTENT
  // An additive mask with dropout at head dim 128 would spill 44 bytes.
  static constexpr bool kPersistent = !(kHeadDim == 128 && kVariant == Variant::kBiasDropout);
#else
  static constexpr bool kPersistent = false;
#endif
  // Blocks of keys of a thread block at a time: the next one is loaded while dK and dV are stored.
  static constexpr int kWorks = kPersistent ? 2 : 1;

  using RowTile = SharedTile<Element, kRows, kColumns>;
  using KeyTile = SharedTile<Element, kKeys, kColumns>;
  using ScoreTile = SharedTile<Element, kRows, kKeys>;

  static_assert(kRows == backward_rows(kDim, kScores || kShort) && kKeys == backward_keys(kDim));
  static_assert(kRows % kMmaK == 0, "dV and dK take 16 rows at a time");
  static_assert(kHeadDim % kMmaK == 0, "K Q^T and V dO^T take 16 columns at a time");
  static_assert(kScoreRows % kMmaK == 0, "matrices are stored 16 rows at a time");
  static_assert(kTransposesDq ? kGroupColumns % sm90::kChunkColumns == 0
                              : kRows == kGroups * kMmaRows,
                "a warpgroup computes whole chunks of columns or 64 rows of dQ");
  static_assert(kSplitsKeys || kHeadDim == kColumns, "columns divide evenly among warpgroups");
  static_assert(!kSplitsKeys || kStages == 2, "there are two buffers of dS");
  static_assert(!kTransposesDq || !kSplitsKeys || kGroupChunks == 1);
  static_assert(kGroups <= 3, "the producer warpgroup has a dQ warp for each of them");
};

constexpr int kWarpsPerGroup = kWarpgroup / kWarp;

}  // namespace fastattn::attention
