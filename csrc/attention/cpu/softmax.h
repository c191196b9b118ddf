// The online softmax of the CPU kernels (Milakov and Gimelshein, 2018): scores of a row become
// weights relative to the highest score so far, and earlier sums are rescaled. Also what forward,
// decoding and backward share: offsets of rows and units of products.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/cpu/masks.h"
#include "attention/cpu/operands.h"
#include "cpu/exponential.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

// Offsets of a sequence's rows in tensors of queries (lse and delta too) and of keys.
inline int64_t query_offset(const TensorView& x, const Sequence& s, int64_t h, int64_t row) {
  return s.b * x.batch_stride + h * x.head_stride + (s.first_query + row) * x.row_stride;
}
inline int64_t key_offset(const TensorView& x, const Sequence& s, int64_t h, int64_t row) {
  return s.b * x.batch_stride + h * x.head_stride + (s.first_key + row) * x.row_stride;
}
// The same of keys in pages.
inline int64_t paged_offset(const Pages& pages, const TensorView& x, const Sequence& s, int64_t h,
                            int row) {
  return pages.of(s.b, row) * x.batch_stride + h * x.head_stride +
         (row & (pages.size - 1)) * x.row_stride;
}

template <class C>
inline typename C::Unit* units(float* workspace) {
  return reinterpret_cast<typename C::Unit*>(workspace);
}
inline int round_up(int n, int step) {
  return (n + step - 1) / step * step;
}

// Whether none of a tile's keys, which have these rows, is dead.
template <class C>
inline bool no_key_is_dead(const DeadKeys& dead, int first, int count, const Operand<C>& rows,
                           int dim) {
  return dead.none(first, count) ||
         (dead.none_if_finite(first, count) && all_finite(rows, count, dim));
}

// -- online softmax ------------------------------------------------------------------------------
// Exponents are base 2: scores are multiplied by scale * log2(e).
struct SoftmaxState {
  float m[kTileRows];  // highest exponent so far, -inf before the first
  float l[kTileRows];  // sum of 2^(exponent - m)

  explicit SoftmaxState(int rows) {
    for (int i = 0; i < rows; ++i) {
      m[i] = -kInfinity;
      l[i] = 0.0f;
    }
  }
  bool dead(int i) const { return l[i] == 0.0f; }  // a row of NaN has m -inf and l NaN

  // The row's m and l including the sink, its lse, and the factor of its weighted values. The sink
  // is a score without a value, -inf without sinks. A dead row's lse is the sink; that of others is
  // rounded up to be larger (LseRows).
  struct Total {
    float m, l, lse, weight;
  };
  Total total(int i, float sink) const {
    if (dead(i)) {
      return {-kInfinity, 0.0f, sink, 0.0f};
    }
    if (sink == -kInfinity) {
      return {m[i], l[i], m[i] * kLn2 + std::log(l[i]), 1.0f / l[i]};
    }
    const float sink_m = sink * kLog2E, highest = std::max(m[i], sink_m);
    const float scaled = power(splat(m[i] - highest))[0];
    const float sum = l[i] * scaled + power(splat(sink_m - highest))[0];
    const float lse = highest * kLn2 + std::log(sum);
    return {highest, sum, lse <= sink ? std::nextafter(sink, kInfinity) : lse, scaled / sum};
  }
};

// The soft cap, if there is one: products of queries and keys, in rows of kTileKeys, become
// cap tanh(scale product / cap).
inline void cap_scores(const Problem& a, int rows, int columns, float* s) {
  if (!(a.softcap > 0.0f)) {
    return;
  }
  const float half = 0.5f * a.scale / a.softcap;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; j += kLanes) {
      float* const scores = s + i * kTileKeys + j;
      store(scores, tanh_of_twice(load(scores) * half) * a.softcap);
    }
  }
}

// The exponents of a vector of scores, -inf where not allowed. begin, end: the row's keys, counted
// from the tile's first. Forward and backward round them alike, because what is then subtracted may
// be as large.
template <bool kRange, class Bias>
inline Float exponents(const float* s, int j, float scale_log2, int begin, int end, Bias bias) {
  Float x = bias.add_to(load(s + j) * scale_log2, j);
  if constexpr (kRange) {
    const Mask key = lane_numbers() + j;
    x = (key >= begin) & (key < end) ? x : splat(-kInfinity);
  }
  return x;
}

// Calls write(j, weight, kept) for each vector of a row's weights 2^(exponent - m); kept: 0 where
// dropped. Returns the factor that rescales earlier sums.
template <bool kRange, bool kDrop, class Bias, class Write>
inline __attribute__((always_inline)) float softmax_row(float* s, int columns, float scale_log2,
                                                        int begin, int end, Bias bias,
                                                        const TileDropout& dropout, int row,
                                                        float* m, float* l, const Write& write) {
  // Without restrictions and with a positive scale, scores and exponents have the same order.
  constexpr bool kRaw = !kRange && !Bias::kAny;
  Float most = splat(-kInfinity);
  for (int j = 0; j < columns; j += kLanes) {
    if constexpr (kRaw) {
      most = larger_of(load(s + j), most);
    } else {
      const Float x = exponents<kRange>(s, j, scale_log2, begin, end, bias);
      store(s + j, x);
      most = larger_of(x, most);
    }
  }
  const float before = *m;
  const float highest = largest(most) * (kRaw ? scale_log2 : 1.0f);
  const float now = highest > before ? highest : before;
  const bool first = before == -kInfinity;  // nothing to rescale
  const float rescale = first || now == before ? 1.0f : power(splat(before - now))[0];
  // -inf - (-inf) is NaN: a row with no key yet keeps 0.
  const Float subtracted = splat(now == -kInfinity ? 0.0f : now);
  Float total = {};
  const TileDropout::Row drawn = dropout.row(row);
  for (int j = 0; j < columns; j += kLanes) {
    // Rounded like `highest`: with fma, the highest weight of large scores could be far from 1.
    const Float x = kRaw ? load(s + j) * scale_log2 : load(s + j);
    const Float weight = power(x - subtracted);
    total += weight;
    Float kept = weight;
    if constexpr (kDrop) {
      kept = drawn.apply(weight, j);
    }
    write(j, weight, kept);
  }
  *m = now;
  *l = *l * rescale + sum(total);
  return rescale;
}

// Stores a vector of weights to a row of a left operand.
template <class C>
inline __attribute__((always_inline)) void store_weights(typename C::Unit* row, int j, Float v) {
  if constexpr (C::kDepth == 1) {
    store(row + j, v);
  } else {
#if defined(__AVX512BF16__)
    store_bits(reinterpret_cast<uint16_t*>(row) + j, rounded_to_bf16(v));
#endif
  }
}

inline void rescale_row(float* o, int64_t width, float factor) {
  if (factor != 1.0f) {
    for (int64_t e = 0; e < width; e += kLanes) {
      store(o + e, load(o + e) * factor);
    }
  }
}

// The softmax of a tile's rows. Calls write(i, j, weight, kept) for each vector and, after a row,
// finish(i, columns, the factor that rescales earlier sums).
template <bool kRange, bool kDrop, class BiasRows, class Write, class Finish>
inline __attribute__((always_inline)) void softmax_each_row(const RowRanges& rows, Range live,
                                                            float scale_log2, const BiasRows& bias,
                                                            const TileDropout& dropout,
                                                            int first_key, int columns, float* s,
                                                            SoftmaxState& state, const Write& write,
                                                            const Finish& finish) {
  for (int i = live.begin; i < live.end; ++i) {
    const auto run = [&](int count) __attribute__((always_inline)) {
      const auto write_row = [&](int j, Float weight, Float kept)
                                 __attribute__((always_inline)) { write(i, j, weight, kept); };
      const float rescale = softmax_row<kRange, kDrop>(
          s + i * kTileKeys, count, scale_log2, rows.begin[i] - first_key, rows.end[i] - first_key,
          bias(i), dropout, i, state.m + i, state.l + i, write_row);
      finish(i, count, rescale);
    };
    columns == kTileKeys ? run(kTileKeys) : run(columns);
  }
}

// kKeep: the weights also stay in s.
template <class C, bool kKeep, bool kRange, bool kDrop, class BiasRows>
void softmax_rows(const RowRanges& rows, Range live, float scale_log2, const BiasRows& bias,
                  const TileDropout& dropout, int first_key, int columns, float* s,
                  typename C::Unit* p, SoftmaxState& state, float* o, int64_t o_stride) {
  const auto write = [=](int i, int j, Float, Float kept) __attribute__((always_inline)) {
    store_weights<C>(p + i * (kTileKeys / C::kDepth), j, kept);
    if constexpr (kKeep && C::kDepth != 1) {  // else p is s
      store(s + i * kTileKeys + j, kept);
    }
  };
  const auto finish = [=](int i, int, float rescale) __attribute__((always_inline)) {
    rescale_row(o + i * o_stride, o_stride, rescale);
  };
  softmax_each_row<kRange, kDrop>(rows, live, scale_log2, bias, dropout, first_key, columns, s,
                                  state, write, finish);
}

template <class Run>
inline void with_flags(bool range, bool drop, const Run& run) {
  const auto second = [&](auto r) { drop ? run(r, std::true_type{}) : run(r, std::false_type{}); };
  range ? second(std::true_type{}) : second(std::false_type{});
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
