// The largest logits of each row, their indices, and the row's logsumexp, on the CPU.
#pragma once

#include <cstdint>

#include "cpu/dispatch.h"

namespace fastattn::topk_logsumexp {

// logits [rows, V] -> logsumexp [rows] of all columns; values and indices [rows, count] of the
// `count` largest logits from column `first` on, in descending order, equal ones in the order of
// their indices. Where fewer are above -inf, the rest are -inf with index `first`.
struct Problem {
  const float* logits;
  int64_t rows, V, first, count;
  float *logsumexp, *values;
  int64_t* indices;
};

struct Kernels {
  void (*run)(const Problem&, int64_t first_row, int64_t last_row);
};

FASTATTN_DISPATCH(Kernels)

}  // namespace fastattn::topk_logsumexp
