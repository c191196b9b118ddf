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

struct Options {
  int64_t causal, window_left, window_right;
  double scale, dropout_p;
  const std::optional<Tensor>& dropout_seed;
  int64_t dropout_stream;
};

// Sets what padded and packed batches share and shape() does not set.
void set_options(Problem& a, const Options& options) {
  constexpr int64_t kBottomRight = 2;
  const int64_t unlimited = int64_t{a.queries} + a.keys;
  const auto side = [&](int64_t window) {
    return static_cast<int>(window < 0 ? unlimited : std::min(window, unlimited));
  };
  a.window_left = side(options.window_left);
  a.window_right = options.causal ? 0 : side(options.window_right);
  a.bottom_right = options.causal == kBottomRight;
  a.scale = static_cast<float>(options.scale);
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

Problem problem(const Tensor& q, const Tensor& k, const Tensor& v,
                const std::optional<Tensor>& mask, const std::optional<Tensor>& key_lengths,
                const std::optional<Tensor>& query_lengths, const Options& options) {
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
  if (mask) {
    a.mask = mask_view(*mask, "mask", a);
  }
  a.key_lengths = lengths(key_lengths, "key_lengths", batch, queries);
  a.query_lengths = lengths(query_lengths, "query_lengths", batch, queries);
  set_options(a, options);
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

// A packed batch: q [rows, heads, head_dim], k and v [rows, kv_heads, ...]. Options are not set.
Problem packed_shape(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
                     const Tensor& cu_seqlens_k) {
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

bool supports(const Tensor& q, int64_t queries, int64_t keys) {
  return has_kernels_for(q.scalar_type()) && queries <= kMaxPositions && keys <= kMaxPositions;
}

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

std::tuple<Tensor, Tensor> attention_fwd_out(
    Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask, std::optional<Tensor> mask_tiles,
    std::optional<Tensor> key_lengths, std::optional<Tensor> query_lengths, int64_t causal,
    int64_t window_left, int64_t window_right, double scale, double dropout_p,
    std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out, Tensor lse) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "q and k must have 4 dimensions");
  if (!supports(q, q.size(2), k.size(2))) {
    return call_other_backend_into(std::tuple(out, lse), "fastattn::attention_fwd", q, k, v, mask,
                                   mask_tiles, key_lengths, query_lengths, causal, window_left,
                                   window_right, scale, dropout_p, dropout_seed, dropout_stream);
  }
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  const Tensor rows[] = {rows_of(q), rows_of(k), rows_of(v)};
  key_lengths = as_contiguous(key_lengths);
  query_lengths = as_contiguous(query_lengths);
  Forward a = {problem(rows[0], rows[1], rows[2], mask, key_lengths, query_lengths, options),
               {},
               nullptr,
               nullptr};
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.batch * a.heads * a.queries, ScalarType::Float);
  Workspace<kLocalFloats> workspace(forward_floats(a, threads()));
  launch_forward(kernels(), a, workspace.take(workspace.floats()), workspace.floats(), threads(),
                 kOnThreads);
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask,
                                         std::optional<Tensor> mask_tiles,
                                         std::optional<Tensor> key_lengths,
                                         std::optional<Tensor> query_lengths, int64_t causal,
                                         int64_t window_left, int64_t window_right, double scale,
                                         double dropout_p, std::optional<Tensor> dropout_seed,
                                         int64_t dropout_stream) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
                  "q, k and v must have 4 dimensions");
  if (!supports(q, q.size(2), k.size(2))) {
    return call_other_backend<std::tuple<Tensor, Tensor>>(
        "fastattn::attention_fwd", q, k, v, mask, mask_tiles, key_lengths, query_lengths, causal,
        window_left, window_right, scale, dropout_p, dropout_seed, dropout_stream);
  }
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2)};
  Tensor out = new_like_query(q, v.size(3)), lse = new_contiguous({sizes, 3}, ScalarType::Float);
  return attention_fwd_out(q, k, v, mask, mask_tiles, key_lengths, query_lengths, causal,
                           window_left, window_right, scale, dropout_p, dropout_seed,
                           dropout_stream, out, lse);
}

std::tuple<Tensor, Tensor> attention_varlen_fwd_out(
    Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, int64_t causal, int64_t window_left, int64_t window_right, double scale,
    double dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out,
    Tensor lse) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3, "q and k must have 3 dimensions");
  if (!supports(q, q.size(0), k.size(0))) {
    return call_other_backend_into(std::tuple(out, lse), "fastattn::attention_varlen_fwd", q, k, v,
                                   cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                                   window_left, window_right, scale, dropout_p, dropout_seed,
                                   dropout_stream);
  }
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  const Tensor tensors[] = {rows_of(q), rows_of(k), rows_of(v), as_contiguous(cu_seqlens_q),
                            as_contiguous(cu_seqlens_k)};
  const int64_t rows = q.size(0);
  Forward a = {packed_shape(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4]),
               {},
               nullptr,
               nullptr};
  set_options(a, options);
  a.out = packed_view(out, "out", a.type, rows, a.heads, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.heads * rows, ScalarType::Float);
  Workspace<kLocalFloats> workspace(forward_floats(a, threads()));
  launch_forward(kernels(), a, workspace.take(workspace.floats()), workspace.floats(), threads(),
                 kOnThreads);
  const int64_t real = a.cu_seqlens_q[a.batch];
  clear_rows(a.type, a.out, a.heads, real, rows, a.value_dim);
  for (int64_t h = 0; h < a.heads; ++h) {
    std::fill(a.lse + h * rows + real, a.lse + (h + 1) * rows,
              -std::numeric_limits<float>::infinity());
  }
  return {out, lse};
}

std::tuple<Tensor, Tensor> attention_varlen_fwd(
    Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, int64_t causal, int64_t window_left, int64_t window_right, double scale,
    double dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3,
                  "q, k and v must have 3 dimensions");
  if (!supports(q, q.size(0), k.size(0))) {
    return call_other_backend<std::tuple<Tensor, Tensor>>(
        "fastattn::attention_varlen_fwd", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, causal, window_left, window_right, scale, dropout_p, dropout_seed,
        dropout_stream);
  }
  const int64_t sizes[] = {q.size(0), q.size(1), v.size(2)}, rows[] = {q.size(1), q.size(0)};
  Tensor out = new_contiguous({sizes, 3}, q.scalar_type());
  Tensor lse = new_contiguous({rows, 2}, ScalarType::Float);
  return attention_varlen_fwd_out(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                  causal, window_left, window_right, scale, dropout_p, dropout_seed,
                                  dropout_stream, out, lse);
}

// -- backward ------------------------------------------------------------------------------------
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

std::optional<Tensor> wanted(const Tensor& gradient, bool needed) {
  return needed ? std::optional(gradient) : std::nullopt;
}

// lse_rows: rows of lse in all heads.
void run_backward(Backward& a, int64_t lse_rows) {
  Workspace<kLocalFloats> workspace(backward_floats(a, lse_rows, threads()));
  launch_backward(kernels(), a, lse_rows, workspace.take(workspace.floats()), workspace.floats(),
                  threads(), kOnThreads);
}

FourTensors attention_bwd_out(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor q,
                              Tensor k, Tensor v, std::optional<Tensor> mask,
                              std::optional<Tensor> /*mask_tiles*/,
                              std::optional<Tensor> key_lengths,
                              std::optional<Tensor> query_lengths, Tensor out, Tensor lse,
                              int64_t causal, int64_t window_left, int64_t window_right,
                              double scale, double dropout_p, std::optional<Tensor> dropout_seed,
                              int64_t dropout_stream, std::vector<bool> needs, Tensor dq, Tensor dk,
                              Tensor dv, Tensor dmask) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  STD_TORCH_CHECK(needs.size() == 4, "needs must have 4 entries");
  const Tensor rows[] = {rows_of(q), rows_of(k), rows_of(v), rows_of(out), as_contiguous(lse)};
  dout = rows_of(dout);
  dlse = as_contiguous(dlse);
  key_lengths = as_contiguous(key_lengths);
  query_lengths = as_contiguous(query_lengths);
  Backward a = {};
  static_cast<Problem&>(a) =
      problem(rows[0], rows[1], rows[2], mask, key_lengths, query_lengths, options);
  const int64_t lse_rows = a.batch * a.heads * a.queries;
  const auto view_if = [&](const std::optional<Tensor>& x, const char* name, int64_t heads,
                           int64_t count, int64_t columns) {
    return x ? view(*x, name, a.type, a.batch, heads, count, columns) : TensorView{};
  };
  a.out = view(rows[3], "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.dout = view_if(dout, "dout", a.heads, a.queries, a.value_dim);
  a.dq = view_if(wanted(dq, needs[0]), "dq", a.heads, a.queries, a.head_dim);
  a.dk = view_if(wanted(dk, needs[1]), "dk", a.kv_heads, a.keys, a.head_dim);
  a.dv = view_if(wanted(dv, needs[2]), "dv", a.kv_heads, a.keys, a.value_dim);
  a.lse = data_of<const float>(rows[4], "lse", lse_rows, ScalarType::Float);
  a.dlse = dlse ? data_of<const float>(*dlse, "dlse", lse_rows, ScalarType::Float) : nullptr;
  if (needs[3] && mask) {
    a.dmask = mask_view(dmask, "dmask", a);
    STD_TORCH_CHECK(std::equal(a.mask.sizes, a.mask.sizes + 4, a.dmask.sizes),
                    "dmask must have the sizes of mask");
    a.exact_delta = a.type != DType::kFloat32;
  }
  run_backward(a, lse_rows);
  if (needs[3] && mask && (lse_rows == 0 || a.keys == 0)) {  // no pair adds to it
    torch::stable::zero_(dmask);
  }
  return {dq, dk, dv, dmask};
}

FourTensors attention_bwd(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor q,
                          Tensor k, Tensor v, std::optional<Tensor> mask,
                          std::optional<Tensor> mask_tiles, std::optional<Tensor> key_lengths,
                          std::optional<Tensor> query_lengths, Tensor out, Tensor lse,
                          int64_t causal, int64_t window_left, int64_t window_right, double scale,
                          double dropout_p, std::optional<Tensor> dropout_seed,
                          int64_t dropout_stream, std::vector<bool> needs) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && needs.size() == 4,
                  "q, k and v must have 4 dimensions, needs 4 entries");
  if (!supports(q, q.size(2), k.size(2))) {
    return call_other_backend<FourTensors>("fastattn::attention_bwd", dout, dlse, q, k, v, mask,
                                           mask_tiles, key_lengths, query_lengths, out, lse, causal,
                                           window_left, window_right, scale, dropout_p,
                                           dropout_seed, dropout_stream, needs);
  }
  const bool needs_mask = needs[3] && mask;
  return attention_bwd_out(dout, dlse, q, k, v, mask, mask_tiles, key_lengths, query_lengths, out,
                           lse, causal, window_left, window_right, scale, dropout_p, dropout_seed,
                           dropout_stream, needs, new_gradient(q, needs[0]),
                           new_gradient(k, needs[1]), new_gradient(v, needs[2]),
                           needs_mask ? new_gradient(*mask, true) : new_vector(0, q.scalar_type()));
}

ThreeTensors attention_varlen_bwd_out(std::optional<Tensor> dout, std::optional<Tensor> dlse,
                                      Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,
                                      Tensor cu_seqlens_k, Tensor out, Tensor lse,
                                      int64_t /*max_seqlen_q*/, int64_t /*max_seqlen_k*/,
                                      int64_t causal, int64_t window_left, int64_t window_right,
                                      double scale, double dropout_p,
                                      std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                                      std::vector<bool> needs, Tensor dq, Tensor dk, Tensor dv) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  STD_TORCH_CHECK(needs.size() == 3, "needs must have 3 entries");
  const Tensor tensors[] = {rows_of(q),
                            rows_of(k),
                            rows_of(v),
                            rows_of(out),
                            as_contiguous(lse),
                            as_contiguous(cu_seqlens_q),
                            as_contiguous(cu_seqlens_k)};
  dout = rows_of(dout);
  dlse = as_contiguous(dlse);
  const int64_t rows = q.size(0), key_rows = k.size(0);
  Backward a = {};
  static_cast<Problem&>(a) =
      packed_shape(tensors[0], tensors[1], tensors[2], tensors[5], tensors[6]);
  set_options(a, options);
  const int64_t lse_rows = a.heads * rows;
  const auto view_if = [&](const std::optional<Tensor>& x, const char* name, int64_t count,
                           int64_t heads, int64_t columns) {
    return x ? packed_view(*x, name, a.type, count, heads, columns) : TensorView{};
  };
  a.out = packed_view(tensors[3], "out", a.type, rows, a.heads, a.value_dim);
  a.dout = view_if(dout, "dout", rows, a.heads, a.value_dim);
  a.dq = view_if(wanted(dq, needs[0]), "dq", rows, a.heads, a.head_dim);
  a.dk = view_if(wanted(dk, needs[1]), "dk", key_rows, a.kv_heads, a.head_dim);
  a.dv = view_if(wanted(dv, needs[2]), "dv", key_rows, a.kv_heads, a.value_dim);
  a.lse = data_of<const float>(tensors[4], "lse", lse_rows, ScalarType::Float);
  a.dlse = dlse ? data_of<const float>(*dlse, "dlse", lse_rows, ScalarType::Float) : nullptr;
  run_backward(a, lse_rows);
  const int64_t real = a.cu_seqlens_q[a.batch], real_keys = a.cu_seqlens_k[a.batch];
  clear_rows(a.type, a.dq, a.heads, real, rows, a.head_dim);
  clear_rows(a.type, a.dk, a.kv_heads, real_keys, key_rows, a.head_dim);
  clear_rows(a.type, a.dv, a.kv_heads, real_keys, key_rows, a.value_dim);
  return {dq, dk, dv};
}

ThreeTensors attention_varlen_bwd(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor q,
                                  Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                                  Tensor out, Tensor lse, int64_t max_seqlen_q,
                                  int64_t max_seqlen_k, int64_t causal, int64_t window_left,
                                  int64_t window_right, double scale, double dropout_p,
                                  std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                                  std::vector<bool> needs) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && needs.size() == 3,
                  "q, k and v must have 3 dimensions, needs 3 entries");
  if (!supports(q, q.size(0), k.size(0))) {
    return call_other_backend<ThreeTensors>("fastattn::attention_varlen_bwd", dout, dlse, q, k, v,
                                            cu_seqlens_q, cu_seqlens_k, out, lse, max_seqlen_q,
                                            max_seqlen_k, causal, window_left, window_right, scale,
                                            dropout_p, dropout_seed, dropout_stream, needs);
  }
  return attention_varlen_bwd_out(
      dout, dlse, q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, max_seqlen_q, max_seqlen_k, causal,
      window_left, window_right, scale, dropout_p, dropout_seed, dropout_stream, needs,
      new_gradient(q, needs[0]), new_gradient(k, needs[1]), new_gradient(v, needs[2]));
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_IMPL(fastattn, CPU, m) {
  using namespace fastattn::attention;
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_fwd.out", TORCH_BOX(&attention_fwd_out));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
  m.impl("attention_bwd.out", TORCH_BOX(&attention_bwd_out));
  m.impl("attention_varlen_fwd", TORCH_BOX(&attention_varlen_fwd));
  m.impl("attention_varlen_fwd.out", TORCH_BOX(&attention_varlen_fwd_out));
  m.impl("attention_varlen_bwd", TORCH_BOX(&attention_varlen_bwd));
  m.impl("attention_varlen_bwd.out", TORCH_BOX(&attention_varlen_bwd_out));
}
