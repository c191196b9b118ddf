// The gradient of an additive mask: dS, summed over the dimensions that the mask is broadcast over.
// A thread block owns a tile of the gradient. It recomputes scores, weights and dS for every pair
// of blocks that the tile sums over, in a fixed order, so that results are bitwise reproducible.
// Pairs that are not allowed are left out one by one, so that NaN in dead rows and keys does not
// spread. Where tiles are few, thread blocks split the sum of a tile, and another kernel adds the
// splits.
//
// delta of the first launch contains the rounding error of the output. It shows in gradients more
// precise than the output, and in sums over all keys, which are zero in theory. For these, the same
// kernel first recomputes delta as the sum over keys of P dP.
//
// Read in this order: dmask_tiles.cuh, dmask_producer.cuh, dmask_consumer.cuh (the loop) and its
// base tile_products.cuh, dmask_sum.cuh, and this file; the host's side is in dmask_launch.cuh.
#pragma once

#include "attention/sm90/backward/dmask/dmask_consumer.cuh"
#include "attention/sm90/backward/dmask/dmask_producer.cuh"

namespace fastattn::attention {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_bwd_dmask_kernel(const __grid_constant__ DmaskArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<DmaskStorage<Traits>*>(shared_memory);
  // The shuffle tells the compiler that the value is the same in all lanes of a warp.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) {
    init_dmask_barriers<Traits>(shared);
  }
  __syncthreads();

  const DmaskLoop loop = loop_of<Traits>(args, blockIdx.x / args.dmask.splits);
  const Range items = items_of<Traits>(args, loop);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Traits::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);
    if (warp == 0 && ptx::elect_one()) {
      load_items<Traits>(shared, args, loop, items);
    }
  } else {
    ptx::setmaxnreg_inc<Traits::kConsumerRegisters>();
    DmaskConsumer<Traits>(shared, args, warpgroup - 1).run(loop, items);
  }
}

}  // namespace fastattn::attention
