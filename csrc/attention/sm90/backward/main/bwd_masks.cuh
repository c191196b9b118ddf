// Lengths, causal masks and windows in a step of the backward: pairs that are not allowed get P and
// dS of 0; dead rows and keys are zeroed, whatever they hold.
#pragma once

#include "attention/sm90/backward/main/bwd_part.cuh"

namespace fastattn::attention {

// -- pairs ----------------------------------------------------------------------------------------
// Sets P and dS to 0 where the pair is not allowed, whatever they are: such a weight may be inf, as
// lse does not include it. As operands they take half the registers, while little else is live.
// rows_of(key): which rows a dense mask allows, if there is one.
template <class Traits, class RowsOf>
__device__ __forceinline__ void mask_operands(const BackwardPart<Traits>& state,
                                              typename BackwardPart<Traits>::ScoreOperand& rP,
                                              typename BackwardPart<Traits>::ScoreOperand& rDs,
                                              int row_block, RowsOf rows_of) {
  constexpr uint32_t kLowHalf = 0xFFFF;
  const AccumulatorThread here = state.thread_here();
  const KeyBlock& work = state.work();
  const int origin = row_block * Traits::kRows + state.first_score_row() + here.first_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key =
        work.first_key + state.first_own_key() + here.upper_row() + half * sm90::kRowStep;
    const Sequence& sequence = work.sequence;
    const RowMask mask = row_mask(key, origin, sequence.bounds, sequence.queries, sequence.keys);
    const auto rows = rows_of(key);
#pragma unroll
    for (int i = 0; i < Traits::kScoreRows / 8; ++i) {
      const bool first = allows(mask, 8 * i) && rows.allows(8 * i);
      const bool second = allows(mask, 8 * i + 1) && rows.allows(8 * i + 1);
      const uint32_t allowed = (first ? kLowHalf : 0) | (second ? ~kLowHalf : 0);
      rP[2 * i + half] &= allowed;
      rDs[2 * i + half] &= allowed;
    }
  }
}

// Without a dense mask.
struct EveryRow {
  __device__ __forceinline__ bool allows(int) const { return true; }
};

// -- dead rows and keys ---------------------------------------------------------------------------
// Dead rows and keys have weight 0, but 0 * NaN is NaN: they are zeroed. Every warpgroup does so
// before it reads a block; all write the same values. Beside products of others that changes no
// bit, as in the forward (fwd_blocks.cuh).
template <class Tile>
__device__ __forceinline__ void clear_outside(Tile& tile, Range live) {
  tile.clear_rows(0, live.begin, threadIdx.x % kWarpgroup, kWarpgroup);
  tile.clear_rows(live.end, Tile::kRows, threadIdx.x % kWarpgroup, kWarpgroup);
}

template <class Traits>
__device__ __forceinline__ void clear_dead_keys(const BackwardPart<Traits>& state) {
  constexpr int kKeys = Traits::kKeys;
  const Range live = state.work().plan.keys;
  // TMA has zero-filled keys past the end of the tensor, but after a packed sequence it has loaded
  // keys of the next one.
  const int rows = state.args.packing.key_offsets
                       ? kKeys
                       : smaller(state.args.keys - state.work().first_key, kKeys);
  if (live.begin > 0 || live.end < rows) {
    for (auto* tile : {&state.shared.k, &state.shared.v}) {
      clear_outside(*tile, live);
    }
    state.fence_for_wgmma();
  }
}

// Called when Q has been loaded.
template <class Traits>
__device__ __forceinline__ void clear_dead_rows(const BackwardPart<Traits>& state, int row_block) {
  if (contains(state.work().plan.clean, row_block)) {
    return;
  }
  const int first_row = row_block * Traits::kRows;
  const Sequence& sequence = state.work().sequence;
  const Range live = rows_of_some({0, sequence.keys}, sequence.bounds, sequence.queries);
  const Range rows = {larger(live.begin - first_row, 0),
                      smaller(live.end - first_row, Traits::kRows)};
  state.await_dout();
  clear_outside(state.shared.q[state.slot()], rows);
  clear_outside(state.shared.dout[state.dout_slot()], rows);
  state.fence_for_wgmma();
}

}  // namespace fastattn::attention
