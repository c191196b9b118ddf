// Attention backward for Hopper, in three launches.
//
//   prepare   delta = rowsum(out dout) - dlse and lse in base 2, padded to whole blocks of rows;
//             zeroes the semaphores of the dQ sums and the counter
//   main      a thread block owns 64 or 128 keys of one key/value head and loops over the rows that
//             may attend them, in all query heads that share the head:
//               P^T = exp(K Q^T - lse),  dP^T = V dO^T,  dS^T = P^T (dP^T - delta)
//               dV += P^T dO,  dK += dS^T Q,  dQ += dS K
//   finish    dQ from fp32 in register order to the result's dtype and layout
//
// and more for the gradients of sinks (prepare_finish.cuh), of an additive mask (dmask.cuh) and of
// a bias by distance (distance.cuh).
//
// Up to head dim 128 each of two consumer warpgroups owns 64 of the keys: its dK and dV stay in
// registers for the whole loop, P and dS are used as operands from registers; only dQ, which sums
// over keys, needs dS in shared memory. Beyond, registers hold dK and dV of 64 keys in all: each
// warpgroup owns columns of them, computes the scores of some rows and shares them with the others
// through shared memory. dQ is summed in global memory by asynchronous adds, after the first block
// of keys has stored: in any order, or, for the same bits in every run, in the order of the keys.
// Lengths, causal masks and windows set the bounds of the loop; blocks at their edges are masked in
// registers. Packed sequences are processed one by one: blocks of rows and of keys begin where a
// sequence does. Dropout hashes rows in the first launch and keys once per thread. A dense mask is
// classified beforehand (mask_classes_bwd_sm90.cuh): blocks that it empties are skipped; an
// additive one is loaded into the shared memory that dS uses afterwards.
//
// Read in this order: bwd_config.cuh (shapes), bwd_tiles.cuh (arguments, which steps a thread block
// takes), bwd_storage.cuh (shared memory, barriers), bwd_producer.cuh, bwd_consumer.cuh (the loop),
// dq.cuh, and this file (the kernel and its launch). steps.cuh has what happens in a step besides
// products and softmax: bwd_masks.cuh by lengths and bounds, bwd_dense.cuh and bias.cuh by a dense
// mask, which dense_loads.cuh loads, bwd_scores.cuh by a soft cap and a bias by distance.
// weights.cuh has the softmax and dropout, gradients.cuh what leaves a warpgroup,
// prepare_finish.cuh the launches before and after. dq_once.cuh is a trial.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "attention/sm90/backward/bwd_workspace.h"
#include "attention/sm90/backward/distance/distance.cuh"
#include "attention/sm90/backward/dmask/dmask_launch.cuh"
#include "attention/sm90/backward/main/bwd_consumer.cuh"
#include "attention/sm90/backward/main/bwd_producer.cuh"
#include "attention/sm90/backward/main/dq.cuh"
#include "attention/sm90/backward/main/prepare_finish.cuh"
#include "attention/sm90/backward/mask_tensor_map.cuh"
#include "common/cuda_launch.cuh"
#include "sm90/ptx/grid.cuh"

namespace fastattn::attention {

// -- main kernel ---------------------------------------------------------------------------------
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_bwd_kernel(const __grid_constant__ BackwardArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<BackwardStorage<Traits>*>(shared_memory);

  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  ptx::griddepcontrol_wait();
  int number = 0;
  if (threadIdx.x == 0) {
    number = atomicAdd(args.counter, 1);  // its latency overlaps with what follows
    init_barriers<Traits>(shared);
    for (const CUtensorMap* map : {&args.q_map, &args.k_map, &args.v_map, &args.dout_map}) {
      ptx::prefetch_tensormap(map);
    }
    if (Traits::kBias && args.bias_by_tma) {
      ptx::prefetch_tensormap(&args.bias_map);
    }
    if constexpr (Traits::kPersistent) {
      write_block<Traits>(shared.works[0], args, number);
    } else {
      shared.works[0] = key_block_of<Traits>(args, number);
    }
  }
  __syncthreads();
  ptx::griddepcontrol_launch_dependents();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Traits::kConfig.producer_registers>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    const bool works = Traits::kPersistent || shared.works[0].steps > 0;
    if (works && warp <= Traits::kGroups && ptx::elect_one()) {
      if (warp == 0) {
        load_blocks<Traits>(shared, args);
      } else if (Traits::kPersistent || sums_dq(args)) {
        add_dq<Traits>(shared, args, warp - 1);
      }
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kConfig.consumer_registers>();
    BackwardConsumer<Traits>(shared, args, warpgroup - 1).run();
  }
}

// -- launcher ------------------------------------------------------------------------------------
// Key/value heads of an L2 swizzle group: their queries, output gradients and dQ sums fit into L2.
// Where all blocks of keys take equally long, a group has only as many heads as the multiprocessors
// compute at the same time, so that dQ sums are complete before they leave the cache. Elsewhere the
// order within a larger group balances the load.
inline int swizzle_group_heads(const BackwardProblem& p, int key_blocks, int multiprocessors) {
  constexpr int64_t kCacheBytes = int64_t{40} << 20;
  const int64_t row_bytes = int64_t{2} * (p.head_dim + p.value_dim) + int64_t{4} * p.head_dim;
  const int64_t queries = p.packing.query_offsets ? p.packing.max_queries : p.queries;
  const int64_t head_bytes = std::max<int64_t>(1, row_bytes * queries * (p.heads / p.kv_heads));
  int64_t fitting = std::max<int64_t>(1, kCacheBytes / head_bytes);
  const Range all = keys_of_all({0, p.queries}, p.bounds, p.keys);
  const bool varies = p.packing.query_offsets || p.mask.data || p.has_lengths();
  if (!varies && all.begin <= 0 && all.end >= p.keys) {
    fitting = std::min<int64_t>(fitting, ceil_div(multiprocessors, key_blocks));
  }
  return static_cast<int>(std::min<int64_t>(fitting, int64_t{p.batch} * p.kv_heads));
}

// False if the driver refuses a tensor map.
template <class Traits>
bool set_arguments(BackwardArguments& args, const BackwardProblem& p, CUtensorMapDataType type,
                   int multiprocessors) {
  const bool encoded =
      sm90::encode_tensor_map(&args.q_map, type, p.q, {p.batch, p.heads, p.queries, p.head_dim},
                              Traits::kRows) &&
      sm90::encode_tensor_map(&args.k_map, type, p.k, {p.batch, p.kv_heads, p.keys, p.head_dim},
                              Traits::kKeys) &&
      sm90::encode_tensor_map(&args.v_map, type, p.v, {p.batch, p.kv_heads, p.keys, p.value_dim},
                              Traits::kKeys) &&
      sm90::encode_tensor_map(&args.dout_map, type, p.dout,
                              {p.batch, p.heads, p.queries, p.value_dim}, Traits::kRows);
  args.bias_by_tma = adds<Traits>(p.mask) && readable_by_tma(p.mask, p.keys);
  if (!encoded || (args.bias_by_tma &&
                   !encode_bias(&args.bias_map, p.mask, p.queries, p.keys, Traits::kRows))) {
    return false;
  }
  args.out = p.out;
  args.dout = p.dout;
  args.dq = p.dq;
  args.dk = p.dk;
  args.dv = p.dv;
  args.lse = p.lse;
  args.dlse = p.dlse;
  args.dq_sum = p.dq_sum;
  args.dq_semaphores = p.dq_semaphores;
  args.in_order = p.in_order;
  args.counter = p.counter;
  args.heads = p.heads;
  args.heads_per_kv = p.heads / p.kv_heads;
  args.queries = p.queries;
  args.keys = p.keys;
  args.head_dim = p.head_dim;
  args.value_dim = p.value_dim;
  args.row_blocks = blocks_of(p.packing, p.queries, Traits::kRows);
  static_cast<LengthsAndBounds&>(args) = p;
  args.dropout = p.dropout;
  args.mask = p.mask;
  args.scale = p.scale;
  args.scale_log2 = p.scale * kLog2e;
  args.lse2 = p.lse2;
  args.delta = p.delta;
  args.row_keys = p.row_keys;
  args.sinks = p.sinks.data;
  args.sink_terms = p.sink_terms;
  args.modifications = to_device(p.modifications, p.scale);
  const int key_blocks = blocks_of(p.packing, p.keys, Traits::kKeys);
  args.order = {key_blocks, p.batch * p.kv_heads,
                swizzle_group_heads(p, key_blocks, multiprocessors)};
  return true;
}

template <DType kType, int kHeadDim, Variant kVariant, bool kShort = false>
const char* launch_backward(const BackwardProblem& p, cudaStream_t stream) {
  using Traits = BackwardTraits<typename TypeOf<kType>::Element, kHeadDim, kVariant, kShort>;
  using Shared = BackwardStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);

  int index = 0;
  cuda::Device device;
  if (cudaError_t error = cuda::current_device(&index, &device)) {
    return cudaGetErrorString(error);
  }
  if (device.capability != kHopper) {
    return "this kernel is built for Hopper (compute capability 9.0) only";
  }

  BackwardArguments args;
  if (!set_arguments<Traits>(args, p, TypeOf<kType>::kMapType, device.multiprocessors)) {
    return kRefusedMap;
  }

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = attention_bwd_kernel<Traits>;
  if (cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), index, allowed)) {
    return cudaGetErrorString(error);
  }
  if constexpr (Traits::kDense) {
    if (const char* failure = classify_mask_for_backward(p.mask, p, p.queries, p.keys, stream)) {
      return failure;
    }
  }
  const int row_blocks = args.row_blocks * p.batch * p.heads;
  int key_blocks = args.order.row_tiles * args.order.heads;
  if constexpr (Traits::kPersistent) {
    key_blocks = std::min(key_blocks, device.multiprocessors);
  }
  cudaError_t error = launch(attention_bwd_prepare_kernel<Traits>, row_blocks, kPrepareThreads, 0,
                             stream, args, false);
  if (!error) {
    error = launch(kernel, key_blocks, Traits::kThreads, sizeof(Shared), stream, args, true);
  }
  if (!error && p.dq.data && sums_dq(args)) {
    error = launch(attention_bwd_finish_kernel<Traits>, row_blocks, kFinishThreads,
                   sizeof(RowStage<Traits>), stream, args, true);
  }
  if (!error && p.dsinks) {
    error = launch(
        sum_sink_terms_kernel<Traits>, p.heads, kSumSinksThreads, kSumSinksThreads * sizeof(float),
        stream,
        SinkSumArguments{p.sink_terms, p.dsinks, p.batch, int64_t{args.row_blocks} * Traits::kRows},
        false);
  }
  const char* failure = error ? cudaGetErrorString(error) : nullptr;
  if constexpr (Traits::kScores) {
    if (!failure && p.ddistance.data) {
      failure = launch_distance_gradient<kType, kHeadDim, kVariant>(p, args, index, stream);
    }
  }
  if constexpr (Traits::kBias) {
    if (!failure && p.dmask.data) {  // the last one: it may overwrite delta
      failure = launch_dmask<kType, kHeadDim, kVariant>(p, args, index, stream);
    }
  }
  return failure;
}

template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_bwd_sm90(const BackwardProblem& p, cudaStream_t stream) {
#ifdef FASTATTN_TRIAL_BWD_ROWS
  if constexpr (kHeadDim == 128 && kVariant == Variant::kBounded) {
    if (has_short_blocks(p)) {
      return launch_backward<kType, kHeadDim, kVariant, true>(p, stream);
    }
  }
#endif
  return launch_backward<kType, kHeadDim, kVariant>(p, stream);
}

}  // namespace fastattn::attention
