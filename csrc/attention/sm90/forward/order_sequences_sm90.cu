// Launches order_sequences.cuh.
#include "attention/sm90/forward/order_sequences.cuh"

namespace fastattn::attention {

const char* order_sequences(const Packing& packing, cuda::Stream stream) {
  order_sequences_kernel<<<1, kOrderThreads, 0, stream>>>(packing);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
