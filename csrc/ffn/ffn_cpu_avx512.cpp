#include "ffn/ffn_cpu.h"

namespace fastattn::ffn {
extern const Kernels kAvx512 = avx512::ffn_kernels::kKernels;
}  // namespace fastattn::ffn
