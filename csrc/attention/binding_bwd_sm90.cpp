// fastattn_sm90's attention backward: its workspace and its launch.
#include "attention/binding_sm90.h"

namespace fastattn::attention {
namespace {

// The tensors of a padded or packed backward, besides its operands.
struct BackwardTensors {
  const Tensor& dout;
  const std::optional<Tensor>& dlse;
  const Tensor &out, &lse, &dq, &dk, &dv, &lse_delta, &dq_sum, &dq_semaphores;
};

BackwardProblem problem_of(const CallSizes& sizes, const Tensor& k, const Tensor& v,
                           const BackwardTensors& x, double scale, const Dropout& dropout,
                           bool in_order) {
  // Enough for every instance, whose blocks have 64 to 128 rows.
  constexpr int64_t kMinBlock = 64, kMaxBlock = 128, kChunk = 64, kSemaphoresPerBlock = 3;
  const Tensor& q = sizes.q;
  STD_TORCH_CHECK(sizes.has_queries(), "there must be queries");
  BackwardProblem problem;
  set_operands(problem, sizes, k, v, std::max(sizes.queries, sizes.keys), scale);
  problem.out = sizes.of_queries(x.out, "out", sizes.value_dim);
  problem.dout = sizes.of_queries(x.dout, "dout", sizes.value_dim);
  // A gradient that is not needed has no elements.
  problem.dq = x.dq.numel() ? sizes.of_queries(x.dq, "dq", sizes.head_dim) : TensorView{};
  problem.dk = x.dk.numel() ? sizes.of_keys(x.dk, "dk", sizes.head_dim) : TensorView{};
  problem.dv = x.dv.numel() ? sizes.of_keys(x.dv, "dv", sizes.value_dim) : TensorView{};
  problem.dropout = dropout;

  const int64_t heads = sizes.batch * sizes.heads, rows = heads * sizes.queries;
  problem.lse = cuda_data_of<float>(x.lse, "lse", q, ScalarType::Float, rows);
  problem.dlse =
      x.dlse ? cuda_data_of<float>(*x.dlse, "dlse", q, ScalarType::Float, rows) : nullptr;
  const int64_t padded = heads * (sizes.queries + kMaxBlock * (sizes.sequences + 1));
  const int64_t columns =
      (std::max(sizes.head_dim, sizes.value_dim) + kChunk - 1) / kChunk * kChunk;
  const int64_t blocks = heads * (sizes.queries / kMinBlock + sizes.sequences + 1);
  const int64_t lse_delta = 2 * padded + (dropout.seed ? dropout::units(padded) : 0);
  problem.lse_delta =
      cuda_data_of<float>(x.lse_delta, "lse_delta", q, ScalarType::Float, lse_delta);
  problem.dq_sum = cuda_data_of<float>(x.dq_sum, "dq_sum", q, ScalarType::Float, padded * columns);
  problem.counter = cuda_data_of<int>(x.dq_semaphores, "dq_semaphores", q, ScalarType::Int,
                                      1 + kSemaphoresPerBlock * blocks);
  problem.dq_semaphores = in_order ? problem.counter + 1 : nullptr;
  return problem;
}

// A mask and its workspace.
DenseMask mask_of(const Tensor& mask, const std::optional<Tensor>& tiles,
                  const std::optional<Tensor>& workspace, const BackwardProblem& p,
                  const Tensor& q) {
  int sizes[4];
  DenseMask result = mask_view_of(mask, tiles, p, q, sizes);
  result.layout = backward_mask_layout(sizes[0], sizes[1], sizes[3], p.batch,
                                       p.key_lengths.data || p.query_lengths.data, p.queries,
                                       p.keys, std::max(p.head_dim, p.value_dim));
  STD_TORCH_CHECK(
      std::max(plain_count(result.layout), class_count(result.layout)) < kMaxTiles && workspace,
      "the mask is too large, or workspace is missing");
  place_in_workspace(result, cuda_data_of<int>(*workspace, "workspace", q, ScalarType::Int,
                                               backward_mask_words(result.layout)));
  return result;
}

// dmask: like the mask, or without elements if it is not needed. splits: [count, *mask's sizes].
MaskGradient mask_gradient_of(const Tensor& dmask, const std::optional<Tensor>& splits,
                              const Tensor& mask, const Tensor& q) {
  MaskGradient result;
  if (dmask.numel() == 0) {
    return result;
  }
  STD_TORCH_CHECK(dmask.is_cuda() && dmask.get_device_index() == q.get_device_index() &&
                      dmask.scalar_type() == mask.scalar_type() && dmask.dim() == 4 &&
                      mask.scalar_type() != ScalarType::Bool,
                  "dmask must be like an additive mask");
  result.data = dmask.data_ptr();
  result.type = mask_type_of(dmask);
  int64_t tiles = 1;
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(dmask.size(i) == mask.size(i), "dmask must have mask's size ", mask.size(i),
                    " in dimension ", i, ", got ", dmask.size(i));
    result.sizes[i] = static_cast<int>(dmask.size(i));
    result.strides[i] = dmask.stride(i);
    const int tile = i < 2 ? 1 : i == 2 ? kDmaskRows : kDmaskKeys;
    tiles *= ceil_div(result.sizes[i], tile);
  }
  if (splits) {
    const int64_t count = splits->size(0);
    result.splits = static_cast<int>(count);
    tiles *= count;
    result.partial =
        cuda_data_of<float>(*splits, "dmask_splits", q, ScalarType::Float, count * dmask.numel());
  }
  STD_TORCH_CHECK(tiles < kMaxTiles, "the mask is too large");
  return result;
}

void launch(const BackwardProblem& problem, const Tensor& q, const char* op) {
  const Variant variant = problem.mask.data      ? variant_of(problem, problem.mask.type)
                          : problem.dropout.seed ? Variant::kDropout
                                                 : Variant::kBounded;
  launch(problem, variant, q, op, [](auto type, auto head_dim, auto kind) {
    // Problems without restrictions use the bounded instance.
    constexpr Variant kOwn = kind() == Variant::kFull ? Variant::kBounded : kind();
    return &attention_bwd_sm90<type(), head_dim(), kOwn>;
  });
}

void attention_bwd(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                   std::optional<Tensor> mask, std::optional<Tensor> mask_tiles,
                   std::optional<Tensor> key_lengths, std::optional<Tensor> query_lengths,
                   Tensor out, Tensor lse, int64_t causal, int64_t window_left,
                   int64_t window_right, double scale, double dropout_p,
                   std::optional<Tensor> dropout_seed, int64_t dropout_stream, bool in_order,
                   Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor lse_delta, Tensor dq_sum,
                   Tensor dq_semaphores, std::optional<Tensor> workspace,
                   std::optional<Tensor> dmask_splits) {
  const CallSizes sizes = sizes_of(q, k, v);
  BackwardProblem problem =
      problem_of(sizes, k, v, {dout, dlse, out, lse, dq, dk, dv, lse_delta, dq_sum, dq_semaphores},
                 scale, dropout_of(dropout_p, dropout_seed, dropout_stream, q), in_order);
  problem.query_lengths = lengths_of(query_lengths, "query_lengths", q);
  problem.key_lengths = lengths_of(key_lengths, "key_lengths", q);
  problem.bounds = bounds_of(causal, window_left, window_right, sizes.queries, sizes.keys);
  if (mask) {
    problem.mask = mask_of(*mask, mask_tiles, workspace, problem, q);
    problem.dmask = mask_gradient_of(dmask, dmask_splits, *mask, q);
  }
  launch(problem, q, "attention_bwd");
}

void attention_varlen_bwd(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                          Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse,
                          int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t causal,
                          int64_t window_left, int64_t window_right, double scale, double dropout_p,
                          std::optional<Tensor> dropout_seed, int64_t dropout_stream, bool in_order,
                          Tensor dq, Tensor dk, Tensor dv, Tensor lse_delta, Tensor dq_sum,
                          Tensor dq_semaphores) {
  const CallSizes sizes = packed_sizes_of(q, k, v, cu_seqlens_q);
  BackwardProblem problem =
      problem_of(sizes, k, v, {dout, dlse, out, lse, dq, dk, dv, lse_delta, dq_sum, dq_semaphores},
                 scale, dropout_of(dropout_p, dropout_seed, dropout_stream, q), in_order);
  set_packing(problem, sizes, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
              window_left, window_right);
  launch(problem, q, "attention_varlen_bwd");
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  m.def(
      "attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? mask, "
      "Tensor? mask_tiles, Tensor? key_lengths, Tensor? query_lengths, Tensor out, Tensor lse, "
      "int causal, int window_left, int window_right, float scale, float dropout_p, Tensor? "
      "dropout_seed, "
      "int dropout_stream, bool in_order, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
      "Tensor(d!) dmask, Tensor(e!) lse_delta, Tensor(f!) dq_sum, Tensor(g!) dq_semaphores, "
      "Tensor(h!)? workspace, Tensor(i!)? dmask_splits) -> ()");
  m.def(
      "attention_varlen_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse, int max_seqlen_q, "
      "int max_seqlen_k, int causal, int window_left, int window_right, float scale, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, bool in_order, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) lse_delta, Tensor(e!) dq_sum, "
      "Tensor(f!) dq_semaphores) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_bwd", TORCH_BOX(&fastattn::attention::attention_bwd));
  m.impl("attention_varlen_bwd", TORCH_BOX(&fastattn::attention::attention_varlen_bwd));
}
