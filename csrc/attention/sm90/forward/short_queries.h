// Few queries, as in decoding: what turns a problem into an equal one with fewer, fuller tiles.
#pragma once

#include <initializer_list>

#include "attention/attention.h"
#include "attention/key_range.h"

namespace fastattn::attention {

// More queries than this fill tiles by themselves.
constexpr int kShortQueries = 128;

inline bool bounds_restrict(const ForwardProblem& p) {
  const Range keys = keys_of_all({0, p.queries}, p.bounds, p.keys);
  return keys.begin > 0 || keys.end < p.keys;
}

// Whether the bounded instance is the better one: a bounds leaves out pairs, or all rows are those
// of one warpgroup, of packed sequences on average, where this instance spares the others nearly
// all of their blocks. At head dims of 96 and 128 nobody is spared, because warpgroups take turns.
inline bool wants_bounded(const ForwardProblem& p) {
  constexpr int kGroupRows = 64, kPingPongAbove = 64, kPingPongUpTo = 128;
  const int dim = larger(p.head_dim, p.value_dim);
  const bool spares = dim <= kPingPongAbove || dim > kPingPongUpTo;
  const int rows = p.queries / larger(p.packing.sequences, 1);
  return bounds_restrict(p) || (spares && rows <= kGroupRows);
}

inline Bounds no_bounds(int queries, int keys) {
  return {queries + keys, queries + keys, 0};
}

// What a causal mask or a window leaves to a single query is a range of keys.
inline void cut_keys_of_one_query(ForwardProblem& p) {
  constexpr int kElementBytes = 2;
  const Range keys = keys_of_row(0, p.bounds, p.keys);
  // Key lengths count from the first key.
  if (p.queries != 1 || is_empty(keys) || (keys.begin > 0 && p.key_lengths.data)) {
    return;
  }
  for (TensorView* x : {&p.k, &p.v}) {
    x->data = static_cast<char*>(x->data) + keys.begin * x->row_stride * kElementBytes;
  }
  p.keys = keys.end - keys.begin;
  p.bounds = no_bounds(p.queries, p.keys);
}

// The query heads that share keys and values become rows of one head, where memory has them at one
// stride and no restriction tells rows apart. lse keeps its place: it is contiguous.
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
