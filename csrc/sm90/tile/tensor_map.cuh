// TMA descriptors of [batch, heads, rows, columns] tensors, columns contiguous, of 16-bit elements
// or fp32.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/tensor_view.h"
#include "sm90/tile/descriptor.h"

namespace fastattn::sm90 {

struct TensorShape {
  int batch, heads, rows, columns;
};

namespace detail {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The encoder is in the driver, which is not linked.
inline EncodeTiled encoder() {
  static const EncodeTiled function = [] {
    constexpr unsigned kCudaVersion = 12000;
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &symbol, kCudaVersion, cudaEnableDefault, &found);
    const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<EncodeTiled>(symbol) : nullptr;
  }();
  return function;
}

}  // namespace detail

// Encodes a map whose boxes are `box_rows` rows of 128 bytes (a chunk), swizzled. TMA needs an
// address and strides that are multiples of 16 bytes. False if the driver refuses.
inline bool encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, const TensorView& view,
                              const TensorShape& shape, int box_rows) {
  const int element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  const detail::EncodeTiled encode = detail::encoder();
  if (!encode) {
    return false;
  }
  // The driver also checks the stride of a dimension of size 1, which is never used.
  const auto stride = [&](int64_t elements, int size) {
    return static_cast<cuuint64_t>(size == 1 ? kPieceBytes : elements * element_bytes);
  };
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(shape.columns), static_cast<cuuint64_t>(shape.rows),
      static_cast<cuuint64_t>(shape.heads), static_cast<cuuint64_t>(shape.batch)};
  const cuuint64_t strides[] = {stride(view.row_stride, shape.rows),
                                stride(view.head_stride, shape.heads),
                                stride(view.batch_stride, shape.batch)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kRowBytes / element_bytes),
                            static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return encode(map, type, 4, view.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace fastattn::sm90
