// Products of operands that are both contiguous along the depth, such as y = x w^T with a weight of
// nn.Linear: they are read in place. Vectors run along the depth; a tile's sums, one vector each,
// are reduced over their lanes together. A sum's order depends on the depth alone, so a row has the
// same bits among any number of rows.
#pragma once

#include "ffn/cpu/panels.h"

namespace fastattn::ffn::FASTATTN_ISA {

// Largest number of rows for which packing a weight costs more than it saves. Measured, as are the
// other constants of this file: docs/pages/kernels/cpu.md.
template <class T>
constexpr bool kConverted = !std::is_same_v<T, float> && UnitsOf<T>::kDepth == 1;
#if defined(__AVX512F__)
template <class T>
constexpr int kUnpackedRows = !kConverted<T>                ? 32
                              : std::is_same_v<T, BFloat16> ? 16
                                                            : 8;
#elif defined(__AVX2__)
template <class T>
constexpr int kUnpackedRows = 2 * kBlockRows;
#else
template <class T>
constexpr int kUnpackedRows = !kConverted<T>                ? 16
                              : std::is_same_v<T, BFloat16> ? 8
                                                            : 4;
#endif
// Sums of a tile in registers: 4 x 4 of 32 vector registers, 3 x 4 or 2 x 4 of 16. Fewer rows have
// at least 4 columns, and so many that consecutive additions are independent.
template <class T>
constexpr int kTileRows = kLanes == 16                                 ? 4
                          : kLanes == 4 || std::is_same_v<T, BFloat16> ? 2
                                                                       : 3;
constexpr int kTileColumns = 4;
template <int kR>
constexpr int kColumnsOf = kLanes / kR > kTileColumns ? kLanes / kR : kTileColumns;
// From kCopyRows rows of x on, half precision is copied as fp32, so that tiles do not convert it.
// In bf16 with AVX2 this is no faster.
template <class T>
constexpr bool kConvertsCopies = kConverted<T> && !(kLanes == 8 && std::is_same_v<T, BFloat16>);
// Bytes of a chunk of the depth: half a panel of the weight and a tile's rows stay in the L1 cache.
// Half as many cost 5 % more, for reducing over lanes.
constexpr int kChunkBytes = 2048;
template <class T>
constexpr int64_t kChunk = kChunkBytes / (kConvertsCopies<T> ? sizeof(float) : sizeof(T));
// Rows of a weight that map to one set of the L1 cache are copied from kCopyRows rows of x on: with
// fewer, copying takes longer than the cache misses. Half precision is copied too, if
// kConvertsCopies.
template <class T>
constexpr int kCopyRows = kLanes == 16                    ? 24
                          : kLanes == 8 || !kConverted<T> ? 16
                                                          : 4;
constexpr int kCopyPitchBytes = kChunkBytes + 64;
static_assert(kLanes * kCopyPitchBytes <= kOperandFloats * static_cast<int64_t>(sizeof(float)));
// With fewer rows of x a row of w is read from its beginning to its end, otherwise a chunk of all
// rows at a time, so that x stays in the cache (depth 2048 with AVX2, 512 columns: 4 rows take 181
// us instead of 213). Not measured elsewhere.
template <class T>
constexpr int kFewRows = kLanes == 8 ? kCopyRows<T> : 0;

// Vectors along the depth, loaded in kParts parts.
template <class T>
struct DotUnits : UnitsOf<T> {
  static constexpr int kParts = 1;
  template <int>
  static typename UnitsOf<T>::Vector part(const T* p, int n) {
    return UnitsOf<T>::along(p, n);
  }
};
#if defined(__AVX2__) && !defined(__AVX512BF16__)
// A shift makes floats of the even elements, a mask of the odd ones: faster than widening.
template <>
struct DotUnits<BFloat16> : Floats {
  static constexpr int kDepth = 2, kParts = 2;
  template <int kPart>
  static Float part(const BFloat16* p, int n) {
    const Word pairs = load_pairs(p, n);
    return bit_cast<Float>(kPart == 0 ? pairs << 16 : pairs & 0xFFFF0000u);
  }
};
#endif

// Calls run(part) for each part, an integral constant.
template <class T, class Run>
inline __attribute__((always_inline)) void for_parts(const Run& run) {
  run(std::integral_constant<int, 0>{});
  if constexpr (DotUnits<T>::kParts == 2) {
    run(std::integral_constant<int, 1>{});
  }
}

// W is T, or float for elements that `convert` has written.
template <class T, int kPart, class W>
inline auto load_part(const W* p, int n) {
  if constexpr (std::is_same_v<T, W>) {
    return DotUnits<T>::template part<kPart>(p, n);
  } else {
    return load(p + kPart * kLanes);
  }
}

// Writes each part of each vector, and zeros beyond the last number.
template <class T>
void convert(const T* from, int64_t numbers, float* to) {
  constexpr int kStep = kLanes * DotUnits<T>::kDepth;
  for (int64_t d = 0; d < numbers; d += kStep, to += kStep) {
    const int count = clamped(numbers - d, kStep);
    for_parts<T>([&](auto part) __attribute__((always_inline)) {
      store(to + part * kLanes, load_part<T, decltype(part)::value>(from + d, count));
    });
  }
}

// sums [kR][kSumPitch] (+)= kR rows of x times kColumnsOf<kR> rows of w, of which `columns` exist,
// `numbers` deep. ahead: kAhead rows of w to prefetch, ahead_stride apart.
template <class T, int kR, int kAhead, bool kWhole, class W>
inline __attribute__((always_inline)) void dot_tile(const T* x, int64_t x_stride, const W* w,
                                                    int64_t w_stride, int columns, int64_t numbers,
                                                    const T* ahead, int64_t ahead_stride,
                                                    float* sums, bool add) {
  using C = DotUnits<T>;
  constexpr int kColumns = kColumnsOf<kR>, kStep = kLanes * C::kDepth;
  Float c[kR * kColumns] = {};
  const auto step = [&](int64_t d, int count) {
    for_parts<T>([&](auto part) __attribute__((always_inline)) {
      constexpr int kPart = decltype(part)::value;
      typename C::Vector a[kR];
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i) {
        a[i] = load_part<T, kPart>(x + i * x_stride + d, count);
      }
#pragma GCC unroll 16
      for (int j = 0; j < kColumns; ++j) {
        const int64_t row = kWhole || j < columns ? j : columns - 1;
        const auto b = load_part<T, kPart>(w + row * w_stride + d, count);
#pragma GCC unroll 4
        for (int i = 0; i < kR; ++i) {
          c[i * kColumns + j] = C::products(a[i], b, c[i * kColumns + j]);
        }
      }
    });
  };
  int64_t d = 0;
  for (; d + kStep <= numbers; d += kStep) {
#pragma GCC unroll 4
    for (int i = 0; i < kAhead; ++i) {
      __builtin_prefetch(ahead + i * ahead_stride + d, 0, 2);
    }
    step(d, kStep);
  }
  if (d < numbers) {
    step(d, static_cast<int>(numbers - d));
  }
  float total[kR * kColumns];
  store_sums(total, c);
#pragma GCC unroll 16
  for (int i = 0; i < kR * kColumns; i += 4) {
    float* sum = sums + i / kColumns * kSumPitch + i % kColumns;
    const Four v = load_bits<Four>(total + i);
    store_bits(sum, add ? load_bits<Four>(sum) + v : v);
  }
}

// kR rows times the columns of half a panel. A tile prefetches kAhead rows of w, the next tile
// those kColumns further on.
template <class T, int kR, int kAhead, class W>
void dot_rows(const T* x, int64_t x_stride, const W* w, int64_t w_stride, int columns,
              int64_t numbers, const T* ahead, int64_t ahead_stride, float* sums, bool add) {
  constexpr int kColumns = kColumnsOf<kR>;
  for (int j = 0; j < columns;
       j += kColumns, w += kColumns * w_stride, ahead += kColumns * ahead_stride) {
    if (columns - j >= kColumns) {
      dot_tile<T, kR, kAhead, true>(x, x_stride, w, w_stride, kColumns, numbers, ahead,
                                    ahead_stride, sums + j, add);
    } else {
      dot_tile<T, kR, kAhead, false>(x, x_stride, w, w_stride, columns - j, numbers, ahead,
                                     ahead_stride, sums + j, add);
    }
  }
}

// `rows` rows of x times the columns of half a panel. Tiles prefetch the next half panel, at
// `ahead`, into the L2 cache, each its share of the rows. (Weights of 154 MB, one Zen 5 thread: 4
// rows take 7.7 ms with one prefetched row a tile and 6.6 with four, 8 rows 8.2 and 7.6 with two.)
template <class T, class W>
void dot_half(const T* x, int64_t x_stride, int rows, const W* w, int64_t w_stride, int columns,
              int64_t numbers, const T* ahead, int64_t ahead_stride, float* sums, bool add) {
  constexpr int kTile = kTileRows<T>;
  constexpr bool kFewPrefetch = kLanes == 8;  // the first tile of up to 4 rows
  const auto run = [&](auto height, auto share, int r) {
    constexpr int kR = decltype(height)::value, kAhead = decltype(share)::value;
    const T* row = ahead + r / kTile * kAhead % kTileColumns * ahead_stride;
    dot_rows<T, kR, kAhead>(x + r * x_stride, x_stride, w, w_stride, columns, numbers, row,
                            ahead_stride, sums + r * kSumPitch, add);
  };
  const auto run_few = [&](auto height, int r) {
    if (kFewPrefetch && r == 0) {
      run(height, std::integral_constant<int, kColumnsOf<decltype(height)::value>>{}, r);
    } else {
      run(height, std::integral_constant<int, 0>{}, r);
    }
  };
  const auto run_tiles = [&](auto share) {
    int r = 0;
    // The last four rows are two and two, not three and one.
    const int high = kTile == 3 && rows % 3 == 1 ? rows - 4 : rows;
    for (; r + kTile <= high; r += kTile) {
      run(std::integral_constant<int, kTile>{}, share, r);
    }
    for (; kTile > 2 && r + 2 <= rows; r += 2) {
      run_few(std::integral_constant<int, 2>{}, r);
    }
    if (r < rows) {
      run_few(std::integral_constant<int, 1>{}, r);
    }
  };
  if (rows < 2 * kTile) {
    run_tiles(std::integral_constant<int, kTileColumns>{});
  } else if (rows < 4 * kTile) {
    run_tiles(std::integral_constant<int, kTileColumns / 2>{});
  } else {
    run_tiles(std::integral_constant<int, 1>{});
  }
}

// One row of x is multiplied by kStreams rows of w at a time, far apart, each the next one of a
// stream that the hardware prefetches.
constexpr int kStreams = 4;

// x times each row of w, elements [first, last) of the depth.
template <class T>
inline __attribute__((always_inline)) Four dot_chunk(const T* x, const T* const (&w)[kStreams],
                                                     int64_t first, int64_t last) {
  using C = DotUnits<T>;
  constexpr int64_t kStep = kLanes * C::kDepth, kUnrolled = 4;
  Float c[kStreams] = {};
  const auto step = [&](int64_t d, int count) {
    for_parts<T>([&](auto part) __attribute__((always_inline)) {
      constexpr int kPart = decltype(part)::value;
      const auto a = load_part<T, kPart>(x + d, count);
#pragma GCC unroll 4
      for (int n = 0; n < kStreams; ++n) {
        c[n] = C::products(a, load_part<T, kPart>(w[n] + d, count), c[n]);
      }
    });
  };
  int64_t d = first;
  for (; d + kUnrolled * kStep <= last; d += kUnrolled * kStep) {
#pragma GCC unroll 4
    for (int i = 0; i < kUnrolled; ++i) {
      step(d + i * kStep, kStep);
    }
  }
  for (; d < last; d += kStep) {
    step(d, static_cast<int>(std::min(last - d, kStep)));
  }
  float sums[kStreams];
  store_sums(sums, c[0], c[1], c[2], c[3]);
  return load_bits<Four>(sums);
}

// As dot_block, for one row of x.
template <class T>
void dot_one_row(const Product& p, int64_t row, int64_t first_panel, int64_t last_panel,
                 float* sums) {
  const int64_t depth = p.a.columns, stride = p.b.column_stride;
  const T* x = static_cast<const T*>(p.a.data) + row * p.a.row_stride;
  const int64_t halves = 2 * (last_panel - first_panel), apart = ceil_div(halves, kStreams);
  for (int64_t h = 0; h < apart; ++h) {
    const T* w[kStreams];
    float* to[kStreams];
    int left[kStreams];
    for (int n = 0; n < kStreams; ++n) {
      const int64_t at = h + n * apart < halves ? h + n * apart : h;
      const Half half = half_of(p, first_panel + at / 2, at % 2);
      w[n] = static_cast<const T*>(p.b.data) + (half.count > 0 ? half.first * stride : 0);
      to[n] = sums + at * kLanes;
      left[n] = half.count;
    }
    for (int j = 0; j < kLanes; ++j) {
      Four total = {};
      for (int64_t d = 0; d < depth; d += kChunk<T>) {
        const Four chunk = dot_chunk(x, w, d, std::min(depth, d + kChunk<T>));
        total = d > 0 ? total + chunk : chunk;
      }
      for (int n = 0; n < kStreams; ++n) {
        to[n][j] = total[n];
        w[n] += --left[n] > 0 ? stride : 0;  // the last row again
      }
    }
  }
}

// As multiply_block, for a product that is `unpacked`.
template <class T>
void dot_block(const Product& p, int64_t first_row, int rows, int64_t first_panel,
               int64_t last_panel, float* workspace) {
  if (rows == 1 && p.a.columns > 0) {
    return dot_one_row<T>(p, first_row, first_panel, last_panel, workspace);
  }
  const int64_t depth = p.a.columns, x_stride = p.a.row_stride, w_stride = p.b.column_stride;
  const T* x = static_cast<const T*>(p.a.data) + first_row * x_stride;
  const T* w = static_cast<const T*>(p.b.data);
  const bool copies =
      depth > 0 && copies_columns(rows, kCopyRows<T>, kConvertsCopies<T>, w_stride * sizeof(T));
  using Copied = std::conditional_t<kConvertsCopies<T>, float, T>;
  constexpr int64_t kCopyPitch = kCopyPitchBytes / sizeof(Copied);
  Copied* copy = reinterpret_cast<Copied*>(workspace + sum_floats(rows));
  const int64_t chunks = depth > 0 ? ceil_div(depth, kChunk<T>) : 1;
  const int64_t halves = 2 * (last_panel - first_panel), count = chunks * halves;
  const bool by_halves = rows < kFewRows<T>;
  struct Part {
    int64_t h, d;
    Half half;
  };
  const auto part = [&](int64_t i) {
    const int64_t h = by_halves ? i / chunks : i % halves;
    const int64_t d = (by_halves ? i % chunks : i / halves) * kChunk<T>;
    return Part{h, d, half_of(p, first_panel + h / 2, h % 2)};
  };
  for (int64_t i = 0; i < count; ++i) {
    const auto [h, d, half] = part(i);
    const Part next = part(i + 1 < count ? i + 1 : i);
    const int64_t numbers = depth - d < kChunk<T> ? depth - d : kChunk<T>;
    const T* columns = w + half.first * w_stride + d;
    const auto multiply = [&](const auto* half_panel, int64_t stride) {
      dot_half(x + d, x_stride, rows, half_panel, stride, half.count, numbers,
               w + next.half.first * w_stride + next.d, w_stride, workspace + h * kLanes, d > 0);
    };
    if (!copies) {
      multiply(columns, w_stride);
      continue;
    }
    for (int r = 0; r < half.count; ++r) {
      if constexpr (kConvertsCopies<T>) {
        convert(columns + r * w_stride, numbers, copy + r * kCopyPitch);
      } else {
        memcpy(copy + r * kCopyPitch, columns + r * w_stride, sizeof(T) * numbers);
      }
    }
    multiply(static_cast<const Copied*>(copy), kCopyPitch);
  }
}

}  // namespace fastattn::ffn::FASTATTN_ISA
