// The CPU kernels of attention, compiled once for each instruction set.
#include "attention/cpu/backward.h"
#include "attention/cpu/forward.h"

namespace fastattn::attention::FASTATTN_ISA {
const Kernels kKernels = {forward, combine_splits, delta, dq, dkv, all_gradients, dmask, dsinks};
}  // namespace fastattn::attention::FASTATTN_ISA
