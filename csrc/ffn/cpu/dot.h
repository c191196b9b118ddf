// Products of operands that are both contiguous along the depth, such as y = x w^T with a weight of
// nn.Linear: they are read in place. Vectors run along the depth; a tile's sums, one vector each,
// are reduced over their lanes together. A sum's order depends on the depth alone, so a row has the
// same bits among any number of rows.
#pragma once

#include "ffn/cpu/panels.h"

namespace fastattn::ffn::FASTATTN_ISA {

// Up to so many rows, packing a weight costs more than it saves. (All weights of a decoder, 19 MB,
// one Zen 5 thread: without packing 1.6 times the speed for 4 rows, 1.15 for 16, 1 for 48. With
// AVX2, whose tiles are smaller, a weight of 32000 x 512: 1.25 for 16 rows, 1 for 32.)
#if defined(__AVX512F__)
constexpr int kUnpackedRows = 32;
#else
constexpr int kUnpackedRows = 16;
#endif
// Half precision that is converted, again for each tile that reads it, is packed except with AVX2;
// elsewhere this is not measured. (A weight of 32000 x 512, one AVX2 thread: bf16 takes 1.9 ms
// instead of 6.8 for one row, 5.9 instead of 9.4 for 8.)
constexpr int kUnpackedHalfRows = kLanes == 8 ? 8 : 0;
// A tile has kLanes sums: 4 x 4, 2 x 4 or 2 x 2, or fewer rows times more columns.
constexpr int kTileRows = kLanes == 4 ? 2 : kLanes / 4;
// Bytes of a chunk of the depth: half a panel of the weight and a tile's rows stay in the L1 cache.
// Half as many cost 5 % more, for reducing over lanes.
constexpr int kChunkBytes = 2048;
template <class T>
constexpr int64_t kChunk = kChunkBytes / sizeof(T);
// Rows of a weight that are a multiple of 4 KiB apart map to one set of the L1 cache: from
// kCopyRows rows of x on they are copied (depth 1024, one Zen 5 thread, 48 rows: 180 GFLOP/s
// instead of 157; depth 2048 with AVX2, 16 rows: 45 instead of 36, 8 rows: 34 instead of 30).
constexpr int kAliasBytes = 4096, kCopyRows = kLanes == 16 ? 24 : 8;
template <class T>
constexpr int64_t kCopyPitch = (kChunkBytes + 64) / sizeof(T);
static_assert(kLanes * (kChunkBytes + 64) <= kOperandFloats * static_cast<int64_t>(sizeof(float)));

// sums [kR][kSumPitch] (+)= kR rows of x times kLanes / kR rows of w, of which `columns` exist,
// `numbers` deep. ahead: kAhead rows of w to prefetch, ahead_stride apart.
template <class T, int kR, int kAhead, bool kWhole>
inline __attribute__((always_inline)) void dot_tile(const T* x, int64_t x_stride, const T* w,
                                                    int64_t w_stride, int columns, int64_t numbers,
                                                    const T* ahead, int64_t ahead_stride,
                                                    float* sums, bool add) {
  using C = UnitsOf<T>;
  constexpr int kColumns = kLanes / kR, kStep = kLanes * C::kDepth;
  Float c[kLanes] = {};
  const auto step = [&](int64_t d, int count) {
    typename C::Vector a[kR];
#pragma GCC unroll 4
    for (int i = 0; i < kR; ++i) {
      a[i] = C::along(x + i * x_stride + d, count);
    }
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j) {
      const int64_t row = kWhole || j < columns ? j : columns - 1;
      const auto b = C::along(w + row * w_stride + d, count);
#pragma GCC unroll 4
      for (int i = 0; i < kR; ++i) {
        c[i * kColumns + j] = C::products(a[i], b, c[i * kColumns + j]);
      }
    }
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
  float total[kLanes];
  store(total, sum_each(c));
#pragma GCC unroll 4
  for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kColumns; ++j) {
      float& sum = sums[i * kSumPitch + j];
      sum = add ? sum + total[i * kColumns + j] : total[i * kColumns + j];
    }
  }
}

// kR rows times the columns of half a panel. A tile prefetches kAhead rows of w, the next tile
// those kColumns further on.
template <class T, int kR, int kAhead>
void dot_rows(const T* x, int64_t x_stride, const T* w, int64_t w_stride, int columns,
              int64_t numbers, const T* ahead, int64_t ahead_stride, float* sums, bool add) {
  constexpr int kColumns = kLanes / kR;
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

// As multiply_block, for a product that is `unpacked`.
template <class T>
void dot_block(const Product& p, int64_t first_row, int rows, int64_t first_panel,
               int64_t last_panel, float* workspace) {
  const int64_t depth = p.a.columns, x_stride = p.a.row_stride, w_stride = p.b.column_stride;
  const T* x = static_cast<const T*>(p.a.data) + first_row * x_stride;
  const T* w = static_cast<const T*>(p.b.data);
  const bool aliases = depth > 0 && w_stride * sizeof(T) % kAliasBytes == 0;
  const bool copies = aliases && rows >= kCopyRows;
  const auto half_at = [&](int64_t h) { return half_of(p, first_panel + h / 2, h % 2); };
  T* copy = reinterpret_cast<T*>(workspace);
  int64_t d = 0;
  do {
    const int64_t numbers = depth - d < kChunk<T> ? depth - d : kChunk<T>;
    for (int64_t h = 0; h < 2 * (last_panel - first_panel); ++h) {
      const Half half = half_at(h);
      const T* columns = w + half.first * w_stride + d;
      int64_t stride = w_stride;
      if (copies) {
        for (int i = 0; i < half.count; ++i) {
          memcpy(copy + i * kCopyPitch<T>, columns + i * stride, sizeof(T) * numbers);
        }
        columns = copy;
        stride = kCopyPitch<T>;
      }
      // Tiles prefetch the next half panel into the L2 cache, each its share of the rows. (Weights
      // of 154 MB, one Zen 5 thread: 4 rows take 7.7 ms with one prefetched row a tile and 6.6 with
      // four, 8 rows 8.2 and 7.6 with two. One row takes 5.3 ms without and 5.6 with prefetching;
      // with AVX2 a weight of 32000 x 512 takes 4.7 ms without and 3.2 with, in bf16 5.4 and 1.9.)
      constexpr bool kPrefetchesOne = kLanes == 8;
      const bool last = h + 1 == 2 * (last_panel - first_panel);
      const int64_t next = last ? half.first : half_at(h + 1).first;
      const T* ahead = w + next * w_stride + d;
      float* sum = workspace + kSumsAt + h * kLanes;
      const auto run = [&](auto height, auto share, int r) {
        constexpr int kR = decltype(height)::value, kAhead = decltype(share)::value;
        const T* row = ahead + r / kTileRows * kAhead % (kLanes / kTileRows) * w_stride;
        dot_rows<T, kR, kAhead>(x + r * x_stride + d, x_stride, columns, stride, half.count,
                                numbers, row, w_stride, sum + r * kSumPitch, d > 0);
      };
      const auto run_tiles = [&](auto share) {
        int r = 0;
        for (; r + kTileRows <= rows; r += kTileRows) {
          run(std::integral_constant<int, kTileRows>{}, share, r);
        }
        constexpr std::integral_constant<int, 0> kNone;
        if (kTileRows > 2 && r + 2 <= rows) {
          run(std::integral_constant<int, 2>{}, kNone, r);
          r += 2;
        }
        if (r < rows) {
          constexpr std::integral_constant<int, 1> kOne;
          if (kPrefetchesOne && rows == 1) {
            run(kOne, std::integral_constant<int, kLanes>{}, r);
          } else {
            run(kOne, kNone, r);
          }
        }
      };
      constexpr int kTileColumns = kLanes / kTileRows;
      if (rows < 2 * kTileRows) {
        run_tiles(std::integral_constant<int, kTileColumns>{});
      } else if (rows < 4 * kTileRows) {
        run_tiles(std::integral_constant<int, kTileColumns / 2>{});
      } else {
        run_tiles(std::integral_constant<int, 1>{});
      }
    }
    d += numbers;
  } while (d < depth);
}

}  // namespace fastattn::ffn::FASTATTN_ISA
