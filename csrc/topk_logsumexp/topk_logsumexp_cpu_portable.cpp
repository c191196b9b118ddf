#include "topk_logsumexp/topk_logsumexp_cpu.h"

namespace fastattn::topk_logsumexp {
extern const Kernels kPortable = portable::topk_logsumexp_kernels::kKernels;
}  // namespace fastattn::topk_logsumexp
