// Attention on the CPU, the forward: allocates the results and runs the kernels on torch's threads.
#include <limits>

#include "attention/binding_cpu.h"

namespace fastattn::attention {
namespace {

void compute(Forward& a) {
  Workspace<kLocalFloats> workspace(forward_floats(a, threads()));
  launch_forward(kernels(), a, workspace.take(workspace.floats()), workspace.floats(), threads(),
                 kOnThreads);
}

Forward forward_of(const Tensor (&rows)[3], const Masks& masks, const Options& options,
                   const Tensor& out, const Tensor& lse) {
  Forward a = {problem(rows, masks, options), {}, nullptr, nullptr};
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.batch * a.heads * a.queries, ScalarType::Float);
  return a;
}

void compute_fwd(const Operands& x, const Masks& masks, const Options& options, const Tensor& out,
                 const Tensor& lse) {
  const Tensor rows[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  Forward a = forward_of(rows, masks, options, out, lse);
  compute(a);
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

template <bool kGiven>
void attention_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, 4)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_fwd", stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  const Operands x{from};
  const Masks masks{from};
  const Options options{from};
  from.check();
  check_dimensions(x, 4);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.q.size(2)};
  const Tensor out = kGiven ? given[0] : new_like_query(x.q, x.v.size(3));
  const Tensor lse = kGiven ? given[1] : new_contiguous({sizes, 3}, ScalarType::Float);
  compute_fwd(x, masks, options, out, lse);
  return_results(stack, out, lse);
}

// The weights are computed in fp32 and rounded once.
void compute_with_weights(const Operands& x, const Masks& masks, const Options& options,
                          bool average, const Tensor& out, const Tensor& lse, Tensor weights) {
  const Tensor rows[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  Forward a = forward_of(rows, masks, options, out, lse);
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
  if (!is_supported(stack, 4)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_with_weights_fwd", stack, count,
                                         results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  const Operands x{from};
  const Masks masks{from};
  const Options options{from};
  const bool average = from.take<bool>();
  from.check();
  check_dimensions(x, 4);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.q.size(2), x.k.size(2)};
  const int64_t mean_sizes[] = {sizes[0], sizes[2], sizes[3]};
  const Tensor out = kGiven ? given[0] : new_like_query(x.q, x.v.size(3));
  const Tensor lse = kGiven ? given[1] : new_contiguous({sizes, 3}, ScalarType::Float);
  const Tensor weights = kGiven    ? given[2]
                         : average ? new_contiguous({mean_sizes, 3}, x.q.scalar_type())
                                   : new_contiguous({sizes, 4}, x.q.scalar_type());
  compute_with_weights(x, masks, options, average, out, lse, weights);
  return_results(stack, out, lse, weights);
}

// Clears rows of out, and sets those of lse to -inf, that belong to no sequence.
void clear_results(const Forward& a, int64_t rows) {
  const int64_t real = a.cu_seqlens_q[a.batch];
  clear_rows(a.type, a.out, a.heads, real, rows, a.value_dim);
  for (int64_t h = 0; h < a.heads; ++h) {
    std::fill(a.lse + h * rows + real, a.lse + (h + 1) * rows,
              -std::numeric_limits<float>::infinity());
  }
}

void compute_varlen_fwd(const Operands& x, const Packing& packing, const Longest& longest_of,
                        const Options& options, const Tensor& out, const Tensor& lse) {
  const Tensor tensors[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  const int64_t rows = x.q.size(0);
  Forward a = {packed_problem(tensors, packing, longest_of, options), {}, nullptr, nullptr};
  a.out = packed_view(out, "out", a.type, rows, a.heads, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.heads * rows, ScalarType::Float);
  compute(a);
  clear_results(a, rows);
}

template <bool kGiven>
void attention_varlen_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, 3)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_varlen_fwd", stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  const Operands x{from};
  const Packing packing{from};
  const Longest longest_of{from};
  const Options options{from};
  from.check();
  check_dimensions(x, 3);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.v.size(2)};
  const int64_t rows[] = {x.q.size(1), x.q.size(0)};
  const Tensor out = kGiven ? given[0] : new_contiguous({sizes, 3}, x.q.scalar_type());
  const Tensor lse = kGiven ? given[1] : new_contiguous({rows, 2}, ScalarType::Float);
  compute_varlen_fwd(x, packing, longest_of, options, out, lse);
  return_results(stack, out, lse);
}

// -- pages ---------------------------------------------------------------------------------------
// Keys and values in pages: the masks have no mask_tiles, the options no dropout.
struct Paging {
  Arguments& from;
  Tensor block_table = from.tensor(as_contiguous);
  std::optional<Tensor> mask = from.optional();
  std::optional<Tensor> key_lengths = from.optional(as_contiguous);
  std::optional<Tensor> query_lengths = from.optional(as_contiguous);
};

// Pages of a power of two. Wrong numbers of dimensions raise later.
bool has_kernel_for_pages(const StableIValue* arguments) {
  const TensorOnStack q(arguments[0]), k(arguments[1]), table(arguments[3]);
  if (!has_kernels_for(q.scalar_type()) || q.dim() != 4 || k.dim() != 4 || table.dim() != 2) {
    return has_kernels_for(q.scalar_type());
  }
  const int64_t page = k.size(2);
  return page >= kLeastPage && (page & (page - 1)) == 0 && page <= kMaxPositions &&
         std::max(q.size(2), table.size(1) * k.size(2)) <= kMaxPositions;
}

// The public function checks the entries too, except in compiled programs.
void check_pages(const Problem& a, int64_t pages) {
  // Without queries no page is read, and key lengths of each query have no element.
  const int64_t batch = a.queries > 0 ? a.batch : 0;
  for (int64_t b = 0; b < batch; ++b) {
    int keys = a.key_lengths.at(b * std::max<int64_t>(a.key_lengths.stride, 1), a.keys);
    for (int64_t i = 1; i < a.key_lengths.stride; ++i) {
      keys = std::max(keys, a.key_lengths.at(b * a.key_lengths.stride + i, a.keys));
    }
    const int32_t* table = a.pages.table + b * a.pages.per_sequence;
    for (int64_t t = 0; t * a.pages.size < keys; ++t) {
      STD_TORCH_CHECK(table[t] >= 0 && table[t] < pages, "block_table must hold pages from 0 to ",
                      pages - 1, ", got ", table[t], " for sequence ", b);
    }
  }
}

void compute_paged_fwd(const Operands& x, const Paging& paging, const Scores& scores,
                       const Tensor& out, const Tensor& lse) {
  const Tensor q = rows_of(x.q), k = rows_of(x.k), v = rows_of(x.v);
  const int64_t batch = q.size(0), queries = q.size(2), pages = k.size(0), page = k.size(2);
  const int64_t kv_heads = k.size(1), per_sequence = paging.block_table.size(1);
  const int64_t keys = per_sequence * page;
  Forward a = {
      shape(batch, q.size(1), kv_heads, queries, keys, q.size(3), v.size(3)), {}, nullptr, nullptr};
  a.type = dtype_of(q, "q");
  a.q = view(q, "q", a.type, batch, a.heads, queries, a.head_dim);
  a.k = view(k, "k", a.type, pages, kv_heads, page, a.head_dim);
  a.v = view(v, "v", a.type, pages, kv_heads, page, a.value_dim);
  a.pages.table = data_of<const int32_t>(paging.block_table, "block_table", batch * per_sequence,
                                         ScalarType::Int);
  a.pages.per_sequence = per_sequence;
  a.pages.size = static_cast<int>(page);
  while ((1 << a.pages.shift) < a.pages.size) {
    ++a.pages.shift;
  }
  set_masks(a, paging);
  set_scores(a, scores, queries, keys);
  check_pages(a, pages);
  a.out = view(out, "out", a.type, batch, a.heads, queries, a.value_dim);
  a.lse = data_of<float>(lse, "lse", batch * a.heads * queries, ScalarType::Float);
  compute(a);
}

template <bool kGiven>
void attention_paged_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!has_kernel_for_pages(stack)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_paged_fwd", stack, count, results);
  }
  const std::vector<Tensor> given = given_results<kGiven>(stack, count, results);
  Arguments from(stack);
  const Operands x{from};
  const Paging paging{from};
  const Scores scores{from};
  from.check();
  check_dimensions(x, 4);
  STD_TORCH_CHECK(paging.block_table.dim() == 2 && paging.block_table.size(0) == x.q.size(0),
                  "block_table must be [", x.q.size(0), ", pages]");
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.q.size(2)};
  const Tensor out = kGiven ? given[0] : new_like_query(x.q, x.v.size(3));
  const Tensor lse = kGiven ? given[1] : new_contiguous({sizes, 3}, ScalarType::Float);
  compute_paged_fwd(x, paging, scores, out, lse);
  return_results(stack, out, lse);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention;
  m.impl("attention_fwd", &attention_fwd<false>);
  m.impl("attention_fwd.out", &attention_fwd<true>);
  m.impl("attention_paged_fwd", &attention_paged_fwd<false>);
  m.impl("attention_paged_fwd.out", &attention_paged_fwd<true>);
  m.impl("attention_with_weights_fwd", &attention_with_weights_fwd<false>);
  m.impl("attention_with_weights_fwd.out", &attention_with_weights_fwd<true>);
  m.impl("attention_varlen_fwd", &attention_varlen_fwd<false>);
  m.impl("attention_varlen_fwd.out", &attention_varlen_fwd<true>);
}
