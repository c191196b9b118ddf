// Adds an additive mask to the backward's scores. The mask is in the shared memory that dS
// overwrites afterwards (backward/main/bwd_storage.cuh). Consumers load what TMA cannot read.
#pragma once

#include "attention/sm90/backward/layout.h"
#include "attention/sm90/backward/main/bwd_dense.cuh"

namespace fastattn::attention {

// This warpgroup's keys of the mask, 128 bytes a row.
template <class Traits>
__device__ __forceinline__ char* own_bias(const BackwardPart<Traits>& state, int half) {
  const int row = has_one_row(state.args.mask) ? 0 : state.first_score_row();
  return state.shared.bias_place(state.slot(), Traits::kSplitsKeys ? state.group : 0, half) +
         row * sm90::kRowBytes;
}

// -- loading --------------------------------------------------------------------------------------
template <class Word, class Traits>
__device__ __forceinline__ void fetch_elements(const BackwardPart<Traits>& state, int row_block) {
  constexpr int kLineKeys = sm90::kWarpRows;  // of a warp
  constexpr int kPieceKeys = sm90::kPieceBytes / sizeof(Word);
  constexpr int kRowKeys = sm90::kRowBytes / sizeof(Word);
  const BackwardArguments& args = state.args;
  const KeyBlock& work = state.work();
  const DenseMask& mask = args.mask;
  const int head = work.kv_head * args.heads_per_kv + metadata_of(state).step.head;
  const int own_key = state.thread.warp * kLineKeys + state.thread.lane % kLineKeys;
  // Rows and keys past the end read the last one.
  const int key = smaller(work.first_key + state.first_own_key() + own_key, args.keys - 1);
  const Word* from = static_cast<const Word*>(mask.data) +
                     work.sequence.number * mask.batch_stride + head * mask.head_stride +
                     key * mask.column_stride;
  char* to = own_bias(state, own_key / kRowKeys) + own_key % kPieceKeys * sizeof(Word);
  const int first_row = row_block * Traits::kRows + state.first_score_row();
  const int rows = has_one_row(mask) ? 1 : Traits::kScoreRows;
#pragma unroll 8
  for (int row = state.thread.lane / kLineKeys; row < rows; row += kWarp / kLineKeys) {
    const Word word = from[smaller(first_row + row, args.queries - 1) * mask.row_stride];
    *reinterpret_cast<Word*>(to + sm90::swizzled_offset(row, own_key % kRowKeys / kPieceKeys)) =
        word;
  }
  __syncwarp();
}

// For a mask that TMA cannot read: each warp loads its keys before products need the registers.
template <class Traits>
__device__ __forceinline__ void fetch_bias(const BackwardPart<Traits>& state, int row_block) {
  if (state.args.bias_by_tma || !adds<Traits>(state.args.mask) || !is_changed(state)) {
    return;
  }
  if (!is_wide(state.args.mask)) {
    return fetch_elements<uint16_t>(state, row_block);
  }
  if constexpr (Traits::kSplitsKeys) {
    const RingPosition<1> step = {state.stage.passed};
    state.shared.bias.scores_read.wait(step.phase() ^ 1);  // of the step before
  }
  fetch_elements<uint32_t>(state, row_block);
}

// -- adding ---------------------------------------------------------------------------------------
// A score with the mask: S * scale + mask, or with score modifications S + mask in base 2.
template <class Traits>
__device__ __forceinline__ float biased(const BackwardPart<Traits>& state, float score,
                                        float bias) {
  return Traits::kScores ? fmaf(bias, kLog2e, score) : fmaf(score, state.args.scale, bias);
}

// For 16-bit masks, whose rows are queries: the inverse of store_scores. A warp reads exactly what
// it overwrites with dS.
template <class MaskElement, class Traits>
__device__ __forceinline__ void add_pairs(const BackwardPart<Traits>& state,
                                          typename BackwardPart<Traits>::Scores& s) {
  const AccumulatorThread here = state.thread_here();
  const bool one_row = has_one_row(state.args.mask);
  const uint32_t offset = scores_offset(here.warp, here.lane, one_row);
  const uint32_t from = ptx::shared_address(own_bias(state, 0)) + offset;
  const uint32_t step = one_row ? 0 : sm90::n_major_step(1);
#pragma unroll
  for (int i = 0; i < Traits::kScoreRows / kMmaK; ++i) {
    uint32_t pairs[4];
    ptx::ldmatrix_x4_trans(from + i * step, pairs);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 bias = pair_of(reinterpret_cast<const MaskElement*>(&pairs[j]));
      float* score = &s[8 * i + 2 * j];
      score[0] = biased(state, score[0], bias.x);
      score[1] = biased(state, score[1], bias.y);
    }
  }
  __syncwarp();
}

// Offset of one of a warpgroup's keys, in its half of them.
__device__ __forceinline__ uint32_t float_offset(int row, int key) {
  constexpr int kPieceFloats = sm90::kPieceBytes / sizeof(float);
  constexpr int kRowFloats = sm90::kRowBytes / sizeof(float);
  return sm90::swizzled_offset(row, key % kRowFloats / kPieceFloats) +
         key % kPieceFloats * sizeof(float);
}

// The same in 32 bits. A warp accesses every bank once.
template <class Traits>
__device__ __forceinline__ void add_floats(const BackwardPart<Traits>& state,
                                           typename BackwardPart<Traits>::Scores& s) {
  const AccumulatorThread here = state.thread_here();
  const bool one_row = has_one_row(state.args.mask);
  const int step = one_row ? 0 : sm90::kRowStep * sm90::kRowBytes;
  const char* from = own_bias(state, here.warp / 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = here.upper_row() + half * sm90::kRowStep;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const char* at = from + float_offset(one_row ? 0 : here.first_column() + j, key);
#pragma unroll
      for (int i = 0; i < Traits::kScoreRows / 8; ++i) {
        float& score = s[4 * i + 2 * half + j];
        score = biased(state, score, *reinterpret_cast<const float*>(at + i * step));
      }
    }
  }
}

// With an additive mask and no score modifications, these are in natural units. Blocked pairs are
// masked later.
template <class Traits>
__device__ __forceinline__ void add_bias(const BackwardPart<Traits>& state,
                                         typename BackwardPart<Traits>::Scores& s) {
  if (!adds<Traits>(state.args.mask) || !is_changed(state)) {
    if constexpr (!Traits::kScores) {
      sm90::scale_rows(s, {state.args.scale, state.args.scale});
    }
    return;
  }
  if (state.args.bias_by_tma) {
    state.shared.bias.full[state.slot()].wait(state.stage.phase());
  }
  switch (state.args.mask.type) {
    case MaskType::kBFloat16:
      return add_pairs<__nv_bfloat16>(state, s);
    case MaskType::kFloat16:
      return add_pairs<__half>(state, s);
    default:
      return add_floats(state, s);
  }
}

// The mask's value for this thread's score 4 i + 2 half + j, before dS overwrites it.
template <class Traits>
__device__ __forceinline__ float bias_at(const BackwardPart<Traits>& state, int i, int half,
                                         int j) {
  constexpr int kPieceHalves = sm90::kPieceBytes / sizeof(uint16_t);
  if (!adds<Traits>(state.args.mask) || !is_changed(state)) {
    return 0.0f;
  }
  const AccumulatorThread here = state.thread_here();
  const int row = has_one_row(state.args.mask) ? 0 : here.first_column() + 8 * i + j;
  const int key = here.upper_row() + half * sm90::kRowStep;
  if (is_wide(state.args.mask)) {
    return *reinterpret_cast<const float*>(own_bias(state, here.warp / 2) + float_offset(row, key));
  }
  const char* at = own_bias(state, 0) + sm90::swizzled_offset(row, key / kPieceHalves) +
                   key % kPieceHalves * sizeof(uint16_t);
  return state.args.mask.type == MaskType::kBFloat16
             ? __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at))
             : __half2float(*reinterpret_cast<const __half*>(at));
}

// -- reuse of the shared memory -------------------------------------------------------------------
// Other warps of the warpgroup store dS and P over floats of the mask, and other warpgroups over a
// row that is broadcast: waits until all have read their values.
template <class Traits>
__device__ __forceinline__ void sync_before_stores(const BackwardPart<Traits>& state) {
  if (!Traits::kSplitsKeys && has_one_row(state.args.mask)) {
    state.sync_consumers();
  } else if (is_wide(state.args.mask)) {
    state.sync_group();
  }
}

// Releases the dS buffer that the next floats of an additive mask are loaded into.
template <class Traits>
__device__ __forceinline__ void release_scores(const BackwardPart<Traits>& state) {
  if constexpr (Traits::kSplitsKeys) {
    if (state.leader && is_wide(state.args.mask)) {
      state.shared.bias.scores_read.arrive();
    }
  }
}

}  // namespace fastattn::attention
