// The CPU kernels of attention, compiled once for each instruction set.
#include "attention/cpu/backward.h"
#include "attention/cpu/forward.h"
#include "attention/cpu/weights.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {
const Kernels kKernels = {forward, weights,       combine_splits, delta,          dq,
                          dkv,     all_gradients, dmask,          ddistance_bias, dsinks};
}  // namespace fastattn::attention::cpu::FASTATTN_ISA
