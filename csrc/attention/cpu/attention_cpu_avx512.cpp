#include "attention/cpu/forward.h"

namespace fastattn::attention {
extern const Kernels kAvx512 = {avx512::forward, avx512::join_splits,   avx512::delta, avx512::dq,
                                avx512::dkv,     avx512::all_gradients, avx512::dmask};
}  // namespace fastattn::attention
