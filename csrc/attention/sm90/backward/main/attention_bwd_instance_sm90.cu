// One instance of the kernel: the build compiles this file for each row of INSTANCES in setup.py,
// which defines the macros; the variants of a dtype and head dim are compiled together.
#include "attention/sm90/backward/main/attention_bwd_sm90.cuh"

namespace fastattn::attention {
template const char* attention_bwd_sm90<DType::FASTATTN_DTYPE, FASTATTN_HEAD_DIM,
                                        Variant::FASTATTN_VARIANT>(const BackwardProblem&,
                                                                   cudaStream_t);
}  // namespace fastattn::attention
