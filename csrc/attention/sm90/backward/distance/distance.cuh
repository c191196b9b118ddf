// The gradient of a bias by distance: sums of dS along diagonals. A thread block owns a band of
// distances of a head. It recomputes scores, weights and dS of the tiles of rows and keys that have
// these distances, in a fixed order, and sums the tiles element by element; at the end it sums the
// diagonals of this sum. Bands overlap, as a tile has more distances than two tiles of a row lie
// apart: another kernel adds up to four bands for each entry. Results are bitwise reproducible, and
// every allowed pair is recomputed once.
//
// Read in this order: distance_tiles.cuh, distance_consumer.cuh (the loop) and its base
// tile_products.cuh, and this file.
#pragma once

#include <atomic>

#include "attention/sm90/backward/distance/distance_consumer.cuh"
#include "attention/sm90/backward/mask_tensor_map.cuh"
#include "common/cuda_launch.cuh"
#include "sm90/ptx/tma.cuh"

namespace fastattn::attention {

// One thread.
template <class Traits>
__device__ __forceinline__ void load_distance_tiles(DistanceStorage<Traits>& shared,
                                                    const DistanceArguments& args,
                                                    const DistanceWork& work) {
  RingPosition<Traits::kStages> stage;
  const int kv_head = work.head / args.heads_per_kv;
  visit_tiles<Traits>(args, work, [&](const Sequence& sequence, int row, int key, int) {
    Slot& slot = shared.slots[stage.index()];
    slot.empty.wait(stage.phase() ^ 1);
    DmaskTiles<Traits>& tiles = shared.tiles[stage.index()];
    row += sequence.query_origin;
    key += sequence.key_origin;
    tiles.q.load(&args.q_map, slot.full, row, work.head, sequence.entry, ptx::kEvictLast);
    tiles.k.load(&args.k_map, slot.full, key, kv_head, sequence.entry, ptx::kEvictLast);
    tiles.dout.load(&args.dout_map, slot.full, row, work.head, sequence.entry, ptx::kEvictLast);
    tiles.v.load(&args.v_map, slot.full, key, kv_head, sequence.entry, ptx::kEvictLast);
    stage.advance();
  });
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_bwd_distance_kernel(const __grid_constant__ DistanceArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<DistanceStorage<Traits>*>(shared_memory);
  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_distance_barriers<Traits>(shared);
  }
  __syncthreads();

  const DistanceWork work = distance_work_of(args, blockIdx.x);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (warp == 0 && ptx::elect_one()) {
      load_distance_tiles<Traits>(shared, args, work);
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
    DistanceConsumer<Traits>(shared, args, warpgroup - 1).run(work);
  }
}

// -- bands ----------------------------------------------------------------------------------------
constexpr int kAddBandsThreads = 256;

// A thread: an entry of the gradient.
template <class Traits>
__global__ void __launch_bounds__(kAddBandsThreads)
    add_distance_bands_kernel(const __grid_constant__ DistanceGradient gradient) {
  const int64_t number = int64_t{blockIdx.x} * kAddBandsThreads + threadIdx.x;
  const int64_t row = number / gradient.entries;  // of a head and a sequence
  const int entry = static_cast<int>(number - row * gradient.entries);
  if (row >= gradient.rows) {
    return;
  }
  const Range bands = bands_of_entry(entry);
  float sum = 0.0f;
  for (int band = bands.begin; band < bands.end; ++band) {
    const int place = entry - band * kDmaskKeys + kBandOrigin;
    sum += gradient.partial[(row * gradient.bands + band - kFirstBand) * kBandEntries + place];
  }
  gradient.data[number] = sum;
}

// -- launcher -------------------------------------------------------------------------------------
// Called after the launches that write lse and delta in `args`.
template <DType kType, int kHeadDim, Variant kVariant>
const char* launch_distance_gradient(const BackwardProblem& p, const BackwardArguments& args,
                                     int device, cudaStream_t stream) {
  using Traits = DistanceTraits<typename TypeOf<kType>::Element, kHeadDim, kVariant>;
  using Shared = DistanceStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);
  constexpr CUtensorMapDataType kMapType = TypeOf<kType>::kMapType;
  DistanceArguments d;
  static_cast<BackwardArguments&>(d) = args;
  if (!sm90::encode_tensor_map(&d.q_map, kMapType, p.q, {p.batch, p.heads, p.queries, p.head_dim},
                               Traits::kRows) ||
      !sm90::encode_tensor_map(&d.k_map, kMapType, p.k, {p.batch, p.kv_heads, p.keys, p.head_dim},
                               Traits::kKeys) ||
      !sm90::encode_tensor_map(&d.v_map, kMapType, p.v, {p.batch, p.kv_heads, p.keys, p.value_dim},
                               Traits::kKeys) ||
      !sm90::encode_tensor_map(&d.dout_map, kMapType, p.dout,
                               {p.batch, p.heads, p.queries, p.value_dim}, Traits::kRows)) {
    return kRefusedMap;
  }
  d.gradient = p.ddistance;
  d.sequences = p.packing.query_offsets ? p.packing.sequences : p.batch;
  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_bwd_distance_kernel<Traits>;
  cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), device, allowed);
  if (!error) {
    error = launch(kernel, static_cast<int>(p.ddistance.rows * p.ddistance.bands), Traits::kThreads,
                   sizeof(Shared), stream, d, false);
  }
  if (!error) {
    const int64_t count = p.ddistance.rows * p.ddistance.entries;
    error = launch(add_distance_bands_kernel<Traits>,
                   static_cast<int>((count + kAddBandsThreads - 1) / kAddBandsThreads),
                   kAddBandsThreads, 0, stream, d.gradient, false);
  }
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
