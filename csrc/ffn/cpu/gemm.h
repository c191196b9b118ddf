// Matrix products for the CPU feed-forward network: one register micro-kernel and the packed forms
// of its operands, which turn every layout and element type into the one that it reads.
//
// Operands consist of 32-bit units: a float (Floats; other types are converted), or two bf16 of
// neighbouring depth (Pairs, where there is an instruction for their products). A panel of the
// right operand is [depth][kPanel]; the left operand's block keeps the order that it has in memory:
// rows [row][kOperandPitch] where its depth is contiguous, otherwise [depth][kAcrossPitch].
#pragma once

#include "cpu/simd.h"
#include "ffn/ffn.h"

namespace fastattn::ffn::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

constexpr int kPanel = 2 * kLanes;
static_assert(kPanel <= kMaxPanel && kLanes <= kMaxLanes);
// Sums in registers: 12 x 2 vectors of 32, or 6 x 2 of 16.
#if defined(__AVX512F__)
constexpr int kRows = 12;
#else
constexpr int kRows = 6;
#endif
static_assert(kBlockRows % kRows == 0);
static_assert(kBlockDepth % kMaxLanes == 0);
constexpr int kSumPitch = kBlockPanels * kPanel;
constexpr int kUnitsOfLine = 16;  // of a cache of 64-byte lines

template <class Visit>
inline auto with_type(DType type, const Visit& visit) {
  switch (type) {
    case DType::kBFloat16:
      return visit(BFloat16{});
    case DType::kFloat16:
      return visit(Float16{});
    case DType::kFloat32:
      break;
  }
  return visit(float{});
}

// -- units ----------------------------------------------------------------------------------------
struct Floats {
  using Unit = float;
  static constexpr int kDepth = 1;  // numbers in a unit

  static Float product(const Unit* a, const Unit* b, Float c) { return fma(splat(*a), load(b), c); }
  static Float products(Float a, Float b, Float c) { return fma(a, b, c); }
  // Units of `n` numbers along the depth, zeros behind them.
  template <class T>
  static Float along(const T* p, int n) {
    return n >= kLanes ? load(p) : load(p, n);
  }
  // Units of `n` neighbouring rows or columns; numbers of a unit are `step` apart, of which `depth`
  // are left.
  template <class T>
  static Float across(const T* p, int n, int64_t, int64_t) {
    return n >= kLanes ? load(p) : load(p, n);
  }
  // A panel's sums of a row.
  template <class T>
  static void store_sums(T* p, Float low, Float high) {
    store(p, low);
    store(p + kLanes, high);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Unit = uint32_t;
  static constexpr int kDepth = 2;

  static Float product(const Unit* a, const Unit* b, Float c) {
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(*a));
    return _mm512_dpbf16_ps(c, bit_cast<__m512bh>(factor),
                            bit_cast<__m512bh>(_mm512_loadu_si512(b)));
  }
  static Float products(Word a, Word b, Float c) {
    return _mm512_dpbf16_ps(c, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }
  static Word along(const BFloat16* p, int n) {
    const __mmask32 in = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
    return bit_cast<Word>(_mm512_maskz_loadu_epi16(in, p));
  }
  static Word across(const BFloat16* p, int n, int64_t step, int64_t depth) {
    constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 takes several instructions for its own conversion
    const auto wide = [&](const BFloat16* q) {
      const Short v = n >= kLanes ? load_bits<Short>(q) : load_bits<Short>(q, n);
      return bit_cast<Word>(_mm512_maskz_cvtepu16_epi32(kAll, bit_cast<__m256i>(v)));
    };
    return depth > 1 ? wide(p) | (wide(p + step) << 16) : wide(p);
  }
  // `product` leaves no denormals, which this instruction takes for 0.
  static void store_sums(BFloat16* p, Float low, Float high) {
    _mm512_storeu_si512(p, bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
};
template <class T>
using UnitsOf = std::conditional_t<std::is_same_v<T, BFloat16>, Pairs, Floats>;
#else
template <class T>
using UnitsOf = Floats;
#endif

inline int clamped(int64_t n, int most) {
  return n < 0 ? 0 : n > most ? most : static_cast<int>(n);
}

// -- micro-kernel ---------------------------------------------------------------------------------
// Memory that will be read soon, and how many units of it a step of the depth asks for: into the
// second cache, where a micro-kernel has loads to spare.
struct Ahead {
  const uint32_t* at;
  int64_t step;
};

// sums[row][kSumPitch] (+)= a panel of each operand. The left one's units of a row are kStep apart,
// its rows kPitch.
template <class C, int kR, int kPitch, int kStep>
void micro_kernel(const typename C::Unit* a, const typename C::Unit* b, int64_t depth, float* sums,
                  bool add, Ahead ahead) {
  Float c[kR][2];
#pragma GCC unroll 12
  for (int i = 0; i < kR; ++i) {
    c[i][0] = c[i][1] = Float{};
  }
  for (int64_t d = 0; d < depth; ++d) {
    __builtin_prefetch(ahead.at, 0, 2);
    ahead.at += ahead.step;
#pragma GCC unroll 12
    for (int i = 0; i < kR; ++i) {
      c[i][0] = C::product(a + i * kPitch, b, c[i][0]);
      c[i][1] = C::product(a + i * kPitch, b + kLanes, c[i][1]);
    }
    a += kStep;
    b += kPanel;
  }
  // Pieces are summed apart: one chain of additions over a long depth loses digits.
#pragma GCC unroll 12
  for (int i = 0; i < kR; ++i) {
    float* sum = sums + i * kSumPitch;
    store(sum, add ? load(sum) + c[i][0] : c[i][0]);
    store(sum + kLanes, add ? load(sum + kLanes) + c[i][1] : c[i][1]);
  }
}

template <class C>
using MicroKernel = void (*)(const typename C::Unit*, const typename C::Unit*, int64_t, float*,
                             bool, Ahead);

template <class C, int kPitch, int kStep, int... kR>
MicroKernel<C> micro_kernel_of(int rows, std::integer_sequence<int, kR...>) {
  static constexpr MicroKernel<C> table[] = {micro_kernel<C, kR + 1, kPitch, kStep>...};
  return table[rows - 1];
}

// -- packing --------------------------------------------------------------------------------------
inline void store_units(float* p, Float v) {
  store(p, v);
}
inline void store_units(uint32_t* p, Word v) {
  store_bits(p, v);
}

// kLanes vectors of units become the columns of kLanes rows that are `pitch` apart.
template <class Vector, class Unit>
inline void store_transposed(Vector (&v)[kLanes], Unit* result, int64_t pitch) {
#if defined(__AVX512F__)
  // GCC 12 warns about the forms without a mask.
  constexpr __mmask16 kAll = 0xFFFF;
  constexpr __mmask8 kAllPairs = 0xFF;
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    const __m512i even = bit_cast<__m512i>(v[i]), odd = bit_cast<__m512i>(v[i + 1]);
    t[i] = _mm512_maskz_unpacklo_epi32(kAll, even, odd);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, even, odd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_maskz_unpacklo_epi64(kAllPairs, t[i], t[i + 2]);
    r[i + 1] = _mm512_maskz_unpackhi_epi64(kAllPairs, t[i], t[i + 2]);
    r[i + 2] = _mm512_maskz_unpacklo_epi64(kAllPairs, t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_maskz_unpackhi_epi64(kAllPairs, t[i + 1], t[i + 3]);
  }
  // r[4 a + b]: in its quarter x the unit 4 x + b of vectors 4 a .. 4 a + 3.
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    const __m512i low = _mm512_maskz_shuffle_i32x4(kAll, r[b], r[4 + b], 0x44);
    const __m512i high = _mm512_maskz_shuffle_i32x4(kAll, r[b], r[4 + b], 0xEE);
    const __m512i low2 = _mm512_maskz_shuffle_i32x4(kAll, r[8 + b], r[12 + b], 0x44);
    const __m512i high2 = _mm512_maskz_shuffle_i32x4(kAll, r[8 + b], r[12 + b], 0xEE);
    _mm512_storeu_si512(result + b * pitch, _mm512_maskz_shuffle_i32x4(kAll, low, low2, 0x88));
    _mm512_storeu_si512(result + (4 + b) * pitch,
                        _mm512_maskz_shuffle_i32x4(kAll, low, low2, 0xDD));
    _mm512_storeu_si512(result + (8 + b) * pitch,
                        _mm512_maskz_shuffle_i32x4(kAll, high, high2, 0x88));
    _mm512_storeu_si512(result + (12 + b) * pitch,
                        _mm512_maskz_shuffle_i32x4(kAll, high, high2, 0xDD));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    Vector column{};
    for (int j = 0; j < kLanes; ++j) {
      column[j] = v[j][i];
    }
    store_units(result + i * pitch, column);
  }
#endif
}

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
        store_units(result + u * kPanel, C::across(source + d * row, half.count, row, numbers - d));
      }
      continue;
    }
    for (int64_t u = 0; u < units; u += kLanes) {
      const int64_t d = u * C::kDepth;
      const int count = clamped(numbers - d, kLanes * C::kDepth);
      decltype(C::along(source, 0)) v[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        // Rows of a weight are far apart: the hardware sees no stream in them.
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

// Rows of a block that one micro-kernel takes, `most` or fewer: as even as can be.
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
        store_units(
            result + r * kOperandPitch + u,
            C::along(source + r * a.row_stride + u * C::kDepth, clamped(left, kLanes * C::kDepth)));
      }
    }
    return;
  }
  for (int u = 0; u < units; ++u) {
    const int64_t at = u * C::kDepth;
    for (int r = 0; r < rows; r += kLanes) {
      store_units(
          result + u * kAcrossPitch + r,
          C::across(source + at * a.column_stride + r, rows - r, a.column_stride, numbers - at));
    }
  }
}

// -- few rows -------------------------------------------------------------------------------------
// With so many rows packing a weight costs more than it saves; its rows are read as they lie.
constexpr int kDotRows = 2;

// sums[row][kSumPitch] (+)= units [first_unit, first_unit + units) of a panel whose columns are
// contiguous in depth, times the left operand's rows.
template <class T>
void dot_panel(const Product& p, int64_t panel, int64_t first_unit, int units,
               const typename UnitsOf<T>::Unit* left, int rows, float* sums, bool add) {
  using C = UnitsOf<T>;
  const int64_t first = first_unit * C::kDepth, column = p.b.column_stride;
  const int64_t numbers = p.b.rows - first;
  for (int side = 0; side < 2; ++side, sums += kLanes) {
    const Half half = half_of(p, panel, side);
    const T* source = static_cast<const T*>(p.b.data) + half.first * column + first;
    for (int r = 0; r < rows; ++r) {
      Float c[kLanes] = {};
      for (int u = 0; u < units; u += kLanes) {
        const auto a = load_bits<decltype(C::along(source, 0))>(left + r * kOperandPitch + u);
        const int64_t d = u * C::kDepth;
        const int count = clamped(numbers - d, kLanes * C::kDepth);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          c[i] =
              C::products(a, C::along(source + i * column + d, i < half.count ? count : 0), c[i]);
        }
      }
      float columns[kLanes * kLanes];
      store_transposed(c, columns, kLanes);
      float* sum = sums + r * kSumPitch;
      Float total = add ? load(sum) : Float{};
      for (int i = 0; i < kLanes; ++i) {
        total += load(columns + i * kLanes);
      }
      store(sum, total);
    }
  }
}

// -- a block --------------------------------------------------------------------------------------
// Inlined by force, as is what calls it: GCC 12 drops calls of a function without effects.
template <class T>
inline __attribute__((always_inline)) void ask_for(const T* numbers, int64_t count) {
  constexpr int kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) {
    __builtin_prefetch(numbers + i, 0, 2);
  }
}

// The share of those rows' units, from first_unit on, as far as they are there.
template <class T>
inline __attribute__((always_inline)) void ask_for_left(const Matrix& a, int64_t first_row,
                                                        int rows, int64_t first_unit, int64_t units,
                                                        int64_t share, int64_t shares) {
  const int64_t first = first_unit * UnitsOf<T>::kDepth;
  const int numbers = clamped(a.columns - first, static_cast<int>(units * UnitsOf<T>::kDepth));
  const T* data =
      static_cast<const T*>(a.data) + first_row * a.row_stride + first * a.column_stride;
  const bool by_rows = a.column_stride == 1;
  const int64_t lines = by_rows ? rows : numbers, stride = by_rows ? a.row_stride : a.column_stride;
  for (int64_t i = lines * share / shares; i < lines * (share + 1) / shares; ++i) {
    ask_for(data + i * stride, by_rows ? numbers : rows);
  }
}

// The share of what a block's sums are joined with.
template <class T>
inline __attribute__((always_inline)) void ask_for_finish(const Product& p, int64_t first_row,
                                                          int rows, int64_t first_panel,
                                                          int64_t last_panel, int64_t share,
                                                          int64_t shares) {
  if (p.finish.kind != Finish::kDifferentiate) {
    return;
  }
  const int64_t first = first_panel * kPanel, wide = p.gate > 0 ? 2 * p.gate : p.b.columns;
  const int columns =
      clamped(p.b.columns - first, static_cast<int>((last_panel - first_panel) * kPanel));
  for (int64_t r = rows * share / shares; r < rows * (share + 1) / shares; ++r) {
    const T* hidden = static_cast<const T*>(p.finish.hidden) + (first_row + r) * wide + first;
    ask_for(hidden, columns);
    if (p.gate > 0) {
      ask_for(hidden + p.gate, columns);
    }
  }
}

// Of a worker's memory.
constexpr int64_t kSumsAt = kOperandFloats, kPanelAt = kSumsAt + kBlockRows * kSumPitch;

// The sums [row][kSumPitch] of rows [first_row, first_row + rows), panels [first_panel,
// last_panel).
template <class T>
void multiply_block(const Product& p, int64_t first_row, int rows, int64_t first_panel,
                    int64_t last_panel, float* worker) {
  using C = UnitsOf<T>;
  using Unit = typename C::Unit;
  constexpr auto kAnyRows = std::make_integer_sequence<int, kRows>{};
  const int64_t units = ceil_div(p.a.columns, C::kDepth);
  const bool by_rows = p.a.column_stride == 1;
  const bool dot = !p.packed && by_rows && rows <= kDotRows && p.b.column_stride != 1;
  const int step = strip_rows(rows, kRows);
  const auto* packed = reinterpret_cast<const Unit*>(p.packed);
  Unit* left = reinterpret_cast<Unit*>(worker);
  Unit* own = reinterpret_cast<Unit*>(worker + kPanelAt);
  float* sums = worker + kSumsAt;
  if (units == 0) {
    for (int r = 0; r < rows; ++r) {
      memset(sums + r * kSumPitch, 0, sizeof(float) * kPanel * (last_panel - first_panel));
    }
    return;
  }
  // Pieces of the depth, as even as whole vectors allow.
  const int64_t even = ceil_div(units, ceil_div(units, kBlockDepth));
  const int64_t piece = ceil_div(even, kMaxLanes) * kMaxLanes;
  for (int64_t first_unit = 0; first_unit < units; first_unit += piece) {
    const int depth = clamped(units - first_unit, static_cast<int>(piece));
    const int64_t after = first_unit + depth;
    pack_left<T>(p.a, first_row, rows, first_unit, depth, left);
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      float* panel_sums = sums + (panel - first_panel) * kPanel;
      if (dot) {
        dot_panel<T>(p, panel, first_unit, depth, left, rows, panel_sums, first_unit > 0);
        continue;
      }
      // While this panel is multiplied, its share of what comes after this piece is asked for.
      const int64_t share = panel - first_panel, shares = last_panel - first_panel;
      if (after < units) {
        ask_for_left<T>(p.a, first_row, rows, after, piece, share, shares);
      } else {
        ask_for_finish<T>(p, first_row, rows, first_panel, last_panel, share, shares);
      }
      const Unit* right = packed ? packed + (panel * units + first_unit) * kPanel : own;
      Ahead ahead = {reinterpret_cast<const uint32_t*>(right), 0};
      if (!packed) {
        pack_panel<T>(p, panel, first_unit, depth, own);
      } else if (panel + 1 < last_panel) {  // the next panel's piece
        ahead = {ahead.at + units * kPanel, ceil_div(kPanel * step, rows)};
      }
      for (int r = 0; r < rows; r += step) {
        const int height = step < rows - r ? step : rows - r;
        const auto kernel = by_rows ? micro_kernel_of<C, kOperandPitch, 1>(height, kAnyRows)
                                    : micro_kernel_of<C, 1, kAcrossPitch>(height, kAnyRows);
        const Unit* strip = left + r * (by_rows ? kOperandPitch : 1);
        kernel(strip, right, depth, panel_sums + r * kSumPitch, first_unit > 0, ahead);
        ahead.at += depth * ahead.step;
      }
    }
  }
}

}  // namespace fastattn::ffn::FASTATTN_ISA
