// Types and constants shared by the Hopper attention kernels.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention.h"
#include "common/pure.h"

namespace fastattn::attention {

constexpr int kHopper = 90;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

template <DType kType>
struct TypeOf;
template <>
struct TypeOf<DType::kBFloat16> {
  using Element = __nv_bfloat16;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};
template <>
struct TypeOf<DType::kFloat16> {
  using Element = __half;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
};

// Whether a call drops weights, and whether it adds a dense mask: some instances with changes of
// scores decide at run time.
template <class Traits>
FASTATTN_PURE bool drops(const Dropout& dropout) {
  return Traits::kDropout && (!Traits::kChoosesDropout || dropout.seed);
}
template <class Traits>
FASTATTN_PURE bool adds(const DenseMask& mask) {
  return Traits::kBias && (!Traits::kScores || mask.type != MaskType::kBool);
}

__device__ __forceinline__ int clamped_length(const Lengths& lengths, int batch, int most) {
  if (!lengths.data) {
    return most;
  }
  const int64_t length = lengths.wide ? static_cast<const int64_t*>(lengths.data)[batch]
                                      : static_cast<const int32_t*>(lengths.data)[batch];
  return length < 0 ? 0 : length > most ? most : static_cast<int>(length);
}

// The queries and keys of a batch entry that are computed, of those in the tensors. (Two functions:
// one that returned both made the forward 120 instructions longer.)
__device__ __forceinline__ int computed_queries(const LengthsAndBounds& limits, int batch,
                                                int all) {
  return clamped_length(limits.query_lengths, batch, all);
}
__device__ __forceinline__ int computed_keys(const LengthsAndBounds& limits, int batch, int all) {
  return clamped_length(limits.key_lengths, batch, all);
}

// Bounds of a batch entry or packed sequence with these numbers of queries and keys.
__device__ __forceinline__ Bounds bounds_of(const LengthsAndBounds& limits, int queries, int keys) {
  Bounds bounds = limits.bounds;
  if (limits.own_diagonals) {
    bounds.diagonal = keys - queries;
  }
  return bounds;
}

}  // namespace fastattn::attention
