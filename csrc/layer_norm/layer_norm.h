// Layer norm, root-mean-square norm and their fusion with dropout and a residual: the arguments of
// the CPU kernels.
//
//   z = residual + dropout(x + x_bias)     (add only; otherwise z is the input)
//   y = (z - mean) * rstd * weight + bias  (root-mean-square: no mean, no bias)
//
// Parameters (weight, bias, x_bias) are float vectors here, null where absent; activations come in
// any DType.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cpu/dispatch.h"
#include "cpu/row_dropout.h"

namespace fastattn::norm {

// Rows of a tensor: contiguous inside, and two strides (in elements) from row to row, which covers
// every view of a [A, B, columns] tensor whose last dimension is contiguous.
struct Rows {
  void* data = nullptr;
  int64_t inner = 0;  // rows per step of the outer stride
  int64_t stride = 0;
  int64_t outer_stride = 0;

  template <class T>
  T* row(int64_t r) const {
    T* base = static_cast<T*>(data);
    if (r < inner) {
      return base + r * stride;
    }
    return base + (r / inner) * outer_stride + (r % inner) * stride;
  }
  explicit operator bool() const { return data != nullptr; }
};

struct Forward {
  int64_t rows, columns;
  DType z_type;
  bool centred;  // false: root-mean-square
  float eps;
  Rows z, y;
  const float *weight, *bias;
  float *mean, *rstd;  // [rows]; mean is null for root-mean-square

  // Add only.
  bool add = false;
  DType x_type = DType::kFloat32;
  Rows x, residual;
  const float* x_bias = nullptr;
  Dropout dropout;
};

// The backward pass works on partitions of `partition_rows` rows, which do not depend on the number
// of threads: each leaves its share of the parameter gradients in `partials`, and `reduce` adds the
// shares in order.
struct Backward {
  int64_t rows, columns, partition_rows;
  DType z_type;
  bool centred;
  Rows dy, dz;  // gradients of y and of z's other use; either may be absent
  Rows z;
  const float* weight;
  const float *mean, *rstd;
  Rows dsum;  // gradient of z, in z's dtype: the input's or the residual's gradient; may be absent

  // Add only.
  DType x_type = DType::kFloat32;
  Rows dx;  // gradient of x, in x's dtype; may be absent
  Dropout dropout;

  // [partitions][shares][columns]; the wanted shares are numbered in this order, the others are -1.
  float* partials = nullptr;
  int shares = 0;
  int dx_bias_share = -1, dweight_share = -1, dbias_share = -1;
};

struct Kernels {
  void (*forward)(const Forward&, int64_t first_row, int64_t last_row);
  void (*backward)(const Backward&, int64_t first_partition, int64_t last_partition);
  // result[c] = sum of the partitions' share, for columns [first, last)
  void (*reduce)(const Backward&, int64_t partitions, int share, void* result, DType type,
                 int64_t first, int64_t last);
  void (*to_float)(const void* source, DType type, float* result, int64_t count);
};

FASTATTN_DISPATCH(Kernels)

}  // namespace fastattn::norm
