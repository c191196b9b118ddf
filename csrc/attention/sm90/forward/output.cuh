// The end of a tile: lse and the output, or those of a split.
#pragma once

#include "attention/sm90/forward/fwd_part.cuh"
#include "attention/sm90/forward/sinks.cuh"

namespace fastattn::attention {

template <class Traits>
__device__ __forceinline__ bool is_split(const ForwardPart<Traits>& state) {
  return Traits::kSplits && state.args.splits.count > 1;
}

// The index of the sequence's first row among those of all heads, and of all splits.
template <class Traits>
__device__ __forceinline__ int64_t row_number(const ForwardPart<Traits>& state,
                                              const TileInfo& tile) {
  const ForwardArguments& args = state.args;
  const int64_t head = static_cast<int64_t>(batch_entry(args, tile)) * args.heads + tile.head;
  const int64_t row = head * args.queries + tile.origin;
  return is_split(state) ? tile.split * args.splits.rows + row : row;
}

// lse of the rows from `row` on, with sinks, which also change `factor`. Not for splits:
// combine_splits.cuh adds the sinks to these.
template <class Traits>
__device__ __forceinline__ void add_sinks(const ForwardPart<Traits>& state,
                                          const typename Traits::Softmax& softmax,
                                          const TileInfo& tile, int row, float (&lse)[2],
                                          float (&factor)[2]) {
  const ForwardArguments& args = state.args;
  // The load warp sets tile.queries to 0 where a dense mask leaves no key to any row.
  const int queries =
      Traits::kDense ? computed_queries(args, tile.batch, args.queries) : tile.queries;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + half * sm90::kRowStep;
    lse[half] = at < tile.queries ? softmax.lse(half, scale_log2<Traits>(args)) : kMinusInfinity;
    if (args.sinks.data && at < queries) {
      const float sink = sink_of(args.sinks, tile.head, args.queries, tile.origin + at);
      lse[half] = add_sink(lse[half], sink, factor[half]);
    }
  }
}

// Writes lse, or the maximum and the sum of a split. `factor` normalises the output's two rows.
template <class Traits>
__device__ __forceinline__ void close_rows(const ForwardPart<Traits>& state,
                                           typename Traits::Softmax& softmax, const TileInfo& tile,
                                           float (&factor)[2]) {
  const ForwardArguments& args = state.args;
  const int row = state.upper_row(tile);
  softmax.finish(factor);
  if constexpr (Traits::kDropout) {
    factor[0] *= args.dropout.keep_scale;
    factor[1] *= args.dropout.keep_scale;
  }
  const int64_t place = row_number(state, tile) + row;
  const int rows = args.packing.query_offsets ? tile.queries : args.queries;
  float lse[2];
  if (Traits::kSinks && !is_split(state)) {
    add_sinks(state, softmax, tile, row, lse, factor);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int below = half * sm90::kRowStep;
    if (row + below >= tile.queries) {
      softmax.clear_row(half);
    }
    if (!state.thread.leads_row() || row + below >= rows) {
      continue;
    }
    if (is_split(state)) {
      args.splits.max_sum[place + below] = {softmax.m[half] * scale_log2<Traits>(args),
                                            softmax.l[half]};
    } else {
      args.lse[place + below] =
          Traits::kSinks ? lse[half] : softmax.lse(half, scale_log2<Traits>(args));
    }
  }
}

// Into shared memory, from where a store warp writes it.
template <class Traits>
__device__ __forceinline__ void stage_output(ForwardPart<Traits>& state,
                                             const float (&o)[Traits::kHeadDim / 2]) {
  if constexpr (Traits::kStagesOutput) {
    Slot& slot = state.shared.out_slots[state.group];
    slot.empty.wait(state.output.phase() ^ 1);
    uint32_t lane[] = {static_cast<uint32_t>(state.thread.lane)};
    if constexpr (Traits::kDense) {
      ptx::pin(lane);  // computes the offset here instead of keeping it in a register
    }
    sm90::store_shared<typename Traits::Element>(state.shared.out.tiles[state.group].address(), o,
                                                 {state.thread.warp, static_cast<int>(lane[0])});
    ptx::fence_proxy_async();
    __syncwarp();
    if (state.thread.lane == 0) {
      slot.full.arrive();
    }
    state.output.advance();
  }
}

template <class Traits>
__device__ __forceinline__ void write_output(ForwardPart<Traits>& state,
                                             float (&o)[Traits::kHeadDim / 2], const TileInfo& tile,
                                             const float (&factor)[2]) {
  using Element = typename Traits::Element;
  const ForwardArguments& args = state.args;
  const int row = state.upper_row(tile);
  sm90::scale_rows(o, factor);
  if (state.first_row(tile) + kMmaRows > tile.queries) {
    // Rows that are not computed may hold NaN.
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) {
      o[i] = row + i / 2 % 2 * sm90::kRowStep < tile.queries ? o[i] : 0.0f;
    }
  }
  const int rows = args.packing.query_offsets ? tile.queries : args.queries;
  if (is_split(state)) {
    float* split_out = args.splits.out + (row_number(state, tile) + row) * args.value_dim;
    sm90::store_global(split_out, args.value_dim, rows - row, args.value_dim, o,
                       state.thread_here());
    return;
  }
  if (Traits::kStagesOutput && is_staged<Traits>(args, tile, state.group)) {
    stage_output(state, o);
    return;
  }
  Element* out = static_cast<Element*>(args.out.data) +
                 batch_entry(args, tile) * args.out.batch_stride +
                 tile.head * args.out.head_stride + (tile.origin + row) * args.out.row_stride;
  sm90::store_global(out, args.out.row_stride, rows - row, args.value_dim, o, state.thread_here());
}

}  // namespace fastattn::attention
