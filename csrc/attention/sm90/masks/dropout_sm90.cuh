// Dropout of attention weights in registers. common/dropout.h draws a word for each unit of a
// lattice, and a thread's accumulators are whole units: its two rows are one row unit, and of every
// 16 columns it has two column units. A separate kernel hashes columns once; the producer loads
// these column keys into shared memory.
#pragma once

#include "attention/attention.h"
#include "common/dropout.h"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

// Applies dropout to a thread's part of a block. column_keys: of the block, in shared memory.
template <int kCount>
__device__ __forceinline__ void drop_block(float (&p)[kCount], const uint32_t* column_keys,
                                           uint32_t row_key, int threshold,
                                           sm90::AccumulatorThread thread) {
  constexpr int kUnitRegisters = 8;  // of 16 columns
  constexpr int kUnitsPerStep = dropout::units(sm90::kMmaK);
  // Bytes are compared in the highest position, where the bits below do not matter. If the
  // threshold drops everything, the keep scale is 0.
  const uint32_t least = static_cast<uint32_t>(threshold) << 24;
#pragma unroll
  for (int step = 0; step < kCount / kUnitRegisters; ++step) {
    const uint2 keys =
        *reinterpret_cast<const uint2*>(column_keys + step * kUnitsPerStep + thread.first_column());
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = dropout::word(row_key, i ? keys.y : keys.x);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          float& weight = p[step * kUnitRegisters + 4 * column + 2 * row + i];
          weight = word << (24 - 8 * (2 * row + column)) >= least ? weight : 0.0f;
        }
      }
    }
  }
}

}  // namespace fastattn::attention
