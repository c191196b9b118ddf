// The gradient of y after dropout, and sums of columns: first of 128 rows at a time, then of these
// sums, each in one order.
#pragma once

#include "ffn/sm90/piece.cuh"
#include "sm90/tile/launch.cuh"

namespace fastattn::ffn {

constexpr int kSumThreads = 256;
// Threads that share columns: each has every eighth row.
constexpr int kRowThreads = 8;
constexpr int kColumnThreads = kSumThreads / kRowThreads;

// -- the gradient of y ----------------------------------------------------------------------------
struct DropStorage {
  float sums[kRowThreads][kColumnThreads * kPieceColumns];
};

// A thread block has kTileRows rows and a piece of columns for each of 32 threads.
template <class From, class Element>
__global__ void __launch_bounds__(kSumThreads)
    drop_gradient_kernel(const __grid_constant__ DropGradient args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<DropStorage*>(shared_memory);
  constexpr int kColumns = kColumnThreads * kPieceColumns;
  const int column_blocks = (args.columns + kColumns - 1) / kColumns;
  const int row_block = blockIdx.x / column_blocks;
  const int first_column = static_cast<int>(blockIdx.x) % column_blocks * kColumns;
  const int thread = threadIdx.x % kColumnThreads, row_thread = threadIdx.x / kColumnThreads;
  const int column = first_column + thread * kPieceColumns;
  const PieceDropout dropout(args.dropout);
  const uint32_t row_state = dropout.row_state();
  const PieceDropout::ColumnKeys columns = dropout.column_keys(column);

  float sums[kPieceColumns] = {};
#pragma unroll 4
  for (int i = row_thread; i < kTileRows; i += kRowThreads) {
    const int row = row_block * kTileRows + i;
    if (row >= args.rows || column >= args.columns) {
      continue;
    }
    const int64_t at = static_cast<int64_t>(row) * args.columns + column;
    const auto dy = *reinterpret_cast<const Piece<From>*>(static_cast<const From*>(args.dy) + at);
    float v[kPieceColumns];
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      v[j] = static_cast<float>(dy.data[j]);
    }
    dropout.apply(v, dropout.words(dropout::flat_row_key(row_state, row), columns));
    if (args.dropped) {
      store_piece<Element>(args.dropped, at, v);
    }
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      sums[j] += v[j];
    }
  }
  if (!args.sums) {
    return;
  }
  store_piece<float>(shared.sums[row_thread], thread * kPieceColumns, sums);
  __syncthreads();
  if (first_column + static_cast<int>(threadIdx.x) < args.columns) {
    float sum = 0.0f;
    for (int i = 0; i < kRowThreads; ++i) {
      sum += shared.sums[i][threadIdx.x];
    }
    args.sums[static_cast<int64_t>(row_block) * args.columns + first_column + threadIdx.x] = sum;
  }
}

template <class From, class Element>
const char* launch_drop_gradient(const DropGradient& problem, cuda::Stream stream) {
  constexpr int kColumns = kColumnThreads * kPieceColumns;
  const int blocks = row_tiles(problem.rows) * ((problem.columns + kColumns - 1) / kColumns);
  const cudaError_t error = sm90::launch(drop_gradient_kernel<From, Element>, blocks, kSumThreads,
                                         sizeof(DropStorage), stream, problem, false);
  return error ? cudaGetErrorString(error) : nullptr;
}

template <DType kType>
const char* drop_gradient_of(const DropGradient& problem, cuda::Stream stream) {
  using Element = typename TypeOf<kType>::Element;
  return problem.dy_is_float ? launch_drop_gradient<float, Element>(problem, stream)
                             : launch_drop_gradient<Element, Element>(problem, stream);
}

// -- sums of sums ---------------------------------------------------------------------------------
struct SumStorage {
  float sums[kRowThreads][kColumnThreads];
};

// A thread block has 32 columns.
template <class Element>
__global__ void __launch_bounds__(kSumThreads)
    sum_columns_kernel(const __grid_constant__ SumColumns args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  auto& shared = *reinterpret_cast<SumStorage*>(shared_memory);
  const int thread = threadIdx.x % kColumnThreads, row_thread = threadIdx.x / kColumnThreads;
  const int column = blockIdx.x * kColumnThreads + thread;
  float sum = 0.0f;
  if (column < args.columns) {
    for (int i = row_thread; i < args.rows; i += kRowThreads) {
      sum += args.sums[static_cast<int64_t>(i) * args.columns + column];
    }
  }
  shared.sums[row_thread][thread] = sum;
  __syncthreads();
  if (row_thread == 0 && column < args.columns) {
    float total = 0.0f;
    for (int i = 0; i < kRowThreads; ++i) {
      total += shared.sums[i][thread];
    }
    static_cast<Element*>(args.out)[column] = static_cast<Element>(total);
  }
}

// Of few rows: a thread has a piece of columns, and adds it in the order of the rows.
template <class Element>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ SumColumns args) {
  const int column = (blockIdx.x * kSumThreads + threadIdx.x) * kPieceColumns;
  if (column >= args.columns) {
    return;
  }
  float sums[kPieceColumns] = {};
#pragma unroll 4
  for (int part = 0; part < args.rows; ++part) {
    const int64_t at = static_cast<int64_t>(part) * args.columns + column;
    const auto piece = *reinterpret_cast<const Piece<float>*>(args.sums + at);
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      sums[j] += piece.data[j];
    }
  }
  store_piece<Element>(args.out, column, sums);
}

template <DType kType>
const char* sum_columns_of(const SumColumns& problem, cuda::Stream stream) {
  using Element = typename TypeOf<kType>::Element;
  if (problem.rows <= kMostParts) {
    const int blocks = tiles_of(problem.columns, kSumThreads * kPieceColumns);
    const cudaError_t error =
        sm90::launch(sum_parts_kernel<Element>, blocks, kSumThreads, 0, stream, problem, false);
    return error ? cudaGetErrorString(error) : nullptr;
  }
  const int blocks = (problem.columns + kColumnThreads - 1) / kColumnThreads;
  const cudaError_t error = sm90::launch(sum_columns_kernel<Element>, blocks, kSumThreads,
                                         sizeof(SumStorage), stream, problem, false);
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::ffn
