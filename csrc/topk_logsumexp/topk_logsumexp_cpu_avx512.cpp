#include "topk_logsumexp/topk_logsumexp_cpu.h"

namespace fastattn::topk_logsumexp {
extern const Kernels kAvx512 = avx512::topk_logsumexp_kernels::kKernels;
}  // namespace fastattn::topk_logsumexp
