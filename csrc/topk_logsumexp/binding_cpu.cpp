// topk_logsumexp on the CPU: from tensors to a problem, and the split over torch's threads.
#include <algorithm>

#include "cpu/binding.h"
#include "topk_logsumexp/topk_logsumexp.h"

namespace fastattn::topk_logsumexp {
namespace {

// Logits below which another thread costs more than it saves.
constexpr int64_t kGrain = 1 << 15;

using Results = std::tuple<Tensor, Tensor, Tensor>;

Results topk_logsumexp_out(Tensor logits, int64_t first, int64_t count, Tensor logsumexp,
                           Tensor values, Tensor indices) {
  STD_TORCH_CHECK(logits.dim() == 2 && values.dim() == 2,
                  "logits and values must have two dimensions");
  logits = as_contiguous(logits);
  Problem p = {};
  p.rows = logits.size(0);
  p.V = logits.size(1);
  p.first = first;
  p.count = count;
  STD_TORCH_CHECK(first >= 0 && p.count >= 1 && p.count <= p.V - first,
                  "count must be from 1 to the columns from first on");
  p.logits = data_of<const float>(logits, "logits", p.rows * p.V, ScalarType::Float);
  p.logsumexp = data_of<float>(logsumexp, "logsumexp", p.rows, ScalarType::Float);
  p.values = data_of<float>(values, "values", p.rows * p.count, ScalarType::Float);
  p.indices = data_of<int64_t>(indices, "indices", p.rows * p.count, ScalarType::Long);
  const Kernels& isa = kernels();
  torch::stable::parallel_for(0, p.rows, std::max<int64_t>(1, kGrain / p.V),
                              [&](int64_t begin, int64_t end) { isa.run(p, begin, end); });
  return {logsumexp, values, indices};
}

Results topk_logsumexp(Tensor logits, int64_t first, int64_t count) {
  STD_TORCH_CHECK(logits.dim() == 2, "logits must have two dimensions");
  const int64_t rows = logits.size(0), sizes[] = {rows, count};
  return topk_logsumexp_out(logits, first, count, new_vector(rows, ScalarType::Float),
                            new_contiguous({sizes, 2}, ScalarType::Float),
                            new_contiguous({sizes, 2}, ScalarType::Long));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  FASTATTN_CPU_OP(m, topk_logsumexp, TensorOnStack(stack[0]).scalar_type() == ScalarType::Float);
}

}  // namespace fastattn::topk_logsumexp
