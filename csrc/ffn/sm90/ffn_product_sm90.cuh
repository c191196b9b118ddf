// A matrix product of the feed-forward network for Hopper, with an epilogue.
//
// A persistent thread block computes one tile of the result after the other: 128 rows times 128 or
// 256 columns. Its load thread brings 64 of the summed dimension at a time into a ring of four
// slots by TMA, and two consumer warpgroups multiply by wgmma. Except for dx and
// dw, each computes tiles of its own, in ping-pong order, so that one's epilogue runs while the
// other multiplies; for these both share a tile. TMA reads zeros outside operands, and writes
// nothing outside results.
//
// Read in this order: ffn_sm90.h (the steps), config.cuh (shapes), storage.cuh (shared memory,
// barriers), producer.cuh, consumer.cuh (the main loop), epilogue.cuh, and this file (the kernel
// and its launch). operand.cuh has the layouts of operands, box_dropout.cuh the dropout of an
// epilogue, column_sums.cuh the sums of columns.
#pragma once

#include <algorithm>
#include <atomic>

#include "common/cuda_launch.cuh"
#include "ffn/sm90/consumer.cuh"
#include "ffn/sm90/producer.cuh"
#include "sm90/ptx/grid.cuh"
#include "sm90/tile/launch.cuh"
#include "sm90/tile/tensor_map.cuh"

namespace fastattn::ffn {

// -- kernel ---------------------------------------------------------------------------------------
template <class Traits>
__global__ void __launch_bounds__(kThreads, 1)
    ffn_product_kernel(const __grid_constant__ ProductArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(shared_memory);

  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_barriers<Traits>(shared);
    ptx::prefetch_tensormap(&args.a);
    ptx::prefetch_tensormap(&args.b);
  }
  __syncthreads();
#ifdef FASTATTN_TRIAL_FFN_DEPENDENT
  // The next product begins on multiprocessors that this one no longer needs.
  if (!args.independent) {
    ptx::griddepcontrol_wait();
  }
  ptx::griddepcontrol_launch_dependents();
#endif

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (warp == 0 && ptx::elect_one()) {
      load_tiles<Traits>(shared, args);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    Consumer<Traits>(shared, args, warpgroup - 1).run();
  }
#ifdef FASTATTN_TRIAL_FFN_DEPENDENT
  // Whatever waits for this launch waits for the one before it, too.
  ptx::griddepcontrol_wait();
#endif
}

// -- launcher -------------------------------------------------------------------------------------
inline bool encode_operand(CUtensorMap* map, CUtensorMapDataType type, const Matrix& x,
                           int box_rows) {
  const TensorView view = {x.data, 0, 0, x.stride};
  return sm90::encode_tensor_map(map, type, view, {1, 1, x.rows, x.columns}, box_rows);
}

// A tensor [parts, rows, pairs, columns] that epilogues access in boxes, if it is there.
inline bool encode_boxes(CUtensorMap* map, CUtensorMapDataType type, const ProductShape& shape,
                         int parts, int pairs, const void* data, int64_t row_stride) {
  const TensorView view = {const_cast<void*>(data), row_stride * shape.rows, shape.columns,
                           row_stride};
  return !data || sm90::encode_tensor_map(
                      map, type, view, {parts, pairs, shape.rows, shape.columns}, sm90::kWarpRows);
}

template <class Traits>
bool encode_epilogue(ProductArguments& args, CUtensorMapDataType type, const ProductShape& shape,
                     const Product& p) {
  constexpr int kPairs = Traits::kPairs;
  const Epilogue& e = p.epilogue;
  const int64_t stride = int64_t{kPairs} * shape.columns;
  const CUtensorMapDataType of_out = e.out_is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : type;
  return encode_boxes(&args.loaded, of_out, shape, 1, kPairs,
                      Traits::kDhidden ? e.hidden : e.residual,
                      Traits::kDhidden ? stride : e.residual_stride) &&
         encode_boxes(&args.out, of_out, shape, p.parts, kPairs, e.out, stride) &&
         encode_boxes(&args.activated, type, shape, 1, 1, e.activated, shape.columns);
}

template <DType kType, Step kStep>
const char* ffn_product_sm90(const Product& p, cuda::Stream stream) {
  using Traits = ProductTraits<typename TypeOf<kType>::Element, kStep>;
  using Shared = SharedStorage<Traits>;
  static_assert(sizeof(Shared) <= kMaxSharedBytes);

  int index = 0;
  cuda::Device device;
  if (cudaError_t error = cuda::current_device(&index, &device)) {
    return cudaGetErrorString(error);
  }
  if (device.capability != kHopper) {
    return "this kernel is built for Hopper (compute capability 9.0) only";
  }
  const ProductShape shape = shape_of(kStep, p.a, p.b);
  ProductArguments args;
  const bool encoded =
      encode_operand(&args.a, TypeOf<kType>::kMapType, p.a, box_rows<typename Shared::TileA>(1)) &&
      encode_operand(&args.b, TypeOf<kType>::kMapType, p.b,
                     box_rows<typename Shared::TileB>(Traits::kPairsRows ? 2 : 1)) &&
      encode_epilogue<Traits>(args, TypeOf<kType>::kMapType, shape, p);
  if (!encoded) {
    return "the driver refused a tensor map: addresses and strides must be "
           "multiples of 16 bytes";
  }
  args.rows = shape.rows;
  args.columns = shape.columns;
  args.steps = tiles_of(tiles_of(shape.depth, kDepth), p.parts);
  args.row_tiles = row_tiles(shape.rows);
  args.column_tiles = tiles_of(shape.columns, Traits::kOutColumns);
  args.parts = p.parts;
  args.epilogue = p.epilogue;
#ifdef FASTATTN_TRIAL_FFN_DEPENDENT
  args.independent = p.independent;
  constexpr bool kDependent = true;
#else
  constexpr bool kDependent = false;
#endif
  const int blocks =
      std::min(args.row_tiles * args.column_tiles * args.parts, device.multiprocessors);

  static std::atomic<uint64_t> allowed{0};
  const auto kernel = ffn_product_kernel<Traits>;
  cudaError_t error = cuda::allow_shared_memory(kernel, sizeof(Shared), index, allowed);
  error = error ? error
                : sm90::launch(kernel, blocks, kThreads, sizeof(Shared), stream, args, kDependent);
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::ffn
