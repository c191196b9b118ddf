// The tile shapes of the products and the constants derived from them. Read this file first; the
// overview of the kernel is in ffn_product_sm90.cuh.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ffn/sm90/ffn_sm90.h"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::ffn {

namespace ptx = sm90::ptx;
using sm90::kMmaK;
using sm90::kMmaRows;
using sm90::kWarp;
using sm90::kWarpgroup;

constexpr int kHopper = 90;
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr int kWarpsPerGroup = kWarpgroup / kWarp;
// Two warpgroups compute.
constexpr int kGroups = 2;
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
// Registers per thread after setmaxnreg; the launch has 504 for three threads.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
static_assert(kDepth == sm90::kChunkColumns, "128 bytes, the width of the swizzle");

// Box that TMA loads and stores for an epilogue: 128 bytes of each of a warp's 16 rows.
constexpr int kBoxBytes = sm90::kWarpRows * sm90::kRowBytes;
template <class Value>
struct BoxOf {
  static constexpr int kColumns = sm90::kRowBytes / static_cast<int>(sizeof(Value));
};

template <DType kType>
struct TypeOf;
template <>
struct TypeOf<DType::kBFloat16> {
  using Element = __nv_bfloat16;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
};
template <>
struct TypeOf<DType::kFloat16> {
  using Element = __half;
  static constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
};

struct ProductConfig {
  // Ping-pong: each warpgroup computes tiles of its own, and one's epilogue runs while the other
  // multiplies. Otherwise both share a tile, which may be wider: fewer bytes of operands. For dx
  // that is faster by up to 6 % (H200).
  bool ping_pong;
  int columns;                 // of a tile
  int major_of_a, major_of_b;  // kMajorN: the summed dimension is not the contiguous one
};

constexpr ProductConfig product_config(Step step) {
  using ptx::kMajorK, ptx::kMajorN;
  switch (step) {
    case Step::kUp:
    case Step::kUpGated:
    case Step::kDown:
      return {true, 128, kMajorK, kMajorK};
    case Step::kDhidden:
    case Step::kDhiddenGated:
      return {true, 128, kMajorK, kMajorN};
    case Step::kDx:
      return {false, 256, kMajorK, kMajorN};
    case Step::kDw:
      return {false, kDwColumns, kMajorN, kMajorN};
  }
  return {};
}

template <class ElementType, Step kOfStep>
struct ProductTraits {
  using Element = ElementType;
  static constexpr Step kStep = kOfStep;
  static constexpr ProductConfig kConfig = product_config(kStep);
  static constexpr bool kUp = kStep == Step::kUp || kStep == Step::kUpGated;
  static constexpr bool kDhidden = kStep == Step::kDhidden || kStep == Step::kDhiddenGated;
  static constexpr bool kGated = is_gated(kStep);
  // A tile of b has rows of the gate, then those of up.
  static constexpr bool kPairsRows = kStep == Step::kUpGated;
  static constexpr bool kPingPong = kConfig.ping_pong;
  static constexpr int kColumns = kConfig.columns;
  static constexpr int kOutColumns = kPairsRows ? kColumns / 2 : kColumns;
  // Blocks of 64 rows that a warpgroup computes.
  static constexpr int kBlocks = kTileRows / kMmaRows / (kPingPong ? 1 : kGroups);
  static constexpr int kStages = 4;
  // The epilogue (epilogue.cuh). Results beside each other: gate and up, or one.
  static constexpr int kPairs = kGated ? 2 : 1;
  // Whether TMA loads hidden or the residual.
  static constexpr bool kLoads = kDhidden || kStep == Step::kDown;
  // Whether the result may be fp32; the residual is then, too.
  static constexpr bool kMayBeFloat = kStep == Step::kDown || kStep == Step::kDw;
  static constexpr bool kActivates = kUp || kDhidden;
  // Boxes of a warp in shared memory: those with what is loaded and the result that replaces it,
  // and those with the activation.
  static constexpr int kSlots = kLoads && !kGated ? 4 : 2;
  static constexpr int kActivatedSlots = kUp ? 2 : kDhidden ? 1 : 0;
  // Columns that are summed.
  static constexpr int kSumColumns = kDhidden ? kColumns * kPairs : 0;

  static_assert(kBlocks * kColumns == 256, "128 sums per thread");
};

}  // namespace fastattn::ffn
