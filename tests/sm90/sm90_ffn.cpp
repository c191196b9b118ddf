// Runs the feed-forward network for Hopper on the host for test_sm90_ffn.py: the unchanged kernels
// over the simulator in sm90_on_host. The product is that of ONLY_DTYPE and ONLY_STEP.
#include "machine.h"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

#include "ffn/sm90/column_sums.cuh"
#include "ffn/sm90/ffn_product_sm90.cuh"

using namespace fastattn;
using namespace fastattn::ffn;

extern "C" const char* ffn_product(const Product* problem) {
  const char* failure = ffn_product_sm90<DType::ONLY_DTYPE, Step::ONLY_STEP>(*problem, nullptr);
  on_host::synchronize();
  return failure;
}
extern "C" const char* ffn_drop_gradient(const DropGradient* problem) {
  const char* failure = drop_gradient_of<DType::ONLY_DTYPE>(*problem, nullptr);
  on_host::synchronize();
  return failure;
}
extern "C" const char* ffn_sum_columns(const SumColumns* problem) {
  const char* failure = sum_columns_of<DType::ONLY_DTYPE>(*problem, nullptr);
  on_host::synchronize();
  return failure;
}
