// A consumer warpgroup of the Hopper attention backward: the products of a step and the arithmetic
// between them. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/sm90/backward/layout.h"
#include "attention/sm90/backward/main/dq_once.cuh"
#include "attention/sm90/backward/main/gradients.cuh"
#include "attention/sm90/backward/main/steps.cuh"
#include "attention/sm90/backward/main/weights.cuh"

namespace fastattn::attention {

// One warpgroup. All of its threads issue the products.
template <class Traits>
struct BackwardConsumer {
  using Element = typename Traits::Element;
  using Part = BackwardPart<Traits>;
  using Scores = typename Part::Scores;
  using ScoreOperand = typename Part::ScoreOperand;
  using Gradient = typename Part::Gradient;
  using Dq = typename Part::Dq;
  using ScoreMma = ptx::Wgmma<Part::kScoreRows>;
  using GradientMma = ptx::Wgmma<Part::kOwnColumns>;
  using DqMma = ptx::Wgmma<Part::kDqWidth>;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;

  BackwardStorage<Traits>& shared;
  Part state;

  // Matrix descriptors of this warpgroup's part of slot 0; other slots are an offset away.
  const uint64_t k_rows, v_rows, q_rows, dout_rows;  // operands of scores: columns contiguous
  const uint64_t q_columns, dout_columns;            // operands of dK and dV: the same, transposed
  const uint64_t k_dq, ds_dq;                        // operands of dQ

  Gradient rDk, rDv;

  __device__ __forceinline__ BackwardConsumer(BackwardStorage<Traits>& storage,
                                              const BackwardArguments& args, int warpgroup)
      : shared(storage),
        state(storage, args, warpgroup),
        k_rows(rows_from(shared.k.address(), state.first_own_key())),
        v_rows(rows_from(shared.v.address(), state.first_own_key())),
        q_rows(rows_from(shared.q[0].address(), state.first_score_row())),
        dout_rows(rows_from(shared.dout[0].address(), state.first_score_row())),
        q_columns(columns_from(shared.q[0], kSplitsKeys ? 0 : state.first_own_chunk())),
        dout_columns(columns_from(shared.dout[0], kSplitsKeys ? 0 : state.first_own_chunk())),
        k_dq(columns_from(shared.k, Traits::kTransposesDq ? state.first_own_chunk() : 0)),
        ds_dq(rows_from(shared.ds[0].address(), Traits::kTransposesDq ? 0 : warpgroup * kMmaRows)) {
  }

  static __device__ __forceinline__ uint64_t rows_from(uint32_t tile, int row) {
    return sm90::descriptor_k_major(tile + row * sm90::kRowBytes);
  }
  template <class Tile>
  static __device__ __forceinline__ uint64_t columns_from(const Tile& tile, int chunk) {
    return sm90::descriptor_n_major(tile.address() + chunk * Tile::kChunkBytes, Tile::kChunkBytes);
  }

  __device__ __forceinline__ void run() {
    if constexpr (Traits::kPersistent) {
#pragma unroll 1
      while (true) {
        shared.persistent.slots[state.block.index()].full.wait(state.block.phase());
        if (state.work().steps < 0) {
          return;
        }
        take_block();
        __syncwarp();
        if (state.thread.lane == 0) {
          shared.persistent.slots[state.block.index()].empty.arrive();
        }
        state.block.advance();
      }
    } else {
      take_block();
    }
  }

  // A block of keys.
  __device__ __forceinline__ void take_block() {
    clear(rDk);
    clear(rDv);
    if constexpr (Traits::kDense) {
      take(ListedSteps<Traits>{state});
    } else {
      take(PlannedSteps<Traits>{state});
    }
    const float factors[2] = {state.args.scale, state.args.scale};
    sm90::scale_rows(rDk, factors);
    write_gradient(state, state.args.dv, state.args.value_dim, rDv);
    write_gradient(state, state.args.dk, state.args.head_dim, rDk);
  }

  // Adds all steps to dK, dV and dQ.
  template <class Steps>
  __device__ __forceinline__ void take(Steps steps) {
    if (state.work().steps > 0) {
      hash_keys(state);
      shared.kv_full.wait(state.kv_parity());
      steps.clear_keys();
    }
#pragma unroll 1
    while (steps.more()) {
      next_step(steps);
    }
    if constexpr (Traits::kPersistent) {
      if (state.leader && state.work().steps > 0) {
        shared.persistent.kv_empty.arrive();
      }
    }
  }

  // -- a step --------------------------------------------------------------------------------
  template <class Steps>
  __device__ __forceinline__ void next_step(Steps& steps) {
    Scores rS, rDp;        // scores, then weights, and dP
    ScoreOperand rP, rDs;  // weights and dS as A operands
    KeptBits<Traits> kept;
    Dq rDq;
    state.await_rows();
    steps.open();
    issue_product(rS, k_rows, q_rows, state.slot());
    state.await_dout();
    issue_product(rDp, v_rows, dout_rows, state.dout_slot());
    draw_kept(state, kept);
    const EarlyLse<Traits> early(state);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rS);
    if constexpr (Traits::kScores) {
      change_scores(state, rS, steps.biases());
    }
    steps.add_mask(rS);
    weigh(state, rS, early, kept);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDp);
    if (Traits::kScores && state.args.modifications.cap_log2 > 0.0f) {
      differentiate<true>(state, rP, rDs, rS, rDp, steps.biases());
    } else {
      differentiate<false>(state, rP, rDs, rS, rDp, nullptr);
    }
    steps.mask(rP, rDs);
    steps.before_stores();
    if constexpr (kSplitsKeys) {
      store_scores(shared.ds[state.dout_slot()], rDs);
      issue_gradient(rDv, rP, dout_columns, state.dout_slot());
      sync_scores();
      issue_dq<0>(rDq, state.dout_slot());
      ptx::wgmma_wait_group<1>();
      ptx::pin(rDv);
      ptx::pin(rP);
      steps.close();
      issue_gradient(rDk, rDs, q_columns, state.slot());
      ptx::wgmma_wait_group<1>();
      ptx::pin(rDq[0]);
      steps.after_dq();
      pass_dq<0>(steps, rDq);
    } else {
      // Every warpgroup has read the last step's P and dS: with one Q, before this one was loaded.
      if constexpr (Traits::kStages > 1) {
        state.sync_consumers();
      }
      store_scores(shared.p.tile, rP);
      store_scores(shared.ds[state.dout_slot()], rDs);
      sync_scores();
      issue_gradient(rDv, shared.p.tile, dout_columns, state.dout_slot());
      issue_dq<0>(rDq, state.dout_slot());
      if constexpr (Part::kDqParts > 1) {
        issue_dq<1>(rDq, state.dout_slot());
      }
      ptx::wgmma_wait_group<Part::kDqParts>();
      ptx::pin(rDv);
      state.release_dout();
      steps.close();
      issue_gradient(rDk, shared.ds[state.dout_slot()], q_columns, state.slot());
      ptx::wgmma_wait_group<(Traits::kDqPieces < Part::kDqParts) ? 1 : Part::kDqParts>();
      ptx::pin(rDq[0]);
      if constexpr (Traits::kDqPieces > 1) {
        pass_dq<0>(steps, rDq);
        ptx::wgmma_wait_group<1>();
      }
      ptx::pin(rDq[Part::kDqParts - 1]);
      pass_dq<Traits::kDqPieces - 1>(steps, rDq);
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDk);
    ptx::pin(rDs);
    state.release_rows();
  }

  // 64 keys x kScoreRows: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_product(Scores& acc, uint64_t keys, uint64_t rows,
                                                int slot) {
    if constexpr (!kSplitsKeys) {
      // Loop-invariant, like the descriptors derived from it: pinned, as there are no registers to
      // keep all of these.
      ptx::pin(keys);
      ptx::pin(rows);
    }
    rows = sm90::descriptor_at(rows, slot * Traits::RowTile::kBytes);
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          acc, sm90::descriptor_at(keys, sm90::k_major_step(step, kKeys)),
          sm90::descriptor_at(rows, sm90::k_major_step(step, kRows)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  // P^T or dS^T in registers becomes P or dS in shared memory, a row a query.
  __device__ __forceinline__ void store_scores(typename Traits::ScoreTile& tile,
                                               const ScoreOperand& scores) {
    const AccumulatorThread here = state.thread_here();
    constexpr int kChunkBytes = Traits::ScoreTile::kChunkBytes;
    const uint32_t to = tile.address() + (kSplitsKeys ? state.group * kChunkBytes : 0) +
                        state.first_score_row() * sm90::kRowBytes +
                        scores_offset(here.warp, here.lane);
#pragma unroll
    for (int i = 0; i < Part::kScoreRows / kMmaK; ++i) {
      ptx::stmatrix_x4_trans(to + sm90::n_major_step(i), scores[4 * i], scores[4 * i + 1],
                             scores[4 * i + 2], scores[4 * i + 3]);
    }
  }

  // Makes the stores of all consumer warpgroups visible to each other.
  __device__ __forceinline__ void sync_scores() {
    ptx::fence_proxy_async();
    state.sync_consumers();
  }

  // dV += P^T dO or dK += dS^T Q, from this warpgroup's scores ...
  __device__ __forceinline__ void issue_gradient(Gradient& acc, ScoreOperand& scores, uint64_t rows,
                                                 int slot) {
    rows = sm90::descriptor_at(rows, slot * Traits::RowTile::kBytes);
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

  // ... or from those of all warpgroups.
  __device__ __forceinline__ void issue_gradient(Gradient& acc,
                                                 const typename Traits::ScoreTile& scores,
                                                 uint64_t rows, int slot) {
    const uint64_t keys = columns_from(scores, 0);
    rows = sm90::descriptor_at(rows, slot * Traits::RowTile::kBytes);
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

  template <int kPart>
  __device__ __forceinline__ void issue_dq(Dq& parts, int slot) {
    const uint64_t ds = sm90::descriptor_at(ds_dq, slot * Traits::ScoreTile::kBytes);
    const uint64_t k = sm90::descriptor_at(k_dq, kPart * Traits::KeyTile::kChunkBytes);
    ptx::pin(parts[kPart]);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeys / kMmaK; ++step) {
      const uint64_t keys = sm90::descriptor_at(k, sm90::n_major_step(step));
      const uint64_t scores = sm90::descriptor_at(ds, sm90::k_major_step(step, kRows));
      if constexpr (Traits::kTransposesDq) {
        DqMma::template ss<Element, ptx::kMajorK, ptx::kMajorN>(parts[kPart], keys, scores,
                                                                step > 0);
      } else {
        DqMma::template ss<Element, ptx::kMajorN>(parts[kPart], scores, keys, step > 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  // A piece of dQ of this step, of which all pieces up to it are complete.
  template <int kPiece, class Steps>
  __device__ __forceinline__ void pass_dq(const Steps& steps, Dq& parts) {
    if (sums_dq(state.args)) {
      stage_dq<kPiece>(state, parts);
    } else if (kPiece == Traits::kDqPieces - 1) {
      write_dq(state, parts, steps.step());
    }
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
