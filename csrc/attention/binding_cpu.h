// Common code of the bindings of attention on the CPU: from tensors to the kernels' arguments.
// Tensors are copied only if their last dimension is not contiguous.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/cpu/launch.h"
#include "common/dropout.h"
#include "cpu/binding.h"

namespace fastattn::attention {

// Sums of positions must fit in 32 bits.
constexpr int64_t kMaxPositions = 1 << 28;

// -- arguments -----------------------------------------------------------------------------------
// x, or a copy where its rows (the last dimension) are not contiguous.
inline bool has_rows(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return last < 0 || x.stride(last) == 1 || x.size(last) <= 1;
}
inline Tensor rows_of(const Tensor& x) {
  return has_rows(x) ? x : contiguous_copy(x);
}
inline std::optional<Tensor> rows_of(const std::optional<Tensor>& x) {
  return x ? std::optional(rows_of(*x)) : x;
}

// Operands of a call, in the order of the schemas of both directions.
struct Operands {
  Arguments& from;
  Tensor q = from.tensor(), k = from.tensor(), v = from.tensor();
};
struct Masks {
  Arguments& from;
  std::optional<Tensor> mask = from.optional(), mask_tiles = from.optional();
  std::optional<Tensor> key_lengths = from.optional(as_contiguous);
  std::optional<Tensor> query_lengths = from.optional(as_contiguous);
};
struct Packing {
  Arguments& from;
  Tensor cu_seqlens_q = from.tensor(as_contiguous), cu_seqlens_k = from.tensor(as_contiguous);
};
// Upper bounds of the lengths of packed sequences.
struct Longest {
  Arguments& from;
  int64_t queries = from.take<int64_t>(), keys = from.take<int64_t>();
};
struct Scores {
  Arguments& from;
  std::optional<Tensor> distance_bias = from.optional(rows_of);
  std::optional<Tensor> sinks = from.optional(as_contiguous);
  double softcap = from.take<double>();
  int64_t causal = from.take<int64_t>();
  int64_t window_left = from.take<int64_t>(), window_right = from.take<int64_t>();
  double scale = from.take<double>();
};
struct Options : Scores {
  double dropout_p = from.take<double>();
  std::optional<Tensor> dropout_seed = from.optional();
  int64_t dropout_stream = from.take<int64_t>();
};

inline TensorView view(const Tensor& x, const char* name, DType type, int64_t batch, int64_t heads,
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
inline TensorView packed_view(const Tensor& x, const char* name, DType type, int64_t rows,
                              int64_t heads, int64_t columns) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 3 && dtype_of(x, name) == type && x.size(0) == rows &&
                      x.size(1) == heads && x.size(2) == columns,
                  name, " must be a CPU tensor of shape [", rows, ", ", heads, ", ", columns,
                  "] and the type of q");
  STD_TORCH_CHECK(columns <= 1 || x.numel() == 0 || x.stride(2) == 1, name,
                  " must have a contiguous last dimension");
  return {memory_of(x, name), 0, x.stride(1), x.stride(0)};
}

inline MaskType mask_type(const Tensor& mask) {
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

inline MaskView mask_view(const Tensor& mask, const char* name, const Problem& a) {
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

inline Lengths lengths(const std::optional<Tensor>& tensor, const char* name, int64_t batch,
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
inline Problem shape(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys,
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
inline DistanceBias distance_bias(const Tensor& tensor, const char* name, const Problem& a,
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
inline void set_scores(Problem& a, const Scores& options, int64_t longest_queries,
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
}
inline void set_options(Problem& a, const Options& options, int64_t longest_queries,
                        int64_t longest_keys) {
  set_scores(a, options, longest_queries, longest_keys);
  a.dropout.threshold = dropout::threshold(options.dropout_p);
  if (a.dropout.threshold > 0) {
    STD_TORCH_CHECK(options.dropout_seed.has_value(),
                    "dropout_seed must be given when dropout_p > 0");
    const bool has_origin = options.dropout_seed->numel() == dropout::kSeedAndOrigin;
    const int64_t* numbers =
        data_of<const int64_t>(*options.dropout_seed, "dropout_seed",
                               has_origin ? dropout::kSeedAndOrigin : 1, ScalarType::Long);
    const int64_t seed = numbers[0];
    const uint32_t stream = static_cast<uint32_t>(options.dropout_stream);
    if (has_origin) {
      a.dropout.origin = dropout::origin_of(numbers);
    }
    a.dropout.scale = dropout::keep_scale(a.dropout.threshold);
    a.dropout.row_key = dropout::stream_key(dropout::kRowTag, seed, stream);
    a.dropout.column_key = dropout::stream_key(dropout::kColumnTag, seed, stream);
  }
}

// masks: Masks, or what has its mask and lengths.
template <class Masks>
void set_masks(Problem& a, const Masks& masks) {
  if (masks.mask) {
    a.mask = mask_view(*masks.mask, "mask", a);
  }
  a.key_lengths = lengths(masks.key_lengths, "key_lengths", a.batch, a.queries);
  a.query_lengths = lengths(masks.query_lengths, "query_lengths", a.batch, a.queries);
}

// rows: q, k and v.
inline Problem problem(const Tensor (&rows)[3], const Masks& masks, const Options& options) {
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
  set_masks(a, masks);
  set_options(a, options, queries, keys);
  return a;
}

// The length of the longest sequence. Checks the offsets, which kernels do not.
inline int64_t longest(const Tensor& cu_seqlens, const char* name, int64_t batch, int64_t rows) {
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
inline Problem packed_problem(const Tensor (&tensors)[3], const Packing& packing,
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
inline void clear_rows(DType type, const TensorView& x, int64_t heads, int64_t first, int64_t rows,
                       int64_t columns) {
  const int64_t bytes = type == DType::kFloat32 ? 4 : 2;
  for (int64_t row = first; x.data && row < rows; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t offset = h * x.head_stride + row * x.row_stride;
      memset(static_cast<char*>(x.data) + bytes * offset, 0, bytes * columns);
    }
  }
}

// -- calls ---------------------------------------------------------------------------------------
// Workspace up to this size is on the stack.
constexpr int64_t kLocalFloats = 2048;

// first: the place of q, which k follows. Wrong numbers of dimensions raise later.
inline bool is_supported(const StableIValue* first, int64_t dims) {
  const TensorOnStack q(first[0]), k(first[1]);
  const int64_t rows = dims == 4 ? 2 : 0;
  return has_kernels_for(q.scalar_type()) &&
         (q.dim() != dims || k.dim() != dims ||
          std::max(q.size(rows), k.size(rows)) <= kMaxPositions);
}

inline void check_dimensions(const Operands& x, int64_t dims) {
  STD_TORCH_CHECK(x.q.dim() == dims && x.k.dim() == dims && x.v.dim() == dims,
                  "q, k and v must have ", dims, " dimensions");
}

}  // namespace fastattn::attention
