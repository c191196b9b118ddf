// Attention on CPU, written once and compiled for each instruction set (attention_cpu_*.cpp): the
// forward pass; attention_bwd_cpu.h has the gradients.
//
// A worker packs the keys and values of a (sequence, kv head) once, tile by tile as they are
// needed, and walks with each tile of queries over them (Dao et al., FlashAttention, 2022): scores,
// online softmax, weighted values. What is an operand as it lies is not packed. One query
// (decoding) packs nothing: it reads keys and values once where they lie.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/gemm_cpu.h"
#include "attention/restrict_cpu.h"

namespace fastattn::FASTATTN_ISA {

using attention::ceil_div;
using attention::Forward;
using attention::ForwardScratch;
using attention::kSplitKeys;
using attention::Queue;

// Offsets of a sequence's rows in tensors of queries (statistics too) and of keys.
inline int64_t query_offset(const TensorView& x, const Sequence& s, int64_t h, int64_t row) {
  return s.b * x.batch_stride + h * x.head_stride + (s.first_query + row) * x.row_stride;
}
inline int64_t key_offset(const TensorView& x, const Sequence& s, int64_t h, int64_t row) {
  return s.b * x.batch_stride + h * x.head_stride + (s.first_key + row) * x.row_stride;
}

template <class C>
inline typename C::Unit* units(float* scratch) {
  return reinterpret_cast<typename C::Unit*>(scratch);
}
inline int round_up(int n, int step) {
  return (n + step - 1) / step * step;
}

// Data whose products have an instruction of their own, or floats.
#if defined(__AVX512BF16__)
template <class T>
using UnitsOf = std::conditional_t<std::is_same_v<T, BFloat16>, Pairs, Floats>;
#else
template <class T>
using UnitsOf = Floats;
#endif

// The last of the `tiles` tasks of a head. Where sequences differ in length, those behind a short
// one's last tile are passed over together.
inline int64_t last_of_head(int64_t task, int64_t tiles) {
  return task - task % tiles + tiles - 1;
}

// A sequence, a head and a tile of queries, from a task's number. The tile may lie behind the
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
    end = attention::smaller(first + kTileRows, sequence.queries);
  }
  bool is_behind() const { return first >= sequence.queries; }
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
  const bool first = before == -kInfinity;  // nothing to rescale
  const float rescale = first || now == before ? 1.0f : power(splat(before - now + kPowerShift))[0];
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

// -- one query -----------------------------------------------------------------------------------
// Keys and values are read once, where they lie: the keys of a tile, its values, the keys of the
// next tile. While one is computed the next one is asked for: the processor follows rows, but does
// not guess the jumps (one Zen 5 thread, 33 MB of bf16: 0.57 ms, without asking 1.8).
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int count, dim;

  const T* at(int j) const { return data + j * stride; }
  // Inlined by force: GCC 12 takes the function for one without effects and drops its calls.
  __attribute__((always_inline)) void ask_for(int j) const {
    constexpr int kLine = 64 / sizeof(T);
    if (j < count) {
      for (int d = 0; d < dim; d += kLine) {
        __builtin_prefetch(at(j) + d);
      }
    }
  }
};

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

// Scores of the keys for the heads of a group; rows of q are D units, rows of s a tile's.
template <class Unit, class T>
inline void decode_scores(const Unit* q, int64_t D, int group, const Rows<T>& k,
                          const Rows<T>& ahead, float* s) {
  constexpr int kStep = 4;
  for (int g = 0; g < group; ++g) {
    const Unit* query = q + g * D;
    float* row = s + g * kTileKeys;
    int j = 0;
    for (; j + kStep <= k.count; j += kStep) {
      for (int i = 0; g == 0 && i < kStep; ++i) {
        ahead.ask_for(j + i);
      }
      store_sums(row + j, products(query, k.at(j), k.dim), products(query, k.at(j + 1), k.dim),
                 products(query, k.at(j + 2), k.dim), products(query, k.at(j + 3), k.dim));
    }
    for (; j < k.count; ++j) {
      row[j] = sum(products(query, k.at(j), k.dim));
    }
  }
}

// o += p[j] * value j. Weights of exactly 0 are passed over: what lies there may be anything.
template <class T>
inline void decode_values(const float* p, const Rows<T>& v, const Rows<T>& ahead, float* o) {
  constexpr int kChunk = 4;
  int64_t e = 0;
  for (; e + kChunk * kLanes <= v.dim; e += kChunk * kLanes) {
    Float c[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      c[i] = load(o + e + i * kLanes);
    }
    for (int j = 0; j < v.count; ++j) {
      if (e == 0) {
        ahead.ask_for(j);
      }
      const T* value = v.at(j) + e;
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
  for_vectors(v.dim - e, [&](auto lanes, int64_t i) {
    Float c = load(o + e + i);
    for (int j = 0; j < v.count; ++j) {
      if (p[j] != 0.0f) {
        c = fma(splat(p[j]), lanes.load(v.at(j) + e + i), c);
      }
    }
    store(o + e + i, c);
  });
}

// A part of the results of one query: sums o [E] weighted by 2^(exponent - m), then m and l.
inline float& part_m(float* part, int64_t E) {
  return part[E];
}
inline float& part_l(float* part, int64_t E) {
  return part[E + 1];
}
inline void clear_part(float* part, int64_t E) {
  memset(part, 0, sizeof(float) * E);
  part_m(part, E) = -kInfinity;
  part_l(part, E) = 0.0f;
}

// Parts of `heads` heads from `h` on (a group's, which share keys and values): the keys of a split.
template <class T>
void decode_split(const Forward& a, const Sequence& sequence, int64_t kv_head, int64_t h, int heads,
                  int64_t split, const ForwardScratch& memory, float* parts, int64_t stride) {
  using C = UnitsOf<T>;
  const int64_t D = padded(a.head_dim), E = padded(a.value_dim);
  const RowRanges rows(a, sequence, 0, nullptr);
  constexpr int kSplitTiles = kSplitKeys / kTileKeys;
  const int first_tile = static_cast<int>(split) * kSplitTiles;
  const Range tiles = overlap(rows.tiles(), {first_tile, first_tile + kSplitTiles});
  auto* q = units<C>(memory.q_rows);
  pack_rows<C>(a.type, a.q.data, query_offset(a.q, sequence, h, 0), a.q.head_stride, heads, heads,
               a.head_dim, q, dead_if([](int) { return false; }));
  for (int g = 0; g < heads; ++g) {
    clear_part(parts + g * stride, E);
  }
  const float scale_log2 = a.scale * kLog2E;
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int first = n * kTileKeys;
    const int begin = attention::larger(rows.some.begin - first, 0);
    const int end = attention::smaller(rows.some.end - first, kTileKeys);
    const int columns = round_up(end, kLanes);
    const auto rows_of = [&](const TensorView& x, int from, int count, int dim) {
      const int64_t offset = key_offset(x, sequence, kv_head, first + from);
      return Rows<T>{static_cast<const T*>(x.data) + offset, x.row_stride, count, dim};
    };
    const Rows<T> k = rows_of(a.k, begin, end - begin, a.head_dim);
    const Rows<T> v = rows_of(a.v, begin, end - begin, a.value_dim);
    const int left = clamped(rows.some.end - first - kTileKeys, kTileKeys);
    const Rows<T> next_k = left > 0 ? rows_of(a.k, kTileKeys, left, a.head_dim) : Rows<T>{};
    memset(memory.s, 0, sizeof(float) * heads * kTileKeys);
    decode_scores(q, D / C::kDepth, heads, k, v, memory.s + begin);
    for (int g = 0; g < heads; ++g) {
      const TileBias bias(a, sequence.b, h + g, 0, {0, 1}, first, memory.bias);
      if (bias.none) {
        continue;
      }
      const TileDropout dropout(a, sequence.b, h + g, 0, first);
      float *const s = memory.s + g * kTileKeys, *const part = parts + g * stride;
      with_flags(true, bias.rows != nullptr, bool(dropout),
                 [&](auto range, auto biased, auto drop) {
                   const float rescale = softmax_row<Floats, range, biased, drop>(
                       s, columns, scale_log2, begin, end, bias.rows, dropout, 0, &part_m(part, E),
                       &part_l(part, E), s);
                   rescale_row(part, E, rescale);
                 });
      decode_values(s + begin, v, g == 0 ? next_k : Rows<T>{}, part);
    }
  }
}

// Adds a split's part to what the splits before it gave.
inline void join_part(float* total, const float* part, int64_t E) {
  const float m = part[E], before = part_m(total, E);
  if (m == -kInfinity) {
    return;
  }
  const float now = m > before ? m : before;
  const auto factor = [now](float m) {
    return m == now ? 1.0f : power(splat(m - now + kPowerShift))[0];
  };
  const float old = factor(before), added = factor(m);
  for (int64_t e = 0; e < E; e += kLanes) {
    store(total + e, load(total + e) * old + load(part + e) * added);
  }
  part_m(total, E) = now;
  part_l(total, E) = part_l(total, E) * old + part[E + 1] * added;
}

inline void finish_part(const Forward& a, const Sequence& sequence, int64_t h, float* part) {
  const int64_t E = padded(a.value_dim);
  Statistics t(1);
  t.m[0] = part_m(part, E);
  t.l[0] = part_l(part, E);
  a.lse[query_offset(a.statistics, sequence, h, 0)] = t.lse(0);
  store_rows(a.type, a.out.data, query_offset(a.out, sequence, h, 0), 0, 1, a.value_dim, part,
             [&](int i) { return t.weight(i) * a.dropout.scale; });
}

// Calls run(first head, heads) for the heads of a group, as many at a time as scratch holds.
template <class Run>
inline void for_heads(const Problem& a, int64_t kv_head, const Run& run) {
  const int64_t group = a.group();
  for (int64_t from = 0; from < group; from += kTileRows) {
    run(kv_head * group + from,
        static_cast<int>(group - from < kTileRows ? group - from : kTileRows));
  }
}

// All splits of a sequence with one query, or none.
inline void decode_sequence(const Forward& a, const Sequence& sequence, int64_t kv_head,
                            const ForwardScratch& memory) {
  if (sequence.queries == 0) {
    return;
  }
  const int64_t E = padded(a.value_dim), stride = a.part_floats();
  for_heads(a, kv_head, [&](int64_t h, int heads) {
    float *const parts = memory.parts, *const totals = parts + kTileRows * stride;
    for (int g = 0; g < heads; ++g) {
      clear_part(totals + g * stride, E);
    }
    for (int64_t split = 0; split * kSplitKeys < sequence.keys; ++split) {
      with_type(a.type, [&](auto element) {
        decode_split<decltype(element)>(a, sequence, kv_head, h, heads, split, memory, parts,
                                        stride);
      });
      for (int g = 0; g < heads; ++g) {
        join_part(totals + g * stride, parts + g * stride, E);
      }
    }
    for (int g = 0; g < heads; ++g) {
      finish_part(a, sequence, h + g, totals + g * stride);
    }
  });
}

// Batches of one query: each split is a task.
inline void decode_splits(const Forward& a, Queue& queue, const ForwardScratch& memory) {
  const int64_t splits = a.splits(), stride = a.part_floats();
  int64_t task, last;
  while (queue.draw(&task, &last)) {
    for (; task < last; ++task) {
      const int64_t split = task % splits, kv_head = task / splits % a.kv_heads;
      const Sequence sequence = a.sequence(task / splits / a.kv_heads);
      if (splits == 1) {
        decode_sequence(a, sequence, kv_head, memory);
        continue;
      }
      if (sequence.queries == 0 || split * kSplitKeys >= sequence.keys) {
        continue;
      }
      for_heads(a, kv_head, [&](int64_t h, int heads) {
        with_type(a.type, [&](auto element) {
          decode_split<decltype(element)>(
              a, sequence, kv_head, h, heads, split, memory,
              a.parts + ((sequence.b * a.heads + h) * splits + split) * stride, splits * stride);
        });
      });
    }
  }
}

void join_splits(const Forward& a, Queue& queue, float* scratch) {
  const ForwardScratch memory(a, scratch);
  const int64_t E = padded(a.value_dim), stride = a.part_floats();
  int64_t task, last;
  while (queue.draw(&task, &last)) {
    for (; task < last; ++task) {
      const Sequence sequence = a.sequence(task / a.kv_heads);
      const int64_t kv_head = task % a.kv_heads, group = a.group();
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group && sequence.queries > 0; ++h) {
        const float* parts = a.parts + (sequence.b * a.heads + h) * a.splits() * stride;
        clear_part(memory.parts, E);
        for (int64_t split = 0; split * kSplitKeys < sequence.keys; ++split) {
          join_part(memory.parts, parts + split * stride, E);
        }
        finish_part(a, sequence, h, memory.parts);
      }
    }
  }
}

// -- many queries --------------------------------------------------------------------------------
// Keys and values of one (sequence, kv head), packed when a tile is first asked for.
template <class C>
class PackedKeys {
 public:
  PackedKeys(const Problem& a, const ForwardScratch& memory, const QueryTile& of)
      : a_(a),
        memory_(memory),
        sequence_(of.sequence),
        kv_head_(of.kv_head),
        dead_(a, of.sequence, of.kv_head) {
    memset(memory.packed, 0, sizeof(float) * a.key_tiles());
    if (C::kDepth == 1 && sequence_.keys > 0 && dead_.none(0, sequence_.keys)) {
      const Operand<C> v =
          in_place<C>(a.type, a.v, key_offset(a.v, sequence_, kv_head_, 0), a.value_dim, kBlock);
      // Rows far apart fall on few lines of the cache: only where they are read once.
      const bool once = sequence_.queries <= kTileRows && a.group() == 1;
      v_in_place_ = once || v.stride == a.value_dim ? v : Operand<C>{};
    }
  }
  bool serve(const QueryTile& at) const {
    return at.sequence.b == sequence_.b && at.kv_head == kv_head_;
  }

  void need(int tile) {
    if (memory_.packed[tile] != 0.0f) {
      return;
    }
    memory_.packed[tile] = 1.0f;
    const int first = tile * kTileKeys;
    const int count = attention::smaller(kTileKeys, sequence_.keys - first);
    const int upto = round_up(count, kBlock);
    const bool whole = upto == count && dead_.none(first, count);
    const Operand<C> k = rows_of(a_.k, first, count, upto, a_.head_dim, whole);
    to_columns<C>(k, upto, a_.head_dim, units<C>(memory_.k_columns) + tile * k_units());
    if (!v_in_place_.data) {
      const Operand<C> v = rows_of(a_.v, first, count, upto, a_.value_dim, whole);
      to_pairs(v, upto, a_.value_dim, units<C>(memory_.v_pairs) + tile * v_units());
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

  // whole: blocks of keys of which none is dead. They are read where they lie if units lie there.
  Operand<C> rows_of(const TensorView& x, int first, int count, int upto, int dim,
                     bool whole) const {
    const int64_t offset = key_offset(x, sequence_, kv_head_, first);
    if (const Operand<C> rows = in_place<C>(a_.type, x, offset, dim, kBlock); whole && rows.data) {
      return rows;
    }
    auto* rows = units<C>(memory_.rows);
    pack_rows<C>(a_.type, x.data, offset, x.row_stride, count, upto, dim, rows,
                 dead_.of_tile(first));
    return {rows, padded(dim) / C::kDepth};
  }

  const Problem& a_;
  const ForwardScratch& memory_;
  Sequence sequence_;
  int64_t kv_head_;
  DeadKeys dead_;
  Operand<C> v_in_place_ = {};
};

// Writes rows [first, end) of out and lse that have no key.
inline void write_dead_rows(const Forward& a, const Sequence& s, int64_t h, int first, int end) {
  const int64_t bytes = (a.type == DType::kFloat32 ? 4 : 2);
  for (int i = first; i < end; ++i) {
    memset(static_cast<char*>(a.out.data) + bytes * query_offset(a.out, s, h, i), 0,
           bytes * a.value_dim);
    a.lse[query_offset(a.statistics, s, h, i)] = -kInfinity;
  }
}

template <class C>
void forward_tile(const Forward& a, const QueryTile& at, PackedKeys<C>& keys,
                  const ForwardScratch& memory) {
  const Sequence& sequence = at.sequence;
  const RowRanges rows(a, sequence, at.first, nullptr);
  const Range tiles = rows.tiles();
  if (is_empty(tiles)) {
    return write_dead_rows(a, sequence, at.h, at.first, at.end);
  }
  const int64_t E = padded(a.value_dim);
  const int64_t depth = ceil_div(a.head_dim, C::kDepth);
  const int64_t q_offset = query_offset(a.q, sequence, at.h, at.first);
  Operand<C> q = in_place<C>(a.type, a.q, q_offset, a.head_dim, 1);
  if (!q.data || tiles.end - tiles.begin > 1) {  // read more than once: packed
    auto* packed = units<C>(memory.q_rows);
    pack_rows<C>(a.type, a.q.data, q_offset, a.q.row_stride, rows.count, rows.count, a.head_dim,
                 packed, dead_if([](int) { return false; }));
    q = {packed, padded(a.head_dim) / C::kDepth};
  }
  auto* p = units<C>(C::kDepth == 1 ? memory.s : memory.p);
  float *const s = memory.s, *const o = memory.o;
  bool o_written = false;
  Statistics t(rows.count);
  const float scale_log2 = a.scale * kLog2E;
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int first_key = n * kTileKeys;
    const int in_tile = attention::smaller(rows.some.end - first_key, kTileKeys);
    const int columns = round_up(in_tile, kLanes);
    const Range live = rows.touching(first_key, columns);
    const TileBias bias(a, sequence.b, at.h, at.first, live, first_key, memory.bias);
    if (is_empty(live) || bias.none) {
      continue;
    }
    keys.need(n);
    const int count = live.end - live.begin;
    multiply<C>(count, columns, depth, q.row(live.begin), q.stride, 1, keys.k(n), kTileKeys,
                s + live.begin * kTileKeys, kTileKeys, false);
    const TileDropout dropout(a, sequence.b, at.h, at.first, first_key);
    const bool restricted = !rows.allows_all(first_key, columns) || !(a.scale > 0.0f);
    with_flags(restricted, bias.rows != nullptr, bool(dropout),
               [&](auto range, auto biased, auto drop) {
                 softmax_rows<C, range, biased, drop>(rows, live, scale_log2, bias, dropout,
                                                      first_key, columns, s, p, t, o, E);
               });
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
  if (!o_written) {
    memset(o, 0, sizeof(float) * rows.count * E);
  }
  float* lse = a.lse + query_offset(a.statistics, sequence, at.h, at.first);
  for (int i = 0; i < rows.count; ++i) {
    lse[i] = t.lse(i);
  }
  store_rows(a.type, a.out.data, query_offset(a.out, sequence, at.h, at.first), a.out.row_stride,
             rows.count, a.value_dim, o, [&](int i) { return t.weight(i) * a.dropout.scale; });
  write_dead_rows(a, sequence, at.h, at.first + rows.count, at.end);
}

template <class C>
void forward_tiles(const Forward& a, Queue& queue, const ForwardScratch& memory) {
  int64_t task, last;
  if (!queue.draw(&task, &last)) {
    return;
  }
  do {
    while (task < last) {
      PackedKeys<C> keys(a, memory, QueryTile(a, task));
      for (;;) {
        const QueryTile at(a, task);
        if (!keys.serve(at)) {
          break;
        }
        if (at.is_behind()) {
          task = std::min(last_of_head(task, a.row_tiles()), last - 1);
        } else if (at.sequence.queries > 1) {
          forward_tile<C>(a, at, keys, memory);
        } else if (at.h % a.group() == 0) {
          decode_sequence(a, at.sequence, at.kv_head, memory);
        }
        if (++task == last && !queue.draw(&task, &last)) {
          return;
        }
      }
    }
  } while (queue.draw(&task, &last));
}

// -- entries -------------------------------------------------------------------------------------
template <class Run>
inline void with_units(DType type, const Run& run) {
  type == DType::kBFloat16 ? run(UnitsOf<BFloat16>{}) : run(Floats{});
}

void forward(const Forward& a, Queue& queue, float* scratch) {
  const ForwardScratch memory(a, scratch);
  if (a.queries == 1) {
    return decode_splits(a, queue, memory);
  }
  with_units(a.type, [&](auto u) { forward_tiles<decltype(u)>(a, queue, memory); });
}

}  // namespace fastattn::FASTATTN_ISA

#include "attention/attention_bwd_cpu.h"
