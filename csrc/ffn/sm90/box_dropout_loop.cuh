// The dropout of a box, up to 64 columns of a warp's 16 rows, in the layout of wgmma's sums, for
// epilogue_loop.cuh.
#pragma once

#include "common/dropout.h"
#include "ffn/sm90/config.cuh"
#include "sm90/tile/accumulator.cuh"

namespace fastattn::ffn {

// Columns of a box that are in registers at a time: a slice.
constexpr int kSliceColumns = 32;

// One word decides four adjacent columns of a row, which two neighbouring lanes have. Of the two
// rows that both have, each computes the word of one, and they exchange them. Without dropout
// (kDrops) nothing is computed.
template <bool kDrops>
class BoxDropout {
 public:
  static constexpr int kColumnGroups = kSliceColumns / 8, kValues = 4 * kColumnGroups;
  // Dropout words of a slice: for [group of eight columns][row of the two], a word with the bytes
  // of this lane's two columns at the top.
  struct Words {
    uint32_t of[kDrops ? kColumnGroups : 1][2];
  };

  __device__ __forceinline__ BoxDropout(const Dropout& dropout, int lane)
      : dropout_(dropout), lane_(lane), seed_(kDrops ? *dropout.seed : 0) {}

  // The place of the box.
  __device__ __forceinline__ void set_box(int row, int column) {
    if constexpr (kDrops) {
      const uint32_t state = dropout::flat_row_state(seed_, dropout_.stream, 0);
      const int own = row + sm90::AccumulatorThread{0, lane_}.upper_row();
      row_key_ = dropout::flat_row_key(state, own + (is_odd() ? sm90::kRowStep : 0));
      // Lane i has the key of the i-th four columns, as has lane i + 16.
      const int unit = column / kUnit + lane_ % kUnits;
      column_key_ = dropout::column_key(seed_, dropout_.stream, static_cast<uint32_t>(unit));
    }
  }

  // All lanes: the words of a slice.
  __device__ __forceinline__ Words words(int slice) const {
    Words words = {};
    if constexpr (kDrops) {
#pragma unroll
      for (int group = 0; group < kColumnGroups; ++group) {
        const int unit = (kColumnGroups * slice + group) * 2 + lane_ % 4 / 2;
        const uint32_t own = dropout::word(row_key_, __shfl_sync(~0u, column_key_, unit));
        const uint32_t other = __shfl_xor_sync(~0u, own, 1);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint32_t word = is_odd() == (row == 1) ? own : other;
          words.of[group][row] = is_odd() ? word : word << 16;
        }
      }
    }
    return words;
  }

  // Drops or scales values [group][row][column of the two]. Dropped ones are 0 even where v is
  // infinite or NaN.
  __device__ __forceinline__ void apply(float (&v)[kValues], const Words& words) const {
    if constexpr (kDrops) {
      // byte >= threshold, for a byte at the top of its word.
      const uint32_t last_dropped = (static_cast<uint32_t>(dropout_.threshold) << 24) - 1;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const uint32_t word = words.of[i / 4][i / 2 % 2];
        const bool is_kept = (i % 2 ? word : word << 8) > last_dropped;
        v[i] = is_kept ? v[i] * dropout_.keep_scale : 0.0f;
      }
    }
  }

 private:
  static constexpr int kUnit = 4, kUnits = 64 / kUnit;  // columns of a word, words of a row

  __device__ __forceinline__ bool is_odd() const { return lane_ % 2; }

  const Dropout& dropout_;
  const int lane_;
  const int64_t seed_;
  uint32_t row_key_ = 0, column_key_ = 0;
};

}  // namespace fastattn::ffn
