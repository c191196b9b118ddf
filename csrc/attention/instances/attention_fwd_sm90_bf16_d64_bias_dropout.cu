// One instance, see attention_fwd_sm90.cuh.
#include "attention/attention_fwd_sm90.cuh"

namespace fastattn::attention {
template const char* attention_fwd_sm90<DType::kBFloat16, 64, Variant::kBiasDropout>(
    const ForwardProblem&, cudaStream_t);
}  // namespace fastattn::attention
