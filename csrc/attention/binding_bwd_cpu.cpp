// Attention on the CPU, the backward.
#include <vector>

#include "attention/binding_cpu.h"

namespace fastattn::attention::cpu {
namespace {

// Strided as torch.empty_like if the last dimension is contiguous, else contiguous; of shape [0] if
// not wanted. Dense tensors with heads inside rows, as projections write them, keep their strides;
// only others call empty_like, which takes longer.
Tensor new_gradient(const Tensor& x, bool wanted) {
  if (!wanted) {
    return new_vector(0, x.scalar_type());
  }
  const auto n = x.sizes(), stride = x.strides();
  if (x.is_contiguous() || stride[n.size() - 1] != 1) {
    return new_contiguous(n, x.scalar_type());
  }
  const bool heads_in_rows = n.size() == 4 && x.numel() > 0 && stride[1] == n[3] &&
                             stride[2] == n[1] * n[3] && stride[0] == n[2] * n[1] * n[3];
  if (heads_in_rows) {
    return new_tensor(n, stride, x.scalar_type());
  }
  Tensor result = allocated(bytes_of(x), [&] { return torch::stable::empty_like(x); });
  // For an input with overlapping memory it may have other strides.
  return has_rows(result) ? result : new_contiguous(n, x.scalar_type());
}

// The results of the forward and the gradients of these, before its arguments; dweights is that of
// attention_with_weights_fwd.
struct Outputs {
  std::optional<Tensor> dout, dlse, dweights;
  Tensor out, lse;
};

// The op's results.
struct Gradients {
  Tensor dq, dk, dv, dmask, ddistance_bias, dsinks;
};

// As new_gradient; of shape [0] and the dtype `otherwise` also if the input is not given.
Tensor new_gradient(const std::optional<Tensor>& x, bool wanted, ScalarType otherwise) {
  return x && wanted ? new_gradient(*x, true) : new_vector(0, otherwise);
}

Gradients new_gradients(const Call& call, const std::vector<bool>& needs) {
  const ScalarType type = call.q.scalar_type();
  return {new_gradient(call.q, needs[0]),
          new_gradient(call.k, needs[1]),
          new_gradient(call.v, needs[2]),
          new_gradient(call.mask, needs[3], type),
          new_gradient(call.distance_bias, needs[4], type),
          new_gradient(call.sinks, needs[5], type)};
}

// Sets the gradients that kernels write.
void set_gradients(Backward& a, const Call& call, const std::vector<bool>& needs,
                   const Gradients& gradients) {
  const int64_t rows = query_rows(a, call), keys = key_rows(a, call);
  if (needs[0]) {
    a.dq = view(gradients.dq, "dq", a, a.batch, a.heads, rows, a.head_dim);
  }
  if (needs[1]) {
    a.dk = view(gradients.dk, "dk", a, a.batch, a.kv_heads, keys, a.head_dim);
  }
  if (needs[2]) {
    a.dv = view(gradients.dv, "dv", a, a.batch, a.kv_heads, keys, a.value_dim);
  }
  if (needs[3] && call.mask) {
    a.dmask = mask_view(gradients.dmask, "dmask", a);
    STD_TORCH_CHECK(std::equal(a.mask.sizes, a.mask.sizes + 4, a.dmask.sizes),
                    "dmask must have the sizes of mask");
    a.exact_delta = a.type != DType::kFloat32;
  }
  if (needs[4] && call.distance_bias) {
    const int64_t entries = a.distance_bias.count;
    a.ddistance_bias = distance_bias(gradients.ddistance_bias, "ddistance_bias", a, entries + 1, 0);
    a.ddistance_bias.first = a.distance_bias.first;
    STD_TORCH_CHECK(a.ddistance_bias.batch == a.distance_bias.batch,
                    "ddistance_bias must have the sizes of distance_bias");
  }
  if (needs[5] && call.sinks) {
    a.dsinks = data_of<float>(gradients.dsinks, "dsinks", a.heads, ScalarType::Float);
  }
}

void compute_bwd(const Call& call, const Outputs& outputs, bool average,
                 const std::vector<bool>& needs, Gradients& gradients) {
  Backward a = {};
  set_problem(a, call);
  const int64_t rows = query_rows(a, call), all_rows = lse_rows(a, call);
  a.out = view(outputs.out, "out", a, a.batch, a.heads, rows, a.value_dim);
  if (outputs.dout) {
    a.dout = view(*outputs.dout, "dout", a, a.batch, a.heads, rows, a.value_dim);
  }
  a.lse = data_of<const float>(outputs.lse, "lse", all_rows, ScalarType::Float);
  if (outputs.dlse) {
    a.dlse = data_of<const float>(*outputs.dlse, "dlse", all_rows, ScalarType::Float);
  }
  set_gradients(a, call, needs, gradients);
  if (outputs.dweights) {
    const int64_t weights = a.batch * (average ? 1 : a.heads) * a.queries * a.keys;
    a.dweights = data_of<const float>(*outputs.dweights, "dweights", weights, ScalarType::Float);
    a.average = average;
    a.exact_delta = true;  // delta includes dweights, which out lacks
  }
  Workspace<kLocalFloats> workspace(backward_floats(a, all_rows, threads()));
  launch_backward(kernels(), a, all_rows, workspace.take(workspace.floats()), workspace.floats(),
                  threads(), kOnThreads);
  if (a.dmask.type != MaskType::kNone && (all_rows == 0 || a.keys == 0)) {  // no pair adds to it
    torch::stable::zero_(gradients.dmask);
  }
  if (call.packed()) {  // rows that belong to no sequence
    const int64_t real = a.cu_seqlens_q[a.batch], real_keys = a.cu_seqlens_k[a.batch];
    clear_rows(a.type, a.dq, a.heads, real, rows, a.head_dim);
    clear_rows(a.type, a.dk, a.kv_heads, real_keys, call.k.size(0), a.head_dim);
    clear_rows(a.type, a.dv, a.kv_heads, real_keys, call.k.size(0), a.value_dim);
  }
}

// Contiguous, in fp32.
std::optional<Tensor> as_fp32(const std::optional<Tensor>& x) {
  if (!x || x->scalar_type() == ScalarType::Float) {
    return as_contiguous(x);
  }
  Tensor result = new_contiguous(x->sizes(), ScalarType::Float);
  torch::stable::copy_(result, *x);
  return result;
}

// kWeights: behind dlse comes dweights, and before needs, whether the weights were averaged.
template <bool kGiven, bool kWeights>
void attention_bwd(StableIValue* stack, uint64_t count, uint64_t results) {
  constexpr int kPlaceOfQ = kWeights ? 5 : 4;
  if (!is_supported(stack + kPlaceOfQ, false)) {
    constexpr auto kOp =
        kWeights ? "fastattn::attention_with_weights_bwd" : "fastattn::attention_bwd";
    return pass_to_other_backend<kGiven>(kOp, stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  Outputs outputs = {from.optional(), from.optional(), kWeights ? from.optional() : std::nullopt,
                     from.tensor(), from.tensor()};
  Call call{from};
  const bool average = kWeights && from.take<bool>();
  const auto needs = from.take<std::vector<bool>>();
  STD_TORCH_CHECK(needs.size() == results, "needs must have ", results, " entries");
  check_dimensions(call);
  if (kWeights) {
    check_padded(call);
  }
  Gradients g = kGiven ? Gradients{given[0], given[1], given[2], given[3], given[4], given[5]}
                       : new_gradients(call, needs);
  make_readable(call);
  outputs = {rows_of(outputs.dout), as_contiguous(outputs.dlse), as_fp32(outputs.dweights),
             rows_of(outputs.out), as_contiguous(outputs.lse)};
  compute_bwd(call, outputs, average, needs, g);
  return_results(stack, g.dq, g.dk, g.dv, g.dmask, g.ddistance_bias, g.dsinks);
}

}  // namespace
}  // namespace fastattn::attention::cpu

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention::cpu;
  m.impl("attention_bwd", &attention_bwd<false, false>);
  m.impl("attention_bwd.out", &attention_bwd<true, false>);
  m.impl("attention_with_weights_bwd", &attention_bwd<false, true>);
  m.impl("attention_with_weights_bwd.out", &attention_bwd<true, true>);
}
