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

#include "common/cp_async.cuh"
#include "common/cuda_launch.cuh"
#include "layer_norm/row_tile.cuh"

namespace fastattn::norm {

// Dynamic shared memory: the rows that are copied ahead, in the end the sums of a block's rows.
__device__ __forceinline__ char* dynamic_memory() {
  extern __shared__ __align__(16) char norm_memory[];
  return norm_memory;
}

// -- rows that are copied ahead -------------------------------------------------------------------
// A row's statistics; 0 where there is no such row, or no dy.
struct Statistics {
  float mean = 0.0f, rstd = 0.0f;
};
__device__ __forceinline__ bool has_statistics(const BackwardProblem& p, int64_t row) {
  return row < p.rows && p.dy.columns > 0;
}
__device__ __forceinline__ Statistics statistics_of(const BackwardProblem& p, int64_t row) {
  if (!has_statistics(p, row)) {
    return {};
  }
  return {p.centred ? p.mean[row] : 0.0f, p.rstd[row]};
}

// A thread's columns of the rows of z, dy and dz, and the rows' statistics where memory suffices,
// copied into shared memory `stages` rows ahead, so that memory is busy while a row is computed. A
// thread reads what it has copied itself. Elements that are accessed one by one are read from
// global memory.
template <class Z, int kWidth, int kValues>
class RowRing {
 public:
  static constexpr int kVectors = kValues / kWidth;
  static constexpr bool kCopies = kWidth > 1;
  static constexpr bool kMayCopyStatistics = kCopies && kValues <= kFewValues;

  // row: the thread's first one.
  __device__ __forceinline__ RowRing(const BackwardProblem& p, const Columns& columns, int64_t row)
      : p_(p), columns_(columns) {
    if constexpr (kCopies) {
      const int warp = static_cast<int>(threadIdx.x) / kWarp;
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      first_ = dynamic_memory() + warp * p.stages * p.stage_bytes + lane * kBytes;
      statistics_ = p.stage_bytes - kStatisticsBytes - lane * (kBytes - kStatisticBytes);
      for (int ahead = 0; ahead < p.stages - 1; ++ahead) {
        start(row + ahead * p.step, ahead);
      }
    }
  }

  // Waits for a row, which the functions below read; the next one is `step` rows after it. Returns
  // its statistics.
  __device__ __forceinline__ Statistics advance_to(int64_t row) {
    const Statistics loaded = copies_statistics() ? Statistics() : statistics_of(p_, row);
    if constexpr (kCopies) {
      const int last = p_.stages - 1;
      start(row + last * p_.step, stage_ == 0 ? last : stage_ - 1);
      at_ = first_ + stage_ * p_.stage_bytes;
      stage_ = stage_ == last ? 0 : stage_ + 1;
      if (last == 0) {
        cuda::cp_async_wait_group<0>();
      } else if (last == 1) {
        cuda::cp_async_wait_group<1>();
      } else {
        cuda::cp_async_wait_group<kMaxStages - 1>();
      }
    } else {
      row_ = row;
    }
    if (!copies_statistics()) {
      return loaded;
    }
    const auto* copied = reinterpret_cast<const float*>(at_ + statistics_);
    return {copied[0], copied[kWarp]};
  }
  // Waits for all copies.
  __device__ __forceinline__ void end() const {
    if constexpr (kCopies) {
      cuda::cp_async_wait_group<0>();
    }
  }
  // 0 in columns that do not exist, or if there is no such row or tensor.
  __device__ __forceinline__ Words<Z, kWidth> z(int vector) const {
    return at(p_.z, p_.dy.columns, 0, vector);
  }
  __device__ __forceinline__ Words<Z, kWidth> dy(int vector) const {
    return at(p_.dy, p_.dy.columns, 1, vector);
  }
  __device__ __forceinline__ Words<Z, kWidth> dz(int vector) const {
    return at(p_.dz, p_.dz.columns, 2, vector);
  }

 private:
  static constexpr int kBytes = 16;                             // of a vector
  static constexpr int kVectorBytes = kWarp * kBytes;           // of a warp's
  static constexpr int kTensorBytes = kVectors * kVectorBytes;  // of its part of a row
  static constexpr int kStatisticBytes = sizeof(float);

  __device__ __forceinline__ bool copies_statistics() const {
    return kMayCopyStatistics && p_.copies_statistics;
  }
  // Starts the copies of a row into a stage. Without dy, z is not needed: it may be infinite.
  __device__ __forceinline__ void start(int64_t row, int stage) const {
    char* to = first_ + stage * p_.stage_bytes;
    copy(p_.z, row, p_.dy.columns, to);
    copy(p_.dy, row, p_.dy.columns, to + kTensorBytes);
    if (p_.dz.columns > 0) {
      copy(p_.dz, row, p_.dz.columns, to + 2 * kTensorBytes);
    }
    if (copies_statistics()) {
      // Each thread has a copy of both; those of a warp are adjacent.
      const bool there = has_statistics(p_, row);
      char* statistics = to + statistics_;
      cuda::cp_async<kStatisticBytes>(statistics, p_.mean + row, there && p_.centred);
      cuda::cp_async<kStatisticBytes>(statistics + kWarp * kStatisticBytes, p_.rstd + row, there);
    }
    cuda::cp_async_commit_group();
  }
  __device__ __forceinline__ void copy(const RowsView& rows, int64_t row, int columns,
                                       char* to) const {
    const Z* from = row_of<Z>(rows, row) + columns_.first;
    const Columns here = columns_.of_row(row < p_.rows, columns);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      cuda::cp_async<kBytes>(to + v * kVectorBytes, from + v * columns_.step, here.has(v));
    }
  }
  __device__ __forceinline__ Words<Z, kWidth> at(const RowsView& rows, int columns, int tensor,
                                                 int vector) const {
    using Word = typename Words<Z, kWidth>::Word;
    Words<Z, kWidth> found;
    if constexpr (kCopies) {
      const char* from = at_ + tensor * kTensorBytes + vector * kVectorBytes;
      found.words[0] = *reinterpret_cast<const Word*>(from);
    } else {
      found.words[0] = {};
      if (columns_.of_row(row_ < p_.rows, columns).has(vector)) {
        load(row_of<Z>(rows, row_) + columns_.of(vector), found);
      }
    }
    return found;
  }

  const BackwardProblem& p_;
  const Columns& columns_;
  char *first_ = nullptr, *at_ = nullptr;  // this thread's in the first stage, and in the row's
  int statistics_ = 0;                     // from there to this thread's copies of statistics
  int stage_ = 0;                          // of the next row
  int64_t row_ = 0;
};

// Writes a block's sums of its columns: those of its rows are added in their order.
template <int kWidth, int kValues>
__device__ __forceinline__ void write_partials(const BackwardProblem& p, float* partials, int line,
                                               const RowThread& own, const Columns& columns,
                                               const float (&sums)[kValues]) {
  const RowsView lines = {partials, p.columns};
  if (p.tiling.rows > 1) {
    auto* shared = reinterpret_cast<float*>(dynamic_memory());
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

// kOwnDx: with a dx other than dsum, or dx_bias. A row or a tensor that is absent has no columns,
// so that its loads and stores need no branch.
template <class Z, class P, int kWidth, int kValues, bool kOwnDx>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_bwd_kernel(const BackwardProblem p) {
  constexpr int kVectors = kValues / kWidth;
  RowSum row_sum(p.tiling.threads, kRowsTogether);
  const auto columns_here = [&p](int block, const RowThread& own) {
    const int lane = block % p.strips * p.tiling.threads + own.lane;
    return columns_of_thread<kWidth, kValues, true>(p.tiling, lane, p.columns);
  };
  const Columns columns =
      columns_here(static_cast<int>(blockIdx.x), RowThread(p.tiling, kRowsTogether));
  float dweight[kValues] = {}, dbias[kValues] = {};
  float dx_bias[kOwnDx ? kValues : 1] = {};

  // Only where registers suffice.
  constexpr bool kKeepsWeights = sizeof(P) <= sizeof(Z);
  Words<P, kWidth> weights[kVectors];
  const auto load_weight = [&](int v) {
    weights[v] = parameter<P, kWidth>(columns.has(v) ? p.weight : nullptr, columns.of(v), 1.0f);
  };
  if (kKeepsWeights) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      load_weight(v);
    }
  }

  int64_t row =
      int64_t{blockIdx.x} / p.strips * p.tiling.rows + RowThread(p.tiling, kRowsTogether).row;
  RowRing<Z, kWidth, kValues> ring(p, columns, row);
  for (int pass = p.passes; pass > 0; --pass, row += p.step) {
    // Hidden, as the compiler would keep an address in each tensor in registers.
    asm volatile("" : "+l"(row));
    const Statistics of_row = ring.advance_to(row);
    float sums[2] = {};  // of g, and of its products with deviations from the mean
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!kKeepsWeights) {
        load_weight(v);
      }
      const Words<Z, kWidth> z = ring.z(v), dy = ring.dy(v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const int i = v * kWidth + j;
        const float d = widen(dy, j), g = d * widen(weights[v], j);
        const float deviation = widen(z, j) - of_row.mean;
        sums[0] += g;
        sums[1] += g * deviation;
        dweight[i] += d * (deviation * of_row.rstd);
        dbias[i] += d;
      }
    }
    if (p.strips == 1) {
      row_sum.add_up(sums);
    } else if (row < p.rows && p.row_sums) {
      sums[0] = p.row_sums[2 * row];
      sums[1] = p.row_sums[2 * row + 1];
    }
    // dsum = rstd * g - ((z - mean) * slope + shift)
    const float share = __fdividef(of_row.rstd, static_cast<float>(p.columns));
    const float slope = share * (of_row.rstd * sums[1]) * of_row.rstd;
    const float shift = p.centred ? share * sums[0] : 0.0f;
    const DroppedRow dropped(kOwnDx ? p.dropout : Dropout(), row);
    // Inputs are read again rather than kept: registers are full of sums.
    asm volatile("" ::: "memory");
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!kKeepsWeights) {
        load_weight(v);
      }
      const Words<Z, kWidth> z = ring.z(v), dy = ring.dy(v);
      float d[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const float g = widen(dy, j) * widen(weights[v], j);
        d[j] = of_row.rstd * g - fmaf(widen(z, j) - of_row.mean, slope, shift);
      }
      if (p.dz.columns > 0) {
        const Words<Z, kWidth> dz = ring.dz(v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          d[j] += widen(dz, j);
        }
      }
      Vector<Z, kWidth> rounded;
      narrow(d, rounded);
      if (columns.of_row(row < p.rows, p.dsum.columns).has(v)) {
        store(p.dsum, row, columns.of(v), rounded);
      }
      const bool has_dx = columns.of_row(row < p.rows, p.dx.columns).has(v);
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
        store(p.dx, row, columns.of(v), rounded);
      }
    }
  }

  ring.end();
  // Computed again, as the loop has no registers left: `block` hides that from the compiler.
  int block = static_cast<int>(blockIdx.x);
  asm volatile("" : "+r"(block));
  const RowThread own(p.tiling, kRowsTogether);
  const Columns written = columns_here(block, own);
  const auto write = [&](const ParameterGradient& gradient, const auto& sums) {
    if (gradient.result) {
      write_partials<kWidth>(p, gradient.partials, block / p.strips, own, written, sums);
    }
  };
  write(p.dweight, dweight);
  write(p.dbias, dbias);
  if constexpr (kOwnDx) {
    write(p.dx_bias, dx_bias);
  }
}

// The sums of g and of its products with deviations along rows of more than one strip, before the
// kernel above. A thread block computes a row.
template <class Z, class P, int kWidth, int kValues>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_row_sums_kernel(const BackwardProblem p) {
  const RowThread own(p.tiling);
  RowSum row_sum(p.tiling.threads);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const Statistics of_row = statistics_of(p, row);
    float sums[2] = {};
    for (int strip = 0; strip < p.strips; ++strip) {
      const Columns columns = columns_of_thread<kWidth, kValues, true>(
          p.tiling, strip * p.tiling.threads + own.lane, p.columns);
      Tile<Z, kWidth, kValues> z, dy;
      z.load(row_of<Z>(p.z, row) + columns.first, columns);
      dy.load(row_of<Z>(p.dy, row) + columns.first, columns);
#pragma unroll
      for (int v = 0; v < kValues / kWidth; ++v) {
        const auto weight =
            parameter<P, kWidth>(columns.has(v) ? p.weight : nullptr, columns.of(v), 1.0f);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float g = dy[v * kWidth + j] * widen(weight, j);
          sums[0] += g;
          sums[1] += g * (z[v * kWidth + j] - of_row.mean);
        }
      }
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
const char* norm_bwd(const BackwardProblem& problem, cuda::Stream stream) {
  using Z = typename TypeOf<kType>::Element;
  using P = typename TypeOf<kParameterType>::Element;
  constexpr int kVector = vector_width(kType);
  constexpr int kMax = backward_values(kType, kParameterType, true, false, kMaxColumns);
  constexpr int kSingles = backward_values(kType, kParameterType, false, false, 0);
  BackwardProblem p = problem;
  int shared_bytes = threads_of(p.tiling) * kSingles * static_cast<int>(sizeof(float));
  if (p.tiling.width > 1) {
    int most = 0;
    if (const char* failure = cuda::shared_memory(&most)) {
      return failure;
    }
    shared_bytes = plan_ring(p, most);
  }
  const auto run = [&](auto kernel, int64_t blocks, int shared) {
    return cuda::launch(kernel, blocks, threads_of(p.tiling), stream, p, shared);
  };
  // The sums along rows, and the gradients without and with a dx of its own. With one, a thread has
  // few values.
  const auto run_all = [&](auto row_sums, auto gradients, auto with_dx) {
    const char* failure = p.row_sums ? run(row_sums, p.rows, 0) : nullptr;
    const int64_t blocks = int64_t{p.lines} * p.strips;
    return failure ? failure : run(p.has_own_dx() ? with_dx : gradients, blocks, shared_bytes);
  };
  const char* failure = p.tiling.width == 1 ? run_all(norm_row_sums_kernel<Z, P, 1, kSingles>,
                                                      norm_bwd_kernel<Z, P, 1, kSingles, false>,
                                                      norm_bwd_kernel<Z, P, 1, kSingles, true>)
                        : p.tiling.values == kFewValues
                            ? run_all(norm_row_sums_kernel<Z, P, kVector, kFewValues>,
                                      norm_bwd_kernel<Z, P, kVector, kFewValues, false>,
                                      norm_bwd_kernel<Z, P, kVector, kFewValues, true>)
                            : run_all(norm_row_sums_kernel<Z, P, kVector, kMax>,
                                      norm_bwd_kernel<Z, P, kVector, kMax, false>,
                                      norm_bwd_kernel<Z, P, kVector, kFewValues, true>);
  return failure ? failure : sum_partials(p, stream);
}

}  // namespace fastattn::norm
