// The backward of layer_norm, add_layer_norm and rms_norm. With g = dy * weight and
// n = (z - mean) * rstd:
//
//   dsum = rstd * (g - average(g) - n * average(g * n)) + dz    dx = dropout(dsum)
//   dweight = sum over rows of dy * n    dbias = that of dy    dx_bias = that of dx
//
// Thread blocks are persistent: a thread has the same columns of many rows, and their sums over
// these rows in registers. At the end each block writes a line of partial sums.
#pragma once

#include <type_traits>

#include "common/cuda_launch.cuh"
#include "layer_norm/row_tile.cuh"

namespace fastattn::norm {

// What a thread has of a row's inputs; 0 where there is no such row.
template <class Z, int kWidth, int kValues>
struct RowInputs {
  Tile<Z, kWidth, kValues> z, dy;
  float mean, rstd;

  // columns: none of a row that does not exist.
  __device__ __forceinline__ RowInputs(const BackwardProblem& p, int64_t row,
                                       const Columns& columns, bool has_dy) {
    const bool is_there = row < p.rows;
    mean = is_there && p.centred ? p.mean[row] : 0.0f;
    rstd = is_there ? p.rstd[row] : 0.0f;
    z.load(p.z, row, columns);
    dy.load(p.dy, row, {columns, has_dy});
  }
  // The normalised value.
  __device__ __forceinline__ float n(int i) const { return (z[i] - mean) * rstd; }
};

// Calls of(v, weight) for each vector of columns, with its weights in fp32.
template <class P, int kWidth, int kVectors, class Of>
__device__ __forceinline__ void for_weights(const BackwardProblem& p, const Columns& columns,
                                            Of of) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float weight[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      weight[i] = 1.0f;
    }
    if (columns.has(v) && p.weight) {
      const auto loaded = load<kWidth>(static_cast<const P*>(p.weight) + columns.of(v));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        weight[i] = widen(loaded.at[i]);
      }
    }
    of(v, weight);
  }
}

// Writes a block's sums of its columns: those of its rows are added in their order.
template <int kWidth, int kValues>
__device__ __forceinline__ void write_partials(const BackwardProblem& p, float* partials, int line,
                                               const RowThread& own, const Columns& columns,
                                               const float (&sums)[kValues]) {
  const RowsView lines = {partials, p.columns};
  if (p.tiling.rows > 1) {
    __shared__ float shared[kShortThreads * kMostBackwardValues];
    const int width = columns_of(p.tiling);
    __syncthreads();  // the reads of the sums before
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int column = own.lane * kWidth + i / kWidth * columns.step + i % kWidth;
      shared[own.row * width + column] = sums[i];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width && column < p.columns; column += blockDim.x) {
      float total = 0.0f;
      for (int row = 0; row < p.tiling.rows; ++row) {
        total += shared[row * width + column];
      }
      row_of<float>(lines, line)[column] = total;
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < kValues / kWidth; ++v) {
    if (columns.has(v)) {
      Vector<float, kWidth> vector;
      narrow(sums + v * kWidth, vector);
      store(lines, line, columns.of(v), vector);
    }
  }
}

// Adds g and g * n of a thread's columns to sums.
template <class Z, class P, int kWidth, int kValues>
__device__ __forceinline__ void add_products(const BackwardProblem& p, int64_t row,
                                             const Columns& columns, float (&sums)[2]) {
  const RowInputs<Z, kWidth, kValues> in(p, row, columns, true);
  for_weights<P, kWidth, kValues / kWidth>(p, columns, [&](int v, const float* weight) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int i = v * kWidth + j;
      const float g = in.dy[i] * weight[j];
      sums[0] += g;
      sums[1] += g * in.n(i);
    }
  });
}

// kAdd: with dz, dx, its dropout, or dx_bias.
template <class Z, class P, int kWidth, int kValues, bool kAdd>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_bwd_kernel(const BackwardProblem p) {
  constexpr int kVectors = kValues / kWidth;
  const RowThread own(p.tiling.threads);
  RowSum row_sum(p.tiling.threads);
  const int strip = static_cast<int>(blockIdx.x) % p.strips;
  const int line = static_cast<int>(blockIdx.x) / p.strips;
  const auto columns_of_strip = [&](int of) {
    const int begin = of * columns_of(p.tiling);
    return Columns(p.tiling.threads, begin, own.lane, kWidth, p.columns);
  };
  const bool has_dy = !kAdd || p.dy.data;
  const float scale = __fdividef(1.0f, static_cast<float>(p.columns));
  float dweight[kValues] = {}, dbias[kValues] = {};
  float dx_bias[kAdd ? kValues : 1] = {};

  // As often as the block's first row requires.
  for (int64_t row = int64_t{line} * p.tiling.rows + own.row; row - own.row < p.rows;
       row += int64_t{p.lines} * p.tiling.rows) {
    const bool is_there = row < p.rows;
    float averages[2] = {};  // of g and g * n
    if (p.strips == 2 && has_dy) {
      // The block that computes the other strip loads it at the same time.
      add_products<Z, P, kWidth, kValues>(p, row, {columns_of_strip(1 - strip), is_there},
                                          averages);
    }
    const Columns columns(columns_of_strip(strip), is_there);
    const RowInputs<Z, kWidth, kValues> in(p, row, columns, has_dy);
    if (has_dy) {
      for_weights<P, kWidth, kVectors>(p, columns, [&](int v, const float* weight) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const int i = v * kWidth + j;
          const float n = in.n(i), d = in.dy[i], g = d * weight[j];
          averages[0] += g;
          averages[1] += g * n;
          dweight[i] += d * n;
          dbias[i] += d;
        }
      });
      if (!p.row_sums) {
        row_sum.add_up(averages);
      } else if (is_there) {
        averages[0] = p.row_sums[2 * row];
        averages[1] = p.row_sums[2 * row + 1];
      }
      averages[0] = p.centred ? averages[0] * scale : 0.0f;
      averages[1] *= scale;
    }
    if (!kAdd && !p.dsum.data) {
      continue;
    }
    const DroppedRow dropped(kAdd ? p.dropout : Dropout(), row);
    for_weights<P, kWidth, kVectors>(p, columns, [&](int v, const float* weight) {
      float d[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        d[j] = in.rstd * (in.dy[i] * weight[j] - averages[0] - in.n(i) * averages[1]);
      }
      if constexpr (kAdd) {
        Vector<Z, kWidth> dz = {};
        if (p.dz.data && columns.has(v)) {
          dz = load_constant<Z, kWidth>(row_of<Z>(p.dz, row), columns.of(v));
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          d[j] = (has_dy ? d[j] : 0.0f) + widen(dz.at[j]);
        }
      }
      if (p.dsum.data && columns.has(v)) {
        Vector<Z, kWidth> rounded;
        narrow(d, rounded);
        store(p.dsum, row, columns.of(v), rounded);
      }
      if constexpr (kAdd) {
        if (dropped) {
          dropped.drop<kWidth>(d, columns.of(v));
        }
        if (p.dx.data && columns.has(v)) {
          with_type(p.x_type, [&](auto element) {
            Vector<decltype(element), kWidth> rounded;
            narrow(d, rounded);
            store(p.dx, row, columns.of(v), rounded);
          });
        }
        if (p.dx_bias.result) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            dx_bias[v * kWidth + j] += d[j];
          }
        }
      }
    });
  }

  const Columns columns = columns_of_strip(strip);
  if (p.dweight.result) {
    write_partials<kWidth>(p, p.dweight.partials, line, own, columns, dweight);
  }
  if (p.dbias.result) {
    write_partials<kWidth>(p, p.dbias.partials, line, own, columns, dbias);
  }
  if constexpr (kAdd) {
    if (p.dx_bias.result) {
      write_partials<kWidth>(p, p.dx_bias.partials, line, own, columns, dx_bias);
    }
  }
}

// The sums of g and g * n along rows of more than two strips, before the kernel above. A thread
// block computes a row.
template <class Z, class P, int kWidth, int kValues>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_row_sums_kernel(const BackwardProblem p) {
  const RowThread own(p.tiling.threads);
  RowSum row_sum(p.tiling.threads);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float sums[2] = {};
    for (int strip = 0; strip < p.strips; ++strip) {
      const int begin = strip * columns_of(p.tiling);
      const Columns columns(p.tiling.threads, begin, own.lane, kWidth, p.columns);
      add_products<Z, P, kWidth, kValues>(p, row, columns, sums);
    }
    row_sum.add_up(sums);
    if (threadIdx.x == 0) {
      p.row_sums[2 * row] = sums[0];
      p.row_sums[2 * row + 1] = sums[1];
    }
  }
}

// -- launch --------------------------------------------------------------------------------------
template <DType kType, DType kParameterType>
const char* norm_bwd(const BackwardProblem& p, cuda::Stream stream) {
  using Z = typename TypeOf<kType>::Element;
  using P = typename TypeOf<kParameterType>::Element;
  constexpr int kVector = vector_width(kType);
  constexpr int kValues = backward_values(kType, true), kSingles = backward_values(kType, false);
  const auto run = [&](auto kernel, int64_t blocks) {
    return cuda::launch(kernel, blocks, threads_of(p.tiling), stream, p);
  };
  const bool vectors = p.tiling.width > 1;
  const char* failure = nullptr;
  if (p.row_sums) {
    failure = vectors ? run(norm_row_sums_kernel<Z, P, kVector, kValues>, p.rows)
                      : run(norm_row_sums_kernel<Z, P, 1, kSingles>, p.rows);
    if (failure) {
      return failure;
    }
  }
  const int64_t blocks = int64_t{p.lines} * p.strips;
  if (vectors) {
    failure = p.adds() ? run(norm_bwd_kernel<Z, P, kVector, kValues, true>, blocks)
                       : run(norm_bwd_kernel<Z, P, kVector, kValues, false>, blocks);
  } else {
    failure = p.adds() ? run(norm_bwd_kernel<Z, P, 1, kSingles, true>, blocks)
                       : run(norm_bwd_kernel<Z, P, 1, kSingles, false>, blocks);
  }
  return failure ? failure : sum_partials(p, stream);
}

}  // namespace fastattn::norm
