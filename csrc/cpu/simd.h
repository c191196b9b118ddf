// Vectors of floats, as wide as the instruction set that the including file is compiled for.
// Everything is inside a namespace named after that set, so that code for different sets never
// shares a symbol.
//
//   Float v = load(p);           p: const float*, BFloat16* or Float16*; v is always in float
//   store(p, a * b + c);         rounds to nearest even
//   load(p, n), store(p, v, n)   only the first n lanes; the others of a load are 0
//
// Operators come from GCC's and Clang's vector extension; intrinsics are used only for what it
// cannot express.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtype.h"

#if defined(__AVX512BF16__)
#define FASTATTN_ISA avx512_bf16
#elif defined(__AVX512F__)
#define FASTATTN_ISA avx512
#elif defined(__AVX2__)
#define FASTATTN_ISA avx2
#else
#define FASTATTN_ISA portable
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace fastattn::FASTATTN_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Float = float __attribute__((vector_size(4 * kLanes)));
using Word = uint32_t __attribute__((vector_size(4 * kLanes)));
using Mask = int32_t __attribute__((vector_size(4 * kLanes)));  // all bits of a lane set, or none
using Short = uint16_t __attribute__((vector_size(2 * kLanes)));
using Four = float __attribute__((vector_size(16)));
using Byte = uint8_t __attribute__((vector_size(kLanes)));

// -- bits ----------------------------------------------------------------------------------------
template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline Mask lane_numbers() {
  Mask lane;
  for (int i = 0; i < kLanes; ++i) {
    lane[i] = i;
  }
  return lane;
}

inline Float splat(float x) {
  return x - Float{};
}
inline Word splat_word(uint32_t x) {
  return x - Word{};
}

template <class Vector, class T>
inline Vector load_bits(const T* p) {
  Vector v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <class Vector, class T>
inline Vector load_bits(const T* p, int n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return bit_cast<Vector>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << n) - 1), p));
  } else {
    return bit_cast<Vector>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
  }
#else
  Vector v{};
  memcpy(&v, p, n * sizeof(T));
  return v;
#endif
}

// The first `n` of a vector of pairs of 16-bit elements, 0 beyond.
template <class T>
inline Word load_pairs(const T* p, int n) {
  static_assert(sizeof(T) == 2);
  if (n >= 2 * kLanes) {
    return load_bits<Word>(p);
  }
#if defined(__AVX512F__)
  return bit_cast<Word>(_mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, p));
#else
  return load_bits<Word>(p, n);
#endif
}

template <class Vector, class T>
inline void store_bits(T* p, Vector v) {
  memcpy(p, &v, sizeof(v));
}

template <class Vector, class T>
inline void store_bits(T* p, Vector v, int n) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1), bit_cast<__m512i>(v));
  } else {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), bit_cast<__m256i>(v));
  }
#else
  memcpy(p, &v, n * sizeof(T));
#endif
}

// -- conversions ---------------------------------------------------------------------------------
inline Float widen(Float v, float) {
  return v;
}
inline Float narrow(Float v, float) {
  return v;
}

inline Word widen_bytes(Byte bytes) {
#if defined(__AVX512F__)
  return bit_cast<Word>(_mm512_cvtepu8_epi32(bit_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  return bit_cast<Word>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(bytes))));
#else
  return __builtin_convertvector(bytes, Word);
#endif
}

inline Float widen(Short bits, BFloat16) {
#if defined(__AVX512F__)
  // GCC 12 converts in halves, and warns about the form without a mask.
  return bit_cast<Float>(
      bit_cast<Word>(_mm512_maskz_cvtepu16_epi32(0xFFFF, bit_cast<__m256i>(bits))) << 16);
#elif defined(__AVX2__)
  return bit_cast<Float>(bit_cast<Word>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(bits))) << 16);
#else
  return bit_cast<Float>(__builtin_convertvector(bits, Word) << 16);
#endif
}

inline Short narrow(Float v, BFloat16) {
#if defined(__AVX512BF16__)
  // The instruction takes denormals for 0.
  constexpr int kDenormal = 0x20;
  if (__builtin_expect(_mm512_fpclass_ps_mask(v, kDenormal) == 0, 1)) {
    return bit_cast<Short>(_mm512_cvtneps_pbh(v));
  }
#endif
  const Word bits = bit_cast<Word>(v);
  const Word rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const Word quiet_nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(v == v ? rounded : quiet_nan, Short);
}

#if defined(__F16C__)
inline Float widen(Short bits, Float16) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(bit_cast<__m256i>(bits));
#else
  return _mm256_cvtph_ps(bit_cast<__m128i>(bits));
#endif
}

inline Short narrow(Float v, Float16) {
  constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#if defined(__AVX512F__)
  return bit_cast<Short>(_mm512_cvtps_ph(v, kNearestEven));
#else
  return bit_cast<Short>(_mm256_cvtps_ph(v, kNearestEven));
#endif
}
#else
// float: 8 exponent bits with bias 127 and 23 of mantissa; half: 5 with bias 15 and 10. Exponents
// differ by 112.
inline Float widen(Short half, Float16) {
  const Word bits = __builtin_convertvector(half, Word);
  const Word magnitude = bits & 0x7FFFu;
  // As a float the shifted bits are the value times 2^-112, for denormals too; the product is
  // exact.
  const Float scaled = bit_cast<Float>(magnitude << 13) * 0x1p112f;
  const Word infinite_or_nan = (magnitude << 13) | 0x7F800000u;
  const Word value = magnitude >= 0x7C00u ? infinite_or_nan : bit_cast<Word>(scaled);
  return bit_cast<Float>(value | ((bits & 0x8000u) << 16));
}

inline Short narrow(Float v, Float16) {
  const Word bits = bit_cast<Word>(v);
  const Word magnitude = bits & 0x7FFFFFFFu;
  const Word normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // One unit in the last place of 0.5f is the smallest half: the sum rounds to a multiple of it.
  const Word denormal =
      bit_cast<Word>(bit_cast<Float>(magnitude) + 0.5f) - bit_cast<Word>(splat(0.5f));
  Word half = magnitude < 0x38800000u ? denormal : normal;      // 2^-14, the smallest normal half
  half = magnitude >= 0x47800000u ? splat_word(0x7C00) : half;  // 2^16 and above: infinity
  half = magnitude > 0x7F800000u ? splat_word(0x7E00) : half;   // NaN
  return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), Short);
}
#endif

// Calls visit with a value of the storage type.
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

template <class T>
using Bits = std::conditional_t<sizeof(T) == 4, Float, Short>;

template <class T>
inline Float load(const T* p) {
  return widen(load_bits<Bits<T>>(p), T{});
}
template <class T>
inline Float load(const T* p, int n) {
  return widen(load_bits<Bits<T>>(p, n), T{});
}
template <class T>
inline void store(T* p, Float v) {
  store_bits(p, narrow(v, T{}));
}
template <class T>
inline void store(T* p, Float v, int n) {
  store_bits(p, narrow(v, T{}), n);
}

template <class T>
inline Float rounded(Float v) {
  return widen(narrow(v, T{}), T{});
}

// a * b + c, rounded once where there is an instruction for it. Other expressions are never
// contracted (-ffp-contract=off).
inline Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// Lane-wise maximum and minimum. Where either operand is NaN the result is b.
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

// -- across lanes --------------------------------------------------------------------------------
inline float sum(Float v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#elif defined(__AVX2__)
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

inline float largest(Float v) {
#if defined(__AVX512F__)
  // GCC 12 warns about its own reduction.
  const __m256 eight = _mm256_max_ps(_mm512_maskz_extractf32x8_ps(0xFF, v, 0),
                                     _mm512_maskz_extractf32x8_ps(0xFF, v, 1));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
#else
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) {
    result = v[i] > result ? v[i] : result;
  }
  return result;
#endif
}

inline bool holds_nan(Float v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0;
#else
  return sum(v) != sum(v);
#endif
}

#if defined(__AVX512F__)
// In each quarter of lanes: the sums of that quarter of a, b, c and d.
inline Float sum_in_quarters(Float a, Float b, Float c, Float d) {
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  const auto joined = [](Float x, Float y) {
    return Float(_mm512_maskz_unpacklo_ps(kAll, x, y)) +
           Float(_mm512_maskz_unpackhi_ps(kAll, x, y));
  };
  return joined(joined(a, c), joined(b, d));
}
#endif

// The sums of four vectors.
inline void store_sums(float* result, Float a, Float b, Float c, Float d) {
#if defined(__AVX512F__)
  const Float sums = sum_in_quarters(a, b, c, d);
  const auto quarter = [&](auto i) {
    return _mm512_maskz_extractf32x4_ps(0xF, sums, decltype(i)::value);
  };
  const __m128 low =
      quarter(std::integral_constant<int, 0>{}) + quarter(std::integral_constant<int, 1>{});
  const __m128 high =
      quarter(std::integral_constant<int, 2>{}) + quarter(std::integral_constant<int, 3>{});
  _mm_storeu_ps(result, low + high);
#elif defined(__AVX2__)
  // In the order of `sum`.
  const auto add_halves = [](Float x, Float y) {
    return bit_cast<__m256d>(Float(_mm256_permute2f128_ps(x, y, 0x20)) +
                             Float(_mm256_permute2f128_ps(x, y, 0x31)));
  };
  const __m256d ac = add_halves(a, c), bd = add_halves(b, d);
  const Float pairs =
      bit_cast<Float>(_mm256_unpacklo_pd(ac, bd)) + bit_cast<Float>(_mm256_unpackhi_pd(ac, bd));
  const __m128 ab = _mm256_castps256_ps128(pairs), cd = _mm256_extractf128_ps(pairs, 1);
  _mm_storeu_ps(result, _mm_shuffle_ps(ab, cd, 0x88) + _mm_shuffle_ps(ab, cd, 0xDD));
#else
  result[0] = sum(a);
  result[1] = sum(b);
  result[2] = sum(c);
  result[3] = sum(d);
#endif
}

// The sum of each of kCount vectors, a multiple of 4.
template <int kCount>
inline void store_sums(float* result, const Float (&v)[kCount]) {
  static_assert(kCount % 4 == 0);
#if defined(__AVX512F__)
  static_assert(kCount == 16);
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  const auto add_quarters = [](Float a, Float b) {
    return Float(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88)) +
           Float(_mm512_maskz_shuffle_f32x4(kAll, a, b, 0xDD));
  };
  const auto four = [&](int i) { return sum_in_quarters(v[i], v[i + 1], v[i + 2], v[i + 3]); };
  store(result, add_quarters(add_quarters(four(0), four(4)), add_quarters(four(8), four(12))));
#else
#pragma GCC unroll 4
  for (int i = 0; i < kCount; i += 4) {
    store_sums(result + i, v[i], v[i + 1], v[i + 2], v[i + 3]);
  }
#endif
}

// -- loops ---------------------------------------------------------------------------------------
inline int clamped(int64_t n, int most) {
  return n < 0 ? 0 : n > most ? most : static_cast<int>(n);
}

// How a loop's body accesses memory: a whole vector (Whole), or its first n lanes (Part).
struct Whole {
  template <class T>
  Float load(const T* p) const {
    return FASTATTN_ISA::load(p);
  }
  template <class T>
  void store(T* p, Float v) const {
    FASTATTN_ISA::store(p, v);
  }
  // v in the active lanes, 0 in the others.
  Float only(Float v) const { return v; }
};

struct Part {
  int n;

  template <class T>
  Float load(const T* p) const {
    return FASTATTN_ISA::load(p, n);
  }
  template <class T>
  void store(T* p, Float v) const {
    FASTATTN_ISA::store(p, v, n);
  }
  Float only(Float v) const { return lane_numbers() < n ? v : Float{}; }
};

// Calls body(lanes, column) for each vector of [0, columns).
template <class Body>
inline __attribute__((always_inline)) void for_vectors(int64_t columns, const Body& body) {
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    body(Whole{}, c);
  }
  if (c < columns) {
    body(Part{static_cast<int>(columns - c)}, c);
  }
}

}  // namespace fastattn::FASTATTN_ISA
