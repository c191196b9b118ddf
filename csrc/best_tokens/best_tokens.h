// What a search wants to know of a step's logits on CPU: the logarithm of the sum of their
// exponentials, and the largest of them.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace fastattn::best_tokens {

// logits [rows, V] -> log_z [rows]; best and tokens [rows, count], the largest logits of tokens
// from `first` on, largest first, equal ones in the order of their tokens. Missing ones are -inf of
// `first`.
struct Problem {
  const float* logits;
  int64_t rows, V, first, count;
  float *log_z, *best;
  int64_t* tokens;
};

struct Kernels {
  void (*search)(const Problem&, int64_t first_row, int64_t last_row);
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

}  // namespace fastattn::best_tokens
