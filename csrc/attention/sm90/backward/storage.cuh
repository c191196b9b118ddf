// Shared memory and barriers of the backward's main kernel.
#pragma once

#include "attention/sm90/backward/config.cuh"
#include "attention/sm90/backward/tiles.cuh"
#include "common/dropout.h"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::attention {

using sm90::Barrier;
using sm90::BulkBuffer;
using sm90::RingPosition;
using sm90::Slot;

template <class Traits, bool kSharesWeights = !Traits::kSplitsKeys>
struct WeightStage {
  typename Traits::ScoreTile tile;
};
template <class Traits>
struct WeightStage<Traits, false> {};

// Dropout: row keys of the block in the same slot of Q, loaded with Q, and for each warpgroup the
// column keys of its 64 keys.
template <class Traits, bool kDropout = Traits::kDropout>
struct DropoutRows {
  BulkBuffer<uint32_t, dropout::units(Traits::kRows)> rows[Traits::kStages];
  uint32_t columns[Traits::kGroups][dropout::units(kMmaRows)];
};
template <class Traits>
struct DropoutRows<Traits, false> {};

// Under a dense mask: metadata of the step in the same slot of Q, written before Q is loaded, and
// for each warpgroup which of its keys are live.
struct StepMetadata {
  Step step;
  bool last;
  uint32_t flags;
  uint32_t live[kMaxBlockWords];  // rows
};
template <class Traits, bool kDense = Traits::kDense>
struct StepMetadataRing {
  StepMetadata metadata[Traits::kStages];
  uint32_t live_keys[Traits::kGroups][Traits::kKeys / kWordKeys];
};
template <class Traits>
struct StepMetadataRing<Traits, false> {};

// An additive mask is loaded into the buffer that dS overwrites afterwards: for 64 keys, a block of
// rows takes as many bytes. In 32 bits these are 32 keys, and the other 32 are loaded into a second
// buffer: that of the previous step's dS, or else that of P. Full when TMA has written the groups
// of keys that the step's metadata names; `scores_read` completes when the dQ products of every
// warpgroup have read dS.
template <class Traits, bool kBias = Traits::kBias>
struct BiasBarriers {
  Barrier full[Traits::kStages];
  Barrier scores_read;
};
template <class Traits>
struct BiasBarriers<Traits, false> {};

template <class Traits>
struct BackwardStorage {
  typename Traits::KeyTile k, v;
  typename Traits::RowTile q[Traits::kStages], dout[Traits::kStages];
  typename Traits::ScoreTile ds[Traits::kStages];
  WeightStage<Traits> p;
  BulkBuffer<float, Traits::kChunkFloats> dq[Traits::kGroups];
  BulkBuffer<float, Traits::kRows> lse2[Traits::kStages], delta[Traits::kStages];

  // Full when TMA has written both tiles, or a tile and its rows' lse or delta; empty when one
  // thread of each consumer warpgroup has waited for the products that read it. The products with Q
  // are the last ones of a step: releasing Q releases dO and everything else of the step.
  Barrier kv_full;
  Slot q_slots[Traits::kStages];
  Barrier dout_full[Traits::kStages];
  // Full when the four warps have written, empty when the bulk addition has read.
  Slot dq_slots[Traits::kGroups];
  // Complete from the start: a wait that always passes, see weigh.
  Barrier passed;
  KeyBlock work;
  DropoutRows<Traits> dropout;
  StepMetadataRing<Traits> dense;
  BiasBarriers<Traits> bias;

  // The buffer of 64 keys of an additive mask, or of the first or second 32 of them.
  __device__ __forceinline__ char* bias_place(int stage, int keys_group, int half) {
    typename Traits::ScoreTile* tile = &ds[stage];
    if constexpr (Traits::kSplitsKeys) {
      tile = &ds[stage ^ half];
    } else if (half) {
      tile = &p.tile;
    }
    return reinterpret_cast<char*>(tile->data) + keys_group * Traits::ScoreTile::kChunkBytes;
  }
};

// Named barriers; 0 is __syncthreads.
constexpr int kScoresBarrier = 1;  // all warpgroups have written dS
constexpr int kGroupBarrier = 2;   // + warpgroup: syncs its four warps

}  // namespace fastattn::attention
