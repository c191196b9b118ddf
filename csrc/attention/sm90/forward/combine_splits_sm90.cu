// Launches combine_splits.cuh as a programmatic dependent launch: its thread blocks may start
// before the forward ends, and wait for it.
#include <cuda_runtime.h>

#include "attention/sm90/forward/combine_splits.cuh"

namespace fastattn::attention {

template <DType kType>
const char* combine_splits(const ForwardProblem& p, cuda::Stream stream) {
  const CombineArguments args = combine_arguments(p);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>((args.rows + kCombineWarps - 1) / kCombineWarps);
  config.blockDim = kCombineThreads;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, combine_splits_kernel<typename TypeOf<kType>::Element>, args);
  return error ? cudaGetErrorString(error) : nullptr;
}

template const char* combine_splits<DType::kBFloat16>(const ForwardProblem&, cuda::Stream);
template const char* combine_splits<DType::kFloat16>(const ForwardProblem&, cuda::Stream);

}  // namespace fastattn::attention
