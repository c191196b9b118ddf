// The dropout bits: which elements are dropped is a pure function of seed, stream and position, the
// same in every backend. One 32-bit word decides four elements, one byte each; an element is kept
// if its byte is at least the threshold. Keys are hashed once per row and per column, so that an
// element costs a xor and a finaliser.
//
// Attention's words lie on the lattice that one thread of a tensor-core fragment owns: rows {r, r +
// 8} x columns {c, c + 8} inside blocks of 16. Row-wise ops (norms, feed-forward) use one word per
// four consecutive columns. fastattn/ops/_dropout.py is the same arithmetic in torch. All of it is
// modulo 2^32.
//
// Attention's seed may have an origin: the index of the call's first sequence, head, query and key
// in a larger attention, whose bits at these positions it draws.
#pragma once

#include <cstdint>

#include "common/pure.h"

namespace fastattn::dropout {

constexpr uint32_t kRowTag = 0x243F6A88;
constexpr uint32_t kColumnTag = 0x85A308D3;
constexpr uint32_t kGolden = 0x9E3779B9;
// Separates the two dropouts of one feed-forward call; public streams are below it.
constexpr uint32_t kSecondStream = 0x80000000;
// All elements are dropped at this threshold: no byte reaches it.
constexpr int kDropAll = 256;

// A bijection of 32-bit words with good avalanche; the constants are those of Wellons's
// "lowbias32". A template, so that it takes one word or a vector of them.
template <class Word>
FASTATTN_PURE Word finalise(Word x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

FASTATTN_PURE uint32_t absorb(uint32_t state, uint32_t value) {
  return finalise((state ^ value) + kGolden);
}

FASTATTN_PURE uint32_t stream_key(uint32_t tag, int64_t seed, uint32_t stream) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  const uint32_t low = static_cast<uint32_t>(bits);
  const uint32_t high = static_cast<uint32_t>(bits >> 32);
  return absorb(absorb(absorb(tag, low), high), stream);
}

FASTATTN_PURE uint32_t row_key(int64_t seed, uint32_t stream, uint32_t b, uint32_t h,
                               uint32_t unit) {
  return absorb(absorb(absorb(stream_key(kRowTag, seed, stream), b), h), unit);
}

FASTATTN_PURE uint32_t column_key(int64_t seed, uint32_t stream, uint32_t unit) {
  return absorb(stream_key(kColumnTag, seed, stream), unit);
}

// Row-wise ops have no batch and no head but may have more than 2^32 rows: row_key(seed, stream,
// row >> 32, 0, low word of row), in two steps, of which the first serves 2^32 rows.
FASTATTN_PURE uint32_t flat_row_state(int64_t seed, uint32_t stream, int64_t row) {
  const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
  return absorb(absorb(stream_key(kRowTag, seed, stream), high), 0);
}
FASTATTN_PURE uint32_t flat_row_key(uint32_t state, int64_t row) {
  return absorb(state, static_cast<uint32_t>(row));
}

FASTATTN_PURE uint32_t word(uint32_t row_key, uint32_t column_key) {
  return finalise(row_key ^ column_key);
}

FASTATTN_PURE uint32_t byte_of(uint32_t word, int index) {
  return (word >> (8 * index)) & 0xFF;
}

// Attention: the unit that row i or column j belongs to, and which of its two positions it is.
FASTATTN_PURE uint32_t lattice_unit(uint32_t position) {
  return position / 16 * 8 + position % 8;
}
// Number of units in `positions`, a multiple of 16.
FASTATTN_PURE int units(int positions) {
  return positions / 2;
}
FASTATTN_PURE int lattice_bit(uint32_t position) {
  return static_cast<int>(position / 8 % 2);
}

// The numbers of attention's seed: itself, and the origin behind it.
constexpr int kSeedAndOrigin = 5;

// Offsets added to a call's sequences, heads, and units of rows and columns.
struct Origin {
  uint32_t b = 0, h = 0, row_unit = 0, column_unit = 0;
};
// The units of the multiple of 16 at or below a position.
FASTATTN_PURE uint32_t units_before(int64_t position) {
  return static_cast<uint32_t>(position >> 4) * 8;
}
// numbers: kSeedAndOrigin.
FASTATTN_PURE Origin origin_of(const int64_t* numbers) {
  return {static_cast<uint32_t>(numbers[1]), static_cast<uint32_t>(numbers[2]),
          units_before(numbers[3]), units_before(numbers[4])};
}

FASTATTN_PURE uint32_t attention_byte(int64_t seed, uint32_t stream, uint32_t b, uint32_t h,
                                      uint32_t i, uint32_t j, const Origin& origin) {
  const uint32_t row =
      row_key(seed, stream, origin.b + b, origin.h + h, origin.row_unit + lattice_unit(i));
  const uint32_t column = column_key(seed, stream, origin.column_unit + lattice_unit(j));
  return byte_of(word(row, column), 2 * lattice_bit(i) + lattice_bit(j));
}

FASTATTN_PURE uint32_t row_byte(int64_t seed, uint32_t stream, int64_t row, int64_t column) {
  const uint32_t unit = static_cast<uint32_t>(column / 4);
  const uint32_t key = flat_row_key(flat_row_state(seed, stream, row), row);
  return byte_of(word(key, column_key(seed, stream, unit)), static_cast<int>(column % 4));
}

// Bytes below the threshold are dropped: 256 p rounded, never 0 for p > 0 and 256 only for p = 1.
FASTATTN_PURE int threshold(double p) {
  if (p <= 0.0) {
    return 0;
  }
  if (p >= 1.0) {
    return kDropAll;
  }
  const int rounded = static_cast<int>(256.0 * p + 0.5);
  return rounded < 1 ? 1 : rounded > 255 ? 255 : rounded;
}

// Factor applied to kept elements, so that expectations are exact.
FASTATTN_PURE float keep_scale(int threshold) {
  return threshold == kDropAll ? 0.0f : 256.0f / static_cast<float>(kDropAll - threshold);
}

}  // namespace fastattn::dropout
