// Row-wise dropout on the CPU, for the norms and the feed-forward network: a kernel's parameters,
// and the bits of a row's columns as vectors.
#pragma once

#include <cstdint>

#include "common/dropout.h"
#include "cpu/simd.h"

namespace fastattn {

struct Dropout {
  int threshold = 0;  // 0: no dropout
  float scale = 1.0f;
  int64_t seed = 0;
  uint32_t stream = 0;
  const uint32_t* column_keys = nullptr;  // [ceil(columns / 4)]

  explicit operator bool() const { return threshold > 0; }
};

namespace FASTATTN_ISA {

// The dropout of up to kColumns adjacent columns of one row. Kernels pass a local copy of their
// Dropout, because the compiler must assume that stores alias the original.
template <int kColumns>
class RowDropout {
 public:
  void draw(const Dropout& dropout, int64_t row, int64_t first_column, int64_t columns) {
    if (row >> 32 != state_of_) {
      state_of_ = row >> 32;
      state_ = dropout::flat_row_state(dropout.seed, dropout.stream, row);
    }
    const uint32_t row_key = dropout::flat_row_key(state_, row);
    const uint32_t* keys = dropout.column_keys + first_column / 4;
    const int64_t words = (columns + 3) / 4;
    int64_t i = 0;
    for (; i + kLanes <= words; i += kLanes) {
      store_bits(words_ + i, dropout::finalise(load_bits<Word>(keys + i) ^ row_key));
    }
    for (; i < words; ++i) {
      words_[i] = dropout::word(row_key, keys[i]);
    }
  }

  // v holds the drawn columns from c on. Dropped elements are 0 even where v is infinite or NaN.
  Float apply(const Dropout& dropout, Float v, int64_t c) const {
    const char* bytes = reinterpret_cast<const char*>(words_) + c;  // byte i of a word: column i
    const Word drawn = widen_bytes(load_bits<Byte>(bytes));
    const Word threshold = splat_word(static_cast<uint32_t>(dropout.threshold));
    return drawn >= threshold ? v * dropout.scale : Float{};
  }

 private:
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "byte i of a word must be its i-th");
  static_assert(kColumns % (4 * kLanes) == 0, "columns must be whole words of whole vectors");
  uint32_t words_[kColumns / 4];
  int64_t state_of_ = -1;
  uint32_t state_ = 0;
};

}  // namespace FASTATTN_ISA
}  // namespace fastattn
