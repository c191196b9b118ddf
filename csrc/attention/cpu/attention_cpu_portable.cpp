#include "attention/cpu/forward.h"

namespace fastattn::attention {
extern const Kernels kPortable = {portable::forward, portable::join_splits, portable::delta,
                                  portable::dq,      portable::dkv,         portable::all_gradients,
                                  portable::dmask};
}  // namespace fastattn::attention
