// The trial bwd_dq_once: dQ in the result's dtype where one block of keys has all keys of a
// sequence.
#pragma once

#include "attention/sm90/backward/layout.h"
#include "attention/sm90/backward/main/bwd_part.cuh"

namespace fastattn::attention {

// The rows of dQ of a step, if they are needed and no sum. Transposed parts pass through the buffer
// of their sum; the next step writes there after all warps have waited for each other.
template <class Traits>
__device__ __forceinline__ void write_dq(const BackwardPart<Traits>& state,
                                         typename BackwardPart<Traits>::Dq& parts, Step step) {
  using Element = typename Traits::Element;
  using Part = BackwardPart<Traits>;
  constexpr int kPartBytes = Traits::kRows * sm90::kRowBytes;
  constexpr int kChunkPieces = sm90::kRowBytes / sm90::kPieceBytes;
  static_assert(Part::kDqParts * kPartBytes <= Traits::kPieceFloats * int{sizeof(float)});
  const BackwardArguments& args = state.args;
  const TensorView& view = args.dq;
  if (!view.data) {
    return;
  }
  const KeyBlock& work = state.work();
  const int first_row =
      step.row_block * Traits::kRows + (Traits::kTransposesDq ? 0 : state.group * kMmaRows);
  Element* to = static_cast<Element*>(view.data) + work.sequence.entry * view.batch_stride +
                (work.kv_head * args.heads_per_kv + step.head) * view.head_stride +
                (work.sequence.query_origin + first_row) * view.row_stride;
  const int rows = work.sequence.query_rows - first_row;
  const float factors[2] = {args.scale, args.scale};
  const uint32_t buffer = state.shared.dq[state.group].address();
  const AccumulatorThread here = state.thread_here();
#pragma unroll
  for (int part = 0; part < Part::kDqParts; ++part) {
    sm90::scale_rows(parts[part], factors);
    if constexpr (Traits::kTransposesDq) {
      uint32_t operand[Part::kDqWidth / 4];
      sm90::to_operand<Element>(operand, parts[part]);
#pragma unroll
      for (int i = 0; i < Traits::kRows / kMmaK; ++i) {
        ptx::stmatrix_x4_trans(buffer + part * kPartBytes + sm90::n_major_step(i) +
                                   scores_offset(here.warp, here.lane),
                               operand[4 * i], operand[4 * i + 1], operand[4 * i + 2],
                               operand[4 * i + 3]);
      }
    } else {
      const int row = here.upper_row();
      sm90::store_global(to + row * view.row_stride, view.row_stride, rows - row, args.head_dim,
                         parts[part], here);
    }
  }
  if constexpr (Traits::kTransposesDq) {
    constexpr int kPieces = Part::kDqParts * kChunkPieces;
    constexpr int kPieceColumns = sm90::kPieceBytes / sizeof(Element);
    const char* from = reinterpret_cast<const char*>(state.shared.dq[state.group].data);
    state.sync_group();
#pragma unroll 1
    for (int at = here.warp * kWarp + here.lane; at < smaller(rows, Traits::kRows) * kPieces;
         at += kWarpgroup) {
      const int row = at / kPieces, piece = at % kPieces;
      const int column = state.first_own_chunk() * sm90::kChunkColumns + piece * kPieceColumns;
      if (column < args.head_dim) {
        *reinterpret_cast<uint4*>(to + row * view.row_stride + column) =
            *reinterpret_cast<const uint4*>(from + piece / kChunkPieces * kPartBytes +
                                            sm90::swizzled_offset(row, piece % kChunkPieces));
      }
    }
  }
}

}  // namespace fastattn::attention
