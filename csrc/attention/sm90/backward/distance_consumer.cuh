// A consumer warpgroup of the kernel of the gradient of a bias by distance. See distance.cuh.
#pragma once

#include "attention/sm90/backward/distance_tiles.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/ptx/warp.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::attention {

using sm90::AccumulatorThread;

// One warpgroup: 64 rows of a tile. Each thread owns an entry of the band.
template <class Traits>
struct DistanceConsumer {
  using Element = typename Traits::Element;
  static constexpr int kKeys = Traits::kKeys;
  static constexpr int kCount = kKeys / 2;
  static constexpr int kWords = kKeys / sm90::kMmaK * 2;
  static constexpr int kConsumers = Traits::kGroups * kWarpgroup;
  using ScoreMma = ptx::Wgmma<kKeys>;
  static_assert(kConsumers == kBandEntries, "a thread for each entry");

  DistanceStorage<Traits>& shared;
  const DistanceArguments& args;
  const int group;
  const AccumulatorThread thread;
  RingPosition<Traits::kStages> stage;
  float rSum[kCount];  // of dS, over tiles with the same shift
  float own_entry = 0.0f;

  __device__ __forceinline__ DistanceConsumer(DistanceStorage<Traits>& storage,
                                              const DistanceArguments& arguments, int warpgroup)
      : shared(storage),
        args(arguments),
        group(warpgroup),
        thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x) % kWarpgroup / kWarp, 0),
               static_cast<int>(threadIdx.x) % kWarp} {}

  __device__ __forceinline__ void run(const DistanceWork& work) {
    constexpr int kNone = -1;
    int last_shift = kNone;
    clear_sum();
    visit_tiles<Traits>(args, work, [&](const Sequence& sequence, int row, int key, int shift) {
      if (last_shift != kNone && last_shift != shift) {
        add_distances(last_shift);
      }
      last_shift = shift;
      add_tile(sequence, work.head, row, key);
    });
    if (last_shift != kNone) {
      add_distances(last_shift);
    }
    const int number = static_cast<int>(threadIdx.x) - kWarpgroup;
    args.gradient.partial[int64_t{kBandEntries} * blockIdx.x + number] = own_entry;
  }

  __device__ __forceinline__ void clear_sum() {
#pragma unroll
    for (float& sum : rSum) {
      sum = 0.0f;
    }
  }

  // Adds the diagonals of the sums to the entries.
  __device__ __forceinline__ void add_distances(int shift) {
    constexpr int kRows = Traits::kRows;
    ptx::bar_sync(kDistanceSumBarrier, kConsumers);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = group * kMmaRows + thread.upper_row() + i / 2 % 2 * sm90::kRowStep;
      shared.sum[row][i / 4 * kOctet + thread.first_column() + i % 2] = rSum[i];
    }
    ptx::bar_sync(kDistanceSumBarrier, kConsumers);
    // Key - row, within the tile.
    const int distance = static_cast<int>(threadIdx.x) - kWarpgroup - kBandOrigin - shift;
    const int last = smaller(kRows, kKeys - distance);
#pragma unroll 1
    for (int row = larger(0, -distance); row < last; ++row) {
      own_entry += shared.sum[row][row + distance];
    }
    clear_sum();
  }

  __device__ __forceinline__ void add_tile(const Sequence& sequence, int head, int row, int key) {
    float rS[kCount], rDp[kCount];
    DmaskTiles<Traits>& tiles = shared.tiles[stage.index()];
    shared.slots[stage.index()].full.wait(stage.phase());
    issue_product(rS, tiles.q, tiles.k);
    issue_product(rDp, tiles.dout, tiles.v);
    ptx::wgmma_wait_group<0>();
    ptx::pin(rS);
    ptx::pin(rDp);
    if (threadIdx.x % kWarpgroup == 0) {
      shared.slots[stage.index()].empty.arrive();
    }
    stage.advance();
    add_gradients(sequence, head, row + group * kMmaRows + thread.upper_row(), key, rS, rDp);
  }

  // 64 x kKeys: Q K^T or dO V^T.
  __device__ __forceinline__ void issue_product(float (&acc)[kCount],
                                                const typename Traits::RowTile& rows,
                                                const typename Traits::KeyTile& keys) {
    const uint64_t a =
        sm90::descriptor_k_major(rows.address() + group * kMmaRows * sm90::kRowBytes);
    const uint64_t b = sm90::descriptor_k_major(keys.address());
    ptx::pin(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Traits::kHeadDim / kMmaK; ++step) {
      ScoreMma::template ss<Element, ptx::kMajorK>(
          acc, sm90::descriptor_at(a, sm90::k_major_step(step, Traits::kRows)),
          sm90::descriptor_at(b, sm90::k_major_step(step, kKeys)), step > 0);
    }
    ptx::wgmma_commit_group();
  }

  // upper_row: this thread's.
  __device__ __forceinline__ void add_gradients(const Sequence& sequence, int head, int upper_row,
                                                int tile_key, float (&s)[kCount],
                                                const float (&dp)[kCount]) {
    const int first_key = tile_key + thread.first_column();
    cap_scores(s, args.changes, args.scale_log2);
    add_biases<1>(
        s, biases_of(args, args.changes, sequence.number, head, sequence.queries, sequence.keys) +
               (first_key - upper_row));
    // The first row of the sequence among those of lse and delta.
    const int64_t rows = ((int64_t{sequence.entry} * args.heads + head) * args.row_blocks +
                          sequence.first_row_block) *
                         Traits::kBlockRows;
    uint32_t words[kWords];
    draw_words(rows, smaller(upper_row, sequence.queries - 1), tile_key, words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = upper_row + half * sm90::kRowStep;
      // Rows past the end read the last one.
      const int existing = smaller(row, sequence.queries - 1);
      const float lse = args.lse2[rows + existing], delta = args.delta[rows + existing];
      const Range allowed =
          row < sequence.queries ? keys_of_row(row, sequence.bounds, sequence.keys) : Range{0, 0};
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int octet = i / 2, j = i % 2, at = octet * kOctetRegisters + 2 * half + j;
        const int key = first_key + octet * kOctet + j;
        const bool is_allowed =
            contains(allowed, key) && mask_allows(sequence, head, existing, key);
        const float p = ptx::ex2(s[at] - lse);
        float kept = dp[at];
        if constexpr (Traits::kDropout) {
          kept *= is_kept(words[octet / 2 * 2 + j], 2 * half + octet % 2) ? args.dropout.keep_scale
                                                                          : 0.0f;
        }
        rSum[at] += is_allowed ? p * (kept - delta) : 0.0f;
      }
    }
  }

  // A boolean mask, for keys before the end.
  __device__ __forceinline__ bool mask_allows(const Sequence& sequence, int head, int row,
                                              int key) const {
    if constexpr (Traits::kMask) {
      const DenseMask& mask = args.mask;
      const int64_t at = sequence.number * mask.batch_stride + head * mask.head_stride +
                         row * mask.row_stride + key * mask.column_stride;
      return static_cast<const uint8_t*>(mask.data)[at];
    }
    return true;
  }

  // Dropout's random words for this thread's scores, see dropout_sm90.cuh: two for every 16 keys.
  __device__ __forceinline__ void draw_words(int64_t rows, int row, int tile_key,
                                             uint32_t (&words)[kWords]) const {
    if constexpr (Traits::kDropout) {
      const uint32_t row_key = args.row_keys[rows / 2 + dropout::lattice_unit(row)];
      const uint32_t stream =
          dropout::stream_key(dropout::kColumnTag, *args.dropout.seed, args.dropout.stream);
      const uint32_t unit = dropout::lattice_unit(tile_key) + thread.first_column();
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = dropout::word(
            row_key, dropout::absorb(stream, unit + dropout::units(i / 2 * sm90::kMmaK) + i % 2));
      }
    }
  }
  // If the threshold drops everything, the keep scale is 0.
  __device__ __forceinline__ bool is_kept(uint32_t word, int byte) const {
    return word << (24 - 8 * byte) >= static_cast<uint32_t>(args.dropout.threshold) << 24;
  }
};

}  // namespace fastattn::attention
