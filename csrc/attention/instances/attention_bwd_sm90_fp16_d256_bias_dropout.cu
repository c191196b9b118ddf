// One instance, see attention_bwd_sm90.cuh.
#include "attention/attention_bwd_sm90.cuh"

template const char* fastattn::attention::attention_bwd_sm90<
    fastattn::DType::kFloat16, 256, fastattn::attention::Variant::kBiasDropout>(
    const BackwardProblem&, cudaStream_t);
