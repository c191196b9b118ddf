// A [batch, heads, rows, columns] tensor with contiguous columns, as kernels see it. Strides are in
// elements.
#pragma once

#include <cstdint>

namespace fastattn {

struct TensorView {
  void* data;
  int64_t batch_stride, head_stride, row_stride;
};

}  // namespace fastattn
