// The activations and their derivatives in fp32, accurate enough for results of 16 bits.
#pragma once

#include "ffn/activation.h"
#include "sm90/ptx/warp.cuh"

namespace fastattn::ffn {

namespace ptx = sm90::ptx;

struct ValueAndSlope {
  float value, slope;
};

constexpr float kLog2e = 1.44269504088896341f;

__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp(1.0f + ptx::ex2(x * -kLog2e));
}

struct Relu {
  static __device__ __forceinline__ ValueAndSlope at(float x) {
    return {x < 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};  // propagates NaN
  }
};

struct Silu {
  static __device__ __forceinline__ ValueAndSlope at(float x) {
    const float s = sigmoid(x), value = x * s;
    return {value, s + value * (1.0f - s)};
  }
};

// x sigmoid(2 u), where u is the argument of the tanh.
struct GeluTanh {
  static __device__ __forceinline__ ValueAndSlope at(float x) {
    constexpr float kTwice = 1.5957691216057308f, kCubic = 0.07135481627159471f;
    const float square = x * x;
    const float s = sigmoid(x * fmaf(kCubic, square, kTwice)), value = x * s;
    return {value, s + value * (1.0f - s) * fmaf(3.0f * kCubic, square, kTwice)};
  }
};

struct Gelu {
  static __device__ __forceinline__ ValueAndSlope at(float x) {
    // log2 of the lower tail of the normal distribution by a fitted polynomial; the absolute error
    // of the tail is at most 7e-7.
    constexpr float kLargest = 16.0f;
    constexpr float kDensity = 0.3989422804014327f;  // 1 / sqrt(2 pi)
    const float a = fminf(fabsf(x), kLargest);
    float p = fmaf(a, -0.0005002515390515327f, 0.007282324600964785f);
    p = fmaf(p, a, -0.05234311521053314f);
    p = fmaf(p, a, -0.45941418409347534f);
    p = fmaf(p, a, -1.1510519981384277f);
    const float tail = ptx::ex2(fmaf(p, a, -1.0000019073486328f));
    const float share = x < 0.0f ? tail : 1.0f - tail;
    return {x * share, fmaf(x, kDensity * ptx::ex2(x * x * (-0.5f * kLog2e)), share)};
  }
};

// Calls `of` with the activation's type: one branch for a whole tile. No gate is gelu_tanh.
template <bool kGated, class Of>
__device__ __forceinline__ void with_activation(Activation activation, Of of) {
  if (activation == Activation::kRelu) {
    of(Relu());
  } else if (activation == Activation::kSilu) {
    of(Silu());
  } else if (kGated || activation == Activation::kGelu) {
    of(Gelu());
  } else if constexpr (!kGated) {
    of(GeluTanh());
  }
}

}  // namespace fastattn::ffn
