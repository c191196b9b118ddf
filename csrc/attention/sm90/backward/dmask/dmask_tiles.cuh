// The arguments of the kernel of an additive mask's gradient, its shared memory and barriers; what
// a thread block computes: a tile of the gradient, or a split of it, as a sum of items. All warp
// roles call the same functions. See dmask.cuh.
#pragma once

#include "attention/key_range.h"
#include "attention/sm90/backward/bwd_config.cuh"
#include "attention/sm90/common.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "attention/sm90/masks/score_modifications.cuh"
#include "common/dropout.h"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;
using sm90::Barrier;
using sm90::RingPosition;
using sm90::Slot;

template <class ElementType, int kDim, Variant kVariant>
struct DmaskTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kChoosesDropout = modifies_scores(kVariant);
  static constexpr bool kDropout = has_dropout(kVariant) || kChoosesDropout;
  static constexpr bool kScores = modifies_scores(kVariant);
  static constexpr int kGroups = 2;
  static constexpr int kRows = kDmaskRows;
  static constexpr int kKeys = kDmaskKeys;
  static constexpr int kStages = kDim <= 128 ? 2 : 1;  // what fits
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static constexpr int kColumns = ceil_div(kDim, sm90::kChunkColumns) * sm90::kChunkColumns;

  using RowTile = SharedTile<Element, kRows, kColumns>;
  using KeyTile = SharedTile<Element, kKeys, kColumns>;
  static_assert(kRows == kGroups * kMmaRows);
};

template <class Traits>
struct DmaskTiles {
  typename Traits::RowTile q, dout;
  typename Traits::KeyTile k, v;
};

// Rows are padded by four floats: the threads of a warp write to different banks.
template <class Traits>
using DmaskSum = float[Traits::kRows][Traits::kKeys + 4];

// mbarriers, as in bwd_storage.cuh.
//
//   name             who arrives                                      count parity  who waits
//   slots[s].full    load warp, with the bytes of each of four tiles      4      0  consumers
//   slots[s].empty   every consumer, after its products             kGroups      1  load warp
//   bias_slot.full   load warp, with the bytes of the mask                1      0  consumers
//   bias_slot.empty  warps of consumers, after their reads        4 kGroups      1  load warp
//
// Named barrier kDmaskSumBarrier: all consumers, when the last products are complete and when the
// sums have been stored.
constexpr int kDmaskSumBarrier = 1;

template <class Traits>
struct DmaskStorage {
  // The sums reuse the tiles' memory after the last products.
  union {
    DmaskTiles<Traits> tiles[Traits::kStages];
    DmaskSum<Traits> sum;
  };
  // The mask for the tile: 64 keys in 16 bits, or 32 keys in 32 bits and the other 32.
  alignas(sm90::kTileAlignment) char bias[2][Traits::kRows * sm90::kRowBytes];
  Slot slots[Traits::kStages];
  Slot bias_slot;
};

template <class Traits>
__device__ __forceinline__ void init_dmask_barriers(DmaskStorage<Traits>& shared) {
  constexpr int kTileLoads = 4;
  for (Slot& slot : shared.slots) {
    slot.full.init(kTileLoads);
    slot.empty.init(Traits::kGroups);
  }
  shared.bias_slot.full.init(1);
  shared.bias_slot.empty.init(Traits::kGroups * kWarpsPerGroup);
  ptx::fence_mbarrier_init();
}

struct DmaskArguments : LengthsAndBounds {
  CUtensorMap q_map, k_map, v_map, dout_map;
  CUtensorMap bias_map;  // as 16-bit columns, two per float
  bool bias_by_tma;      // otherwise consumers load it
  // Natural logarithms, in base 2 with score modifications. Both are padded: the rows of a head are
  // `lse_delta_rows` long.
  const float *lse, *delta;  // delta may be null: 0
  int64_t lse_delta_rows;
  const float* dlse;         // [batch, heads, queries], subtracted from the result; may be null
  const uint32_t* row_keys;  // dropout's, a word for every two rows of lse and delta
  int batch, heads, heads_per_kv;
  int queries, keys;
  Dropout dropout;
  DenseMask mask;
  MaskGradient dmask;
  float scale;
  float scale_log2;
  DeviceScoreModifications modifications;
};

// A pair of blocks that a tile sums over: in dimensions that are not summed, the tile's own.
struct DmaskItem {
  int batch, head, row, key;  // row and key: the first of the block
};

struct DmaskLoop {
  int batches, heads, row_tiles, key_tiles;  // that one tile sums over
  int batch, head, row_tile, key_tile;       // the tile's position, 0 where summed
};

template <class Traits>
__device__ __forceinline__ DmaskLoop loop_of(const DmaskArguments& args, int tile) {
  const int* sizes = args.dmask.sizes;
  const int row_tiles = ceil_div(args.queries, Traits::kRows);
  const int key_tiles = ceil_div(args.keys, Traits::kKeys);
  const int own_rows = ceil_div(sizes[2], Traits::kRows),
            own_keys = ceil_div(sizes[3], Traits::kKeys);
  DmaskLoop loop;
  loop.key_tile = tile % own_keys;
  tile /= own_keys;
  loop.row_tile = tile % own_rows;
  tile /= own_rows;
  loop.head = tile % sizes[1];
  loop.batch = tile / sizes[1];
  loop.batches = sizes[0] == 1 ? args.batch : 1;
  loop.heads = sizes[1] == 1 ? args.heads : 1;
  loop.row_tiles = sizes[2] == 1 ? row_tiles : 1;
  loop.key_tiles = sizes[3] == 1 ? key_tiles : 1;
  return loop;
}

template <class Traits>
__device__ __forceinline__ DmaskItem item_of(const DmaskLoop& loop, int number) {
  DmaskItem item;
  item.key = (loop.key_tile + number % loop.key_tiles) * Traits::kKeys;
  number /= loop.key_tiles;
  item.row = (loop.row_tile + number % loop.row_tiles) * Traits::kRows;
  number /= loop.row_tiles;
  item.head = loop.head + number % loop.heads;
  item.batch = loop.batch + number / loop.heads;
  return item;
}

// The items of a thread block: its split of the tile's.
template <class Traits>
__device__ __forceinline__ Range items_of(const DmaskArguments& args, const DmaskLoop& loop) {
  const int64_t all = int64_t{1} * loop.batches * loop.heads * loop.row_tiles * loop.key_tiles;
  const int split = blockIdx.x % args.dmask.splits;
  return {static_cast<int>(all * split / args.dmask.splits),
          static_cast<int>(all * (split + 1) / args.dmask.splits)};
}

// Whether lengths and bounds allow any pair of an item.
template <class Traits>
__device__ __forceinline__ bool has_pairs(const DmaskArguments& args, const DmaskItem& item) {
  const int queries = computed_queries(args, item.batch, args.queries);
  const int keys = computed_keys(args, item.batch, args.keys);
  const Bounds bounds = bounds_of(args, queries, keys);
  const Range rows = {item.row, smaller(item.row + Traits::kRows, queries)};
  return !is_empty(overlap(keys_of_some(rows, bounds, keys), {item.key, item.key + Traits::kKeys}));
}

}  // namespace fastattn::attention
