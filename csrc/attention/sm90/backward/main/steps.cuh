// The steps of a thread block, and what is done in each besides products and softmax: two classes
// with the same functions, of which a kernel uses one.
#pragma once

#include "attention/sm90/backward/main/bias.cuh"
#include "attention/sm90/backward/main/bwd_dense.cuh"
#include "attention/sm90/backward/main/bwd_masks.cuh"
#include "attention/sm90/backward/main/bwd_scores.cuh"

namespace fastattn::attention {

// Chosen by arithmetic from lengths and bounds: for every query head the visited blocks of rows,
// last one first.
template <class Traits>
struct PlannedSteps {
  using Part = BackwardPart<Traits>;

  Part& state;
  const RowPlan& plan = state.work().plan;
#ifdef FASTATTN_TRIAL_BWD_ROTATION
  int row_block = state.work().first_row_block;
#else
  int row_block = plan.visited.end - 1;
#endif

  __device__ __forceinline__ bool more() const { return state.passed() < state.work().steps; }
  // Called when K and V have been loaded, if there is a step.
  __device__ __forceinline__ void clear_keys() const { clear_dead_keys(state); }
  // Called when Q has been loaded.
  __device__ __forceinline__ void open() { clear_dead_rows(state, row_block); }
  // Also between `close` and the release of Q.
  __device__ __forceinline__ Step step() const {
    const int passed = state.passed(), count = plan.visited.end - plan.visited.begin;
    return {passed / count, plan.visited.end - 1 - passed % count};
  }
  // Called when the scores have been computed: their biases by distance, and a mask.
  __device__ __forceinline__ const float* biases() const {
    const int head = state.passed() / (plan.visited.end - plan.visited.begin);
    return own_biases(state, head, row_block);
  }
  __device__ __forceinline__ void add_mask(typename Part::Scores&) const {}
  // Called when P and dS have been computed.
  __device__ __forceinline__ void mask(typename Part::ScoreOperand& rP,
                                       typename Part::ScoreOperand& rDs) const {
    if (!contains(plan.full, row_block)) {
      mask_operands(state, rP, rDs, row_block, [](int) { return EveryRow{}; });
    }
  }
  // Called before P and dS are stored, and after they have been; then when dQ has been computed.
  __device__ __forceinline__ void before_stores() const {}
  __device__ __forceinline__ void close() {
    row_block = row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1;
  }
  __device__ __forceinline__ void after_dq() const {}
};

// Chosen by the load warp under a dense mask.
template <class Traits>
struct ListedSteps {
  using Part = BackwardPart<Traits>;

  Part& state;
  bool last = state.work().steps == 0;  // there are no more

  __device__ __forceinline__ bool more() const { return !last; }
  __device__ __forceinline__ void clear_keys() const { clear_keys_without_rows(state); }
  __device__ __forceinline__ void open() {
    clear_rows_without_keys(state);
    if constexpr (Traits::kBias) {
      fetch_bias(state, metadata_of(state).step.row_block);
    }
  }
  __device__ __forceinline__ Step step() const { return metadata_of(state).step; }
  __device__ __forceinline__ const float* biases() const {
    const Step& step = metadata_of(state).step;
    return own_biases(state, step.head, step.row_block);
  }
  __device__ __forceinline__ void add_mask(typename Part::Scores& s) const {
    if constexpr (Traits::kBias) {
      add_bias(state, s);
    }
  }
  __device__ __forceinline__ void mask(typename Part::ScoreOperand& rP,
                                       typename Part::ScoreOperand& rDs) const {
    // Classes do not cover keys past the end.
    const KeyBlock& work = state.work();
    if (is_changed(state) || work.first_key + Traits::kKeys > work.sequence.keys) {
      const int row_block = metadata_of(state).step.row_block;
      mask_operands(state, rP, rDs, row_block,
                    [&](int key) { return row_bits(state, key, row_block); });
    }
  }
  __device__ __forceinline__ void before_stores() const {
    if constexpr (Traits::kBias) {
      sync_before_stores(state);
    }
  }
  // Before Q is released, and the metadata with it: that waits for what all four warps issue after
  // this.
  __device__ __forceinline__ void close() { last = metadata_of(state).last; }
  __device__ __forceinline__ void after_dq() const {
    if constexpr (Traits::kBias) {
      release_scores(state);
    }
  }
};

}  // namespace fastattn::attention
