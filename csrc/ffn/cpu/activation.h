// The activations and their derivatives on vectors, accurate to a few ulp of the largest value,
// which is also the accuracy of fp32 sums.
#pragma once

#include <cmath>

#include "cpu/exponential.h"
#include "cpu/simd.h"
#include "ffn/ffn.h"

namespace fastattn::ffn::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

struct Value {
  Float f, derivative;
};

// 1 / x within 2 units in the last place; x and the result must be normal.
inline Float reciprocal(Float x) {
#if defined(__AVX512F__)
  const Float r = _mm512_maskz_rcp14_ps(0xFFFF, x);
  return fma(r, fma(-x, r, splat(1.0f)), r);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-x), and 1 minus that.
struct Sigmoid {
  Float share, rest;
};
inline Sigmoid sigmoid(Float x) {
  const Float e = exponential(-x);
  const Float share = reciprocal(1.0f + e);
  return {share, e * share};
}

inline Value relu(Float x) {
  return {x < 0.0f ? Float{} : x, x > 0.0f ? splat(1.0f) : Float{}};  // propagates NaN
}

inline Value silu(Float x) {
  const Sigmoid s = sigmoid(x);
  const Float f = x * s.share;
  return {f, fma(f, s.rest, s.share)};
}

#if defined(__AVX512F__)
// The tail of the normal distribution beyond z >= 0: a polynomial around each of 16 points of [0,
// 15.5 / kPieces), interpolated at Chebyshev nodes, and 0 above. z times it has an error within
// 6e-8 (1 + z).
constexpr float kPieces = 2.65f;
alignas(64) constexpr float kTail[][16] = {
    {0.5f, 0.352953613f, 0.225209415f, 0.128801346f, 0.0655939579f, 0.0295941234f, 0.0117824161f,
     0.0041268752f, 0.00126860559f, 0.000341609091f, 8.04592128e-05f, 1.65553829e-05f,
     2.9729797e-06f, 4.65567609e-07f, 6.35361488e-08f, 7.55202478e-09f},
    {-0.150542781f, -0.140197232f, -0.113234229f, -0.0793183595f, -0.0481865369f, -0.0253881626f,
     -0.0116007803f, -0.00459716097f, -0.00157991669f, -0.000470885367f, -0.000121710102f,
     -2.72810721e-05f, -5.3028798e-06f, -8.93858726e-07f, -1.30654101e-07f, -1.65601222e-08f},
    {0.0f, 0.0099819256f, 0.0161243156f, 0.0169420931f, 0.0137232626f, 0.00903805811f,
     0.00495586311f, 0.00229130499f, 0.00090000307f, 0.000301797932f, 8.6684624e-05f,
     2.13771291e-05f, 4.5341535e-06f, 8.28242548e-07f, 1.30430507e-07f, 1.77220389e-08f},
    {0.00354915438f, 0.00283756526f, 0.00115719624f, -0.000517400564f, -0.00144807459f,
     -0.00153485022f, -0.00113515765f, -0.000654572446f, -0.000306873233f, -0.000119417236f,
     -3.9036102e-05f, -1.08005015e-05f, -2.54230531e-06f, -5.10981408e-07f, -8.79327544e-08f,
     -1.29825501e-08f},
    {0.0f, -0.000336113852f, -0.000462317315f, -0.000344338274f, -0.000118133452f, 5.88024632e-05f,
     0.000124179569f, 0.000107902633f, 6.54015967e-05f, 3.07385453e-05f, 1.16780047e-05f,
     3.66309405e-06f, 9.60614216e-07f, 2.12316849e-07f, 3.97723063e-08f, 6.34008623e-09f},
};

// x times the normal distribution function.
inline Value gelu(Float x) {
  constexpr __mmask16 kAll = 0xFFFF;
  constexpr float kRound = 0x1.8p23f;       // adding it rounds to an integer
  constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
  const Float z = x < 0.0f ? -x : x;
  const Float piece = fma(z, splat(kPieces), splat(kRound));
  const Float at = fma(z, splat(kPieces), kRound - piece);  // in [-0.5, 0.5]
  const auto term = [&](int i) -> Float {
    return _mm512_maskz_permutexvar_ps(kAll, bit_cast<__m512i>(piece), load(kTail[i]));
  };
  Float p = fma(term(4), at, term(3));
  p = fma(p, at, term(2));
  p = fma(p, at, term(1));
  // NaN counts as inside and propagates.
  const __mmask16 inside = _mm512_cmp_ps_mask(z, splat(15.5f / kPieces), _CMP_NGE_UQ);
  const Float tail = _mm512_maskz_fmadd_ps(inside, p, at, term(0));
  const Float share = x < 0.0f ? tail : 1.0f - tail;
  return {x * share, fma(x * kDensity, exponential(-0.5f * x * x), share)};
}
#else
// x times the normal distribution function; Abramowitz and Stegun 7.1.26 for the error function,
// whose exponential is also the density's.
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
#endif

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

}  // namespace fastattn::ffn::FASTATTN_ISA
