// Dense masks in a step of the backward: metadata, written before Q was loaded, says whether this
// warpgroup's scores change and which rows are dead. An additive mask is added in bias.cuh.
#pragma once

#include "attention/sm90/backward/main/bwd_masks.cuh"
#include "attention/sm90/masks/dense_mask.cuh"

namespace fastattn::attention {

template <class Traits>
__device__ __forceinline__ const StepMetadata& metadata_of(const BackwardPart<Traits>& state) {
  return state.shared.dense.metadata[state.slot()];
}

// Whether the mask changes this warpgroup's scores.
template <class Traits>
__device__ __forceinline__ bool is_changed(const BackwardPart<Traits>& state) {
  return metadata_of(state).flags >> (Traits::kSplitsKeys ? state.group : 0) & 1;
}

// -- pairs ----------------------------------------------------------------------------------------
// The bits of the mask for a key and this thread's rows, from the first one on.
template <class Traits>
struct RowBits {
  static constexpr int kWords = (Traits::kScoreRows + kWordKeys - 1) / kWordKeys;
  uint32_t words[kWords];

  __device__ __forceinline__ bool allows(int i) const {
    return words[i / kWordKeys] >> i % kWordKeys & 1;
  }
};

template <class Traits>
__device__ __forceinline__ RowBits<Traits> row_bits(const BackwardPart<Traits>& state, int key,
                                                    int row_block) {
  static_assert(Traits::kSplitsKeys || Traits::kScoreRows == kWordKeys,
                "a warpgroup's rows are one word");
  const BackwardArguments& args = state.args;
  const MaskLayout& layout = args.mask.layout;
  const KeyBlock& work = state.work();
  const int head = work.kv_head * args.heads_per_kv + metadata_of(state).step.head;
  // Keys past the end read the last one.
  const uint32_t* bits =
      args.mask.bits + bits_at(layout, mask_head(layout, work.sequence.number, head),
                               smaller(key, args.keys - 1), row_block);
  const uint4 four = *reinterpret_cast<const uint4*>(bits);
  const uint32_t words[] = {four.x, four.y, four.z, four.w};
  RowBits<Traits> result = {};
#pragma unroll
  for (int i = 0; i < RowBits<Traits>::kWords; ++i) {
    result.words[i] =
        (Traits::kSplitsKeys ? words[i] : bits[state.group]) >> state.thread.first_column();
  }
  return result;
}

// -- dead rows and keys ---------------------------------------------------------------------------
// Whether some row of some head may attend a key.
template <class Traits>
__device__ __forceinline__ bool has_row(const BackwardPart<Traits>& state, int own_key) {
  const BackwardArguments& args = state.args;
  const KeyBlock& work = state.work();
  const MaskLayout& layout = args.mask.layout;
  const int key = work.first_key + own_key;
  if (key >= work.sequence.keys) {
    return false;
  }
  const Range rows = rows_of_key(key, work.sequence.bounds, work.sequence.queries);
  const int heads = layout.class_heads > 1 ? args.heads_per_kv : 1;
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    const BlockClass* classes = classes_of<Traits>(args, work, head);
    const int64_t of_mask =
        mask_head(layout, work.sequence.number, work.kv_head * args.heads_per_kv + head);
#pragma unroll 1
    for (int n = work.plan.visited.begin; n < work.plan.visited.end; ++n) {
      const uint32_t flags = classes[n].flags;
      if (!(flags & kHasWork)) {
        continue;
      }
      if (!(flags >> own_key / kMaskRows & 1)) {
        return true;
      }
      const uint32_t* bits = args.mask.bits + bits_at(layout, of_mask, key, n);
      uint32_t any = 0;
#pragma unroll
      for (int word = 0; word < kMaxBlockWords; ++word) {
        any |= bits[word] & bits_inside(rows, n * Traits::kRows + word * kWordKeys);
      }
      if (any) {
        return true;
      }
    }
  }
  return false;
}

// Each thread searches for a row that may attend its key.
template <class Traits>
__device__ __forceinline__ void clear_keys_without_rows(const BackwardPart<Traits>& state) {
  constexpr int kKeys = Traits::kKeys;
  uint32_t* live = state.shared.dense.live_keys[state.group];
  const int key = threadIdx.x % kWarpgroup;
  const uint32_t lives = key < kKeys && has_row(state, key) ? 1u << state.thread.lane : 0;
  const uint32_t word = __reduce_or_sync(~0u, lives);
  if (key < kKeys && state.thread.lane == 0) {
    live[state.thread.warp] = word;
  }
  state.sync_group();
  for (auto* tile : {&state.shared.k, &state.shared.v}) {
    tile->clear_unmarked_rows(live, threadIdx.x % kWarpgroup, kWarpgroup);
  }
  state.fence_for_wgmma();
}

// Called when Q has been loaded. Zeroes the rows that metadata marks as dead.
template <class Traits>
__device__ __forceinline__ void clear_rows_without_keys(const BackwardPart<Traits>& state) {
  const StepMetadata& metadata = metadata_of(state);
  if (metadata.flags & kHasDead) {
    state.await_dout();
    for (auto* tile : {&state.shared.q[state.slot()], &state.shared.dout[state.dout_slot()]}) {
      tile->clear_unmarked_rows(metadata.live, threadIdx.x % kWarpgroup, kWarpgroup);
    }
    state.fence_for_wgmma();
  }
}

}  // namespace fastattn::attention
