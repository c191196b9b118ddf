// Shared by the forward and backward bindings of fastattn_sm90: conversion of tensors to kernel
// arguments, and the choice of the instance.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/attention.h"
#include "common/cuda_stream.h"
#include "common/dropout.h"
#include "common/torch_binding.h"

namespace fastattn::attention {

// Limits that keep every sum of positions within 32 bits.
inline constexpr int64_t kMaxRows = int64_t{1} << 28;
inline constexpr int64_t kMaxTiles = int64_t{1} << 30;
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int kBottomRight = 2;

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

// -- sizes ---------------------------------------------------------------------------------------
// The sizes of a call. Tensors are [batch, heads, rows, columns], or [rows, heads, columns] for
// packed sequences, which are one batch entry. All have q's device and type.
struct CallSizes {
  const Tensor& q;
  bool packed;
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  int64_t sequences;  // packed ones, otherwise 0

  TensorView view_of(const Tensor& x, const char* name, int64_t row_heads, int64_t rows,
                     int64_t columns) const {
    STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == q.get_device_index() &&
                        x.scalar_type() == q.scalar_type() && x.dim() == (packed ? 3 : 4),
                    name, " must be a CUDA tensor of q's device, type and number of dimensions");
    if (packed) {
      STD_TORCH_CHECK(
          x.size(0) == rows && x.size(1) == row_heads && x.size(2) == columns && x.stride(2) == 1,
          name, " must be [", rows, ", ", row_heads, ", ", columns, "] with contiguous columns");
      return {x.data_ptr(), 0, x.stride(1), x.stride(0)};
    }
    STD_TORCH_CHECK(x.size(0) == batch && x.size(1) == row_heads && x.size(2) == rows &&
                        x.size(3) == columns && x.stride(3) == 1,
                    name, " must be [", batch, ", ", row_heads, ", ", rows, ", ", columns,
                    "] with contiguous columns");
    return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
  }
  // Views of tensors with one row per query, or per key.
  TensorView of_queries(const Tensor& x, const char* name, int64_t columns) const {
    return view_of(x, name, heads, queries, columns);
  }
  TensorView of_keys(const Tensor& x, const char* name, int64_t columns) const {
    return view_of(x, name, kv_heads, keys, columns);
  }

  bool has_queries() const { return batch > 0 && heads > 0 && queries > 0; }
  // An upper bound on the tiles of all heads: each sequence may end in a partial tile.
  int64_t tiles(int64_t rows) const {
    constexpr int64_t kFewestRows = 64;
    return batch * heads * (rows / kFewestRows + 1 + sequences);
  }
};

inline CallSizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v must have 4 dimensions");
  return {q, false, q.size(0), q.size(1), k.size(1), q.size(2), k.size(2), q.size(3), v.size(3), 0};
}

inline CallSizes packed_sizes_of(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& cu_seqlens_q) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && cu_seqlens_q.dim() == 1 &&
                      cu_seqlens_q.size(0) > 0,
                  "q, k, v must have 3 dimensions, cu_seqlens_q one entry or more");
  return {q,         true,      1,         q.size(1), k.size(1),
          q.size(0), k.size(0), q.size(2), v.size(2), cu_seqlens_q.size(0) - 1};
}

// Sets the problem's sizes and operands. rows: the dimension that is tiled, by 64 or more.
template <class Problem>
void set_operands(Problem& p, const CallSizes& sizes, const Tensor& k, const Tensor& v,
                  int64_t rows, double scale) {
  STD_TORCH_CHECK(dtype_of(sizes.q, "q") != DType::kFloat32, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(sizes.queries <= kMaxRows && sizes.keys <= kMaxRows &&
                      sizes.batch * sizes.heads <= kMaxRows && sizes.tiles(rows) <= kMaxTiles,
                  "the tensors are too large");
  STD_TORCH_CHECK(sizes.keys > 0 && sizes.kv_heads > 0 && sizes.heads % sizes.kv_heads == 0 &&
                      sizes.head_dim > 0 && sizes.value_dim > 0 &&
                      std::max(sizes.head_dim, sizes.value_dim) <= kMaxHeadDim,
                  "there must be keys, a multiple of their heads in q, and head dims up to ",
                  kMaxHeadDim);
  p.batch = static_cast<int>(sizes.batch);
  p.heads = static_cast<int>(sizes.heads);
  p.kv_heads = static_cast<int>(sizes.kv_heads);
  p.queries = static_cast<int>(sizes.queries);
  p.keys = static_cast<int>(sizes.keys);
  p.head_dim = static_cast<int>(sizes.head_dim);
  p.value_dim = static_cast<int>(sizes.value_dim);
  p.q = sizes.of_queries(sizes.q, "q", sizes.head_dim);
  p.k = sizes.of_keys(k, "k", sizes.head_dim);
  p.v = sizes.of_keys(v, "v", sizes.value_dim);
  p.scale = static_cast<float>(scale);
}

// -- restrictions --------------------------------------------------------------------------------
// Unlimited: queries + keys. A causal mask allows no key to the right of the diagonal.
inline Bounds bounds_of(int64_t causal, int64_t left, int64_t right, int64_t queries,
                        int64_t keys) {
  const int64_t all = queries + keys;
  right = causal ? 0 : right;
  return {static_cast<int>(left < 0 ? all : std::min(left, all)),
          static_cast<int>(right < 0 ? all : std::min(right, all)),
          static_cast<int>(causal == kBottomRight ? keys - queries : 0)};
}

// The same for packed sequences, and their offsets. The kernels compute the diagonals.
template <class Problem>
void set_packing(Problem& p, const CallSizes& sizes, const Tensor& cu_seqlens_q,
                 const Tensor& cu_seqlens_k, int64_t max_queries, int64_t max_keys, int64_t causal,
                 int64_t left, int64_t right) {
  const auto offsets_of = [&](const Tensor& offsets, const char* name) {
    STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) == sizes.sequences + 1, name,
                    " must be [", sizes.sequences + 1, "]");
    return cuda_data_of<const int>(offsets, name, sizes.q, ScalarType::Int, sizes.sequences + 1);
  };
  p.packing.query_offsets = offsets_of(cu_seqlens_q, "cu_seqlens_q");
  p.packing.key_offsets = offsets_of(cu_seqlens_k, "cu_seqlens_k");
  p.packing.sequences = static_cast<int>(sizes.sequences);
  p.packing.max_queries = static_cast<int>(std::clamp<int64_t>(max_queries, 0, sizes.queries));
  p.packing.max_keys = static_cast<int>(std::clamp<int64_t>(max_keys, 0, sizes.keys));
  p.packing.bottom_right = causal == kBottomRight;
  p.bounds = bounds_of(causal, left, right, sizes.queries, sizes.keys);
  p.bounds.diagonal = 0;
}

// Without workspace.
inline Dropout dropout_of(double p, const std::optional<Tensor>& seed, int64_t stream,
                          const Tensor& q) {
  if (p <= 0.0) {
    return {};
  }
  STD_TORCH_CHECK(seed, "dropout needs dropout_seed");
  const int threshold = dropout::threshold(p);
  return {cuda_data_of<int64_t>(*seed, "dropout_seed", q, ScalarType::Long, 1),
          static_cast<uint32_t>(stream), threshold, dropout::keep_scale(threshold), nullptr};
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

// A mask [batch or 1, heads or 1, queries or 1, keys or 1] without workspace. sizes: 1 if
// broadcast.
template <class Problem>
DenseMask mask_view_of(const Tensor& mask, const std::optional<Tensor>& tiles, const Problem& p,
                       const Tensor& q, int (&sizes)[4]) {
  STD_TORCH_CHECK(
      mask.is_cuda() && mask.get_device_index() == q.get_device_index() && mask.dim() == 4,
      "mask must be a 4-dimensional CUDA tensor on q's device");
  DenseMask result;
  result.data = mask.data_ptr();
  result.type = mask_type_of(mask);
  const int64_t whole[] = {p.batch, p.heads, p.queries, p.keys};
  int64_t strides[4];
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(mask.size(i) == 1 || mask.size(i) == whole[i], "mask must have size 1 or ",
                    whole[i], " in dimension ", i, ", got ", mask.size(i));
    const bool broadcast = mask.size(i) == 1 || mask.stride(i) == 0;
    sizes[i] = broadcast ? 1 : static_cast<int>(whole[i]);
    strides[i] = broadcast ? 0 : mask.stride(i);
  }
  result.batch_stride = strides[0];
  result.head_stride = strides[1];
  result.row_stride = strides[2];
  result.column_stride = strides[3];
  if (tiles) {
    STD_TORCH_CHECK(tiles->is_cuda() && tiles->get_device_index() == q.get_device_index() &&
                        tiles->scalar_type() == ScalarType::Long && tiles->dim() == 4,
                    "mask_tiles must be 4-dimensional int64 on q's device");
    result.tiles = static_cast<const int64_t*>(tiles->data_ptr());
    for (int i = 0; i < 4; ++i) {
      const int64_t lines = i < 2 ? sizes[i] : ceil_div(sizes[i], 16);
      STD_TORCH_CHECK(tiles->size(i) == lines, "mask_tiles must have ", lines, " in dimension ", i,
                      ", got ", tiles->size(i));
      result.tile_strides[i] = lines == 1 ? 0 : tiles->stride(i);
    }
  }
  return result;
}

// The variant for a problem with a dense mask.
template <class Problem>
Variant variant_of(const Problem& p, MaskType type) {
  if (type == MaskType::kBool) {
    return p.dropout.seed ? Variant::kMaskDropout : Variant::kMask;
  }
  return p.dropout.seed ? Variant::kBiasDropout : Variant::kBias;
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
  if (head_dim <= 96) {
    return of(Constant<96>());
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
    default:
      return of(Constant<Variant::kBounded>());
  }
}

// Launches the instance that `of` returns for a type, head dim and variant.
template <class Problem, class Of>
void launch(const Problem& problem, Variant variant, const Tensor& q, const char* op, Of of) {
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(q.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const bool is_bfloat16 = dtype_of(q, "q") == DType::kBFloat16;
  const auto launcher =
      of_head_dim(std::max(problem.head_dim, problem.value_dim), [&](auto head_dim) {
        return of_variant(variant, [&](auto kind) {
          return is_bfloat16 ? of(Constant<DType::kBFloat16>(), head_dim, kind)
                             : of(Constant<DType::kFloat16>(), head_dim, kind);
        });
      });
  const char* failure = launcher(problem, stream);
  STD_TORCH_CHECK(failure == nullptr, op, ": ", failure);
}

}  // namespace fastattn::attention
