// With FASTATTN_TRIALS=fwd_across_tiles, the loop over tiles of a consumer warpgroup: the last P V
// of a tile runs beside Q K^T and the softmax of the next tile's first block.
#pragma once

#include "attention/sm90/forward/fwd_consumer.cuh"

namespace fastattn::attention {

// Largest number of blocks that a warpgroup may skip beside the last P V, after its blocks of a
// tile and before those of the next one. V of a second one would wait until this P V has released a
// slot. With dropout, registers would spill.
template <class Traits>
constexpr int kMaxSkipped = !Traits::kSkips || Traits::kDropout ? 0 : Traits::kStages - 1;

// Weights of the next tile's first block, while the last P V of `tile` runs. Query and key are
// positioned behind this tile, value is at its last block.
template <class Traits>
__device__ __forceinline__ void begin_next_tile(Consumer<Traits>& c, PlannedBlocks<Traits> blocks,
                                                int skipped, const TileInfo& tile,
                                                float (&factor)[2]) {
  ForwardPart<Traits>& state = c.state;
  const bool skips = kMaxSkipped<Traits> > 0 && skipped > 0;
  if (skips) {
    // No barrier as in skip_blocks: the slot is loaded again after the products below.
    c.await_key();
    state.release_key(false);
  }
  c.await_query();
  c.await_key();
  state.wait_ping_pong();
  c.issue_scores();
  c.issue_output();
  state.arrive_ping_pong();
  close_rows(state, c.softmax, tile, factor);
  c.template await_scores<1>(blocks.is_last());
  hash_rows(state, blocks.tile);
  blocks.change(c.rS);
  blocks.mask_first(c.rS);
  float alpha[2];
  c.softmax.start();
  c.softmax.template update<true>(c.rS, alpha, scale_log2<Traits>(state.args));
  drop_weights(state, c.rS, state.value.next());
  c.await_weights();
  c.await_output();
  if (skips) {
    state.shared.v_slots[state.value.index()].full.wait(state.value.phase());
    state.sync_group();
    state.release_value();
  }
  sm90::to_operand<typename Traits::Element>(c.rP, c.rS);
  blocks.close_first();
}

template <class Traits>
__device__ __forceinline__ void run_across_tiles(Consumer<Traits>& c) {
  ForwardPart<Traits>& state = c.state;
  if (Traits::kPingPong && state.group == Traits::kGroups - 1) {
    state.arrive_ping_pong();  // warpgroup 0 issues first
  }
  bool begun = false;  // whether the tile's first block has weights
#pragma unroll 1
  while (true) {
    const TileInfo& tile = state.shared.queue.peek(c.position);
    if (tile.row < 0) {
      return;
    }
    const BlockPlan& plan = state.plan_of(tile, c.position);
    float factor[2];
    c.clear(c.rO);
    if (!begun) {
      c.softmax.start();
    }
    if (is_empty(plan.loaded)) {
      close_rows(state, c.softmax, tile, factor);
    } else {
      PlannedBlocks<Traits> blocks{state, tile, plan};
      if (begun) {
        --blocks.n;
      } else {
        state.skip_blocks(plan.loaded.end - plan.own.end);
        hash_rows(state, tile);
        c.first_block(blocks);
      }
      c.later_blocks(blocks);
      state.query.advance();
      const TileQueue::Position ahead = c.position.next();
      const TileInfo& next = state.shared.queue.peek(ahead);
      const BlockPlan& next_plan = state.plan_of(next, ahead);  // empty after the last tile
      const int skipped =
          plan.own.begin - plan.loaded.begin + next_plan.loaded.end - next_plan.own.end;
      begun = !is_empty(next_plan.loaded) && (!Traits::kSkips || skipped <= kMaxSkipped<Traits>);
      if (begun) {
        begin_next_tile(c, {state, next, next_plan}, skipped, tile, factor);
      } else {
        c.issue_output();
        close_rows(state, c.softmax, tile, factor);
        c.await_output();
        // `plan` would take registers until here.
        const BlockPlan& again = state.plan_of(tile, c.position);
        state.skip_blocks(again.own.begin - again.loaded.begin);
      }
    }
    write_output(state, c.rO, tile, factor);
    state.shared.queue.release_warp(c.position, state.thread.lane);
  }
}

}  // namespace fastattn::attention
