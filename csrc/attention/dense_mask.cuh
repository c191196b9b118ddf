// A dense mask on a block of scores in registers. Only blocks that it changes come here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "attention/attention.h"
#include "attention/mask.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

constexpr int kOctet = 8;  // columns that have four registers of a thread
constexpr int kOctetRegisters = 4;

// Scores become -inf where a boolean mask, packed into bits, has none. A thread reads the bits of
// its two rows for the whole block.
template <int kCount>
__device__ __forceinline__ void mask_bits(float (&s)[kCount], const uint32_t* bits,
                                          const MaskLayout& layout, int64_t mask_head,
                                          int upper_row, int queries, int n,
                                          sm90::AccumulatorThread thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Rows that do not exist do as the last one does.
    const int row = smaller(upper_row + half * sm90::kRowStep, queries - 1);
    const uint4 words = *reinterpret_cast<const uint4*>(bits + bits_at(layout, mask_head, row, n));
#pragma unroll
    for (int octet = 0; octet < kCount / kOctetRegisters; ++octet) {
      constexpr int kWordOctets = kWordKeys / kOctet;
      const int index = octet / kWordOctets;
      const uint32_t word = index == 0   ? words.x
                            : index == 1 ? words.y
                            : index == 2 ? words.z
                                         : words.w;
      const uint32_t own = word >> thread.first_column();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = s[octet * kOctetRegisters + 2 * half + i];
        score = own >> (octet % kWordOctets * kOctet + i) & 1 ? score : kMinusInfinity;
      }
    }
  }
}

// Two neighbouring elements of an additive mask.
__device__ __forceinline__ float2 pair_of(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}
__device__ __forceinline__ float2 pair_of(const __nv_bfloat16* at) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
}
__device__ __forceinline__ float2 pair_of(const __half* at) {
  return __half22float2(*reinterpret_cast<const __half2*>(at));
}

// s = s * scale + bias, -inf where the bias is `lowest` or less.
template <class MaskElement, int kCount>
__device__ __forceinline__ void add_bias_of_type(float (&s)[kCount], const DenseMask& mask,
                                                 int64_t start, int upper_row, int queries,
                                                 int first_key, int keys, float scale, float lowest,
                                                 sm90::AccumulatorThread thread) {
  const int first = first_key + thread.first_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = smaller(upper_row + half * sm90::kRowStep, queries - 1);
    const MaskElement* from =
        static_cast<const MaskElement*>(mask.data) + start + row * mask.row_stride + first;
#pragma unroll
    for (int octet = 0; octet < kCount / kOctetRegisters; ++octet) {
      float2 bias = {0.0f, 0.0f};
      if (first + octet * kOctet < keys) {
        bias = pair_of(from + octet * kOctet);
      }
      float* score = &s[octet * kOctetRegisters + 2 * half];
      score[0] = bias.x <= lowest ? kMinusInfinity : fmaf(score[0], scale, bias.x);
      score[1] = bias.y <= lowest ? kMinusInfinity : fmaf(score[1], scale, bias.y);
    }
  }
}

// The mask's type is float or that of the tensors. `keys` of the mask, an even number.
template <class Element, int kCount>
__device__ __forceinline__ void add_bias(float (&s)[kCount], const DenseMask& mask, int64_t start,
                                         int upper_row, int queries, int first_key, int keys,
                                         float scale, sm90::AccumulatorThread thread) {
  constexpr float kLowestFloat = -3.40282346638528859812e38f;
  constexpr float kLowest = std::is_same_v<Element, __half> ? kLowestFloat16 : kLowestBFloat16;
  if (mask.type == MaskType::kFloat32) {
    add_bias_of_type<float>(s, mask, start, upper_row, queries, first_key, keys, scale,
                            kLowestFloat, thread);
  } else {
    add_bias_of_type<Element>(s, mask, start, upper_row, queries, first_key, keys, scale, kLowest,
                              thread);
  }
}

}  // namespace fastattn::attention
