// One instance of the kernels: the build compiles this file once for each row of INSTANCES in
// setup.py, which defines the macros.
#include "layer_norm/norm_fwd.cuh"

namespace fastattn::norm {
template const char* norm_fwd<DType::FASTATTN_DTYPE, DType::FASTATTN_PARAMETER_DTYPE>(
    const ForwardProblem&, cuda::Stream);
}  // namespace fastattn::norm
