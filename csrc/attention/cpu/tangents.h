// The forward of attention on CPU with tangents, for forward-mode differentiation. With the
// tangents of the scores ds = scale (q' k^T + q k'^T) + mask':
//
//   lse' = sum p ds + p_sink sink'     out' = dropout(p) v' + dropout(p (ds - lse')) v
//
// Tiles and the order of sums are the forward's, so the bits of out and lse are, too; for few
// queries the forward itself computes them. lse' is known after the last tile only. Until then the
// mean of ds over the keys so far takes its place, and a change of the mean by c changes the sum
// for out' by -c times that for out.
#pragma once

#include "attention/cpu/forward.h"

namespace fastattn::attention::FASTATTN_ISA {

// -- the tangent of a mask -----------------------------------------------------------------------
inline float number_at(const MaskView& x, int64_t offset) {
  switch (x.type) {
    case MaskType::kBFloat16:
      return load(static_cast<const BFloat16*>(x.data) + offset, 1)[0];
    case MaskType::kFloat16:
      return load(static_cast<const Float16*>(x.data) + offset, 1)[0];
    case MaskType::kFloat64:
      return static_cast<float>(static_cast<const double*>(x.data)[offset]);
    default:
      return static_cast<const float*>(x.data)[offset];
  }
}

// `count` numbers of a row as floats, padded with 0 to kTileKeys.
inline void number_row(const MaskView& x, int64_t offset, int count, float* row) {
  memset(row, 0, sizeof(float) * kTileKeys);
  const bool contiguous = with_number_row(x, offset, [&](const auto* source, float) {
    for_vectors(count, [&](auto lanes, int64_t j) { store(row + j, lanes.load(source + j)); });
  });
  for (int j = 0; !contiguous && j < count; ++j) {
    row[j] = number_at(x, offset + j * x.strides[3]);
  }
}

// -- one tile ------------------------------------------------------------------------------------
// Keys and values of one (sequence, kv head) and their tangents.
template <class C>
struct PackedTangents {
  PackedKeys<C> keys, changes;

  bool holds(const QueryTile& at) const { return keys.holds(at); }
};

// The tangent of lse of a row without an allowed key: the tangent of its lse, the sink.
inline float dead_lse_tangent(const Tangents& a, int64_t h) {
  return a.sinks_tangent && a.sinks[h] != -kInfinity ? a.sinks_tangent[h] : 0.0f;
}

inline void write_dead_tangents(const Tangents& a, const Sequence& s, int64_t h, int first,
                                int end) {
  const int64_t bytes = (a.type == DType::kFloat32 ? 4 : 2);
  const int live = live_queries(a, s);
  for (int i = first; i < end; ++i) {
    memset(static_cast<char*>(a.out_tangent.data) + bytes * query_offset(a.out_tangent, s, h, i), 0,
           bytes * a.value_dim);
    a.lse_tangent[query_offset(a.lse_strides, s, h, i)] = i < live ? dead_lse_tangent(a, h) : 0.0f;
  }
}

// The sums of a tile of queries.
struct TangentSums {
  SoftmaxState state;
  float ds[kTileRows] = {};    // of 2^(exponent - m) ds
  float mean[kTileRows] = {};  // of ds over the keys so far
  bool written = false;        // whether the sums for out and out' are

  explicit TangentSums(int rows) : state(rows) {}
};

// A worker's tile of queries.
template <class C>
class TangentTile {
 public:
  TangentTile(const Tangents& a, const QueryTile& at, PackedTangents<C>& packed,
              const TangentsWorkspace& memory)
      : a_(a),
        at_(at),
        packed_(packed),
        memory_(memory),
        rows_(a, at.sequence, at.first, LseRows{}) {
    const Range tiles = rows_.tiles();
    const bool once = tiles.end - tiles.begin == 1;
    const auto rows_of = [&](const TensorView& x, float* memory) {
      return x.data && !is_empty(tiles) ? query_rows<C>(a, x, at, rows_.count, once, memory)
                                        : Operand<C>{};
    };
    q_ = rows_of(a.q, memory.values.q_rows);
    q_tangent_ = rows_of(a.q_tangent, memory.q_rows);
  }

  void compute() {
    TangentSums sums(rows_.count);
    const Range tiles = rows_.tiles();
    for (int n = tiles.begin; n < tiles.end; ++n) {
      add_tile(n, sums);
    }
    if (!sums.written) {
      clear_sums();
    }
    write(sums);
  }

 private:
  using Unit = typename C::Unit;
  static constexpr int kStride = kTileKeys / C::kDepth;

  void clear_sums() const {
    memset(memory_.values.o, 0, sizeof(float) * rows_.count * E_);
    memset(memory_.out, 0, sizeof(float) * rows_.count * E_);
  }

  void add_tile(int n, TangentSums& sums) const {
    const int first_key = n * kTileKeys;
    const int in_tile = smaller(rows_.some.end - first_key, kTileKeys);
    const int columns = round_up(in_tile, kLanes);
    const Range live = rows_.touching(first_key, columns);
    const Sequence& s = at_.sequence;
    const TileBias bias(a_, s, at_.h, at_.first, live, first_key, memory_.values.bias);
    if (is_empty(live) || bias.none) {
      return;
    }
    packed_.keys.pack(n);
    packed_.changes.pack(n);
    multiply_queries(q_, packed_.keys.k(n), live, columns, memory_.values.s, false);
    if (a_.of_scores()) {
      compute_ds(n, live, in_tile, columns);
    }
    const TileDropout dropout(a_, s.b, at_.h, at_.first, first_key);
    const bool restricted = !rows_.allows_all(first_key, columns) || !(a_.scale > 0.0f);
    bias.with_rows([&](const auto& bias_row) {
      with_flags(restricted, bool(dropout), [&](auto range, auto drop) {
        a_.of_scores()
            ? weigh_scores<range, drop>(bias_row, live, first_key, columns, dropout, sums)
            : weigh_values<range, drop>(bias_row, live, first_key, columns, dropout, sums);
      });
    });
    const bool add = sums.written || live.end - live.begin < rows_.count;
    if (add && !sums.written) {
      clear_sums();
    }
    sums.written = true;
    const Operand<C> v = packed_.keys.v(n);
    multiply_weights(p(), v, live, in_tile, memory_.values.o, add);
    if (a_.of_scores()) {
      multiply_weights(dp(), v, live, in_tile, memory_.out, add);
    }
    if (a_.v_tangent.data) {
      multiply_weights(p(), packed_.changes.v(n), live, in_tile, memory_.out,
                       add || a_.of_scores());
    } else if (!a_.of_scores() && !add) {
      memset(memory_.out, 0, sizeof(float) * rows_.count * E_);
    }
  }

  // Operands of the products with v and v': floats take the places of scores and of ds.
  Unit* p() const { return units<C>(C::kDepth == 1 ? memory_.values.s : memory_.values.p); }
  Unit* dp() const { return units<C>(C::kDepth == 1 ? memory_.ds : memory_.dp); }

  void multiply_queries(const Operand<C>& q, const Unit* k, Range live, int columns, float* sums,
                        bool add) const {
    multiply<C>(live.end - live.begin, columns, ceil_div(a_.head_dim, C::kDepth), q.row(live.begin),
                q.stride, 1, k, kTileKeys, sums + live.begin * kTileKeys, kTileKeys, add);
  }
  void multiply_weights(const Unit* weights, const Operand<C>& v, Range live, int in_tile,
                        float* sums, bool add) const {
    multiply<C>(live.end - live.begin, static_cast<int>(E_), ceil_div(in_tile, C::kDepth),
                weights + live.begin * kStride, kStride, 1, v.data, v.stride,
                sums + live.begin * E_, E_, add);
  }

  // Writes the tangents of the scores, before the scale unless the mask has a tangent.
  void compute_ds(int n, Range live, int in_tile, int columns) const {
    float* const ds = memory_.ds;
    if (a_.q_tangent.data) {
      multiply_queries(q_tangent_, packed_.keys.k(n), live, columns, ds, false);
    }
    if (a_.k_tangent.data) {
      multiply_queries(q_, packed_.changes.k(n), live, columns, ds, a_.q_tangent.data != nullptr);
    }
    if (a_.mask_tangent.type == MaskType::kNone) {
      return;
    }
    if (!a_.q_tangent.data && !a_.k_tangent.data) {
      memset(ds + live.begin * kTileKeys, 0, sizeof(float) * (live.end - live.begin) * kTileKeys);
    }
    for (int i = live.begin; i < live.end; ++i) {
      const int64_t offset = mask_offset(a_.mask_tangent, at_.sequence.b, at_.h, at_.first + i,
                                         int64_t{n} * kTileKeys);
      number_row(a_.mask_tangent, offset, in_tile, memory_.mask);
      float* const row = ds + i * kTileKeys;
      for (int j = 0; j < columns; j += kLanes) {
        store(row + j, fma(load(row + j), splat(a_.scale), load(memory_.mask + j)));
      }
    }
  }

  // The softmax, if the scores have no tangents.
  template <bool kRange, bool kDrop, class BiasRows>
  void weigh_values(const BiasRows& bias, Range live, int first_key, int columns,
                    const TileDropout& dropout, TangentSums& sums) const {
    float *const s = memory_.values.s, *const o = memory_.values.o, *const out = memory_.out;
    Unit* const weights = p();
    const auto write = [=](int i, int j, Float, Float kept) __attribute__((always_inline)) {
      store_weights<C>(weights + i * kStride, j, kept);
    };
    const auto finish = [=, E = E_](int i, int, float rescale) {
      rescale_row(o + i * E, E, rescale);
      rescale_row(out + i * E, E, rescale);
    };
    softmax_each_row<kRange, kDrop>(rows_, live, a_.scale * kLog2E, bias, dropout, first_key,
                                    columns, s, sums.state, write, finish);
  }

  // The softmax, with weights of v for out': dropout(p (ds - mean)).
  template <bool kRange, bool kDrop, class BiasRows>
  void weigh_scores(const BiasRows& bias, Range live, int first_key, int columns,
                    const TileDropout& dropout, TangentSums& sums) const {
    constexpr bool kSomeBlocked = kRange || decltype(bias(0))::kAny;
    const Float scale = splat(a_.mask_tangent.type == MaskType::kNone ? a_.scale : 1.0f);
    float *const s = memory_.values.s, *const all_ds = memory_.ds;
    Unit *const p_rows = p(), *const dp_rows = dp();
    Float total = {};  // of a row's p ds
    const auto write = [&](int i, int j, Float weight, Float kept) __attribute__((always_inline)) {
      Float ds = load(all_ds + i * kTileKeys + j) * scale;
      if constexpr (kSomeBlocked) {  // they may hold NaN
        ds = weight == 0.0f ? Float{} : ds;
      }
      total = fma(weight, ds, total);
      store(all_ds + i * kTileKeys + j, ds);
      store(s + i * kTileKeys + j, kept);
      if constexpr (C::kDepth > 1) {
        store_weights<C>(p_rows + i * kStride, j, kept);
      }
    };
    const auto finish = [&](int i, int count, float rescale) __attribute__((always_inline)) {
      sums.ds[i] = sums.ds[i] * rescale + sum(total);
      total = Float{};
      const float l = sums.state.l[i], mean = l == 0.0f ? 0.0f : sums.ds[i] / l;
      const float change = mean - sums.mean[i];
      sums.mean[i] = mean;
      if (sums.written) {
        move_mean(i, rescale, change);
      }
      for (int j = 0; j < count; j += kLanes) {
        const Float ds = load(all_ds + i * kTileKeys + j);
        store_weights<C>(dp_rows + i * kStride, j, load(s + i * kTileKeys + j) * (ds - mean));
      }
    };
    softmax_each_row<kRange, kDrop>(rows_, live, a_.scale * kLog2E, bias, dropout, first_key,
                                    columns, s, sums.state, write, finish);
  }

  // Rescales a row's sums and subtracts `change` from the ds in them.
  void move_mean(int i, float rescale, float change) const {
    if (rescale == 1.0f && change == 0.0f) {
      return;
    }
    float *const o = memory_.values.o + i * E_, *const out = memory_.out + i * E_;
    for (int64_t e = 0; e < E_; e += kLanes) {
      const Float value = load(o + e) * rescale;
      store(o + e, value);
      store(out + e, fma(value, splat(-change), load(out + e) * rescale));
    }
  }

  void write(const TangentSums& sums) const {
    const Sequence& s = at_.sequence;
    const int64_t position = query_offset(a_.lse_strides, s, at_.h, at_.first);
    const int end = at_.first + rows_.count;
    const bool written = a_.is_few(s);  // out and lse, by the forward
    float factors[kTileRows];
    for (int i = 0; i < rows_.count; ++i) {
      const SoftmaxState::Total total = sums.state.total(i, a_.sink(at_.h));
      factors[i] = total.weight * a_.dropout.scale;
      if (!written) {
        a_.lse[position + i] = total.lse;
      }
      a_.lse_tangent[position + i] = lse_tangent(sums, i, total);
      if (a_.sinks && !sums.state.dead(i)) {
        move_mean(i, 1.0f, a_.lse_tangent[position + i] - sums.mean[i]);
      }
    }
    const auto store_out = [&](const TensorView& x, const float* from) {
      store_rows(a_.type, x.data, query_offset(x, s, at_.h, at_.first), x.row_stride, rows_.count,
                 a_.value_dim, from, [&](int i) { return factors[i]; });
    };
    if (!written) {
      store_out(a_.out, memory_.values.o);
      write_dead_rows(a_, s, at_.h, end, at_.end);
    }
    store_out(a_.out_tangent, memory_.out);
    write_dead_tangents(a_, s, at_.h, end, at_.end);
  }

  float lse_tangent(const TangentSums& sums, int i, const SoftmaxState::Total& total) const {
    if (sums.state.dead(i)) {
      return dead_lse_tangent(a_, at_.h);
    }
    if (!a_.sinks) {
      return sums.mean[i];
    }
    const float of_keys = sums.ds[i] * total.weight;
    const float of_sink = a_.sinks_tangent ? a_.sinks_tangent[at_.h] : 0.0f;
    const float p_sink = std::exp(a_.sinks[at_.h] - total.lse);
    return p_sink == 0.0f ? of_keys : of_keys + p_sink * of_sink;
  }

  const Tangents& a_;
  const QueryTile& at_;
  PackedTangents<C>& packed_;
  const TangentsWorkspace& memory_;
  const RowRanges rows_;
  const int64_t E_ = padded(a_.value_dim);
  Operand<C> q_ = {}, q_tangent_ = {};
};

// -- entry ---------------------------------------------------------------------------------------
void tangents(const Tangents& a, Queue& queue, float* workspace) {
  const TangentsWorkspace memory(a, workspace);
  Problem changes = a;
  changes.k = a.k_tangent;
  changes.v = a.v_tangent;
  with_units(a.type, [&](auto u) {
    using C = decltype(u);
    for_tiles_with_keys(
        a, queue,
        [&](const QueryTile& first) {
          return PackedTangents<C>{PackedKeys<C>(a, memory.values, first),
                                   PackedKeys<C>(changes, memory.changes, first)};
        },
        [&](const QueryTile& at, PackedTangents<C>& packed) {
          const bool few = a.is_few(at.sequence) && !a.all_few();
          if (few && at.h % a.group() == 0) {
            decode_sequence(a, at.sequence, at.kv_head, memory.values);
          }
          TangentTile<C>(a, at, packed, memory).compute();
        });
  });
}

}  // namespace fastattn::attention::FASTATTN_ISA
