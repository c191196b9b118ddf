// One instance, see attention_bwd_sm90.cuh.
#include "attention/attention_bwd_sm90.cuh"

template const char* fastattn::attention::attention_bwd_sm90<
    fastattn::DType::kBFloat16, 128, fastattn::attention::Variant::kMaskDropout>(
    const BackwardProblem&, cudaStream_t);
