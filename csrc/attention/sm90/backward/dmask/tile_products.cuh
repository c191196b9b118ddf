// Common code of the consumers for the gradients of an additive mask (dmask_consumer.cuh) and of a
// bias by distance (distance_consumer.cuh): products of the tiles in shared memory, and dropout.
#pragma once

#include "attention/sm90/backward/dmask/dmask_tiles.cuh"
#include "attention/sm90/masks/dropout_sm90.cuh"
#include "sm90/ptx/warp.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;

// One warpgroup: 64 rows of a tile.
template <class Traits, class Storage, class Arguments>
struct TileProducts {
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kCount = kKeys / 2;
  static constexpr int kWords = kKeys / sm90::kMmaK * 2;
  using Mma = ptx::Wgmma<kKeys>;

  Storage& shared;
  const Arguments& args;
  const int group;
  const AccumulatorThread thread;
  RingPosition<Traits::kStages> stage;

  __device__ __forceinline__ TileProducts(Storage& storage, const Arguments& arguments,
                                          int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp} {}

  // Waits for the tiles and starts S = Q K^T and dP = dO V^T.
  __device__ __forceinline__ void issue_products(float (&s)[kCount], float (&dp)[kCount]) {
    DmaskTiles<Traits>& tiles = shared.tiles[stage.index()];
    shared.slots[stage.index()].full.wait(stage.phase());
    issue_product(s, tiles.q, tiles.k);
    issue_product(dp, tiles.dout, tiles.v);
  }

  // Waits for both products and releases the tiles.
  __device__ __forceinline__ void await_products(float (&s)[kCount], float (&dp)[kCount]) {
    ptx::wgmma_wait_group<0>();
    ptx::pin(s);
    ptx::pin(dp);
    if (threadIdx.x % kWarpgroup == 0) {
      shared.slots[stage.index()].empty.arrive();
    }
    stage.advance();
  }

  // Dropout's random words for this thread's scores, see dropout_sm90.cuh: two for every 16 keys.
  __device__ __forceinline__ void draw_words(uint32_t row_key, int tile_key,
                                             uint32_t (&words)[kWords]) const {
    const uint32_t stream =
        dropout::stream_key(dropout::kColumnTag, *args.dropout.seed, args.dropout.stream);
    const uint32_t unit = dropout::lattice_unit(tile_key) + thread.first_column() +
                          origin_of(args.dropout).column_unit;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = dropout::word(
          row_key, dropout::absorb(stream, unit + dropout::units(i / 2 * sm90::kMmaK) + i % 2));
    }
  }
  // If the threshold drops everything, the keep scale is 0.
  __device__ __forceinline__ bool is_kept(uint32_t word, int byte) const {
    return word << (24 - 8 * byte) >= static_cast<uint32_t>(args.dropout.threshold) << 24;
  }

 private:
  // 64 x kKeys.
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
      Mma::template ss<typename Traits::Element, ptx::kMajorK>(
          acc, sm90::descriptor_at(a, sm90::k_major_step(step, Traits::kRows)),
          sm90::descriptor_at(b, sm90::k_major_step(step, kKeys)), step > 0);
    }
    ptx::wgmma_commit_group();
  }
};

}  // namespace fastattn::attention
