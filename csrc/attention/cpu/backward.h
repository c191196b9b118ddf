// Gradients of attention on CPU. Scores are recomputed tile by tile, p = exp(s - lse), and with dp
// = dropout(dout v^T) and delta = rowsum(dout * out) - dlse:
//
//   ds = p (dp - delta)   dq = scale ds k   dk = scale ds^T q   dv = dropout(p)^T dout   dmask = ds
//
// ddistance_bias is the sum of ds over the pairs of each distance. Each tile's sums are added to
// those of a part of the keys (kDistanceParts), whichever worker computes it, and the parts at the
// end, so the order is always the same.
//
// With a soft cap, the ds of dq and dk is multiplied by its derivative, 1 - (s / cap)^2, where s is
// the capped score.
//
// One task computes dq, dk and dv of a (batch, kv head). Where there are too few of these, tiles of
// keys (dk, dv) and tiles of queries (dq) are separate tasks: two more products per tile, but the
// same tiles in the same order, so the same bits. A separate pass computes dmask. Dead rows, which
// lse marks, and dead keys are packed as zeros. A sink is a score without a value, so its dp is 0:
//
//   dsinks = -sum of p_sink delta over the rows, p_sink = exp(sink - lse)
#pragma once

#include <numeric>

#include "attention/cpu/forward.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

inline const float* row_values(const Problem& a, const float* values, const Sequence& s, int64_t h,
                               int row) {
  return values + query_offset(a.lse_strides, s, h, row);
}
inline LseRows lse_rows(const Backward& a, const Sequence& s, int64_t h, int row) {
  return {row_values(a, a.lse, s, h, row), a.sink(h)};
}

// -- one tile ------------------------------------------------------------------------------------
// A vector of dropout(p) and of ds.
struct Weights {
  Float kept, ds;
};

// The derivative of a soft cap below which it is 0: the rounding error of 1 - tanh^2.
constexpr float kSmallestSlope = 0x1p-20f;

// A row of scores and dp, and what is needed to compute its weights. kChanged: ds is that of the
// products of queries and keys, and is summed by distance before.
template <bool kRange, bool kDrop, bool kChanged, class Bias>
struct GradientRow {
  const float *s, *dp;
  int begin, end;  // allowed keys, counted from the tile's first
  Bias bias;
  float m, log_sum, delta;
  TileDropout::Row drawn;
  // Used if kChanged.
  float inverse_cap;   // 0 without a soft cap
  float* by_distance;  // where the row's ds are added, null: not wanted

  Weights at(int j, float scale_log2, float keep_scale) const {
    // For large scores, s - lse may be far above 0 because of rounding.
    const Float exponent = exponents<kRange>(s, j, scale_log2, begin, end, bias) - m - log_sum;
    const Float p = power(smaller_of(Float{}, exponent));
    Float g = load(dp + j), kept = p;
    if constexpr (kDrop) {
      g = drawn.apply(g * keep_scale, j);
      kept = drawn.apply(p * keep_scale, j);
    }
    Float ds = p * (g - delta);
    if constexpr (kChanged) {
      if (by_distance) {
        store(by_distance + j, load(by_distance + j) + ds);
      }
      const Float ratio = load(s + j) * inverse_cap, slope = fma(-ratio, ratio, splat(1.0f));
      ds = slope < kSmallestSlope ? Float{} : ds * slope;
    }
    return {kept, ds};
  }
};

// A worker's tiles: packs queries and keys, computes p and ds of a pair of tiles.
template <class C>
class Gradients {
 public:
  using Unit = typename C::Unit;

  Gradients(const Backward& a, const BackwardWorkspace& memory) : a_(a), memory_(memory) {}

  // for_gradients: not only scores will be computed.
  void pack_keys(const Sequence& s, int64_t kv_head, int tile, const DeadKeys& dead,
                 bool for_gradients = true) {
    first_key_ = tile * kTileKeys;
    const int count = smaller(kTileKeys, s.keys - first_key_);
    const int upto = round_up(count, kBlock);
    const auto rows_of = [&](const TensorView& x, int dim) {
      const int64_t offset = key_offset(x, s, kv_head, first_key_);
      if (upto == count) {
        const auto rows = unpacked_rows(x, offset, dim, kBlock);
        if (rows.data && no_key_is_dead(dead, first_key_, count, rows, dim)) {
          return rows;
        }
      }
      Unit* rows = units<C>(memory_.k_rows);
      pack_rows<C>(a_.type, x.data, offset, x.row_stride, count, upto, dim, rows,
                   dead.of_tile(first_key_));
      return Operand<C>{rows, padded(dim) / C::kDepth};
    };
    if (for_gradients) {
      to_columns<C>(rows_of(a_.v, a_.value_dim), upto, a_.value_dim, units<C>(memory_.v_columns));
    }
    const Operand<C> k = rows_of(a_.k, a_.head_dim);
    to_columns<C>(k, upto, a_.head_dim, units<C>(memory_.k_columns));
    if constexpr (C::kDepth == 1) {
      k_pairs_ = k.data;
    } else if (for_gradients) {
      to_pairs(k, upto, a_.head_dim, units<C>(memory_.k_pairs));
      k_pairs_ = units<C>(memory_.k_pairs);
    }
  }

  // for_keys: dk and dv will be computed.
  void pack_queries(const Sequence& s, int64_t h, int first, int count, bool for_keys) {
    sequence_ = s;
    h_ = h;
    first_row_ = first;
    const LseRows lse = lse_rows(a_, s, h, first);
    q_ = pack_query_rows(a_.q, a_.head_dim, count, lse, memory_.q_rows);
    q_pairs_ = pairs_of(q_, a_.head_dim, count, memory_.q_pairs, for_keys);
    if (a_.dout.data) {
      dout_ = pack_query_rows(a_.dout, a_.value_dim, count, lse, memory_.dout_rows);
      dout_pairs_ = pairs_of(dout_, a_.value_dim, count, memory_.dout_pairs, for_keys);
    }
  }

  // Adds the scores of the packed queries and keys to their rows' softmax.
  void add_scores(const RowRanges& rows, SoftmaxState& state) {
    const TileBias bias = begin_tile(rows);
    if (!compute_scores(bias)) {
      return;
    }
    const float scale_log2 = a_.score_scale() * kLog2E;
    const bool restricted = !rows.allows_all(first_key_, columns_) || !(scale_log2 > 0.0f);
    const TileDropout dropout(a_, sequence_.b, h_, first_row_, first_key_);
    with_flags(restricted, bool(bias), [&](auto range, auto biased) {
      const auto bias_row = [&](int i) {
        if constexpr (biased) {
          return bias.floats(i);
        } else {
          return NoBias{};
        }
      };
      softmax_each_row<range, false>(
          rows, live_, scale_log2, bias_row, dropout, first_key_, columns_, memory_.s, state,
          [](int, int, Float, Float) {}, [](int, int, float) {});
    });
  }

  // Computes p and ds of the packed queries and keys; false if no pair is allowed. Unless
  // distance_sums is null, adds ds there, as distance_sums_of.
  bool compute(const RowRanges& rows, const float* delta, bool for_keys, bool for_queries,
               float* distance_sums = nullptr) {
    const TileBias bias = begin_tile(rows);
    if (!compute_scores(bias)) {
      return false;
    }
    const int first = live_.begin, count = live_.end - live_.begin;
    float* const dp = memory_.dp + first * kTileKeys;
    if (a_.dout.data) {
      multiply<C>(count, columns_, ceil_div(a_.value_dim, C::kDepth), dout_.row(first),
                  dout_.stride, 1, units<C>(memory_.v_columns), kTileKeys, dp, kTileKeys, false);
    } else {
      memset(dp, 0, sizeof(float) * count * kTileKeys);
    }
    const TileDropout dropout(a_, sequence_.b, h_, first_row_, first_key_);
    const LseRows known = lse_rows(a_, sequence_, h_, first_row_);
    if (a_.dweights) {
      add_dweights(known);
    }
    const float* const m = row_values(a_, a_.m, sequence_, h_, first_row_);
    const float* const log_sum = row_values(a_, a_.log_sum, sequence_, h_, first_row_);
    const float inverse_cap = a_.softcap > 0.0f ? 1.0f / a_.softcap : 0.0f;
    const auto write = [&](auto changed, const auto& bias_row) __attribute__((always_inline)) {
      with_flags(!rows.allows_all(first_key_, columns_), bool(dropout), [&](auto range, auto drop) {
        const auto row = [&](int i) __attribute__((always_inline)) {
          return GradientRow<range, drop, changed, decltype(bias_row(i))>{
              memory_.s + i * kTileKeys,
              memory_.dp + i * kTileKeys,
              rows.begin[i] - first_key_,
              rows.end[i] - first_key_,
              bias_row(i),
              m[i],
              log_sum[i],
              delta[i],
              dropout.row(i),
              inverse_cap,
              distance_sums ? tile_sums(i) : nullptr};
        };
        columns_ == kTileKeys ? write_weights(row, kTileKeys, for_keys, for_queries)
                              : write_weights(row, columns_, for_keys, for_queries);
      });
    };
    if (distance_sums) {
      memset(memory_.by_distance, 0, sizeof(float) * kTileSums);
    }
    if (distance_sums || (a_.softcap > 0.0f && (for_keys || for_queries))) {
      write(std::true_type{}, [&bias](int i) { return bias.floats(i); });
    } else {
      bias.with_rows([&](const auto& bias_row) { write(std::false_type{}, bias_row); });
    }
    if (distance_sums) {
      add_tile_sums(distance_sums);
    }
    return true;
  }

  // Products of the last computed tile, in rows of padded(dim) floats: dv and dk of the tile of
  // keys, accumulated if `add`, otherwise overwritten; dq of the tile of queries, accumulated.
  void sum_dv(float* dv, bool add) const {
    if (a_.dout.data) {
      sum_of_keys(p_pairs_, dout_pairs_, padded(a_.value_dim), dv, add);
    } else if (!add) {
      memset(dv, 0, sizeof(float) * columns_ * padded(a_.value_dim));
    }
  }
  void sum_dk(float* dk, bool add) const {
    sum_of_keys(ds_pairs_, q_pairs_, padded(a_.head_dim), dk, add);
  }
  void add_dq(float* dq) const {
    constexpr int kStride = kTileKeys / C::kDepth;
    const int64_t D = padded(a_.head_dim);
    multiply<C>(live_.end - live_.begin, static_cast<int>(D), columns_ / C::kDepth,
                ds_rows_ + live_.begin * kStride, kStride, 1, k_pairs_, D, dq + live_.begin * D, D,
                true);
  }
  // ds as floats, in rows of kTileKeys (Floats only); the rows and columns that were computed.
  const float* ds() const { return memory_.dp; }
  Range rows() const { return live_; }
  int columns() const { return columns_; }

 private:
  static constexpr int kBlock = 16;  // positions and units that are transposed together

  // The bias of the packed keys, for the rows that may attend some of them.
  TileBias begin_tile(const RowRanges& rows) {
    columns_ = round_up(smaller(rows.some.end - first_key_, kTileKeys), kLanes);
    live_ = rows.touching(first_key_, columns_);
    return {a_, sequence_, h_, first_row_, live_, first_key_, memory_.bias};
  }
  // Computes the tile's scores; false if no pair is allowed.
  bool compute_scores(const TileBias& bias) const {
    if (is_empty(live_) || bias.none) {
      return false;
    }
    const int first = live_.begin, count = live_.end - live_.begin;
    float* const s = memory_.s + first * kTileKeys;
    multiply<C>(count, columns_, ceil_div(a_.head_dim, C::kDepth), q_.row(first), q_.stride, 1,
                units<C>(memory_.k_columns), kTileKeys, s, kTileKeys, false);
    cap_scores(a_, count, columns_, s);
    return true;
  }

  // Adds the gradient of the weights to dp, which is that of dropout(p).
  void add_dweights(const LseRows& known) const {
    const int64_t head = a_.average ? sequence_.b : sequence_.b * a_.heads + h_;
    const Float part = splat(a_.average ? 1.0f / a_.heads : 1.0f);
    const int keys = smaller(a_.keys - first_key_, columns_);
    for (int i = live_.begin; i < live_.end; ++i) {
      if (known.dead(i)) {
        continue;
      }
      const int64_t row = head * a_.queries + first_row_ + i;
      const float* const dweights = a_.dweights + row * a_.keys + first_key_;
      float* const dp = memory_.dp + i * kTileKeys;
      for_vectors(keys, [&](auto lanes, int64_t j) {
        lanes.store(dp + j, fma(lanes.load(dweights + j), part, lanes.load(dp + j)));
      });
    }
  }

  // Sums by distance of a tile. Row i adds its ds from column 0 on at tile_sums(i), always whole
  // aligned vectors: rows whose numbers differ by a multiple of kLanes share sums, rows of other
  // numbers have their own, each of kSumStride floats with a margin of zeros on both sides.
  static constexpr int kSumStride = kTileDistances + kLanes;
  float* tile_sums(int i) const {
    return memory_.by_distance + i % kLanes * kSumStride + kTileRows - i / kLanes * kLanes;
  }
  void add_tile_sums(float* sums) const {
    const int rows = live_.end - live_.begin;
    const int columns = smaller(columns_, sequence_.keys - first_key_);
    // Sum of the pair in the last row and the first column.
    const float* first = memory_.by_distance + kTileRows - live_.end + 1;
    float* const result = sums + first_key_ - first_row_ + sequence_.queries - live_.end;
    for_vectors(rows + columns - 1, [&](auto lanes, int64_t t) {
      Float total = lanes.load(result + t);
      for (int r = 0; r < kLanes; ++r) {
        total += load(first + r * (kSumStride + 1) + t);
      }
      lanes.store(result + t, total);
    });
  }

  void sum_of_keys(const Unit* weights, const Unit* values, int64_t dim, float* sums,
                   bool add) const {
    const int64_t first = live_.begin / C::kDepth;
    multiply<C>(columns_, static_cast<int>(dim), ceil_div(live_.end, C::kDepth) - first,
                weights + first * kTileKeys, 1, kTileKeys, values + first * dim, dim, sums, dim,
                add);
  }

  // Rows that need no packing, or null. Floats are also a right operand, which is read many times:
  // only if there are no gaps between rows.
  Operand<C> unpacked_rows(const TensorView& x, int64_t offset, int dim, int block) const {
    const bool has_gaps = x.row_stride != dim;
    return C::kDepth == 1 && has_gaps ? Operand<C>{} : in_place<C>(a_.type, x, offset, dim, block);
  }

  // Rows of q or dout, padded to an even number; rows without an allowed key are zeros.
  Operand<C> pack_query_rows(const TensorView& x, int dim, int count, const LseRows& known,
                             float* memory) const {
    const int64_t offset = query_offset(x, sequence_, h_, first_row_);
    bool whole = count % C::kDepth == 0;
    for (int i = 0; i < count; ++i) {
      whole = whole && !known.dead(i);
    }
    if (const auto rows = unpacked_rows(x, offset, dim, kBlock / C::kDepth); whole && rows.data) {
      return rows;
    }
    pack_rows<C>(a_.type, x.data, offset, x.row_stride, count, round_up(count, 2), dim,
                 units<C>(memory), dead_if([&](int i) { return known.dead(i); }));
    return {units<C>(memory), padded(dim) / C::kDepth};
  }

  const Unit* pairs_of(const Operand<C>& rows, int dim, int count, float* memory,
                       bool wanted) const {
    if constexpr (C::kDepth == 1) {
      return rows.data;
    } else {
      if (wanted) {
        to_pairs(rows, round_up(count, 2), dim, units<C>(memory));
      }
      return units<C>(memory);
    }
  }

  // Replaces scores and dp by the operands dropout(p) and ds: floats in place, bf16 in the rows
  // form for dq and the pairs form for dk and dv. row(i): the GradientRow.
  template <class RowOf>
  inline __attribute__((always_inline)) void write_weights(const RowOf& row, int columns,
                                                           bool for_keys, bool for_queries) {
    const float scale_log2 = a_.score_scale() * kLog2E, keep_scale = a_.dropout.scale;
    if constexpr (C::kDepth == 1) {
      (void)for_keys;
      (void)for_queries;
      p_pairs_ = memory_.s;
      ds_pairs_ = ds_rows_ = memory_.dp;
      for (int i = live_.begin; i < live_.end; ++i) {
        const auto gradient = row(i);
        for (int j = 0; j < columns; j += kLanes) {
          const Weights w = gradient.at(j, scale_log2, keep_scale);
          store(memory_.s + i * kTileKeys + j, w.kept);
          store(memory_.dp + i * kTileKeys + j, w.ds);
        }
      }
    } else {
#if defined(__AVX512BF16__)
      p_pairs_ = units<C>(memory_.p_pairs);
      ds_pairs_ = units<C>(memory_.ds_pairs);
      ds_rows_ = units<C>(memory_.ds_rows);
      for (int i = live_.begin; i < live_.end; i += 2) {
        const bool two = i + 1 < live_.end;
        const auto first = row(i), second = row(two ? i + 1 : i);
        Unit* const p = units<C>(memory_.p_pairs) + i / 2 * kTileKeys;
        Unit* const ds = units<C>(memory_.ds_pairs) + i / 2 * kTileKeys;
        auto* const ds_row = reinterpret_cast<uint16_t*>(memory_.ds_rows) + i * kTileKeys;
        for (int j = 0; j < columns; j += kLanes) {
          const Weights w = first.at(j, scale_log2, keep_scale);
          const Weights next = two ? second.at(j, scale_log2, keep_scale) : Weights{};
          const TwoRows rows = rounded_to_bf16(w.ds, next.ds);
          if (for_queries) {
            store_halves(ds_row + j, ds_row + kTileKeys + j, rows);
          }
          if (for_keys) {
            store_bits(ds + j, joined(rows));
            store_bits(p + j, joined(rounded_to_bf16(w.kept, next.kept)));
          }
        }
      }
#endif
    }
  }

  const Backward& a_;
  const BackwardWorkspace& memory_;
  Sequence sequence_ = {};
  int64_t h_ = 0;
  int first_row_ = 0, first_key_ = 0, columns_ = 0;
  Range live_ = {0, 0};
  Operand<C> q_ = {}, dout_ = {};
  const Unit *q_pairs_ = nullptr, *dout_pairs_ = nullptr, *k_pairs_ = nullptr;
  const Unit *p_pairs_ = nullptr, *ds_pairs_ = nullptr, *ds_rows_ = nullptr;
};

// -- m, log_sum and delta ------------------------------------------------------------------------
// From this |lse * log2(e)| on, a row's maximum and sum of exponentials are computed again, because
// the rounding error of lse is a factor of all its weights: 2^-12 here, any number where a mask
// adds -1e9 to all scores. So are those of few queries, whose scores the forward sums in another
// order: where large products cancel, the difference is a factor of all weights, too.
constexpr float kLargeLse = 4096.0f;

inline void find_weights(const Backward& a, const QueryTile& at, const RowRanges& rows,
                         const LseRows& known, const BackwardWorkspace& memory, float* m,
                         float* log_sum) {
  const bool few = a.is_few(at.sequence);
  const auto computed_again = [&](int i) {
    return !known.dead(i) && (few || std::abs(m[i]) >= kLargeLse);
  };
  bool any = false;
  for (int i = 0; i < rows.count; ++i) {
    m[i] = known.dead(i) ? 0.0f : known.lse[i] * kLog2E;
    log_sum[i] = 0.0f;
    any = any || computed_again(i);
  }
  if (!any) {
    return;
  }
  with_units(a.type, [&](auto u) {
    Gradients<decltype(u)> tiles(a, memory);
    SoftmaxState state(rows.count);
    tiles.pack_queries(at.sequence, at.h, at.first, rows.count, false);
    const DeadKeys dead(a, at.sequence, at.kv_head);
    for (int n = rows.tiles().begin; n < rows.tiles().end; ++n) {
      tiles.pack_keys(at.sequence, at.kv_head, n, dead, false);
      tiles.add_scores(rows, state);
    }
    for (int i = 0; i < rows.count; ++i) {
      if (computed_again(i) && !state.dead(i)) {
        const SoftmaxState::Total total = state.total(i, a.sink(at.h));
        m[i] = total.m;
        log_sum[i] = std::log2(total.l);
      }
    }
  });
}

// The dot product of x and y, before the sum over lanes.
template <class T>
inline Float row_products(const T* x, const T* y, int dim) {
  Float total = {};
  for_vectors(dim, [&](auto lanes, int64_t d) {
    total = fma(lanes.load(x + d), lanes.load(y + d), total);
  });
  return total;
}
#if defined(__AVX512BF16__)
inline Float row_products(const BFloat16* x, const BFloat16* y, int dim) {
  Float total[1][1] = {};
  products(reinterpret_cast<const uint32_t*>(x), 0, y, 0, dim, total);
  return total[0][0];
}
#endif

inline void delta_from_out(const Backward& a, const QueryTile& at, const RowRanges& rows,
                           const LseRows& known, float* delta) {
  with_type(a.type, [&](auto element) {
    using T = decltype(element);
    const auto row = [&](const TensorView& x) {
      return static_cast<const T*>(x.data) + query_offset(x, at.sequence, at.h, at.first);
    };
    const T *out = row(a.out), *dout = row(a.dout);
    for (int i = 0; i < rows.count; ++i) {
      delta[i] = known.dead(i) ? 0.0f
                               : sum(row_products(out + i * a.out.row_stride,
                                                  dout + i * a.dout.row_stride, a.value_dim));
    }
  });
}

// With delta = 0, the sum of a row's ds is its delta. The rounding error of lse is a factor of all
// weights of a row: where dweights are given, delta is divided by the sum of the weights, which has
// the same factor, so that sums of p (dp - delta) stay 0. With dropout or a sink, the sums computed
// here are not those of the weights.
inline void delta_from_weights(const Backward& a, const QueryTile& at, const RowRanges& rows,
                               const BackwardWorkspace& memory, float* delta) {
  const bool normalize = a.dweights && a.dropout.threshold == 0 && !a.sinks;
  float sums[kTileRows] = {};
  Gradients<Floats> tiles(a, memory);
  tiles.pack_queries(at.sequence, at.h, at.first, rows.count, false);
  const DeadKeys dead(a, at.sequence, at.kv_head);
  const float zeros[kTileRows] = {};
  memset(delta, 0, sizeof(float) * rows.count);
  for (int n = rows.tiles().begin; n < rows.tiles().end; ++n) {
    tiles.pack_keys(at.sequence, at.kv_head, n, dead);
    if (!tiles.compute(rows, zeros, false, false)) {
      continue;
    }
    for (int i = tiles.rows().begin; i < tiles.rows().end; ++i) {
      Float total = {}, weights = {};
      for (int j = 0; j < tiles.columns(); j += kLanes) {
        total += load(tiles.ds() + i * kTileKeys + j);
        weights += load(memory.s + i * kTileKeys + j);
      }
      delta[i] += sum(total);
      sums[i] += sum(weights);
    }
  }
  for (int i = 0; normalize && i < rows.count; ++i) {
    if (sums[i] > 0.0f) {
      delta[i] /= sums[i];
    }
  }
}

void delta(const Backward& a, Queue& queue, float* workspace) {
  const BackwardWorkspace memory(a, workspace);
  for_query_tiles(a, queue, [&](const QueryTile& at) {
    const int64_t position = query_offset(a.lse_strides, at.sequence, at.h, at.first);
    const LseRows known = {a.lse + position, a.sink(at.h)};
    const RowRanges rows(a, at.sequence, at.first, known);
    find_weights(a, at, rows, known, memory, a.m + position, a.log_sum + position);
    float* result = a.delta + position;
    if (!a.dout.data && !a.dweights) {
      memset(result, 0, sizeof(float) * rows.count);
    } else if (a.exact_delta || (a.type != DType::kFloat32 && a.has_few_keys(at.sequence))) {
      delta_from_weights(a, at, rows, memory, result);
    } else {
      delta_from_out(a, at, rows, known, result);
    }
    for (int i = 0; a.dlse && i < rows.count; ++i) {
      if (!known.dead(i)) {
        result[i] -= a.dlse[position + i];
      }
    }
  });
}

// -- dq, dk, dv ----------------------------------------------------------------------------------
inline void store_gradient(const Backward& a, const TensorView& x, int64_t offset, int count,
                           int dim, const float* sums, float factor) {
  if (x.data) {
    store_rows(a.type, x.data, offset, x.row_stride, count, dim, sums,
               [factor](int) { return factor; });
  }
}

void dq(const Backward& a, Queue& queue, float* workspace) {
  with_units(a.type, [&](auto u) {
    const BackwardWorkspace memory(a, workspace);
    Gradients<decltype(u)> tiles(a, memory);
    for_query_tiles(a, queue, [&](const QueryTile& at) {
      const Sequence& s = at.sequence;
      const RowRanges rows(a, s, at.first, lse_rows(a, s, at.h, at.first));
      const float* delta = row_values(a, a.delta, s, at.h, at.first);
      memset(memory.dq, 0, sizeof(float) * a.rows_in_tile() * padded(a.head_dim));
      const Range range = rows.tiles();
      if (!is_empty(range)) {
        tiles.pack_queries(s, at.h, at.first, rows.count, false);
      }
      const DeadKeys dead(a, s, at.kv_head);
      for (int n = range.begin; n < range.end; ++n) {
        tiles.pack_keys(s, at.kv_head, n, dead);
        if (tiles.compute(rows, delta, false, true)) {
          tiles.add_dq(memory.dq);
        }
      }
      store_gradient(a, a.dq, query_offset(a.dq, s, at.h, at.first), at.end - at.first, a.head_dim,
                     memory.dq, a.scale);
    });
  });
}

// Clears the sums by distance of all heads of a group over a part of the keys.
inline void clear_distance_sums(const Backward& a, const Sequence& s, int64_t kv_head,
                                int64_t part) {
  for (int64_t h = kv_head * a.group(); h < (kv_head + 1) * a.group(); ++h) {
    memset(a.distance_sums_of(s, h, part), 0, sizeof(float) * (s.queries + s.keys));
  }
}

// Computes dk and dv of a tile of keys; unless dq is null, adds to dq ([group][queries] rows) of
// all queries that attend it. Adds to the sums by distance.
template <class C>
void key_gradients(const Backward& a, const Sequence& s, int64_t kv_head, int n,
                   const DeadKeys& dead, Gradients<C>& tiles, const BackwardWorkspace& memory,
                   float* dq) {
  const int64_t D = padded(a.head_dim), group = a.group();
  const int first_key = n * kTileKeys;
  const int count = smaller(kTileKeys, s.keys - first_key);
  // Sums cover whole vectors of keys. The first tile of queries overwrites them, unless it does not
  // reach the last keys.
  const int columns = round_up(count, kLanes);
  bool begun = false;
  const auto begin_with_zeros = [&] {
    memset(memory.dk, 0, sizeof(float) * columns * D);
    memset(memory.dv, 0, sizeof(float) * columns * padded(a.value_dim));
    begun = true;
  };
  bool packed = false;
  const bool for_keys = a.dk.data || a.dv.data;
  for (int64_t g = 0; g < group; ++g) {
    const int64_t h = kv_head * group + g;
    float* const distance_sums =
        a.ddistance_bias.data ? a.distance_sums_of(s, h, n % a.distance_parts()) : nullptr;
    for (int64_t i = 0; i * kTileRows < s.queries; ++i) {
      const int first = static_cast<int>(i) * kTileRows;
      const RowRanges rows(a, s, first, lse_rows(a, s, h, first));
      if (!contains(rows.tiles(), n)) {
        continue;
      }
      if (!packed) {
        tiles.pack_keys(s, kv_head, n, dead);
        packed = true;
      }
      tiles.pack_queries(s, h, first, rows.count, for_keys);
      if (!tiles.compute(rows, row_values(a, a.delta, s, h, first), for_keys, dq != nullptr,
                         distance_sums)) {
        continue;
      }
      if (!begun && tiles.columns() < columns) {
        begin_with_zeros();
      }
      if (a.dv.data) {
        tiles.sum_dv(memory.dv, begun);
      }
      if (a.dk.data) {
        tiles.sum_dk(memory.dk, begun);
      }
      begun = true;
      if (dq) {
        tiles.add_dq(dq + (g * a.row_tiles() + i) * a.rows_in_tile() * D);
      }
    }
  }
  if (!begun) {
    begin_with_zeros();
  }
  store_gradient(a, a.dk, key_offset(a.dk, s, kv_head, first_key), count, a.head_dim, memory.dk,
                 a.scale);
  store_gradient(a, a.dv, key_offset(a.dv, s, kv_head, first_key), count, a.value_dim, memory.dv,
                 1.0f);
}

void dkv(const Backward& a, Queue& queue, float* workspace) {
  with_units(a.type, [&](auto u) {
    const BackwardWorkspace memory(a, workspace);
    Gradients<decltype(u)> tiles(a, memory);
    for_tasks(queue, [&](int64_t task) {
      const int step = static_cast<int>(a.key_tasks());
      const int first = static_cast<int>(task % step);
      const int64_t head = task / step, kv_head = head % a.kv_heads;
      const Sequence s = a.sequence(head / a.kv_heads);
      if (first * kTileKeys >= s.keys) {
        return last_of_head(task, step);
      }
      if (a.ddistance_bias.data) {
        clear_distance_sums(a, s, kv_head, first);
      }
      for (int n = first; n * kTileKeys < s.keys; n += step) {
        key_gradients(a, s, kv_head, n, DeadKeys(a, s, kv_head), tiles, memory, nullptr);
      }
      return task;
    });
  });
}

void all_gradients(const Backward& a, Queue& queue, float* workspace) {
  with_units(a.type, [&](auto u) {
    const BackwardWorkspace memory(a, workspace);
    Gradients<decltype(u)> tiles(a, memory);
    const int64_t D = padded(a.head_dim), head_size = a.row_tiles() * a.rows_in_tile() * D;
    for_tasks(queue, [&](int64_t task) {
      const Sequence s = a.sequence(task / a.kv_heads);
      const int64_t kv_head = task % a.kv_heads, h = kv_head * a.group();
      const DeadKeys dead(a, s, kv_head);
      for (int64_t g = 0; g < a.group(); ++g) {
        memset(memory.dq + g * head_size, 0, sizeof(float) * s.queries * D);
      }
      for (int64_t part = 0; a.ddistance_bias.data && part < a.distance_parts(); ++part) {
        clear_distance_sums(a, s, kv_head, part);
      }
      for (int n = 0; n * kTileKeys < s.keys; ++n) {
        key_gradients(a, s, kv_head, n, dead, tiles, memory, memory.dq);
      }
      for (int64_t g = 0; g < a.group(); ++g) {
        store_gradient(a, a.dq, query_offset(a.dq, s, h + g, 0), s.queries, a.head_dim,
                       memory.dq + g * head_size, a.scale);
      }
      return task;
    });
  });
}

// -- dmask ---------------------------------------------------------------------------------------
inline void store_mask_value(const MaskView& mask, int64_t offset, float value) {
  switch (mask.type) {
    case MaskType::kFloat32:
      static_cast<float*>(mask.data)[offset] = value;
      break;
    case MaskType::kBFloat16:
      store(static_cast<BFloat16*>(mask.data) + offset, splat(value), 1);
      break;
    case MaskType::kFloat16:
      store(static_cast<Float16*>(mask.data) + offset, splat(value), 1);
      break;
    case MaskType::kFloat64:
      static_cast<double*>(mask.data)[offset] = value;
      break;
    case MaskType::kNone:
    case MaskType::kBool:
      break;
  }
}

// The range of a mask dimension that one task sums over: everything if it is broadcast.
inline Range summed(int64_t mask_size, int64_t index, int64_t size) {
  const int at = static_cast<int>(index);
  return mask_size == 1 ? Range{0, static_cast<int>(size)} : Range{at, at + 1};
}

// Sums ds of a tile of keys over ranges of batches, heads and tiles of queries. `sums` has one row
// if the mask has, otherwise the rows of the single tile of queries.
inline void sum_scores(const Backward& a, Range batches, Range heads, Range row_tiles, int n,
                       Gradients<Floats>& tiles, bool one_row, float* sums) {
  for (int b = batches.begin; b < batches.end; ++b) {
    const Sequence s = a.sequence(b);
    int64_t packed = -1;
    for (int h = heads.begin; h < heads.end; ++h) {
      const int64_t kv_head = h / a.group();
      for (int i = row_tiles.begin; i < row_tiles.end; ++i) {
        const int first = i * kTileRows;
        const RowRanges rows(a, s, first, lse_rows(a, s, h, first));
        if (!contains(rows.tiles(), n)) {
          continue;
        }
        if (packed != kv_head) {
          tiles.pack_keys(s, kv_head, n, DeadKeys(a, s, kv_head));
          packed = kv_head;
        }
        tiles.pack_queries(s, h, first, rows.count, false);
        if (!tiles.compute(rows, row_values(a, a.delta, s, h, first), false, false)) {
          continue;
        }
        for (int r = tiles.rows().begin; r < tiles.rows().end; ++r) {
          float* sum = sums + (one_row ? 0 : r * kTileKeys);
          for (int j = 0; j < tiles.columns(); j += kLanes) {
            store(sum + j, load(sum + j) + load(tiles.ds() + r * kTileKeys + j));
          }
        }
      }
    }
  }
}

// A mask with one value for all keys of a row changes only its lse, so its gradient is dlse. With
// sinks it changes weights too, by less than lse can show, and `dmask` sums the row's ds.
inline void sum_of_rows(const Backward& a, Range batches, Range heads, Range row_tiles,
                        bool one_row, float* sums) {
  for (int b = batches.begin; a.dlse && b < batches.end; ++b) {
    const Sequence s = a.sequence(b);
    for (int h = heads.begin; h < heads.end; ++h) {
      const int end = smaller(row_tiles.end * kTileRows, a.queries);
      const int first = row_tiles.begin * kTileRows;
      for (int i = first; i < end; ++i) {
        if (!lse_rows(a, s, h, i).dead(0)) {
          sums[one_row ? 0 : (i - first) * kTileKeys] += *row_values(a, a.dlse, s, h, i);
        }
      }
    }
  }
}

void dmask(const Backward& a, Queue& queue, float* workspace) {
  const BackwardWorkspace memory(a, workspace);
  Gradients<Floats> tiles(a, memory);
  const MaskView& mask = a.dmask;
  const bool one_row = mask.sizes[2] == 1, one_key = mask.sizes[3] == 1;
  const int64_t row_tasks = one_row ? 1 : a.row_tiles();
  const int64_t key_tasks = one_key ? 1 : a.key_tiles();
  for_tasks(queue, [&](int64_t task) {
    const int64_t n = task % key_tasks;
    const int64_t i = task / key_tasks % row_tasks;
    const int64_t h = task / key_tasks / row_tasks % mask.sizes[1];
    const int64_t b = task / key_tasks / row_tasks / mask.sizes[1];
    const Range batches = summed(mask.sizes[0], b, a.batch);
    const Range heads = summed(mask.sizes[1], h, a.heads);
    const Range row_tiles = summed(row_tasks, i, a.row_tiles());
    memset(memory.sums, 0, sizeof(float) * a.rows_in_tile() * kTileKeys);
    if (one_key && !a.sinks) {
      sum_of_rows(a, batches, heads, row_tiles, one_row, memory.sums);
    } else {
      const Range key_tiles = summed(key_tasks, n, a.key_tiles());
      for (int t = key_tiles.begin; t < key_tiles.end; ++t) {
        sum_scores(a, batches, heads, row_tiles, t, tiles, one_row, memory.sums);
      }
    }
    const int64_t first_row = i * kTileRows, first_key = n * kTileKeys;
    for (int64_t r = 0; r < kTileRows && first_row + r < mask.sizes[2]; ++r) {
      float* const sums = memory.sums + r * kTileKeys;
      if (one_key) {
        *sums = std::accumulate(sums, sums + kTileKeys, 0.0f);
      }
      for (int64_t j = 0; j < kTileKeys && first_key + j < mask.sizes[3]; ++j) {
        store_mask_value(mask, mask_offset(mask, b, h, first_row + r, first_key + j), sums[j]);
      }
    }
    return task;
  });
}

// -- ddistance_bias ------------------------------------------------------------------------------
void ddistance_bias(const Backward& a, Queue& queue, float*) {
  const DistanceBias& result = a.ddistance_bias;
  for_tasks(queue, [&](int64_t task) {
    const int64_t h = task % a.heads;
    float* const row = result.row(task / a.heads, h);
    memset(row, 0, sizeof(float) * result.count);
    const Range batches = summed(result.batch, task / a.heads, a.batch);
    for (int b = batches.begin; b < batches.end; ++b) {
      const Sequence s = a.sequence(b);
      // The entry of the first sum. Sums whose entry is outside are 0.
      const int64_t first = result.first - s.bounds.diagonal - (s.queries - 1);
      const int64_t begin = std::max<int64_t>(-first, 0);
      const int64_t end = std::min<int64_t>(int64_t{s.queries} + s.keys - 1, result.count - first);
      for (int64_t part = 0; part < a.distance_parts() && part * kTileKeys < s.keys; ++part) {
        const float* sums = a.distance_sums_of(s, h, part);
        for_vectors(end - begin, [&](auto lanes, int64_t t) {
          float* const entries = row + first + begin + t;
          lanes.store(entries, lanes.load(entries) + lanes.load(sums + begin + t));
        });
      }
    }
    return task;
  });
}

// -- dsinks --------------------------------------------------------------------------------------
// The sum of p_sink * delta over rows of one head. A dead row's only weight is that of the sink, 1,
// or none where its lse is -inf. dlse may be null.
inline float sink_products(const LseRows& rows, const float* m, const float* log_sum,
                           const float* delta, const float* dlse, int count) {
  Float total = {};
  for_vectors(count, [&](auto lanes, int64_t i) {
    const Float lse = lanes.load(rows.lse + i);
    const Float exponent = splat(rows.sink * kLog2E) - lanes.load(m + i) - lanes.load(log_sum + i);
    const Float p = lse <= splat(rows.sink) ? splat(1.0f) : power(exponent);
    const Float of_dead = dlse ? -lanes.load(dlse + i) : Float{};
    const Float d = lse <= splat(rows.sink) ? of_dead : lanes.load(delta + i);
    total += lanes.only(lse == splat(-kInfinity) ? Float{} : p * d);
  });
  return sum(total);
}

void dsinks(const Backward& a, Queue& queue, float*) {
  for_tasks(queue, [&](int64_t h) {
    double total = 0.0;
    for (int64_t b = 0; b < a.batch; ++b) {
      const Sequence s = a.sequence(b);
      for (int first = 0; first < live_queries(a, s); first += kTileRows) {
        const float* dlse = a.dlse ? row_values(a, a.dlse, s, h, first) : nullptr;
        total += sink_products(lse_rows(a, s, h, first), row_values(a, a.m, s, h, first),
                               row_values(a, a.log_sum, s, h, first),
                               row_values(a, a.delta, s, h, first), dlse,
                               smaller(live_queries(a, s) - first, kTileRows));
      }
    }
    a.dsinks[h] = static_cast<float>(-total);
    return h;
  });
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
