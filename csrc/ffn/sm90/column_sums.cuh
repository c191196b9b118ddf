// The gradient of y after dropout, and sums of columns: first of 128 rows at a time, then of these
// sums, each in one order.
#pragma once

#include "common/dropout.h"
#include "ffn/sm90/config.cuh"
#include "sm90/ptx/warp.cuh"
#include "sm90/tile/descriptor.h"
#include "sm90/tile/launch.cuh"

namespace fastattn::ffn {

// -- pieces: eight adjacent columns of a row, which a thread reads and writes at a time -----------
constexpr int kPieceColumns = 8;

template <class Element>
struct alignas(sm90::kPieceBytes) Piece {
  Element data[kPieceColumns];
};

template <class Element>
__device__ __forceinline__ void store_piece(void* matrix, int64_t at,
                                            const float (&v)[kPieceColumns]) {
  uint4* to = reinterpret_cast<uint4*>(static_cast<Element*>(matrix) + at);
  if constexpr (sizeof(Element) == sizeof(float)) {
    *reinterpret_cast<Piece<float>*>(to) = {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
  } else {
    *to = {ptx::pack<Element>(v[0], v[1]), ptx::pack<Element>(v[2], v[3]),
           ptx::pack<Element>(v[4], v[5]), ptx::pack<Element>(v[6], v[7])};
  }
}

// The dropout of a matrix of fewer than 2^32 rows: a state from which keys of rows follow, and keys
// of the two words of a piece.
struct PieceDropout {
  static constexpr int kWords = kPieceColumns / 4;
  struct ColumnKeys {
    uint32_t of[kWords];
  };
  struct Words {
    uint32_t of[kWords];
  };

  const Dropout& dropout;
  int64_t seed;

  __device__ __forceinline__ explicit PieceDropout(const Dropout& dropout)
      : dropout(dropout), seed(dropout.seed ? *dropout.seed : 0) {}

  __device__ __forceinline__ uint32_t row_state() const {
    return dropout::flat_row_state(seed, dropout.stream, 0);
  }
  __device__ __forceinline__ ColumnKeys column_keys(int column) const {
    const uint32_t unit = static_cast<uint32_t>(column) / 4;
    return {dropout::column_key(seed, dropout.stream, unit),
            dropout::column_key(seed, dropout.stream, unit + 1)};
  }

  // The words of a row. Without dropout they are not read.
  __device__ __forceinline__ Words words(uint32_t row_key, const ColumnKeys& columns) const {
    Words words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words.of[i] = dropout::word(row_key, columns.of[i]);
    }
    return words;
  }

  // Drops or scales the values of a row. Dropped ones are 0 even where v is infinite or NaN.
  __device__ __forceinline__ void apply(float (&v)[kPieceColumns], const Words& words) const {
    if (!dropout.seed) {
      return;
    }
    // byte >= threshold, for a byte that is shifted to the top of its word.
    const uint32_t last_dropped = (static_cast<uint32_t>(dropout.threshold) << 24) - 1;
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      const bool is_kept = words.of[j / 4] << (24 - 8 * (j % 4)) > last_dropped;
      v[j] = is_kept ? v[j] * dropout.keep_scale : 0.0f;
    }
  }
};

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

// Sums over few rows: a thread has a piece of columns, and adds it in the order of the rows.
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
  if (problem.rows <= kMaxParts) {
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
