// A consumer warpgroup of the kernel of the gradient of a bias by distance. See distance.cuh.
#pragma once

#include "attention/sm90/backward/distance/distance_tiles.cuh"
#include "attention/sm90/backward/dmask/tile_products.cuh"
#include "attention/sm90/masks/mask.cuh"
#include "sm90/ptx/warp.cuh"

namespace fastattn::attention {

// Each thread owns an entry of the band.
template <class Traits>
struct DistanceConsumer : TileProducts<Traits, DistanceStorage<Traits>, DistanceArguments> {
  using Products = TileProducts<Traits, DistanceStorage<Traits>, DistanceArguments>;
  using Products::kCount, Products::kKeys, Products::kWords;
  using Products::shared, Products::args, Products::group, Products::thread;
  static constexpr int kConsumers = Traits::kGroups * kWarpgroup;
  static_assert(kConsumers == kBandEntries, "a thread for each entry");

  float rSum[kCount];  // of dS, over tiles with the same shift
  float own_entry = 0.0f;

  using Products::Products;

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
    this->issue_products(rS, rDp);
    this->await_products(rS, rDp);
    add_gradients(sequence, head, row + group * kMmaRows + thread.upper_row(), key, rS, rDp);
  }

  // upper_row: this thread's.
  __device__ __forceinline__ void add_gradients(const Sequence& sequence, int head, int upper_row,
                                                int tile_key, float (&s)[kCount],
                                                const float (&dp)[kCount]) {
    const int first_key = tile_key + thread.first_column();
    cap_scores(s, args.modifications, args.scale_log2);
    add_biases<1>(s, biases_of(args, args.modifications, sequence.number, head, sequence.queries,
                               sequence.keys) +
                         (first_key - upper_row));
    // The first row of the sequence among those of lse and delta.
    const int64_t rows = ((int64_t{sequence.entry} * args.heads + head) * args.row_blocks +
                          sequence.first_row_block) *
                         Traits::kBlockRows;
    uint32_t words[kWords] = {};
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
        bool is_allowed = contains(allowed, key);
        float score = s[at];
        if constexpr (Traits::kMask) {
          // A key past the end may not exist.
          const float added = is_allowed ? mask_value(sequence, head, existing, key) : 0.0f;
          is_allowed = is_allowed && added != kMinusInfinity;
          score = fmaf(added, kLog2e, score);
        }
        const float p = ptx::ex2(score - lse);
        float kept = dp[at];
        if constexpr (Traits::kDropout) {
          kept *= this->is_kept(words[octet / 2 * 2 + j], 2 * half + octet % 2)
                      ? args.dropout.keep_scale
                      : 0.0f;
        }
        rSum[at] += is_allowed ? p * (kept - delta) : 0.0f;
      }
    }
  }

  // Value that a dense mask adds to a score, -inf where it blocks.
  __device__ __forceinline__ float mask_value(const Sequence& sequence, int head, int row,
                                              int key) const {
    const DenseMask& mask = args.mask;
    const int64_t at = sequence.number * mask.batch_stride + head * mask.head_stride +
                       row * mask.row_stride + key * mask.column_stride;
    switch (mask.type) {
      case MaskType::kBool:
        return static_cast<const uint8_t*>(mask.data)[at] ? 0.0f : kMinusInfinity;
      case MaskType::kBFloat16:
        return unless_lowest(static_cast<const __nv_bfloat16*>(mask.data)[at]);
      case MaskType::kFloat16:
        return unless_lowest(static_cast<const __half*>(mask.data)[at]);
      default:
        return unless_lowest(static_cast<const float*>(mask.data)[at]);
    }
  }
  template <class MaskElement>
  static __device__ __forceinline__ float unless_lowest(MaskElement value) {
    const float number = static_cast<float>(value);
    return number <= kLowest<MaskElement> ? kMinusInfinity : number;
  }

  __device__ __forceinline__ void draw_words(int64_t rows, int row, int tile_key,
                                             uint32_t (&words)[kWords]) const {
    if (drops<Traits>(args.dropout)) {
      const uint32_t row_key = args.row_keys[rows / 2 + dropout::lattice_unit(row)];
      Products::draw_words(row_key, tile_key, words);
    }
  }
};

}  // namespace fastattn::attention
