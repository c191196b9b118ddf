// A dense mask as the backward sees it: transposed, and in each block of rows the tiles of keys
// that add to dQ in their order.
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

// The same mask with rows and columns in each other's place.
inline DenseMask transposed(DenseMask mask) {
  std::swap(mask.row_stride, mask.column_stride);
  std::swap(mask.tile_strides[2], mask.tile_strides[3]);
  return mask;
}
// j is right of i's diagonal where i is left of j's.
inline Bounds transposed(const Bounds& bounds) {
  return {bounds.right, bounds.left, -bounds.diagonal};
}

}  // namespace fastattn::attention
