#include "layer_norm/layer_norm_cpu.h"

namespace fastattn::norm {
extern const Kernels kAvx2 = {avx2::forward, avx2::backward, avx2::reduce, avx2::to_float};
}  // namespace fastattn::norm
