// Matrix products for the CPU feed-forward network: blocks of the result, and the packed forms of
// their operands, which convert every layout and dtype to units (cpu/gemm.h).
//
// A panel of the right operand is [depth][kPanel]; the left operand's block keeps the order that it
// has in memory: rows [row][kOperandPitch] where its depth is contiguous, otherwise
// [depth][kAcrossPitch].
#pragma once

#include "cpu/gemm.h"
#include "ffn/ffn.h"

namespace fastattn::ffn::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

constexpr int kPanel = 2 * kLanes;
static_assert(kPanel <= kMaxPanel && kLanes <= kMaxLanes);
// Sums in registers: 12 x 2 of 32 vector registers, or 6 x 2 of 16.
#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif
static_assert(kBlockRows % kRows == 0);
static_assert(kBlockDepth % kMaxLanes == 0);
constexpr int kSumPitch = kBlockPanels * kPanel;

// -- micro-kernel ---------------------------------------------------------------------------------
// Memory to prefetch into the L2 cache, and its units per step of the depth.
struct Prefetch {
  const uint32_t* at;
  int64_t step;
};

// sums[row][kSumPitch] (+)= the product of a panel of each operand. In the left one, units of a row
// are kStep apart and rows kPitch.
template <class C, int kR, int kPitch, int kStep>
__attribute__((noinline)) void micro_kernel(const typename C::Unit* a, const typename C::Unit* b,
                                            int64_t depth, float* sums, bool add, Prefetch ahead) {
  constexpr std::integral_constant<int, kPitch> kRow;
  constexpr std::integral_constant<int, kStep> kDepth;
  constexpr std::integral_constant<int, kPanel> kNext;
  Float c[kR][2] = {};
  multiply_add<C>(c, a, kRow, kDepth, b, kNext, kNext, depth, [&] {
    __builtin_prefetch(ahead.at, 0, 2);
    ahead.at += ahead.step;
  });
  // Chunks have separate sums: one chain of additions over a long depth loses precision.
#pragma GCC unroll 12
  for (int i = 0; i < kR; ++i) {
    float* sum = sums + i * kSumPitch;
    store(sum, add ? load(sum) + c[i][0] : c[i][0]);
    store(sum + kLanes, add ? load(sum + kLanes) + c[i][1] : c[i][1]);
  }
}

// -- packing --------------------------------------------------------------------------------------
// The first column of half a panel in b, and how many there are.
struct Half {
  int64_t first;
  int count;
};
inline Half half_of(const Product& p, int64_t panel, int half) {
  if (p.gate == 0 || p.b.columns == p.gate) {
    const int64_t first = panel * kPanel + half * kLanes;
    return {first, clamped(p.b.columns - first, kLanes)};
  }
  return {half * p.gate + panel * kLanes, clamped(p.gate - panel * kLanes, kLanes)};
}

// Units [first_unit, first_unit + units) of a panel.
template <class T>
void pack_panel(const Product& p, int64_t panel, int64_t first_unit, int64_t units,
                typename UnitsOf<T>::Unit* result) {
  using C = UnitsOf<T>;
  using Unit = typename C::Unit;
  const int64_t row = p.b.row_stride, column = p.b.column_stride;
  for (int side = 0; side < 2; ++side, result += kLanes) {
    const Half half = half_of(p, panel, side);
    const int64_t first = first_unit * C::kDepth;
    const T* source = static_cast<const T*>(p.b.data) + half.first * column + first * row;
    const int64_t numbers = p.b.rows - first;
    if (column == 1) {
      for (int64_t u = 0; u < units; ++u) {
        const int64_t d = u * C::kDepth;
        store_bits(result + u * kPanel, C::across(source + d * row, half.count, row, numbers - d));
      }
      continue;
    }
    for (int64_t u = 0; u < units; u += kLanes) {
      const int64_t d = u * C::kDepth;
      const int count = clamped(numbers - d, kLanes * C::kDepth);
      typename C::Vector v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        // Rows of a weight are too far apart for the hardware prefetcher.
        __builtin_prefetch(source + i * column + d + kBlockDepth * C::kDepth);
        v[i] = C::along(source + i * column + d, i < half.count ? count : 0);
      }
      if (u + kLanes <= units) {
        store_transposed(v, result + u * kPanel, kPanel);
      } else {
        Unit block[kLanes * kLanes];
        store_transposed(v, block, kLanes);
        for (int64_t i = u; i < units; ++i) {
          memcpy(result + i * kPanel, block + (i - u) * kLanes, sizeof(Unit) * kLanes);
        }
      }
    }
  }
}

template <class T>
void pack_panels(const Product& p, int64_t first_panel, int64_t last_panel) {
  using C = UnitsOf<T>;
  const int64_t units = ceil_div(p.b.rows, C::kDepth);
  auto* packed = reinterpret_cast<typename C::Unit*>(p.packed);
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    pack_panel<T>(p, panel, 0, units, packed + panel * units * kPanel);
  }
}

// Rows of a block per micro-kernel: at most `most`, as even as possible.
inline int strip_rows(int rows, int most) {
  const int strips = (rows + most - 1) / most;
  return strips == 0 ? 1 : (rows + strips - 1) / strips;
}

// Units [first_unit, first_unit + units) of rows [first_row, first_row + rows).
template <class T>
void pack_left(const Matrix& a, int64_t first_row, int rows, int64_t first_unit, int units,
               typename UnitsOf<T>::Unit* result) {
  using C = UnitsOf<T>;
  const int64_t d = first_unit * C::kDepth;
  const T* source = static_cast<const T*>(a.data) + first_row * a.row_stride + d * a.column_stride;
  const int64_t numbers = a.columns - d;
  if (a.column_stride == 1) {
    for (int r = 0; r < rows; ++r) {
      for (int u = 0; u < units; u += kLanes) {
        const int64_t left = numbers - u * C::kDepth;
        store_bits(
            result + r * kOperandPitch + u,
            C::along(source + r * a.row_stride + u * C::kDepth, clamped(left, kLanes * C::kDepth)));
      }
    }
    return;
  }
  for (int u = 0; u < units; ++u) {
    const int64_t at = u * C::kDepth;
    for (int r = 0; r < rows; r += kLanes) {
      store_bits(result + u * kAcrossPitch + r, C::across(source + at * a.column_stride + r,
                                                          rows - r, a.column_stride, numbers - at));
    }
  }
}

// -- a block --------------------------------------------------------------------------------------
// always_inline, like its callers: GCC 12 removes calls of a function without side effects.
template <class T>
inline __attribute__((always_inline)) void prefetch(const T* numbers, int64_t count) {
  constexpr int kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) {
    __builtin_prefetch(numbers + i, 0, 2);
  }
}

// Prefetches one of `shares` shares of those rows' units from first_unit on.
template <class T>
inline __attribute__((always_inline)) void prefetch_left(const Matrix& a, int64_t first_row,
                                                         int rows, int64_t first_unit,
                                                         int64_t units, int64_t share,
                                                         int64_t shares) {
  const int64_t first = first_unit * UnitsOf<T>::kDepth;
  const int numbers = clamped(a.columns - first, static_cast<int>(units * UnitsOf<T>::kDepth));
  const T* data =
      static_cast<const T*>(a.data) + first_row * a.row_stride + first * a.column_stride;
  const bool by_rows = a.column_stride == 1;
  const int64_t lines = by_rows ? rows : numbers, stride = by_rows ? a.row_stride : a.column_stride;
  for (int64_t i = lines * share / shares; i < lines * (share + 1) / shares; ++i) {
    prefetch(data + i * stride, by_rows ? numbers : rows);
  }
}

// Prefetches one of `shares` shares of what the epilogue of a block reads.
template <class T>
inline __attribute__((always_inline)) void prefetch_epilogue(const Product& p, int64_t first_row,
                                                             int rows, int64_t first_panel,
                                                             int64_t last_panel, int64_t share,
                                                             int64_t shares) {
  if (p.epilogue.kind != Epilogue::kDifferentiate) {
    return;
  }
  const int64_t first = first_panel * kPanel, wide = p.gate > 0 ? 2 * p.gate : p.b.columns;
  const int columns =
      clamped(p.b.columns - first, static_cast<int>((last_panel - first_panel) * kPanel));
  for (int64_t r = rows * share / shares; r < rows * (share + 1) / shares; ++r) {
    const T* hidden = static_cast<const T*>(p.epilogue.hidden) + (first_row + r) * wide + first;
    prefetch(hidden, columns);
    if (p.gate > 0) {
      prefetch(hidden + p.gate, columns);
    }
  }
}

// Computes the sums [row][kSumPitch] of rows [first_row, first_row + rows), panels [first_panel,
// last_panel).
template <class T>
void multiply_block(const Product& p, int64_t first_row, int rows, int64_t first_panel,
                    int64_t last_panel, float* workspace) {
  using C = UnitsOf<T>;
  using Unit = typename C::Unit;
  const int64_t units = ceil_div(p.a.columns, C::kDepth);
  const bool by_rows = p.a.column_stride == 1;
  const int step = strip_rows(rows, kRows);
  const auto* packed = reinterpret_cast<const Unit*>(p.packed);
  float* sums = workspace;
  Unit* left = reinterpret_cast<Unit*>(workspace + sum_floats(rows));
  Unit* own = left + kOperandFloats;
  if (units == 0) {
    for (int r = 0; r < rows; ++r) {
      memset(sums + r * kSumPitch, 0, sizeof(float) * kPanel * (last_panel - first_panel));
    }
    return;
  }
  // Chunks of the depth, as even as whole vectors allow.
  const int64_t even = ceil_div(units, ceil_div(units, kBlockDepth));
  const int64_t chunk = ceil_div(even, kMaxLanes) * kMaxLanes;
  for (int64_t first_unit = 0; first_unit < units; first_unit += chunk) {
    const int depth = clamped(units - first_unit, static_cast<int>(chunk));
    const int64_t after = first_unit + depth;
    pack_left<T>(p.a, first_row, rows, first_unit, depth, left);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      float* panel_sums = sums + (panel - first_panel) * kPanel;
      // While this panel is multiplied, its share of what follows this chunk is prefetched.
      const int64_t share = panel - first_panel, shares = last_panel - first_panel;
      if (after < units) {
        prefetch_left<T>(p.a, first_row, rows, after, chunk, share, shares);
      } else {
        prefetch_epilogue<T>(p, first_row, rows, first_panel, last_panel, share, shares);
      }
      const Unit* right = packed ? packed + (panel * units + first_unit) * kPanel : own;
      Prefetch ahead = {reinterpret_cast<const uint32_t*>(right), 0};
      if (!packed) {
        pack_panel<T>(p, panel, first_unit, depth, own);
      } else if (panel + 1 < last_panel) {  // the next panel's chunk
        ahead = {ahead.at + units * kPanel, ceil_div(kPanel * step, rows)};
      }
      for (int r = 0; r < rows; r += step) {
        const int height = step < rows - r ? step : rows - r;
        const Unit* strip = left + r * (by_rows ? kOperandPitch : 1);
        with_count<kRows>(height, [&](auto count) {
          constexpr int kR = decltype(count)::value;
          const auto kernel = by_rows ? micro_kernel<C, kR, kOperandPitch, 1>
                                      : micro_kernel<C, kR, 1, kAcrossPitch>;
          kernel(strip, right, depth, panel_sums + r * kSumPitch, first_unit > 0, ahead);
        });
        ahead.at += depth * ahead.step;
      }
    }
  }
}

}  // namespace fastattn::ffn::FASTATTN_ISA
