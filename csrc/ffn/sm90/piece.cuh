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

  // Bit j: whether column j of the piece is kept.
  __device__ __forceinline__ uint32_t kept(uint32_t row_key, const ColumnKeys& columns) const {
    constexpr uint32_t kAll = (1u << kPieceColumns) - 1;
    if (!dropout.seed) {
      return kAll;
    }
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      const uint32_t word = dropout::word(row_key, columns.of[j / 4]);
      const int byte = static_cast<int>(dropout::byte_of(word, j % 4));
      bits |= static_cast<uint32_t>(byte >= dropout.threshold) << j;
    }
    return bits;
  }

  // Dropped values are 0 even where v is infinite or NaN.
  __device__ __forceinline__ void apply(float (&v)[kPieceColumns], uint32_t kept) const {
#pragma unroll
    for (int j = 0; j < kPieceColumns; ++j) {
      v[j] = kept >> j & 1 ? v[j] * dropout.keep_scale : 0.0f;
    }
  }
};

}  // namespace fastattn::ffn
