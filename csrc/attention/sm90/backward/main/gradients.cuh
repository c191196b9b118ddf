// Stores of a consumer warpgroup of the backward: its part of dQ in every step, dK and dV at the
// end.
#pragma once

#include "attention/sm90/backward/main/bwd_part.cuh"

namespace fastattn::attention {

// Stores a piece of dQ to shared memory, from where a dQ warp adds it to the sum. Each thread
// stores four floats at a time, side by side: no bank conflicts.
template <int kPiece, class Traits>
__device__ __forceinline__ void stage_dq(const BackwardPart<Traits>& state,
                                         const typename BackwardPart<Traits>::Dq& parts) {
  using Part = BackwardPart<Traits>;
  constexpr int kPartFours = Part::kDqWidth / 8;
  constexpr int kFours = Part::kDqParts * kPartFours / Traits::kDqPieces;
  Slot& slot = state.shared.dq_slots[state.group];
  const RingPosition<1> position = {state.stage.passed * Traits::kDqPieces + kPiece};
  slot.empty.wait(position.phase() ^ 1);
  float4* to =
      reinterpret_cast<float4*>(state.shared.dq[state.group].data) + threadIdx.x % kWarpgroup;
#pragma unroll
  for (int i = 0; i < kFours; ++i) {
    const int four = kPiece * kFours + i;
    const float* from = parts[four / kPartFours] + 4 * (four % kPartFours);
    to[i * kWarpgroup] = {from[0], from[1], from[2], from[3]};
  }
  ptx::fence_proxy_async();
  __syncwarp();
  if (state.thread.lane == 0) {
    slot.full.arrive();
  }
}

// dK or dV, if it is needed.
template <class Traits>
__device__ __forceinline__ void write_gradient(const BackwardPart<Traits>& state,
                                               const TensorView& view, int columns,
                                               const typename BackwardPart<Traits>::Gradient& acc) {
  using Element = typename Traits::Element;
  if (!view.data) {
    return;
  }
  const KeyBlock& work = state.work();
  const Sequence& sequence = work.sequence;
  const int key = work.first_key + state.first_own_key() + state.thread.upper_row();
  const int column = Traits::kSplitsKeys ? 0 : state.group * BackwardPart<Traits>::kOwnColumns;
  Element* to = static_cast<Element*>(view.data) + sequence.entry * view.batch_stride +
                work.kv_head * view.head_stride + (sequence.key_origin + key) * view.row_stride +
                column;
  sm90::store_global(to, view.row_stride, sequence.key_rows - key, columns - column, acc,
                     state.thread);
}

}  // namespace fastattn::attention
