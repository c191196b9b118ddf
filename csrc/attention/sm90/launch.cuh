// Types and constants shared by the Hopper attention kernels.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention.h"

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

__device__ __forceinline__ int clamped_length(const Lengths& lengths, int batch, int most) {
  if (!lengths.data) {
    return most;
  }
  const int64_t length = lengths.wide ? static_cast<const int64_t*>(lengths.data)[batch]
                                      : static_cast<const int32_t*>(lengths.data)[batch];
  return length < 0 ? 0 : length > most ? most : static_cast<int>(length);
}

}  // namespace fastattn::attention
