// Shared memory of the backward's main kernel, and the barriers that its roles meet at.
#pragma once

#include "attention/sm90/backward/config.cuh"
#include "attention/sm90/backward/tiles.cuh"
#include "common/dropout.h"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::attention {

using sm90::Barrier;
using sm90::RingPosition;
using sm90::Slot;

template <class Traits, bool kSharesWeights = !Traits::kSplitsKeys>
struct WeightStage {
  typename Traits::ScoreTile tile;
};
template <class Traits>
struct WeightStage<Traits, false> {};

// Dropout's row keys of the block that lies in the same slot of Q, with which they come, and for
// each warpgroup the column keys of its 64 keys.
template <class Traits, bool kDropout = Traits::kDropout>
struct DropoutRows {
  alignas(16) uint32_t rows[Traits::kStages][dropout::units(Traits::kRows)];
  uint32_t columns[Traits::kGroups][dropout::units(kMmaRows)];
};
template <class Traits>
struct DropoutRows<Traits, false> {};

// Under a dense mask: the step in the same slot of Q, with which it comes, and for each warpgroup
// which of its keys some row may attend.
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

// An additive mask comes into the place that dS takes afterwards: a block of rows of 64 keys has as
// many bytes there. In 32 bits that is 32 keys, and the other 32 come into a second place: where dS
// of the step before was, or else where P comes. Full when TMA has brought what the step's metadata
// says; `scores_read` when the dQ products of every warpgroup have read dS.
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
  alignas(16) float dq[Traits::kGroups][Traits::kChunkFloats];
  alignas(16) float lse2[Traits::kStages][Traits::kRows], delta[Traits::kStages][Traits::kRows];

  // Full when TMA has brought the bytes of both tiles, or of a tile and its rows' statistics; empty
  // when one thread of each consumer warpgroup has seen the products that read it complete. Those
  // with Q are a step's last: who hands it back hands back dO, and whatever else the step had.
  Barrier kv_full;
  Slot q_slots[Traits::kStages];
  Barrier dout_full[Traits::kStages];
  // Full when the four warps have written, empty when the addition has read.
  Slot dq_slots[Traits::kGroups];
  // Complete from the start: a wait that always passes, see weigh.
  Barrier passed;
  KeyBlock work;
  DropoutRows<Traits> dropout;
  StepMetadataRing<Traits> dense;
  BiasBarriers<Traits> bias;

  // Where 64 keys of an additive mask lie, or the first or second 32 of them.
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
constexpr int kGroupBarrier = 2;   // + warpgroup: its four warps meet

}  // namespace fastattn::attention
