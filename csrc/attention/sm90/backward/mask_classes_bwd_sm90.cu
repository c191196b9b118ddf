// Launches backward/mask_classes_bwd_sm90.cuh.
#include "attention/sm90/backward/mask_classes_bwd_sm90.cuh"

namespace fastattn::attention {

const char* classify_mask_for_backward(const DenseMask& mask, const LengthsAndBounds& limits,
                                       int queries, int keys, cuda::Stream stream) {
  if (const char* failure =
          classify_mask(transposed(mask), transposed(limits), keys, queries, stream)) {
    return failure;
  }
  const MaskLayout& layout = mask.layout;
  const int64_t blocks = int64_t{layout.class_batches} * layout.class_heads * layout.blocks;
  const int64_t grid = (blocks + kRankThreads - 1) / kRankThreads;
  rank_tiles_kernel<<<static_cast<unsigned>(grid), kRankThreads, 0, stream>>>(layout, mask.classes);
  const cudaError_t error = cudaGetLastError();
  return error ? cudaGetErrorString(error) : nullptr;
}

}  // namespace fastattn::attention
