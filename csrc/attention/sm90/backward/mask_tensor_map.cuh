// Shared by the backward's launchers: the tensor map of an additive mask.
#pragma once

#include <cuda_runtime.h>

#include "attention/attention.h"
#include "attention/sm90/masks/dense_mask.cuh"
#include "sm90/tile/launch.cuh"
#include "sm90/tile/tensor_map.cuh"

namespace fastattn::attention {

using sm90::launch;

constexpr const char* kRefusedMap =
    "the driver refused a tensor map: addresses and strides must be multiples of 16 bytes";

// An additive mask as 16-bit columns. If it is broadcast over rows, its boxes have one row.
inline bool encode_bias(CUtensorMap* map, const DenseMask& mask, int queries, int keys,
                        int box_rows) {
  const int halves = mask.type == MaskType::kFloat32 ? 2 : 1;
  const int rows = mask.row_stride == 0 ? 1 : queries;
  return sm90::encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                 {const_cast<void*>(mask.data), mask.batch_stride * halves,
                                  mask.head_stride * halves, mask.row_stride * halves},
                                 {mask.layout.batches, mask.layout.heads, rows, keys * halves},
                                 rows > 1 ? box_rows : 1);
}

}  // namespace fastattn::attention
