// The tensor maps of machine.h, with the driver's demands on addresses and strides.
#pragma once

#include "common/tensor_view.h"
#include "machine.h"

namespace fastattn::sm90 {

struct TensorShape {
  int batch, heads, rows, columns;
};

inline bool encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, const TensorView& view,
                              const TensorShape& shape, int box_rows) {
  const int64_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const on_host::Map result = {
      static_cast<char*>(view.data),
      {shape.columns, shape.rows, shape.heads, shape.batch},
      {bytes, bytes * view.row_stride, bytes * view.head_stride, bytes * view.batch_stride},
      box_rows};
  for (int d = 1; d < 4; ++d) {
    if (result.sizes[d] > 1 && (result.strides[d] <= 0 || result.strides[d] % 16)) {
      return false;
    }
  }
  std::memcpy(map, &result, sizeof(result));
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && box_rows <= 256;
}

}  // namespace fastattn::sm90
