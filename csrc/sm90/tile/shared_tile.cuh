// Buffers in shared memory: a swizzled tile, which TMA loads and stores and which is an operand of
// wgmma, and contiguous values for bulk copies.
#pragma once

#include "sm90/ptx/bulk.cuh"
#include "sm90/ptx/mbarrier.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/tile/descriptor.h"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::sm90 {

// Bulk copies need 16-byte alignment; these buffers begin where a row of all 32 banks does.
template <class Value, int kCount>
struct alignas(kRowBytes) BulkBuffer {
  static constexpr int kBytes = kCount * sizeof(Value);
  static_assert(kBytes % kPieceBytes == 0, "bulk copies move multiples of 16 bytes");

  Value data[kCount];

  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(data); }

  // One thread: starts the copy, whose bytes `full` must expect.
  __device__ __forceinline__ void load(const Value* from, Barrier& full) {
    ptx::cp_async_bulk_load(address(), from, kBytes, full.address());
  }
};

template <class Element, int kRowCount, int kColumnCount>
struct alignas(kTileAlignment) SharedTile {
  static_assert(sizeof(Element) == 2);
  static_assert(kColumnCount % kChunkColumns == 0);
  static_assert(kRowCount % 8 == 0, "the swizzle repeats every eight rows");
  static constexpr int kRows = kRowCount;
  static constexpr int kChunks = kColumnCount / kChunkColumns;
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kBytes = kChunks * kChunkBytes;

  Element data[kRowCount * kColumnCount];

  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(data); }

  // One thread: expects the whole tile's bytes at `full` and starts the copies, one for each chunk.
  __device__ __forceinline__ void load(const CUtensorMap* map, Barrier& full, int row, int head,
                                       int batch, uint64_t policy) {
    full.arrive_expect_bytes(kBytes);
    load_box(map, full, 0, row, head, batch, policy);
  }
  // Starts the copies of a box into the tile's rows from `to` on, a multiple of eight; `full` must
  // expect the bytes.
  __device__ __forceinline__ void load_box(const CUtensorMap* map, Barrier& full, int to, int row,
                                           int head, int batch, uint64_t policy) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::cp_async_bulk_tensor_load(address() + chunk * kChunkBytes + to * kRowBytes, map,
                                     full.address(), chunk * kChunkColumns, row, head, batch,
                                     policy);
    }
  }

  // One thread: starts the stores of the chunks that begin before column `columns`.
  __device__ __forceinline__ void store(const CUtensorMap* map, int columns, int row, int head,
                                        int batch) const {
#pragma unroll 1
    for (int column = 0; column < columns; column += kChunkColumns) {
      ptx::cp_async_bulk_tensor_store(map, address() + column / kChunkColumns * kChunkBytes, column,
                                      row, head, batch);
    }
    ptx::cp_async_bulk_commit_group();
  }

  // Called by `threads` threads, of which this is number `thread`: zeroes rows [begin, end). Whole
  // rows, so the swizzle does not matter. The caller fences before TMA or wgmma reads them.
  __device__ __forceinline__ void clear_rows(int begin, int end, int thread, int threads) {
    constexpr int kRowPieces = kRowBytes / kPieceBytes;
    const int pieces = (end - begin) * kRowPieces;
#pragma unroll 1
    for (int i = thread; i < pieces * kChunks; i += threads) {
      char* chunk = reinterpret_cast<char*>(data) + i / pieces * kChunkBytes;
      *reinterpret_cast<uint4*>(chunk + begin * kRowBytes + i % pieces * kPieceBytes) = {};
    }
  }

  // The same threads: zeroes the rows whose bit is not set.
  __device__ __forceinline__ void clear_unmarked_rows(const uint32_t* marks, int thread,
                                                      int threads) {
    constexpr int kRowPieces = kRowBytes / kPieceBytes, kWordRows = 32;
#pragma unroll 1
    for (int i = thread; i < kRows * kRowPieces * kChunks; i += threads) {
      const int row = i / kRowPieces % kRows;
      if (!(marks[row / kWordRows] >> row % kWordRows & 1)) {
        reinterpret_cast<uint4*>(data)[i] = {};
      }
    }
  }

  // The same threads: flips the sign of every element.
  __device__ __forceinline__ void negate(int thread, int threads) {
    constexpr uint32_t kSigns = 0x80008000;
#pragma unroll 1
    for (int i = thread; i < kBytes / kPieceBytes; i += threads) {
      uint4& piece = reinterpret_cast<uint4*>(data)[i];
      piece = {piece.x ^ kSigns, piece.y ^ kSigns, piece.z ^ kSigns, piece.w ^ kSigns};
    }
  }
};

}  // namespace fastattn::sm90
