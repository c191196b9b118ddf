// The consumer warpgroups: products by wgmma, and the online softmax between them.
#pragma once

#include "attention/sm90/forward/fwd_blocks.cuh"
#include "attention/sm90/forward/online_softmax.cuh"
#include "attention/sm90/forward/output.cuh"

namespace fastattn::attention {

// One warpgroup: 64 query rows. All of its threads issue the products.
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kBlock = Traits::kBlock;
  using OutputMma = ptx::Wgmma<Traits::kHeadDim>;

  ForwardPart<Traits> state;
  TileQueue::Position position;

  // Matrix descriptors of slot 0; other slots are an offset away.
  const uint64_t q_base, k_base, v_base;

  BlockScores<Traits> rS;          // scores, then weights, of 64 x kBlock
  uint32_t rP[kBlock / 4];         // weights as A operand
  float rO[Traits::kHeadDim / 2];  // output of 64 x kHeadDim
  typename Traits::Softmax softmax;

  __device__ __forceinline__ Consumer(SharedStorage<Traits>& shared, const ForwardArguments& args,
                                      int warpgroup)
      : state(shared, args, warpgroup),
        q_base(sm90::descriptor_k_major(shared.q[0][warpgroup].address())),
        k_base(sm90::descriptor_k_major(shared.k[0].address())),
        v_base(sm90::descriptor_n_major(shared.v[0].address(), Traits::KeyTile::kChunkBytes)) {}

  __device__ __forceinline__ void run() {
    if (Traits::kPingPong && state.group == Traits::kGroups - 1) {
      state.arrive_ping_pong();  // warpgroup 0 issues first
    }
#pragma unroll 1
    while (true) {
      const TileInfo& tile = state.shared.queue.peek(position);
      if (tile.row < 0) {
        return;
      }
      const BlockPlan& plan = state.plan_of(tile, position);
      float factor[2];
      clear(rO);
      softmax.start();
      if (is_empty(plan.loaded)) {
        close_rows(state, softmax, tile, factor);
      } else if constexpr (Traits::kDense) {
        attend(ListedBlocks<Traits>{state, tile}, tile, factor);
      } else {
        state.skip_blocks(plan.loaded.end - plan.own.end);
        attend(PlannedBlocks<Traits>{state, tile, plan}, tile, factor);
        state.skip_blocks(plan.own.begin - plan.loaded.begin);
      }
      write_output(state, rO, tile, factor);
      state.shared.queue.release_warp(position, state.thread.lane);
    }
  }

  // O = unnormalised output of the tile's rows; `factor` normalises it.
  template <class Blocks>
  __device__ __forceinline__ void attend(Blocks blocks, const TileInfo& tile, float (&factor)[2]) {
    hash_rows(state, tile);
    first_block(blocks);
    later_blocks(blocks);
    issue_output();
    close_rows(state, softmax, tile, factor);
    await_output();
    state.query.advance();
  }

  // All but the first; P V of the last one is to be issued.
  template <class Blocks>
  __device__ __forceinline__ void later_blocks(Blocks& blocks) {
#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
    if (Traits::kHalves && blocks.halved && blocks.full()) {
      next_block<false, kBlock / 2>(blocks);
    }
#endif
#pragma unroll 1
    while (blocks.more()) {
      if constexpr (Blocks::kHasEdges) {
#pragma unroll 1
        while (blocks.edge()) {
          next_block<true>(blocks);
        }
      }
#pragma unroll 1
      while (blocks.full()) {
        next_block<false>(blocks);
      }
    }
    blocks.close_last();
  }

  // -- a block ------------------------------------------------------------------------------
  // Weights of the tile's first block. Nothing overlaps with it.
  template <class Blocks>
  __device__ __forceinline__ void first_block(Blocks& blocks) {
    await_query();
    await_key();
#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
    if constexpr (Traits::kHalves) {
      if (blocks.halved) {  // the mask sets the other half
        issue_scores<kBlock / 2>();
        ptx::wgmma_wait_group<0>();  // in both branches, or all products would be serialised
        ptx::pin(rS);
      } else {
        issue_scores();
        ptx::wgmma_wait_group<0>();
        ptx::pin(rS);
      }
    } else {
      issue_scores();
    }
#else
    issue_scores();
#endif
    blocks.open(state.value);
    await_scores<0>(blocks.is_last());
    blocks.change(rS);
    blocks.mask_first(rS);
    float alpha[2];
    softmax.template update<true>(rS, alpha, scale_log2<Traits>(state.args));
    drop_weights(state, rS, state.value);
    sm90::to_operand<Element>(rP, rS);
    blocks.close_first();
  }

  // Weights of the next block, while P V of the previous block, for its first kKeys, runs.
  template <bool kEdge, int kKeys = kBlock, class Blocks>
  __device__ __forceinline__ void next_block(Blocks& blocks) {
    await_key();
    state.wait_ping_pong();
    issue_scores();
    issue_output<kKeys>();  // of the previous block: needs no new operand
    state.arrive_ping_pong();
    blocks.open(state.value.next());
    await_scores<1>(blocks.is_last());
    blocks.change(rS);
    if constexpr (kEdge) {
      blocks.mask(rS);
    }
    float alpha[2];
    // A bias by distance may be -inf in blocks without an edge, too.
    softmax.template update<kEdge || Traits::kScores>(rS, alpha, scale_log2<Traits>(state.args));
    drop_weights(state, rS, state.value.next());
    await_weights();
    await_output();
    // Rescales O like the weights it will be added to.
    sm90::to_operand<Element>(rP, rS);
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
      sm90::scale_rows(rO, alpha);
    }
    blocks.close();
  }

  // -- products -----------------------------------------------------------------------------
  // Issues the product for the first kKeys of the block.
  template <int kKeys = kBlock>
  __device__ __forceinline__ void issue_scores() {
    const uint64_t q = sm90::descriptor_at(
        q_base, state.query.index() * Traits::kGroups * Traits::QueryTile::kBytes);
    const uint64_t k = sm90::descriptor_at(k_base, state.key.index() * Traits::KeyTile::kBytes);
    ptx::pin(rS);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / kMmaK; ++step) {
      ptx::Wgmma<kKeys>::template ss<Element, ptx::kMajorK>(
          reinterpret_cast<float (&)[kKeys / 2]>(rS),
          sm90::descriptor_at(q, sm90::k_major_step(step, kMmaRows)),
          sm90::descriptor_at(k, sm90::k_major_step(step, kBlock)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  template <int kKeys = kBlock>
  __device__ __forceinline__ void issue_output() {
    state.shared.v_slots[state.value.index()].full.wait(state.value.phase());
    const uint64_t v = sm90::descriptor_at(v_base, state.value.index() * Traits::KeyTile::kBytes);
    ptx::pin(rO);
    ptx::pin(rP);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / kMmaK; ++step) {
      OutputMma::template rs<Element, ptx::kMajorN>(
          rO, rP[4 * step], rP[4 * step + 1], rP[4 * step + 2], rP[4 * step + 3],
          sm90::descriptor_at(v, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  // -- waits --------------------------------------------------------------------------------
  __device__ __forceinline__ void await_query() {
    state.shared.q_slots[state.query.index()][state.group].full.wait(state.query.phase());
    if (state.args.negate) {
      state.shared.q[state.query.index()][state.group].negate(threadIdx.x % kWarpgroup, kWarpgroup);
      state.fence_for_wgmma();
    }
  }

  __device__ __forceinline__ void await_key() {
    state.shared.k_slots[state.key.index()].full.wait(state.key.phase());
  }

  // kBehind: wgmma groups that may still be pending.
  template <int kBehind>
  __device__ __forceinline__ void await_scores(bool last_of_tile) {
    ptx::wgmma_wait_group<kBehind>();
    ptx::pin(rS);
    state.release_key(last_of_tile);
  }

  // Always passes, but depends on the sums of the weights, which are never negative: keeps the
  // compiler from moving the exponentials behind the wait for P V, which they should overlap.
  __device__ __forceinline__ void await_weights() {
    if constexpr (Traits::kPinsExponentials) {
      state.shared.passed.wait(softmax.l[0] + softmax.l[1] < 0.0f);
    }
  }

  __device__ __forceinline__ void await_output() {
    ptx::wgmma_wait_group<0>();
    ptx::pin(rO);
    ptx::pin(rP);
    state.release_value();
  }

  template <int kCount>
  static __device__ __forceinline__ void clear(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      registers[i] = 0.0f;
    }
  }
};

}  // namespace fastattn::attention
