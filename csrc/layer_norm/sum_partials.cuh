// The second stage of the parameter gradients: adds the lines of partial sums, in the same order in
// every run.
#pragma once

#include "common/cuda_launch.cuh"
#include "layer_norm/row_tile.cuh"

namespace fastattn::norm {

// A thread block adds the lines of 8 columns, 32 bytes: 64 threads for each column, of which the
// first one adds the sums of all.
constexpr int kSumColumns = 8, kSumLines = 64;
constexpr int kSumThreads = kSumColumns * kSumLines;

struct SumProblem {
  ParameterGradient gradients[3];
  int columns, lines, blocks;  // thread blocks of a gradient
};

__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const __grid_constant__ SumProblem p) {
  const ParameterGradient& gradient = p.gradients[blockIdx.x / p.blocks];
  const int lane = static_cast<int>(threadIdx.x) % kSumColumns;
  const int first = static_cast<int>(threadIdx.x) / kSumColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x % p.blocks) * kSumColumns + lane;
  float sum = 0.0f;
  if (column < p.columns) {
#pragma unroll 8
    for (int line = first; line < p.lines; line += kSumLines) {
      sum += gradient.partials[int64_t{line} * p.columns + column];
    }
  }
  __shared__ float shared[kSumLines][kSumColumns];
  shared[first][lane] = sum;
  __syncthreads();
  if (first == 0 && column < p.columns) {
    float total[1] = {};
    for (int other = 0; other < kSumLines; ++other) {
      total[0] += shared[other][lane];
    }
    with_type(gradient.type, [&](auto element) {
      Vector<decltype(element), 1> rounded;
      narrow(total, rounded);
      store(RowsView{gradient.result, 0}, 0, static_cast<int>(column), rounded);
    });
  }
}

inline const char* run_sum_partials(const BackwardProblem& p, cuda::Stream stream) {
  SumProblem sums;
  int count = 0;
  for (const ParameterGradient* gradient : {&p.dweight, &p.dbias, &p.dx_bias}) {
    if (gradient->result) {
      sums.gradients[count++] = *gradient;
    }
  }
  if (count == 0) {
    return nullptr;
  }
  sums.columns = p.columns;
  sums.lines = p.lines;
  sums.blocks = static_cast<int>(ceil_div(p.columns, kSumColumns));
  return cuda::launch(sum_partials_kernel, int64_t{count} * sums.blocks, kSumThreads, stream, sums);
}

}  // namespace fastattn::norm
