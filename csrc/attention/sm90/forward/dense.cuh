// Dense masks in a block of the forward: metadata, loaded with K, says whether this warpgroup's
// scores change, by the mask or by lengths and bounds, and which keys are dead.
#pragma once

#include "attention/sm90/forward/masks.cuh"
#include "attention/sm90/masks/dense_mask.cuh"

namespace fastattn::attention {

// Metadata of the block whose V is, or will be, in slot `at`.
template <class Traits>
__device__ __forceinline__ const BlockMetadata& metadata_of(const ForwardPart<Traits>& own,
                                                            RingPosition<Traits::kStages> at) {
  return own.shared.dense.metadata[at.passed % Traits::kMetadataSlots];
}

// S = S * scale + mask, or with score modifications S += mask in base 2. Each slot of the ring
// holds as many columns as 128 bytes do.
template <class MaskElement, class Traits>
__device__ __forceinline__ void add_bias(ForwardPart<Traits>& own, BlockScores<Traits>& s,
                                         float scale) {
  constexpr int kColumns = sm90::kRowBytes / sizeof(MaskElement);
  const bool one_row = own.args.mask.layout.rows == 1;
#pragma unroll
  for (int column = 0; column < Traits::kBlock; column += kColumns) {
    Slot& slot = own.shared.bias.slots[own.group][own.bias.index()];
    slot.full.wait(own.bias.phase());
    const char* piece = own.shared.bias.pieces[own.group][own.bias.index()].bytes;
    if constexpr (Traits::kScores) {
      add_bias_piece<MaskElement, true>(&s[column / 2], piece, one_row, scale, own.thread_here());
    } else {
      add_bias_piece<MaskElement, false>(&s[column / 2], piece, one_row, scale, own.thread);
    }
    __syncwarp();
    if (own.thread.lane == 0) {
      slot.empty.arrive();
    }
    own.bias.advance();
  }
}

// Masks scores that are not scaled yet, or are changed already. With an additive mask and no score
// modifications, they are in natural units afterwards, masked or not, as BiasedSoftmax expects of
// edge blocks.
template <class Traits>
__device__ __forceinline__ void mask_dense_scores(ForwardPart<Traits>& own, BlockScores<Traits>& s,
                                                  const TileInfo& tile, int n, bool masked,
                                                  bool restricted) {
  const DenseMask& mask = own.args.mask;
  const auto mask_pairs = [&]() __attribute__((always_inline)) {
    mask_bits(s, mask.bits, mask.layout, mask_head(mask.layout, tile.batch, tile.head),
              own.upper_row(tile), own.args.queries, n, own.thread_here());
  };
  if constexpr (Traits::kBias) {
    const float scale = own.args.scale_log2 * kLn2;
    if (!masked) {
      if constexpr (!Traits::kScores) {
        sm90::scale_rows(s, {scale, scale});
      }
    } else if (!adds<Traits>(mask)) {
      mask_pairs();
    } else if (mask.type == MaskType::kFloat32) {
      add_bias<float>(own, s, scale);
    } else {
      add_bias<typename Traits::Element>(own, s, scale);
    }
  } else if (masked) {
    mask_pairs();
  }
  if (restricted) {
    mask_scores(own, s, tile, n);
  }
}

// Zeroes the rows of V that metadata marks as dead, like clear_dead_values.
template <class Traits>
__device__ __forceinline__ void clear_dead_values(ForwardPart<Traits>& own,
                                                  const BlockMetadata& metadata,
                                                  RingPosition<Traits::kStages> at) {
  if (metadata.flags & kHasDead) {
    own.shared.v_slots[at.index()].full.wait(at.phase());
    own.shared.v[at.index()].clear_unmarked_rows(metadata.live, threadIdx.x % kWarpgroup,
                                                 kWarpgroup);
    own.fence_for_wgmma();
  }
}

}  // namespace fastattn::attention
