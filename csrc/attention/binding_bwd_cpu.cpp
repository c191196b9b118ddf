// Attention on the CPU, the backward.
#include <vector>

#include "attention/binding_cpu.h"

namespace fastattn::attention {
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

// The gradients of the forward's results, and these.
struct OutputGradients {
  Arguments& from;
  std::optional<Tensor> dout = from.optional(rows_of), dlse = from.optional(as_contiguous);
};
struct Outputs {
  Arguments& from;
  Tensor out = from.tensor(rows_of), lse = from.tensor(as_contiguous);
};
struct Gradients {
  Tensor dq, dk, dv;
};
// The last results: the gradients of what changes the scores.
struct ScoreGradients {
  Tensor ddistance_bias, dsinks;
};

template <bool kGiven>
Gradients gradients_of(const std::vector<Tensor>& given, const Operands& x,
                       const std::vector<bool>& needs) {
  if (kGiven) {
    return {given[0], given[1], given[2]};
  }
  return {new_gradient(x.q, needs[0]), new_gradient(x.k, needs[1]), new_gradient(x.v, needs[2])};
}

// As new_gradient; of shape [0] and the dtype `otherwise` also if the input is not given.
Tensor new_gradient(const std::optional<Tensor>& x, bool wanted, ScalarType otherwise) {
  return x && wanted ? new_gradient(*x, true) : new_vector(0, otherwise);
}

template <bool kGiven>
ScoreGradients score_gradients_of(const std::vector<Tensor>& given, const Options& options,
                                  const std::vector<bool>& needs, ScalarType type) {
  if (kGiven) {
    return {given[given.size() - 2], given.back()};
  }
  const size_t first = needs.size() - 2;
  return {new_gradient(options.distance_bias, needs[first], type),
          new_gradient(options.sinks, needs[first + 1], type)};
}

void set_score_gradients(Backward& a, const Options& options, const std::vector<bool>& needs,
                         const ScoreGradients& gradients) {
  if (options.distance_bias && needs[needs.size() - 2]) {
    const int64_t entries = a.distance_bias.count;
    a.ddistance_bias = distance_bias(gradients.ddistance_bias, "ddistance_bias", a, entries + 1, 0);
    a.ddistance_bias.first = a.distance_bias.first;
    STD_TORCH_CHECK(a.ddistance_bias.batch == a.distance_bias.batch,
                    "ddistance_bias must have the sizes of distance_bias");
  }
  if (options.sinks && needs.back()) {
    a.dsinks = data_of<float>(gradients.dsinks, "dsinks", a.heads, ScalarType::Float);
  }
}

// lse_rows: rows of lse in all heads.
void compute(Backward& a, int64_t lse_rows) {
  Workspace<kLocalFloats> workspace(backward_floats(a, lse_rows, threads()));
  launch_backward(kernels(), a, lse_rows, workspace.take(workspace.floats()), workspace.floats(),
                  threads(), kOnThreads);
}

std::optional<Tensor> wanted(const Tensor& gradient, bool needed) {
  return needed ? std::optional(gradient) : std::nullopt;
}

// dweights: in fp32, or none.
void compute_bwd(const OutputGradients& d, const std::optional<Tensor>& dweights, bool average,
                 const Operands& x, const Masks& masks, const Outputs& outputs,
                 const Options& options, const std::vector<bool>& needs, const Gradients& gradients,
                 Tensor dmask, const ScoreGradients& of_scores) {
  const Tensor rows[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  const auto& [dq, dk, dv] = gradients;
  Backward a = {};
  static_cast<Problem&>(a) = problem(rows, masks, options);
  const int64_t lse_rows = a.batch * a.heads * a.queries;
  const auto view_if = [&](const std::optional<Tensor>& tensor, const char* name, int64_t heads,
                           int64_t count, int64_t columns) {
    return tensor ? view(*tensor, name, a.type, a.batch, heads, count, columns) : TensorView{};
  };
  a.out = view(outputs.out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.dout = view_if(d.dout, "dout", a.heads, a.queries, a.value_dim);
  a.dq = view_if(wanted(dq, needs[0]), "dq", a.heads, a.queries, a.head_dim);
  a.dk = view_if(wanted(dk, needs[1]), "dk", a.kv_heads, a.keys, a.head_dim);
  a.dv = view_if(wanted(dv, needs[2]), "dv", a.kv_heads, a.keys, a.value_dim);
  a.lse = data_of<const float>(outputs.lse, "lse", lse_rows, ScalarType::Float);
  a.dlse = d.dlse ? data_of<const float>(*d.dlse, "dlse", lse_rows, ScalarType::Float) : nullptr;
  if (needs[3] && masks.mask) {
    a.dmask = mask_view(dmask, "dmask", a);
    STD_TORCH_CHECK(std::equal(a.mask.sizes, a.mask.sizes + 4, a.dmask.sizes),
                    "dmask must have the sizes of mask");
    a.exact_delta = a.type != DType::kFloat32;
  }
  if (dweights) {
    const int64_t rows_of_weights = a.batch * (average ? 1 : a.heads) * a.queries;
    a.dweights =
        data_of<const float>(*dweights, "dweights", rows_of_weights * a.keys, ScalarType::Float);
    a.average = average;
    a.exact_delta = true;  // delta includes dweights, which out lacks
  }
  set_score_gradients(a, options, needs, of_scores);
  compute(a, lse_rows);
  if (needs[3] && masks.mask && (lse_rows == 0 || a.keys == 0)) {  // no pair adds to it
    torch::stable::zero_(dmask);
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

// The last arguments of the backward: which gradients are needed.
std::vector<bool> needs_of(Arguments& from, size_t results) {
  std::vector<bool> needs = from.take<std::vector<bool>>();
  STD_TORCH_CHECK(needs.size() == results, "needs must have ", results, " entries");
  return needs;
}

// Behind dout and dlse.
constexpr int kFirstOfBackward = 2;

// kWeights: behind dlse comes dweights, and before needs, whether the weights were averaged.
template <bool kGiven, bool kWeights>
void attention_bwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack + kFirstOfBackward + kWeights, 4)) {
    constexpr auto kOp =
        kWeights ? "fastattn::attention_with_weights_bwd" : "fastattn::attention_bwd";
    return pass_to_other_backend<kGiven>(kOp, stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  const OutputGradients d{from};
  const std::optional<Tensor> dweights = kWeights ? from.optional(as_fp32) : std::nullopt;
  const Operands x{from};
  const Masks masks{from};
  const Outputs outputs{from};
  const Options options{from};
  const bool average = kWeights && from.take<bool>();
  const std::vector<bool> needs = needs_of(from, results);
  from.check();
  check_dimensions(x, 4);
  const Gradients g = gradients_of<kGiven>(given, x, needs);
  const ScalarType type = x.q.scalar_type();
  const Tensor dmask = kGiven ? given[3] : new_gradient(masks.mask, needs[3], type);
  const ScoreGradients of_scores = score_gradients_of<kGiven>(given, options, needs, type);
  compute_bwd(d, dweights, average, x, masks, outputs, options, needs, g, dmask, of_scores);
  return_results(stack, g.dq, g.dk, g.dv, dmask, of_scores.ddistance_bias, of_scores.dsinks);
}

void compute_varlen_bwd(const OutputGradients& d, const Operands& x, const Packing& packing,
                        const Outputs& outputs, const Longest& longest_of, const Options& options,
                        const std::vector<bool>& needs, const Gradients& gradients,
                        const ScoreGradients& of_scores) {
  const Tensor tensors[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  const int64_t rows = x.q.size(0), key_rows = x.k.size(0);
  Backward a = {};
  static_cast<Problem&>(a) = packed_problem(tensors, packing, longest_of, options);
  const int64_t lse_rows = a.heads * rows;
  const auto view_if = [&](const std::optional<Tensor>& tensor, const char* name, int64_t count,
                           int64_t heads, int64_t columns) {
    return tensor ? packed_view(*tensor, name, a.type, count, heads, columns) : TensorView{};
  };
  a.out = packed_view(outputs.out, "out", a.type, rows, a.heads, a.value_dim);
  a.dout = view_if(d.dout, "dout", rows, a.heads, a.value_dim);
  a.dq = view_if(wanted(gradients.dq, needs[0]), "dq", rows, a.heads, a.head_dim);
  a.dk = view_if(wanted(gradients.dk, needs[1]), "dk", key_rows, a.kv_heads, a.head_dim);
  a.dv = view_if(wanted(gradients.dv, needs[2]), "dv", key_rows, a.kv_heads, a.value_dim);
  a.lse = data_of<const float>(outputs.lse, "lse", lse_rows, ScalarType::Float);
  a.dlse = d.dlse ? data_of<const float>(*d.dlse, "dlse", lse_rows, ScalarType::Float) : nullptr;
  set_score_gradients(a, options, needs, of_scores);
  compute(a, lse_rows);
  const int64_t real = a.cu_seqlens_q[a.batch], real_keys = a.cu_seqlens_k[a.batch];
  clear_rows(a.type, a.dq, a.heads, real, rows, a.head_dim);
  clear_rows(a.type, a.dk, a.kv_heads, real_keys, key_rows, a.head_dim);
  clear_rows(a.type, a.dv, a.kv_heads, real_keys, key_rows, a.value_dim);
}

template <bool kGiven>
void attention_varlen_bwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack + kFirstOfBackward, 3)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_varlen_bwd", stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  const OutputGradients d{from};
  const Operands x{from};
  const Packing packing{from};
  const Outputs outputs{from};
  const Longest longest_of{from};
  const Options options{from};
  const std::vector<bool> needs = needs_of(from, results);
  from.check();
  check_dimensions(x, 3);
  const Gradients g = gradients_of<kGiven>(given, x, needs);
  const ScoreGradients of_scores =
      score_gradients_of<kGiven>(given, options, needs, x.q.scalar_type());
  compute_varlen_bwd(d, x, packing, outputs, longest_of, options, needs, g, of_scores);
  return_results(stack, g.dq, g.dk, g.dv, of_scores.ddistance_bias, of_scores.dsinks);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention;
  m.impl("attention_bwd", &attention_bwd<false, false>);
  m.impl("attention_bwd.out", &attention_bwd<true, false>);
  m.impl("attention_with_weights_bwd", &attention_bwd<false, true>);
  m.impl("attention_with_weights_bwd.out", &attention_bwd<true, true>);
  m.impl("attention_varlen_bwd", &attention_varlen_bwd<false>);
  m.impl("attention_varlen_bwd.out", &attention_varlen_bwd<true>);
}
