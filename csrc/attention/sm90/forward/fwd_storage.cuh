// Shared memory and barriers of the forward.
//
// mbarriers. Count: arrivals that complete a phase, one thread each, besides the bytes of copies.
// Parity: that of a waiter's first wait; 0 waits for the first completion, 1 does not wait. g: a
// consumer warpgroup. A wait for `passed` never blocks.
//
//   name                   who arrives                                count parity  who waits
//   q_slots[b][g].full     load warp, with the bytes of Q                 1      0  consumer g
//   q_slots[b][g].empty    consumer g, after the tile's last Q K^T        1      1  load warp
//   k_slots[s].full        load warp, with the bytes of K                 1      0  consumers
//                          (and of dropout's column keys)
//   k_slots[s].empty       every consumer, after Q K^T              kGroups      1  load warp
//   v_slots[s].full        load warp, with the bytes of V                 1      0  consumers
//   v_slots[s].empty       every consumer, after P V                kGroups      1  load warp
//   out_slots[g].full      warps of consumer g, after their stores        4      0  store warp g
//   out_slots[g].empty     store warp g, when TMA has read                1      1  consumer g
//   bias.slots[g][i].full  bias warp g, with the bytes of the mask        1      0  consumer g
//   bias.slots[g][i].empty warps of consumer g, after their reads         4      1  bias warp g
//   queue.slots[i].full    load warp, when it has written the tile        1      0  all others
//   queue.slots[i].empty   warps of consumers                      4 kGroups      1  load warp
//                          (and store or bias warps)               + kGroups
//   passed                 thread 0, before any thread waits              1      0  await_weights
//
// Named barriers (bar.sync, bar.arrive); 0 is __syncthreads.
//
//   number                who                                                 threads
//   kPingPongBarrier + g  consumer g waits until the one before has arrived   2 x 128
//   kGroupBarrier + g     the four warps of consumer g                            128
#pragma once

#include "attention/attention.h"
#include "attention/key_range.h"
#include "attention/sm90/forward/fwd_config.cuh"
#include "common/dropout.h"
#include "sm90/tile/pipeline.cuh"
#include "sm90/tile/shared_tile.cuh"
#include "sm90/tile/tile_queue.cuh"

namespace fastattn::attention {

using sm90::Barrier;
using sm90::BulkBuffer;
using sm90::kWarp;
using sm90::Slot;
using sm90::TileQueue;

constexpr int kPingPongBarrier = 1;
constexpr int kGroupBarrier = 4;
constexpr int kWarpsPerGroup = kWarpgroup / kWarp;

template <class Traits, bool kStagesOutput = Traits::kStagesOutput>
struct OutputStage {
  typename Traits::QueryTile tiles[Traits::kGroups];
};
template <class Traits>
struct OutputStage<Traits, false> {};

// Dropout's column keys of a block.
template <class Traits, bool kDropout = Traits::kDropout>
struct DropoutKeys {
  BulkBuffer<uint32_t, dropout::units(Traits::kBlock)> columns[Traits::kMetadataSlots];
};
template <class Traits>
struct DropoutKeys<Traits, false> {};

// Under a dense mask: metadata of a block and of the next one.
struct BlockMetadata {
  int block, next;  // -1: the tile's last block
  uint32_t flags, next_flags;
  uint32_t live[kMaxBlockWords];
};
template <class Traits, bool kDense = Traits::kDense>
struct BlockMetadataRing {
  BlockMetadata metadata[Traits::kMetadataSlots];
};
template <class Traits>
struct BlockMetadataRing<Traits, false> {};

// An additive mask: a ring for each warpgroup.
struct alignas(sm90::kTileAlignment) BiasPiece {
  char bytes[kMmaRows * sm90::kRowBytes];
};
template <class Traits, bool kBias = Traits::kBias>
struct BiasRings {
  BiasPiece pieces[Traits::kGroups][Traits::kBiasPieces];
  Slot slots[Traits::kGroups][Traits::kBiasPieces];
};
template <class Traits>
struct BiasRings<Traits, false> {};

template <class Traits>
struct SharedStorage {
  typename Traits::QueryTile q[Traits::kQueryBuffers][Traits::kGroups];
  typename Traits::KeyTile k[Traits::kStages], v[Traits::kStages];
  BiasRings<Traits> bias;
  OutputStage<Traits> out;  // after the aligned members: an empty one takes a byte

  Slot q_slots[Traits::kQueryBuffers][Traits::kGroups];
  Slot k_slots[Traits::kStages], v_slots[Traits::kStages];
  Slot out_slots[Traits::kGroups];
  TileQueue queue;
  Barrier passed;
  DropoutKeys<Traits> dropout;
  BlockMetadataRing<Traits> dense;
#ifdef FASTATTN_TRIAL_FWD_PLAN
  // Plans of all warpgroups for the tiles in the queue.
  BlockPlan plans[TileQueue::kSlots][Traits::kGroups];
#endif
};

template <class Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& shared) {
  for (auto& buffer : shared.q_slots) {
    for (Slot& slot : buffer) {
      slot.full.init(1);
      slot.empty.init(1);
    }
  }
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    for (Slot* slot : {&shared.k_slots[stage], &shared.v_slots[stage]}) {
      slot->full.init(1);
      slot->empty.init(Traits::kGroups);
    }
  }
  for (Slot& slot : shared.out_slots) {
    slot.full.init(kWarpsPerGroup);
    slot.empty.init(1);
  }
  if constexpr (Traits::kBias) {
    for (auto& ring : shared.bias.slots) {
      for (Slot& slot : ring) {
        slot.full.init(1);
        slot.empty.init(kWarpsPerGroup);
      }
    }
  }
  constexpr bool kHasHelper = Traits::kStagesOutput || Traits::kBias;
  if constexpr (Traits::kPinsExponentials) {
    shared.passed.init(1);
    shared.passed.arrive();
  }
  shared.queue.init(Traits::kGroups * (kWarpsPerGroup + (kHasHelper ? 1 : 0)));
  ptx::fence_mbarrier_init();
}

}  // namespace fastattn::attention
