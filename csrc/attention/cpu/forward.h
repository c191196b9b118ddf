// The forward pass of attention on CPU; backward.h has the gradients.
//
// A worker packs the keys and values of a (sequence, kv head) once, each tile when it is first
// needed, and loops over them for each tile of queries (Dao et al., FlashAttention, 2022): scores,
// online softmax, weighted values. Tensors that already have an operand's layout are not packed.
// For few queries, as in decoding, nothing is packed.
#pragma once

#include "attention/cpu/decode.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

// The last of the `tiles` tasks of a head. Tasks after the last tile of a short sequence are
// skipped together.
inline int64_t last_of_head(int64_t task, int64_t tiles) {
  return task - task % tiles + tiles - 1;
}

// A sequence, a head and a tile of queries, from a task's number. The tile may start after the
// sequence's last query.
struct QueryTile {
  Sequence sequence;
  int64_t h, kv_head;
  int first, end;  // rows of the sequence

  QueryTile(const Problem& a, int64_t task) {
    const int64_t tiles = a.row_tiles();
    sequence = a.sequence(task / tiles / a.heads);
    h = task / tiles % a.heads;
    kv_head = h / a.group();
    first = static_cast<int>(task % tiles * kTileRows);
    end = smaller(first + kTileRows, sequence.queries);
  }
  bool is_past_end() const { return first >= sequence.queries; }
};

// Calls run(tile) for the tiles that this worker takes and that contain a query.
template <class Run>
inline void for_query_tiles(const Problem& a, Queue& queue, const Run& run) {
  for_tasks(queue, [&](int64_t task) {
    const QueryTile at(a, task);
    if (at.is_past_end()) {
      return last_of_head(task, a.row_tiles());
    }
    run(at);
    return task;
  });
}

// -- many queries --------------------------------------------------------------------------------
// Keys and values of one (sequence, kv head), each tile packed when it is first needed. Values of
// null data are not packed.
template <class C>
class PackedKeys {
 public:
  PackedKeys(const Problem& a, const ForwardWorkspace& memory, const QueryTile& of)
      : a_(a),
        memory_(memory),
        sequence_(of.sequence),
        kv_head_(of.kv_head),
        dead_(a, of.sequence, of.kv_head) {
    memset(memory.packed, 0, sizeof(float) * a.key_tiles());
    const int live = dead_.live_end();
    if (C::kDepth == 1 && a.v.data && !a.pages.table && live > 0) {
      const Operand<C> v =
          in_place<C>(a.type, a.v, key_offset(a.v, sequence_, kv_head_, 0), a.value_dim, kBlock);
      // Rows far apart map to few cache sets: only if they are read once.
      const bool once = sequence_.queries <= kTileRows && a.group() == 1;
      if (v.data && (once || v.stride == a.value_dim) &&
          (live <= kTileKeys ? no_key_is_dead(dead_, 0, live, v, a.value_dim)
                             : dead_.none(0, live))) {
        v_in_place_ = v;
      }
    }
  }
  bool holds(const QueryTile& at) const {
    return at.sequence.b == sequence_.b && at.kv_head == kv_head_;
  }

  void pack(int tile) {
    if (memory_.packed[tile] != 0.0f) {
      return;
    }
    memory_.packed[tile] = 1.0f;
    const int first = tile * kTileKeys;
    const int count = smaller(kTileKeys, dead_.live_end() - first);
    if (!a_.pages.table) {
      return pack_run(tile, 0, count);
    }
    for (int from = 0, run; from < count; from += run) {
      run = smaller(count - from, a_.pages.size - (first + from) % a_.pages.size);
      pack_run(tile, from, run);
    }
  }
  const typename C::Unit* k(int tile) const {  // columns
    return units<C>(memory_.k_columns) + tile * k_units();
  }
  Operand<C> v(int tile) const {  // pairs
    if (v_in_place_.data) {
      return {v_in_place_.row(tile * kTileKeys), v_in_place_.stride};
    }
    return {units<C>(memory_.v_pairs) + tile * v_units(), padded(a_.value_dim)};
  }

 private:
  static constexpr int kBlock = 16;  // positions and units that are transposed together

  int64_t k_units() const { return kTileKeys * padded(a_.head_dim) / C::kDepth; }
  int64_t v_units() const { return kTileKeys * padded(a_.value_dim) / C::kDepth; }

  // Packs `count` keys of a tile from `from` on, a multiple of kBlock, whose rows follow each
  // other.
  void pack_run(int tile, int from, int count) {
    const int whole = count / kBlock * kBlock;
    if (0 < whole && whole < count) {
      pack_run(tile, from, whole);
      return pack_run(tile, from + whole, count - whole);
    }
    const int first = tile * kTileKeys + from, upto = round_up(count, kBlock);
    const Operand<C> k = rows_of(a_.k, first, count, upto, a_.head_dim);
    to_columns<C>(k, upto, a_.head_dim, units<C>(memory_.k_columns) + tile * k_units() + from);
    if (a_.v.data && !v_in_place_.data) {
      const Operand<C> v = rows_of(a_.v, first, count, upto, a_.value_dim);
      to_pairs(
          v, upto, a_.value_dim,
          units<C>(memory_.v_pairs) + tile * v_units() + from / C::kDepth * padded(a_.value_dim));
    }
  }
  int64_t offset_of(const TensorView& x, int first, int count) const {
    if (!a_.pages.table) {
      return key_offset(x, sequence_, kv_head_, first);
    }
    // Dead keys are not read and may have no page.
    return dead_.all(first, count) ? 0 : paged_offset(a_.pages, x, sequence_, kv_head_, first);
  }

  // Whole blocks without dead keys are read in place if their layout allows it.
  Operand<C> rows_of(const TensorView& x, int first, int count, int upto, int dim) const {
    const int64_t offset = offset_of(x, first, count);
    if (upto == count) {
      const Operand<C> rows = in_place<C>(a_.type, x, offset, dim, kBlock);
      if (rows.data && no_key_is_dead(dead_, first, count, rows, dim)) {
        return rows;
      }
    }
    auto* rows = units<C>(memory_.rows);
    pack_rows<C>(a_.type, x.data, offset, x.row_stride, count, upto, dim, rows,
                 dead_.of_tile(first));
    return {rows, padded(dim) / C::kDepth};
  }

  const Problem& a_;
  const ForwardWorkspace& memory_;
  Sequence sequence_;
  int64_t kv_head_;
  DeadKeys dead_;
  Operand<C> v_in_place_ = {};
};

// Writes rows [first, end) of out and lse, which have no allowed key.
inline void write_dead_rows(const Forward& a, const Sequence& s, int64_t h, int first, int end) {
  const int64_t bytes = (a.type == DType::kFloat32 ? 4 : 2);
  const int live = live_queries(a, s);
  for (int i = first; i < end; ++i) {
    memset(static_cast<char*>(a.out.data) + bytes * query_offset(a.out, s, h, i), 0,
           bytes * a.value_dim);
    a.lse[query_offset(a.lse_strides, s, h, i)] = i < live ? a.sink(h) : -kInfinity;
  }
}

// Rows of q, in `memory` if they are read more than once or cannot be read in place.
template <class C>
Operand<C> query_rows(const Problem& a, const QueryTile& at, int count, bool once, float* memory) {
  const int64_t offset = query_offset(a.q, at.sequence, at.h, at.first);
  const Operand<C> rows = in_place<C>(a.type, a.q, offset, a.head_dim, 1);
  if (rows.data && once) {
    return rows;
  }
  pack_rows<C>(a.type, a.q.data, offset, a.q.row_stride, count, count, a.head_dim, units<C>(memory),
               dead_if([](int) { return false; }));
  return {units<C>(memory), padded(a.head_dim) / C::kDepth};
}

// Default RowWeights of forward_tile: keeps no weights. TileWeights (weights.h) does.
struct NoWeights {
  static constexpr bool kWanted = false;
  float* scores_of(int, float* s) const { return s; }
  void end_tile(int, Range, const SoftmaxState&) const {}
  void write(const RowRanges&, const SoftmaxState&, const float*) const {}
};

template <class C, class RowWeights = NoWeights>
void forward_tile(const Forward& a, const QueryTile& at, PackedKeys<C>& keys,
                  const ForwardWorkspace& memory, const RowWeights& weights = {}) {
  const Sequence& sequence = at.sequence;
  const RowRanges rows(a, sequence, at.first, LseRows{});
  const Range tiles = rows.tiles();
  const bool with_out = !RowWeights::kWanted || a.lse;
  if (is_empty(tiles)) {
    if (with_out) {
      write_dead_rows(a, sequence, at.h, at.first, at.end);
    }
    return;
  }
  const int64_t E = padded(a.value_dim);
  const int64_t depth = ceil_div(a.head_dim, C::kDepth);
  const Operand<C> q =
      query_rows<C>(a, at, rows.count, tiles.end - tiles.begin == 1, memory.q_rows);
  float* const o = memory.o;
  bool o_written = false;
  SoftmaxState state(rows.count);
  const float scale_log2 = a.score_scale() * kLog2E;
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int first_key = n * kTileKeys;
    const int in_tile = smaller(rows.some.end - first_key, kTileKeys);
    const int columns = round_up(in_tile, kLanes);
    const Range live = rows.touching(first_key, columns);
    const TileBias bias(a, sequence, at.h, at.first, live, first_key, memory.bias);
    if (is_empty(live) || bias.none) {
      continue;
    }
    keys.pack(n);
    const int count = live.end - live.begin;
    float* const s = weights.scores_of(n, memory.s);
    auto* const p = units<C>(C::kDepth == 1 ? s : memory.p);
    multiply<C>(count, columns, depth, q.row(live.begin), q.stride, 1, keys.k(n), kTileKeys,
                s + live.begin * kTileKeys, kTileKeys, false);
    cap_scores(a, count, columns, s + live.begin * kTileKeys);
    const TileDropout dropout(a, sequence.b, at.h, at.first, first_key);
    const bool restricted = !rows.allows_all(first_key, columns) || !(scale_log2 > 0.0f);
    bias.with_rows([&](const auto& bias_row) {
      with_flags(restricted, bool(dropout), [&](auto range, auto drop) {
        softmax_rows<C, RowWeights::kWanted, range, drop>(rows, live, scale_log2, bias_row, dropout,
                                                          first_key, columns, s, p, state, o, E);
      });
    });
    weights.end_tile(n, live, state);
    if (!with_out) {
      continue;
    }
    const bool add = o_written || count < rows.count;
    if (add && !o_written) {
      memset(o, 0, sizeof(float) * rows.count * E);
    }
    o_written = true;
    constexpr int kStride = kTileKeys / C::kDepth;
    const Operand<C> v = keys.v(n);
    multiply<C>(count, static_cast<int>(E), ceil_div(in_tile, C::kDepth), p + live.begin * kStride,
                kStride, 1, v.data, v.stride, o + live.begin * E, E, add);
  }
  float lse[kTileRows], factors[kTileRows];
  for (int i = 0; i < rows.count; ++i) {
    const SoftmaxState::Total total = state.total(i, a.sink(at.h));
    lse[i] = total.lse;
    factors[i] = total.weight * a.dropout.scale;
  }
  weights.write(rows, state, factors);
  if (!with_out) {
    return;
  }
  if (!o_written) {
    memset(o, 0, sizeof(float) * rows.count * E);
  }
  memcpy(a.lse + query_offset(a.lse_strides, sequence, at.h, at.first), lse,
         sizeof(float) * rows.count);
  store_rows(a.type, a.out.data, query_offset(a.out, sequence, at.h, at.first), a.out.row_stride,
             rows.count, a.value_dim, o, [&](int i) { return factors[i]; });
  write_dead_rows(a, sequence, at.h, at.first + rows.count, at.end);
}

template <class C>
void forward_tiles(const Forward& a, Queue& queue, const ForwardWorkspace& memory) {
  int64_t task, last;
  if (!queue.take(&task, &last)) {
    return;
  }
  do {
    while (task < last) {
      PackedKeys<C> keys(a, memory, QueryTile(a, task));
      for (;;) {
        const QueryTile at(a, task);
        if (!keys.holds(at)) {
          break;
        }
        if (at.is_past_end()) {
          task = std::min(last_of_head(task, a.row_tiles()), last - 1);
        } else if (!a.is_few(at.sequence)) {
          forward_tile<C>(a, at, keys, memory);
        } else if (at.h % a.group() == 0) {
          decode_sequence(a, at.sequence, at.kv_head, memory);
        }
        if (++task == last && !queue.take(&task, &last)) {
          return;
        }
      }
    }
  } while (queue.take(&task, &last));
}

// -- entries -------------------------------------------------------------------------------------
template <class Run>
inline void with_units(DType type, const Run& run) {
  type == DType::kBFloat16 ? run(UnitsOf<BFloat16>{}) : run(Floats{});
}

void forward(const Forward& a, Queue& queue, float* workspace) {
  const ForwardWorkspace memory(a, workspace);
  if (a.all_few()) {
    return decode_splits(a, queue, memory);
  }
  with_units(a.type, [&](auto u) { forward_tiles<decltype(u)>(a, queue, memory); });
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
