// Launches a kernel, possibly by programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

namespace fastattn::sm90 {

// dependent: the kernel may start before the previous one ends, and waits for it itself.
template <class Kernel, class Arguments>
cudaError_t launch(Kernel kernel, int blocks, int threads, int shared_bytes, cudaStream_t stream,
                   const Arguments& args, bool dependent) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace fastattn::sm90
