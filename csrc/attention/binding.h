// The arguments of an attention call, the same in both directions and in all libraries.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "common/torch_binding.h"

namespace fastattn::attention {

// The fields of ForwardCall (fastattn/ops/attention/calls.py). Tensors are [batch, heads, rows,
// columns] or, with cu_seqlens, [rows, heads, columns]; with a block table, k and v are [pages,
// kv_heads, page, columns].
inline const std::string kCallSchema =
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_tiles, Tensor? key_lengths, "
    "Tensor? query_lengths, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int max_seqlen_q, "
    "int max_seqlen_k, Tensor? distance_bias, Tensor? sinks, float softcap, int causal, int "
    "window_left, int window_right, float scale, float dropout_p, Tensor? dropout_seed, "
    "int dropout_stream, Tensor? block_table";
// The place of a field in it.
inline int place_of(const std::string& field) {
  const auto end = kCallSchema.begin() + static_cast<ptrdiff_t>(kCallSchema.find(" " + field));
  return static_cast<int>(std::count(kCallSchema.begin(), end, ','));
}
struct Call {
  Arguments& from;
  Tensor q = from.tensor(), k = from.tensor(), v = from.tensor();
  std::optional<Tensor> mask = from.optional(), mask_tiles = from.optional();
  std::optional<Tensor> key_lengths = from.optional(), query_lengths = from.optional();
  std::optional<Tensor> cu_seqlens_q = from.optional(), cu_seqlens_k = from.optional();
  int64_t max_seqlen_q = from.take<int64_t>(), max_seqlen_k = from.take<int64_t>();
  std::optional<Tensor> distance_bias = from.optional(), sinks = from.optional();
  double softcap = from.take<double>();
  int64_t causal = from.take<int64_t>();
  int64_t window_left = from.take<int64_t>(), window_right = from.take<int64_t>();
  double scale = from.take<double>(), dropout_p = from.take<double>();
  std::optional<Tensor> dropout_seed = from.optional();
  int64_t dropout_stream = from.take<int64_t>();
  std::optional<Tensor> block_table = from.optional();

  bool packed() const { return cu_seqlens_q.has_value(); }
  bool has_queries() const { return q.numel() > 0; }
};

}  // namespace fastattn::attention
