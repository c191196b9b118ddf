// fastattn_sm90's attention backward.
#include "attention/binding_sm90.h"
#include "attention/sm90/backward/bwd_workspace.h"

namespace fastattn::attention {
namespace {

// gradient: like the mask; none, or without elements, if it is not needed.
MaskGradient mask_gradient_of(const std::optional<Tensor>& gradient, const Call& call) {
  MaskGradient result;
  if (!gradient || gradient->numel() == 0) {
    return result;
  }
  const Tensor& dmask = *gradient;
  STD_TORCH_CHECK(call.mask && dmask.is_cuda() &&
                      dmask.get_device_index() == call.q.get_device_index() &&
                      dmask.scalar_type() == call.mask->scalar_type() && dmask.dim() == 4 &&
                      dmask.scalar_type() != ScalarType::Bool,
                  "dmask must be like an additive mask");
  result.data = dmask.data_ptr();
  result.type = mask_type_of(dmask);
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(dmask.size(i) == call.mask->size(i), "dmask must have mask's size ",
                    call.mask->size(i), " in dimension ", i, ", got ", dmask.size(i));
    result.sizes[i] = static_cast<int>(dmask.size(i));
    result.strides[i] = dmask.stride(i);
  }
  return result;
}

// ddistance_bias: like distance_bias without padding, or without elements if it is not needed.
DistanceGradient distance_gradient_of(const Tensor& gradient, const Call& call, const Problem& p) {
  DistanceGradient result;
  if (gradient.numel() == 0) {
    return result;
  }
  STD_TORCH_CHECK(call.distance_bias && gradient.dim() == 3 &&
                      gradient.size(0) == call.distance_bias->size(0) &&
                      gradient.size(1) == p.heads &&
                      gradient.size(2) + 2 * kDistancePadding == call.distance_bias->size(2),
                  "ddistance_bias must be like distance_bias without padding");
  result.data =
      cuda_data_of<float>(gradient, "ddistance_bias", call.q, ScalarType::Float, gradient.numel());
  result.batches = static_cast<int>(gradient.size(0));
  result.rows = gradient.size(0) * gradient.size(1);
  result.entries = static_cast<int>(gradient.size(2));
  result.bands = last_band(result.entries) - kFirstBand + 1;
  STD_TORCH_CHECK(result.rows * result.bands < kMaxTiles, "distance_bias is too large");
  return result;
}

void attention_bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Call call{arguments};
  const Tensor out = arguments.tensor(), lse = arguments.tensor(), dout = arguments.tensor();
  const std::optional<Tensor> dlse = arguments.optional();
  const bool in_order = arguments.take<bool>();
  const Tensor dq = arguments.tensor(), dk = arguments.tensor(), dv = arguments.tensor();
  const std::optional<Tensor> dmask = arguments.optional();
  const Tensor ddistance_bias = arguments.tensor(), dsinks = arguments.tensor();
  const int num_sms = static_cast<int>(arguments.take<int64_t>());
  const std::optional<Tensor> workspace = arguments.optional();

  STD_TORCH_CHECK(call.has_queries() && !call.block_table,
                  "there must be queries, and no block_table");
  BackwardProblem p;
  set_problem(p, call, true);
  p.out = view_of_queries(out, "out", call, p, p.value_dim);
  p.dout = view_of_queries(dout, "dout", call, p, p.value_dim);
  // A gradient that is not needed has no elements.
  p.dq = dq.numel() ? view_of_queries(dq, "dq", call, p, p.head_dim) : TensorView{};
  p.dk = dk.numel() ? view_of_keys(dk, "dk", call, p, p.head_dim) : TensorView{};
  p.dv = dv.numel() ? view_of_keys(dv, "dv", call, p, p.value_dim) : TensorView{};
  const int64_t rows = int64_t{1} * p.batch * p.heads * p.queries;
  p.lse = cuda_data_of<float>(lse, "lse", call.q, ScalarType::Float, rows);
  p.dlse = dlse ? cuda_data_of<float>(*dlse, "dlse", call.q, ScalarType::Float, rows) : nullptr;
  p.dmask = mask_gradient_of(dmask, call);
  p.ddistance = distance_gradient_of(ddistance_bias, call, p);
  STD_TORCH_CHECK(p.sinks.data || dsinks.numel() == 0, "dsinks needs sinks");
  p.dsinks = dsinks.numel()
                 ? cuda_data_of<float>(dsinks, "dsinks", call.q, ScalarType::Float, p.heads)
                 : nullptr;
  stack[0] = torch::stable::detail::from(launch(
      p, variant_of(p, false), call.q, workspace,
      [&](WorkspaceLayout& layout) { lay_out(p, in_order, num_sms, layout); },
      [](auto type, auto head_dim, auto kind) {
        // Problems without restrictions use the bounded instance. No problem has pages.
        constexpr bool kIsBounded =
            kind() == Variant::kFull || kind() == Variant::kSinks || is_paged(kind());
        constexpr Variant kOwn = kIsBounded                          ? Variant::kBounded
                                 : kind() == Variant::kScoresDropout ? Variant::kScores
                                                                     : kind();
        return &attention_bwd_sm90<type(), head_dim(), kOwn>;
      }));
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  using namespace fastattn::attention;
  m.def(("attention_bwd(" + kCallSchema +
         ", Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool in_order, Tensor(a!) dq, "
         "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dmask, Tensor(e!) ddistance_bias, "
         "Tensor(f!) dsinks" +
         kWorkspaceSchema)
            .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_bwd", &fastattn::attention::attention_bwd);
}
