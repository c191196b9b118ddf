// A consumer warpgroup of the Hopper attention backward. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/backward_layout.h"
#include "attention/backward_storage.cuh"
#include "attention/dense_mask.cuh"
#include "attention/mask.cuh"
#include "common/dropout.h"
#include "sm90/ptx/wgmma.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

using sm90::AccumulatorThread;

// -- consumers -----------------------------------------------------------------------------------
// One warpgroup. Products are issued by all of its threads together; one of them, the leader, hands
// slots back, because a wgmma that is complete for one warp is complete for the warpgroup.
template <class Traits>
struct BackwardConsumer {
  using Element = typename Traits::Element;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;
  static constexpr uint32_t kLowHalf = 0xFFFF;
  // This warpgroup's part of everything, in units of the 64 rows of a wgmma: scores^T 64 keys x
  // kScoreRows, dK and dV 64 keys x kOwnColumns, dQ kDqParts times 64 x kDqWidth.
  static constexpr int kScoreRows = Traits::kScoreRows;
  static constexpr int kOwnColumns = kSplitsKeys ? kHeadDim : Traits::kGroupColumns;
  static constexpr int kDqParts = kSplitsKeys ? 1 : Traits::kGroupChunks;
  static constexpr int kDqWidth = Traits::kTransposesDq ? kRows : kHeadDim;
  // Bits of dropout: a byte has eight, of which each is one place in a unit.
  static constexpr int kKeptWords = (kScoreRows / 8 + 7) / 8;
  using ScoreMma = ptx::Wgmma<kScoreRows>;
  using GradientMma = ptx::Wgmma<kOwnColumns>;
  using DqMma = ptx::Wgmma<kDqWidth>;
  using DqPart = float[kDqWidth / 2];

  BackwardStorage<Traits>& shared;
  const BackwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  const bool leader;

  // Descriptors of slot 0; the others are added to. Each begins at this warpgroup's part.
  const uint64_t k_rows, v_rows, q_rows, dout_rows;  // operands of scores: columns contiguous
  const uint64_t q_columns, dout_columns;            // operands of dK and dV: the same, transposed
  const uint64_t k_dq, ds_dq;                        // operands of dQ
  RingPosition<Traits::kStages> stage;

  float rDk[kOwnColumns / 2], rDv[kOwnColumns / 2];

  __device__ __forceinline__ BackwardConsumer(BackwardStorage<Traits>& storage,
                                              const BackwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp},
        leader(threadIdx.x % kWarpgroup == 0),
        k_rows(rows_from(shared.k.address(), first_own_key())),
        v_rows(rows_from(shared.v.address(), first_own_key())),
        q_rows(rows_from(shared.q[0].address(), first_score_row())),
        dout_rows(rows_from(shared.dout[0].address(), first_score_row())),
        q_columns(columns_from(shared.q[0], kSplitsKeys ? 0 : first_own_chunk())),
        dout_columns(columns_from(shared.dout[0], kSplitsKeys ? 0 : first_own_chunk())),
        k_dq(columns_from(shared.k, Traits::kTransposesDq ? first_own_chunk() : 0)),
        ds_dq(rows_from(shared.ds[0].address(), Traits::kTransposesDq ? 0 : warpgroup * kMmaRows)) {
  }

  __device__ __forceinline__ int first_own_key() const {
    return kSplitsKeys ? group * kMmaRows : 0;
  }
  __device__ __forceinline__ int first_score_row() const {
    return kSplitsKeys ? 0 : group * kScoreRows;
  }
  __device__ __forceinline__ int first_own_chunk() const { return group * Traits::kGroupChunks; }

  static __device__ __forceinline__ uint64_t rows_from(uint32_t tile, int row) {
    return sm90::descriptor_k_major(tile + row * sm90::kRowBytes);
  }
  template <class Tile>
  static __device__ __forceinline__ uint64_t columns_from(const Tile& tile, int chunk) {
    return sm90::descriptor_n_major(tile.address() + chunk * Tile::kChunkBytes, Tile::kChunkBytes);
  }

  __device__ __forceinline__ void run() {
    const RowPlan& plan = shared.work.plan;
    clear(rDk);
    clear(rDv);
    if (shared.work.steps > 0) {
      hash_keys();
      shared.kv_full.wait(0);
      clear_dead_keys();
    }
    if constexpr (Traits::kDense) {
      bool last = shared.work.steps == 0;
#pragma unroll 1
      while (!last) {
        shared.q_slots[stage.index()].full.wait(stage.phase());
        last = take_rows(shared.dense.notes[stage.index()].step.row_block);
      }
    } else {
      int row_block = plan.visited.end - 1;
#pragma unroll 1
      while (static_cast<int>(stage.passed) < shared.work.steps) {
        take_rows(row_block);
        row_block = row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1;
      }
    }
    write_gradients();
  }

  // -- a step --------------------------------------------------------------------------------
  // Whether it was the last one, if the note beside it says so.
  __device__ __forceinline__ bool take_rows(int row_block) {
    float rS[kScoreRows / 2], rDp[kScoreRows / 2];     // scores, then weights, and dP
    uint32_t rP[kScoreRows / 4], rDs[kScoreRows / 4];  // weights and dS as A operands
    uint32_t kept[kKeptWords];
    DqPart rDq[kDqParts];
    clear_dead_rows(row_block);
    shared.q_slots[stage.index()].full.wait(stage.phase());
    fetch_bias(row_block);
    issue_product(rS, k_rows, q_rows);
    shared.dout_slots[stage.index()].full.wait(stage.phase());
    issue_product(rDp, v_rows, dout_rows);
    draw_kept(kept);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rS);
    add_bias(rS);
    weigh(rS, kept);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDp);
    differentiate(rP, rDs, rS, rDp);
    if (needs_mask(row_block)) {
      mask_operands(rP, rDs, row_block);
    }
    meet_before_stores();
    if constexpr (kSplitsKeys) {
      store_scores(shared.ds[stage.index()], rDs);
      issue_gradient(rDv, rP, dout_columns);
      show_scores();
    } else {
      // Nobody reads the last step's P and dS any more: this step's Q came into the only buffer
      // after every warpgroup had handed it back.
      store_scores(shared.p.tile, rP);
      store_scores(shared.ds[stage.index()], rDs);
      show_scores();
      issue_gradient(rDv, shared.p.tile, dout_columns);
    }
    issue_dq(rDq);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rDv);
    ptx::pin(rP);
    release(shared.dout_slots[stage.index()]);
    // Whoever hands Q back, and the note with it, waits for what all four warps issue after this.
    bool last = false;
    if constexpr (Traits::kDense) {
      last = shared.dense.notes[stage.index()].last;
    }
    if constexpr (kSplitsKeys) {
      issue_gradient(rDk, rDs, q_columns);
    } else {
      issue_gradient(rDk, shared.ds[stage.index()], q_columns);
    }
    ptx::wgmma_wait_group<1>();
    for (DqPart& part : rDq) {
      ptx::pin(part);
    }
    release_scores();
    hand_over_dq(rDq);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDk);
    ptx::pin(rDs);
    release(shared.q_slots[stage.index()]);
    stage.advance();
    return last;
  }

  // 64 keys x kScoreRows: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_product(float (&acc)[kScoreRows / 2], uint64_t keys,
                                                uint64_t rows) {
    rows = sm90::descriptor_at(rows, stage.index() * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          acc, sm90::descriptor_at(keys, sm90::k_major_step(step, kKeys)),
          sm90::descriptor_at(rows, sm90::k_major_step(step, kRows)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Whether a dense mask changes this warpgroup's scores.
  __device__ __forceinline__ bool is_changed() const {
    return shared.dense.notes[stage.index()].flags >> (kSplitsKeys ? group : 0) & 1;
  }

  // Under an additive mask: scores in natural units, which may be as large as floats are. What the
  // mask blocks is masked later.
  __device__ __forceinline__ void add_bias(float (&s)[kScoreRows / 2]) {
    if constexpr (Traits::kBias) {
      if (!is_changed()) {
        sm90::scale_rows(s, {args.scale, args.scale});
        return;
      }
      if (args.bias_comes) {
        shared.bias.full[stage.index()].wait(stage.phase());
      }
      switch (args.mask.type) {
        case MaskType::kBFloat16:
          return add_pairs<__nv_bfloat16>(s);
        case MaskType::kFloat16:
          return add_pairs<__half>(s);
        default:
          return add_floats(s);
      }
    }
  }

  // Under an additive mask no register is left to keep what follows from the thread's place through
  // the loop: pinned, it is computed where it is needed.
  __device__ __forceinline__ AccumulatorThread thread_here() const {
    uint32_t lane[] = {static_cast<uint32_t>(thread.lane)};
    if constexpr (Traits::kBias) {
      ptx::pin(lane);
    }
    return {thread.warp, static_cast<int>(lane[0])};
  }

  // Where this warpgroup's keys of the mask lie, 128 bytes a row.
  __device__ __forceinline__ char* own_bias(int half) const {
    const int row = has_one_row(args.mask) ? 0 : first_score_row();
    return shared.bias_place(stage.index(), kSplitsKeys ? group : 0, half) + row * sm90::kRowBytes;
  }

  // S = S * scale + mask, from rows of queries in 16 bits: what store_scores does, backwards. The
  // warp reads exactly what it will overwrite with dS.
  template <class MaskElement>
  __device__ __forceinline__ void add_pairs(float (&s)[kScoreRows / 2]) {
    const AccumulatorThread here = thread_here();
    const bool one_row = has_one_row(args.mask);
    const uint32_t offset = scores_offset(here.warp, here.lane, one_row);
    const uint32_t from = ptx::shared_address(own_bias(0)) + offset;
    const uint32_t step = one_row ? 0 : sm90::n_major_step(1);
#pragma unroll
    for (int i = 0; i < kScoreRows / kMmaK; ++i) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4_trans(from + i * step, pairs);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 bias = pair_of(reinterpret_cast<const MaskElement*>(&pairs[j]));
        float* score = &s[8 * i + 2 * j];
        score[0] = fmaf(score[0], args.scale, bias.x);
        score[1] = fmaf(score[1], args.scale, bias.y);
      }
    }
    __syncwarp();
  }

  // The same in 32 bits. A warp touches every bank once.
  __device__ __forceinline__ void add_floats(float (&s)[kScoreRows / 2]) {
    const AccumulatorThread here = thread_here();
    const bool one_row = has_one_row(args.mask);
    const int step = one_row ? 0 : sm90::kRowStep * sm90::kRowBytes;
    const char* from = own_bias(here.warp / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = here.upper_row() + half * sm90::kRowStep;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const char* at = from + float_offset(one_row ? 0 : here.first_column() + j, key);
#pragma unroll
        for (int i = 0; i < kScoreRows / 8; ++i) {
          float& score = s[4 * i + 2 * half + j];
          score = fmaf(score, args.scale, *reinterpret_cast<const float*>(at + i * step));
        }
      }
    }
  }

  // Of one of a warpgroup's keys, in its half of them.
  static __device__ __forceinline__ uint32_t float_offset(int row, int key) {
    constexpr int kPieceFloats = sm90::kPieceBytes / sizeof(float);
    constexpr int kRowFloats = sm90::kRowBytes / sizeof(float);
    return sm90::swizzled_offset(row, key % kRowFloats / kPieceFloats) +
           key % kPieceFloats * sizeof(float);
  }

  // What TMA cannot read: each warp fetches the keys that it will read, while there are registers.
  __device__ __forceinline__ void fetch_bias(int row_block) {
    if constexpr (Traits::kBias) {
      if (args.bias_comes || !is_changed()) {
        return;
      }
      if (!is_wide(args.mask)) {
        return fetch_elements<uint16_t>(row_block);
      }
      if constexpr (kSplitsKeys) {
        const RingPosition<1> step = {stage.passed};
        shared.bias.scores_read.wait(step.phase() ^ 1);  // of the step before
      }
      fetch_elements<uint32_t>(row_block);
    }
  }

  template <class Word>
  __device__ __forceinline__ void fetch_elements(int row_block) {
    constexpr int kLineKeys = sm90::kWarpRows;  // of a warp
    constexpr int kPieceKeys = sm90::kPieceBytes / sizeof(Word);
    constexpr int kRowKeys = sm90::kRowBytes / sizeof(Word);
    const KeyBlock& work = shared.work;
    const DenseMask& mask = args.mask;
    const int head = work.kv_head * args.heads_per_kv + shared.dense.notes[stage.index()].step.head;
    const int own_key = thread.warp * kLineKeys + thread.lane % kLineKeys;
    // Keys and rows that do not exist do as the last one does.
    const int key = smaller(work.first_key + first_own_key() + own_key, args.keys - 1);
    const Word* from = static_cast<const Word*>(mask.data) +
                       work.sequence.number * mask.batch_stride + head * mask.head_stride +
                       key * mask.column_stride;
    char* to = own_bias(own_key / kRowKeys) + own_key % kPieceKeys * sizeof(Word);
    const int first_row = row_block * kRows + first_score_row();
    const int rows = has_one_row(mask) ? 1 : kScoreRows;
#pragma unroll 8
    for (int row = thread.lane / kLineKeys; row < rows; row += kWarp / kLineKeys) {
      const Word word = from[smaller(first_row + row, args.queries - 1) * mask.row_stride];
      *reinterpret_cast<Word*>(to + sm90::swizzled_offset(row, own_key % kRowKeys / kPieceKeys)) =
          word;
    }
    __syncwarp();
  }

  // Floats of the mask lie where other warps of the warpgroup store dS and P, and a row that serves
  // all where one of the warpgroups that share keys does: all have read theirs.
  __device__ __forceinline__ void meet_before_stores() {
    if constexpr (Traits::kBias) {
      if (!kSplitsKeys && has_one_row(args.mask)) {
        ptx::bar_sync(kScoresBarrier, Traits::kGroups * kWarpgroup);
      } else if (is_wide(args.mask)) {
        ptx::bar_sync(kMeetBarrier + group, kWarpgroup);
      }
    }
  }

  // Scores become weights: 2^(s scale_log2 - lse2).
  __device__ __forceinline__ void weigh(float (&s)[kScoreRows / 2],
                                        const uint32_t (&kept)[kKeptWords]) {
    const float* lse2 = shared.lse2[stage.index()] + first_score_row() + thread.first_column();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kScoreRows / 8; ++i) {
      const float2 shift = *reinterpret_cast<const float2*>(lse2 + 8 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& score = s[4 * i + j];
        const float lse = j % 2 ? shift.y : shift.x;
        score = Traits::kBias ? ptx::ex2((score - lse) * kLog2e)
                              : ptx::ex2(fmaf(score, args.scale_log2, -lse));
      }
    }
    mark_dropped(s, kept);
#pragma unroll
    for (int i = 0; i < kScoreRows / 2; ++i) {
      sum += s[i];
    }
    // Passes at once, but only when the weights are there, dropped ones marked: without it the
    // compiler puts the exponentials after the wait for dP, where nothing runs beside them, and
    // marks that come there spill. No sum is this NaN, but the compiler does not know.
    constexpr uint32_t kNoSum = 0x7F800001;
    shared.passed.wait(__float_as_uint(sum) == kNoSum);
  }

  // Dropout's column keys, one for the two keys of four threads. A warp hashes what it will read.
  __device__ __forceinline__ void hash_keys() {
    if constexpr (Traits::kDropout) {
      const int key = shared.work.first_key + first_own_key() + thread.upper_row();
      shared.dropout.columns[group][dropout::lattice_unit(thread.upper_row())] =
          dropout::column_key(*args.dropout.seed, args.dropout.stream, dropout::lattice_unit(key));
      __syncwarp();
    }
  }

  // Which weights dropout keeps, one bit each, while the products run: later there are no registers
  // for hashes. A thread's scores are whole units of dropout's lattice, see dropout_sm90.cuh; here
  // its rows are keys, and all of one unit.
  __device__ __forceinline__ void draw_kept(uint32_t (&kept)[kKeptWords]) {
    if constexpr (Traits::kDropout) {
      constexpr uint32_t kLowBits = 0x7F7F7F7F, kHighBits = 0x80808080, kEveryByte = 0x01010101;
      // At the threshold that drops all the keep scale is 0.
      const uint32_t least = ~(static_cast<uint32_t>(args.dropout.threshold % 256) * kEveryByte);
      const uint32_t column_key =
          shared.dropout.columns[group][dropout::lattice_unit(thread.upper_row())];
      const uint32_t* row_keys = shared.dropout.rows[stage.index()] +
                                 dropout::units(first_score_row()) + thread.first_column();
#pragma unroll
      for (int i = 0; i < kKeptWords; ++i) {
        kept[i] = 0;
      }
#pragma unroll
      for (int step = 0; step < kScoreRows / kMmaK; ++step) {
        const uint2 keys = *reinterpret_cast<const uint2*>(row_keys + dropout::units(step * kMmaK));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = dropout::word(i ? keys.y : keys.x, column_key);
          // The mean of a byte and 255 - threshold, rounded up, has its high bit where the byte is
          // at least the threshold.
          const uint32_t means = (word | least) - ((word ^ least) >> 1 & kLowBits);
          const int number = 2 * step + i;
          kept[number / 8] |= (means & kHighBits) >> number % 8;
        }
      }
    }
  }

  // Dropped weights change sign: no other weight is negative.
  __device__ __forceinline__ void mark_dropped(float (&p)[kScoreRows / 2],
                                               const uint32_t (&kept)[kKeptWords]) {
    if constexpr (Traits::kDropout) {
#pragma unroll
      for (int i = 0; i < kScoreRows / 2; ++i) {
        const int number = i / 8 * 2 + i % 2, byte = i / 2 % 4;
        const bool keeps = kept[number / 8] >> (8 * byte + 7 - number % 8) & 1;
        p[i] = keeps ? p[i] : -p[i];
      }
    }
  }

  // dS = P (dP - delta), and both as operands: in one pass, so that P in fp32 and as an operand
  // do not live side by side. Dropout comes between P and dV, and between dP and dS.
  __device__ __forceinline__ void differentiate(uint32_t (&rP)[kScoreRows / 4],
                                                uint32_t (&rDs)[kScoreRows / 4],
                                                const float (&p)[kScoreRows / 2],
                                                const float (&dp)[kScoreRows / 2]) {
    const float* delta = shared.delta[stage.index()] + first_score_row() + thread.first_column();
#pragma unroll
    for (int i = 0; i < kScoreRows / 8; ++i) {
      const float2 d = *reinterpret_cast<const float2*>(delta + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * i + 2 * half;
        if constexpr (Traits::kDropout) {
          const float scale = args.dropout.keep_scale;
          const float x = p[at] < 0.0f ? 0.0f : scale, y = p[at + 1] < 0.0f ? 0.0f : scale;
          rP[2 * i + half] = ptx::pack<Element>(p[at] * x, p[at + 1] * y);
          rDs[2 * i + half] = ptx::pack<Element>(fabsf(p[at]) * fmaf(dp[at], x, -d.x),
                                                 fabsf(p[at + 1]) * fmaf(dp[at + 1], y, -d.y));
        } else {
          rP[2 * i + half] = ptx::pack<Element>(p[at], p[at + 1]);
          rDs[2 * i + half] =
              ptx::pack<Element>(p[at] * (dp[at] - d.x), p[at + 1] * (dp[at + 1] - d.y));
        }
      }
    }
  }

  __device__ __forceinline__ bool needs_mask(int row_block) const {
    if constexpr (Traits::kDense) {
      // Classes know nothing of keys that do not exist.
      return is_changed() || shared.work.first_key + kKeys > shared.work.sequence.keys;
    }
    return !contains(shared.work.plan.full, row_block);
  }

  // Which of this thread's rows from the first one on a dense mask lets attend a key.
  struct DenseBits {
    static constexpr int kWords = (kScoreRows + kWordKeys - 1) / kWordKeys;
    uint32_t words[kWords];

    __device__ __forceinline__ bool allows(int i) const {
      return !Traits::kDense || words[i / kWordKeys] >> i % kWordKeys & 1;
    }
  };
  __device__ __forceinline__ DenseBits dense_bits(int key, int row_block) const {
    DenseBits result = {};
    if constexpr (Traits::kDense) {
      static_assert(kSplitsKeys || kScoreRows == kWordKeys, "a warpgroup's rows are one word");
      const MaskLayout& layout = args.mask.layout;
      const KeyBlock& work = shared.work;
      const int head =
          work.kv_head * args.heads_per_kv + shared.dense.notes[stage.index()].step.head;
      // Keys that do not exist do as the last one does.
      const uint32_t* bits =
          args.mask.bits + bits_at(layout, mask_head(layout, work.sequence.number, head),
                                   smaller(key, args.keys - 1), row_block);
      const uint4 four = *reinterpret_cast<const uint4*>(bits);
      const uint32_t words[] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < DenseBits::kWords; ++i) {
        result.words[i] = (kSplitsKeys ? words[i] : bits[group]) >> thread.first_column();
      }
    }
    return result;
  }

  // P and dS become 0 where the pair is not allowed, whatever they are: a weight that no row knows
  // of may be inf. As operands they take half the registers, and nothing else is alive.
  __device__ __forceinline__ void mask_operands(uint32_t (&rP)[kScoreRows / 4],
                                                uint32_t (&rDs)[kScoreRows / 4], int row_block) {
    const AccumulatorThread here = thread_here();
    const KeyBlock& work = shared.work;
    const int origin = row_block * kRows + first_score_row() + here.first_column();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = work.first_key + first_own_key() + here.upper_row() + half * sm90::kRowStep;
      const Sequence& sequence = work.sequence;
      const RowMask mask = row_mask(key, origin, sequence.band, sequence.queries, sequence.keys);
      const DenseBits dense = dense_bits(key, row_block);
#pragma unroll
      for (int i = 0; i < kScoreRows / 8; ++i) {
        const bool first = allows(mask, 8 * i) && dense.allows(8 * i);
        const bool second = allows(mask, 8 * i + 1) && dense.allows(8 * i + 1);
        const uint32_t allowed = (first ? kLowHalf : 0) | (second ? ~kLowHalf : 0);
        rP[2 * i + half] &= allowed;
        rDs[2 * i + half] &= allowed;
      }
    }
  }

  // P^T or dS^T in registers becomes P or dS in shared memory, a row a query.
  __device__ __forceinline__ void store_scores(typename Traits::ScoreTile& tile,
                                               const uint32_t (&scores)[kScoreRows / 4]) {
    const AccumulatorThread here = thread_here();
    constexpr int kChunkBytes = Traits::ScoreTile::kChunkBytes;
    const uint32_t to = tile.address() + (kSplitsKeys ? group * kChunkBytes : 0) +
                        first_score_row() * sm90::kRowBytes + scores_offset(here.warp, here.lane);
#pragma unroll
    for (int i = 0; i < kScoreRows / kMmaK; ++i) {
      ptx::stmatrix_x4_trans(to + sm90::n_major_step(i), scores[4 * i], scores[4 * i + 1],
                             scores[4 * i + 2], scores[4 * i + 3]);
    }
  }

  // What this warpgroup has stored is there for all of them, and the others' for it.
  __device__ __forceinline__ void show_scores() {
    ptx::fence_proxy_async();
    ptx::bar_sync(kScoresBarrier, Traits::kGroups * kWarpgroup);
  }

  // dV += P^T dO or dK += dS^T Q, from this warpgroup's scores ...
  __device__ __forceinline__ void issue_gradient(float (&acc)[kOwnColumns / 2],
                                                 uint32_t (&scores)[kScoreRows / 4],
                                                 uint64_t rows) {
    rows = sm90::descriptor_at(rows, stage.index() * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::pin(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / kMmaK; ++step) {
      GradientMma::template rs<Element, ptx::kMajorN>(
          acc, scores[4 * step], scores[4 * step + 1], scores[4 * step + 2], scores[4 * step + 3],
          sm90::descriptor_at(rows, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  // ... or from everybody's.
  __device__ __forceinline__ void issue_gradient(float (&acc)[kOwnColumns / 2],
                                                 const typename Traits::ScoreTile& scores,
                                                 uint64_t rows) {
    const uint64_t keys = columns_from(scores, 0);
    rows = sm90::descriptor_at(rows, stage.index() * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kRows / kMmaK; ++step) {
      GradientMma::template ss<Element, ptx::kMajorN, ptx::kMajorN>(
          acc, sm90::descriptor_at(keys, sm90::n_major_step(step)),
          sm90::descriptor_at(rows, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_dq(DqPart (&parts)[kDqParts]) {
    const uint64_t ds = sm90::descriptor_at(ds_dq, stage.index() * Traits::ScoreTile::kBytes);
    for (DqPart& part : parts) {
      ptx::pin(part);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int part = 0; part < kDqParts; ++part) {
      const uint64_t k = sm90::descriptor_at(k_dq, part * Traits::KeyTile::kChunkBytes);
#pragma unroll
      for (int step = 0; step < kKeys / kMmaK; ++step) {
        const uint64_t keys = sm90::descriptor_at(k, sm90::n_major_step(step));
        const uint64_t scores = sm90::descriptor_at(ds, sm90::k_major_step(step, kRows));
        if constexpr (Traits::kTransposesDq) {
          DqMma::template ss<Element, ptx::kMajorK, ptx::kMajorN>(parts[part], keys, scores,
                                                                  step > 0);
        } else {
          DqMma::template ss<Element, ptx::kMajorN>(parts[part], scores, keys, step > 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  // Four floats of every thread side by side: no bank is asked twice.
  __device__ __forceinline__ void hand_over_dq(const DqPart (&parts)[kDqParts]) {
    Slot& slot = shared.dq_slots[group];
    slot.empty.wait(dq_position().phase() ^ 1);
    float4* to = reinterpret_cast<float4*>(shared.dq[group]) + threadIdx.x % kWarpgroup;
#pragma unroll
    for (const DqPart& acc : parts) {
#pragma unroll
      for (int i = 0; i < kDqWidth / 8; ++i) {
        to[i * kWarpgroup] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
      }
      to += kDqWidth / 8 * kWarpgroup;
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (thread.lane == 0) {
      slot.full.arrive();
    }
  }

  // A step fills one stage and one buffer of dQ: both count steps.
  __device__ __forceinline__ RingPosition<1> dq_position() const { return {stage.passed}; }

  // The place of dS that floats of an additive mask come into.
  __device__ __forceinline__ void release_scores() {
    if constexpr (Traits::kBias && kSplitsKeys) {
      if (leader && is_wide(args.mask)) {
        shared.bias.scores_read.arrive();
      }
    }
  }

  __device__ __forceinline__ void release(Slot& slot) {
    if (leader) {
      slot.empty.arrive();
    }
  }

  // -- what nothing may read -----------------------------------------------------------------
  // Weights of dead rows and keys are 0, but 0 * NaN is NaN: they are zeroed. Every warpgroup does
  // it for itself before it reads a block; they write the same.
  __device__ __forceinline__ void clear_dead_keys() {
    if constexpr (Traits::kDense) {
      clear_keys_without_rows();
      return;
    }
    const Range live = shared.work.plan.keys;
    // Past the tensor's end TMA has zeroed already; the end of a packed sequence is another's
    // beginning.
    const int rows =
        args.packing.key_offsets ? kKeys : smaller(args.keys - shared.work.first_key, kKeys);
    if (live.begin > 0 || live.end < rows) {
      for (auto* tile : {&shared.k, &shared.v}) {
        clear_outside(*tile, live);
      }
      show_writes_to_wgmma();
    }
  }

  // Under a dense mask: the same for keys that no row of any head may attend. A thread looks for
  // one row that may attend its key.
  __device__ __forceinline__ void clear_keys_without_rows() {
    if constexpr (Traits::kDense) {
      uint32_t* live = shared.dense.live_keys[group];
      const int key = threadIdx.x % kWarpgroup;
      const uint32_t lives = key < kKeys && has_row(key) ? 1u << thread.lane : 0;
      const uint32_t word = __reduce_or_sync(~0u, lives);
      if (key < kKeys && thread.lane == 0) {
        live[thread.warp] = word;
      }
      ptx::bar_sync(kMeetBarrier + group, kWarpgroup);
      for (auto* tile : {&shared.k, &shared.v}) {
        tile->clear_unmarked_rows(live, threadIdx.x % kWarpgroup, kWarpgroup);
      }
      show_writes_to_wgmma();
    }
  }

  __device__ __forceinline__ bool has_row(int own_key) const {
    const KeyBlock& work = shared.work;
    const MaskLayout& layout = args.mask.layout;
    const int key = work.first_key + own_key;
    if (key >= work.sequence.keys) {
      return false;
    }
    const Range rows = rows_of_key(key, work.sequence.band, work.sequence.queries);
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
          any |= bits[word] & bits_inside(rows, n * kRows + word * kWordKeys);
        }
        if (any) {
          return true;
        }
      }
    }
    return false;
  }

  __device__ __forceinline__ void clear_dead_rows(int row_block) {
    if constexpr (Traits::kDense) {
      const StepNote& note = shared.dense.notes[stage.index()];
      if (note.flags & kHasDead) {
        shared.dout_slots[stage.index()].full.wait(stage.phase());
        for (auto* tile : {&shared.q[stage.index()], &shared.dout[stage.index()]}) {
          tile->clear_unmarked_rows(note.live, threadIdx.x % kWarpgroup, kWarpgroup);
        }
        show_writes_to_wgmma();
      }
      return;
    }
    if (contains(shared.work.plan.clean, row_block)) {
      return;
    }
    const int first_row = row_block * kRows;
    const Sequence& sequence = shared.work.sequence;
    const Range live = rows_of_some({0, sequence.keys}, sequence.band, sequence.queries);
    const Range own = {larger(live.begin - first_row, 0), smaller(live.end - first_row, kRows)};
    shared.q_slots[stage.index()].full.wait(stage.phase());
    shared.dout_slots[stage.index()].full.wait(stage.phase());
    clear_outside(shared.q[stage.index()], own);
    clear_outside(shared.dout[stage.index()], own);
    show_writes_to_wgmma();
  }

  template <class Tile>
  static __device__ __forceinline__ void clear_outside(Tile& tile, Range live) {
    tile.clear_rows(0, live.begin, threadIdx.x % kWarpgroup, kWarpgroup);
    tile.clear_rows(live.end, Tile::kRows, threadIdx.x % kWarpgroup, kWarpgroup);
  }

  __device__ __forceinline__ void show_writes_to_wgmma() {
    ptx::fence_proxy_async();
    ptx::bar_sync(kMeetBarrier + group, kWarpgroup);
  }

  // -- the end -------------------------------------------------------------------------------
  __device__ __forceinline__ void write_gradients() {
    const float factors[2] = {args.scale, args.scale};
    sm90::scale_rows(rDk, factors);
    write_gradient(args.dv, args.value_dim, rDv);
    write_gradient(args.dk, args.head_dim, rDk);
  }

  __device__ __forceinline__ void write_gradient(const TensorView& view, int columns,
                                                 const float (&acc)[kOwnColumns / 2]) {
    if (!view.data) {
      return;
    }
    const Sequence& sequence = shared.work.sequence;
    const int key = shared.work.first_key + first_own_key() + thread.upper_row();
    const int column = kSplitsKeys ? 0 : group * kOwnColumns;
    Element* to = static_cast<Element*>(view.data) + sequence.entry * view.batch_stride +
                  shared.work.kv_head * view.head_stride +
                  (sequence.key_origin + key) * view.row_stride + column;
    sm90::store_global(to, view.row_stride, sequence.key_rows - key, columns - column, acc, thread);
  }

  template <int kCount>
  static __device__ __forceinline__ void clear(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      registers[i] = 0.0f;
    }
  }
};

}  // namespace fastattn::attention
