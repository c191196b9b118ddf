// A step's tile of an operand in shared memory: kExtent rows of a (or columns of b^T) times 64 of
// the summed dimension, swizzled as TMA writes it and wgmma reads it.
//
// With the summed dimension contiguous (kMajorK) the tile is one chunk of kExtent rows of 128
// bytes. Otherwise it consists of chunks of 64 x 64, one after the other along the extent: the
// operand of a weight's gradient is read where it is, and its descriptors say "transposed".
#pragma once

#include "ffn/sm90/config.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/tile/descriptor.h"

namespace fastattn::ffn {

using sm90::Barrier;

template <class Element, int kExtentOfTile, int kMajorOfTile>
struct alignas(sm90::kTileAlignment) OperandTile {
  static constexpr int kExtent = kExtentOfTile, kMajor = kMajorOfTile;
  static constexpr bool kTransposed = kMajor == ptx::kMajorN;
  static constexpr int kChunkBytes = kDepth * sm90::kRowBytes;
  static constexpr int kBytes = kExtent * sm90::kRowBytes;
  static_assert(kDepth == sm90::kChunkColumns && kExtent % kDepth == 0);

  Element data[kExtent * kDepth];

  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(data); }

  // One thread: starts the copies, whose bytes `full` must expect. `boxes` copies of kExtent /
  // boxes rows each, the rows of which begin `apart` from each other; one copy for each chunk if
  // transposed. Outside the matrix there are zeros.
  __device__ __forceinline__ void load(const CUtensorMap* map, Barrier& full, int first, int depth,
                                       int boxes, int apart, uint64_t policy) {
    const int count = kTransposed ? kExtent / kDepth : boxes;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int column = kTransposed ? first + i * kDepth : depth;
      const int row = kTransposed ? depth : first + i * apart;
      ptx::cp_async_bulk_tensor_load(address() + i * (kBytes / count), map, full.address(), column,
                                     row, 0, 0, policy);
    }
  }

  // The matrix descriptor of the tile's first wgmma operand.
  __device__ __forceinline__ uint64_t descriptor() const {
    return kTransposed ? sm90::descriptor_n_major(address(), kChunkBytes)
                       : sm90::descriptor_k_major(address());
  }
  // Bytes from there to the `step`-th 16 of the summed dimension, and to the next 64 of the extent.
  static __device__ __forceinline__ uint32_t step_bytes(int step) {
    return kTransposed ? sm90::n_major_step(step) : sm90::k_major_step(step, kExtent);
  }
  static constexpr int kBlockBytes = kChunkBytes;
};

// Rows of a tensor map's boxes.
template <class Tile>
constexpr int box_rows(int boxes) {
  return Tile::kTransposed ? kDepth : Tile::kExtent / boxes;
}

}  // namespace fastattn::ffn
