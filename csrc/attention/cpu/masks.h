// Which (query, key) pairs of a tile are allowed, on CPU: ranges of keys from lengths, causal masks
// and windows; dense masks; keys that no query may attend. Also the dropout bits of a tile.
#pragma once

#include <climits>
#include <cstring>
#include <limits>

#include "attention/cpu/problem.h"
#include "common/dropout.h"
#include "cpu/simd.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

using namespace fastattn::FASTATTN_ISA;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504f;  // from exponents of e to exponents of 2

// Mask values at or below these block.
constexpr float kFloatLowest = std::numeric_limits<float>::lowest();
constexpr float kBf16Lowest = -0x1.FEp127f, kHalfLowest = -65504.0f;

// -- lengths, causal masks, windows --------------------------------------------------------------
// Rows of a sequence that are computed.
inline int live_queries(const Problem& a, const Sequence& s) {
  return a.query_lengths.at(s.b, s.queries);
}

// Keys that lengths, causal mask and window allow a row.
inline Range keys_of(const Problem& a, const Sequence& s, int row) {
  const int64_t per_query = a.key_lengths.stride;
  const int64_t index = per_query ? s.b * per_query + row : s.b;
  return keys_of_row(row, s.bounds, a.key_lengths.at(index, s.keys));
}

// The lse of rows of one head. Dead rows, which have no allowed key, have the head's sink as lse
// (-inf without sinks), or -inf where query_lengths exclude the row; other rows have a larger lse.
struct LseRows {
  const float* lse;  // null: no row is known to be dead
  float sink;

  FASTATTN_INLINE bool dead(int i) const { return lse && lse[i] <= sink; }
};

// The ranges of keys that the rows of a tile of queries may attend.
struct RowRanges {
  int count = 0;  // rows that are computed
  int begin[kTileRows], end[kTileRows];
  Range some = {INT_MAX, 0};  // keys that some row may attend, gaps included
  Range all = {0, INT_MAX};   // keys that every row may attend

  // Dead rows have an empty range.
  RowRanges(const Problem& a, const Sequence& s, int first, const LseRows& known) {
    count = smaller(live_queries(a, s) - first, kTileRows);
    for (int i = 0; i < count; ++i) {
      Range keys = keys_of(a, s, first + i);
      if (known.dead(i)) {
        keys = {0, 0};
      }
      begin[i] = keys.begin;
      end[i] = keys.end;
      if (!is_empty(keys)) {
        some.begin = smaller(some.begin, keys.begin);
        some.end = larger(some.end, keys.end);
      }
      all = overlap(all, keys);
    }
    count = larger(count, 0);
  }

  // Tiles of keys that contain an allowed pair, apart from dense masks.
  Range tiles() const { return blocks_touching(some, kTileKeys); }
  // Rows that may attend some of these keys, gaps included; begins at an even row.
  Range touching(int first_key, int keys) const {
    const auto touches = [&](int i) {
      return begin[i] < first_key + keys && end[i] > larger(first_key, begin[i]);
    };
    Range result = {0, count};
    while (result.begin < count && !touches(result.begin)) {
      ++result.begin;
    }
    while (result.end > result.begin && !touches(result.end - 1)) {
      --result.end;
    }
    result.begin -= result.begin % 2;
    return result;
  }
  bool allows_all(int first_key, int keys) const {
    return all.begin <= first_key && first_key + keys <= all.end;
  }
};

// -- dense masks ---------------------------------------------------------------------------------
inline float mask_value(const MaskView& mask, int64_t offset) {
  float value = 0.0f, lowest = kFloatLowest;
  switch (mask.type) {
    case MaskType::kNone:
      return 0.0f;
    case MaskType::kBool:
      return static_cast<const uint8_t*>(mask.data)[offset] ? 0.0f : -kInfinity;
    case MaskType::kFloat32:
      value = static_cast<const float*>(mask.data)[offset];
      break;
    case MaskType::kBFloat16:
      value = load(static_cast<const BFloat16*>(mask.data) + offset, 1)[0];
      lowest = kBf16Lowest;
      break;
    case MaskType::kFloat16:
      value = load(static_cast<const Float16*>(mask.data) + offset, 1)[0];
      lowest = kHalfLowest;
      break;
    case MaskType::kFloat64: {
      const double wide = static_cast<const double*>(mask.data)[offset];
      return wide <= std::numeric_limits<double>::lowest() ? -kInfinity : static_cast<float>(wide);
    }
  }
  return value <= lowest ? -kInfinity : value;
}

inline int64_t mask_offset(const MaskView& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  return b * mask.strides[0] + h * mask.strides[1] + i * mask.strides[2] + j * mask.strides[3];
}

// If a row's values are contiguous fp32, bf16 or fp16, calls run(pointer to the first value, the
// value at or below which one blocks). Returns whether they are.
template <class Run>
inline bool with_number_row(const MaskView& mask, int64_t offset, const Run& run) {
  if (mask.strides[3] != 1) {
    return false;
  }
  switch (mask.type) {
    case MaskType::kFloat32:
      run(static_cast<const float*>(mask.data) + offset, kFloatLowest);
      return true;
    case MaskType::kBFloat16:
      run(static_cast<const BFloat16*>(mask.data) + offset, kBf16Lowest);
      return true;
    case MaskType::kFloat16:
      run(static_cast<const Float16*>(mask.data) + offset, kHalfLowest);
      return true;
    default:
      return false;
  }
}
inline int bytes_of(MaskType type) {
  switch (type) {
    case MaskType::kBool:
      return 1;
    case MaskType::kBFloat16:
    case MaskType::kFloat16:
      return 2;
    case MaskType::kFloat64:
      return 8;
    default:
      return 4;
  }
}
inline bool has_byte_row(const MaskView& mask) {
  return mask.type == MaskType::kBool && mask.strides[3] == 1;
}

// How a mask changes a vector of base-2 exponents, from column j of its row on.
struct NoBias {
  static constexpr bool kAny = false;
  Float add_to(Float exponents, int) const { return exponents; }
};
// Values are read in place; those at or below `lowest` block.
template <class T>
struct NumberRow {
  static constexpr bool kAny = true;
  const T* data;
  float lowest;

  Float add_to(Float exponents, int j) const {
    const Float bias = load(data + j);
    return bias <= lowest ? splat(-kInfinity) : fma(bias, splat(kLog2E), exponents);
  }
};
struct ByteRow {
  static constexpr bool kAny = true;
  const uint8_t* data;

  Float add_to(Float exponents, int j) const {
    return widen_bytes(load_bits<Byte>(data + j)) != 0u ? exponents : splat(-kInfinity);
  }
};

// Values that a mask adds to `count` scores of a row, -inf where it blocks; padded with -inf to
// kTileKeys.
inline void mask_row(const MaskView& mask, int64_t offset, int count, float* bias) {
  if (has_byte_row(mask)) {
    uint8_t bytes[kTileKeys] = {};
    memcpy(bytes, static_cast<const uint8_t*>(mask.data) + offset, count);
    for (int j = 0; j < kTileKeys; j += kLanes) {
      const Word allowed = widen_bytes(load_bits<Byte>(bytes + j));
      store(bias + j, allowed != 0u ? Float{} : splat(-kInfinity));
    }
    return;
  }
  int filled = 0;
  const bool numbers = with_number_row(mask, offset, [&](const auto* source, float lowest) {
    for_vectors(count, [&](auto lanes, int64_t j) {
      const Float v = lanes.load(source + j);
      store(bias + j, v <= lowest ? splat(-kInfinity) : v);
    });
    filled = count;
  });
  for (int j = filled; j < kTileKeys; ++j) {
    const bool inside = !numbers && j < count;
    bias[j] = inside ? mask_value(mask, offset + j * mask.strides[3]) : -kInfinity;
  }
}

// Whether a mask row allows any of `count` keys; usually the first row of a tile does.
inline bool allows_some(const MaskView& mask, int64_t offset, int count) {
  if (has_byte_row(mask)) {
    uint8_t bytes[kTileKeys] = {};
    memcpy(bytes, static_cast<const uint8_t*>(mask.data) + offset, count);
    uint64_t any = 0;
    for (int j = 0; j < kTileKeys; j += 8) {
      uint64_t word;
      memcpy(&word, bytes + j, sizeof(word));
      any |= word;
    }
    return any != 0;
  }
  bool some = false;
  const bool numbers = with_number_row(mask, offset, [&](const auto* source, float lowest) {
    Float allowed = {};
    int j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      allowed += load(source + j) <= lowest ? Float{} : splat(1.0f);
    }
    some = sum(allowed) > 0.0f;
    for (; j < count; ++j) {
      some = some || !(load(source + j, 1)[0] <= lowest);
    }
  });
  for (int j = 0; !numbers && !some && j < count; ++j) {
    some = mask_value(mask, offset + j * mask.strides[3]) != -kInfinity;
  }
  return some;
}

// Values added to the scores of a tile, row by row: a dense mask and a bias by distance.
class TileBias {
 public:
  bool none = false;  // nothing is allowed

  // buffer: kBiasRows rows of kTileKeys floats, those that were read last, and kTileDistances.
  TileBias(const Problem& a, const Sequence& s, int64_t h, int first_row, Range live, int first_key,
           float* buffer)
      : mask_(a.mask),
        row_buffer_(buffer),
        by_distance_(buffer + kBiasRows * kTileKeys),
        distances_(a.distance_bias.data) {
    if (distances_ || a.softcap > 0.0f) {
      copy_distances(a, s, h, first_row, live, first_key);
    }
    if (a.mask.type == MaskType::kNone) {
      return;
    }
    keys_ = smaller(kTileKeys, a.keys - first_key);
    first_ = mask_offset(a.mask, s.b, h, first_row, first_key);
    const bool one_row = a.mask.strides[2] == 0;
    same_ = one_row && !distances_;
    none = true;
    for (int i = live.begin; none && i < (one_row ? live.begin + 1 : live.end); ++i) {
      none = !allows_some(a.mask, first_ + i * a.mask.strides[2], keys_);
    }
    if (same_ && !none) {
      mask_row(a.mask, first_, keys_, buffer);
    } else if (!none) {
      for (int i = live.begin; i < live.begin + kRowsAhead; ++i) {
        prefetch_row(i);
      }
    }
  }
  explicit operator bool() const { return mask_.type != MaskType::kNone || distances_; }

  // Calls run(row), where row(i) reads the mask's row: in place if it consists of contiguous whole
  // vectors and is the only bias, otherwise as floats. (One head of 512 x 512, a bf16 bias,
  // forward, one Zen 5 thread: 0.20 ms in place, 0.21 as floats.)
  template <class Run>
  inline __attribute__((always_inline)) void with_rows(const Run& run) const {
    if (!*this) {
      return run([](int) { return NoBias{}; });
    }
    if (!same_ && !distances_ && mask_.strides[3] == 1 && keys_ % kLanes == 0) {
      const auto row = [this](auto* data, int i) __attribute__((always_inline)) {
        prefetch_row(i + kRowsAhead);
        return data + first_ + i * mask_.strides[2];
      };
      switch (mask_.type) {
        case MaskType::kBool:
          return run([&](int i) __attribute__((always_inline)) {
            return ByteRow{row(static_cast<const uint8_t*>(mask_.data), i)};
          });
        case MaskType::kFloat32:
          return run([&](int i) __attribute__((always_inline)) {
            return NumberRow<float>{row(static_cast<const float*>(mask_.data), i), kFloatLowest};
          });
        case MaskType::kBFloat16:
          return run([&](int i) __attribute__((always_inline)) {
            return NumberRow<BFloat16>{row(static_cast<const BFloat16*>(mask_.data), i),
                                       kBf16Lowest};
          });
        default:
          break;
      }
    }
    run([this](int i) { return floats(i); });
  }

  // A row as floats; with a soft cap also of no bias, zeros. It is valid until the next but one is
  // read.
  NumberRow<float> floats(int i) const {
    const float* distances = by_distance_ + (kTileRows - 1 - i);
    if (mask_.type == MaskType::kNone) {
      return {distances, -kInfinity};
    }
    float* row = row_buffer_;
    if (!same_) {
      row += i % kBiasRows * kTileKeys;
      prefetch_row(i + kRowsAhead);
      mask_row(mask_, first_ + i * mask_.strides[2], keys_, row);
      for (int j = 0; distances_ && j < kTileKeys; j += kLanes) {
        // A blocked pair stays blocked if its bias by distance is infinite or NaN.
        const Float mask = load(row + j);
        store(row + j, mask == -kInfinity ? mask : mask + load(distances + j));
      }
    }
    return {row, -kInfinity};
  }

 private:
  // Copies the tile's part of the bias by distance: that of row i and key j, both counted from the
  // tile's first, to j - i + kTileRows - 1. Rows thus read it from consecutive places on. Pairs
  // that are not allowed may have no entry; they get 0.
  void copy_distances(const Problem& a, const Sequence& s, int64_t h, int first_row, Range live,
                      int first_key) {
    const DistanceBias& bias = a.distance_bias;
    const int from = kTileRows - live.end, count = kTileKeys + live.end - live.begin;
    const int64_t first =
        bias.first + first_key - first_row - s.bounds.diagonal - (kTileRows - 1) + from;
    const int begin = clamped(-first, count), end = clamped(bias.count - first, count);
    float* const copy = by_distance_ + from;
    memset(copy, 0, sizeof(float) * begin);
    if (begin < end) {
      memcpy(copy + begin, bias.row(s.b, h) + first + begin, sizeof(float) * (end - begin));
    }
    memset(copy + end, 0, sizeof(float) * (count - end));
  }

  // The hardware prefetcher does not predict where the next row begins. (2 x 8 heads of 512 x 512,
  // bf16, forward, one Zen 5 thread: 4.5 ms instead of 6.4; 3.9 without a mask.)
  static constexpr int kRowsAhead = 8;
  // always_inline: GCC 12 removes calls of a function without side effects.
  __attribute__((always_inline)) void prefetch_row(int i) const {
    constexpr int kLine = 64;
    const int size = bytes_of(mask_.type);
    const char* row = static_cast<const char*>(mask_.data) + (first_ + i * mask_.strides[2]) * size;
    const int bytes = mask_.strides[3] == 1 ? keys_ * size : 0;
    for (int byte = 0; byte < bytes; byte += kLine) {
      __builtin_prefetch(row + byte);
    }
  }

  const MaskView& mask_;
  float *row_buffer_, *by_distance_;
  const float* distances_;  // null: no bias by distance
  int keys_ = 0;
  int64_t first_ = 0;
  bool same_ = false;  // one row for all
};

// -- dead keys -----------------------------------------------------------------------------------
// A key is dead for a kv head if no query may attend it. Keys outside `live_` are dead; inside it,
// only keys that contain infinities or NaN are checked, pair by pair.
class DeadKeys {
 public:
  DeadKeys(const Problem& a, const Sequence& s, int64_t kv_head) : a_(a), s_(s), kv_head_(kv_head) {
    const int rows = live_queries(a, s);
    if (!a.key_lengths.data || a.key_lengths.stride == 0) {
      const int keys = a.key_lengths.at(s.b, s.keys);
      live_ = keys_of_some({0, rows}, s.bounds, keys);
      return;
    }
    live_ = {INT_MAX, 0};
    for (int i = 0; i < rows; ++i) {
      const Range keys = keys_of(a, s, i);
      if (!is_empty(keys)) {
        live_ = {smaller(live_.begin, keys.begin), larger(live_.end, keys.end)};
      }
    }
  }

  // For keys counted from a tile's first one.
  struct OfTile {
    const DeadKeys& keys;
    int first;
    bool before(int j) const { return !contains(keys.live_, first + j); }
    bool after(int j) const { return keys.no_query_attends(first + j); }
  };
  OfTile of_tile(int first) const { return {*this, first}; }

  // This key and all after it are known to be dead before they are read.
  int live_end() const { return live_.end; }
  // Whether none of these keys is dead, whatever they contain.
  bool none(int first, int count) const {
    return a_.mask.type == MaskType::kNone &&
           (!a_.key_lengths.data || a_.key_lengths.stride == 0) && none_if_finite(first, count);
  }
  // Whether all of these keys are known to be dead before they are read.
  bool all(int first, int count) const {
    return first + count <= live_.begin || live_.end <= first;
  }
  // Whether none of these keys is dead if all are finite.
  bool none_if_finite(int first, int count) const {
    return live_.begin <= first && first + count <= live_.end;
  }

 private:
  bool no_query_attends(int key) const {
    const int rows = live_queries(a_, s_);
    const int64_t group = a_.group();
    for (int64_t h = kv_head_ * group; h < (kv_head_ + 1) * group; ++h) {
      for (int i = 0; i < rows; ++i) {
        if (contains(keys_of(a_, s_, i), key) &&
            mask_value(a_.mask, mask_offset(a_.mask, s_.b, h, i, key)) != -kInfinity) {
          return false;
        }
      }
    }
    return true;
  }

  const Problem& a_;
  Sequence s_;
  int64_t kv_head_;
  Range live_;
};

// -- dropout -------------------------------------------------------------------------------------
// The dropout bits of one tile, computed row by row.
class TileDropout {
 public:
  TileDropout(const Problem& a, int64_t b, int64_t h, int first_row, int first_key)
      : threshold_(static_cast<uint32_t>(a.dropout.threshold)), first_row_(first_row) {
    if (threshold_ == 0) {
      return;
    }
    // Copies, which the stores below cannot change: the loop is vectorised.
    const dropout::Origin origin = a.dropout.origin;
    const uint32_t column_key = a.dropout.column_key;
    row_origin_ = origin.row_unit;
    head_key_ =
        dropout::absorb(dropout::absorb(a.dropout.row_key, origin.b + static_cast<uint32_t>(b)),
                        origin.h + static_cast<uint32_t>(h));
    for (int j = 0; j < kTileKeys; ++j) {
      const uint32_t key = static_cast<uint32_t>(first_key + j);
      columns_[j] = dropout::absorb(column_key, origin.column_unit + dropout::lattice_unit(key));
      shifts_[j] = 8 * static_cast<uint32_t>(dropout::lattice_bit(key));
    }
  }

  explicit operator bool() const { return threshold_ != 0; }

  class Row {
   public:
    // v where the weight is kept, 0 elsewhere.
    Float apply(Float v, int j) const {
      const Word word = dropout::finalise(load_bits<Word>(tile_.columns_ + j) ^ key_);
      const Word byte = (word >> (load_bits<Word>(tile_.shifts_ + j) + shift_)) & 0xFFu;
      return byte >= splat_word(tile_.threshold_) ? v : Float{};
    }

   private:
    friend class TileDropout;
    Row(const TileDropout& tile, uint32_t key, uint32_t shift)
        : tile_(tile), key_(key), shift_(shift) {}
    const TileDropout& tile_;
    uint32_t key_, shift_;
  };

  // A row counted from the tile's first one.
  Row row(int i) const {
    const uint32_t position = static_cast<uint32_t>(first_row_ + i);
    return {*this, dropout::absorb(head_key_, row_origin_ + dropout::lattice_unit(position)),
            16 * static_cast<uint32_t>(dropout::lattice_bit(position))};
  }

 private:
  uint32_t threshold_;
  int first_row_;
  uint32_t head_key_ = 0, row_origin_ = 0;
  uint32_t columns_[kTileKeys], shifts_[kTileKeys];
};

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
