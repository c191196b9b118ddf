// best_tokens on the CPU: from tensors to a problem, and the split over torch's threads.
#include <algorithm>

#include "best_tokens/best_tokens.h"
#include "common/torch_binding.h"

namespace fastattn::best_tokens {
namespace {

// Logits below which another thread costs more than it brings.
constexpr int64_t kGrain = 1 << 15;

using Results = std::tuple<Tensor, Tensor, Tensor>;

Results best_tokens_out(Tensor logits, int64_t first, int64_t count, Tensor log_z, Tensor best,
                        Tensor tokens) {
  if (logits.scalar_type() != ScalarType::Float) {
    return choose_elsewhere_into(std::tuple(log_z, best, tokens), "fastattn::best_tokens", logits,
                                 first, count);
  }
  STD_TORCH_CHECK(logits.dim() == 2 && best.dim() == 2, "logits and best must have two dimensions");
  logits = as_contiguous(logits);
  Problem p = {};
  p.rows = logits.size(0);
  p.V = logits.size(1);
  p.first = first;
  p.count = count;
  STD_TORCH_CHECK(first >= 0 && p.count >= 1 && p.count <= p.V - first,
                  "count must be from 1 to the tokens from first on");
  p.logits = data_of<const float>(logits, "logits", p.rows * p.V, ScalarType::Float);
  p.log_z = data_of<float>(log_z, "log_z", p.rows, ScalarType::Float);
  p.best = data_of<float>(best, "best", p.rows * p.count, ScalarType::Float);
  p.tokens = data_of<int64_t>(tokens, "tokens", p.rows * p.count, ScalarType::Long);
  const Kernels& isa = kernels();
  torch::stable::parallel_for(0, p.rows, std::max<int64_t>(1, kGrain / p.V),
                              [&](int64_t begin, int64_t end) { isa.search(p, begin, end); });
  return {log_z, best, tokens};
}

Results best_tokens(Tensor logits, int64_t first, int64_t count) {
  if (logits.scalar_type() != ScalarType::Float) {
    return choose_elsewhere<Results>("fastattn::best_tokens", logits, first, count);
  }
  STD_TORCH_CHECK(logits.dim() == 2, "logits must have two dimensions");
  const int64_t rows = logits.size(0), sizes[] = {rows, count};
  return best_tokens_out(logits, first, count, new_vector(rows, ScalarType::Float),
                         new_contiguous({sizes, 2}, ScalarType::Float),
                         new_contiguous({sizes, 2}, ScalarType::Long));
}

}  // namespace
}  // namespace fastattn::best_tokens

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  m.impl("best_tokens", TORCH_BOX(&fastattn::best_tokens::best_tokens));
  m.impl("best_tokens.out", TORCH_BOX(&fastattn::best_tokens::best_tokens_out));
}
