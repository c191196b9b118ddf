// Attention on CPU, written once and compiled for each instruction set (attention_cpu_*.cpp): the
// forward pass; attention_bwd_cpu.h has the gradients.
//
// A worker packs the keys and values of a (batch, kv head) once, tile by tile as they are needed,
// and walks with each tile of queries over them (Dao et al., FlashAttention, 2022): scores, online
// softmax, weighted values. One query (decoding) packs nothing: it reads keys and values once where
// they lie.
#pragma once

#include <cmath>

#include "attention/gemm_cpu.h"
#include "attention/restrict_cpu.h"

namespace fastattn::FASTATTN_ISA {

using attention::ceil_div;
using attention::Forward;
using attention::ForwardScratch;
using attention::Queue;

inline int64_t offset_of(const TensorView& x, int64_t b, int64_t h, int64_t row) {
  return b * x.batch_stride + h * x.head_stride + row * x.row_stride;
}

template <class C>
inline typename C::Unit* units(float* scratch) {
  return reinterpret_cast<typename C::Unit*>(scratch);
}
inline int round_up(int n, int step) {
  return (n + step - 1) / step * step;
}

// Positions of x straight into the pairs form; `rows` holds them in between where that differs.
template <class C, class Dead>
void pack_pairs(DType type, const TensorView& x, int64_t offset, int count, int upto, int dim,
                typename C::Unit* rows, typename C::Unit* pairs, const Dead& dead) {
  constexpr bool kSame = C::kDepth == 1;
  pack_rows<C>(type, x.data, offset, x.row_stride, count, upto, dim, kSame ? pairs : rows, dead);
  if constexpr (!kSame) {
    to_pairs(C{}, rows, upto, dim, pairs);
  }
}

// A (batch, kv head, head) and a tile of queries, from a task's number.
struct QueryTile {
  int64_t b, kv_head, h;
  int first;

  QueryTile(const Problem& a, int64_t task) {
    const int64_t tiles = a.row_tiles(), group = a.group();
    first = static_cast<int>(task % tiles * kTileRows);
    h = task / tiles % a.heads;
    b = task / tiles / a.heads;
    kv_head = h / group;
  }
};

// -- online softmax ------------------------------------------------------------------------------
// Exponents are powers of two: scores are multiplied by scale * log2(e).
struct Statistics {
  float m[kTileRows];  // highest exponent so far, -inf before the first
  float l[kTileRows];  // sum of 2^(exponent - m)

  explicit Statistics(int rows) {
    for (int i = 0; i < rows; ++i) {
      m[i] = -kInfinity;
      l[i] = 0.0f;
    }
  }
  bool dead(int i) const { return m[i] == -kInfinity; }
  float lse(int i) const { return dead(i) ? -kInfinity : m[i] * kLn2 + std::log(l[i]); }
  float weight(int i) const { return dead(i) ? 0.0f : 1.0f / l[i]; }
};

// The exponents of a vector of scores, -inf where nothing is allowed. begin, end: the row's keys,
// counted from the tile's first.
template <bool kRange, bool kBias>
inline Float exponents(const float* s, int j, float scale_log2, int begin, int end,
                       const float* bias) {
  Float x = load(s + j) * scale_log2;
  if constexpr (kBias) {
    const Float add = load(bias + j);
    x = add == -kInfinity ? add : fma(add, splat(kLog2E), x);
  }
  if constexpr (kRange) {
    const Mask key = lane_numbers() + j;
    x = (key >= begin) & (key < end) ? x : splat(-kInfinity);
  }
  return x;
}

// Scores of a row become weights 2^(exponent - m), kept in `p` where dropout keeps them. Returns
// the factor of what was summed before.
template <class C, bool kRange, bool kBias, bool kDrop>
inline __attribute__((always_inline)) float softmax_row(float* s, int columns, float scale_log2,
                                                        int begin, int end, const float* bias,
                                                        const TileDropout& dropout, int row,
                                                        float* m, float* l, typename C::Unit* p) {
  // Without restrictions and with a positive scale, scores are in the order of their exponents.
  constexpr bool kRaw = !kRange && !kBias;
  Float most = splat(-kInfinity);
  for (int j = 0; j < columns; j += kLanes) {
    if constexpr (kRaw) {
      most = larger_of(load(s + j), most);
    } else {
      const Float x = exponents<kRange, kBias>(s, j, scale_log2, begin, end, bias);
      store(s + j, x);
      most = larger_of(x, most);
    }
  }
  const float before = *m;
  const float highest = largest(most) * (kRaw ? scale_log2 : 1.0f);
  const float now = highest > before ? highest : before;
  const float rescale = now == before ? 1.0f : power(splat(before - now + kPowerShift))[0];
  // -inf - (-inf) is NaN: a row with no key yet keeps 0.
  const Float shift = splat(now == -kInfinity ? kPowerShift : kPowerShift - now);
  Float total = {};
  const TileDropout::Row drawn = dropout.row(row);
  for (int j = 0; j < columns; j += kLanes) {
    const Float x = load(s + j);
    Float weight = power(kRaw ? fma(x, splat(scale_log2), shift) : x + shift);
    total += weight;
    if constexpr (kDrop) {
      weight = drawn.apply(weight, j);
    }
    if constexpr (C::kDepth == 1) {
      store(p + j, weight);
    } else {
#if defined(__AVX512BF16__)
      store_bits(reinterpret_cast<uint16_t*>(p) + j, rounded_to_bf16(weight));
#endif
    }
  }
  *m = now;
  *l = *l * rescale + sum(total);
  return rescale;
}

inline void rescale_row(float* o, int64_t width, float factor) {
  if (factor != 1.0f) {
    for (int64_t e = 0; e < width; e += kLanes) {
      store(o + e, load(o + e) * factor);
    }
  }
}

template <class C, bool kRange, bool kBias, bool kDrop>
void softmax_rows(const RowRanges& rows, Range live, float scale_log2, const TileBias& bias,
                  const TileDropout& dropout, int first_key, int columns, float* s,
                  typename C::Unit* p, Statistics& t, float* o, int64_t o_stride) {
  for (int i = live.begin; i < live.end; ++i) {
    float rescale;
    const auto run = [&](int count) __attribute__((always_inline)) {
      rescale = softmax_row<C, kRange, kBias, kDrop>(
          s + i * kTileKeys, count, scale_log2, rows.begin[i] - first_key, rows.end[i] - first_key,
          bias.rows + i * bias.stride, dropout, i, t.m + i, t.l + i,
          p + i * (kTileKeys / C::kDepth));
    };
    columns == kTileKeys ? run(kTileKeys) : run(columns);
    rescale_row(o + i * o_stride, o_stride, rescale);
  }
}

template <class Run>
inline void with_flags(bool range, bool bias, bool drop, const Run& run) {
  const auto third = [&](auto r, auto b) {
    drop ? run(r, b, std::true_type{}) : run(r, b, std::false_type{});
  };
  const auto second = [&](auto r) {
    bias ? third(r, std::true_type{}) : third(r, std::false_type{});
  };
  range ? second(std::true_type{}) : second(std::false_type{});
}

// -- many queries --------------------------------------------------------------------------------
// Keys and values of one (batch, kv head), packed when a tile is first asked for.
template <class C>
class PackedKeys {
 public:
  PackedKeys(const Problem& a, const ForwardScratch& memory, int64_t b, int64_t kv_head)
      : a_(a), memory_(memory), b_(b), kv_head_(kv_head), dead_(a, b, kv_head) {
    memset(memory.packed, 0, sizeof(float) * a.key_tiles());
  }
  bool is(int64_t b, int64_t kv_head) const { return b == b_ && kv_head == kv_head_; }

  void need(int tile) {
    if (memory_.packed[tile] != 0.0f) {
      return;
    }
    memory_.packed[tile] = 1.0f;
    const int first = tile * kTileKeys;
    const int count = attention::smaller(kTileKeys, a_.keys - first);
    const int upto = round_up(count, 16);
    const auto dead = dead_.of_tile(first);
    auto* rows = units<C>(memory_.rows);
    pack_rows<C>(a_.type, a_.k.data, offset_of(a_.k, b_, kv_head_, first), a_.k.row_stride, count,
                 upto, a_.head_dim, rows, dead);
    to_columns<C>(rows, upto, a_.head_dim, const_cast<typename C::Unit*>(k(tile)));
    pack_pairs<C>(a_.type, a_.v, offset_of(a_.v, b_, kv_head_, first), count, upto, a_.value_dim,
                  rows, const_cast<typename C::Unit*>(v(tile)), dead);
  }
  const typename C::Unit* k(int tile) const {  // columns
    return units<C>(memory_.k_columns) + tile * (kTileKeys * padded(a_.head_dim) / C::kDepth);
  }
  const typename C::Unit* v(int tile) const {  // pairs
    return units<C>(memory_.v_pairs) + tile * (kTileKeys * padded(a_.value_dim) / C::kDepth);
  }

 private:
  const Problem& a_;
  const ForwardScratch& memory_;
  int64_t b_, kv_head_;
  DeadKeys dead_;
};

// Writes rows [first, end) of out and lse that have no key.
inline void write_dead_rows(const Forward& a, int64_t b, int64_t h, int first, int end) {
  const int64_t bytes = (a.type == DType::kFloat32 ? 4 : 2);
  for (int i = first; i < end; ++i) {
    memset(static_cast<char*>(a.out.data) + bytes * offset_of(a.out, b, h, i), 0,
           bytes * a.value_dim);
    a.lse[(b * a.heads + h) * a.queries + i] = -kInfinity;
  }
}

template <class C>
void forward_tile(const Forward& a, const QueryTile& at, PackedKeys<C>& keys,
                  const ForwardScratch& memory) {
  const int end = attention::smaller(at.first + kTileRows, a.queries);
  const RowRanges rows(a, at.b, at.first, nullptr);
  const Range tiles = rows.tiles();
  if (is_empty(tiles)) {
    return write_dead_rows(a, at.b, at.h, at.first, end);
  }
  const int64_t D = padded(a.head_dim), E = padded(a.value_dim);
  const int64_t depth = ceil_div(a.head_dim, C::kDepth);
  auto* q = units<C>(memory.q_rows);
  auto* p = units<C>(C::kDepth == 1 ? memory.s : memory.p);
  float *const s = memory.s, *const o = memory.o;
  pack_rows<C>(a.type, a.q.data, offset_of(a.q, at.b, at.h, at.first), a.q.row_stride, rows.count,
               rows.count, a.head_dim, q, dead_if([](int) { return false; }));
  memset(o, 0, sizeof(float) * rows.count * E);
  Statistics t(rows.count);
  const float scale_log2 = a.scale * kLog2E;
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int first_key = n * kTileKeys;
    const int columns = round_up(attention::smaller(rows.some.end - first_key, kTileKeys), kLanes);
    const Range live = rows.touching(first_key, columns);
    const TileBias bias(a, at.b, at.h, at.first, live, first_key, memory.bias);
    if (is_empty(live) || bias.none) {
      continue;
    }
    keys.need(n);
    const int count = live.end - live.begin;
    multiply<C>(count, columns, depth, q + live.begin * (D / C::kDepth), D / C::kDepth, 1,
                keys.k(n), kTileKeys, s + live.begin * kTileKeys, kTileKeys, false);
    const TileDropout dropout(a, at.b, at.h, at.first, first_key);
    const bool restricted = !rows.allows_all(first_key, columns) || !(a.scale > 0.0f);
    with_flags(restricted, bias.rows != nullptr, bool(dropout),
               [&](auto range, auto biased, auto drop) {
                 softmax_rows<C, range, biased, drop>(rows, live, scale_log2, bias, dropout,
                                                      first_key, columns, s, p, t, o, E);
               });
    constexpr int kStride = kTileKeys / C::kDepth;
    multiply<C>(count, static_cast<int>(E), columns / C::kDepth, p + live.begin * kStride, kStride,
                1, keys.v(n), E, o + live.begin * E, E, true);
  }
  float* lse = a.lse + (at.b * a.heads + at.h) * a.queries + at.first;
  for (int i = 0; i < rows.count; ++i) {
    lse[i] = t.lse(i);
    rescale_row(o + i * E, E, t.weight(i) * a.dropout.scale);
  }
  store_rows(a.type, a.out.data, offset_of(a.out, at.b, at.h, at.first), a.out.row_stride,
             rows.count, a.value_dim, o, 1.0f);
  write_dead_rows(a, at.b, at.h, at.first + rows.count, end);
}

template <class C>
void forward_tiles(const Forward& a, Queue& queue, const ForwardScratch& memory) {
  int64_t task, last;
  if (!queue.draw(&task, &last)) {
    return;
  }
  do {
    while (task < last) {
      const QueryTile start(a, task);
      PackedKeys<C> keys(a, memory, start.b, start.kv_head);
      for (;;) {
        const QueryTile at(a, task);
        if (!keys.is(at.b, at.kv_head)) {
          break;
        }
        forward_tile<C>(a, at, keys, memory);
        if (++task == last && !queue.draw(&task, &last)) {
          return;
        }
      }
    }
  } while (queue.draw(&task, &last));
}

// -- one query -----------------------------------------------------------------------------------
// q times one key, before the sum over lanes.
template <class T>
inline Float products(const float* q, const T* key, int dim) {
  Float even = {}, odd = {};
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    even = fma(load(q + d), load(key + d), even);
    odd = fma(load(q + d + kLanes), load(key + d + kLanes), odd);
  }
  for_vectors(dim - d, [&](auto lanes, int64_t i) {
    even = fma(load(q + d + i), lanes.load(key + d + i), even);
  });
  return even + odd;
}
#if defined(__AVX512BF16__)
inline Float products(const uint32_t* q, const BFloat16* key, int dim) {
  constexpr int kStep = 2 * kLanes;
  Float c = {};
  int d = 0;
  for (; d < dim; d += kStep) {
    const __mmask32 in = dim - d >= kStep ? ~__mmask32{0} : (__mmask32{1} << (dim - d)) - 1;
    const __m512i numbers = _mm512_maskz_loadu_epi16(in, key + d);
    // What lies behind the query may be NaN, which times a key's 0 is NaN, too.
    const __m512i query = _mm512_maskz_loadu_epi16(in, q + d / 2);
    c = _mm512_dpbf16_ps(c, bit_cast<__m512bh>(query), bit_cast<__m512bh>(numbers));
  }
  return c;
}
#endif

// Scores of `count` keys for the heads of a group; rows of q are D units, rows of s a tile's.
template <class Unit, class T>
inline void decode_scores(const Unit* q, int64_t D, int group, const T* k, int64_t stride,
                          int count, int dim, float* s) {
  for (int g = 0; g < group; ++g) {
    const Unit* query = q + g * D;
    float* row = s + g * kTileKeys;
    int j = 0;
    for (; j + 4 <= count; j += 4) {
      const T* key = k + j * stride;
      store_sums(row + j, products(query, key, dim), products(query, key + stride, dim),
                 products(query, key + 2 * stride, dim), products(query, key + 3 * stride, dim));
    }
    for (; j < count; ++j) {
      row[j] = sum(products(query, k + j * stride, dim));
    }
  }
}

// o += p[j] * value j. Weights of exactly 0 are passed over: what lies there may be anything.
template <class T>
inline void decode_values(const float* p, const T* v, int64_t stride, int count, int dim,
                          float* o) {
  constexpr int kChunk = 4;
  int64_t e = 0;
  for (; e + kChunk * kLanes <= dim; e += kChunk * kLanes) {
    Float c[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      c[i] = load(o + e + i * kLanes);
    }
    for (int j = 0; j < count; ++j) {
      const T* value = v + j * stride + e;
      const Float weight = splat(p[j]);
      if (p[j] != 0.0f) {
        for (int i = 0; i < kChunk; ++i) {
          c[i] = fma(weight, load(value + i * kLanes), c[i]);
        }
      }
    }
    for (int i = 0; i < kChunk; ++i) {
      store(o + e + i * kLanes, c[i]);
    }
  }
  for_vectors(dim - e, [&](auto lanes, int64_t i) {
    Float c = load(o + e + i);
    for (int j = 0; j < count; ++j) {
      if (p[j] != 0.0f) {
        c = fma(splat(p[j]), lanes.load(v + j * stride + e + i), c);
      }
    }
    store(o + e + i, c);
  });
}

// The heads of one group, which share keys and values.
template <class C, class T>
void decode_group(const Forward& a, int64_t b, int64_t kv_head, const ForwardScratch& memory) {
  const int64_t D = padded(a.head_dim), E = padded(a.value_dim), group = a.group();
  // Scratch holds kTileRows heads at a time.
  for (int64_t from = 0; from < group; from += kTileRows) {
    const int heads = static_cast<int>(group - from < kTileRows ? group - from : kTileRows);
    const int64_t h = kv_head * group + from;
    const RowRanges rows(a, b, 0, nullptr);
    const Range tiles = rows.tiles();
    auto* q = units<C>(memory.q_rows);
    pack_rows<C>(a.type, a.q.data, offset_of(a.q, b, h, 0), a.q.head_stride, heads, heads,
                 a.head_dim, q, dead_if([](int) { return false; }));
    memset(memory.o, 0, sizeof(float) * heads * E);
    Statistics t(heads);
    const float scale_log2 = a.scale * kLog2E;
    for (int n = tiles.begin; n < tiles.end; ++n) {
      const int first = n * kTileKeys;
      const int begin = attention::larger(rows.some.begin - first, 0);
      const int end = attention::smaller(rows.some.end - first, kTileKeys);
      const int columns = round_up(end, kLanes);
      const T* k = static_cast<const T*>(a.k.data) + offset_of(a.k, b, kv_head, first + begin);
      const T* v = static_cast<const T*>(a.v.data) + offset_of(a.v, b, kv_head, first + begin);
      memset(memory.s, 0, sizeof(float) * heads * kTileKeys);
      decode_scores(q, D / C::kDepth, heads, k, a.k.row_stride, end - begin, a.head_dim,
                    memory.s + begin);
      for (int g = 0; g < heads; ++g) {
        const TileBias bias(a, b, h + g, 0, {0, 1}, first, memory.bias);
        if (bias.none) {
          continue;
        }
        const TileDropout dropout(a, b, h + g, 0, first);
        float* s = memory.s + g * kTileKeys;
        float* o = memory.o + g * E;
        with_flags(
            true, bias.rows != nullptr, bool(dropout), [&](auto range, auto biased, auto drop) {
              const float rescale = softmax_row<Floats, range, biased, drop>(
                  s, columns, scale_log2, begin, end, bias.rows, dropout, 0, t.m + g, t.l + g, s);
              rescale_row(o, E, rescale);
            });
        decode_values(s + begin, v, a.v.row_stride, end - begin, a.value_dim, o);
      }
    }
    for (int g = 0; g < heads; ++g) {
      a.lse[b * a.heads + h + g] = t.lse(g);
      store_rows(a.type, a.out.data, offset_of(a.out, b, h + g, 0), 0, 1, a.value_dim,
                 memory.o + g * E, t.weight(g) * a.dropout.scale);
    }
  }
}

// -- entries -------------------------------------------------------------------------------------
// Data whose products have an instruction of their own, or floats.
#if defined(__AVX512BF16__)
template <class T>
using UnitsOf = std::conditional_t<std::is_same_v<T, BFloat16>, Pairs, Floats>;
#else
template <class T>
using UnitsOf = Floats;
#endif

template <class Run>
inline void with_units(DType type, const Run& run) {
  type == DType::kBFloat16 ? run(UnitsOf<BFloat16>{}) : run(Floats{});
}

void forward(const Forward& a, Queue& queue, float* scratch) {
  const ForwardScratch memory(a, scratch);
  if (a.queries == 1) {
    return with_type(a.type, [&](auto element) {
      using T = decltype(element);
      using C = UnitsOf<T>;
      int64_t task, last;
      while (queue.draw(&task, &last)) {
        for (; task < last; ++task) {
          decode_group<C, T>(a, task / a.kv_heads, task % a.kv_heads, memory);
        }
      }
    });
  }
  with_units(a.type, [&](auto u) { forward_tiles<decltype(u)>(a, queue, memory); });
}

}  // namespace fastattn::FASTATTN_ISA

#include "attention/attention_bwd_cpu.h"
