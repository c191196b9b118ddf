// The arguments of the kernel of the gradient of a bias by distance, its shared memory and
// barriers; what a thread block computes, as a sum of items. All warp roles call the same
// functions. See distance.cuh.
#pragma once

#include "attention/key_range.h"
#include "attention/sm90/backward/bwd_tiles.cuh"
#include "attention/sm90/backward/dmask/dmask_tiles.cuh"
#include "attention/sm90/masks/score_modifications.cuh"

namespace fastattn::attention {

// kBlockRows: of the main kernel, which lse and delta are padded to.
template <class ElementType, int kDim, Variant kVariant>
struct DistanceTraits : DmaskTraits<ElementType, kDim, kVariant> {
  static constexpr bool kMask = is_dense(kVariant);
  static constexpr int kBlockRows = backward_rows(kDim, true);
  static_assert(kDmaskRows % kDmaskKeys == 0, "the tiles of a band begin at the same distances");
};

// mbarriers, as in bwd_storage.cuh.
//
//   name             who arrives                                      count parity  who waits
//   slots[s].full    load warp, with the bytes of each of four tiles      4      0  consumers
//   slots[s].empty   every consumer, after its products             kGroups      1  load warp
//
// Named barrier kDistanceSumBarrier: all consumers, before sums are stored and when they have been.
constexpr int kDistanceSumBarrier = 1;

template <class Traits>
struct DistanceStorage {
  DmaskTiles<Traits> tiles[Traits::kStages];
  DmaskSum<Traits> sum;
  Slot slots[Traits::kStages];
};

template <class Traits>
__device__ __forceinline__ void init_distance_barriers(DistanceStorage<Traits>& shared) {
  constexpr int kTileLoads = 4;
  for (Slot& slot : shared.slots) {
    slot.full.init(kTileLoads);
    slot.empty.init(Traits::kGroups);
  }
  ptx::fence_mbarrier_init();
}

// Arguments of the main kernel; tensor maps have boxes of this kernel's tiles.
struct DistanceArguments : BackwardArguments {
  DistanceGradient gradient;
  int sequences;  // or batch entries
};

// A thread block: a band of distances of a head, of one sequence or of all. A tile of 128 rows and
// 64 keys belongs to the band that has its distances; the next tile of the band begins 128 rows and
// 128 keys later. Where a tile's first pair has entry n of distance_bias, the band is n / 64,
// rounded down, and `shift` the rest.
struct DistanceWork {
  int head, band;
  Range sequences;
};
__device__ __forceinline__ DistanceWork distance_work_of(const DistanceArguments& args,
                                                         int number) {
  const DistanceGradient& gradient = args.gradient;
  const int band = number % gradient.bands;
  number /= gradient.bands;
  const int batch = number / args.heads;
  const Range sequences =
      gradient.batches == 1 ? Range{0, args.sequences} : Range{batch, batch + 1};
  return {number - batch * args.heads, kFirstBand + band, sequences};
}

// Calls `visit` with each tile of the work that has an allowed pair, but for a dense mask: its
// sequence, first row, first key and shift.
template <class Traits, class Visit>
__device__ __forceinline__ void visit_tiles(const DistanceArguments& args, const DistanceWork& work,
                                            Visit visit) {
  constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys;
#pragma unroll 1
  for (int number = work.sequences.begin; number < work.sequences.end; ++number) {
    const Sequence sequence = sequence_of(args, number, Traits::kBlockRows);
    const int first =
        args.modifications.bias.first - (args.own_diagonals ? sequence.keys - sequence.queries : 0);
    // Rounds down below 0, too: first is at least -1.
    const int blocks = (first + kKeys) / kKeys - 1, shift = first - blocks * kKeys;
    int key = (work.band - blocks) * kKeys;  // of row 0
    int row = 0;
    if (key < 0) {
      const int tiles = (kRows - 1 - key) / kRows;
      row = tiles * kRows;
      key += tiles * kRows;
    }
#pragma unroll 1
    for (; row < sequence.queries && key < sequence.keys; row += kRows, key += kRows) {
      const Range rows = {row, smaller(row + kRows, sequence.queries)};
      const Range keys = keys_of_some(rows, sequence.bounds, sequence.keys);
      if (!is_empty(overlap(keys, {key, key + kKeys}))) {
        visit(sequence, row, key, shift);
      }
    }
  }
}

}  // namespace fastattn::attention
