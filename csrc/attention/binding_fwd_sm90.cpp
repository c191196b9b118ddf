// fastattn_sm90's attention forward.
#include "attention/binding_sm90.h"
#include "attention/sm90/forward/workspace.h"

namespace fastattn::attention {
namespace {

void attention_fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Call call{arguments};
  const Tensor out = arguments.tensor(), lse = arguments.tensor();
  const int num_sms = static_cast<int>(arguments.take<int64_t>());
  const std::optional<Tensor> workspace = arguments.optional();
  if (!call.has_queries()) {
    stack[0] = torch::stable::detail::from(int64_t{0});
    return;
  }
  ForwardProblem problem;
  set_problem(problem, call, false);
  problem.out = view_of_queries(out, "out", call, problem, problem.value_dim);
  problem.lse = cuda_data_of<float>(lse, "lse", call.q, ScalarType::Float,
                                    int64_t{1} * problem.batch * problem.heads * problem.queries);
  STD_TORCH_CHECK(!problem.mask.data || problem.mask.type == MaskType::kBool ||
                      call.mask->size(3) == problem.keys,
                  "an additive mask must have all keys");
  Variant variant = variant_of(problem, true);
  const bool simple = !has_dropout(variant) && !is_dense(variant);
  // Biases by distance belong to these keys, and to the heads of these rows.
  if (simple && !call.packed() && !problem.changes.bias.data) {
    cut_keys_of_one_query(problem);
    merge_groups(problem);
  }
  if (variant == Variant::kBounded) {
    const bool bounded =
        call.packed() && (call.causal != 0 || call.window_left >= 0 || call.window_right >= 0);
    variant = bounded || wants_bounded(problem) ? Variant::kBounded : Variant::kFull;
  }
  stack[0] = torch::stable::detail::from(launch(
      problem, variant, call.q, workspace,
      [&](WorkspaceLayout& layout) {
        lay_out(problem, variant, plan_forward(problem, variant, num_sms), layout);
      },
      [](auto type, auto head_dim, auto kind) {
        return &attention_fwd_sm90<type(), head_dim(), kind()>;
      }));
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  using namespace fastattn::attention;
  m.def(("attention_fwd(" + kCallSchema + ", Tensor(a!) out, Tensor(b!) lse" + kWorkspaceSchema)
            .c_str());
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_fwd", &fastattn::attention::attention_fwd);
}
