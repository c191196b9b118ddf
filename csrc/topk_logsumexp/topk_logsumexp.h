// The largest logits of each row, their indices, and the row's logsumexp, on the CPU.
#pragma once

#include <cstdint>

#include "common/isa.h"

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

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

inline const Kernels& kernels() {
#if defined(__x86_64__)
  switch (active_isa()) {
    case Isa::kAvx512:
      return kAvx512;
    case Isa::kAvx2:
      return kAvx2;
    case Isa::kPortable:
      break;
  }
#endif
  return kPortable;
}

}  // namespace fastattn::topk_logsumexp
