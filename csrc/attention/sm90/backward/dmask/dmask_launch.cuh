// Launches the gradient of an additive mask (backward/dmask/dmask.cuh).
#pragma once

#include <atomic>

#include "attention/sm90/backward/bwd_tiles.cuh"
#include "attention/sm90/backward/dmask/dmask.cuh"
#include "attention/sm90/backward/mask_tensor_map.cuh"
#include "common/cuda_launch.cuh"

namespace fastattn::attention {

template <class Traits>
cudaError_t launch_dmask_tiles(const DmaskArguments& args, int device, cudaStream_t stream) {
  using Shared = DmaskStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_bwd_dmask_kernel<Traits>;
  if (cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), device, allowed)) {
    return error;
  }
  const int* sizes = args.dmask.sizes;
  const int tiles = sizes[0] * sizes[1] * ceil_div(sizes[2], Traits::kRows) *
                    ceil_div(sizes[3], Traits::kKeys) * args.dmask.splits;
  return launch(kernel, tiles, Traits::kThreads, sizeof(Shared), stream, args, false);
}

// Called after the launches that write and read lse and delta in `args`.
template <DType kType, int kHeadDim, Variant kVariant>
const char* launch_dmask(const BackwardProblem& p, const BackwardArguments& args, int device,
                         cudaStream_t stream) {
  using Traits = DmaskTraits<typename TypeOf<kType>::Element, kHeadDim, kVariant>;
  constexpr CUtensorMapDataType kMapType = TypeOf<kType>::kMapType;
  DmaskArguments d;
  const bool encoded =
      sm90::encode_tensor_map(&d.q_map, kMapType, p.q, {p.batch, p.heads, p.queries, p.head_dim},
                              Traits::kRows) &&
      sm90::encode_tensor_map(&d.k_map, kMapType, p.k, {p.batch, p.kv_heads, p.keys, p.head_dim},
                              Traits::kKeys) &&
      sm90::encode_tensor_map(&d.v_map, kMapType, p.v, {p.batch, p.kv_heads, p.keys, p.value_dim},
                              Traits::kKeys) &&
      sm90::encode_tensor_map(&d.dout_map, kMapType, p.dout,
                              {p.batch, p.heads, p.queries, p.value_dim}, Traits::kRows);
  d.bias_by_tma = args.bias_by_tma;
  if (!encoded ||
      (d.bias_by_tma && !encode_bias(&d.bias_map, p.mask, p.queries, p.keys, Traits::kRows))) {
    return kRefusedMap;
  }
  d.lse = args.lse2;
  d.delta = args.delta;
  d.lse_delta_rows = int64_t{args.row_blocks} * backward_rows(kHeadDim, Traits::kScores);
  d.dlse = nullptr;
  d.row_keys = args.row_keys;
  d.batch = p.batch;
  d.heads = p.heads;
  d.heads_per_kv = args.heads_per_kv;
  d.queries = p.queries;
  d.keys = p.keys;
  static_cast<LengthsAndBounds&>(d) = p;
  d.dropout = p.dropout;
  d.mask = p.mask;
  d.dmask = p.dmask;
  d.scale = p.scale;
  d.scale_log2 = args.scale_log2;
  d.modifications = args.modifications;
  const int* sizes = p.dmask.sizes;
  if (p.dmask.type == MaskType::kFloat32 || sizes[3] == 1) {
    DmaskArguments exact = d;
    exact.delta = nullptr;
    exact.dlse = p.dlse;
    exact.dmask = {args.delta,
                   MaskType::kFloat32,
                   {p.batch, p.heads, p.queries, 1},
                   {p.heads * d.lse_delta_rows, d.lse_delta_rows, 1, 0},
                   1,
                   nullptr};
    if (cudaError_t error = launch_dmask_tiles<Traits>(exact, device, stream)) {
      return cudaGetErrorString(error);
    }
  }
  cudaError_t error = launch_dmask_tiles<Traits>(d, device, stream);
  if (!error && p.dmask.splits > 1) {
    const int64_t count = int64_t{1} * sizes[0] * sizes[1] * sizes[2] * sizes[3];
    const int64_t blocks = (count + kAddSplitsThreads - 1) / kAddSplitsThreads;
    error = launch(add_dmask_splits_kernel<Traits>, static_cast<int>(blocks), kAddSplitsThreads, 0,
                   stream, d.dmask, false);
  }
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
