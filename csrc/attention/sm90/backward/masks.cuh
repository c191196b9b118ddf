// Applies the backward's restrictions to its operands: pairs that are not allowed get P and dS of
// 0; dead rows and keys are zeroed, whatever they hold.
#pragma once

#include "attention/sm90/backward/part.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "attention/sm90/masks/mask.cuh"

namespace fastattn::attention {

// -- pairs ----------------------------------------------------------------------------------------
template <class Traits>
__device__ __forceinline__ bool needs_mask(const BackwardPart<Traits>& own, int row_block) {
  const KeyBlock& work = own.shared.work;
  if constexpr (Traits::kDense) {
    // Classes do not cover keys past the end.
    return own.is_changed() || work.first_key + Traits::kKeys > work.sequence.keys;
  }
  return !contains(work.plan.full, row_block);
}

// The bits of a dense mask for a key and this thread's rows, from the first one on.
template <class Traits>
struct DenseBits {
  static constexpr int kWords = (Traits::kScoreRows + kWordKeys - 1) / kWordKeys;
  uint32_t words[kWords];

  __device__ __forceinline__ bool allows(int i) const {
    return !Traits::kDense || words[i / kWordKeys] >> i % kWordKeys & 1;
  }
};
template <class Traits>
__device__ __forceinline__ DenseBits<Traits> dense_bits(const BackwardPart<Traits>& own, int key,
                                                        int row_block) {
  DenseBits<Traits> result = {};
  if constexpr (Traits::kDense) {
    static_assert(Traits::kSplitsKeys || Traits::kScoreRows == kWordKeys,
                  "a warpgroup's rows are one word");
    const BackwardArguments& args = own.args;
    const MaskLayout& layout = args.mask.layout;
    const KeyBlock& work = own.shared.work;
    const int head = work.kv_head * args.heads_per_kv + own.metadata().step.head;
    // Keys past the end read the last one.
    const uint32_t* bits =
        args.mask.bits + bits_at(layout, mask_head(layout, work.sequence.number, head),
                                 smaller(key, args.keys - 1), row_block);
    const uint4 four = *reinterpret_cast<const uint4*>(bits);
    const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < DenseBits<Traits>::kWords; ++i) {
      result.words[i] =
          (Traits::kSplitsKeys ? words[i] : bits[own.group]) >> own.thread.first_column();
    }
  }
  return result;
}

// Sets P and dS to 0 where the pair is not allowed, whatever they are: such a weight may be inf, as
// lse does not include it. As operands they take half the registers, while little else is live.
template <class Traits>
__device__ __forceinline__ void mask_operands(const BackwardPart<Traits>& own,
                                              typename BackwardPart<Traits>::ScoreOperand& rP,
                                              typename BackwardPart<Traits>::ScoreOperand& rDs,
                                              int row_block) {
  constexpr uint32_t kLowHalf = 0xFFFF;
  const AccumulatorThread here = own.thread_here();
  const KeyBlock& work = own.shared.work;
  const int origin = row_block * Traits::kRows + own.first_score_row() + here.first_column();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = work.first_key + own.first_own_key() + here.upper_row() + half * sm90::kRowStep;
    const Sequence& sequence = work.sequence;
    const RowMask mask = row_mask(key, origin, sequence.bounds, sequence.queries, sequence.keys);
    const DenseBits<Traits> dense = dense_bits(own, key, row_block);
#pragma unroll
    for (int i = 0; i < Traits::kScoreRows / 8; ++i) {
      const bool first = allows(mask, 8 * i) && dense.allows(8 * i);
      const bool second = allows(mask, 8 * i + 1) && dense.allows(8 * i + 1);
      const uint32_t allowed = (first ? kLowHalf : 0) | (second ? ~kLowHalf : 0);
      rP[2 * i + half] &= allowed;
      rDs[2 * i + half] &= allowed;
    }
  }
}

// -- dead rows and keys ---------------------------------------------------------------------------
// Dead rows and keys have weight 0, but 0 * NaN is NaN: they are zeroed. Every warpgroup does so
// before it reads a block; all write the same values.
template <class Traits>
__device__ __forceinline__ void fence_for_wgmma(const BackwardPart<Traits>& own) {
  ptx::fence_proxy_async();
  own.sync();
}

template <class Tile>
__device__ __forceinline__ void clear_outside(Tile& tile, Range live) {
  tile.clear_rows(0, live.begin, threadIdx.x % kWarpgroup, kWarpgroup);
  tile.clear_rows(live.end, Tile::kRows, threadIdx.x % kWarpgroup, kWarpgroup);
}

// Under a dense mask: whether some row of some head may attend a key.
template <class Traits>
__device__ __forceinline__ bool has_row(const BackwardPart<Traits>& own, int own_key) {
  const BackwardArguments& args = own.args;
  const KeyBlock& work = own.shared.work;
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
__device__ __forceinline__ void clear_keys_without_rows(const BackwardPart<Traits>& own) {
  if constexpr (Traits::kDense) {
    constexpr int kKeys = Traits::kKeys;
    uint32_t* live = own.shared.dense.live_keys[own.group];
    const int key = threadIdx.x % kWarpgroup;
    const uint32_t lives = key < kKeys && has_row(own, key) ? 1u << own.thread.lane : 0;
    const uint32_t word = __reduce_or_sync(~0u, lives);
    if (key < kKeys && own.thread.lane == 0) {
      live[own.thread.warp] = word;
    }
    own.sync();
    for (auto* tile : {&own.shared.k, &own.shared.v}) {
      tile->clear_unmarked_rows(live, threadIdx.x % kWarpgroup, kWarpgroup);
    }
    fence_for_wgmma(own);
  }
}

template <class Traits>
__device__ __forceinline__ void clear_dead_keys(const BackwardPart<Traits>& own) {
  if constexpr (Traits::kDense) {
    clear_keys_without_rows(own);
    return;
  }
  constexpr int kKeys = Traits::kKeys;
  const Range live = own.shared.work.plan.keys;
  // TMA has zero-filled keys past the end of the tensor, but after a packed sequence it has loaded
  // keys of the next one.
  const int rows = own.args.packing.key_offsets
                       ? kKeys
                       : smaller(own.args.keys - own.shared.work.first_key, kKeys);
  if (live.begin > 0 || live.end < rows) {
    for (auto* tile : {&own.shared.k, &own.shared.v}) {
      clear_outside(*tile, live);
    }
    fence_for_wgmma(own);
  }
}

// Called when Q has been loaded.
template <class Traits>
__device__ __forceinline__ void clear_dead_rows(const BackwardPart<Traits>& own, int row_block) {
  if constexpr (Traits::kDense) {
    const StepMetadata& metadata = own.metadata();
    if (metadata.flags & kHasDead) {
      own.shared.dout_full[own.stage.index()].wait(own.stage.phase());
      for (auto* tile : {&own.shared.q[own.stage.index()], &own.shared.dout[own.stage.index()]}) {
        tile->clear_unmarked_rows(metadata.live, threadIdx.x % kWarpgroup, kWarpgroup);
      }
      fence_for_wgmma(own);
    }
    return;
  }
  if (contains(own.shared.work.plan.clean, row_block)) {
    return;
  }
  const int first_row = row_block * Traits::kRows;
  const Sequence& sequence = own.shared.work.sequence;
  const Range live = rows_of_some({0, sequence.keys}, sequence.bounds, sequence.queries);
  const Range rows = {larger(live.begin - first_row, 0),
                      smaller(live.end - first_row, Traits::kRows)};
  own.shared.dout_full[own.stage.index()].wait(own.stage.phase());
  clear_outside(own.shared.q[own.stage.index()], rows);
  clear_outside(own.shared.dout[own.stage.index()], rows);
  fence_for_wgmma(own);
}

}  // namespace fastattn::attention
