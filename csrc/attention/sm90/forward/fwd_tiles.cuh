// The forward's arguments; a tile (64 rows of one head for each consumer warpgroup) and the blocks
// of keys that its rows may attend; the tile scheduler. All warp roles call the same functions, so
// that they agree without communication.
#pragma once

#include "attention/attention.h"
#include "attention/key_range.h"
#include "attention/sm90/common.cuh"
#include "attention/sm90/forward/fwd_config.cuh"
#include "attention/sm90/masks/mask_classes.h"
#include "attention/sm90/masks/score_modifications.cuh"
#include "sm90/tile/scheduler.h"
#include "sm90/tile/tile_queue.cuh"

namespace fastattn::attention {

using sm90::TileInfo;

struct ForwardArguments : LengthsAndBounds {
  CUtensorMap q, k, v, out_map;
  CUtensorMap bias;  // an additive mask as 16-bit columns, two per float
  TensorView out;
  float* lse;
  int heads, heads_per_kv;
  int queries, keys, value_dim;
  Dropout dropout;
  DenseMask mask;
  KeySplits splits;
  float scale_log2;  // positive
  bool negate;       // for a negative scale: negates Q
  sm90::TileOrder order;
  int tiles;
  sm90::TileSource source;
  Sinks sinks;
  DeviceScoreModifications modifications;
  Pages pages;
};

template <class Traits>
__device__ __forceinline__ Range tile_rows(const TileInfo& tile) {
  return {tile.row, smaller(tile.row + Traits::kTileRows, tile.queries)};
}

__device__ __forceinline__ Bounds bounds_of(const ForwardArguments& args, const TileInfo& tile) {
  return bounds_of(args, tile.queries, tile.keys);
}

// Packed sequences are rows of one batch entry.
__device__ __forceinline__ int batch_entry(const ForwardArguments& args, const TileInfo& tile) {
  return args.packing.query_offsets ? 0 : tile.batch;
}

template <class Traits>
__device__ __forceinline__ BlockPlan whole_plan(const ForwardArguments& args, const TileInfo& tile,
                                                int group) {
  const int row = tile.row + group * kMmaRows;
  const Range own_rows = {row, smaller(row + kMmaRows, tile.queries)};
  if constexpr (Traits::kBounded) {
    return plan_blocks(tile_rows<Traits>(tile), own_rows, bounds_of(args, tile), tile.keys,
                       Traits::kBlock, Traits::kSkips);
  } else {
    const Range keys = {0, is_empty(tile_rows<Traits>(tile)) ? 0 : tile.keys};
    const Range blocks = blocks_touching(keys, Traits::kBlock);
    return {blocks, blocks, blocks_inside(keys, Traits::kBlock)};
  }
}

// A warpgroup's blocks of a tile, or of one split of it.
template <class Traits>
__device__ __forceinline__ BlockPlan plan_for_group(const ForwardArguments& args,
                                                    const TileInfo& tile, int group) {
  const BlockPlan plan = whole_plan<Traits>(args, tile, group);
  if (Traits::kSplits && args.splits.count > 1) {
#ifdef FASTATTN_TRIAL_FWD_SPLITS
    return split_of(plan, tile.split, args.splits.blocks);
#else
    return split_of(plan, tile.split, args.splits.count);
#endif
  }
  return plan;
}

// Whether a warpgroup's 64 rows of a tile are stored through shared memory. TMA would also write
// rows of the next packed sequence.
template <class Traits>
__device__ __forceinline__ bool is_staged(const ForwardArguments& args, const TileInfo& tile,
                                          int group) {
  if (Traits::kSplits && args.splits.count > 1) {
    return false;  // splits are stored in fp32
  }
  return !args.packing.query_offsets || tile.row + (group + 1) * kMmaRows <= tile.queries;
}

// -- tile scheduler -------------------------------------------------------------------------------
constexpr TileInfo kNoTile = {-1, 0, 0, 0, 0, 0, 0};

template <class Traits>
__device__ __forceinline__ TileInfo packed_tile(const ForwardArguments& args,
                                                sm90::PackedTileScheduler& scheduler, int tile) {
  const Packing& packing = args.packing;
  sm90::advance_to(scheduler, packing.query_offsets, packing.sequences, args.heads,
                   Traits::kTileRows, tile, packing.order);
  if (scheduler.sequence >= packing.sequences) {
    return kNoTile;
  }
  const sm90::TilePlace place = sm90::tile_place(
      {scheduler.row_tiles, args.heads, args.order.swizzle_group}, tile - scheduler.first);
  const int sequence = sm90::sequence_at(packing.order, scheduler.sequence);
  const int* queries = packing.query_offsets + sequence;
  const int* keys = packing.key_offsets + sequence;
  return {place.row_tile * Traits::kTileRows,
          sequence,
          place.head,
          queries[1] - queries[0],
          keys[1] - keys[0],
          queries[0]};
}

template <class Traits>
__device__ __forceinline__ TileInfo unsplit_tile(const ForwardArguments& args,
                                                 sm90::PackedTileScheduler& scheduler, int tile) {
  if (args.packing.query_offsets) {
    return packed_tile<Traits>(args, scheduler, tile);
  }
  if (tile >= args.tiles) {
    return kNoTile;
  }
  const sm90::TilePlace place = sm90::tile_place(args.order, tile);
  const int batch = place.head / args.heads;
  return {place.row_tile * Traits::kTileRows,    batch,
          place.head - batch * args.heads,       computed_queries(args, batch, args.queries),
          computed_keys(args, batch, args.keys), 0};
}

// Tile number `number`; with split-KV, the splits of a tile have consecutive numbers.
template <class Traits>
__device__ __forceinline__ TileInfo tile_info(const ForwardArguments& args,
                                              sm90::PackedTileScheduler& scheduler, int number) {
  if (!Traits::kSplits || args.splits.count == 1) {
    return unsplit_tile<Traits>(args, scheduler, number);
  }
  const int tile = number / args.splits.count;
  TileInfo info = unsplit_tile<Traits>(args, scheduler, tile);
  info.split = number - tile * args.splits.count;
  return info;
}

// The loop over the blocks of keys of a tile, last one first.
template <class Traits>
struct BlockLoop {
  Range blocks;
  const BlockClass* classes;  // under a dense mask: of the tile's blocks, of which some are empty

  __device__ __forceinline__ bool none() const { return is_empty(blocks); }
  __device__ __forceinline__ int last() const { return blocks.end - 1; }
  __device__ __forceinline__ bool reaches(int n) const { return n >= blocks.begin; }
  // The block after n; under a dense mask -1 for none.
  __device__ __forceinline__ int after(int n) const {
    return Traits::kDense ? last_with_work(classes, n - 1, blocks.begin) : n - 1;
  }
};

template <class Traits>
__device__ __forceinline__ BlockLoop<Traits> blocks_of(const ForwardArguments& args,
                                                       const TileInfo& tile) {
  if (tile.row < 0) {
    return {{0, 0}, nullptr};
  }
  Range blocks = plan_for_group<Traits>(args, tile, 0).loaded;
  const BlockClass* classes = nullptr;
  if constexpr (Traits::kDense) {
    const MaskLayout& layout = args.mask.layout;
    classes = args.mask.classes + classes_at(layout, class_head(layout, tile.batch, tile.head),
                                             tile.row / Traits::kTileRows);
    blocks.end = last_with_work(classes, blocks.end - 1, blocks.begin) + 1;
  }
  return {blocks, classes};
}

}  // namespace fastattn::attention
