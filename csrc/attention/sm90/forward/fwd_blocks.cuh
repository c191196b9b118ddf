// Operations on a block of scores besides the products: lengths, causal masks, windows and
// dropout; dense masks, whose metadata, loaded with K, say whether this warpgroup's scores change
// and which keys are dead; a soft cap and a bias by distance. Then the loop over the blocks of keys
// of a tile, last one first: two classes with the same functions, of which a kernel uses one.
#pragma once

#include "attention/sm90/forward/fwd_part.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "attention/sm90/masks/dropout_sm90.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "attention/sm90/masks/score_modifications.cuh"

namespace fastattn::attention {

// -- lengths, bounds and dropout --

// A warpgroup's scores, then weights, of a block.
template <class Traits>
using BlockScores = float[Traits::kBlock / 2];

template <class Traits>
__device__ __forceinline__ void mask_scores(const ForwardPart<Traits>& state,
                                            BlockScores<Traits>& s, const TileInfo& tile, int n) {
  // Instances that have the fewest registers left would spill with two comparisons apart.
  mask_block<Traits::kBounded, !Traits::kRecomputesLane>(
      s, n * Traits::kBlock, state.upper_row(tile), bounds_of(state.args, tile), tile.keys,
      state.thread_here());
}

// Keys that no query may attend have weight 0, but 0 * NaN is NaN: their rows of V are zeroed.
// Every warpgroup does so before it reads the block; all write the same values. One that is late
// writes beside products of others that read these rows. Nothing orders the two, but the others
// have zeroed the rows before, so no bit changes: which rows are dead depends on the tile and the
// block, not on the warpgroup. The slot is loaded again when all warpgroups have released it.
template <class Traits>
__device__ __forceinline__ void clear_dead_values(ForwardPart<Traits>& state, const TileInfo& tile,
                                                  int n) {
  const Range live = Traits::kBounded
                         ? keys_of_some({0, tile.queries}, bounds_of(state.args, tile), tile.keys)
                         : Range{0, tile.keys};
  const int first_key = n * Traits::kBlock;
  const int begin = larger(live.begin - first_key, 0);
  const int end = smaller(live.end - first_key, Traits::kBlock);
  // TMA has zero-filled rows past the end of the tensor.
  const int rows = smaller(state.args.keys - first_key, Traits::kBlock);
  if (begin > 0 || end < rows) {
    state.shared.v_slots[state.value.index()].full.wait(state.value.phase());
    typename Traits::KeyTile& v = state.shared.v[state.value.index()];
    v.clear_rows(0, begin, threadIdx.x % kWarpgroup, kWarpgroup);
    v.clear_rows(end, Traits::kBlock, threadIdx.x % kWarpgroup, kWarpgroup);
    state.fence_for_wgmma();
  }
}

// -- dropout --------------------------------------------------------------------------------------
template <class Traits>
__device__ __forceinline__ void hash_rows(ForwardPart<Traits>& state, const TileInfo& tile) {
  if (drops<Traits>(state.args.dropout)) {
    const dropout::Origin origin = origin_of(state.args.dropout);
    state.row_key =
        dropout::absorb(dropout::absorb(dropout::absorb(state.row_stream, origin.b + tile.batch),
                                        origin.h + tile.head),
                        origin.row_unit + dropout::lattice_unit(state.upper_row(tile)));
  }
}

// Drops weights of the block whose V will be in slot `at`, after the row sums have been computed.
// Its column keys have been loaded with K.
template <class Traits>
__device__ __forceinline__ void drop_weights(const ForwardPart<Traits>& state,
                                             BlockScores<Traits>& p,
                                             RingPosition<Traits::kStages> at) {
  if constexpr (Traits::kDropout) {
    if (drops<Traits>(state.args.dropout)) {
      drop_block(p, state.shared.dropout.columns[at.passed % Traits::kMetadataSlots].data,
                 state.row_key, state.args.dropout.threshold, state.thread_here());
    }
  }
}

// -- dense masks --

// Metadata of the block whose V is, or will be, in slot `at`.
template <class Traits>
__device__ __forceinline__ const BlockMetadata& metadata_of(const ForwardPart<Traits>& state,
                                                            RingPosition<Traits::kStages> at) {
  return state.shared.dense.metadata[at.passed % Traits::kMetadataSlots];
}

// S = S * scale + mask, or with score modifications S += mask in base 2. Each slot of the ring
// holds as many columns as 128 bytes do.
template <class MaskElement, class Traits>
__device__ __forceinline__ void add_bias(ForwardPart<Traits>& state, BlockScores<Traits>& s,
                                         float scale) {
  constexpr int kColumns = sm90::kRowBytes / sizeof(MaskElement);
  const bool one_row = state.args.mask.layout.rows == 1;
#pragma unroll
  for (int column = 0; column < Traits::kBlock; column += kColumns) {
    Slot& slot = state.shared.bias.slots[state.group][state.bias.index()];
    slot.full.wait(state.bias.phase());
    const char* piece = state.shared.bias.pieces[state.group][state.bias.index()].bytes;
    if constexpr (Traits::kScores) {
      add_bias_piece<MaskElement, true>(&s[column / 2], piece, one_row, scale, state.thread_here());
    } else {
      add_bias_piece<MaskElement, false>(&s[column / 2], piece, one_row, scale, state.thread);
    }
    __syncwarp();
    if (state.thread.lane == 0) {
      slot.empty.arrive();
    }
    state.bias.advance();
  }
}

// Masks scores that are not scaled yet, or are changed already. With an additive mask and no score
// modifications, they are in natural units afterwards, masked or not, as BiasedSoftmax expects of
// edge blocks.
template <class Traits>
__device__ __forceinline__ void mask_dense_scores(ForwardPart<Traits>& state,
                                                  BlockScores<Traits>& s, const TileInfo& tile,
                                                  int n, bool masked, bool restricted) {
  const DenseMask& mask = state.args.mask;
  const auto mask_pairs = [&]() __attribute__((always_inline)) {
    mask_bits(s, mask.bits, mask.layout, mask_head(mask.layout, tile.batch, tile.head),
              state.upper_row(tile), state.args.queries, n, state.thread_here());
  };
  if constexpr (Traits::kBias) {
    const float scale = state.args.scale_log2 * kLn2;
    if (!masked) {
      if constexpr (!Traits::kScores) {
        sm90::scale_rows(s, {scale, scale});
      }
    } else if (!adds<Traits>(mask)) {
      mask_pairs();
    } else if (mask.type == MaskType::kFloat32) {
      add_bias<float>(state, s, scale);
    } else {
      add_bias<typename Traits::Element>(state, s, scale);
    }
  } else if (masked) {
    mask_pairs();
  }
  if (restricted) {
    mask_scores(state, s, tile, n);
  }
}

// Zeroes the rows of V that metadata marks as dead, like clear_dead_values.
template <class Traits>
__device__ __forceinline__ void clear_dead_values(ForwardPart<Traits>& state,
                                                  const BlockMetadata& metadata,
                                                  RingPosition<Traits::kStages> at) {
  if (metadata.flags & kHasDead) {
    state.shared.v_slots[at.index()].full.wait(at.phase());
    state.shared.v[at.index()].clear_unmarked_rows(metadata.live, threadIdx.x % kWarpgroup,
                                                   kWarpgroup);
    state.fence_for_wgmma();
  }
}

// -- score modifications --

template <class Traits>
__device__ __forceinline__ void change_scores(const ForwardPart<Traits>& state,
                                              BlockScores<Traits>& s, const TileInfo& tile, int n) {
  if constexpr (Traits::kScores) {
    const ForwardArguments& args = state.args;
    cap_scores(s, args.modifications, args.scale_log2);
    if (const float* biases =
            biases_of(args, args.modifications, tile.batch, tile.head, tile.queries, tile.keys)) {
      const int first_key = n * Traits::kBlock + state.thread_here().first_column();
      add_biases<1>(s, biases + (first_key - state.upper_row(tile)));
    }
  }
}

// -- the blocks of a tile --

// Chosen by arithmetic from lengths and bounds: blocks that the right bound cuts, full blocks,
// blocks that the left bound cuts.
template <class Traits>
struct PlannedBlocks {
  static constexpr bool kHasEdges = Traits::kBounded;

  ForwardPart<Traits>& state;
  const TileInfo& tile;
  const BlockPlan& plan;
  int n = plan.own.end - 1;
#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
  // Whether no row of this warpgroup has a key in the upper half of the first block.
  bool halved = Traits::kHalves && has_dead_half();
#endif

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
    change_scores(state, s, tile, n);
  }
  __device__ __forceinline__ void mask_first(BlockScores<Traits>& s) const {
    if (!contains(plan.full, n)) {
      mask(s);
    }
  }
  __device__ __forceinline__ void mask(BlockScores<Traits>& s) const {
    mask_scores(state, s, tile, n);
  }
  // After the softmax, before P V. Only the first and the last block can have dead keys.
  __device__ __forceinline__ void close_first() {
    clear_dead_values(state, tile, n);
    --n;
  }
  __device__ __forceinline__ void close() { --n; }
  __device__ __forceinline__ void close_last() {
    if constexpr (Traits::kBounded) {
      clear_dead_values(state, tile, plan.own.begin);
    }
  }

#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
 private:
  __device__ __forceinline__ bool has_dead_half() const {
    const int last_row = smaller(state.first_row(tile) + kMmaRows, tile.queries) - 1;
    const int end = keys_of_row(last_row, bounds_of(state.args, tile), tile.keys).end;
    return end <= n * Traits::kBlock + Traits::kBlock / 2;
  }
#endif
};

// Chosen by the load warp under a dense mask.
template <class Traits>
struct ListedBlocks {
  static constexpr bool kHasEdges = true;

  ForwardPart<Traits>& state;
  const TileInfo& tile;
  int n = 0;                // -1: there are no more
  bool needs_mask = false;  // whether this warpgroup's scores of block n change
  const BlockMetadata* metadata = nullptr;
#ifdef FASTATTN_TRIAL_FWD_DIAGONAL
  static constexpr bool halved = false;
#endif

  __device__ __forceinline__ bool more() const { return n >= 0; }
  __device__ __forceinline__ bool edge() const { return more() && needs_mask; }
  __device__ __forceinline__ bool full() const { return more() && !needs_mask; }

  __device__ __forceinline__ void open(RingPosition<Traits::kStages> at) {
    metadata = &metadata_of(state, at);
  }
  __device__ __forceinline__ bool is_last() const { return metadata->next < 0; }
  __device__ __forceinline__ void change(BlockScores<Traits>& s) const {
    change_scores(state, s, tile, metadata->block);
  }
  __device__ __forceinline__ void mask_first(BlockScores<Traits>& s) const {
    mask_dense_scores(state, s, tile, metadata->block, metadata->flags >> state.group & 1,
                      is_restricted());
  }
  __device__ __forceinline__ void mask(BlockScores<Traits>& s) const {
    mask_dense_scores(state, s, tile, n, true, is_restricted());
  }
  __device__ __forceinline__ void close_first() { close(); }
  __device__ __forceinline__ void close() {
    const BlockMetadata& now = metadata_of(state, state.value);
    clear_dead_values(state, now, state.value);
    needs_mask = now.next_flags >> state.group & 1;
    n = now.next;
  }
  __device__ __forceinline__ void close_last() {}

 private:
  __device__ __forceinline__ bool is_restricted() const {
    return !Traits::kChoosesMasks || (metadata->flags >> (kRestrictedBit + state.group) & 1);
  }
};

}  // namespace fastattn::attention
