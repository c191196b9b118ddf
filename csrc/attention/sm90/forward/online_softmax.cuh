// Online softmax over the blocks of a row's keys, in registers. Scores stay unscaled; the scale and
// the change to base 2 are one factor inside the exponent: p = 2^(s * scale_log2 - m * scale_log2),
// scale_log2 > 0.
//
// A thread keeps the maxima m of its two rows, which four threads share, and its own partial row
// sums l. The partial sums are added once, at the end.
#pragma once

#include "attention/sm90/common.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/ptx/warp.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

// Sum or maximum over the four threads of a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 1));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 2);
  return x + __shfl_xor_sync(~0u, x, 1);
}

struct OnlineSoftmax {
  float m[2], l[2];

  __device__ __forceinline__ void start() {
    m[0] = m[1] = kMinusInfinity;
    l[0] = l[1] = 0.0f;
  }

  // Turns scores into weights. `alpha` rescales what earlier weights have contributed. kEdge: rows
  // may have no key so far.
  template <bool kEdge, int kCount>
  __device__ __forceinline__ void update(float (&s)[kCount], float (&alpha)[2], float scale_log2) {
    const float before[2] = {m[0], m[1]};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      float& row = m[i / 2 % 2];
      row = fmaxf(row, fmaxf(s[i], s[i + 1]));
    }
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m[half] = row_max(m[half]);
      // -inf - (-inf) is NaN: a row without keys so far is shifted by 0, its weights are 0.
      const float finite = kEdge && m[half] == kMinusInfinity ? 0.0f : m[half];
      alpha[half] = ptx::ex2((before[half] - finite) * scale_log2);
      shift[half] = finite * scale_log2;
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = ptx::ex2(fmaf(s[i], scale_log2, -shift[i / 2 % 2]));
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      sum[i / 2 % 2] += s[i] + s[i + 1];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] = l[half] * alpha[half] + sum[half];
    }
  }

  // After the last block: completes the sums. factor: of the output, 0 for a row without keys.
  __device__ __forceinline__ void finish(float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] = row_sum(l[half]);
      factor[half] = l[half] == 0.0f ? 0.0f : 1.0f / l[half];
    }
  }

  // For a row that is not computed: the state of a row without keys.
  __device__ __forceinline__ void clear_row(int half) {
    m[half] = kMinusInfinity;
    l[half] = 0.0f;
  }

  // Natural logarithm of the sum of exp(scaled scores), after finish(); -inf for a row without
  // keys. It uses the same rounded product as the weights, so that the rounding error cancels; in
  // one fused multiply-add with the sum, to which the compiler may turn `*` and `+`, it would not.
  __device__ __forceinline__ float lse(int half, float scale_log2) const {
    return (__fmul_rn(m[half], scale_log2) + ptx::lg2(l[half])) * kLn2;
  }
};

// The same with an additive mask, in natural units and as large as floats may be. The maxima are
// those of scaled scores.
struct BiasedSoftmax : OnlineSoftmax {
  // kEdge: the scores are scaled already.
  template <bool kEdge, int kCount>
  __device__ __forceinline__ void update(float (&s)[kCount], float (&alpha)[2], float scale_log2) {
    const float before[2] = {m[0], m[1]};
    float highest[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      float& row = highest[i / 2 % 2];
      row = fmaxf(row, fmaxf(s[i], s[i + 1]));
    }
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scaled = row_max(highest[half]) * (kEdge ? 1.0f : scale_log2 * kLn2);
      m[half] = fmaxf(m[half], scaled);
      const float finite = kEdge && m[half] == kMinusInfinity ? 0.0f : m[half];
      alpha[half] = ptx::ex2((before[half] - finite) * kLog2e);
      shift[half] = finite;
    }
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float shifted = kEdge ? (s[i] - shift[i / 2 % 2]) * kLog2e
                                  : fmaf(s[i], scale_log2, -shift[i / 2 % 2] * kLog2e);
      s[i] = ptx::ex2(shifted);
    }
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      sum[i / 2 % 2] += s[i] + s[i + 1];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      l[half] = l[half] * alpha[half] + sum[half];
    }
  }

  __device__ __forceinline__ float lse(int half, float) const {
    return m[half] + ptx::lg2(l[half]) * kLn2;
  }
};

}  // namespace fastattn::attention
