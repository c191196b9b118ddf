#include "best_tokens/best_tokens_cpu.h"

namespace fastattn::best_tokens {
extern const Kernels kAvx512 = avx512::best_tokens_kernels::kKernels;
}  // namespace fastattn::best_tokens
