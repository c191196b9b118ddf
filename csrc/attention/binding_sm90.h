// Shared by the forward and backward bindings of fastattn_sm90: conversion of tensors to kernel
// arguments, and the choice of the instance.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>

#include "attention/attention.h"
#include "attention/binding.h"
#include "common/cuda_stream.h"
#include "common/dropout.h"
#include "common/workspace_layout.h"

namespace fastattn::attention {

// Limits that keep every sum of positions within 32 bits.
inline constexpr int64_t kMaxRows = int64_t{1} << 28;
inline constexpr int64_t kMaxTiles = int64_t{1} << 30;
inline constexpr int64_t kMaxHeadDim = 256;

// Behind the results: SMs, for which the workspace is planned, and the workspace. An op that needs
// one and gets none launches nothing and returns the size in bytes, otherwise 0.
inline const std::string kWorkspaceSchema = ", int num_sms, Tensor(z!)? workspace) -> int";

// -- memory --------------------------------------------------------------------------------------
// The data of a contiguous tensor of `count` elements or more on q's device.
template <class T>
T* cuda_data_of(const Tensor& tensor, const char* name, const Tensor& q, ScalarType type,
                int64_t count) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == q.get_device_index() &&
                      tensor.scalar_type() == type && tensor.is_contiguous() &&
                      tensor.numel() >= count,
                  name, " must be contiguous, on q's device, of the expected type and have ", count,
                  " elements, got ", tensor.numel());
  return static_cast<T*>(tensor.data_ptr());
}

// View of a tensor of `batch` entries or pages, with `heads` heads of `rows` rows.
inline TensorView view_of(const Tensor& x, const char* name, const Call& call, int64_t batch,
                          int heads, int rows, int columns) {
  const Tensor& q = call.q;
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == q.get_device_index() &&
                      x.scalar_type() == q.scalar_type() && x.dim() == q.dim(),
                  name, " must be a CUDA tensor of q's device, type and number of dimensions");
  if (call.packed()) {
    STD_TORCH_CHECK(
        x.size(0) == rows && x.size(1) == heads && x.size(2) == columns && x.stride(2) == 1, name,
        " must be [", rows, ", ", heads, ", ", columns, "] with contiguous columns");
    return {x.data_ptr(), 0, x.stride(1), x.stride(0)};
  }
  STD_TORCH_CHECK(x.size(0) == batch && x.size(1) == heads && x.size(2) == rows &&
                      x.size(3) == columns && x.stride(3) == 1,
                  name, " must be [", batch, ", ", heads, ", ", rows, ", ", columns,
                  "] with contiguous columns");
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}
inline TensorView view_of_queries(const Tensor& x, const char* name, const Call& call,
                                  const Problem& p, int columns) {
  return view_of(x, name, call, p.batch, p.heads, p.queries, columns);
}
inline TensorView view_of_keys(const Tensor& x, const char* name, const Call& call,
                               const Problem& p, int columns) {
  if (call.block_table) {
    return view_of(x, name, call, call.k.size(0), p.kv_heads, static_cast<int>(call.k.size(2)),
                   columns);
  }
  return view_of(x, name, call, p.batch, p.kv_heads, p.keys, columns);
}

// -- restrictions --------------------------------------------------------------------------------
inline Lengths lengths_of(const std::optional<Tensor>& lengths, const char* name, const Tensor& q) {
  if (!lengths) {
    return {};
  }
  STD_TORCH_CHECK(lengths->dim() == 1 && lengths->size(0) == q.size(0), name, " must be [",
                  q.size(0), "]");
  const bool wide = lengths->scalar_type() == ScalarType::Long;
  return {
      cuda_data_of<void>(*lengths, name, q, wide ? ScalarType::Long : ScalarType::Int, q.size(0)),
      wide};
}

inline Packing packing_of(const Call& call) {
  if (!call.packed()) {
    return {};
  }
  const Tensor& q = call.q;
  const int64_t offsets = call.cu_seqlens_q->numel();
  const auto offsets_of = [&](const std::optional<Tensor>& x, const char* name) {
    STD_TORCH_CHECK(x && x->dim() == 1 && x->size(0) == offsets && offsets > 0, name, " must be [",
                    offsets, "]");
    return cuda_data_of<const int>(*x, name, q, ScalarType::Int, offsets);
  };
  Packing result;
  result.query_offsets = offsets_of(call.cu_seqlens_q, "cu_seqlens_q");
  result.key_offsets = offsets_of(call.cu_seqlens_k, "cu_seqlens_k");
  result.sequences = static_cast<int>(offsets - 1);
  result.max_queries = static_cast<int>(std::clamp<int64_t>(call.max_seqlen_q, 0, q.size(0)));
  result.max_keys = static_cast<int>(std::clamp<int64_t>(call.max_seqlen_k, 0, call.k.size(0)));
  return result;
}

// Unlimited: queries + keys. A causal mask allows no key to the right of the diagonal. The kernels
// compute the diagonals of packed sequences.
inline Bounds bounds_of(const Call& call, int64_t queries, int64_t keys) {
  const int64_t all = queries + keys;
  const int64_t left = call.window_left, right = call.causal ? 0 : call.window_right;
  const bool bottom_right = call.causal >= kBottomRight && !call.packed();
  return {static_cast<int>(left < 0 ? all : std::min(left, all)),
          static_cast<int>(right < 0 ? all : std::min(right, all)),
          static_cast<int>(bottom_right ? keys - queries : 0)};
}

inline Dropout dropout_of(const Call& call) {
  if (call.dropout_p <= 0.0) {
    return {};
  }
  STD_TORCH_CHECK(call.dropout_seed, "dropout needs dropout_seed");
  const int threshold = dropout::threshold(call.dropout_p);
  const bool has_origin = call.dropout_seed->numel() == dropout::kSeedAndOrigin;
  return {cuda_data_of<int64_t>(*call.dropout_seed, "dropout_seed", call.q, ScalarType::Long,
                                has_origin ? dropout::kSeedAndOrigin : 1),
          has_origin,
          static_cast<uint32_t>(call.dropout_stream),
          threshold,
          dropout::keep_scale(threshold),
          nullptr};
}

inline MaskType mask_type_of(const Tensor& mask) {
  switch (mask.scalar_type()) {
    case ScalarType::Bool:
      return MaskType::kBool;
    case ScalarType::BFloat16:
      return MaskType::kBFloat16;
    case ScalarType::Half:
      return MaskType::kFloat16;
    default:
      STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Float,
                      "mask must be bool, bfloat16, float16 or float32");
      return MaskType::kFloat32;
  }
}

// A mask [batch or 1, heads or 1, queries or 1, keys or 1].
inline DenseMask mask_of(const Call& call, const Problem& p) {
  if (!call.mask) {
    return {};
  }
  const Tensor &mask = *call.mask, &q = call.q;
  STD_TORCH_CHECK(!call.packed() && mask.is_cuda() &&
                      mask.get_device_index() == q.get_device_index() && mask.dim() == 4,
                  "mask must be a 4-dimensional CUDA tensor on q's device");
  DenseMask result;
  result.data = mask.data_ptr();
  result.type = mask_type_of(mask);
  const int64_t whole[] = {p.batch, p.heads, p.queries, p.keys};
  int64_t strides[4];
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(mask.size(i) == 1 || mask.size(i) == whole[i], "mask must have size 1 or ",
                    whole[i], " in dimension ", i, ", got ", mask.size(i));
    strides[i] = mask.size(i) == 1 ? 0 : mask.stride(i);
  }
  result.batch_stride = strides[0];
  result.head_stride = strides[1];
  result.row_stride = strides[2];
  result.column_stride = strides[3];
  if (call.mask_tiles) {
    const Tensor& tiles = *call.mask_tiles;
    STD_TORCH_CHECK(tiles.is_cuda() && tiles.get_device_index() == q.get_device_index() &&
                        tiles.scalar_type() == ScalarType::Long && tiles.dim() == 4,
                    "mask_tiles must be 4-dimensional int64 on q's device");
    result.tiles = static_cast<const int64_t*>(tiles.data_ptr());
    for (int i = 0; i < 4; ++i) {
      const int size = strides[i] == 0 ? 1 : static_cast<int>(whole[i]);
      const int64_t lines = i < 2 ? size : ceil_div(size, 16);
      STD_TORCH_CHECK(tiles.size(i) == lines, "mask_tiles must have ", lines, " in dimension ", i,
                      ", got ", tiles.size(i));
      result.tile_strides[i] = lines == 1 ? 0 : tiles.stride(i);
    }
  }
  return result;
}

inline Sinks sinks_of(const Call& call, const Problem& p) {
  if (!call.sinks) {
    return {};
  }
  return {cuda_data_of<const float>(*call.sinks, "sinks", call.q, ScalarType::Float, p.heads),
          p.queries};
}

// distance_bias: padded on both sides, [batch or 1, heads, ...]; batch entries are sequences.
inline ScoreModifications modifications_of(const Call& call, const Problem& p) {
  ScoreModifications result;
  result.cap = static_cast<float>(call.softcap);
  if (call.distance_bias) {
    const Tensor& bias = *call.distance_bias;
    const int64_t batch = call.packed() ? p.packing.sequences : p.batch;
    const int64_t queries = call.packed() ? call.max_seqlen_q : p.queries;
    const int64_t keys = call.packed() ? call.max_seqlen_k : p.keys;
    const int64_t entries = queries + keys - 1 + 2 * kDistancePadding;
    STD_TORCH_CHECK(bias.dim() == 3 && (bias.size(0) == 1 || bias.size(0) == batch) &&
                        bias.size(1) == p.heads && bias.size(2) == entries,
                    "distance_bias must be [1 or ", batch, ", ", p.heads, ", ", entries, "]");
    const float* data =
        cuda_data_of<const float>(bias, "distance_bias", call.q, ScalarType::Float, bias.numel());
    result.bias = {data + kDistancePadding, bias.size(0) == 1 ? 0 : p.heads * entries, entries,
                   static_cast<int>((p.own_diagonals ? keys : queries) - 1)};
  }
  return result;
}

// -- the problem ---------------------------------------------------------------------------------
// Sets what both directions are given, without workspace. tiles_keys: tiles are rows or keys.
inline void set_problem(Problem& p, const Call& call, bool tiles_keys) {
  const Tensor &q = call.q, &k = call.k, &v = call.v;
  const int dims = call.packed() ? 3 : 4, rows = call.packed() ? 0 : 2;
  STD_TORCH_CHECK(q.dim() == dims && k.dim() == dims && v.dim() == dims, "q, k, v must have ", dims,
                  " dimensions");
  const int64_t batch = call.packed() ? 1 : q.size(0), heads = q.size(1), kv_heads = k.size(1);
  const int64_t pages = call.block_table ? call.block_table->size(1) : 1;
  const int64_t queries = q.size(rows), keys = k.size(rows) * pages;
  const int64_t head_dim = q.size(dims - 1), value_dim = v.size(dims - 1);
  // Tiles have 64 rows or more, and each sequence may end in a partial one.
  const int64_t sequences = call.packed() ? call.cu_seqlens_q->numel() : 0;
  const int64_t tiles = (tiles_keys ? std::max(queries, keys) : queries) / 64 + 1 + sequences;
  STD_TORCH_CHECK(queries <= kMaxRows && keys <= kMaxRows && batch * heads <= kMaxRows &&
                      batch * heads * tiles <= kMaxTiles,
                  "the tensors are too large");
  STD_TORCH_CHECK(keys > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0 &&
                      value_dim > 0 && std::max(head_dim, value_dim) <= kMaxHeadDim,
                  "there must be keys, a multiple of their heads in q, and head dims up to ",
                  kMaxHeadDim);
  p.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(p.dtype != DType::kFloat32, "q must be bfloat16 or float16");
  p.batch = static_cast<int>(batch);
  p.heads = static_cast<int>(heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.queries = static_cast<int>(queries);
  p.keys = static_cast<int>(keys);
  p.head_dim = static_cast<int>(head_dim);
  p.value_dim = static_cast<int>(value_dim);
  p.q = view_of_queries(q, "q", call, p, p.head_dim);
  p.k = view_of_keys(k, "k", call, p, p.head_dim);
  p.v = view_of_keys(v, "v", call, p, p.value_dim);
  p.key_lengths = lengths_of(call.key_lengths, "key_lengths", q);
  p.query_lengths = lengths_of(call.query_lengths, "query_lengths", q);
  p.packing = packing_of(call);
  p.bounds = bounds_of(call, queries, keys);
  p.own_diagonals = call.causal >= (call.packed() ? kBottomRight : kBottomRightLengths);
  p.dropout = dropout_of(call);
  p.mask = mask_of(call, p);
  p.scale = static_cast<float>(call.scale);
  p.sinks = sinks_of(call, p);
  p.modifications = modifications_of(call, p);
}

// The variant of a problem with dropout, a dense mask, score modifications or sinks; without, the
// bounded one. with_sinks: the kernel adds sinks.
inline Variant variant_of(const Problem& p, bool with_sinks) {
  const bool drops = p.dropout.seed;
  with_sinks = with_sinks && p.sinks.data;
  if (p.modifications.any() || (with_sinks && (p.mask.data || drops))) {
    return p.mask.data ? Variant::kScoresDense : drops ? Variant::kScoresDropout : Variant::kScores;
  }
  if (!p.mask.data) {
    return drops ? Variant::kDropout : with_sinks ? Variant::kSinks : Variant::kBounded;
  }
  if (p.mask.type == MaskType::kBool) {
    return drops ? Variant::kMaskDropout : Variant::kMask;
  }
  return drops ? Variant::kBiasDropout : Variant::kBias;
}

// -- the instance --------------------------------------------------------------------------------
template <auto kValue>
using Constant = std::integral_constant<decltype(kValue), kValue>;

// Calls `of` with the instance's head dim, or with the variant, as a compile-time constant.
template <class Of>
auto of_head_dim(int head_dim, Of of) {
  if (head_dim <= 64) {
    return of(Constant<64>());
  }
  if (head_dim <= 128) {
    return of(Constant<128>());
  }
  return head_dim <= 192 ? of(Constant<192>()) : of(Constant<256>());
}
template <class Of>
auto of_variant(Variant variant, Of of) {
  switch (variant) {
    case Variant::kFull:
      return of(Constant<Variant::kFull>());
    case Variant::kDropout:
      return of(Constant<Variant::kDropout>());
    case Variant::kMask:
      return of(Constant<Variant::kMask>());
    case Variant::kBias:
      return of(Constant<Variant::kBias>());
    case Variant::kMaskDropout:
      return of(Constant<Variant::kMaskDropout>());
    case Variant::kBiasDropout:
      return of(Constant<Variant::kBiasDropout>());
    case Variant::kSinks:
      return of(Constant<Variant::kSinks>());
    case Variant::kPaged:
      return of(Constant<Variant::kPaged>());
    case Variant::kScores:
      return of(Constant<Variant::kScores>());
    case Variant::kScoresDropout:
      return of(Constant<Variant::kScoresDropout>());
    case Variant::kScoresDense:
      return of(Constant<Variant::kScoresDense>());
    case Variant::kPagedScores:
      return of(Constant<Variant::kPagedScores>());
    default:
      return of(Constant<Variant::kBounded>());
  }
}

// Divides the workspace by `lay_out` and launches the instance that `of` returns for a type, head
// dim and variant. Returns 0, or without the workspace that is needed its size.
template <class Problem, class LayOut, class Of>
int64_t launch(Problem& problem, Variant variant, const Tensor& q,
               const std::optional<Tensor>& workspace, LayOut lay_out, Of of) {
  WorkspaceLayout layout(workspace ? workspace->data_ptr() : nullptr);
  lay_out(layout);
  STD_TORCH_CHECK(
      std::max(plain_count(problem.mask.layout), class_count(problem.mask.layout)) < kMaxTiles,
      "the mask is too large");
  if (workspace) {
    cuda_data_of<void>(*workspace, "workspace", q, ScalarType::Byte, layout.bytes());
  } else if (layout.bytes() > 0) {
    return layout.bytes();
  }
  const DeviceGuard guard(q.get_device_index());
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(q.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const auto launcher =
      of_head_dim(std::max(problem.head_dim, problem.value_dim), [&](auto head_dim) {
        return of_variant(variant, [&](auto kind) {
          return problem.dtype == DType::kBFloat16
                     ? of(Constant<DType::kBFloat16>(), head_dim, kind)
                     : of(Constant<DType::kFloat16>(), head_dim, kind);
        });
      });
  const char* failure = launcher(problem, stream);
  STD_TORCH_CHECK(failure == nullptr, failure);
  return 0;
}

}  // namespace fastattn::attention
