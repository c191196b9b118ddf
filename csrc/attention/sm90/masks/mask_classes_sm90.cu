// Launches mask_classes_sm90.cuh.
#include "attention/sm90/masks/mask_classes_sm90.cuh"

namespace fastattn::attention {

const char* classify_mask(const DenseMask& mask, const LengthsAndBounds& limits, int queries,
                          int keys, cuda::Stream stream) {
  pack_mask_kernel<<<static_cast<unsigned>(plain_count(mask.layout)), kPackThreads, 0, stream>>>(
      mask, queries, keys);
  classify_mask_kernel<<<static_cast<unsigned>(class_count(mask.layout)), mask.layout.tile_rows, 0,
                         stream>>>(mask, limits, queries, keys);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
