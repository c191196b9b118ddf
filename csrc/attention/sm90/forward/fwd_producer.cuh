// The producer warps: one fetches tiles from the scheduler and loads Q, K and V; one for each
// consumer warpgroup stores output tiles or loads an additive mask. One thread of each warp works.
#pragma once

#include "attention/sm90/forward/fwd_storage.cuh"
#include "attention/sm90/forward/fwd_tiles.cuh"
#include "attention/sm90/forward/key_source.cuh"
#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/grid.cuh"
#include "sm90/ptx/tma.cuh"

namespace fastattn::attention {

using sm90::RingPosition;

// -- load warp ------------------------------------------------------------------------------------
template <class Traits>
struct LoadWarp {
  SharedStorage<Traits>& shared;
  const ForwardArguments& args;
  RingPosition<Traits::kQueryBuffers> query = {};
  RingPosition<Traits::kStages> stage = {};

  __device__ __forceinline__ void run() {
#ifdef FASTATTN_TRIAL_FWD_COUNTER
    ptx::griddepcontrol_wait();  // for the counter and column keys
#endif
    TileQueue::Position position;
    sm90::PackedTileScheduler scheduler = {};
    int number = blockIdx.x;
#pragma unroll 1
    while (true) {
      TileInfo tile = tile_info<Traits>(args, scheduler, number);
      const BlockLoop<Traits> blocks = blocks_of<Traits>(args, tile);
#ifdef FASTATTN_TRIAL_FWD_SPLITS
      if (Traits::kSplits && args.splits.count > 1 && tile.row >= 0 && blocks.none()) {
        clear_split(tile);
        number = args.source.drawn(args.source.draw(number));
        continue;
      }
#endif
      if (Traits::kDense && blocks.none()) {
        tile.queries = 0;  // tells the consumers that no row has a key
      }
      write_plans(position, tile);
      shared.queue.put(position, tile);
      if (tile.row < 0) {
        break;
      }
      // Overlaps the fetch of the next tile number with the loads of this tile.
      number = args.source.draw(number);
      load_tile(tile, blocks);
      number = args.source.drawn(number);
    }
    if (Traits::kSplits && args.splits.count > 1) {
      ptx::griddepcontrol_launch_dependents();  // combine_splits waits for the forward's end
    }
  }

  __device__ __forceinline__ void load_tile(const TileInfo& tile, const BlockLoop<Traits>& blocks) {
    const int batch = batch_entry(args, tile);
    KeySource<Traits> source(args, tile, batch);
    // The only Q buffer may still be in use: K of the first block is loaded before Q.
    constexpr bool kKeyFirst = Traits::kQueryBuffers == 1;
    if (!kKeyFirst && !blocks.none()) {
      load_query(tile, batch);
    }
    source.begin(blocks.last());
    int next = 0;
#pragma unroll 1
    for (int n = blocks.last(); blocks.reaches(n); n = next) {
      next = blocks.after(n);
      const int key = source.first_of(n);
      Slot& k_slot = shared.k_slots[stage.index()];
      k_slot.empty.wait(stage.phase() ^ 1);
      write_metadata(blocks, n, next);
      load_column_keys(k_slot.full, n);
      source.load(shared.k[stage.index()], &args.k, k_slot.full, key, key);
      if (kKeyFirst && n == blocks.last()) {
        load_query(tile, batch);
      }
      Slot& v_slot = shared.v_slots[stage.index()];
      v_slot.empty.wait(stage.phase() ^ 1);
      source.load(shared.v[stage.index()], &args.v, v_slot.full, key, source.first_of(next));
      stage.advance();
    }
  }

#ifdef FASTATTN_TRIAL_FWD_SPLITS
  // A split without keys, which combine_splits leaves out.
  __device__ __forceinline__ void clear_split(const TileInfo& tile) {
    const int rows = args.packing.query_offsets ? tile.queries : args.queries;
    const int64_t head = static_cast<int64_t>(batch_entry(args, tile)) * args.heads + tile.head;
    RowMaxSum* to =
        args.splits.max_sum + tile.split * args.splits.rows + head * args.queries + tile.origin;
#pragma unroll 1
    for (int row = tile.row; row < smaller(tile.row + Traits::kTileRows, rows); ++row) {
      to[row] = {-__builtin_huge_valf(), 0.0f};
    }
  }
#endif

  // Beside the tile that is put into the queue.
  __device__ __forceinline__ void write_plans(TileQueue::Position at, const TileInfo& tile) {
    if constexpr (Traits::kPlansAhead) {
      shared.queue.slots[at.index()].empty.wait(at.phase() ^ 1);
#pragma unroll 1
      for (int group = 0; group < Traits::kGroups; ++group) {
        shared.plans[at.index()][group] = plan_for_group<Traits>(args, tile, group);
      }
    }
  }

  __device__ __forceinline__ void load_query(const TileInfo& tile, int batch) {
#pragma unroll 1
    for (int group = 0; group < Traits::kGroups; ++group) {
      Slot& slot = shared.q_slots[query.index()][group];
      slot.empty.wait(query.phase() ^ 1);
      shared.q[query.index()][group].load(&args.q, slot.full,
                                          tile.origin + tile.row + group * kMmaRows, tile.head,
                                          batch, ptx::kEvictFirst);
    }
    query.advance();
  }

  // The slot of this block's metadata and column keys, which are loaded with K. Waiting for the
  // slot of V instead would delay fast warpgroups until the slowest has finished the block before
  // last. The slot's previous contents belong to the block four before; they are no longer read
  // once the products with K of the block two before are complete.
  __device__ __forceinline__ int metadata_slot() const {
    return stage.passed % Traits::kMetadataSlots;
  }

  __device__ __forceinline__ void write_metadata(const BlockLoop<Traits>& blocks, int n, int next) {
    if constexpr (Traits::kDense) {
      const BlockClass& now = blocks.classes[n];
      shared.dense.metadata[metadata_slot()] = {
          n,
          next,
          now.flags,
          next < 0 ? 0 : blocks.classes[next].flags,
          {now.live[0], now.live[1], now.live[2], now.live[3]}};
    }
  }

  __device__ __forceinline__ void load_column_keys(Barrier& full, int n) {
    if constexpr (Traits::kDropout) {
      if (drops<Traits>(args.dropout)) {
        auto& keys = shared.dropout.columns[metadata_slot()];
        full.expect_bytes(keys.kBytes);
        keys.load(args.dropout.column_keys + n * dropout::units(Traits::kBlock), full);
      }
    }
  }
};

// -- store warps ----------------------------------------------------------------------------------
template <class Traits>
__device__ __forceinline__ void store_tiles(SharedStorage<Traits>& shared,
                                            const ForwardArguments& args, int group) {
  RingPosition<1> output;
  TileQueue::Position position;
  Slot& slot = shared.out_slots[group];
#pragma unroll 1
  while (true) {
    const TileInfo tile = shared.queue.take(position);
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
    ptx::cp_async_bulk_wait_group_read<0>();
    slot.empty.arrive();
    output.advance();
  }
  ptx::cp_async_bulk_wait_group();
}

// -- bias warps ----------------------------------------------------------------------------------
// One thread for each consumer warpgroup: loads an additive mask for the blocks that it changes, in
// boxes of 128 bytes of 64 rows, or of one row if the mask is broadcast over rows.
template <class Traits>
__device__ __forceinline__ void load_bias(SharedStorage<Traits>& shared,
                                          const ForwardArguments& args, int group) {
  constexpr int kHalfBytes = 2;
  constexpr int kPieceHalves = sm90::kRowBytes / kHalfBytes;
  const MaskLayout& layout = args.mask.layout;
  const int block_halves = Traits::kBlock * (args.mask.type == MaskType::kFloat32 ? 2 : 1);
  const bool one_row = layout.rows == 1;
  // Heads that share a mask are computed at about the same time.
  const uint64_t policy = layout.heads > 1 ? ptx::kEvictFirst : ptx::kEvictLast;
  RingPosition<Traits::kBiasPieces> ring;
  TileQueue::Position position;
#pragma unroll 1
  while (true) {
    const TileInfo tile = shared.queue.take(position);
    if (tile.row < 0) {
      return;
    }
    const BlockLoop<Traits> blocks = blocks_of<Traits>(args, tile);
    const int row = one_row ? 0 : tile.row + group * kMmaRows;
    const int head = layout.heads > 1 ? tile.head : 0;
    const int batch = layout.batches > 1 ? tile.batch : 0;
#pragma unroll 1
    for (int n = blocks.last(); blocks.reaches(n); n = blocks.after(n)) {
      if (!adds<Traits>(args.mask) || !(blocks.classes[n].flags >> group & 1)) {
        continue;
      }
#pragma unroll 1
      for (int half = 0; half < block_halves; half += kPieceHalves) {
        Slot& slot = shared.bias.slots[group][ring.index()];
        slot.empty.wait(ring.phase() ^ 1);
        slot.full.arrive_expect_bytes((one_row ? 1 : kMmaRows) * sm90::kRowBytes);
        ptx::cp_async_bulk_tensor_load(
            ptx::shared_address(shared.bias.pieces[group][ring.index()].bytes), &args.bias,
            slot.full.address(), n * block_halves + half, row, head, batch, policy);
        ring.advance();
      }
    }
  }
}

}  // namespace fastattn::attention
