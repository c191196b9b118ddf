// Launches on the simulator.
#pragma once

#include <cuda_runtime.h>

#include "machine.h"

namespace fastattn::sm90 {

template <class Kernel, class Arguments>
cudaError_t launch(Kernel kernel, int blocks, int threads, int shared_bytes, cudaStream_t,
                   const Arguments& args, bool dependent) {
  on_host::enqueue({blocks, threads, [kernel, args] { kernel(args); },
                    static_cast<uint32_t>(shared_bytes), dependent});
  return cudaSuccess;
}

}  // namespace fastattn::sm90
