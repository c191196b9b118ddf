// Shared-memory layout of wgmma operands: the 128-byte swizzle and matrix descriptors.
//
// A tile of 16-bit elements is divided into chunks of 64 columns, stored as rows of 128 bytes.
// Within each row, the eight 16-byte pieces are permuted: piece index xor row number modulo 8. TMA
// writes and wgmma reads this layout; a chunk starts at a multiple of 1024 bytes.
#pragma once

#include <cstdint>

#include "common/pure.h"

namespace fastattn::sm90 {

constexpr int kChunkColumns = 64;
constexpr int kRowBytes = 128;
constexpr int kPieceBytes = 16;
constexpr int kTileAlignment = 1024;
// The k extent of one wgmma.
constexpr int kMmaK = 16;

// Byte offset of 16-byte piece `piece` (0 to 7) of row `row` inside a chunk.
FASTATTN_PURE uint32_t swizzled_offset(uint32_t row, uint32_t piece) {
  return row * kRowBytes + ((piece ^ (row % 8)) * kPieceBytes);
}

// Fields of the 64-bit matrix descriptor. Addresses and strides are in units of 16 bytes; the
// distance between groups of eight rows is always 1024 bytes, the swizzle mode 1 is that of 128
// bytes.
FASTATTN_PURE uint64_t descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint32_t kAddressMask = 0x3FFFF;
  constexpr uint64_t kGroupBytes = 8 * kRowBytes;
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & kAddressMask) >> 4) |
         static_cast<uint64_t>(leading_bytes >> 4) << 16 | (kGroupBytes >> 4) << 32 |
         kSwizzle128 << 62;
}

// k contiguous: the leading distance is not used with a swizzle; 1 by convention.
FASTATTN_PURE uint64_t descriptor_k_major(uint32_t address) {
  return descriptor(address, 16);
}

// n contiguous: the leading distance leads to the next 64 columns.
FASTATTN_PURE uint64_t descriptor_n_major(uint32_t address, uint32_t chunk_bytes) {
  return descriptor(address, chunk_bytes);
}

// The same matrix `bytes` further on.
FASTATTN_PURE uint64_t descriptor_at(uint64_t base, uint32_t bytes) {
  return base + static_cast<uint64_t>(bytes >> 4);
}

// Offset of the `step`-th 16 columns of a tile of `rows` rows with k contiguous: 32 bytes inside a
// chunk's rows, which is legal because the swizzle uses other address bits.
FASTATTN_PURE uint32_t k_major_step(int step, int rows) {
  constexpr int kStepsPerChunk = kChunkColumns / kMmaK;
  return (step / kStepsPerChunk) * rows * kRowBytes + (step % kStepsPerChunk) * 2 * kMmaK;
}

// Offset of the `step`-th 16 rows of a tile with n contiguous.
FASTATTN_PURE uint32_t n_major_step(int step) {
  return step * kMmaK * kRowBytes;
}

}  // namespace fastattn::sm90
