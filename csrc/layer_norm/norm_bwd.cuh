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

// The columns of a thread in a strip. A warp has adjacent ones, so that the distance of a thread's
// vectors is a constant, which loads and stores add to an address.
template <int kWidth, int kValues>
__device__ __forceinline__ Columns columns_of_strip(const BackwardProblem& p, int strip, int lane) {
  const int warp = strip * p.tiling.threads / kWarp + lane / kWarp;
  return {warp * kWarp * kValues + lane % kWarp * kWidth, kWarp * kWidth, p.columns};
}

// What a thread has of a row's inputs; 0 where there is no such row, or no dy.
template <class Z, int kWidth, int kValues>
struct RowInputs {
  Tile<Z, kWidth, kValues> z, dy;
  float mean, rstd;

  // z_first, dy_first: the thread's first column of the row. columns: of dy.
  __device__ __forceinline__ RowInputs(const BackwardProblem& p, int64_t row, const Z* z_first,
                                       const Z* dy_first, const Columns& columns) {
    z.load(z_first, columns);
    dy.load(dy_first, columns);
    mean = columns.has(0) && p.centred ? p.mean[row] : 0.0f;
    rstd = columns.has(0) ? p.rstd[row] : 0.0f;
  }
  // The normalised value.
  __device__ __forceinline__ float n(int i) const { return (z[i] - mean) * rstd; }
};

// The weights of a thread's columns, 1 if there are none.
template <class P, int kWidth, int kValues>
struct Weights : Tile<P, kWidth, kValues> {
  __device__ __forceinline__ Weights(const BackwardProblem& p, const Columns& columns) {
    if (p.weight) {
      this->load(static_cast<const P*>(p.weight) + columns.first, columns);
      return;
    }
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      this->vectors[i / kWidth].vector.at[i % kWidth] = P(1.0f);
    }
  }
};

// Writes a block's sums of its columns: those of its rows are added in their order.
template <int kWidth, int kValues>
__device__ __forceinline__ void write_partials(const BackwardProblem& p, float* partials, int line,
                                               const RowThread& own, const Columns& columns,
                                               const float (&sums)[kValues]) {
  const RowsView lines = {partials, p.columns};
  if (p.tiling.rows > 1) {
    __shared__ float shared[kShortThreads * kValues];
    const int width = columns_of(p.tiling);
    __syncthreads();  // the reads of the sums before
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (columns.has(i / kWidth)) {
        shared[own.row * width + columns.of(i / kWidth) + i % kWidth] = sums[i];
      }
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
  const RowInputs<Z, kWidth, kValues> in(p, row, row_of<Z>(p.z, row) + columns.first,
                                         row_of<Z>(p.dy, row) + columns.first, columns);
  const Weights<P, kWidth, kValues> weight(p, columns);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float g = in.dy[i] * weight[i];
    sums[0] += g;
    sums[1] += g * in.n(i);
  }
}

// kOwnDx: with a dx other than dsum, or dx_bias. The loop over rows has few instructions besides
// the arithmetic: weights stay in registers, addresses grow by a constant, and a row or a tensor
// that is absent has no columns, so that its loads and stores need no branch.
template <class Z, class P, int kWidth, int kValues, bool kOwnDx>
__global__ void __launch_bounds__(kWidth == kValues ? kShortThreads : kMaxThreads,
                                  kWidth == kValues ? kShortBlocks : 1)
    norm_bwd_kernel(const BackwardProblem p) {
  constexpr int kVectors = kValues / kWidth;
  const RowThread own(p.tiling);
  RowSum row_sum(p.tiling.threads);
  const int strip = static_cast<int>(blockIdx.x) % p.strips;
  const int line = static_cast<int>(blockIdx.x) / p.strips;
  const auto columns_of = [&](int of) {
    return columns_of_strip<kWidth, kValues>(p, of, own.lane);
  };
  const Columns columns = columns_of(strip);
  Weights<P, kWidth, kValues> weight(p, columns);
  const float scale = __fdividef(1.0f, static_cast<float>(p.columns));
  float dweight[kValues] = {}, dbias[kValues] = {};
  float dx_bias[kOwnDx ? kValues : 1] = {};

  // Starts one step before the thread's first row: the loop advances before it loads.
  int64_t row = int64_t{line} * p.tiling.rows + own.row - p.step;
  const auto begin_of = [&](const RowsView& rows) { return row_of<Z>(rows, row) + columns.first; };
  Z *z = begin_of(p.z), *dy = begin_of(p.dy), *dz = begin_of(p.dz);
  Z *dsum = begin_of(p.dsum), *dx = begin_of(p.dx);
  const auto advance = [](Z*& at, const RowsView& rows) {
    at = reinterpret_cast<Z*>(reinterpret_cast<char*>(at) + rows.step);
  };
  for (int pass = p.passes; pass > 0; --pass) {
    row += p.step;
    advance(z, p.z);
    advance(dy, p.dy);
    advance(dz, p.dz);
    advance(dsum, p.dsum);
    advance(dx, p.dx);
    const auto here = [&](const Columns& of, const RowsView& rows) {
      return of.of_row(row < p.rows, rows.columns);
    };
    float sums[2] = {};  // of g and g * n
    if (p.strips == 2) {
      // The block that computes the other strip loads it at the same time.
      add_products<Z, P, kWidth, kValues>(p, row, here(columns_of(1 - strip), p.dy), sums);
    }
    const RowInputs<Z, kWidth, kValues> in(p, row, z, dy, here(columns, p.dy));
    Tile<Z, kWidth, kValues> other;  // dz
    if (kOwnDx) {
      // Beside dx_bias there are no registers to keep weights in, nor for dz at the same time.
      weight = Weights<P, kWidth, kValues>(p, columns);
    } else if (p.dz.columns > 0) {
      other.load(dz, here(columns, p.dz));
    }
    float g[kValues], n[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float d = in.dy[i];
      n[i] = in.n(i);
      g[i] = d * weight[i];
      sums[0] += g[i];
      sums[1] += g[i] * n[i];
      dweight[i] += d * n[i];
      dbias[i] += d;
    }
    if (kOwnDx && p.dz.columns > 0) {
      other.load(dz, here(columns, p.dz));
    }
    if (p.strips <= 2) {
      row_sum.add_up(sums);
    } else if (here(columns, p.dy).has(0)) {
      sums[0] = p.row_sums[2 * row];
      sums[1] = p.row_sums[2 * row + 1];
    }
    // rstd * average(g) and rstd * average(g * n)
    const float shift = p.centred ? in.rstd * scale * sums[0] : 0.0f;
    const float slope = in.rstd * scale * sums[1];
    const DroppedRow dropped(kOwnDx ? p.dropout : Dropout(), row);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float d[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        d[j] = in.rstd * g[i] - (n[i] * slope + shift);
      }
      if (p.dz.columns > 0) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          d[j] += other[v * kWidth + j];
        }
      }
      Vector<Z, kWidth> rounded;
      narrow(d, rounded);
      if (here(columns, p.dsum).has(v)) {
        store(dsum + v * columns.step, rounded);
      }
      const bool has_dx = here(columns, p.dx).has(v);
      if constexpr (kOwnDx) {
        if (dropped) {
          dropped.drop<kWidth>(d, columns.of(v));
        }
        if (has_dx) {
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
      } else if (has_dx) {
        store(dx + v * columns.step, rounded);
      }
    }
  }

  if (p.dweight.result) {
    write_partials<kWidth>(p, p.dweight.partials, line, own, columns, dweight);
  }
  if (p.dbias.result) {
    write_partials<kWidth>(p, p.dbias.partials, line, own, columns, dbias);
  }
  if constexpr (kOwnDx) {
    if (p.dx_bias.result) {
      write_partials<kWidth>(p, p.dx_bias.partials, line, own, columns, dx_bias);
    }
  }
}

// The sums of g and g * n along rows of more than two strips, before the kernel above. A thread
// block computes a row.
template <class Z, class P, int kWidth, int kValues>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_row_sums_kernel(const BackwardProblem p) {
  const RowThread own(p.tiling);
  RowSum row_sum(p.tiling.threads);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    float sums[2] = {};
    for (int strip = 0; strip < p.strips; ++strip) {
      const Columns columns = columns_of_strip<kWidth, kValues>(p, strip, own.lane);
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
  const auto run_bwd = [&](auto kernel, auto kernel_with_own_dx) {
    const int64_t blocks = int64_t{p.lines} * p.strips;
    return p.has_own_dx() ? run(kernel_with_own_dx, blocks) : run(kernel, blocks);
  };
  if (!vectors) {
    failure = run_bwd(norm_bwd_kernel<Z, P, 1, kSingles, false>,
                      norm_bwd_kernel<Z, P, 1, kSingles, true>);
  } else if (p.tiling.values == kVector) {
    failure = run_bwd(norm_bwd_kernel<Z, P, kVector, kVector, false>,
                      norm_bwd_kernel<Z, P, kVector, kVector, true>);
  } else {
    failure = run_bwd(norm_bwd_kernel<Z, P, kVector, kValues, false>,
                      norm_bwd_kernel<Z, P, kVector, kValues, true>);
  }
  return failure ? failure : sum_partials(p, stream);
}

}  // namespace fastattn::norm
