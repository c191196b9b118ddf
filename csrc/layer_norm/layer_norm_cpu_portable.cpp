#include "layer_norm/layer_norm_cpu.h"

namespace fastattn::norm {
extern const Kernels kPortable = {portable::forward, portable::backward, portable::reduce,
                                  portable::to_float};
}  // namespace fastattn::norm
