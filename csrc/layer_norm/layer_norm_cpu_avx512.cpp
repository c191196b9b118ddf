#include "layer_norm/layer_norm_cpu.h"

namespace fastattn::norm {
extern const Kernels kAvx512 = {avx512::forward, avx512::backward, avx512::reduce,
                                avx512::to_float};
}  // namespace fastattn::norm
