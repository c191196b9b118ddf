// Attention forward for Hopper.
//
// A persistent thread block computes one tile after the other: 64 query rows of one head for each
// of two or three consumer warpgroups. One more warpgroup moves data (the producer):
//
//   load warp     gets tiles from the scheduler, loads Q, K and V by TMA, two K/V blocks ahead
//   consumers     S = Q K^T, online softmax, O += P V; P stays in registers
//   store warps   store finished output tiles to global memory, one warp per consumer warpgroup
//   bias warps    instead of these, with an additive mask: load it ahead of use
//
// Two things overlap the softmax with the tensor cores: a warpgroup issues Q K^T of the next block
// before P V of this one and computes its softmax while P V runs, and the warpgroups issue their
// products in ping-pong order where that pays. Blocks of keys are processed from the last to the
// first. Blocks that need masking run through a second copy of the loop body, so the main loop has
// no code for lengths, masks and windows: these only set its bounds. A dense mask is classified
// beforehand (mask_classes.h): empty blocks are skipped, full ones take the main loop. Where there
// are few tiles, keys are split (split-KV) and combine_splits.cuh combines the splits.
//
// Read in this order: fwd_config.cuh (shapes), fwd_tiles.cuh (arguments, which blocks a tile
// needs), fwd_storage.cuh (shared memory, barriers), fwd_producer.cuh, fwd_consumer.cuh (the main
// loop), fwd_across_tiles.cuh (a trial), and this file (the kernel and its launch). fwd_blocks.cuh
// has what happens to a block besides its products. output.cuh ends a tile, with sinks.cuh.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "attention/attention.h"
#include "attention/sm90/common.cuh"
#include "attention/sm90/forward/fwd_across_tiles.cuh"
#include "attention/sm90/forward/fwd_consumer.cuh"
#include "attention/sm90/forward/fwd_producer.cuh"
#include "attention/sm90/forward/fwd_storage.cuh"
#include "attention/sm90/forward/fwd_tiles.cuh"
#include "common/cuda_launch.cuh"
#include "sm90/tile/launch.cuh"
#include "sm90/tile/tensor_map.cuh"

namespace fastattn::attention {

// -- kernel ---------------------------------------------------------------------------------------
// Rows after the last packed sequence: output 0, lse -inf. Overlaps with the loads of first tiles.
template <class Traits>
__device__ __forceinline__ void clear_rest(const ForwardArguments& args) {
  constexpr int kPieceColumns = sm90::kPieceBytes / sizeof(typename Traits::Element);
  const int first = args.packing.query_offsets[args.packing.sequences];
  const int pieces = args.value_dim / kPieceColumns;
  const int64_t count = static_cast<int64_t>(args.queries - first) * args.heads * pieces;
  const int consumers = Traits::kGroups * kWarpgroup;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * consumers + threadIdx.x - kWarpgroup;
#pragma unroll 1
  for (int64_t i = start; i < count; i += static_cast<int64_t>(gridDim.x) * consumers) {
    const int64_t place = i / pieces;
    const int piece = static_cast<int>(i - place * pieces);
    const int64_t row = first + place / args.heads;
    const int64_t head = place % args.heads;
    typename Traits::Element* out = static_cast<typename Traits::Element*>(args.out.data) +
                                    row * args.out.row_stride + head * args.out.head_stride;
    *reinterpret_cast<uint4*>(out + piece * kPieceColumns) = {};
    if (piece == 0) {
      args.lse[head * args.queries + row] = kMinusInfinity;
    }
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_fwd_kernel(const __grid_constant__ ForwardArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_memory);

  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_barriers<Traits>(shared);
    for (const CUtensorMap* map : {&args.q, &args.k, &args.v}) {
      ptx::prefetch_tensormap(map);
    }
    if (adds<Traits>(args.mask)) {
      ptx::prefetch_tensormap(&args.bias);
    }
  }
  __syncthreads();

  if (warpgroup == 0) {
    if constexpr (Traits::kGroups > 1) {
      ptx::setmaxnreg_dec<Traits::kRegisters.producer>();
    }
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    const bool elected = ptx::elect_one();
    if (warp == 0) {
      if (elected) {
        LoadWarp<Traits>{shared, args}.run();
      }
    } else if constexpr (Traits::kStagesOutput) {
      if (warp <= Traits::kGroups && elected) {
        store_tiles<Traits>(shared, args, warp - 1);
      }
    } else if constexpr (Traits::kBias) {
      if (warp <= Traits::kGroups && elected) {
        load_bias<Traits>(shared, args, warp - 1);
      }
    }
  } else {
    if constexpr (Traits::kGroups > 1) {
      ptx::setmaxnreg_inc<Traits::kRegisters.consumer>();
    }
    if (args.packing.query_offsets) {
      clear_rest<Traits>(args);
    }
    Consumer<Traits> consumer(shared, args, warpgroup - 1);
    if constexpr (Traits::kAcrossTiles) {
      run_across_tiles(consumer);
    } else {
      consumer.run();
    }
  }
}

// -- launcher -------------------------------------------------------------------------------------
// Heads of an L2 swizzle group: their keys and values take at most 32 MiB of the L2 cache's 50 MB.
inline int swizzle_group_heads(const ForwardProblem& p, int tile_rows, int multiprocessors) {
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  const int64_t group = p.heads / p.kv_heads;
  const int64_t keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
  const int64_t head_bytes =
      std::max<int64_t>(1, int64_t{2} * keys * (p.head_dim + p.value_dim) / group);
  int64_t most = kCacheBytes / head_bytes;
#ifdef FASTATTN_TRIAL_FWD_SWIZZLE
  // The first thread blocks load keys and values of all heads of a group: no more heads than fill
  // two waves of tiles.
  const int queries = p.packing.query_offsets ? p.packing.max_queries : p.queries;
  most = std::min<int64_t>(most, 2 * multiprocessors / larger(ceil_div(queries, tile_rows), 1));
#endif
  int swizzle_group = 1;
  while (2 * swizzle_group <= most && swizzle_group < p.batch * p.heads) {
    swizzle_group *= 2;
  }
  return std::min(swizzle_group, p.batch * p.heads);
}

// The tensor map of an additive mask, or of its copy, as 16-bit columns. If the mask is broadcast
// over rows, its boxes have one row.
template <class Traits>
bool encode_bias(CUtensorMap* map, const ForwardProblem& p) {
  if (!adds<Traits>(p.mask)) {
    return true;
  }
  const MaskLayout& layout = p.mask.layout;
  const int rows = layout.rows > 1 ? p.queries : 1;
  TensorView view = {const_cast<void*>(p.mask.data), p.mask.batch_stride, p.mask.head_stride,
                     p.mask.row_stride};
  if (p.mask.copy) {
    const int64_t head = int64_t{rows} * copied_columns(p.keys);
    view = {p.mask.copy, head * layout.heads, head, copied_columns(p.keys)};
  }
  const MaskType type = p.mask.copy ? p.mask.copy_type : p.mask.type;
  const int halves = type == MaskType::kFloat32 ? 2 : 1;
  view.batch_stride *= halves;
  view.head_stride *= halves;
  view.row_stride *= halves;
  return sm90::encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, view,
                                 {layout.batches, layout.heads, rows, p.keys * halves},
                                 rows > 1 ? kMmaRows : 1);
}

template <DType kType, class Traits>
const char* launch_forward(const ForwardProblem& p, cudaStream_t stream) {
  using Shared = SharedStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  constexpr CUtensorMapDataType kMapType = TypeOf<kType>::kMapType;

  int index = 0;
  cuda::Device device;
  if (cudaError_t error = cuda::current_device(&index, &device)) {
    return cudaGetErrorString(error);
  }
  if (device.capability != kHopper) {
    return "this kernel is built for Hopper (compute capability 9.0) only";
  }

  ForwardArguments args;
  const Pages& pages = p.pages;
  const int batch = Traits::kPaged ? pages.count : p.batch;
  const int keys = Traits::kPaged ? page_size(pages) : p.keys;
  const int box = Traits::kPaged ? page_box_rows(pages, Traits::kBlock) : Traits::kBlock;
  const bool encoded =
      sm90::encode_tensor_map(&args.q, kMapType, p.q, {p.batch, p.heads, p.queries, p.head_dim},
                              kMmaRows) &&
      sm90::encode_tensor_map(&args.k, kMapType, p.k, {batch, p.kv_heads, keys, p.head_dim}, box) &&
      sm90::encode_tensor_map(&args.v, kMapType, p.v, {batch, p.kv_heads, keys, p.value_dim},
                              box) &&
      (!Traits::kStagesOutput ||
       sm90::encode_tensor_map(&args.out_map, kMapType, p.out,
                               {p.batch, p.heads, p.queries, p.value_dim}, kMmaRows));
  if (!encoded || !encode_bias<Traits>(&args.bias, p)) {
    return "the driver refused a tensor map: addresses and strides must be "
           "multiples of 16 bytes";
  }
  args.out = p.out;
  args.lse = p.lse;
  args.heads = p.heads;
  args.heads_per_kv = p.heads / p.kv_heads;
  args.queries = p.queries;
  args.keys = p.keys;
  args.value_dim = p.value_dim;
  static_cast<LengthsAndBounds&>(args) = p;
  args.dropout = p.dropout;
  args.mask = p.mask;
  args.splits = p.splits;
  args.pages = p.pages;
  args.sinks = p.sinks;
  args.modifications = to_device(p.modifications, std::abs(p.scale));
  args.mask.type = p.mask.copy ? p.mask.copy_type : p.mask.type;
  // At scale 0 the smallest positive factor gives the same weights; 0 would turn -inf into NaN.
  args.scale_log2 = std::max(std::abs(p.scale) * kLog2e, std::numeric_limits<float>::min());
  args.negate = p.scale < 0.0f;
  // An upper bound for packed sequences, each of which may end in a partial tile.
  const int row_tiles =
      (p.queries + Traits::kTileRows - 1) / Traits::kTileRows + p.packing.sequences;
  args.order = {
      row_tiles, p.batch * p.heads,
      Traits::kBounded ? swizzle_group_heads(p, Traits::kTileRows, device.multiprocessors) : 1};
  args.tiles = row_tiles * p.batch * p.heads;
  const int blocks = std::min(args.tiles * p.splits.count, device.multiprocessors);
  args.source = {p.counter, blocks};

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_fwd_kernel<Traits>;
  if (cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), index, allowed)) {
    return cudaGetErrorString(error);
  }
#ifndef FASTATTN_TRIAL_FWD_COUNTER
  if (p.counter) {
    if (cudaError_t error = cudaMemsetAsync(p.counter, 0, sizeof(*p.counter), stream)) {
      return cudaGetErrorString(error);
    }
  }
#endif
  if constexpr (Traits::kDense) {
    if (const char* failure = classify_mask(p.mask, p, p.queries, p.keys, stream)) {
      return failure;
    }
  }
  if (p.packing.order) {
    if (const char* failure = order_sequences(p.packing, stream)) {
      return failure;
    }
  }
  int units = 0;
  if (drops<Traits>(p.dropout)) {
    const int keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
    units = dropout::units((keys + Traits::kBlock - 1) / Traits::kBlock * Traits::kBlock);
  }
#ifdef FASTATTN_TRIAL_FWD_COUNTER
  // One launch hashes columns and zeroes the counter, and the kernel begins beside it.
  if (units > 0 || p.counter) {
    if (const char* failure = hash_columns(p.dropout, units, stream, p.counter)) {
      return failure;
    }
    const cudaError_t error =
        sm90::launch(kernel, blocks, Traits::kThreads, sizeof(Shared), stream, args, true);
    const char* failure = error ? cudaGetErrorString(error) : nullptr;
    return failure || p.splits.count == 1 ? failure : combine_splits<kType>(p, stream);
  }
#else
  if (const char* failure = hash_columns(p.dropout, units, stream)) {
    return failure;
  }
#endif
  kernel<<<blocks, Traits::kThreads, sizeof(Shared), stream>>>(args);
  if (cudaError_t error = cudaGetLastError()) {
    return cudaGetErrorString(error);
  }
  return p.splits.count > 1 ? combine_splits<kType>(p, stream) : nullptr;
}

template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_fwd_sm90(const ForwardProblem& p, cudaStream_t stream) {
  using Traits = ForwardTraits<typename TypeOf<kType>::Element, kHeadDim, kVariant>;
#ifdef FASTATTN_TRIAL_FWD_ONE_WARPGROUP
  if constexpr (Traits::kSplits && kHeadDim == 128) {
    if ((p.packing.query_offsets ? p.packing.max_queries : p.queries) <= kMmaRows) {
      return launch_forward<kType, OneWarpgroup<Traits>>(p, stream);
    }
  }
#endif
  return launch_forward<kType, Traits>(p, stream);
}

}  // namespace fastattn::attention
