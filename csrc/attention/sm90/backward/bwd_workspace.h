// The backward's workspace.
#pragma once

#include <algorithm>

#include "attention/attention.h"
#include "attention/sm90/packed_blocks.h"
#include "common/workspace_layout.h"

namespace fastattn::attention {

// Blocks of a head's rows or keys, of packed sequences together.
inline int blocks_of(const Packing& packing, int rows, int size) {
  return packing.query_offsets ? packed_blocks(rows, packing.sequences, size)
                               : ceil_div(rows, size);
}

// Splits of the sum of a tile of a mask's gradient, so that about two thread blocks per SM share
// the pairs of blocks that it stands for.
inline int dmask_splits(const BackwardProblem& p, int num_sms) {
  constexpr int64_t kMaxDmaskSplits = 64;
  const int whole[] = {p.batch, p.heads, ceil_div(p.queries, kDmaskRows),
                       ceil_div(p.keys, kDmaskKeys)};
  int64_t tiles = 1, pairs = 1;
  for (int i = 0; i < 4; ++i) {
    tiles *= p.dmask.sizes[i] == 1 ? 1 : whole[i];
    pairs *= whole[i];
  }
  const int64_t most = std::min(kMaxDmaskSplits, 2 * num_sms / tiles);
  return static_cast<int>(std::max<int64_t>(1, std::min(most, pairs / tiles)));
}

// in_order: thread blocks add to dq in the order of their keys.
inline void lay_out(BackwardProblem& p, bool in_order, int num_sms, WorkspaceLayout& workspace) {
  constexpr int kChunkColumns = 64, kMaxGroups = 3;
  const int dim = larger(p.head_dim, p.value_dim);
  const int block_rows = backward_rows(dim, p.modifications.any() || has_short_blocks(p));
  const int64_t blocks =
      int64_t{1} * p.batch * p.heads * blocks_of(p.packing, p.queries, block_rows);
  const int64_t rows = blocks * block_rows;
  p.lse2 = workspace.take<float>(rows);
  p.delta = workspace.take<float>(rows);
  p.row_keys = p.dropout.seed ? workspace.take<uint32_t>(rows / 2) : nullptr;
  p.dq_sum = has_one_key_block(p)
                 ? nullptr
                 : workspace.take<float>(rows * ceil_div(dim, kChunkColumns) * kChunkColumns);
  p.dq_semaphores = workspace.take<int>(blocks * kMaxGroups);
  p.in_order = in_order;
  p.counter = workspace.take<int>(1);
  p.sink_terms = p.dsinks ? workspace.take<float>(rows) : nullptr;
  if (p.mask.data) {
    DenseMask& mask = p.mask;
    // Bits, classes and tiles are those of the transposed mask, whose rows are keys: the backward
    // loops over rows.
    mask.layout = mask_layout(mask.batch_stride ? p.batch : 1, mask.head_stride ? p.heads : 1,
                              mask.column_stride ? p.keys : 1, p.batch, p.has_lengths(), p.keys,
                              p.queries, backward_keys(dim), block_rows);
    mask.bits = workspace.take<uint32_t>(bit_words(mask.layout));
    mask.plain = workspace.take<int>(plain_count(mask.layout));
    mask.classes = workspace.take<BlockClass>(class_count(mask.layout));
  }
  if (p.ddistance.data) {
    p.ddistance.partial =
        workspace.take<float>(p.ddistance.rows * p.ddistance.bands * kBandEntries);
  }
  if (p.dmask.data) {
    const int* sizes = p.dmask.sizes;
    p.dmask.splits = dmask_splits(p, num_sms);
    if (p.dmask.splits > 1) {
      p.dmask.partial = workspace.take<float>(int64_t{1} * p.dmask.splits * sizes[0] * sizes[1] *
                                              sizes[2] * sizes[3]);
    }
  }
}

}  // namespace fastattn::attention
