// Score modifications before masks, in registers: the soft cap, and a bias for each distance
// between key and query. Scores are in base 2 afterwards.
#pragma once

#include "attention/sm90/common.cuh"
#include "sm90/ptx/warp.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

// The arguments of a kernel: ScoreModifications with factors.
struct DeviceScoreModifications {
  float cap_log2;      // the cap in base 2; 0: none
  float scale_by_cap;  // of the products of queries and keys
  float cap_log2_inverse;
  DistanceBias bias;
};
inline DeviceScoreModifications to_device(const ScoreModifications& modifications, float scale) {
  const float cap = modifications.cap;
  return {cap * kLog2e, cap > 0.0f ? scale / cap : 0.0f, cap > 0.0f ? kLn2 / cap : 0.0f,
          modifications.bias};
}

// Relative error below 2^-19: near 0, where the difference below loses digits, by a polynomial.
__device__ __forceinline__ float tanh_of(float x) {
  constexpr float kNear = 0.25f;
  constexpr float k3 = -1.0f / 3.0f, k5 = 2.0f / 15.0f, k7 = -17.0f / 315.0f;
  const float square = x * x;
  const float near = fmaf(x * square, fmaf(square, fmaf(square, k7, k5), k3), x);
  const float far = fmaf(-2.0f, sm90::ptx::rcp(sm90::ptx::ex2(x * (2.0f * kLog2e)) + 1.0f), 1.0f);
  return fabsf(x) < kNear ? near : far;
}

// Products become scores in base 2, capped.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&s)[kCount],
                                           const DeviceScoreModifications& modifications,
                                           float scale_log2) {
  if (modifications.cap_log2 > 0.0f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = modifications.cap_log2 * tanh_of(s[i] * modifications.scale_by_cap);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] *= scale_log2;
    }
  }
}

// The derivative of the soft cap where the capped score is `capped` in base 2, or nearly.
__device__ __forceinline__ float slope_of_cap(float capped,
                                              const DeviceScoreModifications& modifications) {
  const float ratio = fminf(fmaxf(capped * modifications.cap_log2_inverse, -1.0f), 1.0f);
  return fmaf(-ratio, ratio, 1.0f);
}

// The biases of a head and a sequence: the pair (row, key) adds [key - row]. Null: none.
__device__ __forceinline__ const float* biases_of(const LengthsAndBounds& limits,
                                                  const DeviceScoreModifications& modifications,
                                                  int batch, int head, int queries, int keys) {
  const DistanceBias& bias = modifications.bias;
  if (!bias.data) {
    return nullptr;
  }
  const int first = bias.first - (limits.own_diagonals ? keys - queries : 0);
  return bias.data + batch * bias.batch_stride + head * bias.head_stride + first;
}

// Adds biases to a thread's scores. kStep: of biases from column to column; the lower of its two
// rows has those that the upper one has eight columns before.
template <int kStep, int kCount>
__device__ __forceinline__ void add_biases(float (&s)[kCount], const float* from) {
  float left[2] = {from[-kStep * sm90::kRowStep], from[kStep * (1 - sm90::kRowStep)]};
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float bias = from[kStep * (8 * i + j)];
      s[4 * i + j] = fmaf(bias, kLog2e, s[4 * i + j]);
      s[4 * i + 2 + j] = fmaf(left[j], kLog2e, s[4 * i + 2 + j]);
      left[j] = bias;
    }
  }
}

}  // namespace fastattn::attention
