// Few queries, as in decoding: transforms a problem into an equal one with fewer, fuller tiles.
#pragma once

#include <initializer_list>

#include "attention/attention.h"
#include "attention/key_range.h"

namespace fastattn::attention {

// With more queries than this, tiles are full anyway.
constexpr int kShortQueries = 128;

inline bool bounds_restrict(const ForwardProblem& p) {
  const Range keys = keys_of_all({0, p.queries}, p.bounds, p.keys);
  return p.own_diagonals || keys.begin > 0 || keys.end < p.keys;
}

// Whether to use the bounded instance: the bounds exclude pairs, or many warpgroups have no rows
// and skip nearly all of their blocks: at least a sixteenth of all; for packed sequences, whose
// lengths the host does not know, if an average one has rows for one warpgroup. At head dim 128 no
// warpgroup skips blocks, because of the ping-pong order.
inline bool wants_bounded(const ForwardProblem& p) {
  constexpr int kGroupRows = 64, kPingPongAbove = 64, kPingPongUpTo = 128, kManyShare = 16;
  const int dim = larger(p.head_dim, p.value_dim);
  const bool spares = dim <= kPingPongAbove || dim > kPingPongUpTo;
  if (bounds_restrict(p)) {
    return true;
  }
  if (!spares) {
    return false;
  }
  if (p.packing.sequences > 0) {
    return p.queries / p.packing.sequences <= kGroupRows;
  }
  const int tile = forward_tile_rows(dim, Variant::kFull);
  const int groups = ceil_div(p.queries, tile) * (tile / kGroupRows);
  return kManyShare * (groups - ceil_div(p.queries, kGroupRows)) >= groups;
}

inline Bounds no_bounds(int queries, int keys) {
  return {queries + keys, queries + keys, 0};
}

// Under a causal mask or a window, a single query attends a contiguous range of keys, which becomes
// all keys. With own_diagonals, causality excludes none of them: the diagonal is at the sequence's
// last key.
inline void cut_keys_of_one_query(ForwardProblem& p) {
  constexpr int kElementBytes = 2;
  const Range keys = keys_of_row(0, p.bounds, p.keys);
  // Key lengths and pages count from the first key, and the keys of a page after the last one are
  // loaded, where rows past the end of a tensor are zeros.
  const bool counted = p.key_lengths.data || p.pages.table;
  if (p.queries != 1 || is_empty(keys) || (keys.begin > 0 && counted) ||
      (keys.end < p.keys && p.pages.table)) {
    return;
  }
  for (TensorView* x : {&p.k, &p.v}) {  // unchanged if the first key is 0
    x->data = static_cast<char*>(x->data) + keys.begin * x->row_stride * kElementBytes;
  }
  p.keys = keys.end - keys.begin;
  p.bounds = no_bounds(p.queries, p.keys);
  p.own_diagonals = false;
}

// Query heads that share keys and values become rows of one head, if their rows have one stride in
// memory and no restriction differs between rows. lse is contiguous and stays as it is,
// and so do sinks.
inline void merge_groups(ForwardProblem& p) {
  const int group = p.heads / p.kv_heads;
  const auto steady = [&](const TensorView& x) {
    return p.queries == 1 || x.head_stride == p.queries * x.row_stride;
  };
  if (group == 1 || p.queries > kShortQueries || p.query_lengths.data || p.dropout.seed ||
      bounds_restrict(p) || !steady(p.q) || !steady(p.out)) {
    return;
  }
  for (TensorView* x : {&p.q, &p.out}) {
    x->row_stride = p.queries == 1 ? x->head_stride : x->row_stride;
    x->head_stride *= group;
  }
  p.queries *= group;
  p.heads = p.kv_heads;
  p.bounds = no_bounds(p.queries, p.keys);
}

}  // namespace fastattn::attention
