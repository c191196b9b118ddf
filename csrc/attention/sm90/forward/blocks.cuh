// The blocks of keys of a tile, last one first, and what is done to each besides the products: two
// classes with the same functions, of which a kernel uses one.
#pragma once

#include "attention/sm90/forward/dense.cuh"
#include "attention/sm90/forward/masks.cuh"
#include "attention/sm90/forward/scores.cuh"

namespace fastattn::attention {

// Chosen by arithmetic from lengths and bounds: blocks that the right bound cuts, full blocks,
// blocks that the left bound cuts.
template <class Traits>
struct PlannedBlocks {
  static constexpr bool kHasEdges = Traits::kBounded;

  ForwardPart<Traits>& own;
  const TileInfo& tile;
  const BlockPlan& plan;
  int n = plan.own.end - 1;

  // Whether the next block runs through the loop that masks, or through the one that does not.
  __device__ __forceinline__ bool more() const { return n >= plan.own.begin; }
  __device__ __forceinline__ bool edge() const { return more() && !contains(plan.full, n); }
  __device__ __forceinline__ bool full() const {
    return n >= (kHasEdges ? larger(plan.own.begin, plan.full.begin) : plan.own.begin);
  }

  // Called when its K has been loaded; its V will be in slot `at`.
  __device__ __forceinline__ void open(RingPosition<Traits::kStages>) {}
  __device__ __forceinline__ bool is_last() const { return n == plan.own.begin; }
  // Before masks.
  __device__ __forceinline__ void change(BlockScores<Traits>& s) const {
    change_scores(own, s, tile, n);
  }
  __device__ __forceinline__ void mask_first(BlockScores<Traits>& s) const {
    if (!contains(plan.full, n)) {
      mask(s);
    }
  }
  __device__ __forceinline__ void mask(BlockScores<Traits>& s) const {
    mask_scores(own, s, tile, n);
  }
  // After the softmax, before P V. Only the first and the last block can have dead keys.
  __device__ __forceinline__ void close_first() {
    clear_dead_values(own, tile, n);
    --n;
  }
  __device__ __forceinline__ void close() { --n; }
  __device__ __forceinline__ void close_last() {
    if constexpr (Traits::kBounded) {
      clear_dead_values(own, tile, plan.own.begin);
    }
  }
};

// Chosen by the load warp under a dense mask.
template <class Traits>
struct ListedBlocks {
  static constexpr bool kHasEdges = true;

  ForwardPart<Traits>& own;
  const TileInfo& tile;
  int n = 0;                // -1: there are no more
  bool needs_mask = false;  // whether this warpgroup's scores of block n change
  const BlockMetadata* metadata = nullptr;

  __device__ __forceinline__ bool more() const { return n >= 0; }
  __device__ __forceinline__ bool edge() const { return more() && needs_mask; }
  __device__ __forceinline__ bool full() const { return more() && !needs_mask; }

  __device__ __forceinline__ void open(RingPosition<Traits::kStages> at) {
    metadata = &metadata_of(own, at);
  }
  __device__ __forceinline__ bool is_last() const { return metadata->next < 0; }
  __device__ __forceinline__ void change(BlockScores<Traits>& s) const {
    change_scores(own, s, tile, metadata->block);
  }
  __device__ __forceinline__ void mask_first(BlockScores<Traits>& s) const {
    mask_dense_scores(own, s, tile, metadata->block, metadata->flags >> own.group & 1,
                      is_restricted());
  }
  __device__ __forceinline__ void mask(BlockScores<Traits>& s) const {
    mask_dense_scores(own, s, tile, n, true, is_restricted());
  }
  __device__ __forceinline__ void close_first() { close(); }
  __device__ __forceinline__ void close() {
    const BlockMetadata& now = metadata_of(own, own.value);
    clear_dead_values(own, now, own.value);
    needs_mask = now.next_flags >> own.group & 1;
    n = now.next;
  }
  __device__ __forceinline__ void close_last() {}

 private:
  __device__ __forceinline__ bool is_restricted() const {
    return !Traits::kChoosesMasks || (metadata->flags >> (kRestrictedBit + own.group) & 1);
  }
};

}  // namespace fastattn::attention
