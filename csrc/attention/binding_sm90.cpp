// fastattn_sm90's attention: from tensors to the kernels' arguments, and the choice of the
// instance.
#include <algorithm>

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
      return launcher_for<kType, Variant::kBias>(head_dim);
    case Variant::kMaskDropout:
      return launcher_for<kType, Variant::kMaskDropout>(head_dim);
    case Variant::kBiasDropout:
      return launcher_for<kType, Variant::kBiasDropout>(head_dim);
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

MaskType mask_type_of(const Tensor& mask) {
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

// Whether the copy engine can bring an additive mask from where it is.
bool read_in_place(const DenseMask& mask, MaskType own, int keys) {
  constexpr int64_t kAlignment = 16;
  const int64_t bytes = mask.type == MaskType::kFloat32 ? 4 : 2;
  const int64_t strides = mask.batch_stride | mask.head_stride | mask.row_stride;
  return (mask.type == own || mask.type == MaskType::kFloat32) &&
         strides * bytes % kAlignment == 0 && (mask.column_stride == 1 || keys == 1) &&
         reinterpret_cast<uintptr_t>(mask.data) % kAlignment == 0;
}

// Of a problem under a dense mask.
template <class Problem>
Variant variant_of(const Problem& p, MaskType type) {
  if (type == MaskType::kBool) {
    return p.dropout.seed ? Variant::kMaskDropout : Variant::kMask;
  }
  return p.dropout.seed ? Variant::kBiasDropout : Variant::kBias;
}

// A mask [batch or 1, heads or 1, queries or 1, keys or 1] without its workspace. sizes: 1 where it
// is broadcast.
template <class Problem>
DenseMask described_mask(const Tensor& mask, const std::optional<Tensor>& tiles, const Problem& p,
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
      const int64_t lines = i < 2 ? sizes[i] : pieces(sizes[i], 16);
      STD_TORCH_CHECK(tiles->size(i) == lines, "mask_tiles must have ", lines, " in dimension ", i,
                      ", got ", tiles->size(i));
      result.tile_strides[i] = lines == 1 ? 0 : tiles->stride(i);
    }
  }
  return result;
}

// Words of dropout's column keys where a dense mask's workspace follows them, aligned for it.
int64_t column_key_words(const ForwardProblem& p) {
  constexpr int kMaxBlock = 128, kAlignedWords = 4;
  return p.dropout.seed ? pieces(dropout::units(p.keys + kMaxBlock), kAlignedWords) * kAlignedWords
                        : 0;
}

// The same with the forward's workspace.
DenseMask mask_of(const Tensor& mask, const std::optional<Tensor>& tiles,
                  const std::optional<Tensor>& scratch, const ForwardProblem& p, const Tensor& q) {
  int sizes[4];
  DenseMask result = described_mask(mask, tiles, p, q, sizes);
  const bool additive = result.type != MaskType::kBool;
  STD_TORCH_CHECK(!additive || mask.size(3) == p.keys, "an additive mask must have all keys");
  const int head_dim = std::max(p.head_dim, p.value_dim);
  const Variant variant = variant_of(p, result.type);
  result.layout = mask_layout(
      sizes[0], sizes[1], sizes[2], p.batch, p.key_lengths.data || p.query_lengths.data, p.queries,
      p.keys, forward_tile_rows(head_dim, variant), forward_block(head_dim, variant));
  const MaskType own =
      dtype_of(q, "q") == DType::kBFloat16 ? MaskType::kBFloat16 : MaskType::kFloat16;
  const bool copied = additive && !read_in_place(result, own, p.keys);
  result.copy_type = result.type == own ? own : MaskType::kFloat32;
  constexpr int64_t kClassWords = sizeof(BlockClass) / sizeof(int);
  const int64_t bits = bit_words(result.layout), plain = plain_count(result.layout);
  const int64_t classes = class_count(result.layout);
  const int64_t copy = copied ? copied_elements(result.layout, p.queries, p.keys) /
                                    (result.copy_type == MaskType::kFloat32 ? 1 : 2)
                              : 0;
  const int64_t first = column_key_words(p);
  const int64_t total = first + bits + classes * kClassWords + copy + plain;
  STD_TORCH_CHECK(std::max(plain, classes) < kMaxTiles, "the mask is too large");
  STD_TORCH_CHECK(scratch && scratch->is_cuda() && scratch->is_contiguous() &&
                      scratch->get_device_index() == q.get_device_index() &&
                      scratch->scalar_type() == ScalarType::Int && scratch->numel() >= total,
                  "scratch must be ", total, " contiguous int32 on q's device");
  int* words = static_cast<int*>(scratch->data_ptr()) + first;
  result.bits = reinterpret_cast<uint32_t*>(words);
  result.classes = reinterpret_cast<BlockClass*>(words + bits);
  result.copy = copied ? words + bits + classes * kClassWords : nullptr;
  result.plain = words + bits + classes * kClassWords + copy;
  return result;
}

// parts [count, rows * (value_dim + 2)]: room for outputs of all parts, then for their statistics.
KeySplits splits_of(const std::optional<Tensor>& parts, const ForwardProblem& p, const Tensor& q,
                    int64_t row_tiles) {
  if (!parts) {
    return {};
  }
  constexpr int64_t kStatistics = sizeof(RowStatistics) / sizeof(float);
  const int64_t rows = int64_t{1} * p.batch * p.heads * p.queries;
  STD_TORCH_CHECK(parts->is_cuda() && parts->get_device_index() == q.get_device_index() &&
                      parts->scalar_type() == ScalarType::Float && parts->is_contiguous() &&
                      parts->dim() == 2 && parts->size(0) > 0 && parts->size(0) <= kMaxSplits &&
                      parts->size(1) == rows * (p.value_dim + kStatistics),
                  "parts must be contiguous float32 on q's device, 1 to ", kMaxSplits, " times ",
                  rows * (p.value_dim + kStatistics));
  const int64_t count = parts->size(0);
  STD_TORCH_CHECK(row_tiles * p.batch * p.heads * count <= kMaxTiles, "the tensors are too large");
  float* data = static_cast<float*>(parts->data_ptr());
  return {static_cast<int>(count), rows, data,
          reinterpret_cast<RowStatistics*>(data + count * rows * p.value_dim)};
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

// scratch: column keys of dropout, then what a dense mask needs, or without either room for the
// parts that keys are cut into.
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
    problem.mask = mask_of(*mask, mask_tiles, scratch, problem, q);
    launch(problem, q, variant_of(problem, problem.mask.type));
    return;
  }
  if (problem.dropout.seed) {
    launch(problem, q, Variant::kDropout);
    return;
  }
  problem.splits = splits_of(scratch, problem, q, queries / 64 + 1);
  cut_keys_of_one_query(problem);
  merge_groups(problem);
  launch(problem, q, wants_band(problem) ? Variant::kBand : Variant::kFull);
}

// counter: one zero, then room for the order of the sequences or nothing.
void attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                          int64_t max_seqlen_k, int64_t causal, int64_t window_left,
                          int64_t window_right, double scale, double dropout_p,
                          std::optional<Tensor> dropout_seed, int64_t dropout_stream, Tensor out,
                          Tensor lse, Tensor counter, std::optional<Tensor> scratch) {
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
  problem.dropout = dropout_of(dropout_p, dropout_seed, dropout_stream, scratch, q, max_keys);
  if (!problem.dropout.seed) {
    problem.splits = splits_of(scratch, problem, q, queries / 64 + 1 + sequences);
  }
  problem.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(counter.is_cuda() && counter.get_device_index() == q.get_device_index() &&
                      counter.scalar_type() == ScalarType::Int && counter.is_contiguous() &&
                      (counter.numel() == 1 || counter.numel() == 1 + sequences),
                  "counter must be 1 or ", 1 + sequences, " contiguous int32 on q's device");
  problem.counter = static_cast<int*>(counter.data_ptr());
  problem.packing.order = counter.numel() > 1 ? problem.counter + 1 : nullptr;
  const bool banded = causal != 0 || window_left >= 0 || window_right >= 0 || wants_band(problem);
  launch(problem, q,
         problem.dropout.seed ? Variant::kDropout
         : banded             ? Variant::kBand
                              : Variant::kFull);
}

// -- backward ------------------------------------------------------------------------------------
using BackwardLauncher = const char* (*)(const BackwardProblem&, cuda::Stream);

template <DType kType, Variant kVariant>
BackwardLauncher backward_launcher_for(int64_t head_dim) {
  if (head_dim <= 64) {
    return attention_bwd_sm90<kType, 64, kVariant>;
  }
  if (head_dim <= 96) {
    return attention_bwd_sm90<kType, 96, kVariant>;
  }
  if (head_dim <= 128) {
    return attention_bwd_sm90<kType, 128, kVariant>;
  }
  return head_dim <= 192 ? attention_bwd_sm90<kType, 192, kVariant>
                         : attention_bwd_sm90<kType, 256, kVariant>;
}

template <DType kType>
BackwardLauncher backward_launcher_for(int64_t head_dim, const BackwardProblem& problem) {
  if (!problem.mask.data) {
    return problem.dropout.seed ? backward_launcher_for<kType, Variant::kDropout>(head_dim)
                                : backward_launcher_for<kType, Variant::kBand>(head_dim);
  }
  switch (variant_of(problem, problem.mask.type)) {
    case Variant::kMaskDropout:
      return backward_launcher_for<kType, Variant::kMaskDropout>(head_dim);
    case Variant::kBiasDropout:
      return backward_launcher_for<kType, Variant::kBiasDropout>(head_dim);
    case Variant::kBias:
      return backward_launcher_for<kType, Variant::kBias>(head_dim);
    default:
      return backward_launcher_for<kType, Variant::kMask>(head_dim);
  }
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

// What a backward computes with besides its operands.
struct BackwardScratch {
  const Tensor &statistics, &dq_sum, &turns;
};

// Without workspace: the kernels before and after have the words they need.
Dropout backward_dropout_of(double p, const std::optional<Tensor>& seed, int64_t stream,
                            const Tensor& q) {
  if (p <= 0.0) {
    return {};
  }
  STD_TORCH_CHECK(seed, "dropout needs dropout_seed");
  const int threshold = dropout::threshold(p);
  return {cuda_data_of<int64_t>(*seed, "dropout_seed", q, ScalarType::Long, 1),
          static_cast<uint32_t>(stream), threshold, dropout::keep_scale(threshold), nullptr};
}

// Sizes, statistics, dropout and scratch memory; views and restrictions are left out. sequences:
// packed ones, otherwise 0.
BackwardProblem sized_backward_problem(const Tensor& q, const Tensor& lse,
                                       const std::optional<Tensor>& dlse, int64_t batch,
                                       int64_t heads, int64_t kv_heads, int64_t queries,
                                       int64_t keys, int64_t head_dim, int64_t value_dim,
                                       int64_t sequences, double scale, const Dropout& dropout,
                                       bool in_order, const BackwardScratch& scratch) {
  constexpr int64_t kMaxHeadDim = 256;
  // Every instance's blocks of 64 to 128 rows fit.
  constexpr int64_t kMinBlock = 64, kMaxBlock = 128, kChunk = 64, kTurnsPerBlock = 3;
  STD_TORCH_CHECK(dtype_of(q, "q") != DType::kFloat32, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(
      batch > 0 && queries > 0 && keys > 0 && kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
      "there must be queries, keys, and a multiple of their heads in q");
  const int64_t widest = std::max(head_dim, value_dim);
  STD_TORCH_CHECK(head_dim > 0 && value_dim > 0 && widest <= kMaxHeadDim, "head dims must be 1 to ",
                  kMaxHeadDim);
  const int64_t most_blocks = std::max(queries, keys) / kMinBlock + 1 + sequences;
  STD_TORCH_CHECK(queries <= kMaxRows && keys <= kMaxRows && batch * heads <= kMaxRows &&
                      most_blocks * batch * heads <= kMaxTiles,
                  "the tensors are too large");

  BackwardProblem problem;
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
  problem.scale = static_cast<float>(scale);
  const int64_t padded = batch * heads * (queries + kMaxBlock * (sequences + 1));
  const int64_t columns = (widest + kChunk - 1) / kChunk * kChunk;
  const int64_t blocks = batch * heads * (queries / kMinBlock + sequences + 1);
  problem.dropout = dropout;
  const int64_t statistics = 2 * padded + (dropout.seed ? dropout::units(padded) : 0);
  problem.statistics =
      cuda_data_of<float>(scratch.statistics, "statistics", q, ScalarType::Float, statistics);
  problem.dq_sum =
      cuda_data_of<float>(scratch.dq_sum, "dq_sum", q, ScalarType::Float, padded * columns);
  problem.counter =
      cuda_data_of<int>(scratch.turns, "turns", q, ScalarType::Int, 1 + kTurnsPerBlock * blocks);
  problem.turns = in_order ? problem.counter + 1 : nullptr;
  return problem;
}

// A mask and its workspace.
DenseMask backward_mask_of(const Tensor& mask, const std::optional<Tensor>& tiles,
                           const std::optional<Tensor>& scratch, const BackwardProblem& p,
                           const Tensor& q) {
  int sizes[4];
  DenseMask result = described_mask(mask, tiles, p, q, sizes);
  result.layout = backward_mask_layout(sizes[0], sizes[1], sizes[3], p.batch,
                                       p.key_lengths.data || p.query_lengths.data, p.queries,
                                       p.keys, std::max(p.head_dim, p.value_dim));
  STD_TORCH_CHECK(
      std::max(plain_count(result.layout), class_count(result.layout)) < kMaxTiles && scratch,
      "the mask is too large, or scratch is missing");
  place_in_scratch(result, cuda_data_of<int>(*scratch, "scratch", q, ScalarType::Int,
                                             backward_mask_words(result.layout)));
  return result;
}

// dmask: like the mask, or without elements if nobody wants it. parts: [count, *mask's sizes].
MaskGradient mask_gradient_of(const Tensor& dmask, const std::optional<Tensor>& parts,
                              const Tensor& mask, const Tensor& q) {
  MaskGradient result;
  if (dmask.numel() == 0) {
    return result;
  }
  STD_TORCH_CHECK(dmask.is_cuda() && dmask.get_device_index() == q.get_device_index() &&
                      dmask.scalar_type() == mask.scalar_type() && dmask.dim() == 4 &&
                      mask.scalar_type() != ScalarType::Bool,
                  "dmask must be like an additive mask");
  result.data = dmask.data_ptr();
  result.type = mask_type_of(dmask);
  int64_t tiles = 1;
  for (int i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(dmask.size(i) == mask.size(i), "dmask must have mask's size ", mask.size(i),
                    " in dimension ", i, ", got ", dmask.size(i));
    result.sizes[i] = static_cast<int>(dmask.size(i));
    result.strides[i] = dmask.stride(i);
    const int tile = i < 2 ? 1 : i == 2 ? kDmaskRows : kDmaskKeys;
    tiles *= pieces(result.sizes[i], tile);
  }
  if (parts) {
    const int64_t count = parts->size(0);
    result.parts = static_cast<int>(count);
    tiles *= count;
    result.partial =
        cuda_data_of<float>(*parts, "dmask_parts", q, ScalarType::Float, count * dmask.numel());
  }
  STD_TORCH_CHECK(tiles < kMaxTiles, "the mask is too large");
  return result;
}

void launch(const BackwardProblem& problem, const Tensor& q, const char* op) {
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(q.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const int head_dim = std::max(problem.head_dim, problem.value_dim);
  const BackwardLauncher launcher = dtype_of(q, "q") == DType::kBFloat16
                                        ? backward_launcher_for<DType::kBFloat16>(head_dim, problem)
                                        : backward_launcher_for<DType::kFloat16>(head_dim, problem);
  const char* failure = launcher(problem, stream);
  STD_TORCH_CHECK(failure == nullptr, op, ": ", failure);
}

void attention_bwd(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                   std::optional<Tensor> mask, std::optional<Tensor> mask_tiles,
                   std::optional<Tensor> key_lengths, std::optional<Tensor> query_lengths,
                   Tensor out, Tensor lse, int64_t causal, int64_t window_left,
                   int64_t window_right, double scale, double dropout_p,
                   std::optional<Tensor> dropout_seed, int64_t dropout_stream, bool in_order,
                   Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor statistics, Tensor dq_sum,
                   Tensor turns, std::optional<Tensor> scratch, std::optional<Tensor> dmask_parts) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v must have 4 dimensions");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), keys = k.size(2), value_dim = v.size(3);
  BackwardProblem problem = sized_backward_problem(
      q, lse, dlse, batch, heads, kv_heads, queries, keys, head_dim, value_dim, 0, scale,
      backward_dropout_of(dropout_p, dropout_seed, dropout_stream, q), in_order,
      {statistics, dq_sum, turns});
  problem.q = view_of(q, "q", q, batch, heads, queries, head_dim);
  problem.k = view_of(k, "k", q, batch, kv_heads, keys, head_dim);
  problem.v = view_of(v, "v", q, batch, kv_heads, keys, value_dim);
  problem.out = view_of(out, "out", q, batch, heads, queries, value_dim);
  problem.dout = view_of(dout, "dout", q, batch, heads, queries, value_dim);
  // A gradient that nobody wants has no elements.
  const auto gradient = [&](const Tensor& x, const char* name, const Tensor& of) {
    return x.numel() == 0 ? TensorView{}
                          : view_of(x, name, of, of.size(0), of.size(1), of.size(2), of.size(3));
  };
  problem.dq = gradient(dq, "dq", q);
  problem.dk = gradient(dk, "dk", k);
  problem.dv = gradient(dv, "dv", v);
  problem.query_lengths = lengths_of(query_lengths, "query_lengths", q);
  problem.key_lengths = lengths_of(key_lengths, "key_lengths", q);
  problem.band = band_of(causal, window_left, window_right, queries, keys);
  if (mask) {
    problem.mask = backward_mask_of(*mask, mask_tiles, scratch, problem, q);
    problem.dmask = mask_gradient_of(dmask, dmask_parts, *mask, q);
  }
  launch(problem, q, "attention_bwd");
}

void attention_varlen_bwd(Tensor dout, std::optional<Tensor> dlse, Tensor q, Tensor k, Tensor v,
                          Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse,
                          int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t causal,
                          int64_t window_left, int64_t window_right, double scale, double dropout_p,
                          std::optional<Tensor> dropout_seed, int64_t dropout_stream, bool in_order,
                          Tensor dq, Tensor dk, Tensor dv, Tensor statistics, Tensor dq_sum,
                          Tensor turns) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && cu_seqlens_q.dim() == 1 &&
                      cu_seqlens_q.size(0) > 0,
                  "q, k, v must have 3 dimensions, cu_seqlens_q one entry or more");
  const int64_t queries = q.size(0), heads = q.size(1), head_dim = q.size(2);
  const int64_t keys = k.size(0), kv_heads = k.size(1), value_dim = v.size(2);
  const int64_t sequences = cu_seqlens_q.size(0) - 1;
  BackwardProblem problem = sized_backward_problem(
      q, lse, dlse, 1, heads, kv_heads, queries, keys, head_dim, value_dim, sequences, scale,
      backward_dropout_of(dropout_p, dropout_seed, dropout_stream, q), in_order,
      {statistics, dq_sum, turns});
  problem.q = packed_view_of(q, "q", q, queries, heads, head_dim);
  problem.k = packed_view_of(k, "k", q, keys, kv_heads, head_dim);
  problem.v = packed_view_of(v, "v", q, keys, kv_heads, value_dim);
  problem.out = packed_view_of(out, "out", q, queries, heads, value_dim);
  problem.dout = packed_view_of(dout, "dout", q, queries, heads, value_dim);
  const auto gradient = [&](const Tensor& x, const char* name, const Tensor& of) {
    return x.numel() == 0 ? TensorView{}
                          : packed_view_of(x, name, of, of.size(0), of.size(1), of.size(2));
  };
  problem.dq = gradient(dq, "dq", q);
  problem.dk = gradient(dk, "dk", k);
  problem.dv = gradient(dv, "dv", v);
  problem.packing = {offsets_of(cu_seqlens_q, "cu_seqlens_q", q, sequences + 1),
                     offsets_of(cu_seqlens_k, "cu_seqlens_k", q, sequences + 1),
                     static_cast<int>(sequences),
                     static_cast<int>(std::clamp<int64_t>(max_seqlen_k, 0, keys)),
                     causal == kBottomRight,
                     static_cast<int>(std::clamp<int64_t>(max_seqlen_q, 0, queries))};
  problem.band = band_of(causal, window_left, window_right, queries, keys);
  problem.band.diagonal = 0;
  launch(problem, q, "attention_varlen_bwd");
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
      "Tensor(b!) lse, Tensor counter, Tensor(c!)? scratch) -> ()");
  m.def(
      "attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? mask, "
      "Tensor? mask_tiles, Tensor? key_lengths, Tensor? query_lengths, Tensor out, Tensor lse, int "
      "causal, "
      "int window_left, int window_right, float scale, float dropout_p, Tensor? dropout_seed, "
      "int dropout_stream, bool in_order, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, "
      "Tensor(d!) dmask, Tensor(e!) statistics, Tensor(f!) dq_sum, Tensor(g!) turns, "
      "Tensor(h!)? scratch, Tensor(i!)? dmask_parts) -> ()");
  m.def(
      "attention_varlen_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse, int max_seqlen_q, "
      "int max_seqlen_k, int causal, int window_left, int window_right, float scale, "
      "float dropout_p, Tensor? dropout_seed, int dropout_stream, bool in_order, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) statistics, Tensor(e!) dq_sum, "
      "Tensor(f!) turns) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_fwd", TORCH_BOX(&fastattn::attention::attention_fwd));
  m.impl("attention_varlen_fwd", TORCH_BOX(&fastattn::attention::attention_varlen_fwd));
  m.impl("attention_bwd", TORCH_BOX(&fastattn::attention::attention_bwd));
  m.impl("attention_varlen_bwd", TORCH_BOX(&fastattn::attention::attention_varlen_bwd));
}
