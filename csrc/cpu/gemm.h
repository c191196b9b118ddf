// Building blocks of the matrix products of all CPU kernels: the units of their operands, the
// micro-kernel, and the transposition of blocks. Ops divide matrices into blocks and pack them.
//
//   C [rows, columns] (+)= A [rows, depth] B [depth, columns]          C is fp32
//
// A and B consist of 32-bit units: one float (Floats; other dtypes are converted), or two bf16 of
// adjacent depth (Pairs, with AVX512-BF16). The micro-kernel keeps rows x vectors of sums in
// registers. It broadcasts A's units one by one, so a transposed A costs no more; B's rows are
// contiguous.
#pragma once

#include <type_traits>

#include "cpu/simd.h"

namespace fastattn::FASTATTN_ISA {

// -- units ----------------------------------------------------------------------------------------
struct Floats {
  using Unit = float;
  using Vector = Float;
  static constexpr int kDepth = 1;  // elements in a unit

  // c plus a unit times each unit of a vector; c plus the product of two vectors unit by unit.
  static Float product(const Unit* a, const Unit* b, Float c) { return fma(splat(*a), load(b), c); }
  static Float products(Vector a, Vector b, Float c) { return fma(a, b, c); }
  // Loads `n` elements along the depth as units, zero-padded.
  template <class T>
  static Vector along(const T* p, int n) {
    return n >= kLanes ? load(p) : load(p, n);
  }
  // Loads a unit of each of `n` adjacent rows or columns. A unit's elements are `step` apart;
  // `depth` elements are left.
  template <class T>
  static Vector across(const T* p, int n, int64_t, int64_t) {
    return along(p, n);
  }
  // Stores two vectors of sums as elements of T.
  template <class T>
  static void store_sums(T* p, Float low, Float high) {
    store(p, low);
    store(p + kLanes, high);
  }
};

#if defined(__AVX512BF16__)
struct Pairs {
  using Unit = uint32_t;
  using Vector = Word;
  static constexpr int kDepth = 2;

  static Float product(const Unit* a, const Unit* b, Float c) {
    return products(splat_word(*a), load_bits<Vector>(b), c);
  }
  static Float products(Vector a, Vector b, Float c) {
    return _mm512_dpbf16_ps(c, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b));
  }
  static Vector along(const BFloat16* p, int n) { return load_pairs(p, n); }
  static Vector across(const BFloat16* p, int n, int64_t step, int64_t depth) {
    constexpr __mmask16 kAll = 0xFFFF;  // GCC 12's own conversion takes several instructions
    const auto wide = [&](const BFloat16* q) {
      const Short v = n >= kLanes ? load_bits<Short>(q) : load_bits<Short>(q, n);
      return bit_cast<Vector>(_mm512_maskz_cvtepu16_epi32(kAll, bit_cast<__m256i>(v)));
    };
    return depth > 1 ? wide(p) | (wide(p + step) << 16) : wide(p);
  }
  // This instruction treats denormals as 0; `product` produces none.
  static void store_sums(BFloat16* p, Float low, Float high) {
    store_bits(p, _mm512_cvtne2ps_pbh(high, low));
  }
};

// The units of products of this dtype.
template <class T>
using UnitsOf = std::conditional_t<std::is_same_v<T, BFloat16>, Pairs, Floats>;
#else
template <class T>
using UnitsOf = Floats;
#endif

// -- micro-kernel ---------------------------------------------------------------------------------
// sums += kR rows of A times kV vectors of B, `depth` units deep. Strides count units and are
// integers or integral constants. B's vectors lie in adjacent pairs, which are next_two apart.
// each_step() is called once for each unit of the depth.
template <class C, int kR, int kV, class ARow, class ADepth, class NextTwo, class BDepth,
          class EachStep>
inline __attribute__((always_inline)) void multiply_add(Float (&sums)[kR][kV],
                                                        const typename C::Unit* a, ARow a_row,
                                                        ADepth a_depth, const typename C::Unit* b,
                                                        NextTwo next_two, BDepth b_depth,
                                                        int64_t depth, const EachStep& each_step) {
  for (int64_t d = 0; d < depth; ++d) {
    each_step();
#pragma GCC unroll 12
    for (int i = 0; i < kR; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) {
        sums[i][v] = C::product(a + i * a_row, b + v / 2 * next_two + v % 2 * kLanes, sums[i][v]);
      }
    }
    a += a_depth;
    b += b_depth;
  }
}

// Calls run(n as an integral constant) for n in [1, kMax]; kMax is the common case.
template <int kMax, class Run>
inline __attribute__((always_inline)) void with_count(int n, const Run& run) {
  if constexpr (kMax > 1) {
    if (n < kMax) {
      return with_count<kMax - 1>(n, run);
    }
  }
  run(std::integral_constant<int, kMax>{});
}

// -- transposition --------------------------------------------------------------------------------
// Stores kLanes vectors of units as the columns of kLanes rows, which are `pitch` apart.
template <class Vector, class Unit>
inline void store_transposed(const Vector (&v)[kLanes], Unit* result, int64_t pitch) {
#if defined(__AVX512F__)
  // GCC 12 warns about the forms without a mask.
  constexpr __mmask16 kAll = 0xFFFF;
  constexpr __mmask8 kAllPairs = 0xFF;
  __m512i r[16], t[16];
  // Vectors 1, 2, 4 and 8 apart exchange halves.
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
  // Quarter x of r[4 a + b] holds unit 4 x + b of vectors 4 a .. 4 a + 3.
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    const __m512i low = _mm512_maskz_shuffle_i32x4(kAll, r[b], r[4 + b], 0x44);
    const __m512i high = _mm512_maskz_shuffle_i32x4(kAll, r[b], r[4 + b], 0xEE);
    const __m512i low2 = _mm512_maskz_shuffle_i32x4(kAll, r[8 + b], r[12 + b], 0x44);
    const __m512i high2 = _mm512_maskz_shuffle_i32x4(kAll, r[8 + b], r[12 + b], 0xEE);
    const auto put = [&](int row, __m512i v) { _mm512_storeu_si512(result + row * pitch, v); };
    put(b, _mm512_maskz_shuffle_i32x4(kAll, low, low2, 0x88));
    put(4 + b, _mm512_maskz_shuffle_i32x4(kAll, low, low2, 0xDD));
    put(8 + b, _mm512_maskz_shuffle_i32x4(kAll, high, high2, 0x88));
    put(12 + b, _mm512_maskz_shuffle_i32x4(kAll, high, high2, 0xDD));
  }
#elif defined(__AVX2__)
  __m256d r[8];
  __m256 t[8];
  // Vectors 1, 2 and 4 apart exchange halves.
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    const __m256 even = bit_cast<__m256>(v[i]), odd = bit_cast<__m256>(v[i + 1]);
    t[i] = _mm256_unpacklo_ps(even, odd);
    t[i + 1] = _mm256_unpackhi_ps(even, odd);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const auto pairs = [&](int j) { return bit_cast<__m256d>(t[i + j]); };
    r[i] = _mm256_unpacklo_pd(pairs(0), pairs(2));
    r[i + 1] = _mm256_unpackhi_pd(pairs(0), pairs(2));
    r[i + 2] = _mm256_unpacklo_pd(pairs(1), pairs(3));
    r[i + 3] = _mm256_unpackhi_pd(pairs(1), pairs(3));
  }
  // Half x of r[4 a + b] holds unit 4 x + b of vectors 4 a .. 4 a + 3.
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    store_bits(result + b * pitch, bit_cast<Vector>(_mm256_permute2f128_pd(r[b], r[4 + b], 0x20)));
    store_bits(result + (4 + b) * pitch,
               bit_cast<Vector>(_mm256_permute2f128_pd(r[b], r[4 + b], 0x31)));
  }
#else
  for (int i = 0; i < kLanes; ++i) {
    Vector column{};
    for (int j = 0; j < kLanes; ++j) {
      column[j] = v[j][i];
    }
    store_bits(result + i * pitch, column);
  }
#endif
}

}  // namespace fastattn::FASTATTN_ISA
