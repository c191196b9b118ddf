// Attention on the CPU, the forward: allocates the results and runs the kernels on torch's threads.
#include <limits>

#include "attention/binding_cpu.h"

namespace fastattn::attention::cpu {
namespace {

Forward forward_of(const Call& call, const Tensor& out, const Tensor& lse) {
  Forward a = {};
  set_problem(a, call);
  a.out = view(out, "out", a, a.batch, a.heads, query_rows(a, call), a.value_dim);
  a.lse = data_of<float>(lse, "lse", lse_rows(a, call), ScalarType::Float);
  return a;
}

void compute(Forward& a) {
  Workspace<kLocalFloats> workspace(forward_floats(a, threads()));
  launch_forward(kernels(), a, workspace.take(workspace.floats()), workspace.floats(), threads(),
                 kOnThreads);
}

// Rows that belong to no sequence get out 0 and lse -inf.
void clear_results(const Forward& a, int64_t rows) {
  const int64_t real = a.cu_seqlens_q[a.batch];
  clear_rows(a.type, a.out, a.heads, real, rows, a.value_dim);
  for (int64_t h = 0; h < a.heads; ++h) {
    std::fill(a.lse + h * rows + real, a.lse + (h + 1) * rows,
              -std::numeric_limits<float>::infinity());
  }
}

// [batch, heads, rows, columns] in the storage order of q: [batch, rows, heads, columns] where q's
// heads lie inside its rows.
Tensor new_like_query(const Tensor& q, int64_t columns) {
  const auto n = q.sizes(), stride = q.strides();
  const bool heads_in_rows = stride[1] < stride[2];
  const int64_t sizes[] = {n[0], n[1], n[2], columns};
  int64_t strides[4] = {0, 0, 0, 1};
  int64_t next = std::max<int64_t>(columns, 1);
  for (int d : {heads_in_rows ? 1 : 2, heads_in_rows ? 2 : 1, 0}) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return new_tensor({sizes, 4}, {strides, 4}, q.scalar_type());
}

// Empty out and lse.
std::pair<Tensor, Tensor> new_results(const Call& call) {
  const Tensor& q = call.q;
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2)};
  if (!call.packed()) {
    return {new_like_query(q, call.v.size(3)), new_contiguous({sizes, 3}, ScalarType::Float)};
  }
  const int64_t out_sizes[] = {sizes[0], sizes[1], call.v.size(2)};
  const int64_t lse_sizes[] = {sizes[1], sizes[0]};
  return {new_contiguous({out_sizes, 3}, q.scalar_type()),
          new_contiguous({lse_sizes, 2}, ScalarType::Float)};
}

template <bool kGiven>
void attention_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, true)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_fwd", stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  Call call{from};
  check_dimensions(call);
  const auto [out, lse] = kGiven ? std::pair(given[0], given[1]) : new_results(call);
  make_readable(call);
  Forward a = forward_of(call, out, lse);
  compute(a);
  if (call.packed()) {
    clear_results(a, call.q.size(0));
  }
  return_results(stack, out, lse);
}

// The weights are computed in fp32 and rounded once.
void compute_with_weights(const Call& call, bool average, const Tensor& out, const Tensor& lse,
                          Tensor weights) {
  Forward a = forward_of(call, out, lse);
  const int64_t count = a.batch * (average ? 1 : a.heads) * a.queries * a.keys;
  const bool is_wide = a.type == DType::kFloat32 && weights.is_contiguous();
  const Tensor wide = is_wide ? weights : new_contiguous(weights.sizes(), ScalarType::Float);
  float* const data = data_of<float>(wide, "weights", count, ScalarType::Float);
  a.weights = count > 0 ? data : nullptr;
  a.average = average;
  if (a.heads == 0) {  // no head adds to the mean
    std::fill_n(data, count, 0.0f);
  }
  compute(a);
  if (!is_wide) {
    torch::stable::copy_(weights, wide);
  }
}

template <bool kGiven>
void attention_with_weights_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, true)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_with_weights_fwd", stack, count,
                                         results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  Call call{from};
  const bool average = from.take<bool>();
  check_dimensions(call);
  check_padded(call);
  const Tensor& q = call.q;
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2), call.k.size(2)};
  const int64_t mean_sizes[] = {sizes[0], sizes[2], sizes[3]};
  const auto [out, lse] = kGiven ? std::pair(given[0], given[1]) : new_results(call);
  const Tensor weights = kGiven    ? given[2]
                         : average ? new_contiguous({mean_sizes, 3}, q.scalar_type())
                                   : new_contiguous({sizes, 4}, q.scalar_type());
  make_readable(call);
  compute_with_weights(call, average, out, lse, weights);
  return_results(stack, out, lse, weights);
}

}  // namespace
}  // namespace fastattn::attention::cpu

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention::cpu;
  m.impl("attention_fwd", &attention_fwd<false>);
  m.impl("attention_fwd.out", &attention_fwd<true>);
  m.impl("attention_with_weights_fwd", &attention_with_weights_fwd<false>);
  m.impl("attention_with_weights_fwd.out", &attention_with_weights_fwd<true>);
}
