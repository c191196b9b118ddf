// The transpose of key_range.h: which rows, and which blocks of rows, may attend a block of keys.
// In the backward a thread block owns keys and loops over rows.
#pragma once

#include <cstdint>

#include "attention/key_range.h"

namespace fastattn::attention {

// Rows that may attend a key.
FASTATTN_PURE Range rows_of_key(int key, const Bounds& bounds, int queries) {
  return {larger(0, key - bounds.diagonal - bounds.right),
          smaller(queries, key - bounds.diagonal + bounds.left + 1)};
}

// Rows that may attend some key of a range: contiguous, as the bounds move by one row per key.
FASTATTN_PURE Range rows_of_some(Range keys, const Bounds& bounds, int queries) {
  if (is_empty(keys)) {
    return {0, 0};
  }
  return {rows_of_key(keys.begin, bounds, queries).begin,
          rows_of_key(keys.end - 1, bounds, queries).end};
}

// Rows that may attend every key of a range.
FASTATTN_PURE Range rows_of_all(Range keys, const Bounds& bounds, int queries) {
  if (is_empty(keys)) {
    return {0, 0};
  }
  return {rows_of_key(keys.end - 1, bounds, queries).begin,
          rows_of_key(keys.begin, bounds, queries).end};
}

// Which rows from `origin` on may attend a key, tested with one unsigned comparison per row: rows
// before the first one wrap around.
struct RowMask {
  uint32_t offset, count;
};
FASTATTN_PURE RowMask row_mask(int key, int origin, const Bounds& bounds, int queries, int keys) {
  const Range rows = rows_of_key(key, bounds, queries);
  const int count = key < keys ? larger(rows.end - rows.begin, 0) : 0;
  return {static_cast<uint32_t>(origin - rows.begin), static_cast<uint32_t>(count)};
}
FASTATTN_PURE bool allows(const RowMask& mask, uint32_t i) {
  return mask.offset + i < mask.count;
}

// Blocks of `size` rows whose rows before `count` all lie inside a range.
FASTATTN_PURE Range blocks_covered(Range rows, int count, int size) {
  const Range blocks = blocks_inside(rows, size);
  return rows.end < count ? blocks : Range{blocks.begin, (count + size - 1) / size};
}

// Blocks of rows that a thread block computes for one block of keys. Ranges are in blocks of rows.
struct RowPlan {
  Range visited;  // those with an allowed pair
  Range full;     // those whose rows may attend all of these keys: no masking
  Range clean;    // those without a dead row: no zeroing
  Range keys;     // the live ones of these keys, counted from the first
};

// queries, keys: of the sequence; rows: of the tensor.
FASTATTN_PURE RowPlan plan_rows(int first_key, int block_keys, const Bounds& bounds, int queries,
                                int keys, int rows, int block_rows) {
  const Range block = {first_key, first_key + block_keys};
  const Range own = overlap(block, {0, keys});
  const Range none = {0, 0};
  const Range live_rows = rows_of_some({0, keys}, bounds, queries);
  const Range live_keys = overlap(block, keys_of_some({0, queries}, bounds, keys));
  return {
      blocks_touching(rows_of_some(own, bounds, queries), block_rows),
      block.end > keys ? none
                       : blocks_covered(rows_of_all(block, bounds, queries), queries, block_rows),
      blocks_covered(live_rows, rows, block_rows),
      is_empty(live_keys) ? none : Range{live_keys.begin - first_key, live_keys.end - first_key}};
}

// The blocks of keys that add to a block of rows.
FASTATTN_PURE Range visitors(int row_block, int block_rows, const Bounds& bounds, int queries,
                             int keys, int block_keys) {
  const int row = row_block * block_rows;
  return blocks_touching(keys_of_some({row, smaller(row + block_rows, queries)}, bounds, keys),
                         block_keys);
}

// The steps of a block of keys: the query heads that share it, and for each the visited blocks of
// rows, last one first. Under a causal mask all blocks of keys start at the same rows; where they
// add to dQ in order, each is one step behind the previous block of keys.
struct Step {
  int head, row_block;
};
FASTATTN_PURE Step first_step(Range visited) {
  return {0, visited.end - 1};
}
FASTATTN_PURE Step next_step(Step step, Range visited) {
  if (step.row_block > visited.begin) {
    return {step.head, step.row_block - 1};
  }
  return {step.head + 1, visited.end - 1};
}

}  // namespace fastattn::attention
