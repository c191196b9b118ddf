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
#include <initializer_list>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/pure.h"
#include "common/workspace_layout.h"

namespace fastattn::norm {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;    // of a thread block, and so of a row
constexpr int kShortThreads = 128;  // of a thread block with several rows
// FASTATTN_TRIALS=norm_rows: whether thread blocks of the backward have several rows of more than a
// warp.
#ifdef FASTATTN_TRIAL_NORM_ROWS
constexpr bool kRowsTogether = true;
#else
constexpr bool kRowsTogether = false;
#endif
// Columns are 32-bit integers, and the last part of a row may end beyond it.
constexpr int kMaxColumns = 1 << 30;

// Rows of contiguous elements that begin every `stride` elements; no data where absent.
struct RowsView {
  void* data = nullptr;
  int64_t stride = 0;
  int columns = 0;  // backward only: 0 where absent
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
// other rows. Elements that are accessed one by one: a warp accesses adjacent ones before a thread
// has a second one.
inline Tiling tiling_of(int64_t columns, int width, int values) {
  int threads = power_of_two(ceil_div(columns, values));
  if (width == 1 && threads < kWarp) {
    threads = power_of_two(columns < kWarp ? columns : kWarp);
  }
  threads = threads < kMaxThreads ? threads : kMaxThreads;
  return {width, values, threads, threads > kWarp ? 1 : kShortThreads / threads};
}

// A thread has up to 64 bytes of each of a row's tensors, or a number of elements that are accessed
// one by one, for which it needs a register and an address each.
constexpr int kThreadBytes = 64;
// Forward: rows of up to 512 threads x these values are in registers. Longer ones are processed in
// parts of that size, and read again for the result.
FASTATTN_PURE int forward_values(DType type, bool vectors) {
  constexpr int kSingles = 16;
  return vectors ? kThreadBytes / bytes_of(type) : kSingles;
}
// Backward: a thread also has weights, and the sums of its columns' parameter gradients, in
// registers: of two parameters, or with `own_dx` of three. More threads with few values each are
// faster (H200, bf16, 32768 x 1024: 58 us instead of 63), but a row has up to 512.
constexpr int kFewValues = 16, kFewColumns = kMaxThreads * kFewValues;
FASTATTN_PURE int backward_values(DType type, DType parameter_type, bool vectors, bool own_dx,
                                  int64_t columns) {
  constexpr int kSingles = 8;
  const int values = kThreadBytes / bytes_of(type);
  const bool few = own_dx || parameter_type != type || columns <= kFewColumns;
  return !vectors ? kSingles : few && values > kFewValues ? kFewValues : values;
}
// A warp's copies of a row's two statistics in shared memory: one of each for a thread.
constexpr int kStatisticsBytes = 2 * kWarp * static_cast<int>(sizeof(float));
// Rows of a thread in shared memory: one is computed while the next ones are copied.
constexpr int kMaxStages = 3;

inline Tiling forward_tiling(int64_t columns, DType type, bool vectors) {
  return tiling_of(columns, vectors ? vector_width(type) : 1, forward_values(type, vectors));
}
inline Tiling backward_tiling(int64_t columns, DType type, DType parameter_type, bool vectors,
                              bool own_dx) {
  Tiling tiling = tiling_of(columns, vectors ? vector_width(type) : 1,
                            backward_values(type, parameter_type, vectors, own_dx, columns));
  // Thread blocks of more rows write fewer lines of partial sums (132 on an H200, not 1,056).
  constexpr int kMinColumns = 512, kMaxTogether = 1024;
  if (kRowsTogether && vectors && kMinColumns <= columns && columns <= kMaxTogether) {
    tiling.rows = kMaxThreads / tiling.threads;
  }
  return tiling;
}
// Whether a warp has several rows, in vectors.
FASTATTN_PURE bool is_short(const Tiling& tiling) {
  return tiling.width > 1 && tiling.threads < kWarp;
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
  int strips;              // of columns_of(tiling): a thread block computes one of each of its rows
  int lines;               // thread blocks of a strip, each of which loops over rows
  int passes;              // of that loop: in the last one a thread may have no row
  int stages;              // of the ring of rows in shared memory, up to kMaxStages
  int stage_bytes;         // of a warp's part of a row, of all tensors
  bool copies_statistics;  // into a stage, behind the tensors
  int64_t step;            // from a row of a thread to its next
  float* row_sums;         // [rows][2]: the sums along rows, if there is more than one strip

  // Whether dx differs from dsum, or is summed.
  bool has_own_dx() const {
    return dx_bias.result || dropout.threshold > 0 || (dx.data && x_type != type);
  }
};

inline void set_lines(BackwardProblem& p, int64_t lines) {
  p.lines = static_cast<int>(lines > 1 ? lines : 1);
  p.step = int64_t{p.lines} * p.tiling.rows;
  p.passes = static_cast<int>(ceil_div(p.rows, p.step));
}

// As many thread blocks as the GPU can run at the same time, with 128 registers a thread.
inline void plan_backward(BackwardProblem& p, bool vectors, int num_sms) {
  p.tiling = backward_tiling(p.columns, p.type, p.parameter_type, vectors, p.has_own_dx());
  p.strips = static_cast<int>(ceil_div(p.columns, columns_of(p.tiling)));
  const int blocks = kMaxThreads / threads_of(p.tiling);
  const int64_t resident = int64_t{num_sms} * blocks / p.strips;
  const int64_t most = ceil_div(p.rows, p.tiling.rows);
  set_lines(p, most < resident ? most : resident);
  if (!p.dy.data) {
    p.weight = nullptr;  // it may be infinite or NaN, and 0 times that is NaN
  }
  for (RowsView* rows : {&p.dy, &p.dz, &p.z, &p.dsum, &p.dx}) {
    rows->columns = rows->data ? p.columns : 0;
  }
}

// Divides the shared memory of a multiprocessor among the thread blocks that its registers allow:
// each gets as many stages as fit. If not even one fits, there are fewer thread blocks. Statistics
// are copied, too, if a thread has few values and they do not take the place of a stage. Returns
// the bytes of a thread block. In the end one stage holds the sums of the block's rows, which need
// 4 bytes a column: a stage has at least two tensors of 2 bytes.
inline int plan_ring(BackwardProblem& p, int shared_memory) {
  constexpr int kOther = 1024 + 512;  // of a thread block: CUDA's, and of sums along rows
  const int tensors = p.dz.data ? 3 : 2, threads = threads_of(p.tiling);
  const int warps = threads / kWarp, blocks = kMaxThreads / threads;
  const auto stages_of = [&](int stage_bytes) {
    const int fitting = (shared_memory / blocks - kOther) / (warps * stage_bytes);
    return fitting < kMaxStages ? fitting : kMaxStages;
  };
  p.stage_bytes = kWarp * tensors * p.tiling.values * bytes_of(p.type);
  const int stages = stages_of(p.stage_bytes);
  p.copies_statistics = p.tiling.values <= kFewValues && stages > 0 &&
                        stages_of(p.stage_bytes + kStatisticsBytes) == stages;
  p.stage_bytes += p.copies_statistics ? kStatisticsBytes : 0;
  p.stages = stages < 1 ? 1 : stages;
  const int of_stage = warps * p.stage_bytes;
  if (stages < 1 && p.passes > 1) {
    set_lines(p, int64_t{p.lines} * (shared_memory / (of_stage + kOther)) / blocks);
  }
  return p.stages * of_stage;
}

inline void lay_out(BackwardProblem& p, WorkspaceLayout& layout) {
  for (ParameterGradient* gradient : {&p.dweight, &p.dbias, &p.dx_bias}) {
    if (gradient->result) {
      gradient->partials = layout.take<float>(int64_t{p.lines} * p.columns);
    }
  }
  p.row_sums = p.strips > 1 && p.dy.data ? layout.take<float>(2 * p.rows) : nullptr;
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
