// The soft cap and a bias by distance on a block's scores, before they are masked.
#pragma once

#include "attention/sm90/forward/masks.cuh"
#include "attention/sm90/masks/scores.cuh"

namespace fastattn::attention {

template <class Traits>
__device__ __forceinline__ void change_scores(const ForwardPart<Traits>& own,
                                              BlockScores<Traits>& s, const TileInfo& tile, int n) {
  if constexpr (Traits::kScores) {
    const ForwardArguments& args = own.args;
    cap_scores(s, args.changes, args.scale_log2);
    if (const float* biases =
            biases_of(args, args.changes, tile.batch, tile.head, tile.queries, tile.keys)) {
      const int first_key = n * Traits::kBlock + own.thread_here().first_column();
      add_biases<1>(s, biases + (first_key - own.upper_row(tile)));
    }
  }
}

}  // namespace fastattn::attention
