// fastattn_sm90's attention: from tensors to the kernels' arguments, and the choice of the
// instance.
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "attention/short_queries.h"
#include "common/cuda_stream.h"
#include "common/dropout.h"
#include "common/torch_binding.h"

namespace fastattn::attention {
namespace {

// Sizes up to here keep every sum of positions inside 32 bits.
constexpr int64_t kMaxRows = int64_t{1} << 28;
constexpr int64_t kMaxTiles = int64_t{1} << 30;
constexpr int kBottomRight = 2;

using Launcher = const char* (*)(const ForwardProblem&, cuda::Stream);

template <DType kType, Variant kVariant>
Launcher launcher_for(int64_t head_dim) {
  if (head_dim <= 64) {
    return attention_fwd_sm90<kType, 64, kVariant>;
  }
  if (head_dim <= 96) {
    return attention_fwd_sm90<kType, 96, kVariant>;
  }
  if (head_dim <= 128) {
    return attention_fwd_sm90<kType, 128, kVariant>;
  }
  if (head_dim <= 192) {
    return attention_fwd_sm90<kType, 192, kVariant>;
  }
  return attention_fwd_sm90<kType, 256, kVariant>;
}

template <DType kType>
Launcher launcher_for(int64_t head_dim, Variant variant) {
  switch (variant) {
    case Variant::kFull:
      return launcher_for<kType, Variant::kFull>(head_dim);
    case Variant::kBand:
      return launcher_for<kType, Variant::kBand>(head_dim);
    case Variant::kDropout:
      return launcher_for<kType, Variant::kDropout>(head_dim);
    case Variant::kMask:
      return launcher_for<kType, Variant::kMask>(head_dim);
    case Variant::kBias:
      // Where there is one: head dims up to 128.
      return head_dim <= 64   ? attention_fwd_sm90<kType, 64, Variant::kBias>
             : head_dim <= 96 ? attention_fwd_sm90<kType, 96, Variant::kBias>
                              : attention_fwd_sm90<kType, 128, Variant::kBias>;
  }
  return nullptr;
}

TensorView view_of(const Tensor& tensor, const char* name, const Tensor& q, int64_t batch,
                   int64_t heads, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == q.get_device_index() &&
                      tensor.scalar_type() == q.scalar_type() && tensor.dim() == 4,
                  name, " must be a 4-dimensional CUDA tensor of q's device and type");
  STD_TORCH_CHECK(tensor.size(0) == batch && tensor.size(1) == heads && tensor.size(2) == rows &&
                      tensor.size(3) == columns && tensor.stride(3) == 1,
                  name, " must be [", batch, ", ", heads, ", ", rows, ", ", columns,
                  "] with contiguous columns");
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

Lengths lengths_of(const std::optional<Tensor>& lengths, const char* name, const Tensor& q) {
  if (!lengths) {
    return {};
  }
  const bool wide = lengths->scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(lengths->is_cuda() && lengths->get_device_index() == q.get_device_index() &&
                      (wide || lengths->scalar_type() == ScalarType::Int) && lengths->dim() == 1 &&
                      lengths->size(0) == q.size(0) && lengths->is_contiguous(),
                  name, " must be a contiguous int32 or int64 CUDA tensor of ", q.size(0));
  return {lengths->data_ptr(), wide};
}

// Unlimited is as good as every position of both sequences; a causal mask allows nothing to the
// right of the diagonal.
Band band_of(int64_t causal, int64_t left, int64_t right, int64_t queries, int64_t keys) {
  const int64_t all = queries + keys;
  right = causal ? 0 : right;
  return {static_cast<int>(left < 0 ? all : std::min(left, all)),
          static_cast<int>(right < 0 ? all : std::min(right, all)),
          static_cast<int>(causal == kBottomRight ? keys - queries : 0)};
}

// The same for packed sequences, [rows, heads, columns]: one batch entry.
TensorView packed_view_of(const Tensor& tensor, const char* name, const Tensor& q, int64_t rows,
                          int64_t heads, int64_t columns) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == q.get_device_index() &&
                      tensor.scalar_type() == q.scalar_type() && tensor.dim() == 3,
                  name, " must be a 3-dimensional CUDA tensor of q's device and type");
  STD_TORCH_CHECK(tensor.size(0) == rows && tensor.size(1) == heads && tensor.size(2) == columns &&
                      tensor.stride(2) == 1,
                  name, " must be [", rows, ", ", heads, ", ", columns,
                  "] with contiguous columns");
  return {tensor.data_ptr(), 0, tensor.stride(1), tensor.stride(0)};
}

const int* offsets_of(const Tensor& offsets, const char* name, const Tensor& q, int64_t count) {
  STD_TORCH_CHECK(offsets.is_cuda() && offsets.get_device_index() == q.get_device_index() &&
                      offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 &&
                      offsets.size(0) == count && offsets.is_contiguous(),
                  name, " must be a contiguous int32 CUDA tensor of ", count);
  return static_cast<const int*>(offsets.data_ptr());
}

// Sizes of q, k, v, out and lse, views left out. rows: tiles of 64 that q may need.
ForwardProblem sized_problem(const Tensor& q, const Tensor& lse, int64_t batch, int64_t heads,
                             int64_t kv_heads, int64_t queries, int64_t keys, int64_t head_dim,
                             int64_t value_dim, int64_t row_tiles) {
  STD_TORCH_CHECK(queries <= kMaxRows && keys <= kMaxRows && batch * heads <= kMaxRows &&
                      row_tiles * batch * heads <= kMaxTiles,
                  "the tensors are too large");
  STD_TORCH_CHECK(keys > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0 &&
                      value_dim > 0 && std::max(head_dim, value_dim) <= 256,
                  "there must be keys, a multiple of their heads in q, and head dims up to 256");
  STD_TORCH_CHECK(lse.is_cuda() && lse.get_device_index() == q.get_device_index() &&
                      lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                      lse.numel() == batch * heads * queries,
                  "lse must be a contiguous float32 CUDA tensor of ", batch * heads * queries);
  ForwardProblem problem;
  problem.lse = static_cast<float*>(lse.data_ptr());
  problem.batch = static_cast<int>(batch);
  problem.heads = static_cast<int>(heads);
  problem.kv_heads = static_cast<int>(kv_heads);
  problem.queries = static_cast<int>(queries);
  problem.keys = static_cast<int>(keys);
  problem.head_dim = static_cast<int>(head_dim);
  problem.value_dim = static_cast<int>(value_dim);
  return problem;
}

int* counter_of(const std::optional<Tensor>& counter, const Tensor& q) {
  STD_TORCH_CHECK(!counter || (counter->is_cuda() && counter->numel() == 1 &&
                               counter->get_device_index() == q.get_device_index() &&
                               counter->scalar_type() == ScalarType::Int),
                  "counter must be one int32 on q's device");
  return counter ? static_cast<int*>(counter->data_ptr()) : nullptr;
}

// keys: columns that weights may have.
Dropout dropout_of(double p, const std::optional<Tensor>& seed, int64_t stream,
                   const std::optional<Tensor>& column_keys, const Tensor& q, int64_t keys) {
  if (p <= 0.0) {
    return {};
  }
  constexpr int64_t kMaxBlock = 128;
  const int64_t units = dropout::units(static_cast<int>(keys + kMaxBlock));
  STD_TORCH_CHECK(seed && seed->is_cuda() && seed->get_device_index() == q.get_device_index() &&
                      seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
                  "dropout_seed must be one int64 on q's device");
  STD_TORCH_CHECK(column_keys && column_keys->is_cuda() && column_keys->is_contiguous() &&
                      column_keys->get_device_index() == q.get_device_index() &&
                      column_keys->scalar_type() == ScalarType::Int &&
                      column_keys->numel() >= units,
                  "column_keys must be ", units, " contiguous int32 on q's device");
  const int threshold = dropout::threshold(p);
  return {static_cast<const int64_t*>(seed->data_ptr()), static_cast<uint32_t>(stream), threshold,
          dropout::keep_scale(threshold), static_cast<uint32_t*>(column_keys->data_ptr())};
}

// A mask [batch or 1, heads or 1, queries or 1, keys or 1] and the workspace for it.
DenseMask mask_of(const Tensor& mask, const std::optional<Tensor>& tiles,
                  const std::optional<Tensor>& scratch, const ForwardProblem& p, const Tensor& q) {
  constexpr int kMaxBiasDim = 128;
  STD_TORCH_CHECK(
      mask.is_cuda() && mask.get_device_index() == q.get_device_index() && mask.dim() == 4,
      "mask must be a 4-dimensional CUDA tensor on q's device");
  const bool additive = mask.scalar_type() != ScalarType::Bool;
  DenseMask result;
  result.data = mask.data_ptr();
  if (mask.scalar_type() == ScalarType::Float) {
    result.type = MaskType::kFloat32;
  } else if (additive) {
    STD_TORCH_CHECK(mask.scalar_type() == q.scalar_type(),
                    "an additive mask must have q's type or be float32");
    result.type = dtype_of(q, "q") == DType::kBFloat16 ? MaskType::kBFloat16 : MaskType::kFloat16;
  }
  const int64_t whole[] = {p.batch, p.heads, p.queries, p.keys};
  int sizes[4];
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
  const int head_dim = std::max(p.head_dim, p.value_dim);
  if (additive) {
    const auto pair_bytes = 2 * (result.type == MaskType::kFloat32 ? 4 : 2);
    STD_TORCH_CHECK(head_dim <= kMaxBiasDim && strides[3] == 1 && p.keys % 2 == 0 &&
                        (strides[0] | strides[1] | strides[2]) % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(result.data) % pair_bytes == 0,
                    "an additive mask must have contiguous keys in aligned pairs");
  }
  if (tiles) {
    STD_TORCH_CHECK(tiles->is_cuda() && tiles->get_device_index() == q.get_device_index() &&
                        tiles->scalar_type() == ScalarType::Long && tiles->dim() == 4,
                    "mask_tiles must be 4-dimensional int64 on q's device");
    result.tiles = static_cast<const int64_t*>(tiles->data_ptr());
    for (int i = 0; i < 4; ++i) {
      const int64_t lines = i < 2 ? sizes[i] : pieces(sizes[i], 16);
      STD_TORCH_CHECK(tiles->size(i) == lines, "mask_tiles must have ", lines, " in dimension ", i,
                      ", got ", tiles->size(i));
      result.tile_strides[i] = lines == 1 ? 0 : tiles->stride(i);
    }
  }
  result.layout = mask_layout(
      sizes[0], sizes[1], sizes[2], p.batch, p.key_lengths.data || p.query_lengths.data, p.queries,
      p.keys, forward_tile_rows(head_dim, additive ? Variant::kBias : Variant::kMask),
      forward_block(head_dim));
  constexpr int64_t kClassWords = sizeof(BlockClass) / sizeof(int);
  const int64_t bits = bit_words(result.layout), plain = plain_count(result.layout);
  const int64_t classes = class_count(result.layout), total = bits + classes * kClassWords + plain;
  STD_TORCH_CHECK(std::max(plain, classes) < kMaxTiles, "the mask is too large");
  STD_TORCH_CHECK(scratch && scratch->is_cuda() && scratch->is_contiguous() &&
                      scratch->get_device_index() == q.get_device_index() &&
                      scratch->scalar_type() == ScalarType::Int && scratch->numel() >= total,
                  "scratch must be ", total, " contiguous int32 on q's device");
  int* words = static_cast<int*>(scratch->data_ptr());
  result.bits = reinterpret_cast<uint32_t*>(words);
  result.classes = reinterpret_cast<BlockClass*>(words + bits);
  result.plain = words + bits + classes * kClassWords;
  return result;
}

void launch(const ForwardProblem& problem, const Tensor& q, Variant variant) {
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(q.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const int head_dim = std::max(problem.head_dim, problem.value_dim);
  const Launcher launcher = dtype_of(q, "q") == DType::kBFloat16
                                ? launcher_for<DType::kBFloat16>(head_dim, variant)
                                : launcher_for<DType::kFloat16>(head_dim, variant);
  const char* failure = launcher(problem, stream);
  STD_TORCH_CHECK(failure == nullptr, "attention_fwd: ", failure);
}

// scratch: column keys of dropout, or what a dense mask needs.
void attention_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> mask,
                   std::optional<Tensor> mask_tiles, std::optional<Tensor> key_lengths,
                   std::optional<Tensor> query_lengths, int64_t causal, int64_t window_left,
                   int64_t window_right, double scale, double dropout_p,
                   std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out,
                   Tensor lse, std::optional<Tensor> counter, std::optional<Tensor> scratch) {
  STD_TORCH_CHECK(dtype_of(q, "q") != DType::kFloat32, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v must have 4 dimensions");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), keys = k.size(2), value_dim = v.size(3);
  if (batch == 0 || heads == 0 || queries == 0) {
    return;
  }
  ForwardProblem problem = sized_problem(q, lse, batch, heads, kv_heads, queries, keys, head_dim,
                                         value_dim, queries / 64 + 1);
  problem.q = view_of(q, "q", q, batch, heads, queries, head_dim);
  problem.k = view_of(k, "k", q, batch, kv_heads, keys, head_dim);
  problem.v = view_of(v, "v", q, batch, kv_heads, keys, value_dim);
  problem.out = view_of(out, "out", q, batch, heads, queries, value_dim);
  problem.query_lengths = lengths_of(query_lengths, "query_lengths", q);
  problem.key_lengths = lengths_of(key_lengths, "key_lengths", q);
  problem.band = band_of(causal, window_left, window_right, queries, keys);
  problem.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, scratch, q, keys);
  problem.scale = static_cast<float>(scale);
  problem.counter = counter_of(counter, q);
  if (mask) {
    STD_TORCH_CHECK(!problem.dropout.seed, "there is no kernel for dropout under a dense mask");
    problem.mask = mask_of(*mask, mask_tiles, scratch, problem, q);
    launch(problem, q, problem.mask.type == MaskType::kBool ? Variant::kMask : Variant::kBias);
    return;
  }
  if (problem.dropout.seed) {
    launch(problem, q, Variant::kDropout);
    return;
  }
  cut_keys_of_one_query(problem);
  merge_groups(problem);
  launch(problem, q, band_restricts(problem) ? Variant::kBand : Variant::kFull);
}

void attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                          int64_t max_seqlen_k, int64_t causal, int64_t window_left,
                          int64_t window_right, double scale, double dropout_p,
                          std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out,
                          Tensor lse, Tensor counter, std::optional<Tensor> column_keys) {
  STD_TORCH_CHECK(dtype_of(q, "q") != DType::kFloat32, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && cu_seqlens_q.dim() == 1 &&
                      cu_seqlens_q.size(0) > 0,
                  "q, k, v must have 3 dimensions, cu_seqlens_q one entry or more");
  const int64_t queries = q.size(0), heads = q.size(1), head_dim = q.size(2);
  const int64_t keys = k.size(0), kv_heads = k.size(1), value_dim = v.size(2);
  const int64_t sequences = cu_seqlens_q.size(0) - 1;
  if (heads == 0 || queries == 0) {
    return;
  }
  ForwardProblem problem = sized_problem(q, lse, 1, heads, kv_heads, queries, keys, head_dim,
                                         value_dim, queries / 64 + 1 + sequences);
  problem.q = packed_view_of(q, "q", q, queries, heads, head_dim);
  problem.k = packed_view_of(k, "k", q, keys, kv_heads, head_dim);
  problem.v = packed_view_of(v, "v", q, keys, kv_heads, value_dim);
  problem.out = packed_view_of(out, "out", q, queries, heads, value_dim);
  const int64_t max_keys = std::clamp<int64_t>(max_seqlen_k, 0, keys);
  problem.packing = {offsets_of(cu_seqlens_q, "cu_seqlens_q", q, sequences + 1),
                     offsets_of(cu_seqlens_k, "cu_seqlens_k", q, sequences + 1),
                     static_cast<int>(sequences), static_cast<int>(max_keys),
                     causal == kBottomRight};
  problem.band = band_of(causal, window_left, window_right, queries, keys);
  problem.band.diagonal = 0;
  problem.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, column_keys, q, max_keys);
  problem.scale = static_cast<float>(scale);
  problem.counter = counter_of(counter, q);
  const bool banded = causal != 0 || window_left >= 0 || window_right >= 0;
  launch(problem, q,
         problem.dropout.seed ? Variant::kDropout
         : banded             ? Variant::kBand
                              : Variant::kFull);
}

// -- backward ------------------------------------------------------------------------------------
using BackwardLauncher = const char* (*)(const BackwardProblem&, cuda::Stream);

template <DType kType>
BackwardLauncher backward_launcher_for(int64_t head_dim) {
  if (head_dim <= 64) {
    return attention_bwd_sm90<kType, 64>;
  }
  if (head_dim <= 96) {
    return attention_bwd_sm90<kType, 96>;
  }
  if (head_dim <= 128) {
    return attention_bwd_sm90<kType, 128>;
  }
  return head_dim <= 192 ? attention_bwd_sm90<kType, 192> : attention_bwd_sm90<kType, 256>;
}

// A gradient that nobody wants has no elements.
TensorView gradient_view(const Tensor& gradient, const char* name, const Tensor& of) {
  if (gradient.numel() == 0) {
    return {};
  }
  return view_of(gradient, name, of, of.size(0), of.size(1), of.size(2), of.size(3));
}

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

void attention_bwd(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                   std::optional<Tensor> key_lengths, std::optional<Tensor> query_lengths,
                   Tensor out, Tensor lse, int64_t causal, int64_t window_left,
                   int64_t window_right, double scale, bool in_order, Tensor dq, Tensor dk,
                   Tensor dv, Tensor statistics, Tensor dq_sum, Tensor turns) {
  constexpr int64_t kMaxHeadDim = 256;
  const DType type = dtype_of(q, "q");
  STD_TORCH_CHECK(type != DType::kFloat32, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v must have 4 dimensions");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), keys = k.size(2), value_dim = v.size(3);
  const int64_t widest = std::max(head_dim, value_dim);
  STD_TORCH_CHECK(
      batch > 0 && queries > 0 && keys > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
      "there must be queries, keys, and a multiple of their heads in q");
  STD_TORCH_CHECK(head_dim > 0 && value_dim > 0 && widest <= kMaxHeadDim, "head dims must be 1 to ",
                  kMaxHeadDim);
  STD_TORCH_CHECK(queries <= kMaxRows && keys <= kMaxRows && batch * heads <= kMaxRows &&
                      (std::max(queries, keys) / 64 + 1) * batch * heads <= kMaxTiles,
                  "the tensors are too large");

  BackwardProblem problem;
  problem.q = view_of(q, "q", q, batch, heads, queries, head_dim);
  problem.k = view_of(k, "k", q, batch, kv_heads, keys, head_dim);
  problem.v = view_of(v, "v", q, batch, kv_heads, keys, value_dim);
  problem.out = view_of(out, "out", q, batch, heads, queries, value_dim);
  problem.dout = view_of(dout, "dout", q, batch, heads, queries, value_dim);
  problem.dq = gradient_view(dq, "dq", q);
  problem.dk = gradient_view(dk, "dk", k);
  problem.dv = gradient_view(dv, "dv", v);
  const int64_t rows = batch * heads * queries;
  problem.lse = cuda_data_of<float>(lse, "lse", q, ScalarType::Float, rows);
  problem.dlse = dlse ? cuda_data_of<float>(*dlse, "dlse", q, ScalarType::Float, rows) : nullptr;
  problem.batch = static_cast<int>(batch);
  problem.heads = static_cast<int>(heads);
  problem.kv_heads = static_cast<int>(kv_heads);
  problem.queries = static_cast<int>(queries);
  problem.keys = static_cast<int>(keys);
  problem.head_dim = static_cast<int>(head_dim);
  problem.value_dim = static_cast<int>(value_dim);
  problem.query_lengths = lengths_of(query_lengths, "query_lengths", q);
  problem.key_lengths = lengths_of(key_lengths, "key_lengths", q);
  problem.band = band_of(causal, window_left, window_right, queries, keys);
  problem.scale = static_cast<float>(scale);

  // Every instance's blocks of 64 to 128 rows fit.
  constexpr int64_t kMinBlock = 64, kMaxBlock = 128, kChunk = 64, kTurnsPerBlock = 3;
  const int64_t padded = batch * heads * (queries + kMaxBlock);
  const int64_t columns = (widest + kChunk - 1) / kChunk * kChunk;
  const int64_t blocks = batch * heads * (queries / kMinBlock + 1);
  problem.statistics =
      cuda_data_of<float>(statistics, "statistics", q, ScalarType::Float, 2 * padded);
  problem.dq_sum = cuda_data_of<float>(dq_sum, "dq_sum", q, ScalarType::Float, padded * columns);
  problem.counter =
      cuda_data_of<int>(turns, "turns", q, ScalarType::Int, 1 + kTurnsPerBlock * blocks);
  problem.turns = in_order ? problem.counter + 1 : nullptr;

  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(q.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const BackwardLauncher launcher = type == DType::kBFloat16
                                        ? backward_launcher_for<DType::kBFloat16>(widest)
                                        : backward_launcher_for<DType::kFloat16>(widest);
  const char* failure = launcher(problem, stream);
  STD_TORCH_CHECK(failure == nullptr, "attention_bwd: ", failure);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? mask_tiles, "
      "Tensor? key_lengths, Tensor? query_lengths, int causal, int window_left, int window_right, "
      "float scale, float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor? counter, Tensor(c!)? scratch) -> ()");
  m.def(
      "attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, int max_seqlen_k, int causal, int window_left, int window_right, "
      "float scale, float dropout_p, Tensor? dropout_seed, int dropout_stream, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor counter, Tensor(c!)? column_keys) -> ()");
  m.def(
      "attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
      "Tensor? key_lengths, Tensor? query_lengths, Tensor out, Tensor lse, int causal, "
      "int window_left, int window_right, float scale, bool in_order, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) statistics, Tensor(e!) dq_sum, "
      "Tensor(f!) turns) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_fwd", TORCH_BOX(&fastattn::attention::attention_fwd));
  m.impl("attention_varlen_fwd", TORCH_BOX(&fastattn::attention::attention_varlen_fwd));
  m.impl("attention_bwd", TORCH_BOX(&fastattn::attention::attention_bwd));
}
