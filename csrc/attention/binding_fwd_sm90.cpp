// fastattn_sm90's attention forward: its workspace and its launch.
#include "attention/binding_sm90.h"
#include "attention/sm90/forward/short_queries.h"

namespace fastattn::attention {
namespace {

// Dropout with its column keys. keys: the most columns that a row may have.
Dropout hashed_dropout(double p, const std::optional<Tensor>& seed, int64_t stream,
                       const std::optional<Tensor>& column_keys, const Tensor& q, int64_t keys) {
  Dropout result = dropout_of(p, seed, stream, q);
  if (result.seed) {
    constexpr int64_t kMaxBlock = 128;
    STD_TORCH_CHECK(column_keys, "dropout needs workspace for its column keys");
    result.column_keys = reinterpret_cast<uint32_t*>(
        cuda_data_of<int>(*column_keys, "column_keys", q, ScalarType::Int,
                          dropout::units(static_cast<int>(keys + kMaxBlock))));
  }
  return result;
}

// Whether TMA can read an additive mask in place.
bool read_in_place(const DenseMask& mask, MaskType own, int keys) {
  constexpr int64_t kAlignment = 16;
  const int64_t bytes = mask.type == MaskType::kFloat32 ? 4 : 2;
  const int64_t strides = mask.batch_stride | mask.head_stride | mask.row_stride;
  return (mask.type == own || mask.type == MaskType::kFloat32) &&
         strides * bytes % kAlignment == 0 && (mask.column_stride == 1 || keys == 1) &&
         reinterpret_cast<uintptr_t>(mask.data) % kAlignment == 0;
}

// 32-bit words of dropout's column keys, padded to 16 bytes for the mask's workspace behind them.
int64_t column_key_words(const ForwardProblem& p) {
  constexpr int kMaxBlock = 128, kAlignedWords = 4;
  return p.dropout.seed
             ? ceil_div(dropout::units(p.keys + kMaxBlock), kAlignedWords) * kAlignedWords
             : 0;
}

// A mask with its workspace.
DenseMask mask_of(const Tensor& mask, const std::optional<Tensor>& tiles,
                  const std::optional<Tensor>& workspace, const ForwardProblem& p,
                  const Tensor& q) {
  int sizes[4];
  DenseMask result = mask_view_of(mask, tiles, p, q, sizes);
  const bool additive = result.type != MaskType::kBool;
  STD_TORCH_CHECK(!additive || mask.size(3) == p.keys, "an additive mask must have all keys");
  const int head_dim = std::max(p.head_dim, p.value_dim);
  const Variant variant = variant_of(p, result.type);
  result.layout = mask_layout(
      sizes[0], sizes[1], sizes[2], p.batch, p.key_lengths.data || p.query_lengths.data, p.queries,
      p.keys, forward_tile_rows(head_dim, variant), forward_block(head_dim, variant));
  const MaskType own =
      dtype_of(q, "q") == DType::kBFloat16 ? MaskType::kBFloat16 : MaskType::kFloat16;
  const bool copied = additive && !read_in_place(result, own, p.keys);
  result.copy_type = result.type == own ? own : MaskType::kFloat32;
  constexpr int64_t kClassWords = sizeof(BlockClass) / sizeof(int);
  const int64_t bits = bit_words(result.layout), plain = plain_count(result.layout);
  const int64_t classes = class_count(result.layout);
  const int64_t copy = copied ? copied_elements(result.layout, p.queries, p.keys) /
                                    (result.copy_type == MaskType::kFloat32 ? 1 : 2)
                              : 0;
  const int64_t first = column_key_words(p);
  const int64_t total = first + bits + classes * kClassWords + copy + plain;
  STD_TORCH_CHECK(std::max(plain, classes) < kMaxTiles, "the mask is too large");
  STD_TORCH_CHECK(workspace, "a dense mask needs workspace");
  int* words = cuda_data_of<int>(*workspace, "workspace", q, ScalarType::Int, total) + first;
  result.bits = reinterpret_cast<uint32_t*>(words);
  result.classes = reinterpret_cast<BlockClass*>(words + bits);
  result.copy = copied ? words + bits + classes * kClassWords : nullptr;
  result.plain = words + bits + classes * kClassWords + copy;
  return result;
}

// workspace [splits, rows * (value_dim + 2)]: the outputs of all splits, then their RowMaxSum.
KeySplits splits_of(const std::optional<Tensor>& workspace, const ForwardProblem& p,
                    const CallSizes& sizes) {
  if (!workspace) {
    return {};
  }
  constexpr int64_t kMaxSumFloats = sizeof(RowMaxSum) / sizeof(float);
  const int64_t rows = sizes.batch * sizes.heads * sizes.queries;
  STD_TORCH_CHECK(
      workspace->dim() == 2 && workspace->size(0) > 0 && workspace->size(0) <= kMaxSplits &&
          workspace->size(1) == rows * (p.value_dim + kMaxSumFloats),
      "workspace must be [1 to ", kMaxSplits, ", ", rows * (p.value_dim + kMaxSumFloats), "]");
  const int64_t count = workspace->size(0);
  STD_TORCH_CHECK(sizes.tiles(sizes.queries) * count <= kMaxTiles, "the tensors are too large");
  float* data =
      cuda_data_of<float>(*workspace, "workspace", sizes.q, ScalarType::Float, workspace->numel());
  return {static_cast<int>(count), rows, data,
          reinterpret_cast<RowMaxSum*>(data + count * rows * p.value_dim)};
}

// Sizes, operands and results of a padded or packed call.
ForwardProblem problem_of(const CallSizes& sizes, const Tensor& k, const Tensor& v,
                          const Tensor& out, const Tensor& lse, double scale) {
  ForwardProblem problem;
  set_operands(problem, sizes, k, v, sizes.queries, scale);
  problem.out = sizes.of_queries(out, "out", sizes.value_dim);
  problem.lse = cuda_data_of<float>(lse, "lse", sizes.q, ScalarType::Float,
                                    sizes.batch * sizes.heads * sizes.queries);
  return problem;
}

void launch(const ForwardProblem& problem, const Tensor& q, Variant variant) {
  launch(problem, variant, q, "attention_fwd", [](auto type, auto head_dim, auto kind) {
    return &attention_fwd_sm90<type(), head_dim(), kind()>;
  });
}

// workspace: dropout's column keys, then the dense mask's; with neither of them, that of split-KV.
void attention_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask,
                   std::optional<Tensor> mask_tiles, std::optional<Tensor> key_lengths,
                   std::optional<Tensor> query_lengths, int64_t causal, int64_t window_left,
                   int64_t window_right, double scale, double dropout_p,
                   std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out,
                   Tensor lse, std::optional<Tensor> counter, std::optional<Tensor> workspace) {
  const CallSizes sizes = sizes_of(q, k, v);
  if (!sizes.has_queries()) {
    return;
  }
  ForwardProblem problem = problem_of(sizes, k, v, out, lse, scale);
  problem.query_lengths = lengths_of(query_lengths, "query_lengths", q);
  problem.key_lengths = lengths_of(key_lengths, "key_lengths", q);
  problem.bounds = bounds_of(causal, window_left, window_right, sizes.queries, sizes.keys);
  problem.dropout =
      hashed_dropout(dropout_p, dropout_seed, dropout_stream, workspace, q, sizes.keys);
  problem.counter =
      counter ? cuda_data_of<int>(*counter, "counter", q, ScalarType::Int, 1) : nullptr;
  if (mask) {
    problem.mask = mask_of(*mask, mask_tiles, workspace, problem, q);
    launch(problem, q, variant_of(problem, problem.mask.type));
    return;
  }
  if (problem.dropout.seed) {
    launch(problem, q, Variant::kDropout);
    return;
  }
  problem.splits = splits_of(workspace, problem, sizes);
  cut_keys_of_one_query(problem);
  merge_groups(problem);
  launch(problem, q, wants_bounded(problem) ? Variant::kBounded : Variant::kFull);
}

// counter: one zero, and optionally space for the order of the sequences.
void attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                          int64_t max_seqlen_k, int64_t causal, int64_t window_left,
                          int64_t window_right, double scale, double dropout_p,
                          std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out,
                          Tensor lse, Tensor counter, std::optional<Tensor> workspace) {
  const CallSizes sizes = packed_sizes_of(q, k, v, cu_seqlens_q);
  if (!sizes.has_queries()) {
    return;
  }
  ForwardProblem problem = problem_of(sizes, k, v, out, lse, scale);
  set_packing(problem, sizes, cu_seqlens_q, cu_seqlens_k, sizes.queries, max_seqlen_k, causal,
              window_left, window_right);
  problem.dropout = hashed_dropout(dropout_p, dropout_seed, dropout_stream, workspace, q,
                                   problem.packing.max_keys);
  if (!problem.dropout.seed) {
    problem.splits = splits_of(workspace, problem, sizes);
  }
  const bool ordered = counter.numel() > 1;
  problem.counter = cuda_data_of<int>(counter, "counter", q, ScalarType::Int,
                                      1 + (ordered ? sizes.sequences : 0));
  problem.packing.order = ordered ? problem.counter + 1 : nullptr;
  const bool bounded =
      causal != 0 || window_left >= 0 || window_right >= 0 || wants_bounded(problem);
  launch(problem, q,
         problem.dropout.seed ? Variant::kDropout
         : bounded            ? Variant::kBounded
                              : Variant::kFull);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_tiles, "
      "Tensor? key_lengths, Tensor? query_lengths, int causal, int window_left, int window_right, "
      "float scale, float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor? counter, Tensor(c!)? workspace) -> ()");
  m.def(
      "attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, int max_seqlen_k, int causal, int window_left, int window_right, "
      "float scale, float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor counter, Tensor(c!)? workspace) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_fwd", TORCH_BOX(&fastattn::attention::attention_fwd));
  m.impl("attention_varlen_fwd", TORCH_BOX(&fastattn::attention::attention_varlen_fwd));
}
