// Launches column_sums.cuh.
#include "ffn/sm90/column_sums.cuh"

namespace fastattn::ffn {

const char* drop_gradient(const DropGradient& problem, cuda::Stream stream) {
  return problem.dtype == DType::kBFloat16 ? drop_gradient_of<DType::kBFloat16>(problem, stream)
                                           : drop_gradient_of<DType::kFloat16>(problem, stream);
}

const char* sum_columns(const SumColumns& problem, cuda::Stream stream) {
  return problem.dtype == DType::kBFloat16 ? sum_columns_of<DType::kBFloat16>(problem, stream)
                                           : sum_columns_of<DType::kFloat16>(problem, stream);
}

}  // namespace fastattn::ffn
