// Two kernels that classify a dense mask before attention (see mask_classes.h): the first packs it
// into bits; the second combines the bits with lengths and bounds, tile by tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "attention/attention.h"
#include "attention/sm90/common.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "attention/sm90/masks/mask_classes.h"

namespace fastattn::attention {

constexpr int kPackThreads = 256, kWarpThreads = 32;
// Keys that one thread reads at a time: as many as a tile of a prepared mask has.
constexpr int kPiece = 16;
constexpr uint32_t kAllOfPiece = (1u << kPiece) - 1;
// Bits of a prepared mask's tile bitmask, see fastattn/ops/attention/prepared.py.
constexpr int kWholeBit = 32;

// Sixteen booleans at an aligned address as sixteen bits.
__device__ __forceinline__ uint32_t bits_of_bytes(const void* address) {
  const uint4 bytes = *static_cast<const uint4*>(address);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t four = i == 0 ? bytes.x : i == 1 ? bytes.y : i == 2 ? bytes.z : bytes.w;
    // Moves bits 0, 8, 16 and 24 next to each other.
    bits |= ((four & 0x01010101u) * 0x01020408u >> 24 & 0xFu) << (4 * i);
  }
  return bits;
}

// A thread's piece of a row: which keys it allows, and whether it changes no score.
struct PieceBits {
  uint32_t allowed;
  bool plain;
};

__device__ __forceinline__ bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(uint4) == 0;
}

__device__ __forceinline__ PieceBits read_booleans(const uint8_t* from, int64_t step, int count) {
  uint32_t bits = 0;
  if (step == 1 && count == kPiece && is_aligned(from)) {
    bits = bits_of_bytes(from);
  } else {
    for (int j = 0; j < count; ++j) {
      bits |= static_cast<uint32_t>(from[j * step] != 0) << j;
    }
  }
  return {bits, bits == kAllOfPiece >> (kPiece - count)};
}

__device__ __forceinline__ float as_float(float x) {
  return x;
}
__device__ __forceinline__ float as_float(__half x) {
  return __half2float(x);
}
__device__ __forceinline__ float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// A value at or below the lowest finite number of its type blocks. copy: null, or the destination
// of the piece, in its own type or as floats.
template <class Element>
__device__ __forceinline__ PieceBits read_values(const Element* from, int64_t step, int count,
                                                 void* copy, bool as_floats) {
  constexpr int kVectors = kPiece * sizeof(Element) / sizeof(uint4);
  alignas(16) Element values[kPiece];
  if (step == 1 && count == kPiece && is_aligned(from)) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      reinterpret_cast<uint4*>(values)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      values[j] = j < count ? from[j * step] : Element(0.0f);
    }
  }
  uint32_t bits = 0;
  bool plain = true;
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    const float value = as_float(values[j]);
    const bool allowed = j < count && !(value <= kLowest<Element>);
    bits |= static_cast<uint32_t>(allowed) << j;
    plain = plain && value == 0.0f;
    if (copy && j < count) {
      if (as_floats) {
        static_cast<float*>(copy)[j] = allowed ? value : kMinusInfinity;
      } else {
        static_cast<Element*>(copy)[j] = values[j];
      }
    }
  }
  return {bits, plain};
}

__device__ __forceinline__ PieceBits read_piece(const DenseMask& mask, int64_t at, int count,
                                                int64_t copied_at) {
  const bool as_floats = mask.copy_type == MaskType::kFloat32;
  const int copied_bytes = as_floats ? sizeof(float) : sizeof(__half);
  void* copy = mask.copy ? static_cast<char*>(mask.copy) + copied_at * copied_bytes : nullptr;
  const int64_t step = mask.column_stride;
  switch (mask.type) {
    case MaskType::kBool:
      break;
    case MaskType::kBFloat16:
      return read_values(static_cast<const __nv_bfloat16*>(mask.data) + at, step, count, copy,
                         as_floats);
    case MaskType::kFloat16:
      return read_values(static_cast<const __half*>(mask.data) + at, step, count, copy, as_floats);
    case MaskType::kFloat32:
      return read_values(static_cast<const float*>(mask.data) + at, step, count, copy, as_floats);
  }
  return read_booleans(static_cast<const uint8_t*>(mask.data) + at, step, count);
}

// A thread block: 64 rows x one block of keys. A thread: 16 keys of a row at a time.
__global__ void __launch_bounds__(kPackThreads)
    pack_mask_kernel(const DenseMask mask, int queries, int keys) {
  const MaskLayout& layout = mask.layout;
  const int n = blockIdx.x % layout.blocks;
  const int64_t rest = blockIdx.x / layout.blocks;
  const int group = static_cast<int>(rest % layout.row_groups);
  const int64_t mask_head = rest / layout.row_groups;
  const int64_t batch = mask_head / layout.heads, head = mask_head % layout.heads;
  const int64_t start = batch * mask.batch_stride + head * mask.head_stride;
  const int64_t copied_head = mask_head * (layout.rows > 1 ? queries : 1);
  const int block_pieces = kMaxBlockWords * kWordKeys / kPiece;
  const int last_key = smaller(keys, (n + 1) * layout.block);
  bool plain = true;
  for (int i = threadIdx.x; i < layout.rows * block_pieces; i += kPackThreads) {
    const int row = group * kMaskRows + i / block_pieces;
    const int key = n * layout.block + i % block_pieces * kPiece;
    const int count = smaller(last_key - key, kPiece);
    uint32_t bits = 0;
    // A row that is broadcast counts as row 0.
    if (count > 0 && row < queries) {
      const uint32_t present = kAllOfPiece >> (kPiece - count);
      bool reads_elements = true;
      if (mask.tiles && !mask.copy) {
        const int64_t word =
            mask.tiles[batch * mask.tile_strides[0] + head * mask.tile_strides[1] +
                       row / kPiece * mask.tile_strides[2] + key / kPiece * mask.tile_strides[3]];
        const bool whole = word >> kWholeBit & 1;
        reads_elements = !whole && (word & kAllOfPiece) != 0;
        bits = whole ? present : 0;
      }
      if (reads_elements) {
        const PieceBits piece =
            read_piece(mask, start + row * mask.row_stride + key * mask.column_stride, count,
                       (copied_head + row) * copied_columns(keys) + key);
        bits = piece.allowed;
        plain = plain && piece.plain;
      }
      plain = plain && bits == present;
    }
    reinterpret_cast<uint16_t*>(
        mask.bits)[bits_at(layout, mask_head, row, n) * 2 + i % block_pieces] =
        static_cast<uint16_t>(bits);
  }
  plain = __syncthreads_and(plain);
  if (threadIdx.x == 0) {
    mask.plain[plain_at(layout, mask_head, group, n)] = plain;
  }
}

// A thread block: a tile of rows x one block of keys. A thread: a row.
static __global__ void classify_mask_kernel(const DenseMask mask, const LengthsAndBounds limits,
                                            int all_queries, int all_keys) {
  const MaskLayout& layout = mask.layout;
  const int n = blockIdx.x % layout.blocks;
  const int64_t rest = blockIdx.x / layout.blocks;
  const int tile = static_cast<int>(rest % layout.row_tiles);
  const int64_t class_head = rest / layout.row_tiles;
  const int batch = static_cast<int>(class_head / layout.class_heads);
  const int head = static_cast<int>(class_head % layout.class_heads);
  const int queries = computed_queries(limits, batch, all_queries);
  const int keys = computed_keys(limits, batch, all_keys);
  const Bounds bounds = bounds_of(limits, queries, keys);
  const int64_t mask_number = mask_head(layout, batch, head);

  __shared__ uint32_t live[kMaxBlockWords], masked;
  if (threadIdx.x == 0) {
    masked = 0;
  }
  if (threadIdx.x < kMaxBlockWords) {
    live[threadIdx.x] = 0;
  }
  __syncthreads();
  const int row = tile * layout.tile_rows + threadIdx.x;
  const Range block = {n * layout.block, (n + 1) * layout.block};
  const Range allowed =
      row < queries ? overlap(block, keys_of_row(row, bounds, keys)) : Range{0, 0};
  const bool restricted = allowed.begin > block.begin || allowed.end < block.end;
  const bool first_lane = threadIdx.x % kWarpThreads == 0;
  for (int word = 0; word < kMaxBlockWords; ++word) {
    uint32_t bits = bits_inside(allowed, block.begin + word * kWordKeys);
    if (bits) {
      bits &= mask.bits[bits_at(layout, mask_number, row, n) + word];
    }
    bits = __reduce_or_sync(~0u, bits);
    if (first_lane && bits) {
      atomicOr(&live[word], bits);
    }
  }
  const int group = threadIdx.x / kMaskRows;
  const bool plain =
      row >= queries || mask.plain[plain_at(layout, mask_number, row / kMaskRows, n)];
  if (__any_sync(~0u, row < queries && restricted) && first_lane) {
    atomicOr(&masked, (1u | 1u << kRestrictedBit) << group);
  }
  if (__any_sync(~0u, !plain) && first_lane) {
    atomicOr(&masked, 1u << group);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    BlockClass result = {};
    uint32_t any = 0, dead = 0;
    for (int word = 0; word < kMaxBlockWords; ++word) {
      result.live[word] = live[word];
      any |= live[word];
      dead |= ~live[word] & bits_inside({0, layout.block}, word * kWordKeys);
    }
    result.flags = masked | (any ? kHasWork : 0) | (dead ? kHasDead : 0);
    mask.classes[classes_at(layout, class_head, tile) + n] = result;
  }
}

}  // namespace fastattn::attention
