// Attention on the CPU with tangents, for forward-mode differentiation.
#include "attention/binding_cpu.h"

namespace fastattn::attention {
namespace {

// Whether the kernel has tangents for the changes of scores: not with a soft cap, nor of
// distance_bias.
bool has_tangents(const StableIValue* arguments, int64_t dims) {
  constexpr int kSoftcap = 9, kTangents = 17;
  const int bias = dims == 4 ? 4 : 3;
  return !arguments[kSoftcap] && !arguments[kTangents + bias];
}

// The last arguments.
struct InputTangents {
  InputTangents(Arguments& from, bool has_mask)
      : q(rows_of(from.optional())),
        k(rows_of(from.optional())),
        v(rows_of(from.optional())),
        mask(has_mask ? from.optional() : std::nullopt),
        distance_bias(from.optional()),
        sinks(as_contiguous(from.optional())) {}

  std::optional<Tensor> q, k, v, mask;
  std::optional<Tensor> distance_bias;  // absent: has_tangents()
  std::optional<Tensor> sinks;
};
struct Results {
  Tensor out, lse, out_tangent, lse_tangent;
};

template <bool kGiven, class NewOut, class NewLse>
Results results_of(Arguments& from, const NewOut& new_out, const NewLse& new_lse) {
  if (kGiven) {
    return {from.tensor(), from.tensor(), from.tensor(), from.tensor()};
  }
  return {new_out(), new_lse(), new_out(), new_lse()};
}

void set_sinks_tangent(Tangents& a, const InputTangents& tangents) {
  if (tangents.sinks) {
    STD_TORCH_CHECK(a.sinks, "sinks must be given with sinks_tangent");
    a.sinks_tangent =
        data_of<const float>(*tangents.sinks, "sinks_tangent", a.heads, ScalarType::Float);
  }
}

void compute(Tangents& a) {
  Workspace<kLocalFloats> workspace(tangents_floats(a, threads()));
  launch_tangents(kernels(), a, workspace.take(workspace.floats()), workspace.floats(), threads(),
                  kOnThreads);
}

void compute_jvp(const Operands& x, const Masks& masks, const Options& options,
                 const InputTangents& tangents, const Results& y) {
  const Tensor rows[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  Tangents a = {};
  static_cast<Problem&>(a) = problem(rows, masks, options);
  const int64_t lse_rows = a.batch * a.heads * a.queries;
  const auto view_if = [&](const std::optional<Tensor>& tensor, const char* name, int64_t heads,
                           int64_t count, int64_t columns) {
    return tensor ? view(*tensor, name, a.type, a.batch, heads, count, columns) : TensorView{};
  };
  a.out = view(y.out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = data_of<float>(y.lse, "lse", lse_rows, ScalarType::Float);
  a.out_tangent =
      view(y.out_tangent, "out_tangent", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse_tangent = data_of<float>(y.lse_tangent, "lse_tangent", lse_rows, ScalarType::Float);
  a.q_tangent = view_if(tangents.q, "q_tangent", a.heads, a.queries, a.head_dim);
  a.k_tangent = view_if(tangents.k, "k_tangent", a.kv_heads, a.keys, a.head_dim);
  a.v_tangent = view_if(tangents.v, "v_tangent", a.kv_heads, a.keys, a.value_dim);
  if (tangents.mask) {
    a.mask_tangent = mask_view(*tangents.mask, "mask_tangent", a);
    STD_TORCH_CHECK(a.mask.type == a.mask_tangent.type && a.mask.type != MaskType::kBool &&
                        std::equal(a.mask.sizes, a.mask.sizes + 4, a.mask_tangent.sizes),
                    "mask_tangent must have the sizes and the type of mask, not bool");
  }
  set_sinks_tangent(a, tangents);
  compute(a);
}

template <bool kGiven>
void attention_jvp(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, 4) || !has_tangents(stack, 4)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_jvp", stack, count, results);
  }
  Arguments from(stack);
  const Operands x{from};
  const Masks masks{from};
  const Options options{from};
  const InputTangents tangents(from, true);
  check_dimensions(x, 4);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.q.size(2)};
  const auto new_out = [&] { return new_like_query(x.q, x.v.size(3)); };
  const auto new_lse = [&] { return new_contiguous({sizes, 3}, ScalarType::Float); };
  const Results y = results_of<kGiven>(from, new_out, new_lse);
  compute_jvp(x, masks, options, tangents, y);
  return_results(stack, y.out, y.lse, y.out_tangent, y.lse_tangent);
}

void compute_varlen_jvp(const Operands& x, const Packing& packing, const Longest& longest_of,
                        const Options& options, const InputTangents& tangents, const Results& y) {
  const Tensor tensors[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  const int64_t rows = x.q.size(0), key_rows = x.k.size(0);
  Tangents a = {};
  static_cast<Problem&>(a) = packed_problem(tensors, packing, longest_of, options);
  const auto view_if = [&](const std::optional<Tensor>& tensor, const char* name, int64_t count,
                           int64_t heads, int64_t columns) {
    return tensor ? packed_view(*tensor, name, a.type, count, heads, columns) : TensorView{};
  };
  a.out = packed_view(y.out, "out", a.type, rows, a.heads, a.value_dim);
  a.lse = data_of<float>(y.lse, "lse", a.heads * rows, ScalarType::Float);
  a.out_tangent = packed_view(y.out_tangent, "out_tangent", a.type, rows, a.heads, a.value_dim);
  a.lse_tangent = data_of<float>(y.lse_tangent, "lse_tangent", a.heads * rows, ScalarType::Float);
  a.q_tangent = view_if(tangents.q, "q_tangent", rows, a.heads, a.head_dim);
  a.k_tangent = view_if(tangents.k, "k_tangent", key_rows, a.kv_heads, a.head_dim);
  a.v_tangent = view_if(tangents.v, "v_tangent", key_rows, a.kv_heads, a.value_dim);
  set_sinks_tangent(a, tangents);
  compute(a);
  clear_results(a, a.out, a.lse, rows, -std::numeric_limits<float>::infinity());
  clear_results(a, a.out_tangent, a.lse_tangent, rows, 0.0f);
}

template <bool kGiven>
void attention_varlen_jvp(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, 3) || !has_tangents(stack, 3)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_varlen_jvp", stack, count, results);
  }
  Arguments from(stack);
  const Operands x{from};
  const Packing packing{from};
  const Longest longest_of{from};
  const Options options{from};
  const InputTangents tangents(from, false);
  check_dimensions(x, 3);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.v.size(2)};
  const int64_t rows[] = {x.q.size(1), x.q.size(0)};
  const auto new_out = [&] { return new_contiguous({sizes, 3}, x.q.scalar_type()); };
  const auto new_lse = [&] { return new_contiguous({rows, 2}, ScalarType::Float); };
  const Results y = results_of<kGiven>(from, new_out, new_lse);
  compute_varlen_jvp(x, packing, longest_of, options, tangents, y);
  return_results(stack, y.out, y.lse, y.out_tangent, y.lse_tangent);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention;
  m.impl("attention_jvp", &attention_jvp<false>);
  m.impl("attention_jvp.out", &attention_jvp<true>);
  m.impl("attention_varlen_jvp", &attention_varlen_jvp<false>);
  m.impl("attention_varlen_jvp.out", &attention_varlen_jvp<true>);
}
