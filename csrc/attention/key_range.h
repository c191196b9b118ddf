// Which keys, and which blocks of keys, the rows of a tile may attend under a causal mask, a window
// and lengths.
//
//   row i < queries attends key j < keys  if  i + diagonal - left <= j <= i + diagonal + right
#pragma once

#include "common/pure.h"

namespace fastattn::attention {

// Values of the schema's `causal`: CausalKind in fastattn/ops/attention/calls.py.
enum CausalKind : int { kNotCausal, kTopLeft, kBottomRight, kBottomRightLengths };

struct Bounds {
  int left, right;  // not negative; unlimited: at least queries + keys
  int diagonal;     // 0, or keys - queries for bottom-right alignment
};

// [begin, end); empty unless begin < end.
struct Range {
  int begin, end;
};

FASTATTN_PURE bool is_empty(Range range) {
  return range.begin >= range.end;
}
FASTATTN_PURE bool contains(Range range, int i) {
  return range.begin <= i && i < range.end;
}
FASTATTN_PURE int smaller(int a, int b) {
  return a < b ? a : b;
}
FASTATTN_PURE int larger(int a, int b) {
  return a > b ? a : b;
}
FASTATTN_PURE Range overlap(Range a, Range b) {
  return {larger(a.begin, b.begin), smaller(a.end, b.end)};
}

// Keys that a row may attend.
FASTATTN_PURE Range keys_of_row(int row, const Bounds& bounds, int keys) {
  return {larger(0, row + bounds.diagonal - bounds.left),
          smaller(keys, row + bounds.diagonal + bounds.right + 1)};
}

// Keys that some row of a range may attend: contiguous, as the bounds move by one key per row.
FASTATTN_PURE Range keys_of_some(Range rows, const Bounds& bounds, int keys) {
  if (is_empty(rows)) {
    return {0, 0};
  }
  return {keys_of_row(rows.begin, bounds, keys).begin, keys_of_row(rows.end - 1, bounds, keys).end};
}

// Keys that every row of a range may attend.
FASTATTN_PURE Range keys_of_all(Range rows, const Bounds& bounds, int keys) {
  if (is_empty(rows)) {
    return {0, 0};
  }
  return {keys_of_row(rows.end - 1, bounds, keys).begin, keys_of_row(rows.begin, bounds, keys).end};
}

// Blocks of `size` keys that overlap a range.
FASTATTN_PURE Range blocks_touching(Range keys, int size) {
  if (is_empty(keys)) {
    return {0, 0};
  }
  return {keys.begin / size, (keys.end + size - 1) / size};
}

// Blocks of `size` keys that lie inside a range.
FASTATTN_PURE Range blocks_inside(Range keys, int size) {
  return {(keys.begin + size - 1) / size, keys.end < 0 ? 0 : keys.end / size};
}

// The blocks that one warpgroup processes for a tile.
struct BlockPlan {
  Range loaded;  // blocks that are loaded for the whole tile, last one first
  Range own;     // those that this warpgroup computes; never empty unless `loaded` is
  Range full;    // those of them that need no mask; may be empty or reach outside `own`
};

// tile_rows and own_rows end at the first row that is not computed; own_rows may be empty. skips: a
// warpgroup skips loaded blocks that none of its rows may attend.
FASTATTN_PURE BlockPlan plan_blocks(Range tile_rows, Range own_rows, const Bounds& bounds, int keys,
                                    int block, bool skips) {
  const Range loaded = blocks_touching(keys_of_some(tile_rows, bounds, keys), block);
  const Range full = blocks_inside(keys_of_all(own_rows, bounds, keys), block);
  if (!skips) {
    return {loaded, loaded, full};
  }
  Range own = overlap(loaded, blocks_touching(keys_of_some(own_rows, bounds, keys), block));
  if (is_empty(own)) {
    // One block that is masked completely: rows without keys need no code path of their own.
    own = {loaded.begin, smaller(loaded.begin + 1, loaded.end)};
  }
  return {loaded, own, full};
}

#ifdef FASTATTN_TRIAL_FWD_SPLITS
// The part of a plan for a split of `blocks` blocks. Empty if the plan has no more.
FASTATTN_PURE BlockPlan split_of(const BlockPlan& plan, int split, int blocks) {
  const int begin = plan.loaded.begin + split * blocks;
  const Range loaded = overlap(plan.loaded, {begin, begin + blocks});
  Range own = overlap(loaded, plan.own);
  if (is_empty(own)) {
    own = {loaded.begin, smaller(loaded.begin + 1, loaded.end)};  // as in plan_blocks
  }
  return {loaded, own, plan.full};
}
#else
// The part of a plan for one of `splits` splits, whose numbers of blocks differ by one at most.
// Empty if there are fewer blocks than splits.
FASTATTN_PURE BlockPlan split_of(const BlockPlan& plan, int split, int splits) {
  const int count = larger(plan.loaded.end - plan.loaded.begin, 0);
  const int size = count / splits,
            longer = count - size * splits;  // the first splits take the rest
  const int begin = plan.loaded.begin + split * size + smaller(split, longer);
  const Range loaded = {begin, begin + size + (split < longer)};
  Range own = overlap(loaded, plan.own);
  if (is_empty(own)) {
    own = {loaded.begin, smaller(loaded.begin + 1, loaded.end)};  // as in plan_blocks
  }
  return {loaded, own, plan.full};
}
#endif

}  // namespace fastattn::attention
