// The launches before and after the main kernel of the Hopper attention backward: lse and delta of
// the rows, then the conversion of the dQ sums. See attention_bwd_sm90.cuh.
#pragma once

#include "attention/sm90/backward/bwd_config.cuh"
#include "attention/sm90/backward/bwd_tiles.cuh"
#include "attention/sm90/backward/layout.h"
#include "attention/sm90/masks/mask.cuh"
#include "common/dropout.h"
#include "sm90/ptx/grid.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

// 16 bytes of a row: one memory access.
template <class Element>
struct alignas(sm90::kPieceBytes) Piece {
  static constexpr int kColumns = sm90::kPieceBytes / sizeof(Element);
  Element data[kColumns];
};

// -- rows of dQ ---------------------------------------------------------------------------------
constexpr int kPrepareThreads = 256, kFinishThreads = kPrepareThreads;

// Rows of dQ, padded by one piece so that adjacent rows start at different banks.
template <class Traits>
using RowStage =
    typename Traits::Element[Traits::kRows]
                            [Traits::kColumns + Piece<typename Traits::Element>::kColumns];

// Whether some block of keys has added to a block of rows.
template <class Traits>
__device__ __forceinline__ bool is_added_to(const BackwardArguments& args, const RowBlock& block) {
  const Sequence& sequence = block.sequence;
  if constexpr (Traits::kDense) {
    const MaskLayout& layout = args.mask.layout;
    const int64_t of_class = class_head(layout, sequence.number, block.head);
    const BlockClass& last =
        args.mask.classes[classes_at(layout, of_class, layout.row_tiles - 1) + block.row_block];
    return last.rank > 0 || last.flags & kHasWork;
  }
  return !is_empty(visitors(block.row_block, Traits::kRows, sequence.bounds, sequence.queries,
                            sequence.keys, Traits::kKeys));
}

// Whether a block of rows is zeroed before blocks of keys write the others.
template <class Traits>
__device__ __forceinline__ bool is_cleared(const BackwardArguments& args, const RowBlock& rows) {
  return !sums_dq(args) && args.dq.data && !is_added_to<Traits>(args, rows);
}

// All threads: writes a block of rows of dQ from first_row on, zeros if it has no sum.
template <class Traits>
__device__ __forceinline__ void write_rows(const BackwardArguments& args, const RowBlock& block,
                                           int first_row, bool has_sum,
                                           const RowStage<Traits>* rows) {
  using Element = typename Traits::Element;
  constexpr int kPieceColumns = Piece<Element>::kColumns;
  constexpr int kRowPieces = Traits::kColumns / kPieceColumns;
  const Sequence& sequence = block.sequence;
  const int count = smaller(sequence.query_rows - first_row, Traits::kRows);
  Element* dq = static_cast<Element*>(args.dq.data) + sequence.entry * args.dq.batch_stride +
                block.head * args.dq.head_stride +
                (sequence.query_origin + first_row) * args.dq.row_stride;
  for (int at = threadIdx.x; at < count * kRowPieces; at += kPrepareThreads) {
    const int row = at / kRowPieces;
    const int column = at % kRowPieces * kPieceColumns;
    if (column < args.head_dim) {
      const auto* from = reinterpret_cast<const Piece<Element>*>(&(*rows)[row][column]);
      auto* to = reinterpret_cast<Piece<Element>*>(dq + row * args.dq.row_stride + column);
      *to = has_sum ? *from : Piece<Element>{};
    }
  }
}

// -- prepare -------------------------------------------------------------------------------------
// Term that a row adds to the gradient of its head's sink, of weight 2^(sink - lse): the lse of a
// row without keys is the sink, and -inf if the row is not computed.
__device__ __forceinline__ float sink_term(float sink, float lse, float delta) {
  return lse == kMinusInfinity ? 0.0f : -ptx::ex2((sink - lse) * kLog2e) * delta;
}

// A thread block computes lse and delta of one block of rows. A dead row, or one past the end, gets
// lse +inf, which makes its weights 0, and delta 0.
template <class Traits>
__global__ void __launch_bounds__(kPrepareThreads)
    attention_bwd_prepare_kernel(const __grid_constant__ BackwardArguments args) {
  using Element = typename Traits::Element;
  constexpr int kPieceColumns = Piece<Element>::kColumns;
  // Powers of 2.
  constexpr int kRowThreads = Traits::kColumns <= 128 ? Traits::kColumns / kPieceColumns : kWarp;
  constexpr int kRowsAtOnce = kPrepareThreads / kRowThreads;
  constexpr bool kNatural = Traits::kBias && !Traits::kScores;
  const RowBlock block = row_block_of(args, blockIdx.x, Traits::kRows);
  const Sequence& sequence = block.sequence;
  const int first_row = block.row_block * Traits::kRows;
  const int64_t head = static_cast<int64_t>(sequence.entry) * args.heads + block.head;
  const Range live = rows_of_some({0, sequence.keys}, sequence.bounds, sequence.queries);
  const int column = threadIdx.x % kRowThreads * kPieceColumns;
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < Traits::kGroups) {
    args.dq_semaphores[static_cast<int64_t>(blockIdx.x) * Traits::kGroups + threadIdx.x] = 0;
  }

  const auto piece = [&](const TensorView& x, int row) {
    const Element* first = static_cast<const Element*>(x.data) + sequence.entry * x.batch_stride +
                           block.head * x.head_stride +
                           (sequence.query_origin + row) * x.row_stride;
    return *reinterpret_cast<const Piece<Element>*>(first + column);
  };
#pragma unroll 1
  for (int i = threadIdx.x / kRowThreads; i < Traits::kRows; i += kRowsAtOnce) {
    const int row = first_row + i;
    const int64_t at = head * args.queries + sequence.query_origin + row;
    const float sink = args.sinks ? args.sinks[block.head] : kMinusInfinity;
    float lse = contains(live, row) ? args.lse[at] : kMinusInfinity;
    lse = lse <= sink ? kMinusInfinity : lse;
    float sum = 0.0f;
    if (lse != kMinusInfinity && column < args.value_dim) {
      const Piece<Element> out = piece(args.out, row), dout = piece(args.dout, row);
#pragma unroll
      for (int j = 0; j < kPieceColumns; ++j) {
        sum = fmaf(static_cast<float>(out.data[j]), static_cast<float>(dout.data[j]), sum);
      }
    }
    for (int lanes = kRowThreads / 2; lanes > 0; lanes /= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (column == 0) {
      const int64_t to = static_cast<int64_t>(blockIdx.x) * Traits::kRows + i;
      const bool dead = lse == kMinusInfinity;
      args.lse2[to] = dead ? -kMinusInfinity : kNatural ? lse : lse * kLog2e;
      args.delta[to] = dead || !args.dlse ? sum : sum - args.dlse[at];
      if (args.sink_terms) {
        const bool exists = row < sequence.query_rows;
        args.sink_terms[to] =
            exists ? sink_term(sink, args.lse[at], args.dlse ? sum - args.dlse[at] : sum) : 0.0f;
      }
    }
  }
  if (args.dropout.seed) {
    constexpr int kUnits = dropout::units(Traits::kRows);
    const uint32_t stream =
        dropout::stream_key(dropout::kRowTag, *args.dropout.seed, args.dropout.stream);
    const dropout::Origin origin = origin_of(args.dropout);
    const uint32_t state =
        dropout::absorb(dropout::absorb(stream, origin.b + sequence.number), origin.h + block.head);
    for (int i = threadIdx.x; i < kUnits; i += kPrepareThreads) {
      args.row_keys[static_cast<int64_t>(blockIdx.x) * kUnits + i] =
          dropout::absorb(state, origin.row_unit + dropout::units(first_row) + i);
    }
  }
  if (is_cleared<Traits>(args, block)) {
    write_rows<Traits>(args, block, first_row, false, nullptr);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *args.counter = 0;
  }
}

// -- sinks ---------------------------------------------------------------------------------------
constexpr int kSumSinksThreads = 256;

struct SinkSumArguments {
  const float* terms;  // [batch, heads, rows]
  float* dsinks;       // [heads]
  int batch;
  int64_t rows;
};

// A thread block: the gradient of a head's sink, summed in the same order in every run.
template <class Traits>
__global__ void __launch_bounds__(kSumSinksThreads)
    sum_sink_terms_kernel(const __grid_constant__ SinkSumArguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  float* sums = reinterpret_cast<float*>(shared_memory);
  float sum = 0.0f;
  for (int64_t batch = 0; batch < args.batch; ++batch) {
    const float* terms = args.terms + (batch * gridDim.x + blockIdx.x) * args.rows;
    for (int64_t row = threadIdx.x; row < args.rows; row += kSumSinksThreads) {
      sum += terms[row];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int threads = kSumSinksThreads / 2; threads > 0; threads /= 2) {
    if (static_cast<int>(threadIdx.x) < threads) {
      sums[threadIdx.x] += sums[threadIdx.x + threads];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    args.dsinks[blockIdx.x] = sums[0];
  }
}

// -- finish --------------------------------------------------------------------------------------
// A thread block converts one block of rows of dQ from the consumers' register order to rows.
template <class Traits>
__global__ void __launch_bounds__(kFinishThreads)
    attention_bwd_finish_kernel(const __grid_constant__ BackwardArguments args) {
  using Element = typename Traits::Element;
  constexpr int kPieceColumns = Piece<Element>::kColumns;
  constexpr int kRowPieces = Traits::kColumns / kPieceColumns;
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& rows = *reinterpret_cast<RowStage<Traits>*>(shared_memory);
  static_assert(sizeof(rows) <= 48 * 1024, "more than the default limit of shared memory");

  const RowBlock block = row_block_of(args, blockIdx.x, Traits::kRows);
  const int first_row = block.row_block * Traits::kRows;
  ptx::griddepcontrol_wait();
  const bool has_sum = is_added_to<Traits>(args, block);

  if (has_sum) {
    constexpr int kFours = Traits::kChunkFloats / 4;
    constexpr int kPartFloats =
        kMmaRows * (Traits::kTransposesDq ? Traits::kRows : Traits::kColumns);
    const float4* sum = reinterpret_cast<const float4*>(args.dq_sum) +
                        int64_t{Traits::kGroups * kFours} * blockIdx.x;
    for (int at = threadIdx.x; at < Traits::kGroups * kFours; at += kFinishThreads) {
      const float4 four = sum[at];
      const float values[] = {four.x, four.y, four.z, four.w};
      // The parts of all warpgroups follow each other, in rows or in columns of dQ.
      const int part = 4 * at / kPartFloats;
      const SumElement first = sum_element(4 * at - part * kPartFloats);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int along = part * kMmaRows + first.row + i / 2 * sm90::kRowStep;
        const int across = first.column + i % 2;
        Element& to = Traits::kTransposesDq ? rows[across][along] : rows[along][across];
        to = static_cast<Element>(values[i] * args.scale);
      }
    }
  }
  __syncthreads();

  write_rows<Traits>(args, block, first_row, has_sum, &rows);
}

}  // namespace fastattn::attention
