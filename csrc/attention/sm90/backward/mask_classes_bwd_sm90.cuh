// The backward's view of a dense mask: transposed, with the order in which tiles of keys add to the
// dQ of each block of rows.
#pragma once

#include <utility>

#include "attention/attention.h"
#include "attention/sm90/masks/mask_classes.h"

namespace fastattn::attention {

constexpr int kRankThreads = 128;

// A thread: a block of rows. The mask is transposed: tiles are keys.
static __global__ void rank_tiles_kernel(MaskLayout layout, BlockClass* classes) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kRankThreads + threadIdx.x;
  const int64_t class_head = number / layout.blocks;
  if (class_head >= int64_t{layout.class_batches} * layout.class_heads) {
    return;
  }
  uint32_t rank = 0;
  for (int tile = 0; tile < layout.row_tiles; ++tile) {
    BlockClass& block =
        classes[classes_at(layout, class_head, tile) + number - class_head * layout.blocks];
    block.rank = rank;
    rank += block.flags & kHasWork ? 1 : 0;
  }
}

// The mask with rows and columns swapped.
inline DenseMask transposed(DenseMask mask) {
  std::swap(mask.row_stride, mask.column_stride);
  std::swap(mask.tile_strides[2], mask.tile_strides[3]);
  return mask;
}
// Key j is to the right of row i's diagonal where i is to the left of j's.
inline LengthsAndBounds transposed(LengthsAndBounds x) {
  std::swap(x.query_lengths, x.key_lengths);
  x.bounds = {x.bounds.right, x.bounds.left, -x.bounds.diagonal};
  return x;
}

}  // namespace fastattn::attention
