// Small matrix products for the CPU kernels of attention: one register micro-kernel, the packed
// forms of its operands, and the exponential.
//
//   C[rows, columns] (+)= A[rows, depth] B[depth, columns]          C is fp32
//
// A and B consist of 32-bit units: a float (Floats), or two bf16 of neighbouring depth (Pairs,
// where there is an instruction for their products). The micro-kernel keeps kRows x kVectors
// vectors of sums in registers; A's units are broadcast one by one, so A may be read transposed for
// free, B's rows are contiguous. Forms of a matrix X [positions, dim]:
//
//   rows     [positions][dim]        A, summed over dim
//   columns  [dim][kTileKeys]        B, summed over dim
//   pairs    [positions][dim]        B, summed over positions (for Floats the same as rows); read
//                                    with swapped strides it is A transposed
#pragma once

#include "attention/cpu/problem.h"
#include "cpu/simd.h"

namespace fastattn::attention::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

// -- vector functions ----------------------------------------------------------------------------
inline float largest(Float v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) {
    result = v[i] > result ? v[i] : result;
  }
  return result;
#endif
}

// The larger and the smaller, lane by lane. NaN in either stays NaN in b only.
inline Float larger_of(Float a, Float b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline Float smaller_of(Float a, Float b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xFFFF, a, b);  // GCC 12 warns about the form without a mask
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// 2^(t - kPowerShift) for exponents not much above 0, within 2 units in the last place; exactly 1
// at 0, 0 at -inf, NaN for NaN. The shift saves AVX-512 an instruction: its remainder is that of
// the floor.
constexpr float kLn2 = 0.693147181f;
#if defined(__AVX512F__)
constexpr float kPowerShift = 0.5f;

inline Float power(Float t) {
  // 2^(f - 0.5) on [0, 1) by least relative error (1.5e-7), fitted to be 1 at 0.5.
  constexpr float kC0 = 0.70710671f, kC1 = 0.490133256f, kC2 = 0.169814244f, kC3 = 0.039475169f,
                  kC4 = 0.00635642326f, kC5 = 0.00132764725f;
  constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  const Float f = _mm512_maskz_reduce_ps(kAll, t, kFloor);  // 0 at -inf
  Float p = fma(splat(kC5), f, splat(kC4));
  p = fma(p, f, splat(kC3));
  p = fma(p, f, splat(kC2));
  p = fma(p, f, splat(kC1));
  p = fma(p, f, splat(kC0));
  return _mm512_maskz_scalef_ps(kAll, p, t);  // times 2^floor(t)
}
#else
constexpr float kPowerShift = 0.0f;

inline Float power(Float t) {
  // 2^f on [-0.5, 0.5] by least relative error (7.5e-8, then the constant term set to 1).
  constexpr float kC1 = 0.693146944f, kC2 = 0.240221202f, kC3 = 0.0555071309f, kC4 = 0.00967554096f,
                  kC5 = 0.00132764725f;
  constexpr float kSmallest = -126.0f, kLargest = 127.0f;  // exponents of normal numbers
  constexpr float kRound = 0x1.8p23f;                      // a sum with it has no fraction
  Float bounded = t < kSmallest ? splat(kSmallest) : t;
  bounded = bounded > kLargest ? splat(kLargest) : bounded;
  const Float whole = (bounded + kRound) - kRound;
  const Float f = bounded - whole;
  Float p = fma(splat(kC5), f, splat(kC4));
  p = fma(p, f, splat(kC3));
  p = fma(p, f, splat(kC2));
  p = fma(p, f, splat(kC1));
  p = fma(p, f, splat(1.0f));
  const Mask exponent = __builtin_convertvector(whole == whole ? whole : Float{}, Mask);
  const Float scale = bit_cast<Float>((exponent + 127) << 23);
  return t < kSmallest ? Float{} : p * scale;
}
#endif

// The sums of four vectors.
inline void store_sums(float* result, Float a, Float b, Float c, Float d) {
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  const auto joined = [](Float x, Float y) {
    return _mm512_maskz_unpacklo_ps(kAll, x, y) + _mm512_maskz_unpackhi_ps(kAll, x, y);
  };
  const auto quarter = [](Float v, auto i) {
    return _mm512_maskz_extractf32x4_ps(0xF, v, decltype(i)::value);
  };
  // In each quarter: a c a c and b d b d, then a b c d.
  const Float sums = joined(joined(a, c), joined(b, d));
  const __m128 low = quarter(sums, std::integral_constant<int, 0>{}) +
                     quarter(sums, std::integral_constant<int, 1>{});
  const __m128 high = quarter(sums, std::integral_constant<int, 2>{}) +
                      quarter(sums, std::integral_constant<int, 3>{});
  _mm_storeu_ps(result, low + high);
#else
  result[0] = sum(a);
  result[1] = sum(b);
  result[2] = sum(c);
  result[3] = sum(d);
#endif
}

inline bool holds_nan(Float v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0;
#else
  return sum(v) != sum(v);
#endif
}

inline Mask lane_numbers() {
  Mask lane;
  for (int i = 0; i < kLanes; ++i) {
    lane[i] = i;
  }
  return lane;
}

// -- units ---------------------------------------------------------------------------------------
struct Floats {
  using Unit = float;
  static constexpr int kDepth = 1;  // numbers in a unit

  static Float product(const Unit* a, const Unit* b, int vector, Float c) {
    return fma(splat(*a), load(b + vector * kLanes), c);
  }
  // One vector of a row-major matrix of numbers.
  static void store_numbers(float* p, Float v) { store(p, v); }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Unit = uint32_t;
  static constexpr int kDepth = 2;

  static Float product(const Unit* a, const Unit* b, int vector, Float c) {
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(*a));
    const __m512i row = _mm512_loadu_si512(b + vector * kLanes);
    return _mm512_dpbf16_ps(c, bit_cast<__m512bh>(factor), bit_cast<__m512bh>(row));
  }
};

inline Short rounded_to_bf16(Float v) {
  return bit_cast<Short>(_mm512_cvtneps_pbh(v));
}
// Two rows of numbers, one behind the other.
using TwoRows = uint16_t __attribute__((vector_size(4 * kLanes)));

inline TwoRows rounded_to_bf16(Float first, Float second) {
  return bit_cast<TwoRows>(_mm512_cvtne2ps_pbh(second, first));
}
inline TwoRows two_rows(Short first, Short second) {
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  return bit_cast<TwoRows>(_mm512_maskz_inserti32x8(
      kAll, _mm512_castsi256_si512(bit_cast<__m256i>(first)), bit_cast<__m256i>(second), 1));
}
inline void store_halves(uint16_t* first, uint16_t* second, TwoRows rows) {
  constexpr __mmask8 kAll = 0xFF;
  const __m512i both = bit_cast<__m512i>(rows);
  store_bits(first, _mm512_castsi512_si256(both));
  store_bits(second, _mm512_maskz_extracti32x8_epi32(kAll, both, 1));
}
// The units of two rows: the first in the low half.
inline Word joined(TwoRows rows) {
  constexpr TwoRows kColumns = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  constexpr __mmask32 kAll = ~__mmask32{0};
  return bit_cast<Word>(
      _mm512_maskz_permutexvar_epi16(kAll, bit_cast<__m512i>(kColumns), bit_cast<__m512i>(rows)));
}
#endif

// -- micro-kernel --------------------------------------------------------------------------------
// 32 vector registers hold 6 x 4 sums and a row of B; 16 hold 6 x 2.
constexpr int kRows = 6;
#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

template <class C, int kR, int kV>
void micro_kernel(const typename C::Unit* A, int64_t a_row, int64_t a_depth,
                  const typename C::Unit* B, int64_t b_depth, int64_t depth, float* sums,
                  int64_t stride, bool add) {
  Float c[kR][kV];
#pragma GCC unroll 8
  for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kV; ++j) {
      c[i][j] = add ? load(sums + i * stride + j * kLanes) : Float{};
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 8
    for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kV; ++j) {
        c[i][j] = C::product(A + i * a_row, B, j, c[i][j]);
      }
    }
    A += a_depth;
    B += b_depth;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kV; ++j) {
      store(sums + i * stride + j * kLanes, c[i][j]);
    }
  }
}

template <class C>
struct MicroKernels {
  using Function = void (*)(const typename C::Unit*, int64_t, int64_t, const typename C::Unit*,
                            int64_t, int64_t, float*, int64_t, bool);
  template <int kV>
  static Function of_rows(int rows) {
    static_assert(kRows == 6);
    constexpr Function table[kRows] = {micro_kernel<C, 1, kV>, micro_kernel<C, 2, kV>,
                                       micro_kernel<C, 3, kV>, micro_kernel<C, 4, kV>,
                                       micro_kernel<C, 5, kV>, micro_kernel<C, 6, kV>};
    return table[rows - 1];
  }
  static Function of(int rows, int vectors) {
    switch (vectors) {
      case 1:
        return of_rows<1>(rows);
      case 2:
        return of_rows<2>(rows);
#if defined(__AVX512F__)
      case 3:
        return of_rows<3>(rows);
      case 4:
        return of_rows<4>(rows);
#endif
    }
    return nullptr;
  }
};

// Strides and depth count units; columns are whole vectors.
template <class C>
void multiply(int rows, int columns, int64_t depth, const typename C::Unit* A, int64_t a_row,
              int64_t a_depth, const typename C::Unit* B, int64_t b_depth, float* sums,
              int64_t stride, bool add) {
  for (int c = 0; c < columns; c += kVectors * kLanes) {
    const int left = (columns - c) / kLanes;
    const int vectors = left < kVectors ? left : kVectors;
    const auto whole = MicroKernels<C>::of(kRows, vectors);
    int i = 0;
    for (; i + kRows <= rows; i += kRows) {
      whole(A + i * a_row, a_row, a_depth, B + c, b_depth, depth, sums + i * stride + c, stride,
            add);
    }
    if (i < rows) {
      MicroKernels<C>::of(rows - i, vectors)(A + i * a_row, a_row, a_depth, B + c, b_depth, depth,
                                             sums + i * stride + c, stride, add);
    }
  }
}

// -- packing -------------------------------------------------------------------------------------
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

// One position to `width` floats, zeros behind dim. False if a number is infinite or NaN.
template <class T>
inline bool pack_row(const T* source, int dim, int64_t width, float* result) {
  Float check = {};
  int64_t c = 0;
  for_vectors(dim, [&](auto lanes, int64_t d) {
    const Float v = lanes.load(source + d);
    store(result + d, v);
    check = fma(v, Float{}, check);
    c = d + kLanes;
  });
  for (; c < width; c += kLanes) {
    store(result + c, Float{});
  }
  return !holds_nan(check);
}

#if defined(__AVX512BF16__)
constexpr uint16_t kBf16Exponent = 0x7F80;  // all of its bits: infinite or NaN

// The same as units of bf16, which only bf16 data come in.
template <class T>
inline bool pack_row(const T* source, int dim, int64_t width, uint32_t* result) {
  uint16_t* row = reinterpret_cast<uint16_t*>(result);
  const __m512i exponent = _mm512_set1_epi16(kBf16Exponent);
  __mmask32 found = 0;
  for (int64_t c = 0; c < width; c += 2 * kLanes) {
    const int64_t left = dim - c < 0 ? 0 : dim - c;
    const __mmask32 in = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    const __mmask32 out = width - c >= 32 ? ~__mmask32{0} : (__mmask32{1} << (width - c)) - 1;
    const __m512i v = _mm512_maskz_loadu_epi16(in, source + c);
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
    _mm512_mask_storeu_epi16(row + c, out, v);
  }
  return found == 0;
}
#endif

// A matrix in the rows form, packed or where it lies.
template <class C>
struct Operand {
  const typename C::Unit* data;
  int64_t stride;

  const typename C::Unit* row(int64_t i) const { return data + i * stride; }
};

// The positions of a tensor from an offset on as an operand, if they consist of units already; null
// data otherwise. `block`: what the units of a position must be a multiple of.
template <class C>
inline Operand<C> in_place(DType type, const TensorView& x, int64_t offset, int dim, int block) {
  if (type != (C::kDepth == 1 ? DType::kFloat32 : DType::kBFloat16)) {
    return {nullptr, 0};
  }
  constexpr int kBytes = sizeof(typename C::Unit) / C::kDepth;
  const char* data = static_cast<const char*>(x.data) + kBytes * offset;
  if (dim % (C::kDepth * block) || x.row_stride % C::kDepth ||
      reinterpret_cast<uintptr_t>(data) % sizeof(typename C::Unit)) {
    return {nullptr, 0};
  }
  return {reinterpret_cast<const typename C::Unit*>(data), x.row_stride / C::kDepth};
}

// Whether no number of these rows is infinite or NaN; units of whole vectors.
inline bool all_finite(const Operand<Floats>& rows, int count, int dim) {
  Float check = {};
  for (int i = 0; i < count; ++i) {
    for (int d = 0; d < dim; d += kLanes) {
      check = fma(load(rows.row(i) + d), Float{}, check);
    }
  }
  return !holds_nan(check);
}
#if defined(__AVX512BF16__)
inline bool all_finite(const Operand<Pairs>& rows, int count, int dim) {
  const __m512i exponent = _mm512_set1_epi16(kBf16Exponent);
  __mmask32 found = 0;
  for (int i = 0; i < count; ++i) {
    for (int d = 0; d < dim / Pairs::kDepth; d += kLanes) {
      const __m512i v = _mm512_loadu_si512(rows.row(i) + d);
      found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
    }
  }
  return found == 0;
}
#endif

// X's positions [0, count) in the rows form; positions in [count, upto) and those for which
// dead(i, finite) are 0.
template <class C, class Dead>
void pack_rows(DType type, const void* data, int64_t offset, int64_t stride, int count, int upto,
               int dim, typename C::Unit* result, const Dead& dead) {
  const int64_t width = padded(dim), units = width / C::kDepth;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    const T* source = static_cast<const T*>(data) + offset;
    for (int i = 0; i < upto; ++i) {
      typename C::Unit* row = result + i * units;
      bool finite = true;
      const bool inside = i < count && !dead.before(i);
      if (inside) {
        finite = pack_row(source + i * stride, dim, width, row);
      }
      if (!inside || (!finite && dead.after(i))) {
        memset(row, 0, units * sizeof(*row));
      }
    }
  });
}

// Positions known to be dead before they are read, none found out afterwards.
template <class Before>
struct DeadBefore {
  Before known;
  bool before(int i) const { return known(i); }
  bool after(int) const { return false; }
};
template <class Before>
DeadBefore<Before> dead_if(Before known) {
  return {known};
}

// 16 x 16 units.
#if defined(__AVX512F__)
inline void transpose_block(const void* source, int64_t source_stride, void* result,
                            int64_t result_stride) {
  const auto* from = static_cast<const uint32_t*>(source);
  auto* to = static_cast<uint32_t*>(result);
  // GCC 12 warns about the forms without a mask.
  constexpr __mmask16 kAll = 0xFFFF;
  constexpr __mmask8 kAllPairs = 0xFF;
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = _mm512_loadu_si512(from + i * source_stride);
  }
  // Neighbouring rows, then pairs, fours and eights of rows change halves.
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_maskz_unpacklo_epi32(kAll, r[i], r[i + 1]);
    t[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_maskz_unpacklo_epi64(kAllPairs, t[i], t[i + 2]);
    r[i + 1] = _mm512_maskz_unpackhi_epi64(kAllPairs, t[i], t[i + 2]);
    r[i + 2] = _mm512_maskz_unpacklo_epi64(kAllPairs, t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_maskz_unpackhi_epi64(kAllPairs, t[i + 1], t[i + 3]);
  }
  // r[4 a + b]: column 4 x + b of rows 4 a .. 4 a + 3 in its quarter x.
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    const __m512i low = _mm512_maskz_shuffle_i32x4(kAll, r[b], r[4 + b], 0x44);
    const __m512i high = _mm512_maskz_shuffle_i32x4(kAll, r[b], r[4 + b], 0xEE);
    const __m512i low2 = _mm512_maskz_shuffle_i32x4(kAll, r[8 + b], r[12 + b], 0x44);
    const __m512i high2 = _mm512_maskz_shuffle_i32x4(kAll, r[8 + b], r[12 + b], 0xEE);
    t[b] = _mm512_maskz_shuffle_i32x4(kAll, low, low2, 0x88);
    t[4 + b] = _mm512_maskz_shuffle_i32x4(kAll, low, low2, 0xDD);
    t[8 + b] = _mm512_maskz_shuffle_i32x4(kAll, high, high2, 0x88);
    t[12 + b] = _mm512_maskz_shuffle_i32x4(kAll, high, high2, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    _mm512_storeu_si512(to + i * result_stride, t[i]);
  }
}
#else
inline void transpose_block(const void* source, int64_t source_stride, void* result,
                            int64_t result_stride) {
  const auto* from = static_cast<const uint32_t*>(source);
  auto* to = static_cast<uint32_t*>(result);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      to[j * result_stride + i] = from[i * source_stride + j];
    }
  }
}
#endif

// Rows form of a tile of keys to the columns form; `units` of the dim, `keys` rounded up to 16.
template <class C>
void to_columns(const Operand<C>& rows, int keys, int dim, typename C::Unit* columns) {
  const int64_t width = padded(dim) / C::kDepth;
  const int64_t units = (dim + C::kDepth - 1) / C::kDepth;
  for (int64_t d = 0; d < units; d += 16) {
    if (d + 16 <= width) {
      for (int j = 0; j < keys; j += 16) {
        transpose_block(rows.row(j) + d, rows.stride, columns + d * kTileKeys + j, kTileKeys);
      }
    } else {
      for (int j = 0; j < keys; ++j) {
        for (int64_t u = d; u < units; ++u) {
          columns[u * kTileKeys + j] = rows.row(j)[u];
        }
      }
    }
  }
}

// Rows form to the pairs form; `count` positions, even.
inline void to_pairs(const Operand<Floats>& rows, int count, int dim, float* pairs) {
  for (int i = 0; i < count; ++i) {
    memcpy(pairs + i * padded(dim), rows.row(i), sizeof(float) * padded(dim));
  }
}
#if defined(__AVX512BF16__)
inline void to_pairs(const Operand<Pairs>& rows, int count, int dim, uint32_t* pairs) {
  const int64_t width = padded(dim);
  for (int i = 0; i < count; i += 2) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const auto at = [&](int row) { return load_bits<Short>(rows.row(row) + d / 2); };
      store_bits(pairs + i / 2 * width + d, joined(two_rows(at(i), at(i + 1))));
    }
  }
}
#endif

// Rows of sums to a tensor's rows, times factor(row).
template <class Factor>
inline void store_rows(DType type, void* data, int64_t offset, int64_t stride, int count, int dim,
                       const float* sums, const Factor& factor) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    T* result = static_cast<T*>(data) + offset;
    for (int i = 0; i < count; ++i) {
      const float* row = sums + i * padded(dim);
      const float by = factor(i);
      for_vectors(dim, [&](auto lanes, int64_t d) {
        lanes.store(result + i * stride + d, lanes.load(row + d) * by);
      });
    }
  });
}

}  // namespace fastattn::attention::FASTATTN_ISA
