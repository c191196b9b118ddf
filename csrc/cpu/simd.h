// Vectors of floats, as wide as the instruction set that the including file is compiled for.
// Everything is inside a namespace named after that set, so that code for different sets never
// shares a symbol.
//
//   Float v = load(p);           p: const float*, BFloat16* or Float16*; v is always in float
//   store(p, a * b + c);         rounds to nearest even
//   load(p, n), store(p, v, n)   only the first n lanes; the others of a load are 0
//
// GCC's and Clang's vector extension gives the operators. Intrinsics stand only where it says less
// than the hardware has.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/dtype.h"

#if defined(__AVX512F__)
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
using Byte = uint8_t __attribute__((vector_size(kLanes)));

// -- bits ----------------------------------------------------------------------------------------
template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
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

// a * b + c, rounded once where there is an instruction for it. Other expressions are never
// contracted (a build flag).
inline Float fma(Float a, Float b, Float c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
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

// -- loops ---------------------------------------------------------------------------------------
// How a loop's body touches memory at one position: a whole vector, or its first n lanes.
struct Whole {
  template <class T>
  Float load(const T* p) const {
    return FASTATTN_ISA::load(p);
  }
  template <class T>
  void store(T* p, Float v) const {
    FASTATTN_ISA::store(p, v);
  }
  // v in the lanes that count, 0 in the others.
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
  Float only(Float v) const {
    Mask lane;
    for (int i = 0; i < kLanes; ++i) {
      lane[i] = i;
    }
    return lane < n ? v : Float{};
  }
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
