// The classification of a dense mask, and its layout in the workspace.
//
//   bits      of a boolean mask: which keys a row may attend, one bit per key, block by block. A
//             consumer thread loads the bits of a row and a block at once
//   plain     of every 64 rows x block: whether the mask changes no score
//   copy      of an additive mask that TMA cannot read in place
//   classes   of every tile of rows x block, after lengths and bounds have been applied: which
//             warpgroups must mask it, and which keys any row of the tile may attend
//
// Dimensions that the mask is broadcast over have size 1 in bits and plain; classes have their full
// size where lengths differ.
#pragma once

#include <cstdint>

#include "attention/key_range.h"
#include "common/pure.h"

namespace fastattn::attention {

constexpr int kMaskRows = 64;      // rows of a warpgroup
constexpr int kMaxBlockWords = 4;  // words of 32 keys in a block of at most 128
constexpr int kWordKeys = 32;
constexpr uint32_t kHasWork = 1u << 31;  // some row may attend some key
constexpr uint32_t kHasDead = 1u << 30;  // some key has no row
// Bits 0, 1, 2: the block needs masking in that warpgroup; the next three: by lengths or bounds.
constexpr int kRestrictedBit = 3;

struct BlockClass {
  uint32_t live[kMaxBlockWords];  // keys that some row of the tile may attend
  uint32_t flags;
  uint32_t rank;  // backward: how many earlier tiles have work in this block
  uint32_t unused[2];
};

struct MaskLayout {
  int batches, heads;    // of the mask: 1 where broadcast
  int row_groups, rows;  // groups of 64 rows, rows of a group; both 1 if broadcast
  int class_batches, class_heads;
  int row_tiles, tile_rows;
  int blocks, block;
};

FASTATTN_PURE int ceil_div(int count, int size) {
  return (count + size - 1) / size;
}

// Columns of a copied additive mask, padded to 16 bytes of any type.
FASTATTN_PURE int copied_columns(int keys) {
  constexpr int kEights = 8;
  return ceil_div(keys, kEights) * kEights;
}

// mask_*: sizes of the mask, 1 where broadcast. split: lengths differ between batch entries.
FASTATTN_PURE MaskLayout mask_layout(int mask_batches, int mask_heads, int mask_rows, int batch,
                                     bool split, int queries, int keys, int tile_rows, int block) {
  const bool shared = mask_rows == 1;
  return {mask_batches,
          mask_heads,
          shared ? 1 : ceil_div(queries, kMaskRows),
          shared ? 1 : kMaskRows,
          split ? batch : mask_batches,
          mask_heads,
          ceil_div(queries, tile_rows),
          tile_rows,
          ceil_div(keys, block),
          block};
}

FASTATTN_PURE int64_t plain_count(const MaskLayout& layout) {
  return int64_t{1} * layout.batches * layout.heads * layout.row_groups * layout.blocks;
}
FASTATTN_PURE int64_t bit_words(const MaskLayout& layout) {
  return plain_count(layout) * layout.rows * kMaxBlockWords;
}
FASTATTN_PURE int64_t class_count(const MaskLayout& layout) {
  return int64_t{1} * layout.class_batches * layout.class_heads * layout.row_tiles * layout.blocks;
}

// Elements of a copied additive mask.
FASTATTN_PURE int64_t copied_elements(const MaskLayout& layout, int queries, int keys) {
  const int rows = layout.rows > 1 ? queries : 1;
  return int64_t{1} * layout.batches * layout.heads * rows * copied_columns(keys);
}

// Index of (batch, head) of q among the mask's heads, and among those of the classes.
FASTATTN_PURE int64_t mask_head(const MaskLayout& layout, int batch, int head) {
  return int64_t{layout.batches > 1 ? batch : 0} * layout.heads + (layout.heads > 1 ? head : 0);
}
FASTATTN_PURE int64_t class_head(const MaskLayout& layout, int batch, int head) {
  return int64_t{layout.class_batches > 1 ? batch : 0} * layout.class_heads +
         (layout.class_heads > 1 ? head : 0);
}

// Index in `plain` of block n of row group `group`, and in `bits` of one of its rows.
FASTATTN_PURE int64_t plain_at(const MaskLayout& layout, int64_t mask_head, int group, int n) {
  return (mask_head * layout.row_groups + (layout.row_groups > 1 ? group : 0)) * layout.blocks + n;
}
FASTATTN_PURE int64_t bits_at(const MaskLayout& layout, int64_t mask_head, int row, int n) {
  const int64_t block = plain_at(layout, mask_head, row / kMaskRows, n);
  return (block * layout.rows + (layout.rows > 1 ? row % kMaskRows : 0)) * kMaxBlockWords;
}
// Index in `classes` of the first block of a tile.
FASTATTN_PURE int64_t classes_at(const MaskLayout& layout, int64_t class_head, int row_tile) {
  return (class_head * layout.row_tiles + row_tile) * layout.blocks;
}

// Bit i: i is in [range.begin - first, range.end - first), of 32.
FASTATTN_PURE uint32_t bits_inside(Range range, int first) {
  const int begin = larger(range.begin - first, 0), end = smaller(range.end - first, kWordKeys);
  if (begin >= end) {
    return 0;
  }
  const uint32_t up_to_end = end == kWordKeys ? ~0u : (1u << end) - 1;
  return up_to_end & ~((1u << begin) - 1);
}

// The last block of [first, n] with work, -1 if there is none.
FASTATTN_PURE int last_with_work(const BlockClass* blocks, int n, int first) {
  for (; n >= first; --n) {
    if (blocks[n].flags & kHasWork) {
      return n;
    }
  }
  return -1;
}

}  // namespace fastattn::attention
