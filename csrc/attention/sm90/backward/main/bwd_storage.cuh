// Shared memory and barriers of the backward's main kernel.
//
// mbarriers. Count: arrivals that complete a phase, one thread each, besides the bytes of copies.
// Parity: that of a waiter's first wait; 0 waits for the first completion, 1 does not wait. g: a
// consumer warpgroup. A wait for `passed` never blocks.
//
//   name              who arrives                                  count parity  who waits
//   kv_full           load warp, with the bytes of K, and of V         2      0  consumers
//   q_slots[s].full   load warp, with the bytes of Q (and of           2      0  consumers
//                     dropout's row keys), and of lse
//   q_slots[s].empty  every consumer, after the step's products  kGroups      1  load warp
//   dout_full[s]      load warp, with the bytes of dO, of delta        2      0  consumers
//   dout_empty        every consumer, after its dV products      kGroups      1  load warp
//                     with fewer buffers of dO than of Q
//   dq_slots[g].full  warps of consumer g, after a piece's stores      4      0  dQ warp g
//   dq_slots[g].empty dQ warp g, when the addition has read            1      1  consumer g
//   bias.full[s]      load warp, with the bytes of the mask            1      0  consumers that add
//   bias.scores_read  every consumer, after its dQ products      kGroups      1  load warp or,
//                     with 32-bit masks and kSplitsKeys                          without TMA,
//                                                                                consumers
//   passed            thread 0, before any thread waits                1      0  weigh
//
// The products with Q are the last ones of a step: releasing Q releases everything else that the
// step has loaded, which therefore has no barrier `empty`; except dO and delta, of which there is
// one buffer where there are two of Q.
//
// Named barriers (bar.sync); 0 is __syncthreads.
//
//   number             who arrives and waits                      threads
//   kScoresBarrier     all consumers: dS has been written;  kGroups x 128
//                      before that, with two buffers of Q: P and dS have been read
//   kGroupBarrier + g  the four warps of consumer g                   128
#pragma once

#include "attention/sm90/backward/bwd_config.cuh"
#include "attention/sm90/backward/bwd_tiles.cuh"
#include "common/dropout.h"
#include "sm90/tile/pipeline.cuh"

namespace fastattn::attention {

namespace ptx = sm90::ptx;

using sm90::Barrier;
using sm90::BulkBuffer;
using sm90::RingPosition;
using sm90::Slot;

constexpr int kScoresBarrier = 1;
constexpr int kGroupBarrier = 2;

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
// buffer: that of the previous step's dS, or else that of P.
template <class Traits, bool kBias = Traits::kBias>
struct BiasBarriers {
  Barrier full[Traits::kStages];
  Barrier scores_read;
};
template <class Traits>
struct BiasBarriers<Traits, false> {};

// The trial bwd_persistent.
//   slots[i].full   load warp, after the block of keys in works[i]      1      0  all other roles
//   slots[i].empty  every warp of consumers and every dQ warp,   5 kGroups     1  load warp
//                   when it has finished with the block of keys
//   kv_empty        every consumer, after its last products        kGroups     1  load warp
template <class Traits, bool kPersistent = Traits::kPersistent>
struct WorkBarriers {
  Slot slots[Traits::kWorks];
  Barrier kv_empty;
  // Steps of all blocks of keys before the one in works[i], and the parity of those with steps.
  int steps[Traits::kWorks];
  uint32_t parity[Traits::kWorks];
};
template <class Traits>
struct WorkBarriers<Traits, false> {};

template <class Traits>
struct BackwardStorage {
  typename Traits::KeyTile k, v;
  typename Traits::RowTile q[Traits::kStages], dout[Traits::kDoutStages];
  typename Traits::ScoreTile ds[Traits::kDoutStages];
  WeightStage<Traits> p;
  BulkBuffer<float, Traits::kPieceFloats> dq[Traits::kGroups];
  BulkBuffer<float, Traits::kRows> lse2[Traits::kStages], delta[Traits::kDoutStages];

  Barrier kv_full;
  Slot q_slots[Traits::kStages];
  Barrier dout_full[Traits::kDoutStages];
  Barrier dout_empty;
  Slot dq_slots[Traits::kGroups];
  Barrier passed;
  KeyBlock works[Traits::kWorks];
  DropoutRows<Traits> dropout;
  StepMetadataRing<Traits> dense;
  BiasBarriers<Traits> bias;
  WorkBarriers<Traits> persistent;

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

template <class Traits>
__device__ __forceinline__ void init_barriers(BackwardStorage<Traits>& shared) {
  constexpr int kTwoLoads = 2;
  shared.kv_full.init(kTwoLoads);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    shared.q_slots[stage].full.init(kTwoLoads);
    shared.q_slots[stage].empty.init(Traits::kGroups);
  }
  for (Barrier& full : shared.dout_full) {
    full.init(kTwoLoads);
  }
  shared.dout_empty.init(Traits::kGroups);
  for (Slot& slot : shared.dq_slots) {
    slot.full.init(kWarpsPerGroup);
    slot.empty.init(1);
  }
  if constexpr (Traits::kBias) {
    for (Barrier& full : shared.bias.full) {
      full.init(1);
    }
    if (Traits::kSplitsKeys) {
      shared.bias.scores_read.init(Traits::kGroups);
    }
  }
  if constexpr (Traits::kPersistent) {
    for (Slot& slot : shared.persistent.slots) {
      slot.full.init(1);
      slot.empty.init(Traits::kGroups * (kWarpsPerGroup + 1));
    }
    shared.persistent.kv_empty.init(Traits::kGroups);
  }
  shared.passed.init(1);
  shared.passed.arrive();
  ptx::fence_mbarrier_init();
}

}  // namespace fastattn::attention
