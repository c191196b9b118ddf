// The CPU kernels of the norms, compiled once for each instruction set.
//
// Forward: one row at a time stays in the L1 cache for three passes: sum; deviations from the mean,
// whose own sum also corrects the rounding of the first; result. Backward: a few rows together, so
// that a column's parameter gradients stay in registers over those rows. Every row's arithmetic is
// the same whatever the split over threads.
#include <cmath>

#include "cpu/row_dropout.h"
#include "cpu/simd.h"
#include "layer_norm/layer_norm.h"

namespace fastattn::norm::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

// Columns of a block of sums: rounding grows with the length of a chain of additions.
constexpr int kBlock = 1024;
// The backward processes wide rows together, so that a column's parameter gradients are loaded once
// for all of them. Narrow fp32 rows are processed one by one: the gradients stay in the L1 cache
// anyway, and fewer streams prefetch better (docs/pages/kernels/cpu.md).
constexpr int kRowsTogether = 4;
template <class Z>
constexpr int64_t kWide = sizeof(Z) == sizeof(float) ? 2048 : 0;

// -- helpers -------------------------------------------------------------------------------------
// Sums over a row the terms that body(lanes, column, Float (&terms)[kTerms]) adds. prepare(first,
// count) is called before each block of columns.
template <int kTerms, class Prepare, class Body>
inline __attribute__((always_inline)) void sum_row(int64_t columns, float (&sums)[kTerms],
                                                   const Prepare& prepare, const Body& body) {
  // Four chains hide the latency of an addition.
  Float total[kTerms] = {};
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int count = columns - first < kBlock ? static_cast<int>(columns - first) : kBlock;
    prepare(first, count);
    Float a[kTerms] = {}, b[kTerms] = {}, c[kTerms] = {}, d[kTerms] = {};
    int64_t i = first;
    const int64_t last = first + count;
    for (; i + 4 * kLanes <= last; i += 4 * kLanes) {
      body(Whole{}, i, a);
      body(Whole{}, i + kLanes, b);
      body(Whole{}, i + 2 * kLanes, c);
      body(Whole{}, i + 3 * kLanes, d);
    }
    for_vectors(last - i, [&](auto lanes, int64_t j) { body(lanes, i + j, a); });
    for (int t = 0; t < kTerms; ++t) {
      total[t] += (a[t] + b[t]) + (c[t] + d[t]);
    }
  }
  for (int t = 0; t < kTerms; ++t) {
    sums[t] = sum(total[t]);
  }
}

// -- forward -------------------------------------------------------------------------------------
template <class Z, class X, bool kCentred, bool kAdd, bool kDropout>
void forward_rows(const Forward& a, int64_t first_row, int64_t last_row) {
  const int64_t N = a.columns;
  const float scale = 1.0f / static_cast<float>(N);
  // Local copies, because the compiler must assume that stores alias `a`.
  const float *const weight = a.weight, *const bias = a.bias, *const x_bias = a.x_bias;
  const Dropout dropout = a.dropout;
  RowDropout<kBlock> mask;
  const auto nothing = [](int64_t, int) {};
  for (int64_t row = first_row; row < last_row; ++row) {
    Z* z = a.z.row<Z>(row);
    Z* y = a.y.row<Z>(row);
    float total[1];
    if constexpr (kAdd) {
      const X* x = a.x.row<X>(row);
      const Z* residual = a.residual.row<Z>(row);
      int64_t block = 0;
      const auto draw = [&](int64_t first, int count) {
        if constexpr (kDropout) {
          mask.draw(dropout, row, first, count);
          block = first;
        }
      };
      sum_row(N, total, draw, [&](auto lanes, int64_t c, Float(&terms)[1]) {
        Float v = lanes.load(x + c);
        if (x_bias) {
          v += lanes.load(x_bias + c);
        }
        if constexpr (kDropout) {
          v = mask.apply(dropout, v, c - block);
        }
        v += lanes.load(residual + c);
        lanes.store(z + c, v);
        terms[0] += rounded<Z>(v);
      });
    } else if constexpr (kCentred) {
      sum_row(N, total, nothing,
              [&](auto lanes, int64_t c, Float(&terms)[1]) { terms[0] += lanes.load(z + c); });
    }

    float mean = 0.0f, variance;
    if constexpr (kCentred) {
      mean = total[0] * scale;
      float deviations[2];  // their sum, and that of their squares
      sum_row(N, deviations, nothing, [&](auto lanes, int64_t c, Float(&terms)[2]) {
        const Float deviation = lanes.only(lanes.load(z + c) - mean);
        terms[0] += deviation;
        terms[1] = fma(deviation, deviation, terms[1]);
      });
      const float correction = deviations[0] * scale;
      mean += correction;
      variance = deviations[1] * scale - correction * correction;
      a.mean[row] = mean;
    } else {
      float squares[1];
      sum_row(N, squares, nothing, [&](auto lanes, int64_t c, Float(&terms)[1]) {
        const Float v = lanes.load(z + c);
        terms[0] = fma(v, v, terms[0]);
      });
      variance = squares[0] * scale;
    }
    const float rstd = 1.0f / std::sqrt(variance + a.eps);
    a.rstd[row] = rstd;

    for_vectors(N, [&](auto lanes, int64_t c) {
      Float v = lanes.load(z + c);
      if constexpr (kCentred) {
        v -= mean;
      }
      v *= rstd;
      const Float scaled = weight ? lanes.load(weight + c) : splat(1.0f);
      v = fma(v, scaled, bias ? lanes.load(bias + c) : Float{});
      lanes.store(y + c, v);
    });
  }
}

// -- backward ------------------------------------------------------------------------------------
// One partition's shares of the parameter gradients; null where not wanted.
struct Shares {
  float *dx_bias, *dweight, *dbias;
};

// share[c] += v, if it is wanted
template <class Lanes>
inline void add_to(Lanes lanes, float* share, int64_t c, Float v) {
  if (share) {
    lanes.store(share + c, lanes.load(share + c) + v);
  }
}

// With g = dy * weight and n = (z - mean) * rstd:  dsum = rstd * (g - average(g) - n * average(g *
// n)) + dz
template <class Z, class X, bool kCentred, bool kDropout, int kRows>
void backward_rows(const Backward& a, int64_t first_row, const Shares shares,
                   RowDropout<kBlock> (&mask)[kRows]) {
  const int64_t N = a.columns;
  const float* const weights = a.weight;
  const Dropout dropout = a.dropout;
  const bool has_dy(a.dy), has_dz(a.dz), wants_dsum(a.dsum), wants_dx(a.dx);
  const Z *dy[kRows], *dz[kRows], *z[kRows];
  Z* dsum[kRows];
  X* dx[kRows];
  float mean[kRows], rstd[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first_row + r;
    dy[r] = has_dy ? a.dy.row<Z>(row) : nullptr;
    dz[r] = has_dz ? a.dz.row<Z>(row) : nullptr;
    z[r] = a.z.row<Z>(row);
    dsum[r] = wants_dsum ? a.dsum.row<Z>(row) : nullptr;
    dx[r] = wants_dx ? a.dx.row<X>(row) : nullptr;
    mean[r] = kCentred ? a.mean[row] : 0.0f;
    rstd[r] = a.rstd[row];
  }

  float average_g[kRows] = {}, average_gn[kRows] = {};
  if (has_dy) {
    Float total_g[kRows] = {}, total_gn[kRows] = {};
    for (int64_t first = 0; first < N; first += kBlock) {
      const int64_t count = N - first < kBlock ? N - first : kBlock;
      Float block_g[kRows] = {}, block_gn[kRows] = {};
      for_vectors(count, [&](auto lanes, int64_t i) {
        const int64_t c = first + i;
        const Float weight = weights ? lanes.load(weights + c) : splat(1.0f);
        Float dweight = {}, dbias = {};
        for (int r = 0; r < kRows; ++r) {
          const Float d = lanes.load(dy[r] + c);
          const Float n = (lanes.load(z[r] + c) - mean[r]) * rstd[r];
          const Float g = d * weight;
          if constexpr (kCentred) {
            block_g[r] += g;
          }
          block_gn[r] = fma(g, n, block_gn[r]);
          dweight = fma(d, n, dweight);
          dbias += d;
        }
        add_to(lanes, shares.dweight, c, dweight);
        add_to(lanes, shares.dbias, c, dbias);
      });
      for (int r = 0; r < kRows; ++r) {
        total_g[r] += block_g[r];
        total_gn[r] += block_gn[r];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      average_g[r] = sum(total_g[r]) / static_cast<float>(N);
      average_gn[r] = sum(total_gn[r]) / static_cast<float>(N);
    }
  }
  if (!wants_dsum && !wants_dx && !shares.dx_bias) {
    return;
  }

  for (int64_t first = 0; first < N; first += kBlock) {
    const int count = N - first < kBlock ? static_cast<int>(N - first) : kBlock;
    if constexpr (kDropout) {
      for (int r = 0; r < kRows; ++r) {
        mask[r].draw(dropout, first_row + r, first, count);
      }
    }
    for_vectors(count, [&](auto lanes, int64_t i) {
      const int64_t c = first + i;
      const Float weight = weights ? lanes.load(weights + c) : splat(1.0f);
      Float dx_bias = {};
      for (int r = 0; r < kRows; ++r) {
        Float d = {};
        if (has_dy) {
          const Float n = (lanes.load(z[r] + c) - mean[r]) * rstd[r];
          const Float g = lanes.load(dy[r] + c) * weight;
          d = rstd[r] * fma(n, splat(-average_gn[r]), g - average_g[r]);
        }
        if (has_dz) {
          d += lanes.load(dz[r] + c);
        }
        if (wants_dsum) {
          lanes.store(dsum[r] + c, d);
        }
        if constexpr (kDropout) {
          d = mask[r].apply(dropout, d, i);
        }
        if (wants_dx) {
          lanes.store(dx[r] + c, d);
        }
        dx_bias += d;
      }
      add_to(lanes, shares.dx_bias, c, dx_bias);
    });
  }
}

template <class Z, class X, bool kCentred, bool kDropout>
void backward_partitions(const Backward& a, int64_t first_partition, int64_t last_partition) {
  for (int64_t partition = first_partition; partition < last_partition; ++partition) {
    float* sums = a.partials + partition * a.shares * a.columns;
    const auto share = [&](int index) { return index < 0 ? nullptr : sums + index * a.columns; };
    const Shares shares = {share(a.dx_bias_share), share(a.dweight_share), share(a.dbias_share)};
    if (a.shares > 0) {
      memset(sums, 0, sizeof(float) * a.shares * a.columns);
    }
    int64_t row = partition * a.partition_rows;
    const int64_t end = row + a.partition_rows < a.rows ? row + a.partition_rows : a.rows;
    RowDropout<kBlock> masks[kRowsTogether], mask[1];
    for (; a.columns >= kWide<Z> && row + kRowsTogether <= end; row += kRowsTogether) {
      backward_rows<Z, X, kCentred, kDropout, kRowsTogether>(a, row, shares, masks);
    }
    for (; row < end; ++row) {
      backward_rows<Z, X, kCentred, kDropout, 1>(a, row, shares, mask);
    }
  }
}

template <class T>
void reduce_share(const Backward& a, int64_t partitions, int share, T* result, int64_t first,
                  int64_t last) {
  const float* shares = a.partials + share * a.columns;
  for_vectors(last - first, [&](auto lanes, int64_t i) {
    const int64_t c = first + i;
    Float total = {};
    for (int64_t partition = 0; partition < partitions; ++partition) {
      total += lanes.load(shares + partition * a.shares * a.columns + c);
    }
    lanes.store(result + c, total);
  });
}

// -- entries: from run-time to compile-time types ------------------------------------------------
void forward(const Forward& a, int64_t first_row, int64_t last_row) {
  with_type(a.z_type, [&](auto z) {
    using Z = decltype(z);
    if (!a.add) {
      const auto run = a.centred ? forward_rows<Z, Z, true, false, false>
                                 : forward_rows<Z, Z, false, false, false>;
      return run(a, first_row, last_row);
    }
    with_type(a.x_type, [&](auto x) {
      using X = decltype(x);
      const auto run = a.dropout.threshold > 0 ? forward_rows<Z, X, true, true, true>
                                               : forward_rows<Z, X, true, true, false>;
      run(a, first_row, last_row);
    });
  });
}

void backward(const Backward& a, int64_t first_partition, int64_t last_partition) {
  with_type(a.z_type, [&](auto z) {
    using Z = decltype(z);
    if (!a.centred) {
      return backward_partitions<Z, Z, false, false>(a, first_partition, last_partition);
    }
    with_type(a.x_type, [&](auto x) {
      using X = decltype(x);
      const auto run = a.dropout.threshold > 0 ? backward_partitions<Z, X, true, true>
                                               : backward_partitions<Z, X, true, false>;
      run(a, first_partition, last_partition);
    });
  });
}

void reduce(const Backward& a, int64_t partitions, int share, void* result, DType type,
            int64_t first, int64_t last) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    reduce_share(a, partitions, share, static_cast<T*>(result), first, last);
  });
}

void to_float(const void* source, DType type, float* result, int64_t count) {
  with_type(type, [&](auto element) {
    const auto* from = static_cast<const decltype(element)*>(source);
    for_vectors(count,
                [&](auto lanes, int64_t c) { lanes.store(result + c, lanes.load(from + c)); });
  });
}

const Kernels kKernels = {forward, backward, reduce, to_float};

}  // namespace fastattn::norm::FASTATTN_ISA
