// The end of a row whose head has a sink: a logit that takes part in the row's sum and has no
// value.
#pragma once

#include <cstdint>

#include "attention/sm90/common.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/ptx/warp.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

// row: of the head's `queries`.
__device__ __forceinline__ float sink_of(const Sinks& sinks, int head, int queries, int row) {
  return sinks.data[int64_t{head} * (queries / sinks.rows) + row / sinks.rows];
}

// The least float above x, which is finite or -inf.
__device__ __forceinline__ float next_above(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float(x == 0.0f ? 1 : x < 0.0f ? bits - 1 : bits + 1);
}

// Returns lse with the sink; `factor` of the row's output becomes less. The lse of a row without
// keys, and of no other, becomes the sink: the backward identifies these rows by it.
__device__ __forceinline__ float add_sink(float lse, float sink, float& factor) {
  if (lse == kMinusInfinity) {
    return sink;
  }
  const float highest = fmaxf(lse, sink);
  const float keys = ptx::ex2((lse - highest) * kLog2e);
  const float sum = keys + ptx::ex2((sink - highest) * kLog2e);
  factor *= keys / sum;
  const float result = highest + ptx::lg2(sum) * kLn2, least = next_above(sink);
  return result < least ? least : result;  // NaN stays
}

}  // namespace fastattn::attention
