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

// y = (deviation * rstd + shift) * weight + bias
template <class Z, class P, int kWidth, int kValues>
__device__ __forceinline__ void store_result(const ForwardProblem& p, int64_t row,
                                             const Columns& columns, float rstd, float shift,
                                             const float (&deviations)[kValues]) {
  Z* y_first = row_of<Z>(p.y, row) + columns.first;
#pragma unroll
  for (int v = 0; v < kValues / kWidth; ++v) {
    if (!columns.has(v)) {
      continue;
    }
    const auto weight = parameter<P, kWidth>(p.weight, columns.of(v), 1.0f);
    const auto bias = parameter<P, kWidth>(p.bias, columns.of(v), 0.0f);
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float n = fmaf(deviations[v * kWidth + i], rstd, shift);
      values[i] = fmaf(n, widen(weight, i), widen(bias, i));
    }
    Vector<Z, kWidth> y;
    narrow(values, y);
    store(y_first + v * columns.step, y);
  }
}

// kShort: of which a warp has several (is_short). kLong: longer than a thread block's registers
// hold. Then the statistics of their parts are merged (Chan, Golub and LeVeque 1979), and all parts
// but the last are read again.
enum class RowLength { kShort, kNormal, kLong };

// Resident blocks: while one waits for a row or for its sum, the other loads and stores. The
// kernels that are not listed would spill.
template <class Z, class P, int kWidth, bool kAdd, RowLength kLength>
constexpr int kForwardBlocks = kWidth > 1 && sizeof(Z) == 2 && !kAdd &&
                                       (kLength == RowLength::kNormal || sizeof(P) == sizeof(Z))
                                   ? 2
                                   : 1;

template <class Z, class P, int kWidth, int kValues, bool kAdd, RowLength kLength>
__global__ void __launch_bounds__(kMaxThreads, kForwardBlocks<Z, P, kWidth, kAdd, kLength>)
    norm_fwd_kernel(const ForwardProblem p) {
  constexpr bool kParts = kLength == RowLength::kLong;
  const RowThread own(p.tiling);
  RowSum row_sum(p.tiling.threads);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.tiling.rows + own.row;
  const int part = columns_of(p.tiling);
  Columns columns = columns_of_thread<kWidth, kValues, kLength == RowLength::kShort>(
      p.tiling, own.lane, row < p.rows ? p.columns : 0);
  // From the mean of the last part as it was added up, and that from `mean`.
  float deviations[kValues], shift = 0.0f;
  float mean = 0.0f, squares = 0.0f;  // of the parts so far
  const auto load = [&](const RowsView& rows) {
    Tile<Z, kWidth, kValues> z;
    z.load(row_of<Z>(rows, row) + columns.first, columns);
    return z;
  };
  int begin = 0;
  while (true) {
    Tile<Z, kWidth, kValues> z;
    if constexpr (kAdd) {
      add_residual<Z, P>(p, row, columns, z);
    } else {
      z = load(p.x);
    }
    const int count = kParts && begin + part < p.columns ? part : p.columns - begin;
    const float scale = __fdividef(1.0f, static_cast<float>(count));
    float part_mean = 0.0f;
    if (p.centred) {
      float total[1] = {};
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        total[0] += z[i];
      }
      row_sum.add_up(total);
      part_mean = total[0] * scale;
    }
    float sums[2] = {};  // of the deviations and of their squares
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      // z is 0 in columns that do not exist.
      deviations[i] = z[i] - (columns.has(i / kWidth) ? part_mean : 0.0f);
      sums[0] += deviations[i];
      sums[1] = fmaf(deviations[i], deviations[i], sums[1]);
    }
    row_sum.add_up(sums);
    // The deviations' own sum corrects the rounding of the mean.
    const float correction = p.centred ? sums[0] * scale : 0.0f;
    sums[1] -= correction * sums[0];
    if (!kParts) {
      mean = part_mean + correction;
      squares = sums[1];
      shift = -correction;
      break;
    }
    const float before = static_cast<float>(begin);
    const float share = __fdividef(static_cast<float>(count), before + static_cast<float>(count));
    const float delta = part_mean + correction - mean;
    mean += delta * share;
    squares += sums[1] + delta * delta * before * share;
    shift = part_mean - mean;
    if (begin + part >= p.columns) {
      break;
    }
    begin += part;
    columns.first += part;
  }

  const float variance = __fdividef(squares, static_cast<float>(p.columns));
  // Rounding may make it negative. Not fmaxf, which returns 0 for NaN.
  const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + p.eps);
  if (own.lane == 0 && row < p.rows) {
    p.rstd[row] = rstd;
    if (p.centred) {
      p.mean[row] = mean;
    }
  }
  // Not 0 * rstd, which may be infinite.
  const float shift_of_result = p.centred ? shift * rstd : 0.0f;
  store_result<Z, P, kWidth>(p, row, columns, rstd, shift_of_result, deviations);
  while (kParts && begin > 0) {
    begin -= part;
    columns.first -= part;
    const auto z = load(kAdd ? p.z : p.x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      deviations[i] = z[i] - mean;
    }
    store_result<Z, P, kWidth>(p, row, columns, rstd, 0.0f, deviations);
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
  // Without and with a residual.
  const auto run_either = [&](auto kernel, auto adding_kernel) {
    return adds ? run(adding_kernel) : run(kernel);
  };
  constexpr int kValues = forward_values(kType, true), kSingles = forward_values(kType, false);
  constexpr auto kShort = RowLength::kShort, kNormal = RowLength::kNormal, kLong = RowLength::kLong;
  const bool is_long = columns_of(p.tiling) < p.columns;
  if (p.tiling.width == 1) {
    return is_long ? run_either(norm_fwd_kernel<Z, P, 1, kSingles, false, kLong>,
                                norm_fwd_kernel<Z, P, 1, kSingles, true, kLong>)
                   : run_either(norm_fwd_kernel<Z, P, 1, kSingles, false, kNormal>,
                                norm_fwd_kernel<Z, P, 1, kSingles, true, kNormal>);
  }
  if (is_short(p.tiling)) {
    return run_either(norm_fwd_kernel<Z, P, kVector, kValues, false, kShort>,
                      norm_fwd_kernel<Z, P, kVector, kValues, true, kShort>);
  }
  return is_long ? run_either(norm_fwd_kernel<Z, P, kVector, kValues, false, kLong>,
                              norm_fwd_kernel<Z, P, kVector, kValues, true, kLong>)
                 : run_either(norm_fwd_kernel<Z, P, kVector, kValues, false, kNormal>,
                              norm_fwd_kernel<Z, P, kVector, kValues, true, kNormal>);
}

}  // namespace fastattn::norm
