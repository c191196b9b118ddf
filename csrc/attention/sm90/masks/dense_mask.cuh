// Applies a dense mask to a block of scores in registers, for blocks that it changes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "attention/attention.h"
#include "attention/sm90/common.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

constexpr int kOctet = 8;  // columns for which a thread holds four registers
constexpr int kOctetRegisters = 4;

// Scores become -inf where a boolean mask, packed into bits, is false. A thread loads the bits of
// its two rows for the whole block.
template <int kCount>
__device__ __forceinline__ void mask_bits(float (&s)[kCount], const uint32_t* bits,
                                          const MaskLayout& layout, int64_t mask_head,
                                          int upper_row, int queries, int n,
                                          sm90::AccumulatorThread thread) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Rows past the end read the last one.
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

// An additive mask of floats needs two pieces where one of 16 bits needs one.
__device__ __forceinline__ bool is_wide(const DenseMask& mask) {
  return mask.type == MaskType::kFloat32;
}
// Whether a mask is broadcast over rows.
__device__ __forceinline__ bool has_one_row(const DenseMask& mask) {
  return mask.row_stride == 0;
}

// Two adjacent elements of an additive mask, and the highest value that blocks.
__device__ __forceinline__ float2 pair_of(const float* at) {
  return *reinterpret_cast<const float2*>(at);
}
__device__ __forceinline__ float2 pair_of(const __nv_bfloat16* at) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(at));
}
__device__ __forceinline__ float2 pair_of(const __half* at) {
  return __half22float2(*reinterpret_cast<const __half2*>(at));
}
template <class MaskElement>
constexpr float kLowest = kLowestFloat;
template <>
inline constexpr float kLowest<__nv_bfloat16> = kLowestBFloat16;
template <>
inline constexpr float kLowest<__half> = kLowestFloat16;

// s = s * scale + mask, -inf where the mask blocks, for the columns of a piece: 64 rows x 128 bytes
// as TMA stores them in shared memory, or one row that is broadcast. `s`: this thread's scores of
// those columns. kScaled: they are in base 2 already. Reads of 16-bit elements access every bank
// once, those of floats twice.
template <class MaskElement, bool kScaled>
__device__ __forceinline__ void add_bias_piece(float* s, const char* piece, bool one_row,
                                               float scale, sm90::AccumulatorThread thread) {
  constexpr uint32_t kOctetBytes = kOctet * sizeof(MaskElement);
  const uint32_t byte = thread.first_column() * sizeof(MaskElement);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t line = one_row ? 0 : thread.upper_row() + half * sm90::kRowStep;
    const uint32_t first =
        sm90::swizzled_offset(line, byte / sm90::kPieceBytes) + byte % sm90::kPieceBytes;
#pragma unroll
    for (int octet = 0; octet < sm90::kRowBytes / static_cast<int>(kOctetBytes); ++octet) {
      // The swizzle is an xor, and so is the offset of another octet.
      const char* at = piece + (first ^ octet * kOctetBytes);
      const float2 bias = pair_of(reinterpret_cast<const MaskElement*>(at));
      float* score = &s[octet * kOctetRegisters + 2 * half];
      score[0] = bias.x <= kLowest<MaskElement> ? kMinusInfinity
                 : kScaled                      ? fmaf(bias.x, kLog2e, score[0])
                                                : fmaf(score[0], scale, bias.x);
      score[1] = bias.y <= kLowest<MaskElement> ? kMinusInfinity
                 : kScaled                      ? fmaf(bias.y, kLog2e, score[1])
                                                : fmaf(score[1], scale, bias.y);
    }
  }
}

}  // namespace fastattn::attention
