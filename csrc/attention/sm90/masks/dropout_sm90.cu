// Hashes every pair of columns once per call, instead of once per row in the forward.
#include "attention/attention.h"
#include "common/dropout.h"

namespace fastattn::attention {
namespace {

__global__ void hash_columns_kernel(Dropout dropout, int units) {
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit < units) {
    dropout.column_keys[unit] = column_key(dropout, unit);
  }
}

}  // namespace

const char* hash_columns(const Dropout& dropout, int units, cuda::Stream stream) {
  constexpr int kThreads = 128;
  if (units == 0) {
    return nullptr;
  }
  hash_columns_kernel<<<(units + kThreads - 1) / kThreads, kThreads, 0, stream>>>(dropout, units);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
