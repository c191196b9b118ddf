// The load thread: brings both operands of every step of every tile of its thread block into the
// ring, as far ahead as there are slots.
#pragma once

#include "ffn/sm90/storage.cuh"
#include "ffn/sm90/tiles.cuh"

namespace fastattn::ffn {

using sm90::RingPosition;

template <class Traits>
__device__ __forceinline__ void load_tiles(SharedStorage<Traits>& shared,
                                           const ProductArguments& args) {
  using Shared = SharedStorage<Traits>;
  constexpr int kBoxes = Traits::kPairsRows ? 2 : 1;
  RingPosition<Traits::kStages> at;
  int group = 0;  // whose tile it is, in ping-pong
#pragma unroll 1
  for (int tile = blockIdx.x; tile < tile_count(args); tile += gridDim.x) {
    const TilePlace place = tile_place(args, tile);
    const int row = place.row_tile * kTileRows, column = place.column_tile * Traits::kOutColumns;
#pragma unroll 1
    for (int step = 0; step < args.steps; ++step) {
      const int depth = (place.part * args.steps + step) * kDepth;
      const int slot = at.index();
      Barrier& full = shared.full[slot][group];
      shared.empty[slot].wait(at.phase() ^ 1);
      full.arrive_expect_bytes(Shared::TileA::kBytes + Shared::TileB::kBytes);
      shared.a[slot].load(&args.a, full, row, depth, 1, 0, ptx::kEvictNormal);
      // The rows of up begin `columns` behind those of the gate.
      shared.b[slot].load(&args.b, full, column, depth, kBoxes, args.columns, ptx::kEvictLast);
      at.advance();
    }
    group ^= Traits::kPingPong ? 1 : 0;
  }
}

}  // namespace fastattn::ffn
