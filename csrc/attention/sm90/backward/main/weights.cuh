// Computes weights from scores, and P and dS from weights: softmax with the forward's lse, dropout.
#pragma once

#include "attention/sm90/backward/main/bwd_part.cuh"
#include "attention/sm90/backward/main/bwd_scores.cuh"
#include "attention/sm90/common.cuh"
#include "common/dropout.h"

namespace fastattn::attention {

// -- dropout --------------------------------------------------------------------------------------
// Which weights dropout keeps: a byte for each place in a unit, with one bit for each of 8 units.
template <class Traits>
using KeptBits = uint32_t[(Traits::kScoreRows / 8 + 7) / 8];

// Column keys, one for two keys, which four threads share. A warp hashes those that it reads.
template <class Traits>
__device__ __forceinline__ void hash_keys(const BackwardPart<Traits>& state) {
  if constexpr (Traits::kDropout) {
    if (!drops<Traits>(state.args.dropout)) {
      return;
    }
    const int key = state.work().first_key + state.first_own_key() + state.thread.upper_row();
    state.shared.dropout.columns[state.group][dropout::lattice_unit(state.thread.upper_row())] =
        column_key(state.args.dropout, dropout::lattice_unit(key));
    __syncwarp();
  }
}

// Draws one bit per weight while the products run: later there are no registers for hashes. A
// thread's scores are whole units of dropout's lattice, see dropout_sm90.cuh; here the
// accumulators' rows are keys.
template <class Traits>
__device__ __forceinline__ void draw_kept(const BackwardPart<Traits>& state,
                                          KeptBits<Traits>& kept) {
  if constexpr (Traits::kDropout) {
    constexpr uint32_t kLowBits = 0x7F7F7F7F, kHighBits = 0x80808080, kEveryByte = 0x01010101;
    if constexpr (Traits::kChoosesDropout) {
      if (!drops<Traits>(state.args.dropout)) {
        return;  // nothing reads `kept`
      }
    }
    // If the threshold drops everything, the keep scale is 0.
    const uint32_t least =
        ~(static_cast<uint32_t>(state.args.dropout.threshold % 256) * kEveryByte);
    const uint32_t column_key =
        state.shared.dropout.columns[state.group][dropout::lattice_unit(state.thread.upper_row())];
    const uint32_t* row_keys = state.shared.dropout.rows[state.slot()].data +
                               dropout::units(state.first_score_row()) +
                               state.thread.first_column();
#pragma unroll
    for (uint32_t& word : kept) {
      word = 0;
    }
#pragma unroll
    for (int step = 0; step < Traits::kScoreRows / kMmaK; ++step) {
      const uint2 keys = *reinterpret_cast<const uint2*>(row_keys + dropout::units(step * kMmaK));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = dropout::word(i ? keys.y : keys.x, column_key);
        // The mean of a byte and 255 - threshold, rounded up, has its high bit set if the byte is
        // at least the threshold.
        const uint32_t means = (word | least) - ((word ^ least) >> 1 & kLowBits);
        const int number = 2 * step + i;
        kept[number / 8] |= (means & kHighBits) >> number % 8;
      }
    }
  }
}

// Marks dropped weights by their sign: no other weight is negative.
template <class Traits>
__device__ __forceinline__ void mark_dropped(const BackwardPart<Traits>& state,
                                             typename BackwardPart<Traits>::Scores& p,
                                             const KeptBits<Traits>& kept) {
  if constexpr (Traits::kDropout) {
    if (!drops<Traits>(state.args.dropout)) {
      return;
    }
#pragma unroll
    for (int i = 0; i < Traits::kScoreRows / 2; ++i) {
      const int number = i / 8 * 2 + i % 2, byte = i / 2 % 4;
      const bool keeps = kept[number / 8] >> (8 * byte + 7 - number % 8) & 1;
      p[i] = keeps ? p[i] : -p[i];
    }
  }
}

// -- weights --------------------------------------------------------------------------------------
// The lse of this thread's rows of scores.
template <class Traits>
__device__ __forceinline__ const float* own_lse2(const BackwardPart<Traits>& state) {
  return state.shared.lse2[state.slot()].data + state.first_score_row() +
         state.thread.first_column();
}

// The lse of this thread's rows, read before the wait for the scores where there are registers: a
// read takes as long as several exponentials.
template <class Traits>
struct EarlyLse {
  static constexpr bool kReads =
      Traits::kSplitsKeys && !Traits::kDense && !Traits::kDropout && !Traits::kScores;
#ifdef FASTATTN_TRIAL_BWD_REGISTERS
  // At head dim 64 all of them would spill 40 bytes.
  static constexpr int kLate = Traits::kConfig.consumer_registers < 240 ? 4 : 0;
#else
  static constexpr int kLate = 0;
#endif
  static constexpr int kPairs = kReads ? Traits::kScoreRows / 8 - kLate : 0;
  float2 pairs[kReads ? kPairs : 1];

  __device__ __forceinline__ explicit EarlyLse(const BackwardPart<Traits>& state) {
    const float* lse2 = own_lse2(state);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = *reinterpret_cast<const float2*>(lse2 + 8 * i);
    }
  }
};

// Scores become weights: 2^(s scale_log2 - lse2).
template <class Traits>
__device__ __forceinline__ void weigh(const BackwardPart<Traits>& state,
                                      typename BackwardPart<Traits>::Scores& s,
                                      const EarlyLse<Traits>& early, const KeptBits<Traits>& kept) {
  const float* lse2 = own_lse2(state);
  constexpr bool kHalf = std::is_same_v<typename Traits::Element, __half>;
#if defined(FASTATTN_TRIAL_BWD_DQ_ONCE) || defined(FASTATTN_TRIAL_BWD_PERSISTENT)
  // The compiler moves some there, too, see below.
  constexpr bool kMoves = Traits::kHeadDim == 128 || Traits::kPersistent;
#else
  constexpr bool kMoves = false;
#endif
  constexpr int kStep = Traits::kDense || Traits::kDropout || kMoves ? 1 : 8;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Traits::kScoreRows / 8; ++i) {
    const float2 shift = i < EarlyLse<Traits>::kPairs
                             ? early.pairs[i]
                             : *reinterpret_cast<const float2*>(lse2 + 8 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& score = s[4 * i + j];
      const float lse = j % 2 ? shift.y : shift.x;
      const float power = Traits::kScores ? score - lse
                          : Traits::kBias ? (score - lse) * kLog2e
                                          : fmaf(score, state.args.scale_log2, -lse);
      // A weight is at most 1, but of large scores it may be computed as more, and the products of
      // such weights overflow fp16.
      score = ptx::ex2(kHalf && power > 0.0f ? 0.0f : power);  // NaN stays
    }
  }
  mark_dropped(state, s, kept);
#pragma unroll
  for (int i = 0; i < Traits::kScoreRows / 2; i += kStep) {
    sum += s[i];
  }
  // Always passes, but depends on the weights: without it the compiler moves the exponentials
  // behind the wait for dP, where they overlap with nothing, and the dropout marks there spill. A
  // sum is never this NaN, but the compiler cannot tell. Every eighth weight is enough
  // without dropout and dense masks; with them the compiler (13.0) moves the exponentials of the
  // others.
  constexpr uint32_t kNoSum = 0x7F800001;
  state.shared.passed.wait(__float_as_uint(sum) == kNoSum);
}

// dS = P (dP - delta), and both as operands, in one pass, so that P in fp32 and P as an operand are
// not live at the same time. Dropout applies to P in dV and to dP. kCapped: dS of the products that
// the soft cap is applied to; `biases` are then those of own_biases.
template <bool kCapped, class Traits>
__device__ __forceinline__ void differentiate(const BackwardPart<Traits>& state,
                                              typename BackwardPart<Traits>::ScoreOperand& rP,
                                              typename BackwardPart<Traits>::ScoreOperand& rDs,
                                              const typename BackwardPart<Traits>::Scores& p,
                                              const typename BackwardPart<Traits>::Scores& dp,
                                              const float* biases) {
  using Element = typename Traits::Element;
  const float* delta = state.shared.delta[state.dout_slot()].data + state.first_score_row() +
                       state.thread.first_column();
#pragma unroll
  for (int i = 0; i < Traits::kScoreRows / 8; ++i) {
    const float2 d = *reinterpret_cast<const float2*>(delta + 8 * i);
    float slopes[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (kCapped) {
      const float2 lse = *reinterpret_cast<const float2*>(own_lse2(state) + 8 * i);
      slopes_of_cap(state, biases, p, i, lse, slopes);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 4 * i + 2 * half;
      if constexpr (Traits::kDropout) {
        const float scale = state.args.dropout.keep_scale;
        const float x = p[at] < 0.0f ? 0.0f : scale, y = p[at + 1] < 0.0f ? 0.0f : scale;
        rP[2 * i + half] = ptx::pack<Element>(p[at] * x, p[at + 1] * y);
        rDs[2 * i + half] =
            ptx::pack<Element>(fabsf(p[at]) * slopes[2 * half] * fmaf(dp[at], x, -d.x),
                               fabsf(p[at + 1]) * slopes[2 * half + 1] * fmaf(dp[at + 1], y, -d.y));
      } else {
        rP[2 * i + half] = ptx::pack<Element>(p[at], p[at + 1]);
        rDs[2 * i + half] =
            ptx::pack<Element>(p[at] * slopes[2 * half] * (dp[at] - d.x),
                               p[at + 1] * slopes[2 * half + 1] * (dp[at + 1] - d.y));
      }
    }
  }
}

}  // namespace fastattn::attention
