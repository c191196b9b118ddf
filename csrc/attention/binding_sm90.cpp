// fastattn_sm90's attention: from tensors to the kernels' arguments, and the choice of the
// instance.
#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "common/cuda_stream.h"
#include "common/torch_binding.h"

namespace fastattn::attention {
namespace {

// Sizes up to here keep every sum of positions inside 32 bits.
constexpr int64_t kMaxRows = int64_t{1} << 28;
constexpr int64_t kMaxTiles = int64_t{1} << 30;
constexpr int kBottomRight = 2;

using Launcher = const char* (*)(const ForwardProblem&, cuda::Stream);

template <DType kType, bool kBanded>
Launcher launcher_for(int64_t head_dim) {
  if (head_dim <= 64) {
    return attention_fwd_sm90<kType, 64, kBanded>;
  }
  if (head_dim <= 96) {
    return attention_fwd_sm90<kType, 96, kBanded>;
  }
  if (head_dim <= 128) {
    return attention_fwd_sm90<kType, 128, kBanded>;
  }
  if (head_dim <= 192) {
    return attention_fwd_sm90<kType, 192, kBanded>;
  }
  return attention_fwd_sm90<kType, 256, kBanded>;
}

Launcher launcher_for(DType type, int64_t head_dim, bool banded) {
  if (type == DType::kBFloat16) {
    return banded ? launcher_for<DType::kBFloat16, true>(head_dim)
                  : launcher_for<DType::kBFloat16, false>(head_dim);
  }
  return banded ? launcher_for<DType::kFloat16, true>(head_dim)
                : launcher_for<DType::kFloat16, false>(head_dim);
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

void attention_fwd(Tensor q, Tensor k, Tensor v, std::optional<Tensor> key_lengths,
                   std::optional<Tensor> query_lengths, int64_t causal, int64_t window_left,
                   int64_t window_right, double scale, Tensor out, Tensor lse,
                   std::optional<Tensor> counter) {
  const DType type = dtype_of(q, "q");
  STD_TORCH_CHECK(type != DType::kFloat32, "q must be bfloat16 or float16");
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4, "q, k, v must have 4 dimensions");
  const int64_t batch = q.size(0), heads = q.size(1), queries = q.size(2), head_dim = q.size(3);
  const int64_t kv_heads = k.size(1), keys = k.size(2), value_dim = v.size(3);
  STD_TORCH_CHECK(queries <= kMaxRows && keys <= kMaxRows && batch * heads <= kMaxRows &&
                      (queries / 64 + 1) * batch * heads <= kMaxTiles,
                  "the tensors are too large");
  if (batch == 0 || heads == 0 || queries == 0) {
    return;
  }
  STD_TORCH_CHECK(keys > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0 &&
                      value_dim > 0 && std::max(head_dim, value_dim) <= 256,
                  "there must be keys, a multiple of their heads in q, and head dims up to 256");
  STD_TORCH_CHECK(lse.is_cuda() && lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                      lse.numel() == batch * heads * queries,
                  "lse must be a contiguous float32 CUDA tensor of ", batch * heads * queries);
  STD_TORCH_CHECK(!counter || (counter->is_cuda() && counter->numel() == 1 &&
                               counter->scalar_type() == ScalarType::Int),
                  "counter must be one int32 on the GPU");

  ForwardProblem problem;
  problem.q = view_of(q, "q", q, batch, heads, queries, head_dim);
  problem.k = view_of(k, "k", q, batch, kv_heads, keys, head_dim);
  problem.v = view_of(v, "v", q, batch, kv_heads, keys, value_dim);
  problem.out = view_of(out, "out", q, batch, heads, queries, value_dim);
  problem.lse = static_cast<float*>(lse.data_ptr());
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
  problem.counter = counter ? static_cast<int*>(counter->data_ptr()) : nullptr;

  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(q.get_device_index(), &stream),
                  "this torch has no CUDA streams");
  const bool banded = causal != 0 || window_left >= 0 || window_right >= 0;
  const Launcher launch = launcher_for(type, std::max(head_dim, value_dim), banded);
  const char* failure = launch(problem, stream);
  STD_TORCH_CHECK(failure == nullptr, "attention_fwd: ", failure);
}

}  // namespace
}  // namespace fastattn::attention

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor? key_lengths, Tensor? query_lengths, "
      "int causal, int window_left, int window_right, float scale, Tensor(a!) out, "
      "Tensor(b!) lse, Tensor? counter) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("attention_fwd", TORCH_BOX(&fastattn::attention::attention_fwd));
}
