// The gradient of an additive mask: dS, summed over the dimensions that the mask is broadcast over.
// A thread block owns a tile of the gradient. It recomputes scores, weights and dS for every pair
// of blocks that the tile sums over, in a fixed order, so that results are bitwise reproducible.
// Pairs that are not allowed are left out one by one, so that NaN in dead rows and keys does not
// spread. Where tiles are few, thread blocks split the sum of a tile, and another kernel adds the
// splits.
//
// delta of the first launch contains the rounding error of the output. It shows in gradients more
// precise than the output, and in sums over all keys, which are zero in theory. For these, the same
// kernel first recomputes delta as the sum over keys of P dP.
#pragma once

#include "attention/key_range.h"
#include "attention/sm90/backward/config.cuh"
#include "attention/sm90/launch.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "common/dropout.h"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;
using sm90::AccumulatorThread;
using sm90::Barrier;
using sm90::RingPosition;
using sm90::Slot;

__device__ __forceinline__ void store_element(const MaskGradient& dmask, int64_t at, float value) {
  switch (dmask.type) {
    case MaskType::kBFloat16:
      static_cast<__nv_bfloat16*>(dmask.data)[at] = __nv_bfloat16(value);
      break;
    case MaskType::kFloat16:
      static_cast<__half*>(dmask.data)[at] = __half(value);
      break;
    default:
      static_cast<float*>(dmask.data)[at] = value;
  }
}

template <class ElementType, int kDim, bool kDrops>
struct DmaskTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kDim;
  static constexpr bool kDropout = kDrops;
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

template <class Traits>
struct DmaskStorage {
  // The sums reuse the tiles' memory after the last products.
  union {
    DmaskTiles<Traits> tiles[Traits::kStages];
    DmaskSum<Traits> sum;
  };
  // The mask for the tile: 64 keys in 16 bits, or 32 keys in 32 bits and the other 32.
  alignas(sm90::kTileAlignment) char bias[2][Traits::kRows * sm90::kRowBytes];
  // Full when TMA has written the four tiles, empty when one thread of each consumer warpgroup has
  // waited for the products that read them.
  Slot slots[Traits::kStages];
  // Full when TMA has written the mask, empty when all warps have read it.
  Slot bias_slot;
};

struct DmaskArguments : LengthsAndBounds {
  CUtensorMap q_map, k_map, v_map, dout_map;
  CUtensorMap bias_map;  // as 16-bit columns, two per float
  bool bias_by_tma;      // otherwise consumers load it
  // Natural logarithms. Both are padded: the rows of a head are `lse_delta_rows` long.
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

// One thread.
template <class Traits>
__device__ __forceinline__ void load_item_bias(DmaskStorage<Traits>& shared,
                                               const DmaskArguments& args, const DmaskItem& item) {
  const MaskLayout& layout = args.mask.layout;
  const bool one_row = has_one_row(args.mask);
  const int halves = is_wide(args.mask) ? 2 : 1;
  Barrier& full = shared.bias_slot.full;
  full.arrive_expect_bytes(halves * (one_row ? 1 : Traits::kRows) * sm90::kRowBytes);
#pragma unroll 1
  for (int half = 0; half < halves; ++half) {
    ptx::cp_async_bulk_tensor_load(ptx::shared_address(shared.bias[half]), &args.bias_map,
                                   full.address(), item.key * halves + half * sm90::kChunkColumns,
                                   one_row ? 0 : item.row, layout.heads > 1 ? item.head : 0,
                                   layout.batches > 1 ? item.batch : 0, ptx::kEvictFirst);
  }
}

// One thread.
template <class Traits>
__device__ __forceinline__ void load_items(DmaskStorage<Traits>& shared, const DmaskArguments& args,
                                           const DmaskLoop& loop, Range items) {
  RingPosition<Traits::kStages> stage;
  RingPosition<1> bias;
#pragma unroll 1
  for (int number = items.begin; number < items.end; ++number) {
    const DmaskItem item = item_of<Traits>(loop, number);
    if (!has_pairs<Traits>(args, item)) {
      continue;
    }
    Slot& slot = shared.slots[stage.index()];
    slot.empty.wait(stage.phase() ^ 1);
    DmaskTiles<Traits>& tiles = shared.tiles[stage.index()];
    const int kv_head = item.head / args.heads_per_kv;
    tiles.q.load(&args.q_map, slot.full, item.row, item.head, item.batch, ptx::kEvictLast);
    tiles.k.load(&args.k_map, slot.full, item.key, kv_head, item.batch, ptx::kEvictLast);
    tiles.dout.load(&args.dout_map, slot.full, item.row, item.head, item.batch, ptx::kEvictLast);
    tiles.v.load(&args.v_map, slot.full, item.key, kv_head, item.batch, ptx::kEvictLast);
    stage.advance();
    if (args.bias_by_tma) {
      shared.bias_slot.empty.wait(bias.phase() ^ 1);
      load_item_bias<Traits>(shared, args, item);
      bias.advance();
    }
  }
}

// One warpgroup: 64 rows.
template <class Traits>
struct DmaskConsumer {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kCount = kKeys / 2;
  static constexpr int kWords = kKeys / sm90::kMmaK * 2;
  using ScoreMma = ptx::Wgmma<kKeys>;

  DmaskStorage<Traits>& shared;
  const DmaskArguments& args;
  const int group;
  const AccumulatorThread thread;
  RingPosition<Traits::kStages> stage;
  RingPosition<1> bias;
  float rSum[kCount];

  __device__ __forceinline__ DmaskConsumer(DmaskStorage<Traits>& storage,
                                           const DmaskArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp} {}

  __device__ __forceinline__ void run(const DmaskLoop& loop, Range items) {
#pragma unroll
    for (float& sum : rSum) {
      sum = 0.0f;
    }
#pragma unroll 1
    for (int number = items.begin; number < items.end; ++number) {
      const DmaskItem item = item_of<Traits>(loop, number);
      if (has_pairs<Traits>(args, item)) {
        add_item(item);
      }
    }
    write_sum(loop);
  }

  __device__ __forceinline__ void add_item(const DmaskItem& item) {
    float rS[kCount], rDp[kCount];
    DmaskTiles<Traits>& tiles = shared.tiles[stage.index()];
    shared.slots[stage.index()].full.wait(stage.phase());
    issue_product(rS, tiles.q, tiles.k);
    issue_product(rDp, tiles.dout, tiles.v);
    if (!args.bias_by_tma) {
      is_wide(args.mask) ? fetch_bias<uint32_t>(item) : fetch_bias<uint16_t>(item);
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin(rS);
    ptx::pin(rDp);
    if (threadIdx.x % kWarpgroup == 0) {
      shared.slots[stage.index()].empty.arrive();
    }
    stage.advance();
    if (args.bias_by_tma) {
      shared.bias_slot.full.wait(bias.phase());
    }
    switch (args.mask.type) {
      case MaskType::kBFloat16:
        add_gradients<__nv_bfloat16>(item, rS, rDp);
        break;
      case MaskType::kFloat16:
        add_gradients<__half>(item, rS, rDp);
        break;
      default:
        add_gradients<float>(item, rS, rDp);
    }
    __syncwarp();
    if (args.bias_by_tma && thread.lane == 0) {
      shared.bias_slot.empty.arrive();
    }
    bias.advance();
  }

  // For a mask that TMA cannot read: each warp loads its 16 rows while the products run.
  template <class Word>
  __device__ __forceinline__ void fetch_bias(const DmaskItem& item) {
    constexpr int kPieceKeys = sm90::kPieceBytes / sizeof(Word);
    constexpr int kRowKeys = sm90::kRowBytes / sizeof(Word);
    const DenseMask& mask = args.mask;
    const int own_row = group * kMmaRows + thread.warp * sm90::kWarpRows;
    const Word* from = static_cast<const Word*>(mask.data) + item.batch * mask.batch_stride +
                       item.head * mask.head_stride;
#pragma unroll 8
    for (int i = thread.lane; i < sm90::kWarpRows * kKeys; i += kWarp) {
      const int line = own_row + i / kKeys, key = i % kKeys;
      // Rows and keys past the end read the last one.
      const Word word = from[smaller(item.row + line, args.queries - 1) * mask.row_stride +
                             smaller(item.key + key, args.keys - 1) * mask.column_stride];
      char* to = shared.bias[key / kRowKeys] +
                 sm90::swizzled_offset(line, key % kRowKeys / kPieceKeys) +
                 key % kPieceKeys * sizeof(Word);
      *reinterpret_cast<Word*>(to) = word;
    }
    __syncwarp();
  }

  // 64 x kKeys: Q K^T or dO V^T.
  __device__ __forceinline__ void issue_product(float (&acc)[kCount],
                                                const typename Traits::RowTile& rows,
                                                const typename Traits::KeyTile& keys) {
    const uint64_t a =
        sm90::descriptor_k_major(rows.address() + group * kMmaRows * sm90::kRowBytes);
    const uint64_t b = sm90::descriptor_k_major(keys.address());
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          acc, sm90::descriptor_at(a, sm90::k_major_step(step, Traits::kRows)),
          sm90::descriptor_at(b, sm90::k_major_step(step, kKeys)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  template <class MaskElement>
  __device__ __forceinline__ void add_gradients(const DmaskItem& item, const float (&s)[kCount],
                                                const float (&dp)[kCount]) {
    const int queries = computed_queries(args, item.batch, args.queries);
    const int keys = computed_keys(args, item.batch, args.keys);
    const Bounds bounds = bounds_of(args, queries, keys);
    const int first_key = item.key + thread.first_column();
    const int64_t head = (int64_t{1} * item.batch * args.heads + item.head) * args.lse_delta_rows;
    constexpr int kOctetBytes = kOctet * sizeof(MaskElement);
    const bool one_row = args.bias_by_tma && has_one_row(args.mask);
    const uint32_t byte = thread.first_column() * sizeof(MaskElement);
    float lse[2], delta[2];
    Range allowed[2];
    uint32_t first[2];  // of the thread's bytes in its rows of the mask
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = item.row + group * kMmaRows + thread.upper_row() + half * sm90::kRowStep;
      // Rows and keys past the end read the last one.
      const int existing = smaller(row, args.queries - 1);
      lse[half] = args.lse[head + existing];
      delta[half] = args.delta ? args.delta[head + existing] : 0.0f;
      allowed[half] = row < queries ? keys_of_row(row, bounds, keys) : Range{0, 0};
      const uint32_t line = one_row ? 0 : row - item.row;
      first[half] =
          sm90::swizzled_offset(line, byte / sm90::kPieceBytes) + byte % sm90::kPieceBytes;
    }
    uint32_t words[kWords];
    draw_words(item, words);
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const int octet = i / 2, half = i % 2;
      const int place = octet * kOctetBytes;
      // The swizzle is an xor, and so is the offset of another octet.
      const char* from =
          shared.bias[place / sm90::kRowBytes] + (first[half] ^ place % sm90::kRowBytes);
      const float2 pair = pair_of(reinterpret_cast<const MaskElement*>(from));
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int key = first_key + octet * kOctet + j;
        const int at = octet * kOctetRegisters + 2 * half + j;
        const float added = j ? pair.y : pair.x;
        const float p = ptx::ex2((fmaf(s[at], args.scale, added) - lse[half]) * kLog2e);
        const bool is_allowed = contains(allowed[half], key) && !(added <= kLowest<MaskElement>);
        float kept = dp[at];
        if constexpr (Traits::kDropout) {
          kept *= is_kept(words[octet / 2 * 2 + j], 2 * half + octet % 2) ? args.dropout.keep_scale
                                                                          : 0.0f;
        }
        rSum[at] += is_allowed ? p * (kept - delta[half]) : 0.0f;
      }
    }
  }

  // Dropout's random words for this thread's scores, see dropout_sm90.cuh: two for every 16 keys.
  __device__ __forceinline__ void draw_words(const DmaskItem& item,
                                             uint32_t (&words)[kWords]) const {
    if constexpr (Traits::kDropout) {
      const int row = smaller(item.row + group * kMmaRows + thread.upper_row(), args.queries - 1);
      const int64_t head = int64_t{1} * item.batch * args.heads + item.head;
      const uint32_t row_key =
          args.row_keys[head * (args.lse_delta_rows / 2) + dropout::lattice_unit(row)];
      const uint32_t stream =
          dropout::stream_key(dropout::kColumnTag, *args.dropout.seed, args.dropout.stream);
      const uint32_t unit = dropout::lattice_unit(item.key) + thread.first_column();
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = dropout::word(
            row_key, dropout::absorb(stream, unit + dropout::units(i / 2 * sm90::kMmaK) + i % 2));
      }
    }
  }
  // If the threshold drops everything, the keep scale is 0.
  __device__ __forceinline__ bool is_kept(uint32_t word, int byte) const {
    return word << (24 - 8 * byte) >= static_cast<uint32_t>(args.dropout.threshold) << 24;
  }

  // Through shared memory, to sum over rows and keys and to coalesce the stores.
  __device__ __forceinline__ void write_sum(const DmaskLoop& loop) {
    constexpr int kBarrier = 1, kConsumers = Traits::kGroups * kWarpgroup;
    // Waits until both warpgroups' products are complete.
    ptx::bar_sync(kBarrier, kConsumers);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = group * kMmaRows + thread.upper_row() + i / 2 % 2 * sm90::kRowStep;
      shared.sum[row][i / 4 * kOctet + thread.first_column() + i % 2] = rSum[i];
    }
    ptx::bar_sync(kBarrier, kConsumers);
    const MaskGradient& dmask = args.dmask;
    const bool sums_rows = dmask.sizes[2] == 1, sums_keys = dmask.sizes[3] == 1;
    const int rows =
        sums_rows ? 1 : smaller(dmask.sizes[2] - loop.row_tile * Traits::kRows, Traits::kRows);
    const int keys = sums_keys ? 1 : smaller(dmask.sizes[3] - loop.key_tile * kKeys, kKeys);
#pragma unroll 1
    for (int i = threadIdx.x - kWarpgroup; i < rows * kKeys; i += kConsumers) {
      const int row = i / kKeys, key = i % kKeys;
      if (key >= keys) {
        continue;
      }
      float sum = 0.0f;
#pragma unroll 1
      for (int j = row; j < (sums_rows ? Traits::kRows : row + 1); ++j) {
#pragma unroll 1
        for (int n = key; n < (sums_keys ? kKeys : key + 1); ++n) {
          sum += shared.sum[j][n];
        }
      }
      const DmaskItem at = {loop.batch, loop.head, loop.row_tile * Traits::kRows + row,
                            loop.key_tile * kKeys + key};
      if (args.dlse) {
        const int64_t head = int64_t{1} * at.batch * args.heads + at.head;
        sum -= args.dlse[head * args.queries + at.row];
      }
      store(dmask, blockIdx.x % dmask.splits, at, sum);
    }
  }

  // Stores into the result, or into the split's partial gradient.
  static __device__ __forceinline__ void store(const MaskGradient& dmask, int split,
                                               const DmaskItem& at, float value) {
    const int* sizes = dmask.sizes;
    if (dmask.splits > 1) {
      const int64_t head = (int64_t{split} * sizes[0] + at.batch) * sizes[1] + at.head;
      dmask.partial[(head * sizes[2] + at.row) * sizes[3] + at.key] = value;
      return;
    }
    store_element(dmask,
                  at.batch * dmask.strides[0] + at.head * dmask.strides[1] +
                      at.row * dmask.strides[2] + at.key * dmask.strides[3],
                  value);
  }
};

constexpr int kAddSplitsThreads = 256;

// A thread: an element of the gradient.
template <class Traits>
__global__ void __launch_bounds__(kAddSplitsThreads)
    add_dmask_splits_kernel(const __grid_constant__ MaskGradient dmask) {
  const int* sizes = dmask.sizes;
  const int64_t count = int64_t{1} * sizes[0] * sizes[1] * sizes[2] * sizes[3];
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kAddSplitsThreads + threadIdx.x;
  if (number >= count) {
    return;
  }
  float sum = 0.0f;
  for (int split = 0; split < dmask.splits; ++split) {
    sum += dmask.partial[split * count + number];
  }
  int64_t rest = number, at = 0;
  for (int dim = 3; dim >= 0; --dim) {
    at += rest % sizes[dim] * dmask.strides[dim];
    rest /= sizes[dim];
  }
  store_element(dmask, at, sum);
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_bwd_dmask_kernel(const __grid_constant__ DmaskArguments args) {
  constexpr int kTileLoads = 4;
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<DmaskStorage<Traits>*>(shared_memory);
  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    for (Slot& slot : shared.slots) {
      slot.full.init(kTileLoads);
      slot.empty.init(Traits::kGroups);
    }
    shared.bias_slot.full.init(1);
    shared.bias_slot.empty.init(Traits::kGroups * kWarpsPerGroup);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const DmaskLoop loop = loop_of<Traits>(args, blockIdx.x / args.dmask.splits);
  const Range items = items_of<Traits>(args, loop);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (warp == 0 && ptx::elect_one()) {
      load_items<Traits>(shared, args, loop, items);
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
    DmaskConsumer<Traits>(shared, args, warpgroup - 1).run(loop, items);
  }
}

}  // namespace fastattn::attention
