// Lengths, causal masks, windows and dropout in a block: masked scores, zeroed values of dead keys,
// dropped weights.
#pragma once

#include "attention/sm90/forward/part.cuh"
#include "attention/sm90/masks/dropout_sm90.cuh"
#include "attention/sm90/masks/mask.cuh"

namespace fastattn::attention {

// A warpgroup's scores, then weights, of a block.
template <class Traits>
using BlockScores = float[Traits::kBlock / 2];

template <class Traits>
__device__ __forceinline__ void mask_scores(const ForwardPart<Traits>& own, BlockScores<Traits>& s,
                                            const TileInfo& tile, int n) {
  mask_block<Traits::kBounded>(s, n * Traits::kBlock, own.upper_row(tile),
                               bounds_of(own.args, tile), tile.keys, own.thread_here());
}

// Keys that no query may attend have weight 0, but 0 * NaN is NaN: their rows of V are zeroed.
// Every warpgroup does so before it reads the block; all write the same values.
template <class Traits>
__device__ __forceinline__ void clear_dead_values(ForwardPart<Traits>& own, const TileInfo& tile,
                                                  int n) {
  const Range live = Traits::kBounded
                         ? keys_of_some({0, tile.queries}, bounds_of(own.args, tile), tile.keys)
                         : Range{0, tile.keys};
  const int first_key = n * Traits::kBlock;
  const int begin = larger(live.begin - first_key, 0);
  const int end = smaller(live.end - first_key, Traits::kBlock);
  // TMA has zero-filled rows past the end of the tensor.
  const int rows = smaller(own.args.keys - first_key, Traits::kBlock);
  if (begin > 0 || end < rows) {
    own.shared.v_slots[own.value.index()].full.wait(own.value.phase());
    typename Traits::KeyTile& v = own.shared.v[own.value.index()];
    v.clear_rows(0, begin, threadIdx.x % kWarpgroup, kWarpgroup);
    v.clear_rows(end, Traits::kBlock, threadIdx.x % kWarpgroup, kWarpgroup);
    own.fence_for_wgmma();
  }
}

// -- dropout --------------------------------------------------------------------------------------
template <class Traits>
__device__ __forceinline__ void hash_rows(ForwardPart<Traits>& own, const TileInfo& tile) {
  if (drops<Traits>(own.args.dropout)) {
    const dropout::Origin origin = origin_of(own.args.dropout);
    own.row_key =
        dropout::absorb(dropout::absorb(dropout::absorb(own.row_stream, origin.b + tile.batch),
                                        origin.h + tile.head),
                        origin.row_unit + dropout::lattice_unit(own.upper_row(tile)));
  }
}

// Drops weights of the block whose V will be in slot `at`, after the row sums have been computed.
// Its column keys have been loaded with K.
template <class Traits>
__device__ __forceinline__ void drop_weights(const ForwardPart<Traits>& own, BlockScores<Traits>& p,
                                             RingPosition<Traits::kStages> at) {
  if constexpr (Traits::kDropout) {
    if (drops<Traits>(own.args.dropout)) {
      drop_block(p, own.shared.dropout.columns[at.passed % Traits::kMetadataSlots].data,
                 own.row_key, own.args.dropout.threshold, own.thread_here());
    }
  }
}

}  // namespace fastattn::attention
