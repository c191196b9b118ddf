// The accumulator of a 64 x N wgmma, held by 128 threads, and its stores.
//
// Thread t of the warpgroup (lane l of warp w) holds N / 2 floats: four for every 8 columns, of
// rows 16 w + l / 4 and 8 below, columns 2 (l % 4) and the next. acc[4 i] and acc[4 i + 1] belong
// to the upper row, the other two to the lower. Packed in pairs, the same registers are the A
// operand of the next wgmma: no exchange between threads is needed.
#pragma once

#include <cstdint>

#include "sm90/ptx/warp.cuh"
#include "sm90/tile/descriptor.h"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::sm90 {

// Rows of one wgmma, and the distance of the two rows that a thread holds.
constexpr int kMmaRows = 64;
constexpr int kRowStep = 8;
constexpr int kWarpRows = 16;

struct AccumulatorThread {
  int warp, lane;

  __device__ __forceinline__ int upper_row() const { return warp * kWarpRows + lane / 4; }
  __device__ __forceinline__ int first_column() const { return 2 * (lane % 4); }
  // One of the four threads that share a row.
  __device__ __forceinline__ bool leads_row() const { return lane % 4 == 0; }
};

template <class Element, int kCount>
__device__ __forceinline__ void to_operand(uint32_t (&operand)[kCount / 2],
                                           const float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    operand[i] = ptx::pack<Element>(acc[2 * i], acc[2 * i + 1]);
  }
}

template <int kCount>
__device__ __forceinline__ void scale_rows(float (&acc)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    acc[i] *= factor[i / 2 % 2];
  }
}

// Rounds the rows into a swizzled tile of 64 rows at `tile`; the caller fences before TMA reads it.
template <class Element, int kCount>
__device__ __forceinline__ void store_shared(uint32_t tile, const float (&acc)[kCount],
                                             AccumulatorThread thread) {
  constexpr int kStepRegisters = kMmaK / 2;
  constexpr int kStepPieces = kMmaK * sizeof(Element) / kPieceBytes;
  constexpr int kStepsPerChunk = kChunkColumns / kMmaK;
  // Lanes 0 to 15 address the left 8 columns of 16 rows, the others the right 8.
  const int row = thread.warp * kWarpRows + thread.lane % kWarpRows;
  const int side = thread.lane / kWarpRows;
#pragma unroll
  for (int step = 0; step < kCount / kStepRegisters; ++step) {
    const int piece = step % kStepsPerChunk * kStepPieces + side;
    const float* r = &acc[step * kStepRegisters];
    ptx::stmatrix_x4(
        tile + step / kStepsPerChunk * kMmaRows * kRowBytes + swizzled_offset(row, piece),
        ptx::pack<Element>(r[0], r[1]), ptx::pack<Element>(r[2], r[3]),
        ptx::pack<Element>(r[4], r[5]), ptx::pack<Element>(r[6], r[7]));
  }
}

// A 4 x 4 transposition between the threads of a row, in two exchanges of halves: value j of thread
// t becomes value t of thread j.
template <class Value>
__device__ __forceinline__ void transpose_quad(Value (&v)[4], int lane) {
  static_assert(sizeof(Value) == sizeof(uint32_t));
  const bool odd = lane & 1, high = lane & 2;
  const Value x0 = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1);
  const Value x1 = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
  if (odd) {
    v[0] = x0;
    v[2] = x1;
  } else {
    v[1] = x0;
    v[3] = x1;
  }
  const Value y0 = __shfl_xor_sync(~0u, high ? v[0] : v[2], 2);
  const Value y1 = __shfl_xor_sync(~0u, high ? v[1] : v[3], 2);
  if (high) {
    v[0] = y0;
    v[1] = y1;
  } else {
    v[2] = y0;
    v[3] = y1;
  }
}

// Rounds the rows and stores them to global memory, for kernels without shared memory to spare.
// `upper` is this thread's upper row; rows from `rows` on (counted from `upper`) and columns from
// `columns` on are not written. The four threads of a row exchange values first, so that each
// writes 16 consecutive bytes of every 32 columns.
template <class Element, int kCount>
__device__ __forceinline__ void store_global(Element* upper, int64_t row_stride, int rows,
                                             int columns, const float (&acc)[kCount],
                                             AccumulatorThread thread) {
  constexpr int kGroupColumns = 32;
  constexpr int kPieceColumns = kPieceBytes / sizeof(Element);
  static_assert(2 * kCount % kGroupColumns == 0);
  const int column = thread.lane % 4 * kPieceColumns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int group = 0; group < 2 * kCount / kGroupColumns; ++group) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* r = &acc[group * kGroupColumns / 2 + 4 * j + 2 * half];
        pairs[j] = ptx::pack<Element>(r[0], r[1]);
      }
      transpose_quad(pairs, thread.lane);
      if (half * kRowStep < rows && group * kGroupColumns + column < columns) {
        Element* to = upper + half * kRowStep * row_stride + group * kGroupColumns + column;
        *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

// The same in fp32: each thread writes its pairs, four of which fill 32 bytes.
template <int kCount>
__device__ __forceinline__ void store_global(float* upper, int64_t row_stride, int rows,
                                             int columns, const float (&acc)[kCount],
                                             AccumulatorThread thread) {
  constexpr int kGroupColumns = 8, kGroupRegisters = 4;
  float* from_column = upper + thread.first_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * kRowStep >= rows) {
      return;
    }
#pragma unroll
    for (int group = 0; group < kCount / kGroupRegisters; ++group) {
      if (group * kGroupColumns < columns) {
        const float* pair = &acc[group * kGroupRegisters + 2 * half];
        float* to = from_column + half * kRowStep * row_stride + group * kGroupColumns;
        *reinterpret_cast<float2*>(to) = {pair[0], pair[1]};
      }
    }
  }
}

}  // namespace fastattn::sm90
