// The consumer warpgroups: products by wgmma, and the online softmax between them.
#pragma once

#include "attention/sm90/forward/online_softmax.cuh"
#include "attention/sm90/forward/storage.cuh"
#include "attention/sm90/forward/tiles.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "attention/sm90/masks/dropout_sm90.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;
using sm90::RingPosition;

// One warpgroup: 64 query rows. All of its threads issue the products. One of them, the leader,
// releases slots: a wgmma that is complete for one warp is complete for the warpgroup.
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  static constexpr int kBlock = Traits::kBlock;
  using ScoreMma = ptx::Wgmma<kBlock>;
  using OutputMma = ptx::Wgmma<Traits::kHeadDim>;

  SharedStorage<Traits>& shared;
  const ForwardArguments& args;
  const int group;
  const AccumulatorThread thread;
  const bool leader;

  // Matrix descriptors of slot 0; other slots are an offset away.
  const uint64_t q_base, k_base, v_base;
  RingPosition<Traits::kQueryBuffers> query;
  // The block whose scores are computed next, and the block of the next P V, which is one behind.
  RingPosition<Traits::kStages> key, value;
  RingPosition<1> output;
  RingPosition<Traits::kBiasPieces> bias;
  TileQueue::Position position;

  float rS[kBlock / 2];            // scores, then weights, of 64 x kBlock
  uint32_t rP[kBlock / 4];         // weights as A operand
  float rO[Traits::kHeadDim / 2];  // output of 64 x kHeadDim
  typename Traits::Softmax softmax;
  // Dropout: the hash that row keys continue, and the row key of the thread's two rows in this
  // tile.
  uint32_t row_stream = 0, row_key = 0;
  // Dense masks: whether this warpgroup must mask the next block.
  bool needs_mask = false;

  __device__ __forceinline__ Consumer(SharedStorage<Traits>& storage,
                                      const ForwardArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp},
        leader(threadIdx.x % kWarpgroup == 0),
        q_base(sm90::descriptor_k_major(shared.q[0][warpgroup].address())),
        k_base(sm90::descriptor_k_major(shared.k[0].address())),
        v_base(sm90::descriptor_n_major(shared.v[0].address(), Traits::KeyTile::kChunkBytes)) {
    if constexpr (Traits::kDropout) {
      row_stream = dropout::stream_key(dropout::kRowTag, *args.dropout.seed, args.dropout.stream);
    }
  }

  __device__ __forceinline__ void run() {
    if (Traits::kPingPong && group == Traits::kGroups - 1) {
      arrive_ping_pong();  // warpgroup 0 issues first
    }
#pragma unroll 1
    while (true) {
      const TileInfo& tile = shared.queue.peek(position);
      if (tile.row < 0) {
        return;
      }
      const BlockPlan plan = plan_for_group<Traits>(args, tile, group);
      float factor[2];
      clear(rO);
      softmax.start();
      if (is_empty(plan.loaded)) {
        close_rows(tile, factor);
      } else {
        attend(tile, plan, factor);
      }
      write_output(tile, factor);
      shared.queue.release_warp(position, thread.lane);
    }
  }

  // O = unnormalised output of the tile's rows; `factor` normalises it.
  __device__ __forceinline__ void attend(const TileInfo& tile, const BlockPlan& plan,
                                         float (&factor)[2]) {
    if constexpr (Traits::kDropout) {
      const int row = tile.row + group * kMmaRows + thread.upper_row();
      row_key = dropout::absorb(dropout::absorb(dropout::absorb(row_stream, tile.batch), tile.head),
                                dropout::lattice_unit(row));
    }
    if constexpr (Traits::kDense) {
      attend_dense(tile);
    } else {
      attend_plan(tile, plan);
    }
    issue_output();
    close_rows(tile, factor);
    await_output();
    query.advance();
    if constexpr (!Traits::kDense) {
      skip_blocks(plan.own.begin - plan.loaded.begin);
    }
  }

  // All blocks, up to the weights of the last one.
  __device__ __forceinline__ void attend_plan(const TileInfo& tile, const BlockPlan& plan) {
    skip_blocks(plan.loaded.end - plan.own.end);
    first_block(tile, plan);
    int n = plan.own.end - 2;
    if constexpr (Traits::kBounded) {
      // Blocks that the right bound cuts, full blocks, blocks that the left bound cuts.
#pragma unroll 1
      while (n >= plan.own.begin) {
#pragma unroll 1
        for (; n >= plan.own.begin && !contains(plan.full, n); --n) {
          next_block<true>(tile, plan, n);
        }
#pragma unroll 1
        for (; n >= larger(plan.own.begin, plan.full.begin); --n) {
          next_block<false>(tile, plan, n);
        }
      }
      clear_dead_values(tile, plan.own.begin);
    } else {
#pragma unroll 1
      for (; n >= plan.own.begin; --n) {
        next_block<false>(tile, plan, n);
      }
    }
  }

  // The same under a dense mask: the load warp has chosen the blocks.
  __device__ __forceinline__ void attend_dense(const TileInfo& tile) {
    int n = first_dense_block(tile);
#pragma unroll 1
    while (n >= 0) {
#pragma unroll 1
      while (n >= 0 && needs_mask) {
        n = next_dense_block<true>(tile, n);
      }
#pragma unroll 1
      while (n >= 0 && !needs_mask) {
        n = next_dense_block<false>(tile, n);
      }
    }
  }

  // -- a block ------------------------------------------------------------------------------
  // Weights of the tile's first block. Nothing overlaps with it.
  __device__ __forceinline__ void first_block(const TileInfo& tile, const BlockPlan& plan) {
    const int n = plan.own.end - 1;
    await_query();
    await_key();
    issue_scores();
    await_scores<0>(n == plan.own.begin);
    if (!contains(plan.full, n)) {
      mask_scores(tile, n);
    }
    float alpha[2];
    softmax.template update<true>(rS, alpha, args.scale_log2);
    drop_weights(value);
    sm90::to_operand<Element>(rP, rS);
    clear_dead_values(tile, n);
  }

  // Weights of block n, while P V of the previous block runs.
  template <bool kEdge>
  __device__ __forceinline__ void next_block(const TileInfo& tile, const BlockPlan& plan, int n) {
    await_key();
    issue_ping_pong();
    await_scores<1>(n == plan.own.begin);
    if constexpr (kEdge) {
      mask_scores(tile, n);
    }
    float alpha[2];
    softmax.template update<kEdge>(rS, alpha, args.scale_log2);
    drop_weights(value.next());
    await_weights();
    await_output();
    take_up_weights(alpha);
  }

  // Under a dense mask: as above. Returns the number of the next block, -1 for none. The metadata
  // has been loaded with K.
  __device__ __forceinline__ int first_dense_block(const TileInfo& tile) {
    await_query();
    await_key();
    issue_scores();
    const BlockMetadata& metadata = read_metadata(value);
    await_scores<0>(metadata.next < 0);
    mask_dense_scores(tile, metadata.block, metadata.flags >> group & 1, is_restricted(metadata));
    float alpha[2];
    softmax.template update<true>(rS, alpha, args.scale_log2);
    drop_weights(value);
    sm90::to_operand<Element>(rP, rS);
    return apply_metadata(value);
  }

  template <bool kEdge>
  __device__ __forceinline__ int next_dense_block(const TileInfo& tile, int n) {
    await_key();
    issue_ping_pong();
    const BlockMetadata& metadata = read_metadata(value.next());
    await_scores<1>(metadata.next < 0);
    if constexpr (kEdge) {
      mask_dense_scores(tile, n, true, is_restricted(metadata));
    }
    float alpha[2];
    softmax.template update<kEdge>(rS, alpha, args.scale_log2);
    drop_weights(value.next());
    await_weights();
    await_output();
    take_up_weights(alpha);
    return apply_metadata(value);
  }

  // -- products -----------------------------------------------------------------------------
  __device__ __forceinline__ void await_query() {
    shared.q_slots[query.index()][group].full.wait(query.phase());
    if (args.negate) {
      shared.q[query.index()][group].negate(threadIdx.x % kWarpgroup, kWarpgroup);
      fence_for_wgmma();
    }
  }

  __device__ __forceinline__ void await_key() {
    shared.k_slots[key.index()].full.wait(key.phase());
  }

  // Q K^T of this block and P V of the previous one, which needs no new operand.
  __device__ __forceinline__ void issue_ping_pong() {
    wait_ping_pong();
    issue_scores();
    issue_output();
    arrive_ping_pong();
  }

  // kBehind: wgmma groups that may still be pending.
  template <int kBehind>
  __device__ __forceinline__ void await_scores(bool last_of_tile) {
    ptx::wgmma_wait_group<kBehind>();
    ptx::pin(rS);
    release_key(last_of_tile);
  }

  __device__ __forceinline__ void await_output() {
    ptx::wgmma_wait_group<0>();
    ptx::pin(rO);
    ptx::pin(rP);
    release_value();
  }

  // Always passes, but depends on the sums of the weights, which are never negative: keeps the
  // compiler from moving the exponentials behind the wait for P V, which they should overlap.
  __device__ __forceinline__ void await_weights() {
    if constexpr (Traits::kPinsExponentials) {
      shared.passed.wait(softmax.l[0] + softmax.l[1] < 0.0f);
    }
  }

  // Converts the weights to an operand, and rescales O like the weights it will be added to.
  __device__ __forceinline__ void take_up_weights(const float (&alpha)[2]) {
    sm90::to_operand<Element>(rP, rS);
    if (__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) {
      sm90::scale_rows(rO, alpha);
    }
  }

  __device__ __forceinline__ void issue_scores() {
    const uint64_t q =
        sm90::descriptor_at(q_base, query.index() * Traits::kGroups * Traits::QueryTile::kBytes);
    const uint64_t k = sm90::descriptor_at(k_base, key.index() * Traits::KeyTile::kBytes);
    ptx::pin(rS);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          rS, sm90::descriptor_at(q, sm90::k_major_step(step, kMmaRows)),
          sm90::descriptor_at(k, sm90::k_major_step(step, kBlock)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void issue_output() {
    shared.v_slots[value.index()].full.wait(value.phase());
    const uint64_t v = sm90::descriptor_at(v_base, value.index() * Traits::KeyTile::kBytes);
    ptx::pin(rO);
    ptx::pin(rP);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlock / kMmaK; ++step) {
      OutputMma::template rs<Element, ptx::kMajorN>(
          rO, rP[4 * step], rP[4 * step + 1], rP[4 * step + 2], rP[4 * step + 3],
          sm90::descriptor_at(v, sm90::n_major_step(step)), 1);
    }
    ptx::wgmma_commit_group();
  }

  // -- masks and dropout --------------------------------------------------------------------
  __device__ __forceinline__ void mask_scores(const TileInfo& tile, int n) {
    const int row = tile.row + group * kMmaRows + thread.upper_row();
    mask_block<Traits::kBounded>(rS, n * kBlock, row, bounds_of(args, tile), tile.keys, thread);
  }

  // Drops weights of the block whose V will be in slot `at`, after the row sums have been computed.
  // Its column keys have been loaded with K.
  __device__ __forceinline__ void drop_weights(RingPosition<Traits::kStages> at) {
    if constexpr (Traits::kDropout) {
      drop_block(rS, shared.dropout.columns[at.passed % Traits::kMetadataSlots].data, row_key,
                 args.dropout.threshold, thread);
    }
  }

  // Keys that no query may attend have weight 0, but 0 * NaN is NaN: their rows of V are zeroed.
  // Every warpgroup does so before it reads the block; all write the same values.
  __device__ __forceinline__ void clear_dead_values(const TileInfo& tile, int n) {
    const Range live = Traits::kBounded
                           ? keys_of_some({0, tile.queries}, bounds_of(args, tile), tile.keys)
                           : Range{0, tile.keys};
    const int first_key = n * kBlock;
    const int begin = larger(live.begin - first_key, 0);
    const int end = smaller(live.end - first_key, kBlock);
    // TMA has zero-filled rows past the end of the tensor.
    const int rows = smaller(args.keys - first_key, kBlock);
    if (begin > 0 || end < rows) {
      shared.v_slots[value.index()].full.wait(value.phase());
      sm90::SharedTile<Element, kBlock, Traits::kColumns>& tile_v = shared.v[value.index()];
      tile_v.clear_rows(0, begin, threadIdx.x % kWarpgroup, kWarpgroup);
      tile_v.clear_rows(end, kBlock, threadIdx.x % kWarpgroup, kWarpgroup);
      fence_for_wgmma();
    }
  }

  __device__ __forceinline__ const BlockMetadata& read_metadata(
      RingPosition<Traits::kStages> at) const {
    return shared.dense.metadata[at.passed % Traits::kMetadataSlots];
  }

  // After the block: zeroes its dead rows of V (see clear_dead_values). Returns the next block.
  __device__ __forceinline__ int apply_metadata(RingPosition<Traits::kStages> at) {
    const BlockMetadata& metadata = read_metadata(at);
    if (metadata.flags & kHasDead) {
      shared.v_slots[at.index()].full.wait(at.phase());
      shared.v[at.index()].clear_unmarked_rows(metadata.live, threadIdx.x % kWarpgroup, kWarpgroup);
      fence_for_wgmma();
    }
    needs_mask = metadata.next_flags >> group & 1;
    return metadata.next;
  }

  __device__ __forceinline__ bool is_restricted(const BlockMetadata& metadata) const {
    return !Traits::kChoosesMasks || (metadata.flags >> (kRestrictedBit + group) & 1);
  }

  // Masks scores that are not scaled yet. With an additive mask, scores are in natural units
  // afterwards, masked or not, as BiasedSoftmax expects of edge blocks.
  __device__ __forceinline__ void mask_dense_scores(const TileInfo& tile, int n, bool masked,
                                                    bool restricted) {
    if constexpr (Traits::kBias) {
      const float scale = args.scale_log2 * kLn2;
      if (!masked) {
        sm90::scale_rows(rS, {scale, scale});
      } else if (args.mask.type == MaskType::kFloat32) {
        add_bias<float>(scale);
      } else {
        add_bias<Element>(scale);
      }
    } else if (masked) {
      const int row = tile.row + group * kMmaRows + thread.upper_row();
      const MaskLayout& layout = args.mask.layout;
      mask_bits(rS, args.mask.bits, layout, mask_head(layout, tile.batch, tile.head), row,
                args.queries, n, thread);
    }
    if (restricted) {
      mask_scores(tile, n);
    }
  }

  // S = S * scale + mask. Each slot of the ring holds as many columns as 128 bytes do.
  template <class MaskElement>
  __device__ __forceinline__ void add_bias(float scale) {
    constexpr int kColumns = sm90::kRowBytes / sizeof(MaskElement);
    const bool one_row = args.mask.layout.rows == 1;
#pragma unroll
    for (int column = 0; column < kBlock; column += kColumns) {
      Slot& slot = shared.bias.slots[group][bias.index()];
      slot.full.wait(bias.phase());
      add_bias_piece<MaskElement>(&rS[column / 2], shared.bias.pieces[group][bias.index()].bytes,
                                  one_row, scale, thread);
      __syncwarp();
      if (thread.lane == 0) {
        slot.empty.arrive();
      }
      bias.advance();
    }
  }

  // -- the end of a tile --------------------------------------------------------------------
  __device__ __forceinline__ bool is_split() const {
    return Traits::kSplits && args.splits.count > 1;
  }

  // The index of the sequence's first row among those of all heads, and of all splits.
  __device__ __forceinline__ int64_t row_number(const TileInfo& tile) const {
    const int64_t head = static_cast<int64_t>(batch_entry(args, tile)) * args.heads + tile.head;
    const int64_t row = head * args.queries + tile.origin;
    return is_split() ? tile.split * args.splits.rows + row : row;
  }

  __device__ __forceinline__ void close_rows(const TileInfo& tile, float (&factor)[2]) {
    const int row = tile.row + group * kMmaRows + thread.upper_row();
    softmax.finish(factor);
    if constexpr (Traits::kDropout) {
      factor[0] *= args.dropout.keep_scale;
      factor[1] *= args.dropout.keep_scale;
    }
    const int64_t place = row_number(tile) + row;
    const int rows = args.packing.query_offsets ? tile.queries : args.queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int below = half * sm90::kRowStep;
      if (row + below >= tile.queries) {
        softmax.clear_row(half);
      }
      if (!thread.leads_row() || row + below >= rows) {
        continue;
      }
      if (is_split()) {
        args.splits.max_sum[place + below] = {softmax.m[half] * args.scale_log2, softmax.l[half]};
      } else {
        args.lse[place + below] = softmax.lse(half, args.scale_log2);
      }
    }
  }

  __device__ __forceinline__ void write_output(const TileInfo& tile, const float (&factor)[2]) {
    const int first_row = tile.row + group * kMmaRows;
    const int row = first_row + thread.upper_row();
    sm90::scale_rows(rO, factor);
    if (first_row + kMmaRows > tile.queries) {
      // Rows that are not computed may hold NaN.
#pragma unroll
      for (int i = 0; i < Traits::kHeadDim / 2; ++i) {
        rO[i] = row + i / 2 % 2 * sm90::kRowStep < tile.queries ? rO[i] : 0.0f;
      }
    }
    const int rows = args.packing.query_offsets ? tile.queries : args.queries;
    if (is_split()) {
      float* split_out = args.splits.out + (row_number(tile) + row) * args.value_dim;
      sm90::store_global(split_out, args.value_dim, rows - row, args.value_dim, rO, thread);
      return;
    }
    if (Traits::kStagesOutput && is_staged<Traits>(args, tile, group)) {
      stage_output();
      return;
    }
    Element* out = static_cast<Element*>(args.out.data) +
                   batch_entry(args, tile) * args.out.batch_stride +
                   tile.head * args.out.head_stride + (tile.origin + row) * args.out.row_stride;
    sm90::store_global(out, args.out.row_stride, rows - row, args.value_dim, rO, thread);
  }

  __device__ __forceinline__ void stage_output() {
    if constexpr (Traits::kStagesOutput) {
      Slot& slot = shared.out_slots[group];
      slot.empty.wait(output.phase() ^ 1);
      uint32_t lane[] = {static_cast<uint32_t>(thread.lane)};
      if constexpr (Traits::kDense) {
        ptx::pin(lane);  // computes the offset here instead of keeping it in a register
      }
      sm90::store_shared<Element>(shared.out.tiles[group].address(), rO,
                                  {thread.warp, static_cast<int>(lane[0])});
      ptx::fence_proxy_async();
      __syncwarp();
      if (thread.lane == 0) {
        slot.full.arrive();
      }
      output.advance();
    }
  }

  // -- barriers -----------------------------------------------------------------------------
  __device__ __forceinline__ void wait_ping_pong() {
    if constexpr (Traits::kPingPong) {
      ptx::bar_sync(kPingPongBarrier + group, 2 * kWarpgroup);
    }
  }

  __device__ __forceinline__ void arrive_ping_pong() {
    if constexpr (Traits::kPingPong) {
      ptx::bar_arrive(kPingPongBarrier + (group + 1) % Traits::kGroups, 2 * kWarpgroup);
    }
  }

  __device__ __forceinline__ void sync_group() { ptx::bar_sync(kGroupBarrier + group, kWarpgroup); }

  __device__ __forceinline__ void fence_for_wgmma() {
    ptx::fence_proxy_async();
    sync_group();
  }

  __device__ __forceinline__ void release_key(bool last_of_tile) {
    if (leader) {
      shared.k_slots[key.index()].empty.arrive();
      if (last_of_tile) {
        shared.q_slots[query.index()][group].empty.arrive();
      }
    }
    key.advance();
  }

  __device__ __forceinline__ void release_value() {
    if (leader) {
      shared.v_slots[value.index()].empty.arrive();
    }
    value.advance();
  }

  // Releases blocks that only other warpgroups need. No wgmma synchronises the four warps here:
  // without the barrier a late warp could miss a phase of `full` and wait forever.
  __device__ __forceinline__ void skip_blocks(int count) {
    if constexpr (Traits::kSkips) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        shared.k_slots[key.index()].full.wait(key.phase());
        shared.v_slots[value.index()].full.wait(value.phase());
        sync_group();
        release_key(false);
        release_value();
      }
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
