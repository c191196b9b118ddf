// Shared memory and barriers of the forward.
#pragma once

#include "attention/attention.h"
#include "attention/sm90/forward/config.cuh"
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

  // Q, K, V: full when TMA has written the bytes, empty when one thread of every warpgroup that
  // reads them has waited for its products. Out: full when the four warps have written, empty when
  // the TMA store has read.
  Slot q_slots[Traits::kQueryBuffers][Traits::kGroups];
  Slot k_slots[Traits::kStages], v_slots[Traits::kStages];
  Slot out_slots[Traits::kGroups];
  TileQueue queue;
  // Complete from the start: a wait that always passes, see await_weights.
  Barrier passed;
  DropoutKeys<Traits> dropout;
  BlockMetadataRing<Traits> dense;
};

// Named barriers; 0 is __syncthreads.
constexpr int kPingPongBarrier = 1;  // + warpgroup: it may issue
constexpr int kGroupBarrier = 4;     // + warpgroup: syncs its four warps
constexpr int kWarpsPerGroup = kWarpgroup / kWarp;

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
