// Common code of the bindings of attention on the CPU: from tensors to the kernels' arguments.
// Tensors are copied only if their last dimension is not contiguous.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/binding.h"
#include "attention/cpu/launch.h"
#include "common/dropout.h"
#include "cpu/binding.h"

namespace fastattn::attention::cpu {

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

// Copies what kernels cannot read in place. All arguments must have been taken from the stack:
// copying may throw.
inline void make_readable(Call& call) {
  for (Tensor* x : {&call.q, &call.k, &call.v}) {
    if (!has_rows(*x)) {
      *x = contiguous_copy(*x);
    }
  }
  call.distance_bias = rows_of(call.distance_bias);
  for (std::optional<Tensor>* x : {&call.key_lengths, &call.query_lengths, &call.cu_seqlens_q,
                                   &call.cu_seqlens_k, &call.sinks, &call.block_table}) {
    if (*x) {
      *x = as_contiguous(*x);
    }
  }
}

// x: [batch, heads, rows, columns], or packed [rows, heads, columns].
inline TensorView view(const Tensor& x, const char* name, const Problem& a, int64_t batch,
                       int64_t heads, int64_t rows, int64_t columns) {
  const auto sizes = x.sizes(), strides = x.strides();  // read once: each read is a call
  const bool is_like_q = x.is_cpu() && dtype_of(x, name) == a.type;
  if (a.cu_seqlens_q) {
    STD_TORCH_CHECK(is_like_q && sizes.size() == 3 && sizes[0] == rows && sizes[1] == heads &&
                        sizes[2] == columns,
                    name, " must be a CPU tensor of shape [", rows, ", ", heads, ", ", columns,
                    "] and the type of q");
  } else {
    STD_TORCH_CHECK(is_like_q && sizes.size() == 4 && sizes[0] == batch && sizes[1] == heads &&
                        sizes[2] == rows && sizes[3] == columns,
                    name, " must be a CPU tensor of shape [", batch, ", ", heads, ", ", rows, ", ",
                    columns, "] and the type of q");
  }
  STD_TORCH_CHECK(columns <= 1 || strides[sizes.size() - 1] == 1 || x.numel() == 0, name,
                  " must have a contiguous last dimension");
  void* const data = memory_of(x, name);
  return a.cu_seqlens_q ? TensorView{data, 0, strides[1], strides[0]}
                        : TensorView{data, strides[0], strides[1], strides[2]};
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
inline void set_shape(Problem& a, int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
                      int64_t keys, int64_t head_dim, int64_t value_dim) {
  STD_TORCH_CHECK(queries <= kMaxPositions && keys <= kMaxPositions, "at most ", kMaxPositions,
                  " queries and keys, got ", queries, " and ", keys);
  STD_TORCH_CHECK(kv_heads == 0 ? heads == 0 : heads % kv_heads == 0,
                  "heads of q must be a multiple of those of k");
  a.batch = batch;
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.queries = static_cast<int>(queries);
  a.keys = static_cast<int>(keys);
  a.head_dim = static_cast<int>(head_dim);
  a.value_dim = static_cast<int>(value_dim);
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

// longest_queries, longest_keys: the sizes that determine distance_bias.
inline void set_scores(Problem& a, const Call& call, int64_t longest_queries,
                       int64_t longest_keys) {
  const int64_t unlimited = int64_t{a.queries} + a.keys;
  const auto side = [&](int64_t window) {
    return static_cast<int>(window < 0 ? unlimited : std::min(window, unlimited));
  };
  a.window_left = side(call.window_left);
  a.window_right = call.causal ? 0 : side(call.window_right);
  a.causal = call.causal;
  STD_TORCH_CHECK(a.causal != kBottomRightLengths || a.key_lengths.stride == 0,
                  "key_lengths must be [batch] to align by them");
  a.scale = static_cast<float>(call.scale);
  a.softcap = static_cast<float>(call.softcap);
  if (call.distance_bias) {
    a.distance_bias =
        distance_bias(*call.distance_bias, "distance_bias", a, longest_queries, longest_keys);
  }
  if (call.sinks) {
    a.sinks = data_of<const float>(*call.sinks, "sinks", a.heads, ScalarType::Float);
  }
}

inline void set_dropout(Problem& a, const Call& call) {
  a.dropout.threshold = dropout::threshold(call.dropout_p);
  if (a.dropout.threshold == 0) {
    return;
  }
  STD_TORCH_CHECK(call.dropout_seed.has_value(), "dropout_seed must be given when dropout_p > 0");
  const bool has_origin = call.dropout_seed->numel() == dropout::kSeedAndOrigin;
  const int64_t* numbers =
      data_of<const int64_t>(*call.dropout_seed, "dropout_seed",
                             has_origin ? dropout::kSeedAndOrigin : 1, ScalarType::Long);
  const int64_t seed = numbers[0];
  const uint32_t stream = static_cast<uint32_t>(call.dropout_stream);
  if (has_origin) {
    a.dropout.origin = dropout::origin_of(numbers);
  }
  a.dropout.scale = dropout::keep_scale(a.dropout.threshold);
  a.dropout.row_key = dropout::stream_key(dropout::kRowTag, seed, stream);
  a.dropout.column_key = dropout::stream_key(dropout::kColumnTag, seed, stream);
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

// The longest sequences of a packed batch determine its shape, their offsets its rows.
inline void set_packing(Problem& a, const Call& call) {
  const Tensor &cu_seqlens_q = *call.cu_seqlens_q, &q = call.q, &k = call.k;
  STD_TORCH_CHECK(cu_seqlens_q.dim() == 1 && cu_seqlens_q.size(0) > 0,
                  "cu_seqlens_q must be [batch + 1]");
  STD_TORCH_CHECK(!call.mask && !call.key_lengths && !call.query_lengths && !call.block_table,
                  "packed sequences take no mask, lengths or block_table");
  const int64_t batch = cu_seqlens_q.size(0) - 1, rows = q.size(0);
  set_shape(a, batch, q.size(1), k.size(1), longest(cu_seqlens_q, "cu_seqlens_q", batch, rows),
            longest(*call.cu_seqlens_k, "cu_seqlens_k", batch, k.size(0)), q.size(2),
            call.v.size(2));
  a.cu_seqlens_q = static_cast<const int32_t*>(cu_seqlens_q.data_ptr());
  a.cu_seqlens_k = static_cast<const int32_t*>(call.cu_seqlens_k->data_ptr());
  a.lse_strides = {nullptr, 0, rows, 1};
}

// Keys and values in pages of a power of two. The public function checks the entries too, except in
// compiled programs.
inline void set_pages(Problem& a, const Call& call) {
  const Tensor& table = *call.block_table;
  STD_TORCH_CHECK(call.dropout_p == 0.0, "pages take no dropout");
  a.pages.table =
      data_of<const int32_t>(table, "block_table", a.batch * table.size(1), ScalarType::Int);
  a.pages.per_sequence = table.size(1);
  a.pages.size = static_cast<int>(call.k.size(2));
  while ((1 << a.pages.shift) < a.pages.size) {
    ++a.pages.shift;
  }
  const int64_t pages = call.k.size(0);
  // Without queries no page is read, and key lengths of each query have no element.
  const int64_t batch = a.queries > 0 ? a.batch : 0;
  for (int64_t b = 0; b < batch; ++b) {
    int keys = a.key_lengths.at(b * std::max<int64_t>(a.key_lengths.stride, 1), a.keys);
    for (int64_t i = 1; i < a.key_lengths.stride; ++i) {
      keys = std::max(keys, a.key_lengths.at(b * a.key_lengths.stride + i, a.keys));
    }
    const int32_t* entries = a.pages.table + b * a.pages.per_sequence;
    for (int64_t t = 0; t * a.pages.size < keys; ++t) {
      STD_TORCH_CHECK(entries[t] >= 0 && entries[t] < pages,
                      "block_table must hold pages from 0 to ", pages - 1, ", got ", entries[t],
                      " for sequence ", b);
    }
  }
}

// The problem of a readable call.
inline void set_problem(Problem& a, const Call& call) {
  const Tensor &q = call.q, &k = call.k, &v = call.v;
  a.type = dtype_of(q, "q");
  if (call.packed()) {
    set_packing(a, call);
  } else {
    const auto n = q.sizes(), n_k = k.sizes();
    const int64_t pages = call.block_table ? call.block_table->size(1) : 1;
    set_shape(a, n[0], n[1], n_k[1], n[2], n_k[2] * pages, n[3], v.size(3));
    a.lse_strides = {nullptr, a.heads * a.queries, a.queries, 1};
  }
  const int64_t entries = call.block_table ? k.size(0) : a.batch;  // of keys
  const int64_t rows = k.size(call.packed() ? 0 : 2);
  a.q = view(q, "q", a, a.batch, a.heads, call.packed() ? q.size(0) : a.queries, a.head_dim);
  a.k = view(k, "k", a, entries, a.kv_heads, rows, a.head_dim);
  a.v = view(v, "v", a, entries, a.kv_heads, rows, a.value_dim);
  if (call.mask) {
    a.mask = mask_view(*call.mask, "mask", a);
  }
  a.key_lengths = lengths(call.key_lengths, "key_lengths", a.batch, a.queries);
  a.query_lengths = lengths(call.query_lengths, "query_lengths", a.batch, a.queries);
  set_scores(a, call, call.packed() ? call.max_seqlen_q : a.queries,
             call.packed() ? call.max_seqlen_k : a.keys);
  set_dropout(a, call);
  if (call.block_table) {
    set_pages(a, call);
  }
}

// Rows of a head in the tensors of queries, or of keys: of all packed sequences.
inline int64_t query_rows(const Problem& a, const Call& call) {
  return call.packed() ? call.q.size(0) : a.queries;
}
inline int64_t key_rows(const Problem& a, const Call& call) {
  return call.packed() ? call.k.size(0) : a.keys;
}
// Rows of lse in all heads.
inline int64_t lse_rows(const Problem& a, const Call& call) {
  return (call.packed() ? 1 : a.batch) * a.heads * query_rows(a, call);
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

inline const int kCuSeqlensQ = place_of("cu_seqlens_q"), kBlockTable = place_of("block_table");

// Whether the kernels support a call, which begins at q. Wrong numbers of dimensions raise later.
inline bool is_supported(const StableIValue* call, bool has_pages) {
  const auto optional = [&](int place) {
    return torch::stable::detail::to<StableIValue*>(call[place]);
  };
  const TensorOnStack q(call[0]), k(call[1]);
  const StableIValue* const block_table = optional(kBlockTable);
  if (!has_kernels_for(q.scalar_type()) || (block_table && !has_pages)) {
    return false;
  }
  const bool is_packed = optional(kCuSeqlensQ);
  const int64_t rows = is_packed ? 0 : 2, dims = is_packed ? 3 : 4;
  if (q.dim() != dims || k.dim() != dims) {
    return true;
  }
  int64_t keys = k.size(rows);
  if (block_table) {
    const TensorOnStack table(*block_table);
    if (keys < kMinPage || (keys & (keys - 1)) != 0 || keys > kMaxPositions) {
      return false;
    }
    keys *= table.dim() == 2 ? table.size(1) : 1;
  }
  return std::max(q.size(rows), keys) <= kMaxPositions;
}

inline void check_dimensions(const Call& call) {
  const int64_t dims = call.packed() ? 3 : 4;
  STD_TORCH_CHECK(call.q.dim() == dims && call.k.dim() == dims && call.v.dim() == dims,
                  "q, k and v must have ", dims, " dimensions");
  STD_TORCH_CHECK(call.packed() == call.cu_seqlens_k.has_value(),
                  "cu_seqlens_q and cu_seqlens_k must be given together");
  const std::optional<Tensor>& table = call.block_table;
  STD_TORCH_CHECK(!table || (table->dim() == 2 && table->size(0) == call.q.size(0)),
                  "block_table must be [", call.q.size(0), ", pages]");
}

inline void check_padded(const Call& call) {
  STD_TORCH_CHECK(!call.packed() && !call.block_table,
                  "attention_with_weights takes no cu_seqlens and no block_table");
}

}  // namespace fastattn::attention::cpu
