// Eight adjacent columns of a row: what a thread reads, computes and writes at a time, and their
// dropout.
#pragma once

#include "common/dropout.h"
#include "ffn/sm90/config.cuh"
#include "sm90/ptx/warp.cuh"
#include "sm90/tile/descriptor.h"

namespace fastattn::ffn {

constexpr int kPieceColumns = 8;

template <class Element>
struct alignas(sm90::kPieceBytes) Piece {
  Element data[kPieceColumns];
};

template <class Element>
__device__ __forceinline__ void store_piece(void* matrix, int64_t at,
                                            const float (&v)[kPieceColumns]) {
  uint4* to = reinterpret_cast<uint4*>(static_cast<Element*>(matrix) + at);
  if constexpr (sizeof(Element) == sizeof(float)) {
    *reinterpret_cast<Piece<float>*>(to) = {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
  } else {
    *to = {ptx::pack<Element>(v[0], v[1]), ptx::pack<Element>(v[2], v[3]),
           ptx::pack<Element>(v[4], v[5]), ptx::pack<Element>(v[6], v[7])};
  }
}

// The dropout of a matrix of fewer than 2^32 rows: a state from which keys of rows follow, and keys
// of the two words of a piece.
struct PieceDropout {
  static constexpr int kWords = kPieceColumns / 4;
  struct ColumnKeys {
    uint32_t of[kWords];
  };
  struct Words {
    uint32_t of[kWords];
  };

  const Dropout& dropout;
  int64_t seed;

  __device__ __forceinline__ explicit PieceDropout(const Dropout& dropout)
      : dropout(dropout), seed(dropout.seed ? *dropout.seed : 0) {}

  __device__ __forceinline__ uint32_t row_state() const {
    return dropout::flat_row_state(seed, dropout.stream, 0);
  }
  __device__ __forceinline__ ColumnKeys column_keys(int column) const {
    const uint32_t unit = static_cast<uint32_t>(column) / 4;
    return {dropout::column_key(seed, dropout.stream, unit),
            dropout::column_key(seed, dropout.stream, unit + 1)};
  }

  // The words of a row. Without dropout they are not read.
  __device__ __forceinline__ Words words(uint32_t row_key, const ColumnKeys& columns) const {
    Words words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words.of[i] = dropout::word(row_key, columns.of[i]);
    }
    return words;
  }

  // Drops or scales the values of a row. Dropped ones are 0 even where v is infinite or NaN.
  __device__ __forceinline__ void apply(float (&v)[kPieceColumns], const Words& words) const {
    if (!dropout.seed) {
      return;
    }
    // byte >= threshold, for a byte that is shifted to the top of its word.
    const uint32_t last_dropped = (static_cast<uint32_t>(dropout.threshold) << 24) - 1;
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      const bool is_kept = words.of[j / 4] << (24 - 8 * (j % 4)) > last_dropped;
      v[j] = is_kept ? v[j] * dropout.keep_scale : 0.0f;
    }
  }
};

}  // namespace fastattn::ffn
