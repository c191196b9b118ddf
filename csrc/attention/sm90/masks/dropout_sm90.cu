// Launches hash_columns.cuh.
#include "attention/sm90/masks/hash_columns.cuh"

namespace fastattn::attention {

const char* hash_columns(const Dropout& dropout, int units, cuda::Stream stream, int* counter) {
  const int blocks = larger(ceil_div(units, kHashThreads), counter ? 1 : 0);
  if (blocks == 0) {
    return nullptr;
  }
#ifdef FASTATTN_TRIAL_FWD_COUNTER
  hash_columns_kernel<<<blocks, kHashThreads, 0, stream>>>(dropout, units, counter);
#else
  hash_columns_kernel<<<blocks, kHashThreads, 0, stream>>>(dropout, units);
#endif
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
