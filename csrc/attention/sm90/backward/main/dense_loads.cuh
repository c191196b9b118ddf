// Loads of the load warp under a dense mask: metadata of a step, and an additive mask.
#pragma once

#include "attention/sm90/backward/main/bwd_storage.cuh"
#include "attention/sm90/masks/dense_mask.cuh"
#include "sm90/ptx/tma.cuh"

namespace fastattn::attention {

// One thread, when the slot of Q is empty. last: of the block of keys.
template <class Traits>
__device__ __forceinline__ void write_metadata(BackwardStorage<Traits>& shared,
                                               const BackwardArguments& args, const KeyBlock& work,
                                               RingPosition<Traits::kStages> stage, Step step,
                                               bool last) {
  const BlockClass& now = classes_of<Traits>(args, work, step.head)[step.row_block];
  shared.dense.metadata[stage.index()] = {
      step, last, now.flags, {now.live[0], now.live[1], now.live[2], now.live[3]}};
}

// One thread: loads an additive mask for the groups of keys whose scores it changes.
template <class Traits>
__device__ __forceinline__ void load_bias(BackwardStorage<Traits>& shared,
                                          const BackwardArguments& args, const KeyBlock& work,
                                          RingPosition<Traits::kStages> stage) {
  constexpr int kKeyGroups = Traits::kKeys / kMaskRows;
  const StepMetadata& metadata = shared.dense.metadata[stage.index()];
  const MaskLayout& layout = args.mask.layout;
  const int halves = is_wide(args.mask) ? 2 : 1;
  const bool one_row = has_one_row(args.mask);
  if (Traits::kSplitsKeys && halves == 2) {
    const RingPosition<1> step = {stage.passed};
    shared.bias.scores_read.wait(step.phase() ^ 1);  // of the step before
  }
  // Heads that share a mask are computed at about the same time.
  const uint64_t policy = layout.heads > 1 ? ptx::kEvictFirst : ptx::kEvictLast;
  Barrier& full = shared.bias.full[stage.index()];
  const int row = one_row ? 0 : metadata.step.row_block * Traits::kRows;
  const int head = layout.heads > 1 ? work.kv_head * args.heads_per_kv + metadata.step.head : 0;
  const int batch = layout.batches > 1 ? work.sequence.number : 0;
  const int bytes = (one_row ? 1 : Traits::kRows) * sm90::kRowBytes * halves;
  int changed = 0;
#pragma unroll
  for (int group = 0; group < kKeyGroups; ++group) {
    changed += metadata.flags >> group & 1;
  }
  full.arrive_expect_bytes(changed * bytes);
#pragma unroll 1
  for (int i = 0; i < kKeyGroups * halves; ++i) {
    const int group = i / halves, half = i - group * halves;
    if (metadata.flags >> group & 1) {
      const int column = work.first_key * halves + i * sm90::kChunkColumns;
      ptx::cp_async_bulk_tensor_load(
          ptx::shared_address(shared.bias_place(stage.index(), group, half)), &args.bias_map,
          full.address(), column, row, head, batch, policy);
    }
  }
}

}  // namespace fastattn::attention
