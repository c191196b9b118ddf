// The load warp of the kernel of an additive mask's gradient. See dmask.cuh.
#pragma once

#include "attention/sm90/backward/dmask/dmask_tiles.cuh"
#include "sm90/ptx/tma.cuh"

namespace fastattn::attention {

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

}  // namespace fastattn::attention
