// The forward of layer_norm, add_layer_norm and rms_norm.
#pragma once

#include <type_traits>

#include "common/cuda_launch.cuh"
#include "layer_norm/row_tile.cuh"

namespace fastattn::norm {

// z = residual + dropout(x + x_bias), stored and kept in the residual's type.
template <class Z, class P, int kWidth, int kValues>
__device__ __forceinline__ void add_residual(const ForwardProblem& p, int64_t row,
                                             const Columns& columns, Tile<Z, kWidth, kValues>& z) {
  Z* z_first = row_of<Z>(p.z, row) + columns.first;
  z.load(row_of<Z>(p.residual, row) + columns.first, columns);
  float sum[kValues];
  with_type(p.x_type, [&](auto element) {
    using X = decltype(element);
    Tile<X, kWidth, kValues> x;
    x.load(row_of<X>(p.x, row) + columns.first, columns);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      sum[i] = x[i];
    }
  });
  const DroppedRow dropped(p.dropout, row);
#pragma unroll
  for (int v = 0; v < z.kVectors; ++v) {
    if (!columns.has(v)) {
      continue;
    }
    float* values = sum + v * kWidth;
    if (p.x_bias) {
      const auto x_bias = load_constant<P, kWidth>(p.x_bias, columns.of(v));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        values[i] += widen(x_bias, i);
      }
    }
    if (dropped) {
      dropped.drop<kWidth>(values, columns.of(v));
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] += z[v * kWidth + i];
    }
    narrow(values, z.vectors[v].vector);
    store(z_first + v * columns.step, z.vectors[v].vector);
  }
}

template <class Z, class P, int kWidth, int kValues>
__device__ __forceinline__ void store_result(const ForwardProblem& p, int64_t row,
                                             const Columns& columns, float mean, float rstd,
                                             const Tile<Z, kWidth, kValues>& z) {
  Z* y_first = row_of<Z>(p.y, row) + columns.first;
#pragma unroll
  for (int v = 0; v < z.kVectors; ++v) {
    if (!columns.has(v)) {
      continue;
    }
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] = (z[v * kWidth + i] - mean) * rstd;
    }
    if (p.weight) {
      const auto weight = load_constant<P, kWidth>(p.weight, columns.of(v));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        values[i] *= widen(weight, i);
      }
    }
    if (p.bias) {
      const auto bias = load_constant<P, kWidth>(p.bias, columns.of(v));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        values[i] += widen(bias, i);
      }
    }
    Vector<Z, kWidth> y;
    narrow(values, y);
    store(y_first + v * columns.step, y);
  }
}

// Resident blocks: while one waits for a row or for its sum, the other loads and stores. The
// kernels that are not listed would spill.
template <class Z, int kWidth, int kValues, bool kAdd>
constexpr int kForwardBlocks = kValues == kShortValues                 ? 10
                               : kWidth > 1 && sizeof(Z) == 2 && !kAdd ? 2
                                                                       : 1;

// A row is one part, unless it is longer than the registers of a block are many: then the parts'
// statistics are merged (Chan, Golub and LeVeque 1979), and all parts but the last are read again.
template <class Z, class P, int kWidth, int kValues, bool kAdd>
__global__ void __launch_bounds__(kValues == kShortValues ? kShortThreads : kMaxThreads,
                                  kForwardBlocks<Z, kWidth, kValues, kAdd>)
    norm_fwd_kernel(const ForwardProblem p) {
  const RowThread own(p.tiling);
  RowSum row_sum(p.tiling.threads);
  const int part = columns_of(p.tiling);
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * p.tiling.rows; first < p.rows;
       first += static_cast<int64_t>(gridDim.x) * p.tiling.rows) {
    const int64_t row = first + own.row;
    const bool is_there = row < p.rows;
    const auto columns_from = [&](int begin) {
      const Columns all = {begin + own.lane * kWidth, p.tiling.threads * kWidth, p.columns};
      return all.of_row(is_there, p.columns);
    };
    Tile<Z, kWidth, kValues> z;
    float mean = 0.0f, squares = 0.0f;  // of the parts so far
    for (int begin = 0; begin < p.columns; begin += part) {
      const Columns columns = columns_from(begin);
      if constexpr (kAdd) {
        add_residual<Z, P>(p, row, columns, z);
      } else {
        z.load(row_of<Z>(p.x, row) + columns.first, columns);
      }
      const int count_here = begin + part < p.columns ? part : p.columns - begin;
      const float count = static_cast<float>(count_here);
      float part_mean = 0.0f;
      if (p.centred) {
        float total[1] = {};
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          total[0] += z[i];
        }
        row_sum.add_up(total);
        part_mean = __fdividef(total[0], count);
      }
      // The deviations' own sum corrects the rounding of the mean.
      float deviations[2] = {};  // their sum, and that of their squares
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        // z is 0 in columns that do not exist.
        const float deviation = z[i] - (columns.has(i / kWidth) ? part_mean : 0.0f);
        deviations[0] += deviation;
        deviations[1] += deviation * deviation;
      }
      row_sum.add_up(deviations);
      if (p.centred) {
        const float correction = __fdividef(deviations[0], count);
        part_mean += correction;
        deviations[1] -= correction * deviations[0];
      }
      const float before = static_cast<float>(begin);
      const float share = begin == 0 ? 1.0f : __fdividef(count, before + count);
      const float delta = part_mean - mean;
      mean += delta * share;
      squares += deviations[1] + delta * delta * before * share;
    }

    const float variance = __fdividef(squares, static_cast<float>(p.columns));
    // Rounding may make it negative. Not fmaxf, which returns 0 for NaN.
    const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + p.eps);
    if (own.lane == 0 && is_there) {
      p.rstd[row] = rstd;
      if (p.centred) {
        p.mean[row] = mean;
      }
    }
    const int last_part = (p.columns - 1) & -part;  // part: a power of two
    for (int begin = last_part; begin >= 0; begin -= part) {
      const Columns columns = columns_from(begin);
      if (begin < last_part) {
        z.load(row_of<Z>(kAdd ? p.z : p.x, row) + columns.first, columns);
      }
      store_result<Z, P>(p, row, columns, mean, rstd, z);
    }
  }
}

// -- launch --------------------------------------------------------------------------------------
template <DType kType, DType kParameterType>
const char* norm_fwd(const ForwardProblem& p, cuda::Stream stream) {
  using Z = typename TypeOf<kType>::Element;
  using P = typename TypeOf<kParameterType>::Element;
  constexpr int kVector = vector_width(kType);
  const bool adds = p.residual.data;
  const auto run = [&](auto kernel) {
    return cuda::launch(kernel, ceil_div(p.rows, p.tiling.rows), threads_of(p.tiling), stream, p);
  };
  if (p.tiling.width == 1) {
    return adds ? run(norm_fwd_kernel<Z, P, 1, kSingleValues, true>)
                : run(norm_fwd_kernel<Z, P, 1, kSingleValues, false>);
  }
  if (p.tiling.values == kShortValues) {
    return adds ? run(norm_fwd_kernel<Z, P, kVector, kShortValues, true>)
                : run(norm_fwd_kernel<Z, P, kVector, kShortValues, false>);
  }
  return adds ? run(norm_fwd_kernel<Z, P, kVector, kForwardValues, true>)
              : run(norm_fwd_kernel<Z, P, kVector, kForwardValues, false>);
}

}  // namespace fastattn::norm
