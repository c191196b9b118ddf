#include "attention/cpu/forward.h"

namespace fastattn::attention {
extern const Kernels kAvx2 = {avx2::forward, avx2::join_splits,   avx2::delta, avx2::dq,
                              avx2::dkv,     avx2::all_gradients, avx2::dmask};
}  // namespace fastattn::attention
