#include "ffn/ffn_cpu.h"

namespace fastattn::ffn {
extern const Kernels kAvx2 = avx2::ffn_kernels::kKernels;
}  // namespace fastattn::ffn
