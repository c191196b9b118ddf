// The forward's workspace, and the plan that it depends on: split-KV and the tile counter.
#pragma once

#include <algorithm>

#include "attention/attention.h"
#include "attention/key_range.h"
#include "attention/sm90/forward/short_queries.h"
#include "common/dropout.h"
#include "common/workspace_layout.h"

namespace fastattn::attention {

struct ForwardPlan {
  int splits;    // of the keys of every tile
  bool counted;  // tiles are drawn from a counter, otherwise at fixed strides
  bool ordered;  // packed sequences are sorted, longest first
};

// The fewest splits that keep nearly as many SMs busy as any number can. rows: of a tile; blocks:
// of `block` keys each. None of this is measured: combining costs a launch, about as much as an SM
// takes for 4 blocks of keys; a row's partial result is written and read again in the time that 8
// keys take.
inline int num_splits(int64_t tiles, int rows, int blocks, int block, int num_sms) {
  constexpr double kFewTiles = 0.8;  // of the SMs: more than a fifth would have no work
  constexpr int kMinBlocks = 8;      // fewest blocks of keys to split
  constexpr int kMinSplitBlocks = 2, kSplitKeysPerRow = 8;  // fewest of a split
  constexpr double kEnough = 0.85;                          // of the best share of busy SMs
  const int most = std::min(
      kMaxSplits, blocks / std::max(kMinSplitBlocks, ceil_div(kSplitKeysPerRow * rows, block)));
  if (tiles == 0 || tiles >= kFewTiles * num_sms || blocks < kMinBlocks || most < 2) {
    return 1;
  }
  const auto busy = [&](int splits) {
    const int64_t count = tiles * splits, waves = (count + num_sms - 1) / num_sms;
    return static_cast<double>(count) / static_cast<double>(num_sms * waves);
  };
  double best = 0.0;
  for (int splits = 1; splits <= most; ++splits) {
    best = std::max(best, busy(splits));
  }
  int splits = 1;
  while (busy(splits) < kEnough * best) {
    ++splits;
  }
  return splits;
}

// Keys of which some query attends one: of the longest packed sequence.
inline int keys_reached(const ForwardProblem& p) {
  const Range reach = p.packing.query_offsets ? Range{0, p.packing.max_keys}
                                              : keys_of_some({0, p.queries}, p.bounds, p.keys);
  return larger(reach.end - reach.begin, 0);
}

// After cut_keys_of_one_query and merge_groups.
inline ForwardPlan plan_forward(const ForwardProblem& p, Variant variant, int num_sms) {
  // Up to this head dim a counter is used for equal tiles too, where an SM computes many blocks of
  // keys: with another kernel on an H200 it was 5 % faster than fixed strides at head dim 64.
  // Zeroing the counter takes a launch of two or three microseconds, a block of keys takes one or
  // two (estimates). No kernel can leave it at zero for the next call: workspace is allocated per
  // call, and launches on two streams, or a replayed graph beside others, would share a counter per
  // device.
  constexpr int kCountedHeadDim = 64, kCountedBlocks = 32;
  // Sequences are sorted where the last tiles may be long ones that the others wait for: a block of
  // keys takes a microsecond or two, the sorting launch two or three (estimates).
  constexpr int kOrderKeys = 1024;
  if (p.dropout.seed || is_dense(variant)) {
    return {1, true, false};
  }
  const Packing& packing = p.packing;
  const bool packed = packing.query_offsets;
  const int dim = larger(p.head_dim, p.value_dim);
  const int rows = forward_tile_rows(dim, variant), block = forward_block(dim, variant);
  const int keys = keys_reached(p);
  // Each sequence may end in a partial tile.
  const int64_t row_tiles =
      packed
          ? std::min<int64_t>(ceil_div(p.queries, rows) + packing.sequences,
                              int64_t{1} * ceil_div(packing.max_queries, rows) * packing.sequences)
          : ceil_div(p.queries, rows);
  const int64_t tiles = row_tiles * p.batch * p.heads;
  const int longest = packed ? packing.max_queries : p.queries;
  int splits = num_splits(tiles, smaller(longest, rows), ceil_div(keys, block), block, num_sms);
#ifdef FASTATTN_TRIAL_FWD_SPLITS
  // Where lengths differ, the longest sequences are split although there are enough tiles, unless
  // the splits would take more than kMaxBytes of workspace.
  constexpr int kSplitKeys = 4096, kDecodingQueries = 64;
  constexpr int64_t kMaxBytes = int64_t{64} << 20;
  if ((packed || p.key_lengths.data) && longest <= kDecodingQueries) {
    const int64_t row_bytes = p.value_dim * sizeof(float) + sizeof(RowMaxSum);
    const int64_t split_bytes = row_bytes * p.batch * p.heads * p.queries;
    const int64_t most = kMaxBytes / std::max(split_bytes, int64_t{1});
    splits = std::max<int64_t>(splits, std::min<int64_t>({kMaxSplits, keys / kSplitKeys, most}));
  }
#endif
  const bool waits = tiles * splits > num_sms;  // some tiles start after others have ended
  if (packed) {
    // A left window makes tiles equal.
    const bool unequal = p.bounds.left >= p.queries + p.keys && keys >= kOrderKeys;
    return {splits, true, waits && unequal && packing.sequences > 1};
  }
  const bool unequal = bounds_restrict(p) || p.has_lengths();
  const int64_t sm_blocks = tiles * ceil_div(keys, block) / num_sms;
  const bool many = dim <= kCountedHeadDim && sm_blocks >= kCountedBlocks;
  return {splits, waits && (splits > 1 || unequal || many), false};
}

inline void lay_out(ForwardProblem& p, Variant variant, const ForwardPlan& plan,
                    WorkspaceLayout& workspace) {
  const int dim = larger(p.head_dim, p.value_dim), block = forward_block(dim, variant);
  p.counter = plan.counted ? workspace.take<int>(1) : nullptr;
  p.packing.order = plan.ordered ? workspace.take<int>(p.packing.sequences) : nullptr;
  if (p.dropout.seed) {
    const int keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
    const int columns = ceil_div(keys, block) * block;
    p.dropout.column_keys = workspace.take<uint32_t>(dropout::units(columns));
  }
  if (is_dense(variant)) {
    DenseMask& mask = p.mask;
    mask.layout = mask_layout(mask.batch_stride ? p.batch : 1, mask.head_stride ? p.heads : 1,
                              mask.row_stride ? p.queries : 1, p.batch, p.has_lengths(), p.queries,
                              p.keys, forward_tile_rows(dim, variant), block);
    mask.bits = workspace.take<uint32_t>(bit_words(mask.layout));
    mask.plain = workspace.take<int>(plain_count(mask.layout));
    mask.classes = workspace.take<BlockClass>(class_count(mask.layout));
    const MaskType own = p.dtype == DType::kBFloat16 ? MaskType::kBFloat16 : MaskType::kFloat16;
    const bool readable = mask.type == own || mask.type == MaskType::kFloat32;
    const bool copies =
        mask.type != MaskType::kBool && !(readable && readable_by_tma(mask, p.keys));
    if (copies) {
      mask.copy_type = mask.type == own ? own : MaskType::kFloat32;
      const int64_t bytes = mask.copy_type == MaskType::kFloat32 ? 4 : 2;
      mask.copy = workspace.take<char>(bytes * copied_elements(mask.layout, p.queries, p.keys));
    }
  }
  if (plan.splits > 1) {
    const int64_t rows = int64_t{1} * p.batch * p.heads * p.queries;
    p.splits.count = plan.splits;
    p.splits.rows = rows;
    p.splits.out = workspace.take<float>(plan.splits * rows * p.value_dim);
    p.splits.max_sum = workspace.take<RowMaxSum>(plan.splits * rows);
#ifdef FASTATTN_TRIAL_FWD_SPLITS
    // Windows may begin inside a block.
    p.splits.blocks = ceil_div(ceil_div(keys_reached(p), block) + 1, plan.splits);
#endif
  }
}

}  // namespace fastattn::attention
