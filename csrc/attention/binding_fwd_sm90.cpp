// fastattn_sm90's attention forward.
#include "attention/binding_sm90.h"
#include "attention/sm90/forward/fwd_workspace.h"

namespace fastattn::attention {
namespace {

constexpr int kMinLog2Page = 4, kMaxLog2Page = 8;

Pages pages_of(const Call& call) {
  if (!call.block_table) {
    return {};
  }
  const Tensor &table = *call.block_table, &k = call.k;
  STD_TORCH_CHECK(table.dim() == 2 && !call.packed(), "block_table must have 2 dimensions");
  int log2_size = kMinLog2Page;
  while (log2_size < kMaxLog2Page && int64_t{1} << log2_size != k.size(2)) {
    ++log2_size;
  }
  STD_TORCH_CHECK(int64_t{1} << log2_size == k.size(2) && k.size(0) <= kMaxRows,
                  "pages must have a power of two from 16 to 256 keys, got ", k.size(2));
  STD_TORCH_CHECK(table.is_cuda() && table.get_device_index() == call.q.get_device_index() &&
                      table.scalar_type() == ScalarType::Int && table.size(0) == call.q.size(0) &&
                      (table.stride(1) == 1 || table.size(1) == 1),
                  "block_table must be int32 [", call.q.size(0),
                  ", T] on q's device with contiguous rows");
  return {static_cast<const int*>(table.data_ptr()), table.stride(0), static_cast<int>(k.size(0)),
          log2_size};
}

// The variant for pages.
Variant paged_variant(Variant variant) {
  STD_TORCH_CHECK(!has_dropout(variant) && !is_dense(variant),
                  "keys in pages take no dropout and no mask");
  return modifies_scores(variant) ? Variant::kPagedScores : Variant::kPaged;
}

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
  problem.pages = pages_of(call);
  problem.out = view_of_queries(out, "out", call, problem, problem.value_dim);
  problem.lse = cuda_data_of<float>(lse, "lse", call.q, ScalarType::Float,
                                    int64_t{1} * problem.batch * problem.heads * problem.queries);
  STD_TORCH_CHECK(!problem.mask.data || problem.mask.type == MaskType::kBool ||
                      call.mask->size(3) == problem.keys,
                  "an additive mask must have all keys");
  Variant variant = variant_of(problem, true);
  const bool simple = !problem.dropout.seed && !is_dense(variant);
  // Biases by distance belong to these keys, and to the heads of these rows.
  if (simple && !call.packed() && !problem.modifications.bias.data) {
    cut_keys_of_one_query(problem);
    merge_groups(problem);
  }
  if (problem.pages.table) {
    variant = paged_variant(variant);
  } else if (variant == Variant::kBounded) {
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
