// Shared memory and barriers of a product.
//
// mbarriers. Count: arrivals that complete a phase, one thread each, besides the bytes of copies.
// Parity: that of a waiter's first wait; 0 waits for the first completion, 1 does not wait. g: a
// consumer warpgroup.
//
//   name           who arrives                                    count  parity  who waits
//   full[s][g]     load thread, with the bytes of a and b             1       0  consumer g, or
//   both empty[s]       the consumer whose tile it is (ping-pong),         1       1  load thread
//                  or both, when wgmma has read                 kGroups
//
// In ping-pong each consumer has barriers `full` of its own, of which it sees every phase: parities
// would not tell a phase of the other's tiles from one of its own.
//
//   loaded[g][w]   lane 0 of warp w of consumer g, with the            1       0  this warp
//       [slot]     bytes of a box
//
// Named barriers (bar.sync, bar.arrive); 0 is __syncthreads.
//
//   number                who                                                        threads
//   kPingPongBarrier + g  consumer g waits until the other has issued its last       2 x 128
//                         wgmma of the tile before
//   kSumsBarrier + g      the four warps of consumer g, between writing and adding       128
//                         sums
#pragma once

#include "ffn/sm90/config.cuh"
#include "ffn/sm90/operand.cuh"

namespace fastattn::ffn {

constexpr int kPingPongBarrier = 1;
constexpr int kSumsBarrier = 3;

// Sums of a tile's columns over the rows of each warp.
template <int kColumns>
struct WarpSums {
  float of[kGroups][kWarpsPerGroup][kColumns];
};
template <>
struct WarpSums<0> {};

// A box of an epilogue, swizzled.
struct alignas(sm90::kTileAlignment) Box {
  char data[kBoxBytes];

  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(data); }
};

template <int kSlots>
struct ActivatedBoxes {
  Box of[kGroups][kWarpsPerGroup][kSlots];
};
template <>
struct ActivatedBoxes<0> {};

template <class Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  using TileA = OperandTile<Element, kTileRows, Traits::kConfig.major_of_a>;
  using TileB = OperandTile<Element, Traits::kColumns, Traits::kConfig.major_of_b>;

  TileA a[Traits::kStages];
  TileB b[Traits::kStages];
  Box results[kGroups][kWarpsPerGroup][Traits::kSlots][Traits::kPairs];
  ActivatedBoxes<Traits::kActivatedSlots> activated;
  Barrier full[Traits::kStages][Traits::kPingPong ? kGroups : 1];
  Barrier empty[Traits::kStages];
  Barrier loaded[kGroups][kWarpsPerGroup][Traits::kSlots];
  WarpSums<Traits::kSumColumns> sums;
};

template <class Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (int slot = 0; slot < Traits::kStages; ++slot) {
    for (Barrier& full : shared.full[slot]) {
      full.init(1);
    }
    shared.empty[slot].init(Traits::kPingPong ? 1 : kGroups);
  }
  if constexpr (Traits::kLoads) {
    for (auto& of_group : shared.loaded) {
      for (auto& of_warp : of_group) {
        for (Barrier& loaded : of_warp) {
          loaded.init(1);
        }
      }
    }
  }
  ptx::fence_mbarrier_init();
}

}  // namespace fastattn::ffn
