// One instance, see attention_fwd_sm90.cuh.
#include "attention/attention_fwd_sm90.cuh"

template const char* fastattn::attention::attention_fwd_sm90<fastattn::DType::kFloat16, 256, false>(
    const ForwardProblem&, cudaStream_t);
