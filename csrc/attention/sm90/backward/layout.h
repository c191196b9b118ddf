// Layouts of the backward's accumulators: dS in shared memory, dQ in global memory in register
// order. Kernels and tests share these functions.
#pragma once

#include <cstdint>

#include "sm90/tile/descriptor.h"

namespace fastattn::attention {

// A warp's accumulators hold 16 keys of dS^T, one key per row. Four transposed 8 x 8 matrices (keys
// 0 to 7 and 8 to 15 of 8 queries, then of the next 8) become 16 rows of queries. Returns the
// offset of `lane`'s row in the 64 columns of the warpgroup's keys. one_row: all rows are one.
FASTATTN_PURE uint32_t scores_offset(int warp, int lane, bool one_row = false) {
  constexpr int kMatrix = 8, kPiecesPerWarp = 2;
  const int row = one_row ? 0 : lane % kMatrix + lane / (2 * kMatrix) * kMatrix;
  const int piece = warp * kPiecesPerWarp + lane / kMatrix % 2;
  return sm90::swizzled_offset(row, piece);
}

// The element of a 64 x N accumulator at index `number` of a dQ sum: four registers of every thread
// of the warpgroup side by side, then the next four.
struct SumElement {
  int row, column;
};
FASTATTN_PURE SumElement sum_element(int number) {
  constexpr int kThreads = 128, kWarp = 32, kWarpRows = 16, kColumns = 8, kRowStep = 8, kFour = 4;
  const int register_ = number % kFour;
  const int thread = number / kFour % kThreads;
  const int lane = thread % kWarp;
  return {thread / kWarp * kWarpRows + lane / kFour + register_ / 2 * kRowStep,
          number / (kFour * kThreads) * kColumns + lane % kFour * 2 + register_ % 2};
}

}  // namespace fastattn::attention
