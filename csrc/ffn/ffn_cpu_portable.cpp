#include "ffn/ffn_cpu.h"

namespace fastattn::ffn {
extern const Kernels kPortable = portable::ffn_kernels::kKernels;
}  // namespace fastattn::ffn
