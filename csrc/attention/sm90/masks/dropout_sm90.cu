// Hashes every pair of columns once per call, instead of once per row in the forward.
#include "attention/attention.h"
#include "common/dropout.h"

namespace fastattn::attention {
namespace {

__global__ void hash_columns_kernel(uint32_t* keys, int units, const int64_t* seed,
                                    uint32_t stream) {
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit < units) {
    keys[unit] = dropout::column_key(*seed, stream, unit);
  }
}

}  // namespace

const char* hash_columns(const Dropout& dropout, int units, cuda::Stream stream) {
  constexpr int kThreads = 128;
  if (units == 0) {
    return nullptr;
  }
  hash_columns_kernel<<<(units + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
      dropout.column_keys, units, dropout.seed, dropout.stream);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
