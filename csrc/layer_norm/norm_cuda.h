// The norms on NVIDIA GPUs: the arguments of the kernels, and how rows are divided among threads.
//
//   z = residual + dropout(x + x_bias)     (with a residual; otherwise z is x)
//   y = (z - mean) * rstd * weight + bias  (root-mean-square: no mean, no bias)
//
// A row belongs to a power of two of threads, each of which has its columns in registers, in
// vectors of 16 bytes. Which threads these are does not depend on the number of rows: a row gives
// the same bits in every batch.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/pure.h"
#include "common/workspace_layout.h"

namespace fastattn::norm {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;    // of a thread block, and so of a row
constexpr int kShortThreads = 128;  // of a thread block with several rows
// Columns are 32-bit integers, and the last part of a row may end beyond it.
constexpr int kMaxColumns = 1 << 30;

// Rows of contiguous elements that begin every `stride` elements; no data where absent.
struct RowsView {
  void* data = nullptr;
  int64_t stride = 0;
  // Backward only: the number of columns, 0 where absent, and the bytes from a row of a thread to
  // its next.
  int columns = 0;
  int64_t step = 0;
};

struct Dropout {
  const int64_t* seed = nullptr;
  uint32_t stream = 0;
  int threshold = 0;  // 0: no dropout
  float scale = 1.0f;
};

// -- rows and threads ----------------------------------------------------------------------------
struct Tiling {
  int width;    // adjacent columns that a thread accesses together: 16 bytes, or 1
  int values;   // columns that a thread holds
  int threads;  // of a row, a power of two
  int rows;     // of a thread block
};
// The columns that a thread block holds of a row: all, or a part.
FASTATTN_PURE int columns_of(const Tiling& tiling) {
  return tiling.threads * tiling.values;
}
FASTATTN_PURE int threads_of(const Tiling& tiling) {
  return tiling.threads * tiling.rows;
}

FASTATTN_PURE int bytes_of(DType type) {
  return type == DType::kFloat32 ? 4 : 2;
}
// The width of vectors of 16 bytes.
FASTATTN_PURE int vector_width(DType type) {
  return 16 / bytes_of(type);
}
inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int power_of_two(int64_t at_least) {
  int result = 1;
  while (result < at_least) {
    result *= 2;
  }
  return result;
}

// As many threads as a row needs with `values` columns each. One warp or less shares its block with
// other rows.
inline Tiling tiling_of(int64_t columns, int width, int values) {
  int threads = power_of_two(ceil_div(columns, values));
  if (width == 1) {  // so that a warp accesses adjacent elements
    const int adjacent = power_of_two(columns);
    threads = threads > kWarp ? threads : adjacent < kWarp ? adjacent : kWarp;
  }
  threads = threads < kMaxThreads ? threads : kMaxThreads;
  return {width, values, threads, threads > kWarp ? 1 : kShortThreads / threads};
}

// Forward: rows of up to 512 threads x 32 values are in registers. Longer ones are processed in
// parts of that size, and read again for the result.
constexpr int kForwardValues = 32;
// Short rows, so that every thread of a block has something to load.
constexpr int kShortValues = 8;
constexpr int kShortColumns = 256;
// Elements that are accessed one by one need a register and an address each.
constexpr int kSingleValues = 16;

inline Tiling forward_tiling(int64_t columns, DType type, bool vectors) {
  if (!vectors) {
    return tiling_of(columns, 1, kSingleValues);
  }
  return tiling_of(columns, vector_width(type),
                   columns <= kShortColumns ? kShortValues : kForwardValues);
}

// Backward: 32 bytes of each of a row's tensors, 16 of short rows. A thread also has the sums of
// its columns' parameter gradients in registers, of up to three parameters.
FASTATTN_PURE int backward_values(DType type, bool vectors) {
  constexpr int kBytes = 32, kSingles = 8;
  return vectors ? kBytes / bytes_of(type) : kSingles;
}
// Thread blocks of a multiprocessor if a warp has a row, or several, with a vector of each thread.
constexpr int kShortBlocks = 6;

inline Tiling backward_tiling(int64_t columns, DType type, bool vectors) {
  const int width = vectors ? vector_width(type) : 1;
  const bool is_short = vectors && columns <= kWarp * width;
  return tiling_of(columns, width, is_short ? width : backward_values(type, vectors));
}

// -- problems ------------------------------------------------------------------------------------
struct ForwardProblem {
  DType type, parameter_type;  // of z and y; of x_bias, weight and bias
  bool centred;                // false: root-mean-square
  float eps;
  int64_t rows;
  int columns;
  DType x_type;
  RowsView x;            // what is normalised, if there is no residual
  RowsView residual, z;  // z is written
  RowsView y;
  const void *x_bias, *weight, *bias;  // null where absent
  float *mean, *rstd;                  // mean is null for root-mean-square
  Dropout dropout;
  Tiling tiling;
};

// The gradient of a parameter: each line of thread blocks writes a line of partial sums, and a
// second kernel adds the lines in their order.
struct ParameterGradient {
  void* result = nullptr;  // null if it is not wanted
  DType type = DType::kFloat32;
  float* partials = nullptr;  // [lines][columns]
};

struct BackwardProblem {
  DType type, parameter_type;
  bool centred;
  int64_t rows;
  int columns;
  RowsView dy, dz;  // gradients of y and of z's other use; either may be absent
  RowsView z;
  const void* weight;
  const float *mean, *rstd;
  RowsView dsum;  // the gradient of z, in its type; may be absent
  DType x_type;
  RowsView dx;  // that of x, after dropout; may be absent
  Dropout dropout;
  ParameterGradient dweight, dbias, dx_bias;
  Tiling tiling;
  int strips;       // of columns_of(tiling): a thread block computes one of each of its rows
  int lines;        // thread blocks of a strip, each of which loops over rows
  int passes;       // of that loop: in the last one a thread may have no row
  int64_t step;     // from a row of a thread to its next
  float* row_sums;  // [rows][2]: the sums along rows, if there are more than two strips

  // Whether dx differs from dsum, or is summed.
  bool has_own_dx() const {
    return dx_bias.result || dropout.threshold > 0 || (dx.data && x_type != type);
  }
};

// As many thread blocks as the GPU can run at the same time: kernels may take 128 registers, those
// of one vector 80.
inline void plan_backward(BackwardProblem& p, bool vectors, int num_sms) {
  p.tiling = backward_tiling(p.columns, p.type, vectors);
  p.strips = static_cast<int>(ceil_div(p.columns, columns_of(p.tiling)));
  const int blocks =
      p.tiling.width == p.tiling.values ? kShortBlocks : kMaxThreads / threads_of(p.tiling);
  const int64_t resident = int64_t{num_sms} * blocks / p.strips;
  const int64_t most = ceil_div(p.rows, p.tiling.rows);
  p.lines = static_cast<int>(most < resident ? most : resident > 1 ? resident : 1);
  p.step = int64_t{p.lines} * p.tiling.rows;
  p.passes = static_cast<int>(ceil_div(p.rows, p.step));
  if (!p.dy.data) {
    p.weight = nullptr;  // it may be infinite or NaN, and 0 times that is NaN
  }
  for (RowsView* rows : {&p.dy, &p.dz, &p.z, &p.dsum, &p.dx}) {
    rows->columns = rows->data ? p.columns : 0;
    rows->step = rows->stride * p.step * bytes_of(rows == &p.dx ? p.x_type : p.type);
  }
}

inline void lay_out(BackwardProblem& p, WorkspaceLayout& layout) {
  for (ParameterGradient* gradient : {&p.dweight, &p.dbias, &p.dx_bias}) {
    if (gradient->result) {
      gradient->partials = layout.take<float>(int64_t{p.lines} * p.columns);
    }
  }
  p.row_sums = p.strips > 2 && p.dy.data ? layout.take<float>(2 * p.rows) : nullptr;
}

// -- launches ------------------------------------------------------------------------------------
// They return nullptr or an error message. An instance is a type of rows and one of parameters,
// which is the same or fp32.
template <DType kType, DType kParameterType>
const char* norm_fwd(const ForwardProblem& problem, cuda::Stream stream);
template <DType kType, DType kParameterType>
const char* norm_bwd(const BackwardProblem& problem, cuda::Stream stream);
// The second stage of the parameter gradients.
const char* sum_partials(const BackwardProblem& problem, cuda::Stream stream);

}  // namespace fastattn::norm
