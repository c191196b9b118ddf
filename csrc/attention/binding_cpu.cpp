// fastattn_cpu's attention: from tensors to the kernels' arguments, and the split over torch's
// threads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/launch_cpu.h"
#include "common/dropout.h"
#include "common/torch_binding.h"

namespace fastattn::attention {
namespace {

// Positions are added up in 32 bits.
constexpr int64_t kMaxPositions = 1 << 28;

// -- arguments -----------------------------------------------------------------------------------
TensorView view(const Tensor& x, const char* name, DType type, int64_t batch, int64_t heads,
                int64_t rows, int64_t columns) {
  const auto sizes = x.sizes(), strides = x.strides();  // asked for once: each question is a call
  STD_TORCH_CHECK(x.is_cpu() && sizes.size() == 4 && dtype_of(x, name) == type &&
                      sizes[0] == batch && sizes[1] == heads && sizes[2] == rows &&
                      sizes[3] == columns,
                  name, " must be a CPU tensor of shape [", batch, ", ", heads, ", ", rows, ", ",
                  columns, "] and the type of q");
  STD_TORCH_CHECK(columns <= 1 || strides[3] == 1 || x.numel() == 0, name,
                  " must have a contiguous last dimension");
  return {memory_of(x, name), strides[0], strides[1], strides[2]};
}

// Sequences one behind the other: [rows, heads, columns].
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

// The shape alone: what scratch memory and the split of the work depend on.
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
  a.statistics = {nullptr, heads * queries, queries, 1};
  return a;
}

struct Options {
  int64_t causal, window_left, window_right;
  double scale, dropout_p;
  const std::optional<Tensor>& dropout_seed;
  int64_t dropout_stream;
};

// What shape() leaves open and is the same for padded and packed batches.
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

// The length of the longest sequence. Kernels go where offsets lead them.
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

// A packed batch: q [rows, heads, head_dim], k and v [rows, kv_heads, ...]. Without options.
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
  a.statistics = {nullptr, 0, rows, 1};
  return a;
}

// Rows [first, rows) of a packed result, which belong to no sequence.
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
int64_t threads() {
  return torch::stable::get_num_threads();
}

// Torch's threads, as many as there are; one of them may serve several workers.
constexpr auto kOnThreads = [](int64_t workers, const auto& body) {
  if (workers == 1) {
    return body(0);
  }
  torch::stable::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      body(worker);
    }
  });
};

void run_forward(Forward& a, const Tensor& scratch) {
  const int64_t floats = scratch.numel();
  const int64_t least = a.parts_floats() + ForwardScratch(a, nullptr).floats;
  launch_forward(kernels(), a, Scratch(scratch).take<float>(std::max(floats, least)), floats,
                 threads(), kOnThreads);
}

int64_t attention_fwd_scratch(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                              int64_t keys, int64_t head_dim, int64_t value_dim) {
  return forward_floats(shape(batch, heads, kv_heads, queries, keys, head_dim, value_dim),
                        threads());
}

void attention_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask,
                   std::optional<Tensor> key_lengths, std::optional<Tensor> query_lengths,
                   int64_t causal, int64_t window_left, int64_t window_right, double scale,
                   double dropout_p, std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                   Tensor out, Tensor lse, Tensor scratch) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  Forward a = {problem(q, k, v, mask, key_lengths, query_lengths, options), {}, nullptr, nullptr};
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.batch * a.heads * a.queries, ScalarType::Float);
  run_forward(a, scratch);
}

// Calls without restrictions, whose results and scratch memory are made here: where queries and
// keys are few, making them in Python takes longer than everything else.
bool has_rows(const Tensor& x) {
  return x.stride(3) == 1 || x.size(3) <= 1;
}
// Floats of scratch memory up to which a call takes them from its stack.
constexpr int64_t kLocalFloats = 2048;

Tensor rows_of(const Tensor& x) {
  return has_rows(x) ? x : torch::stable::contiguous(x);
}

// Contiguous in the order of storage: `order` names the dimensions, the outermost first.
template <size_t kDims>
Tensor new_dense(const std::array<int64_t, kDims>& sizes, const std::array<int, kDims>& order,
                 ScalarType type) {
  std::array<int64_t, kDims> strides;
  int64_t stride = 1;
  for (size_t i = kDims; i-- > 0;) {
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return new_tensor(sizes, strides, type);
}

// [batch, heads, rows, columns] in the storage order of q.
Tensor new_like_query(const Tensor& q, int64_t columns) {
  constexpr std::array<int, 4> kHeadsFirst = {0, 1, 2, 3}, kRowsFirst = {0, 2, 1, 3};
  const auto n = q.sizes(), stride = q.strides();
  return new_dense<4>({n[0], n[1], n[2], columns}, stride[1] < stride[2] ? kRowsFirst : kHeadsFirst,
                      q.scalar_type());
}

// What torch.empty_like gives. Tensors with heads inside rows, as projections write them, and
// contiguous ones have no gaps and keep their strides: only others ask torch, which takes longer.
Tensor new_like(const Tensor& x) {
  const auto n = x.sizes(), stride = x.strides();
  const bool heads_in_rows = x.numel() > 0 && stride[3] == 1 && stride[1] == n[3] &&
                             stride[2] == n[1] * n[3] && stride[0] == n[2] * n[1] * n[3];
  return heads_in_rows || x.is_contiguous() ? new_tensor(n, stride, x.scalar_type())
                                            : torch::stable::empty_like(x);
}

Tensor new_contiguous(const Tensor& x) {
  return new_dense<4>({x.size(0), x.size(1), x.size(2), x.size(3)}, {0, 1, 2, 3}, x.scalar_type());
}

Options plain_options(int64_t causal, double scale) {
  static const std::optional<Tensor> none;
  return {causal, -1, -1, scale, 0.0, none, 0};
}

// No scale is head_dim ** -0.5.
std::tuple<Tensor, Tensor> attention_plain_fwd(Tensor q, Tensor k, Tensor v, int64_t causal,
                                               std::optional<double> scale) {
  for (Tensor* x : {&q, &k, &v}) {
    if (x->dim() == 4 && !has_rows(*x)) {
      *x = torch::stable::contiguous(*x);
    }
  }
  Forward a = {problem(q, k, v, {}, {}, {}, plain_options(causal, 1.0)), {}, nullptr, nullptr};
  STD_TORCH_CHECK(scale || a.head_dim > 0, "scale must be given for a head dim of 0");
  a.scale = static_cast<float>(scale ? *scale : std::pow(a.head_dim, -0.5));
  Tensor out = new_like_query(q, a.value_dim);
  Tensor lse = new_dense<3>({a.batch, a.heads, a.queries}, {0, 1, 2}, ScalarType::Float);
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.lse = static_cast<float*>(lse.data_ptr());
  const int64_t floats = forward_floats(a, threads());
  if (floats <= kLocalFloats) {
    alignas(64) float local[kLocalFloats];
    launch_forward(kernels(), a, local, floats, threads(), kOnThreads);
  } else {
    run_forward(a, new_dense<1>({floats}, {0}, ScalarType::Float));
  }
  return {out, lse};
}

int64_t attention_varlen_fwd_scratch(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,
                                     Tensor cu_seqlens_k) {
  return forward_floats(packed_shape(q, k, v, cu_seqlens_q, cu_seqlens_k), threads());
}

void attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                          int64_t causal, int64_t window_left, int64_t window_right, double scale,
                          double dropout_p, std::optional<Tensor> dropout_seed,
                          int64_t dropout_stream, Tensor out, Tensor lse, Tensor scratch) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  const int64_t rows = q.size(0);
  Forward a = {packed_shape(q, k, v, cu_seqlens_q, cu_seqlens_k), {}, nullptr, nullptr};
  set_options(a, options);
  a.out = packed_view(out, "out", a.type, rows, a.heads, a.value_dim);
  a.lse = data_of<float>(lse, "lse", a.heads * rows, ScalarType::Float);
  run_forward(a, scratch);
  const int64_t real = a.cu_seqlens_q[a.batch];
  clear_rows(a.type, a.out, a.heads, real, rows, a.value_dim);
  for (int64_t h = 0; h < a.heads; ++h) {
    std::fill(a.lse + h * rows + real, a.lse + (h + 1) * rows,
              -std::numeric_limits<float>::infinity());
  }
}

// -- backward ------------------------------------------------------------------------------------
void run_backward(Backward& a, int64_t statistics, const Tensor& scratch) {
  const int64_t floats = scratch.numel();
  const int64_t least = padded(statistics) + BackwardScratch(a, nullptr).floats;
  launch_backward(kernels(), a, statistics, Scratch(scratch).take<float>(std::max(floats, least)),
                  floats, threads(), kOnThreads);
}

int64_t attention_bwd_scratch(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                              int64_t keys, int64_t head_dim, int64_t value_dim) {
  return backward_floats(shape(batch, heads, kv_heads, queries, keys, head_dim, value_dim),
                         batch * heads * queries, threads());
}

void attention_bwd(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor q, Tensor k,
                   Tensor v, std::optional<Tensor> mask, std::optional<Tensor> key_lengths,
                   std::optional<Tensor> query_lengths, Tensor out, Tensor lse, int64_t causal,
                   int64_t window_left, int64_t window_right, double scale, double dropout_p,
                   std::optional<Tensor> dropout_seed, int64_t dropout_stream,
                   std::optional<Tensor> dq, std::optional<Tensor> dk, std::optional<Tensor> dv,
                   std::optional<Tensor> dmask, Tensor scratch) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  Backward a = {};
  static_cast<Problem&>(a) = problem(q, k, v, mask, key_lengths, query_lengths, options);
  const int64_t statistics = a.batch * a.heads * a.queries;
  const auto view_if = [&](const std::optional<Tensor>& x, const char* name, int64_t heads,
                           int64_t rows, int64_t columns) {
    return x ? view(*x, name, a.type, a.batch, heads, rows, columns) : TensorView{};
  };
  a.out = view(out, "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.dout = view_if(dout, "dout", a.heads, a.queries, a.value_dim);
  a.dq = view_if(dq, "dq", a.heads, a.queries, a.head_dim);
  a.dk = view_if(dk, "dk", a.kv_heads, a.keys, a.head_dim);
  a.dv = view_if(dv, "dv", a.kv_heads, a.keys, a.value_dim);
  a.lse = data_of<const float>(lse, "lse", statistics, ScalarType::Float);
  a.dlse = dlse ? data_of<const float>(*dlse, "dlse", statistics, ScalarType::Float) : nullptr;
  if (dmask) {
    a.dmask = mask_view(*dmask, "dmask", a);
  }
  a.exact_delta = dmask.has_value() && a.type != DType::kFloat32;
  run_backward(a, statistics, scratch);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_plain_bwd(Tensor dout, Tensor q, Tensor k,
                                                               Tensor v, Tensor out, Tensor lse,
                                                               int64_t causal, double scale) {
  const Tensor rows[] = {rows_of(q), rows_of(k), rows_of(v), rows_of(out), rows_of(dout)};
  Backward a = {};
  static_cast<Problem&>(a) =
      problem(rows[0], rows[1], rows[2], {}, {}, {}, plain_options(causal, scale));
  const int64_t statistics = a.batch * a.heads * a.queries;
  const Tensor results[] = {new_like(q), new_like(k), new_like(v)};
  // The kernels write rows: a gradient of another layout gets its values from a copy.
  // (That of overlapping inputs need not be theirs.)
  Tensor dq = has_rows(results[0]) ? results[0] : new_contiguous(q);
  Tensor dk = has_rows(results[1]) ? results[1] : new_contiguous(k);
  Tensor dv = has_rows(results[2]) ? results[2] : new_contiguous(v);
  a.out = view(rows[3], "out", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.dout = view(rows[4], "dout", a.type, a.batch, a.heads, a.queries, a.value_dim);
  a.dq = view(dq, "dq", a.type, a.batch, a.heads, a.queries, a.head_dim);
  a.dk = view(dk, "dk", a.type, a.batch, a.kv_heads, a.keys, a.head_dim);
  a.dv = view(dv, "dv", a.type, a.batch, a.kv_heads, a.keys, a.value_dim);
  a.lse = data_of<const float>(lse, "lse", statistics, ScalarType::Float);
  const int64_t floats = backward_floats(a, statistics, threads());
  run_backward(a, statistics, new_dense<1>({floats}, {0}, ScalarType::Float));
  const Tensor written[] = {dq, dk, dv};
  for (int i = 0; i < 3; ++i) {
    if (results[i].get() != written[i].get()) {
      Tensor result = results[i];
      torch::stable::copy_(result, written[i]);
    }
  }
  // No mask, no gradient of it.
  return {results[0], results[1], results[2], new_dense<1>({0}, {0}, q.scalar_type())};
}

int64_t attention_varlen_bwd_scratch(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q,
                                     Tensor cu_seqlens_k) {
  return backward_floats(packed_shape(q, k, v, cu_seqlens_q, cu_seqlens_k), q.size(0) * q.size(1),
                         threads());
}

void attention_varlen_bwd(std::optional<Tensor> dout, std::optional<Tensor> dlse, Tensor q,
                          Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out,
                          Tensor lse, int64_t causal, int64_t window_left, int64_t window_right,
                          double scale, double dropout_p, std::optional<Tensor> dropout_seed,
                          int64_t dropout_stream, std::optional<Tensor> dq,
                          std::optional<Tensor> dk, std::optional<Tensor> dv, Tensor scratch) {
  const Options options = {causal,    window_left,  window_right,  scale,
                           dropout_p, dropout_seed, dropout_stream};
  const int64_t rows = q.size(0), key_rows = k.size(0);
  Backward a = {};
  static_cast<Problem&>(a) = packed_shape(q, k, v, cu_seqlens_q, cu_seqlens_k);
  set_options(a, options);
  const int64_t statistics = a.heads * rows;
  const auto view_if = [&](const std::optional<Tensor>& x, const char* name, int64_t count,
                           int64_t heads, int64_t columns) {
    return x ? packed_view(*x, name, a.type, count, heads, columns) : TensorView{};
  };
  a.out = packed_view(out, "out", a.type, rows, a.heads, a.value_dim);
  a.dout = view_if(dout, "dout", rows, a.heads, a.value_dim);
  a.dq = view_if(dq, "dq", rows, a.heads, a.head_dim);
  a.dk = view_if(dk, "dk", key_rows, a.kv_heads, a.head_dim);
  a.dv = view_if(dv, "dv", key_rows, a.kv_heads, a.value_dim);
  a.lse = data_of<const float>(lse, "lse", statistics, ScalarType::Float);
  a.dlse = dlse ? data_of<const float>(*dlse, "dlse", statistics, ScalarType::Float) : nullptr;
  run_backward(a, statistics, scratch);
  const int64_t real = a.cu_seqlens_q[a.batch], real_keys = a.cu_seqlens_k[a.batch];
  clear_rows(a.type, a.dq, a.heads, real, rows, a.head_dim);
  clear_rows(a.type, a.dk, a.kv_heads, real_keys, key_rows, a.head_dim);
  clear_rows(a.type, a.dv, a.kv_heads, real_keys, key_rows, a.value_dim);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_cpu, m) {
  m.def(
      "attention_fwd_scratch(int batch, int heads, int kv_heads, int queries, int keys, "
      "int head_dim, int value_dim) -> int");
  m.def(
      "attention_bwd_scratch(int batch, int heads, int kv_heads, int queries, int keys, "
      "int head_dim, int value_dim) -> int");
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? key_lengths, "
      "Tensor? query_lengths, int causal, int window_left, int window_right, float scale, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, Tensor(b!) lse, "
      "Tensor(c!) scratch) -> ()");
  m.def(
      "attention_bwd(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? mask, "
      "Tensor? key_lengths, Tensor? query_lengths, Tensor out, Tensor lse, int causal, "
      "int window_left, int window_right, float scale, float dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dmask, "
      "Tensor(e!) scratch) -> ()");
  m.def(
      "attention_plain_fwd(Tensor q, Tensor k, Tensor v, int causal, float? scale) "
      "-> (Tensor out, Tensor lse)");
  m.def(
      "attention_plain_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "int causal, float scale) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)");
  m.def(
      "attention_varlen_fwd_scratch(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k) -> int");
  m.def(
      "attention_varlen_bwd_scratch(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k) -> int");
  m.def(
      "attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, int causal, int window_left, int window_right, float scale, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, Tensor(b!) lse, "
      "Tensor(c!) scratch) -> ()");
  m.def(
      "attention_varlen_bwd(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse, int causal, "
      "int window_left, int window_right, float scale, float dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!) scratch) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("attention_fwd_scratch", TORCH_BOX(&fastattn::attention::attention_fwd_scratch));
  m.impl("attention_bwd_scratch", TORCH_BOX(&fastattn::attention::attention_bwd_scratch));
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&fastattn::attention::attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&fastattn::attention::attention_bwd));
  m.impl("attention_plain_fwd", TORCH_BOX(&fastattn::attention::attention_plain_fwd));
  m.impl("attention_plain_bwd", TORCH_BOX(&fastattn::attention::attention_plain_bwd));
  m.impl("attention_varlen_fwd_scratch",
         TORCH_BOX(&fastattn::attention::attention_varlen_fwd_scratch));
  m.impl("attention_varlen_bwd_scratch",
         TORCH_BOX(&fastattn::attention::attention_varlen_bwd_scratch));
  m.impl("attention_varlen_fwd", TORCH_BOX(&fastattn::attention::attention_varlen_fwd));
  m.impl("attention_varlen_bwd", TORCH_BOX(&fastattn::attention::attention_varlen_bwd));
}
