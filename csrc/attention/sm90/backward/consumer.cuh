// A consumer warpgroup of the Hopper attention backward: the products of a step and the arithmetic
// between them. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/sm90/backward/bias.cuh"
#include "attention/sm90/backward/layout.h"
#include "attention/sm90/backward/masks.cuh"
#include "attention/sm90/backward/part.cuh"
#include "attention/sm90/backward/weights.cuh"

namespace fastattn::attention {

// One warpgroup. All of its threads issue the products. One of them, the leader, releases slots: a
// wgmma that is complete for one warp is complete for the warpgroup.
template <class Traits>
struct BackwardConsumer {
  using Element = typename Traits::Element;
  using Part = BackwardPart<Traits>;
  using Scores = typename Part::Scores;
  using ScoreOperand = typename Part::ScoreOperand;
  static constexpr int kRows = Traits::kRows;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kSplitsKeys = Traits::kSplitsKeys;
  // This warpgroup's part of each matrix, in units of the 64 rows of a wgmma: scores^T 64 keys x
  // kScoreRows, dK and dV 64 keys x kOwnColumns, dQ kDqParts times 64 x kDqWidth.
  static constexpr int kScoreRows = Traits::kScoreRows;
  static constexpr int kOwnColumns = kSplitsKeys ? kHeadDim : Traits::kGroupColumns;
  static constexpr int kDqParts = kSplitsKeys ? 1 : Traits::kGroupChunks;
  static constexpr int kDqWidth = Traits::kTransposesDq ? kRows : kHeadDim;
  using ScoreMma = ptx::Wgmma<kScoreRows>;
  using GradientMma = ptx::Wgmma<kOwnColumns>;
  using DqMma = ptx::Wgmma<kDqWidth>;
  using DqPart = float[kDqWidth / 2];

  BackwardStorage<Traits>& shared;
  const BackwardArguments& args;
  Part own;
  const bool leader;

  // Matrix descriptors of this warpgroup's part of slot 0; other slots are an offset away.
  const uint64_t k_rows, v_rows, q_rows, dout_rows;  // operands of scores: columns contiguous
  const uint64_t q_columns, dout_columns;            // operands of dK and dV: the same, transposed
  const uint64_t k_dq, ds_dq;                        // operands of dQ

  float rDk[kOwnColumns / 2], rDv[kOwnColumns / 2];

  __device__ __forceinline__ BackwardConsumer(BackwardStorage<Traits>& storage,
                                              const BackwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        own(storage, arguments, warpgroup),
        leader(threadIdx.x % kWarpgroup == 0),
        k_rows(rows_from(shared.k.address(), own.first_own_key())),
        v_rows(rows_from(shared.v.address(), own.first_own_key())),
        q_rows(rows_from(shared.q[0].address(), own.first_score_row())),
        dout_rows(rows_from(shared.dout[0].address(), own.first_score_row())),
        q_columns(columns_from(shared.q[0], kSplitsKeys ? 0 : first_own_chunk())),
        dout_columns(columns_from(shared.dout[0], kSplitsKeys ? 0 : first_own_chunk())),
        k_dq(columns_from(shared.k, Traits::kTransposesDq ? first_own_chunk() : 0)),
        ds_dq(rows_from(shared.ds[0].address(), Traits::kTransposesDq ? 0 : warpgroup * kMmaRows)) {
  }

  __device__ __forceinline__ int first_own_chunk() const {
    return own.group * Traits::kGroupChunks;
  }
  __device__ __forceinline__ int slot() const { return own.stage.index(); }

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
      hash_keys(own);
      shared.kv_full.wait(0);
      clear_dead_keys(own);
    }
    if constexpr (Traits::kDense) {
      bool last = shared.work.steps == 0;
#pragma unroll 1
      while (!last) {
        shared.q_slots[slot()].full.wait(own.stage.phase());
        last = take_rows(own.metadata().step.row_block);
      }
    } else {
      int row_block = plan.visited.end - 1;
#pragma unroll 1
      while (static_cast<int>(own.stage.passed) < shared.work.steps) {
        shared.q_slots[slot()].full.wait(own.stage.phase());
        take_rows(row_block);
        row_block = row_block > plan.visited.begin ? row_block - 1 : plan.visited.end - 1;
      }
    }
    write_gradients();
  }

  // -- a step --------------------------------------------------------------------------------
  // Called when Q has been loaded. Returns whether this was the last step, if metadata says so.
  __device__ __forceinline__ bool take_rows(int row_block) {
    Scores rS, rDp;        // scores, then weights, and dP
    ScoreOperand rP, rDs;  // weights and dS as A operands
    KeptBits<Traits> kept;
    DqPart rDq[kDqParts];
    clear_dead_rows(own, row_block);
    fetch_bias(own, row_block);
    issue_product(rS, k_rows, q_rows);
    shared.dout_full[slot()].wait(own.stage.phase());
    issue_product(rDp, v_rows, dout_rows);
    draw_kept(own, kept);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rS);
    add_bias(own, rS);
    weigh(own, rS, kept);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDp);
    differentiate(own, rP, rDs, rS, rDp);
    if (needs_mask(own, row_block)) {
      mask_operands(own, rP, rDs, row_block);
    }
    sync_before_stores(own);
    if constexpr (kSplitsKeys) {
      store_scores(shared.ds[slot()], rDs);
      issue_gradient(rDv, rP, dout_columns);
      sync_scores();
    } else {
      // The last step's P and dS have been read: this step's Q was loaded into the only buffer
      // after every warpgroup had released it.
      store_scores(shared.p.tile, rP);
      store_scores(shared.ds[slot()], rDs);
      sync_scores();
      issue_gradient(rDv, shared.p.tile, dout_columns);
    }
    issue_dq(rDq);
    ptx::wgmma_wait_group<1>();
    ptx::pin(rDv);
    ptx::pin(rP);
    // Read before Q is released, and the metadata with it: that waits for what all four warps issue
    // after this.
    bool last = false;
    if constexpr (Traits::kDense) {
      last = own.metadata().last;
    }
    if constexpr (kSplitsKeys) {
      issue_gradient(rDk, rDs, q_columns);
    } else {
      issue_gradient(rDk, shared.ds[slot()], q_columns);
    }
    ptx::wgmma_wait_group<1>();
    for (DqPart& part : rDq) {
      ptx::pin(part);
    }
    if (leader) {
      release_scores(own);
    }
    store_dq(rDq);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rDk);
    ptx::pin(rDs);
    release_rows();
    own.stage.advance();
    return last;
  }

  // 64 keys x kScoreRows: K Q^T or V dO^T.
  __device__ __forceinline__ void issue_product(Scores& acc, uint64_t keys, uint64_t rows) {
    if constexpr (Traits::kStages == 1) {
      // Loop-invariant, like the descriptors derived from it: pinned, as there are no registers to
      // keep all of these.
      ptx::pin(keys);
      ptx::pin(rows);
    }
    rows = sm90::descriptor_at(rows, slot() * Traits::RowTile::kBytes);
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

  // P^T or dS^T in registers becomes P or dS in shared memory, a row a query.
  __device__ __forceinline__ void store_scores(typename Traits::ScoreTile& tile,
                                               const ScoreOperand& scores) {
    const AccumulatorThread here = own.thread_here();
    constexpr int kChunkBytes = Traits::ScoreTile::kChunkBytes;
    const uint32_t to = tile.address() + (kSplitsKeys ? own.group * kChunkBytes : 0) +
                        own.first_score_row() * sm90::kRowBytes +
                        scores_offset(here.warp, here.lane);
#pragma unroll
    for (int i = 0; i < kScoreRows / kMmaK; ++i) {
      ptx::stmatrix_x4_trans(to + sm90::n_major_step(i), scores[4 * i], scores[4 * i + 1],
                             scores[4 * i + 2], scores[4 * i + 3]);
    }
  }

  // Makes this warpgroup's stores visible to the others, and theirs to it.
  __device__ __forceinline__ void sync_scores() {
    ptx::fence_proxy_async();
    own.sync_all();
  }

  // dV += P^T dO or dK += dS^T Q, from this warpgroup's scores ...
  __device__ __forceinline__ void issue_gradient(float (&acc)[kOwnColumns / 2],
                                                 ScoreOperand& scores, uint64_t rows) {
    rows = sm90::descriptor_at(rows, slot() * Traits::RowTile::kBytes);
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
  __device__ __forceinline__ void issue_gradient(float (&acc)[kOwnColumns / 2],
                                                 const typename Traits::ScoreTile& scores,
                                                 uint64_t rows) {
    const uint64_t keys = columns_from(scores, 0);
    rows = sm90::descriptor_at(rows, slot() * Traits::RowTile::kBytes);
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
    const uint64_t ds = sm90::descriptor_at(ds_dq, slot() * Traits::ScoreTile::kBytes);
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

  // Each thread stores four floats at a time, side by side: no bank conflicts.
  __device__ __forceinline__ void store_dq(const DqPart (&parts)[kDqParts]) {
    Slot& slot = shared.dq_slots[own.group];
    slot.empty.wait(dq_position().phase() ^ 1);
    float4* to = reinterpret_cast<float4*>(shared.dq[own.group].data) + threadIdx.x % kWarpgroup;
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
    if (own.thread.lane == 0) {
      slot.full.arrive();
    }
  }

  // Each step fills one stage and one buffer of dQ, so both count steps.
  __device__ __forceinline__ RingPosition<1> dq_position() const { return {own.stage.passed}; }

  // Releasing Q releases everything that the step has loaded.
  __device__ __forceinline__ void release_rows() {
    if (leader) {
      shared.q_slots[slot()].empty.arrive();
    }
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
    const int key = shared.work.first_key + own.first_own_key() + own.thread.upper_row();
    const int column = kSplitsKeys ? 0 : own.group * kOwnColumns;
    Element* to = static_cast<Element*>(view.data) + sequence.entry * view.batch_stride +
                  shared.work.kv_head * view.head_stride +
                  (sequence.key_origin + key) * view.row_stride + column;
    sm90::store_global(to, view.row_stride, sequence.key_rows - key, columns - column, acc,
                       own.thread);
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
