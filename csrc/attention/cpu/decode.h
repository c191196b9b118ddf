// Few queries, as in decoding: little is computed with a key, so nothing is packed. Keys and values
// are read in place, tile by tile, once for all rows: the queries of the heads of a group. Keys are
// divided into splits of kSplitKeys, whose results are combined in order, whichever worker computed
// them (docs/pages/kernels/cpu.md).
#pragma once

#include "attention/cpu/rows.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

// Bytes of keys and values above which they are assumed to be in main memory. (One head for each kv
// head, one Zen 4 thread with AVX2, time if all rows are prefetched over time if only beginnings: 4
// MiB 1.10, 8 MiB 1.05 in fp32 and 0.84 in bf16, 10 MiB in bf16 0.73, 12 MiB in fp32 0.70.)
constexpr int64_t kCachedBytes = 8 << 20;

// Queries that use the same load of keys and values.
constexpr int kQueriesAtOnce = 2;

// Calls run(first row, number of rows as an integral constant) for bundles of rows of q.
template <class Run>
inline __attribute__((always_inline)) void for_bundles(int rows, const Run& run) {
  int r = 0;
  for (; r + kQueriesAtOnce <= rows; r += kQueriesAtOnce) {
    run(r, std::integral_constant<int, kQueriesAtOnce>{});
  }
  for (; r < rows; ++r) {
    run(r, std::integral_constant<int, 1>{});
  }
}

// -- scores --------------------------------------------------------------------------------------
// Products of kQueries queries (rows of `width` units) with kKeys keys, not summed over lanes. The
// loops over keys and rows are unrolled, so that GCC keeps c in registers.
template <int kQueries, int kKeys, class T>
inline __attribute__((always_inline)) void products(const float* q, int64_t width, const T* keys,
                                                    int64_t stride, int dim,
                                                    Float (&c)[kQueries][kKeys]) {
  for_vectors(dim, [&](auto lanes, int64_t d) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const Float key = lanes.load(keys + i * stride + d);
#pragma GCC unroll 2
      for (int r = 0; r < kQueries; ++r) {
        c[r][i] = fma(load(q + r * width + d), key, c[r][i]);
      }
    }
  });
}
#if defined(__AVX512BF16__)
template <int kQueries, int kKeys>
inline __attribute__((always_inline)) void products(const uint32_t* q, int64_t width,
                                                    const BFloat16* keys, int64_t stride, int dim,
                                                    Float (&c)[kQueries][kKeys]) {
  constexpr int kStep = 2 * kLanes;
  const auto step = [&](__mmask32 in, int d) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kKeys; ++i) {
      const auto key = bit_cast<__m512bh>(_mm512_maskz_loadu_epi16(in, keys + i * stride + d));
#pragma GCC unroll 2
      for (int r = 0; r < kQueries; ++r) {
        // Memory after the query may hold NaN, and NaN times a key's 0 is NaN.
        const __m512i query = _mm512_maskz_loadu_epi16(in, q + r * width + d / 2);
        c[r][i] = _mm512_dpbf16_ps(c[r][i], bit_cast<__m512bh>(query), key);
      }
    }
  };
  int d = 0;
  for (; d + kStep <= dim; d += kStep) {
    step(~__mmask32{0}, d);
  }
  if (d < dim) {
    step((__mmask32{1} << (dim - d)) - 1, d);
  }
}
#endif

// Scores of the keys for rows of q, which have `width` units; those of s have kTileKeys. Meanwhile
// their values are prefetched.
template <class Unit, class T, bool kPaged>
inline void decode_scores(const Unit* q, int64_t width, int rows, const Rows<T, kPaged>& k,
                          Prefetch<T, kPaged> values, float* s) {
  int j = 0;
  for (; j + kGroup <= k.count; j += kGroup) {
    values.next();
    const T* keys = k.group(j);
    for_bundles(rows, [&](int first, auto bundle) __attribute__((always_inline)) {
      constexpr int kQueries = decltype(bundle)::value;
      Float c[kQueries][kGroup] = {};
      products(q + first * width, width, keys, k.stride, k.dim, c);
      for (int r = 0; r < kQueries; ++r) {
        store_sums(s + (first + r) * kTileKeys + j, c[r][0], c[r][1], c[r][2], c[r][3]);
      }
    });
  }
  for (int i = 0; j + i < k.count; ++i) {
    for (int r = 0; r < rows; ++r) {
      Float c[1][1] = {};
      products(q + r * width, width, k.group(j) + i * k.stride, k.stride, k.dim, c);
      s[r * kTileKeys + j + i] = sum(c[0][0]);
    }
  }
}

// -- values --------------------------------------------------------------------------------------
// Vectors of columns whose sums are in registers: of AVX2's 16 registers, 8 are sums.
template <int kQueries>
constexpr int kVectorsAtOnce = kLanes < 16 ? 4 / kQueries : 4;

// o += p[j] * value j over kChunk vectors of columns. kSkips: values of weight 0 are skipped,
// because they may be NaN or infinite. Even and odd values have separate sums, so that consecutive
// additions are independent.
template <int kQueries, int kChunk, bool kSkips, class Lanes, class T, bool kPaged>
inline __attribute__((always_inline)) void add_columns(const float* p, const Rows<T, kPaged>& v,
                                                       Prefetch<T, kPaged>& next, int64_t e,
                                                       Lanes lanes, float* o, int64_t stride) {
  constexpr int kSums = 2;
  static_assert(kGroup % kSums == 0);
  Float c[kQueries][kSums][kChunk] = {};
  const auto add = [&](const T* row, int j, int n) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int r = 0; r < kQueries; ++r) {
      const float weight = p[r * kTileKeys + j];
      if (kSkips && weight == 0.0f) {
        continue;
      }
#pragma GCC unroll 4
      for (int i = 0; i < kChunk; ++i) {
        c[r][n][i] = fma(splat(weight), lanes.load(row + e + i * kLanes), c[r][n][i]);
      }
    }
  };
  int j = 0;
  for (; j + kGroup <= v.count; j += kGroup) {
    next.next();
    const T* rows = v.group(j);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
      add(rows + i * v.stride, j + i, i % kSums);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kGroup - 1; ++i) {  // unrolled, so that GCC keeps c in registers
    if (j + i < v.count) {
      add(v.group(j) + i * v.stride, j + i, i % kSums);
    }
  }
  for (int r = 0; r < kQueries; ++r) {
    for (int i = 0; i < kChunk; ++i) {
      float* sums = o + r * stride + e + i * kLanes;
      store(sums, load(sums) + (c[r][0][i] + c[r][1][i]));
    }
  }
}

template <int kQueries, bool kSkips, class T, bool kPaged>
inline void add_weighted(const float* p, const Rows<T, kPaged>& v, Prefetch<T, kPaged>& next,
                         float* o, int64_t stride) {
  constexpr int kChunk = kVectorsAtOnce<kQueries>;
  int64_t e = 0;
  for (; e + kChunk * kLanes <= v.dim; e += kChunk * kLanes) {
    add_columns<kQueries, kChunk, kSkips>(p, v, next, e, Whole{}, o, stride);
  }
  for_vectors(v.dim - e, [&](auto lanes, int64_t i) {
    add_columns<kQueries, 1, kSkips>(p, v, next, e + i, lanes, o, stride);
  });
}

#if defined(__AVX512BF16__)
// Two rows of 32 columns as pairs: columns 0 .. 3 of each quarter, then 4 .. 7.
struct RowPairs {
  __m512bh halves[2];

  RowPairs(__m512i first, __m512i second)
      : halves{bit_cast<__m512bh>(_mm512_maskz_unpacklo_epi16(kAll, first, second)),
               bit_cast<__m512bh>(_mm512_maskz_unpackhi_epi16(kAll, first, second))} {}

  // Adds the sums of both halves to `sums`, in the order of columns.
  static void add(Float low, Float high, int64_t columns, float* sums) {
    constexpr __mmask16 kAllLanes = 0xFFFF;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    if (columns > 0) {
      store(sums, load(sums) + _mm512_maskz_permutex2var_ps(kAllLanes, low, first, high));
    }
    if (columns > kLanes) {
      sums += kLanes;
      store(sums, load(sums) + _mm512_maskz_permutex2var_ps(kAllLanes, low, second, high));
    }
  }

 private:
  static constexpr __mmask32 kAll = ~__mmask32{0};  // GCC 12 warns about the forms without a mask
};

// The same as add_columns for bf16 weights, two values at a time.
template <int kQueries, bool kSkips, bool kPaged>
inline void add_weighted(const uint16_t* p, const Rows<BFloat16, kPaged>& v,
                         Prefetch<BFloat16, kPaged>& next, float* o, int64_t stride) {
  constexpr int kSums = 2, kChunk = 2, kStep = 2 * kLanes;
  static_assert(kGroup % (2 * kSums) == 0);
  for (int64_t e = 0; e < v.dim; e += kChunk * kStep) {
    __mmask32 in[kChunk];
    for (int i = 0; i < kChunk; ++i) {
      const int64_t left = v.dim - e - i * kStep;
      in[i] = left >= kStep ? ~__mmask32{0} : left <= 0 ? 0 : (__mmask32{1} << left) - 1;
    }
    Float c[kQueries][kSums][kChunk][2] = {};
    // Value j, at `data`, and, if `two`, value j + 1.
    const auto add = [&](const BFloat16* data, int j, int n,
                         bool two) __attribute__((always_inline)) {
      for (int r = 0; r < kQueries; ++r) {
        const uint16_t* weights = p + r * 2 * kTileKeys + j;
        const uint32_t first = weights[0], second = two ? weights[1] : 0u;
        const __m512i pair = _mm512_set1_epi32(static_cast<int>(first | second << 16));
        for (int i = 0; i < kChunk; ++i) {
          const auto row = [&](int row, uint32_t weight) __attribute__((always_inline)) {
            const __mmask32 columns = kSkips && weight == 0u ? 0 : in[i];
            return _mm512_maskz_loadu_epi16(columns, data + row * v.stride + e + i * kStep);
          };
          const RowPairs rows(row(0, first), two ? row(1, second) : __m512i{});
          for (int half = 0; half < 2; ++half) {
            Float& sum = c[r][n][i][half];
            sum = _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(pair), rows.halves[half]);
          }
        }
      }
    };
    int j = 0;
    for (; j + kGroup <= v.count; j += kGroup) {
      next.next();
      const BFloat16* rows = v.group(j);
      for (int i = 0; i < kGroup; i += 2) {
        add(rows + i * v.stride, j + i, i / 2 % kSums, true);
      }
    }
    if (j + 2 <= v.count) {
      add(v.group(j), j, 0, true);
    }
    if (v.count % 2 > 0) {
      const int last = v.count - 1;
      add(v.group(j) + (last - j) * v.stride, last, 1, false);
    }
    for (int r = 0; r < kQueries; ++r) {
      for (int i = 0; i < kChunk; ++i) {
        RowPairs::add(c[r][0][i][0] + c[r][1][i][0], c[r][0][i][1] + c[r][1][i][1],
                      v.dim - e - i * kStep, o + r * stride + e + i * kStep);
      }
    }
  }
}
#endif

template <class Weight>
inline bool has_zero(const Weight* p, int count) {
  int zeros = 0;
  for (int j = 0; j < count; ++j) {
    zeros += p[j] == 0;
  }
  return zeros > 0;
}

// Adds the weighted values to rows of o; meanwhile the next keys are prefetched. Weights: in rows
// of a tile from `from` on, floats or, for Pairs, bf16.
template <class C, class T, bool kPaged>
inline void decode_values(const float* s, int from, int rows, const Rows<T, kPaged>& v,
                          Prefetch<T, kPaged> next, float* o, int64_t stride) {
  for_bundles(rows, [&](int first, auto bundle) {
    constexpr int kQueries = decltype(bundle)::value;
    using Weight = std::conditional_t<C::kDepth == 1, float, uint16_t>;
    const Weight* p = reinterpret_cast<const Weight*>(s + first * kTileKeys) + from;
    bool skips = false;
    for (int r = 0; r < kQueries; ++r) {
      skips = skips || has_zero(p + r * C::kDepth * kTileKeys, v.count);
    }
    skips ? add_weighted<kQueries, true>(p, v, next, o + first * stride, stride)
          : add_weighted<kQueries, false>(p, v, next, o + first * stride, stride);
  });
  next.rest();
}

// -- splits --------------------------------------------------------------------------------------
// The partial result of a query: o [E], weighted by 2^(exponent - m), then m and l.
inline float& partial_m(float* partial, int64_t E) {
  return partial[E];
}
inline float& partial_l(float* partial, int64_t E) {
  return partial[E + 1];
}
inline void clear_partial(float* partial, int64_t E) {
  memset(partial, 0, sizeof(float) * E);
  partial_m(partial, E) = -kInfinity;
  partial_l(partial, E) = 0.0f;
}

// The next kv head's first tile of keys, which is usually read next.
template <class T, bool kPaged>
inline Rows<T, kPaged> first_keys_after(const Forward& a, const Sequence& sequence,
                                        int64_t kv_head) {
  const bool last = kv_head + 1 == a.kv_heads;
  if (last && sequence.b + 1 == a.batch) {
    return {};
  }
  const Sequence next = last ? a.sequence(sequence.b + 1) : sequence;
  const Range keys = next.queries > 0 ? keys_of(a, next, 0) : Range{0, 0};
  const int from = keys.begin / kGroup * kGroup;
  const int count = smaller(keys.end - from, kTileKeys - from % kTileKeys);
  return rows_of_keys<T, kPaged>(a, a.k, next, last ? 0 : kv_head + 1, from, count, a.head_dim,
                                 true);
}

// Partial results of a split for the queries of `heads` heads from `h` on, which share keys and
// values: those of query i of head h + g are row g * queries + i.
template <class T, bool kPaged>
void decode_split(const Forward& a, const Sequence& sequence, int64_t kv_head, int64_t h, int heads,
                  int64_t split, const ForwardWorkspace& memory, float* partials, int64_t stride) {
  using C = UnitsOf<T>;
  const int64_t D = padded(a.head_dim), E = padded(a.value_dim);
  const RowRanges ranges(a, sequence, 0, LseRows{});
  const int queries = sequence.queries, rows = heads * queries;
  constexpr int kSplitTiles = kSplitKeys / kTileKeys;
  const int first_tile = static_cast<int>(split) * kSplitTiles;
  const Range tiles = overlap(ranges.tiles(), {first_tile, first_tile + kSplitTiles});
  auto* q = units<C>(memory.q_rows);
  for (int g = 0; g < heads; ++g) {
    pack_rows<C>(a.type, a.q.data, query_offset(a.q, sequence, h + g, 0), a.q.row_stride, queries,
                 queries, a.head_dim, q + g * queries * (D / C::kDepth),
                 dead_if([](int) { return false; }));
  }
  for (int r = 0; r < rows; ++r) {
    clear_partial(partials + r * stride, E);
  }
  const int64_t numbers = a.batch * a.kv_heads * a.keys * (a.head_dim + a.value_dim);
  const bool in_memory = numbers * static_cast<int64_t>(sizeof(T)) > kCachedBytes;
  // In cache, one query computes too little with a key to hide prefetches of all rows. (32 heads
  // over 8, 1024 keys of 128, 8 MiB, as above: 0.90.)
  const bool prefetch_all = in_memory || rows > 1;
  const float scale_log2 = a.score_scale() * kLog2E;
  Rows<T, kPaged> k;
  for (int n = tiles.begin; n < tiles.end; ++n) {
    const int first = n * kTileKeys;
    const int begin = larger(ranges.some.begin - first, 0);
    const int end = smaller(ranges.some.end - first, kTileKeys);
    const int columns = round_up(end, kLanes);
    // Up to kGroup - 1 keys before `begin` are read, and weighted by 0.
    const int from = begin / kGroup * kGroup;
    const auto rows_of = [&](const TensorView& x, int from, int count, int dim) {
      return rows_of_keys<T, kPaged>(a, x, sequence, kv_head, first + from, count, dim,
                                     prefetch_all || x.row_stride != dim);
    };
    if (n == tiles.begin) {
      k = rows_of(a.k, from, end - from, a.head_dim);
    }
    const auto v = rows_of(a.v, from, end - from, a.value_dim);
    memset(memory.s, 0, sizeof(float) * rows * kTileKeys);
    const int left = clamped(ranges.some.end - first - kTileKeys, kTileKeys);
    const bool last_heads = k.prefetch_all && h + heads == (kv_head + 1) * a.group();
    const auto next = left > 0     ? rows_of(a.k, kTileKeys, left, a.head_dim)
                      : last_heads ? first_keys_after<T, kPaged>(a, sequence, kv_head)
                                   : Rows<T, kPaged>();
    decode_scores(q, D / C::kDepth, rows, k, Prefetch<T, kPaged>(v), memory.s + from);
    cap_scores(a, rows, columns, memory.s);
    for (int g = 0; g < heads; ++g) {
      const TileBias bias(a, sequence, h + g, 0, {0, ranges.count}, first, memory.bias);
      const TileDropout dropout(a, sequence.b, h + g, 0, first);
      for (int i = 0; i < queries; ++i) {
        const int r = g * queries + i;
        float *const s = memory.s + r * kTileKeys, *const partial = partials + r * stride;
        if (bias.none || i >= ranges.count) {
          memset(s, 0, sizeof(float) * kTileKeys);
          continue;
        }
        const auto run = [&](auto row) {
          with_flags(true, bool(dropout), [&](auto range, auto drop) {
            const auto write = [=](int j, Float, Float kept) __attribute__((always_inline)) {
              store_weights<C>(units<C>(s), j, kept);
            };
            const float rescale = softmax_row<range, drop>(
                s, columns, scale_log2, ranges.begin[i] - first, ranges.end[i] - first, row,
                dropout, i, &partial_m(partial, E), &partial_l(partial, E), write);
            rescale_row(partial, E, rescale);
          });
        };
        bias ? run(bias.floats(i)) : run(NoBias{});
      }
    }
    const int vectors = rows > 1 ? kVectorsAtOnce<kQueriesAtOnce> : kVectorsAtOnce<1>;
    const int passes = ceil_div(rows, kQueriesAtOnce) * ceil_div(v.dim, vectors * kLanes);
    decode_values<C>(memory.s, from, rows, v, Prefetch<T, kPaged>(next, passes), partials, stride);
    k = next;
  }
}

template <class T, class... Arguments>
void decode(const Forward& a, const Arguments&... arguments) {
  const bool has_small_pages = a.pages.table && a.pages.size < kTileKeys;
  has_small_pages ? decode_split<T, true>(a, arguments...)
                  : decode_split<T, false>(a, arguments...);
}

// Adds a split's partial result to the total of the splits before it.
inline void add_partial(float* total, const float* partial, int64_t E) {
  const float m = partial[E], before = partial_m(total, E);
  if (partial[E + 1] == 0.0f) {
    return;
  }
  const float now = m > before ? m : before;
  const auto factor = [now](float m) { return m == now ? 1.0f : power(splat(m - now))[0]; };
  const float old = factor(before), added = factor(m);
  for (int64_t e = 0; e < E; e += kLanes) {
    store(total + e, load(total + e) * old + load(partial + e) * added);
  }
  partial_m(total, E) = now;
  partial_l(total, E) = partial_l(total, E) * old + partial[E + 1] * added;
}

inline void finish_row(const Forward& a, const Sequence& sequence, int64_t h, int query,
                       float* partial) {
  const int64_t E = padded(a.value_dim);
  SoftmaxState state(1);
  state.m[0] = partial_m(partial, E);
  state.l[0] = partial_l(partial, E);
  const bool live = query < live_queries(a, sequence);
  const SoftmaxState::Total total = state.total(0, live ? a.sink(h) : -kInfinity);
  a.lse[query_offset(a.lse_strides, sequence, h, query)] = total.lse;
  store_rows(a.type, a.out.data, query_offset(a.out, sequence, h, query), 0, 1, a.value_dim,
             partial, [&](int) { return total.weight * a.dropout.scale; });
}

// Calls run(first head, heads) for the heads of a group, as many at a time as the workspace holds.
template <class Run>
inline void for_heads(const Forward& a, int64_t kv_head, const Run& run) {
  const int64_t group = a.group();
  for (int64_t from = 0; from < group; from += a.heads_at_once()) {
    run(kv_head * group + from, smaller(static_cast<int>(group - from), a.heads_at_once()));
  }
}

// All splits of a sequence of few queries.
inline void decode_sequence(const Forward& a, const Sequence& sequence, int64_t kv_head,
                            const ForwardWorkspace& memory) {
  if (sequence.queries == 0) {
    return;
  }
  const int64_t E = padded(a.value_dim), stride = a.partial_floats();
  for_heads(a, kv_head, [&](int64_t h, int heads) {
    float *const partials = memory.partials, *const rest = partials + a.rows_at_once() * stride;
    const int queries = sequence.queries, rows = heads * queries;
    const auto run = [&](int64_t split, float* results) {
      with_type(a.type, [&](auto element) {
        decode<decltype(element)>(a, sequence, kv_head, h, heads, split, memory, results, stride);
      });
    };
    run(0, partials);
    for (int64_t split = 1; split * kSplitKeys < sequence.keys; ++split) {
      run(split, rest);
      for (int r = 0; r < rows; ++r) {
        add_partial(partials + r * stride, rest + r * stride, E);
      }
    }
    for (int r = 0; r < rows; ++r) {
      finish_row(a, sequence, h + r / queries, r % queries, partials + r * stride);
    }
  });
}

// Calls with few queries per sequence: each split is a task.
inline void decode_splits(const Forward& a, Queue& queue, const ForwardWorkspace& memory) {
  const int64_t splits = a.splits(), stride = a.partial_floats();
  for_tasks(queue, [&](int64_t task) {
    const int64_t split = task % splits, kv_head = task / splits % a.kv_heads;
    const Sequence sequence = a.sequence(task / splits / a.kv_heads);
    if (splits == 1) {
      decode_sequence(a, sequence, kv_head, memory);
    } else if (sequence.queries > 0 && split * kSplitKeys < sequence.keys) {
      for_heads(a, kv_head, [&](int64_t h, int heads) {
        with_type(a.type, [&](auto element) {
          decode<decltype(element)>(a, sequence, kv_head, h, heads, split, memory,
                                    a.partials_of(sequence, h * sequence.queries) + split * stride,
                                    splits * stride);
        });
      });
    }
    return task;
  });
}

void combine_splits(const Forward& a, Queue& queue, float* workspace) {
  const ForwardWorkspace memory(a, workspace);
  const int64_t E = padded(a.value_dim), stride = a.partial_floats();
  for_tasks(queue, [&](int64_t task) {
    const Sequence sequence = a.sequence(task / a.kv_heads);
    const int64_t kv_head = task % a.kv_heads, group = a.group();
    const int64_t rows = group * sequence.queries;
    for (int64_t row = kv_head * rows; row < (kv_head + 1) * rows; ++row) {
      const float* partials = a.partials_of(sequence, row);
      clear_partial(memory.partials, E);
      if (sequence.keys > 0) {
        memcpy(memory.partials, partials, sizeof(float) * stride);
      }
      for (int64_t split = 1; split * kSplitKeys < sequence.keys; ++split) {
        add_partial(memory.partials, partials + split * stride, E);
      }
      finish_row(a, sequence, row / sequence.queries, static_cast<int>(row % sequence.queries),
                 memory.partials);
    }
    return task;
  });
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
