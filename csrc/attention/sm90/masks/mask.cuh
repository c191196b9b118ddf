// Masks a block of scores in registers. Only edge blocks need it.
#pragma once

#include "attention/key_range.h"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

constexpr float kMinusInfinity = -__builtin_huge_valf();
// FASTATTN_TRIALS=fwd_diagonal: whether keys are compared with one bound at a time.
#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
constexpr bool kComparesApart = true;
#else
constexpr bool kComparesApart = false;
#endif

// Sets the scores of one row (half 0 or 1 of this thread's) at columns outside `allowed` to -inf,
// whatever they are: dead keys may hold NaN. `allowed` counts from this thread's first column, so
// that it is compared with constants.
// kSide: -1 tests the begin of the range alone, 1 the end alone.
template <int kSide = 0, int kCount>
__device__ __forceinline__ void mask_row(float (&s)[kCount], int half, Range allowed) {
  constexpr int kGroupColumns = 8, kGroupRegisters = 4;
#pragma unroll
  for (int group = 0; group < kCount / kGroupRegisters; ++group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& score = s[group * kGroupRegisters + 2 * half + i];
      const int column = group * kGroupColumns + i;
      const bool is_allowed = kSide < 0   ? allowed.begin <= column
                              : kSide > 0 ? column < allowed.end
                                          : contains(allowed, column);
      score = is_allowed ? score : kMinusInfinity;
    }
  }
}

// Masks a 64-row block of scores whose first key is `first_key`; `upper_row` is the query of this
// thread's upper row. kOneSided: with FASTATTN_TRIALS=fwd_diagonal the bounds are compared apart.
template <bool kBounded, bool kOneSided, int kCount>
__device__ __forceinline__ void mask_block(float (&s)[kCount], int first_key, int upper_row,
                                           const Bounds& bounds, int keys,
                                           sm90::AccumulatorThread thread) {
  const int origin = first_key + thread.first_column();
  // Most blocks are cut on the right alone: by the diagonal, or by the number of keys.
  if constexpr (kComparesApart && kBounded && kOneSided) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mask_row<1>(s, half,
                  {0, keys_of_row(upper_row + half * sm90::kRowStep, bounds, keys).end - origin});
    }
    const int last_row = upper_row - thread.lane / 4 + sm90::kWarpRows - 1;
    if (keys_of_row(last_row, bounds, keys).begin > first_key) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mask_row<-1>(
            s, half,
            {keys_of_row(upper_row + half * sm90::kRowStep, bounds, keys).begin - origin, 0});
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Range allowed = {0, keys};
      if constexpr (kBounded) {
        allowed = keys_of_row(upper_row + half * sm90::kRowStep, bounds, keys);
      } else {
        allowed.begin = origin;  // nothing to test
      }
      mask_row(s, half, {allowed.begin - origin, allowed.end - origin});
    }
  }
}

}  // namespace fastattn::attention
