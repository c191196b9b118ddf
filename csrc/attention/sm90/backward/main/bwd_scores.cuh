// The soft cap and a bias by distance on a step's scores, before they are masked.
#pragma once

#include "attention/sm90/backward/main/bias.cuh"
#include "attention/sm90/backward/main/bwd_part.cuh"
#include "attention/sm90/masks/score_modifications.cuh"

namespace fastattn::attention {

// The biases of this thread's scores: its upper key has from[-i] with its row number i, and the
// lower key from[kRowStep - i]. Null: none.
template <class Traits>
__device__ __forceinline__ const float* own_biases(const BackwardPart<Traits>& state, int head,
                                                   int row_block) {
  const BackwardArguments& args = state.args;
  const KeyBlock& work = state.work();
  const Sequence& sequence = work.sequence;
  const float* biases =
      biases_of(args, args.modifications, sequence.number, work.kv_head * args.heads_per_kv + head,
                sequence.queries, sequence.keys);
  if (!biases) {
    return nullptr;
  }
  const AccumulatorThread here = state.thread_here();
  const int key = work.first_key + state.first_own_key() + here.upper_row();
  const int row = row_block * Traits::kRows + state.first_score_row() + here.first_column();
  return biases + (key - row);
}

template <class Traits>
__device__ __forceinline__ void change_scores(const BackwardPart<Traits>& state,
                                              typename BackwardPart<Traits>::Scores& s,
                                              const float* from) {
  cap_scores(s, state.args.modifications, state.args.scale_log2);
  if (from) {
    add_biases<-1>(s, from);
  }
}

// The derivatives of the soft cap for scores 4 i to 4 i + 3, from their weights (negative if they
// are dropped): a score is the logarithm of its weight, plus lse, minus what was added to it. So no
// register keeps them.
template <class Traits>
__device__ __forceinline__ void slopes_of_cap(const BackwardPart<Traits>& state, const float* from,
                                              const float* p, int i, float2 lse,
                                              float (&slopes)[4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int half = k / 2, j = k % 2;
    float bias = from ? from[half * sm90::kRowStep - 8 * i - j] : 0.0f;
    if constexpr (Traits::kBias) {
      bias += bias_at(state, i, half, j);
    }
    const float score = ptx::lg2(fabsf(p[4 * i + k])) + (j ? lse.y : lse.x);
    slopes[k] = slope_of_cap(fmaf(bias, -kLog2e, score), state.args.modifications);
  }
  __syncwarp();  // no load is moved before this: there are no registers
}

}  // namespace fastattn::attention
