// The consumer warpgroups: the sums of their tiles by wgmma, then the epilogue.
#pragma once

#include "ffn/sm90/storage.cuh"
#include "ffn/sm90/tiles.cuh"
#ifdef FASTATTN_TRIAL_FFN_LOOP
#include "ffn/sm90/epilogue_loop.cuh"
#else
#include "ffn/sm90/epilogue.cuh"
#endif

namespace fastattn::ffn {

using sm90::RingPosition;

template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  using Shared = SharedStorage<Traits>;
  using Mma = ptx::Wgmma<Traits::kColumns>;

  Shared& shared;
  const ProductArguments& args;
  const int group;
  const bool leader;
  RingPosition<Traits::kStages> at = {};
  uint32_t parities = 0;  // of the next phase of each slot's `full`, a bit each
  float rSums[Traits::kBlocks][Traits::kColumns / 2];

  __device__ __forceinline__ Consumer(Shared& shared, const ProductArguments& args, int group)
      : shared(shared), args(args), group(group), leader(threadIdx.x % kWarpgroup == 0) {}

  __device__ __forceinline__ void run() {
    if (Traits::kPingPong && group == 1) {
      arrive_ping_pong();  // warpgroup 0 begins
    }
    // n counts the tiles of the thread block.
#pragma unroll 1
    for (int n = Traits::kPingPong ? group : 0; tile_number(n) < tile_count(args);
         n += Traits::kPingPong ? kGroups : 1) {
      at = {static_cast<uint32_t>(n) * args.steps};
      TileEpilogue<Traits> epilogue(shared, args, tile_place(args, tile_number(n)), group,
                                    Traits::kPingPong ? n / kGroups : n);
      epilogue.begin();
      wait_ping_pong();
      issue_products();
      if (tile_number(n + 1) < tile_count(args)) {
        arrive_ping_pong();
      }
      epilogue.load_bias();
      await_products();
      epilogue.run(rSums);
    }
    // The stores have read their shared memory before it is given up.
    ptx::cp_async_bulk_wait_group_read<0>();
  }

  __device__ __forceinline__ int tile_number(int n) const { return blockIdx.x + n * gridDim.x; }

  // All but the last product's operands are released.
  __device__ __forceinline__ void issue_products() {
    // Matrix descriptors of slot 0; other slots are an offset away.
    const uint64_t a_base = sm90::descriptor_at(
        shared.a[0].descriptor(), Traits::kPingPong ? 0 : group * Shared::TileA::kBlockBytes);
    const uint64_t b_base = shared.b[0].descriptor();
    pin_sums();
#pragma unroll 1
    for (int step = 0; step < args.steps; ++step) {
      await_operands();
      issue_step(sm90::descriptor_at(a_base, at.index() * Shared::TileA::kBytes),
                 sm90::descriptor_at(b_base, at.index() * Shared::TileB::kBytes), step > 0);
      at.advance();
      if (step > 0) {
        ptx::wgmma_wait_group<1>();
        release(at.passed - 2);
      }
    }
  }

  __device__ __forceinline__ void await_operands() {
    const int slot = at.index();
    shared.full[slot][Traits::kPingPong ? group : 0].wait(parities >> slot & 1);
    parities ^= 1u << slot;
  }

  __device__ __forceinline__ void issue_step(uint64_t a, uint64_t b, bool accumulate) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / kMmaK; ++k) {
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        Mma::template ss<Element, Shared::TileB::kMajor, Shared::TileA::kMajor>(
            rSums[block],
            sm90::descriptor_at(a,
                                block * Shared::TileA::kBlockBytes + Shared::TileA::step_bytes(k)),
            sm90::descriptor_at(b, Shared::TileB::step_bytes(k)), k > 0 || accumulate);
      }
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void await_products() {
    ptx::wgmma_wait_group<0>();
    pin_sums();
    release(at.passed - 1);
  }

  __device__ __forceinline__ void pin_sums() {
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      ptx::pin(rSums[block]);
    }
  }

  // The slot of step number `passed`: all warps have waited for it, or their product would not be
  // complete.
  __device__ __forceinline__ void release(uint32_t passed) {
    if (leader) {
      shared.empty[RingPosition<Traits::kStages>{passed}.index()].arrive();
    }
  }

  // In ping-pong, warpgroups issue the products of their tiles one after the other: the first one's
  // are complete early, and its epilogue runs beside the other's.
  __device__ __forceinline__ void wait_ping_pong() const {
    if constexpr (Traits::kPingPong) {
      ptx::bar_sync(kPingPongBarrier + group, kGroups * kWarpgroup);
    }
  }
  __device__ __forceinline__ void arrive_ping_pong() const {
    if constexpr (Traits::kPingPong) {
      ptx::bar_arrive(kPingPongBarrier + (group ^ 1), kGroups * kWarpgroup);
    }
  }
};

}  // namespace fastattn::ffn
