// Attention on the CPU: from tensors to the kernels' arguments, and the split over torch's threads.
// Tensors are copied only if their last dimension is not contiguous.
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention/cpu/launch.h"
#include "common/dropout.h"
#include "cpu/binding.h"

namespace fastattn::attention {
namespace {

// Sums of positions must fit in 32 bits.
constexpr int64_t kMaxPositions = 1 << 28;

// -- arguments -----------------------------------------------------------------------------------
// x, or a copy where its rows (the last dimension) are not contiguous.
bool has_rows(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return last < 0 || x.stride(last) == 1 || x.size(last) <= 1;
}
Tensor rows_of(const Tensor& x) {
  return has_rows(x) ? x : torch::stable::contiguous(x);
}
std::optional<Tensor> rows_of(const std::optional<Tensor>& x) {
  return x ? std::optional(rows_of(*x)) : x;
}

// What a call is, in the order of the schemas of both directions.
struct Operands {
  Arguments& from;
  Tensor q = from.tensor(), k = from.tensor(), v = from.tensor();
};
struct Masks {
  Arguments& from;
  std::optional<Tensor> mask = from.optional(), mask_tiles = from.optional();
  std::optional<Tensor> key_lengths = as_contiguous(from.optional());
  std::optional<Tensor> query_lengths = as_contiguous(from.optional());
};
struct Packing {
  Arguments& from;
  Tensor cu_seqlens_q = as_contiguous(from.tensor()), cu_seqlens_k = as_contiguous(from.tensor());
};
// Upper bounds of the lengths of packed sequences.
struct Longest {
  Arguments& from;
  int64_t queries = from.take<int64_t>(), keys = from.take<int64_t>();
};
struct Options {
  Arguments& from;
  std::optional<Tensor> distance_bias = rows_of(from.optional());
  std::optional<Tensor> sinks = as_contiguous(from.optional());
  double softcap = from.take<double>();
  int64_t causal = from.take<int64_t>();
  int64_t window_left = from.take<int64_t>(), window_right = from.take<int64_t>();
  double scale = from.take<double>(), dropout_p = from.take<double>();
  std::optional<Tensor> dropout_seed = from.optional();
  int64_t dropout_stream = from.take<int64_t>();
};

TensorView view(const Tensor& x, const char* name, DType type, int64_t batch, int64_t heads,
                int64_t rows, int64_t columns) {
  const auto sizes = x.sizes(), strides = x.strides();  // read once: each read is a call
  STD_TORCH_CHECK(x.is_cpu() && sizes.size() == 4 && dtype_of(x, name) == type &&
                      sizes[0] == batch && sizes[1] == heads && sizes[2] == rows &&
                      sizes[3] == columns,
                  name, " must be a CPU tensor of shape [", batch, ", ", heads, ", ", rows, ", ",
                  columns, "] and the type of q");
  STD_TORCH_CHECK(columns <= 1 || strides[3] == 1 || x.numel() == 0, name,
                  " must have a contiguous last dimension");
  return {memory_of(x, name), strides[0], strides[1], strides[2]};
}

// A packed batch: [rows, heads, columns].
TensorView packed_view(const Tensor& x, const char* name, DType type, int64_t rows, int64_t heads,
                       int64_t columns) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 3 && dtype_of(x, name) == type && x.size(0) == rows &&
                      x.size(1) == heads && x.size(2) == columns,
                  name, " must be a CPU tensor of shape [", rows, ", ", heads, ", ", columns,
                  "] and the type of q");
  STD_TORCH_CHECK(columns <= 1 || x.numel() == 0 || x.stride(2) == 1, name,
                  " must have a contiguous last dimension");
  return {memory_of(x, name), 0, x.stride(1), x.stride(0)};
}

MaskType mask_type(const Tensor& mask) {
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
      return MaskType::kBool;
    case ScalarType::Float:
      return MaskType::kFloat32;
    case ScalarType::BFloat16:
      return MaskType::kBFloat16;
    case ScalarType::Half:
      return MaskType::kFloat16;
    case ScalarType::Double:
      return MaskType::kFloat64;
    default:
      STD_TORCH_CHECK(false, "mask must be bool, float64, float32, bfloat16 or float16");
  }
}

MaskView mask_view(const Tensor& mask, const char* name, const Problem& a) {
  const int64_t wanted[4] = {a.batch, a.heads, a.queries, a.keys};
  STD_TORCH_CHECK(mask.is_cpu() && mask.dim() == 4, name, " must be a CPU tensor of 4 dimensions");
  MaskView result;
  result.type = mask_type(mask);
  result.data = memory_of(mask, name);
  for (int d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(mask.size(d) == wanted[d] || mask.size(d) == 1, name, " must have size 1 or ",
                    wanted[d], " in dimension ", d, ", got ", mask.size(d));
    result.sizes[d] = mask.size(d);
    result.strides[d] = mask.size(d) == 1 ? 0 : mask.stride(d);
  }
  return result;
}

Lengths lengths(const std::optional<Tensor>& tensor, const char* name, int64_t batch,
                int64_t queries) {
  if (!tensor) {
    return {};
  }
  const bool per_query = tensor->dim() == 2;
  const ScalarType type = tensor->scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
                  " must be int32 or int64");
  Lengths result;
  result.data = data_of<void>(*tensor, name, per_query ? batch * queries : batch, type);
  result.wide = type == ScalarType::Long;
  result.stride = per_query ? queries : 0;
  return result;
}

// The shape alone, which determines the workspace and the tasks.
Problem shape(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys,
              int64_t head_dim, int64_t value_dim) {
  STD_TORCH_CHECK(queries <= kMaxPositions && keys <= kMaxPositions, "at most ", kMaxPositions,
                  " queries and keys, got ", queries, " and ", keys);
  STD_TORCH_CHECK(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0,
                  "heads of q must be a multiple of those of k");
  Problem a = {};
  a.batch = batch;
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.queries = static_cast<int>(queries);
  a.keys = static_cast<int>(keys);
  a.head_dim = static_cast<int>(head_dim);
  a.value_dim = static_cast<int>(value_dim);
  a.lse_strides = {nullptr, heads * queries, queries, 1};
  return a;
}

// tensor: [batch or 1, heads, queries + keys - 1].
DistanceBias distance_bias(const Tensor& tensor, const char* name, const Problem& a,
                           int64_t queries, int64_t keys) {
  const int64_t count = std::max<int64_t>(queries + keys - 1, 0);
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Float &&
                      tensor.dim() == 3 && (tensor.size(0) == a.batch || tensor.size(0) == 1) &&
                      tensor.size(1) == a.heads && tensor.size(2) == count && has_rows(tensor),
                  name, " must be a CPU tensor of fp32 and shape [", a.batch, " or 1, ", a.heads,
                  ", ", count, "] with a contiguous last dimension");
  DistanceBias result;
  result.data = static_cast<float*>(memory_of(tensor, name));
  result.batch = tensor.size(0);
  result.batch_stride = tensor.stride(0);
  result.head_stride = tensor.stride(1);
  result.count = count;
  result.first = (a.causal >= kBottomRight ? keys : queries) - 1;
  return result;
}

// Sets what padded and packed batches share and shape() does not set. longest_queries,
// longest_keys: the sizes that determine distance_bias.
void set_options(Problem& a, const Options& options, int64_t longest_queries,
                 int64_t longest_keys) {
  const int64_t unlimited = int64_t{a.queries} + a.keys;
  const auto side = [&](int64_t window) {
    return static_cast<int>(window < 0 ? unlimited : std::min(window, unlimited));
  };
  a.window_left = side(options.window_left);
  a.window_right = options.causal ? 0 : side(options.window_right);
  a.causal = options.causal;
  STD_TORCH_CHECK(a.causal != kBottomRightLengths || a.key_lengths.stride == 0,
                  "key_lengths must be [batch] to align by them");
  a.scale = static_cast<float>(options.scale);
  a.softcap = static_cast<float>(options.softcap);
  if (options.distance_bias) {
    a.distance_bias =
        distance_bias(*options.distance_bias, "distance_bias", a, longest_queries, longest_keys);
  }
  if (options.sinks) {
    a.sinks = data_of<const float>(*options.sinks, "sinks", a.heads, ScalarType::Float);
  }
  a.dropout.threshold = dropout::threshold(options.dropout_p);
  if (a.dropout.threshold > 0) {
    STD_TORCH_CHECK(options.dropout_seed.has_value(),
                    "dropout_seed must be given when dropout_p > 0");
    const int64_t seed =
        *data_of<const int64_t>(*options.dropout_seed, "dropout_seed", 1, ScalarType::Long);
    const uint32_t stream = static_cast<uint32_t>(options.dropout_stream);
    a.dropout.scale = dropout::keep_scale(a.dropout.threshold);
    a.dropout.row_key = dropout::stream_key(dropout::kRowTag, seed, stream);
    a.dropout.column_key = dropout::stream_key(dropout::kColumnTag, seed, stream);
  }
}

// rows: q, k and v.
Problem problem(const Tensor (&rows)[3], const Masks& masks, const Options& options) {
  const auto& [q, k, v] = rows;
  const auto n = q.sizes(), n_k = k.sizes(), n_v = v.sizes();
  STD_TORCH_CHECK(n.size() == 4 && n_k.size() == 4 && n_v.size() == 4,
                  "q, k and v must have 4 dimensions");
  const int64_t batch = n[0], heads = n[1], queries = n[2], head_dim = n[3];
  const int64_t kv_heads = n_k[1], keys = n_k[2], value_dim = n_v[3];
  Problem a = shape(batch, heads, kv_heads, queries, keys, head_dim, value_dim);
  a.type = dtype_of(q, "q");
  a.q = view(q, "q", a.type, batch, heads, queries, head_dim);
  a.k = view(k, "k", a.type, batch, kv_heads, keys, head_dim);
  a.v = view(v, "v", a.type, batch, kv_heads, keys, value_dim);
  if (masks.mask) {
    a.mask = mask_view(*masks.mask, "mask", a);
  }
  a.key_lengths = lengths(masks.key_lengths, "key_lengths", batch, queries);
  a.query_lengths = lengths(masks.query_lengths, "query_lengths", batch, queries);
  set_options(a, options, queries, keys);
  return a;
}

// The length of the longest sequence. Checks the offsets, which kernels do not.
int64_t longest(const Tensor& cu_seqlens, const char* name, int64_t batch, int64_t rows) {
  const int32_t* at = data_of<const int32_t>(cu_seqlens, name, batch + 1, ScalarType::Int);
  int64_t result = 0;
  bool ascending = at[0] == 0;
  for (int64_t b = 0; b < batch; ++b) {
    ascending = ascending && at[b] <= at[b + 1];
    result = std::max<int64_t>(result, int64_t{at[b + 1]} - at[b]);
  }
  STD_TORCH_CHECK(ascending && at[batch] <= rows, name, " must ascend from 0 to at most ", rows,
                  ", got ", at[0], " to ", at[batch], ascending ? "" : ", not ascending");
  return result;
}

// A packed batch: q [rows, heads, head_dim], k and v [rows, kv_heads, ...].
Problem packed_problem(const Tensor (&tensors)[3], const Packing& packing,
                       const Longest& longest_of, const Options& options) {
  const auto& [q, k, v] = tensors;
  const Tensor &cu_seqlens_q = packing.cu_seqlens_q, &cu_seqlens_k = packing.cu_seqlens_k;
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                  "q, k and v must have 3 dimensions");
  STD_TORCH_CHECK(cu_seqlens_q.dim() == 1 && cu_seqlens_q.size(0) > 0,
                  "cu_seqlens_q must be [batch + 1]");
  const int64_t batch = cu_seqlens_q.size(0) - 1, rows = q.size(0), heads = q.size(1);
  const int64_t kv_heads = k.size(1), head_dim = q.size(2), value_dim = v.size(2);
  Problem a = shape(batch, heads, kv_heads, longest(cu_seqlens_q, "cu_seqlens_q", batch, rows),
                    longest(cu_seqlens_k, "cu_seqlens_k", batch, k.size(0)), head_dim, value_dim);
  a.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data_ptr());
  a.cu_seqlens_k = static_cast<const int32_t*>(cu_seqlens_k.data_ptr());
  a.type = dtype_of(q, "q");
  a.q = packed_view(q, "q", a.type, rows, heads, head_dim);
  a.k = packed_view(k, "k", a.type, k.size(0), kv_heads, head_dim);
  a.v = packed_view(v, "v", a.type, k.size(0), kv_heads, value_dim);
  a.lse_strides = {nullptr, 0, rows, 1};
  set_options(a, options, longest_of.queries, longest_of.keys);
  return a;
}

// Clears rows [first, rows) of a packed result, which belong to no sequence.
void clear_rows(DType type, const TensorView& x, int64_t heads, int64_t first, int64_t rows,
                int64_t columns) {
  const int64_t bytes = type == DType::kFloat32 ? 4 : 2;
  for (int64_t row = first; x.data && row < rows; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t offset = h * x.head_stride + row * x.row_stride;
      memset(static_cast<char*>(x.data) + bytes * offset, 0, bytes * columns);
    }
  }
}

// -- forward -------------------------------------------------------------------------------------
// Workspace up to this size is on the stack.
constexpr int64_t kLocalFloats = 2048;

// first: the place of q, which k follows. Wrong numbers of dimensions raise later.
bool is_supported(const StableIValue* first, int64_t dims) {
  const TensorOnStack q(first[0]), k(first[1]);
  const int64_t rows = dims == 4 ? 2 : 0;
  return has_kernels_for(q.scalar_type()) &&
         (q.dim() != dims || k.dim() != dims ||
          std::max(q.size(rows), k.size(rows)) <= kMaxPositions);
}

void check_dimensions(const Operands& x, int64_t dims) {
  STD_TORCH_CHECK(x.q.dim() == dims && x.k.dim() == dims && x.v.dim() == dims,
                  "q, k and v must have ", dims, " dimensions");
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
  Tensor result = torch::stable::empty_like(x);
  // For an input with overlapping memory it may have other strides.
  return has_rows(result) ? result : new_contiguous(n, x.scalar_type());
}

void compute(Forward& a) {
  Workspace<kLocalFloats> workspace(forward_floats(a, threads()));
  launch_forward(kernels(), a, workspace.take(workspace.floats()), workspace.floats(), threads(),
                 kOnThreads);
}

void compute_fwd(const Operands& x, const Masks& masks, const Options& options, const Tensor& out,
                 const Tensor& lse) {
  const Tensor rows[] = {rows_of(x.q), rows_of(x.k), rows_of(x.v)};
  Forward a = {problem(rows, masks, options), {}, nullptr, nullptr};
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.batch * a.heads * a.queries, ScalarType::Float);
  compute(a);
}

template <bool kGiven>
void attention_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, 4)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_fwd", stack, count, results);
  }
  Arguments from(stack);
  const Operands x{from};
  const Masks masks{from};
  const Options options{from};
  check_dimensions(x, 4);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.q.size(2)};
  const Tensor out = kGiven ? from.tensor() : new_like_query(x.q, x.v.size(3));
  const Tensor lse = kGiven ? from.tensor() : new_contiguous({sizes, 3}, ScalarType::Float);
  compute_fwd(x, masks, options, out, lse);
  return_results(stack, out, lse);
}

// Clears rows of out, and sets those of lse, that belong to no sequence.
void clear_results(const Problem& a, const TensorView& out, float* lse, int64_t rows,
                   float empty_lse) {
  const int64_t real = a.cu_seqlens_q[a.batch];
  clear_rows(a.type, out, a.heads, real, rows, a.value_dim);
  for (int64_t h = 0; h < a.heads; ++h) {
    std::fill(lse + h * rows + real, lse + (h + 1) * rows, empty_lse);
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
  clear_results(a, a.out, a.lse, rows, -std::numeric_limits<float>::infinity());
}

template <bool kGiven>
void attention_varlen_fwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack, 3)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_varlen_fwd", stack, count, results);
  }
  Arguments from(stack);
  const Operands x{from};
  const Packing packing{from};
  const Longest longest_of{from};
  const Options options{from};
  check_dimensions(x, 3);
  const int64_t sizes[] = {x.q.size(0), x.q.size(1), x.v.size(2)};
  const int64_t rows[] = {x.q.size(1), x.q.size(0)};
  const Tensor out = kGiven ? from.tensor() : new_contiguous({sizes, 3}, x.q.scalar_type());
  const Tensor lse = kGiven ? from.tensor() : new_contiguous({rows, 2}, ScalarType::Float);
  compute_varlen_fwd(x, packing, longest_of, options, out, lse);
  return_results(stack, out, lse);
}

// -- tangents ------------------------------------------------------------------------------------
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

// -- backward ------------------------------------------------------------------------------------
// The gradients of the forward's results, and these.
struct OutputGradients {
  Arguments& from;
  std::optional<Tensor> dout = rows_of(from.optional()), dlse = as_contiguous(from.optional());
};
struct Outputs {
  Arguments& from;
  Tensor out = rows_of(from.tensor()), lse = as_contiguous(from.tensor());
};
struct Gradients {
  Tensor dq, dk, dv;
};
// The last results: the gradients of what changes the scores.
struct ScoreGradients {
  Tensor ddistance_bias, dsinks;
};

template <bool kGiven>
Gradients gradients_of(Arguments& from, const Operands& x, const std::vector<bool>& needs) {
  if (kGiven) {
    return {from.tensor(), from.tensor(), from.tensor()};
  }
  return {new_gradient(x.q, needs[0]), new_gradient(x.k, needs[1]), new_gradient(x.v, needs[2])};
}

// As new_gradient; of shape [0] and the dtype `otherwise` also if the input is not given.
Tensor new_gradient(const std::optional<Tensor>& x, bool wanted, ScalarType otherwise) {
  return x && wanted ? new_gradient(*x, true) : new_vector(0, otherwise);
}

template <bool kGiven>
ScoreGradients score_gradients_of(Arguments& from, const Options& options,
                                  const std::vector<bool>& needs, ScalarType type) {
  if (kGiven) {
    return {from.tensor(), from.tensor()};
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

void compute_bwd(const OutputGradients& d, const Operands& x, const Masks& masks,
                 const Outputs& outputs, const Options& options, const std::vector<bool>& needs,
                 const Gradients& gradients, Tensor dmask, const ScoreGradients& of_scores) {
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
  set_score_gradients(a, options, needs, of_scores);
  compute(a, lse_rows);
  if (needs[3] && masks.mask && (lse_rows == 0 || a.keys == 0)) {  // no pair adds to it
    torch::stable::zero_(dmask);
  }
}

// The last arguments of the backward: which gradients are needed.
std::vector<bool> needs_of(Arguments& from, size_t results) {
  std::vector<bool> needs = from.take<std::vector<bool>>();
  STD_TORCH_CHECK(needs.size() == results, "needs must have ", results, " entries");
  return needs;
}

// Behind dout and dlse.
constexpr int kFirstOfBackward = 2;

template <bool kGiven>
void attention_bwd(StableIValue* stack, uint64_t count, uint64_t results) {
  if (!is_supported(stack + kFirstOfBackward, 4)) {
    return pass_to_other_backend<kGiven>("fastattn::attention_bwd", stack, count, results);
  }
  Arguments from(stack);
  const OutputGradients d{from};
  const Operands x{from};
  const Masks masks{from};
  const Outputs outputs{from};
  const Options options{from};
  const std::vector<bool> needs = needs_of(from, results);
  check_dimensions(x, 4);
  const Gradients g = gradients_of<kGiven>(from, x, needs);
  const ScalarType type = x.q.scalar_type();
  const Tensor dmask = kGiven ? from.tensor() : new_gradient(masks.mask, needs[3], type);
  const ScoreGradients of_scores = score_gradients_of<kGiven>(from, options, needs, type);
  compute_bwd(d, x, masks, outputs, options, needs, g, dmask, of_scores);
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
  Arguments from(stack);
  const OutputGradients d{from};
  const Operands x{from};
  const Packing packing{from};
  const Outputs outputs{from};
  const Longest longest_of{from};
  const Options options{from};
  const std::vector<bool> needs = needs_of(from, results);
  check_dimensions(x, 3);
  const Gradients g = gradients_of<kGiven>(from, x, needs);
  const ScoreGradients of_scores =
      score_gradients_of<kGiven>(from, options, needs, x.q.scalar_type());
  compute_varlen_bwd(d, x, packing, outputs, longest_of, options, needs, g, of_scores);
  return_results(stack, g.dq, g.dk, g.dv, of_scores.ddistance_bias, of_scores.dsinks);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention;
  m.impl("attention_fwd", &attention_fwd<false>);
  m.impl("attention_fwd.out", &attention_fwd<true>);
  m.impl("attention_bwd", &attention_bwd<false>);
  m.impl("attention_bwd.out", &attention_bwd<true>);
  m.impl("attention_jvp", &attention_jvp<false>);
  m.impl("attention_jvp.out", &attention_jvp<true>);
  m.impl("attention_varlen_fwd", &attention_varlen_fwd<false>);
  m.impl("attention_varlen_fwd.out", &attention_varlen_fwd<true>);
  m.impl("attention_varlen_jvp", &attention_varlen_jvp<false>);
  m.impl("attention_varlen_jvp.out", &attention_varlen_jvp<true>);
  m.impl("attention_varlen_bwd", &attention_varlen_bwd<false>);
  m.impl("attention_varlen_bwd.out", &attention_varlen_bwd<true>);
}
