// e^x, 2^x and tanh on vectors.
#pragma once

#include "cpu/simd.h"

namespace fastattn::FASTATTN_ISA {

// e^x with an absolute error of 1e-7 for x <= 0 and the same relative error for small x, as a
// cumulative distribution function needs. x is clamped far inside the tails where that function is
// constant, so that products of the result are not denormal.
inline Float exponential(Float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kBound = 80.0f;
  // Polynomial of least relative error (9e-8) for 2^f on [-0.5, 0.5] with constant term 1.
  constexpr float kC1 = 0.693147004f, kC2 = 0.240222424f, kC3 = 0.0555073358f, kC4 = 0.00967151299f,
                  kC5 = 0.00132647261f;
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xFFFF;                 // GCC 12 warns about the forms without a mask
  x = _mm512_maskz_max_ps(kAll, splat(-kBound), x);  // returns a NaN in x
  x = _mm512_maskz_min_ps(kAll, splat(kBound), x);
  const Float t = x * kLog2E;
  const Float whole =
      _mm512_maskz_roundscale_ps(kAll, t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer
  x = x < -kBound ? splat(-kBound) : x;
  x = x > kBound ? splat(kBound) : x;
  const Float t = x * kLog2E;
  const Float whole = (t + kRound) - kRound;
#endif
  const Float f = t - whole;
  Float p = fma(f, splat(kC5), splat(kC4));
  p = fma(p, f, splat(kC3));
  p = fma(p, f, splat(kC2));
  p = fma(p, f, splat(kC1));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(kAll, p, whole);
#else
  const Mask exponent = __builtin_convertvector(whole == whole ? whole : Float{}, Mask);
  return p * bit_cast<Float>((exponent + 127) << 23);
#endif
}

// 2^t for exponents not much above 0, within 2.5 ulp; exactly 1 for exponent 0, 0 for -inf, NaN for
// NaN.
constexpr float kLn2 = 0.693147181f;
#if defined(__AVX512F__)
inline Float power(Float t) {
  // Polynomial of least relative error (7.4e-8, 1.6e-7 with rounding) for 2^f on [0, 1] with
  // constant term 1.
  constexpr float kC1 = 0.693151057f, kC2 = 0.240166605f, kC3 = 0.0557944849f, kC4 = 0.00902269781f,
                  kC5 = 0.00186503376f;
  constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  constexpr __mmask16 kAll = 0xFFFF;  // GCC 12 warns about the forms without a mask
  const Float f = _mm512_maskz_reduce_ps(kAll, t, kFloor);  // 0 at -inf
  Float p = fma(splat(kC5), f, splat(kC4));
  p = fma(p, f, splat(kC3));
  p = fma(p, f, splat(kC2));
  p = fma(p, f, splat(kC1));
  p = fma(p, f, splat(1.0f));
  return _mm512_maskz_scalef_ps(kAll, p, t);  // times 2^floor(t)
}
#else
inline Float power(Float t) {
  // Polynomial of least relative error for 2^f on [-0.5, 0.5] (7.5e-8; constant then set to 1).
  constexpr float kC1 = 0.693146944f, kC2 = 0.240221202f, kC3 = 0.0555071309f, kC4 = 0.00967554096f,
                  kC5 = 0.00132764725f;
  constexpr float kSmallest = -126.0f, kLargest = 127.0f;  // exponents of normal numbers
  constexpr float kRound = 0x1.8p23f;                      // adding it rounds to an integer
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

// tanh(2 y) with a relative error of 4e-7, also near 0; NaN for NaN.
inline Float tanh_of_twice(Float y) {
  // tanh(y) = p / q, of least relative error in the result, 2 p q / (p^2 + q^2) (1.4e-8). It is 1
  // from the bound on.
  constexpr float kBound = 4.5f;
  constexpr float kP1 = 0.999999987f, kP3 = 0.113405371f, kP5 = 0.00122748550f,
                  kP7 = -4.42307632e-6f;
  constexpr float kQ2 = 0.44673835f, kQ4 = 0.01680817f;
  y = smaller_of(splat(kBound), larger_of(splat(-kBound), y));  // these return a NaN in y
  const Float u = y * y;
  Float p = fma(u, splat(kP7), splat(kP5));
  p = fma(p, u, splat(kP3));
  p = fma(p, u, splat(kP1)) * y;
  const Float q = fma(fma(u, splat(kQ4), splat(kQ2)), u, splat(1.0f));
  return p * (q + q) / fma(q, q, p * p);
}

}  // namespace fastattn::FASTATTN_ISA
