// The activations and their derivatives on vectors, exact to a few units in the last place of the
// largest value, which is what fp32 sums leave anyhow.
#pragma once

#include <cmath>

#include "common/simd.h"
#include "ffn/ffn.h"

namespace fastattn::FASTATTN_ISA::ffn_kernels {

using ffn::Activation;

struct Value {
  Float f, derivative;
};

// e^x with an absolute error of 1e-7 for x <= 0 and the same relative error for small x, which is
// what a distribution function needs. The bounds, far beyond its flat parts, keep products of the
// result from becoming denormal.
inline Float exponential(Float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kBound = 80.0f;
  // 2^f on [-0.5, 0.5] by least relative error (9e-8) with constant term 1.
  constexpr float kC1 = 0.693147004f, kC2 = 0.240222424f, kC3 = 0.0555073358f, kC4 = 0.00967151299f,
                  kC5 = 0.00132647261f;
#if defined(__AVX512F__)
  constexpr __mmask16 kAll = 0xFFFF;                 // GCC 12 warns about the forms without a mask
  x = _mm512_maskz_max_ps(kAll, splat(-kBound), x);  // NaN in the second operand stays
  x = _mm512_maskz_min_ps(kAll, splat(kBound), x);
  const Float t = x * kLog2E;
  const Float whole =
      _mm512_maskz_roundscale_ps(kAll, t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  constexpr float kRound = 0x1.8p23f;  // a sum with it has no fraction
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

// 1 / x within 2 units in the last place; x and the result must be normal.
inline Float reciprocal(Float x) {
#if defined(__AVX512F__)
  const Float r = _mm512_maskz_rcp14_ps(0xFFFF, x);
  return fma(r, fma(-x, r, splat(1.0f)), r);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-x) and what it lacks to 1.
struct Sigmoid {
  Float share, rest;
};
inline Sigmoid sigmoid(Float x) {
  const Float e = exponential(-x);
  const Float share = reciprocal(1.0f + e);
  return {share, e * share};
}

inline Value relu(Float x) {
  return {x < 0.0f ? Float{} : x, x > 0.0f ? splat(1.0f) : Float{}};  // NaN stays
}

inline Value silu(Float x) {
  const Sigmoid s = sigmoid(x);
  const Float f = x * s.share;
  return {f, fma(f, s.rest, s.share)};
}

// x times the normal distribution function; Abramowitz and Stegun 7.1.26 for the error function,
// whose exponential is the density's.
inline Value gelu(Float x) {
  constexpr float kRootHalf = 0.707106781f, kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
  const Float z = (x < 0.0f ? -x : x) * kRootHalf;
  const Float e = exponential(-z * z);
  const Float t = reciprocal(fma(z, splat(0.3275911f), splat(1.0f)));
  Float q = fma(t, splat(1.061405429f), splat(-1.453152027f));
  q = fma(q, t, splat(1.421413741f));
  q = fma(q, t, splat(-0.284496736f));
  q = fma(q, t, splat(0.254829592f));
  const Float tail = 0.5f * q * t * e;
  const Float share = x < 0.0f ? tail : 1.0f - tail;
  return {x * share, fma(x * kDensity, e, share)};
}

// x (1 + tanh(u)) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Value gelu_tanh(Float x) {
  constexpr float kTwice = 1.59576912f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
  const Float square = x * x;
  const Sigmoid s = sigmoid(kTwice * x * fma(square, splat(kCubic), splat(1.0f)));
  const Float slope = kTwice * fma(square, splat(3 * kCubic), splat(1.0f));
  const Float f = x * s.share;
  return {f, fma(f * s.rest, slope, s.share)};
}

template <Activation kActivation>
inline Value activate(Float x) {
  if constexpr (kActivation == Activation::kRelu) {
    return relu(x);
  } else if constexpr (kActivation == Activation::kGelu) {
    return gelu(x);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    return gelu_tanh(x);
  } else {
    return silu(x);
  }
}

}  // namespace fastattn::FASTATTN_ISA::ffn_kernels
