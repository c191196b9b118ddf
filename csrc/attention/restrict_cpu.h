// Which pairs of a tile are allowed, on CPU: ranges of keys by arithmetic, dense masks by looking
// at them, keys that no query may attend; and the dropout bits of a tile.
#pragma once

#include <climits>
#include <limits>

#include "attention/problem_cpu.h"
#include "common/dropout.h"
#include "common/simd.h"

namespace fastattn::FASTATTN_ISA {

using attention::Band;
using attention::kTileKeys;
using attention::kTileRows;
using attention::MaskType;
using attention::MaskView;
using attention::Problem;
using attention::Range;
using attention::Sequence;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// -- lengths, causal masks, windows --------------------------------------------------------------
inline int clamped(int64_t length, int most) {
  return length < 0 ? 0 : length > most ? most : static_cast<int>(length);
}

// Rows of a sequence that are computed at all.
inline int live_queries(const Problem& a, const Sequence& s) {
  return a.query_lengths.data ? clamped(a.query_lengths.at(s.b), s.queries) : s.queries;
}

// Keys that arithmetic allows a row.
inline Range keys_of(const Problem& a, const Sequence& s, int row) {
  int keys = s.keys;
  if (a.key_lengths.data) {
    const int64_t per_query = a.key_lengths.stride;
    keys = clamped(a.key_lengths.at(per_query ? s.b * per_query + row : s.b), s.keys);
  }
  return attention::keys_of_row(row, s.band, keys);
}

// The ranges of a tile of queries, from its first row on.
struct RowRanges {
  int count = 0;  // rows that are computed
  int begin[kTileRows], end[kTileRows];
  Range some = {INT_MAX, 0};  // keys that some row may attend, gaps included
  Range all = {0, INT_MAX};   // keys that every row may attend

  // lse, where it is known, tells dead rows: their range is empty.
  RowRanges(const Problem& a, const Sequence& s, int first, const float* lse) {
    count = attention::smaller(live_queries(a, s) - first, kTileRows);
    for (int i = 0; i < count; ++i) {
      Range keys = keys_of(a, s, first + i);
      if (lse && lse[i] == -kInfinity) {
        keys = {0, 0};
      }
      begin[i] = keys.begin;
      end[i] = keys.end;
      if (!is_empty(keys)) {
        some.begin = attention::smaller(some.begin, keys.begin);
        some.end = attention::larger(some.end, keys.end);
      }
      all = overlap(all, keys);
    }
    count = attention::larger(count, 0);
  }

  // Tiles of keys that hold some allowed pair, as far as arithmetic knows.
  Range tiles() const { return attention::blocks_touching(some, kTileKeys); }
  // Rows that may attend some of these keys, gaps included; begins at an even row.
  Range touching(int first_key, int keys) const {
    const auto touches = [&](int i) {
      return begin[i] < first_key + keys && end[i] > attention::larger(first_key, begin[i]);
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
  constexpr float kHalfLowest = -65504.0f, kBf16Lowest = -0x1.FEp127f;
  float value = 0.0f, lowest = std::numeric_limits<float>::lowest();
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

// What a mask adds to `count` scores of a row, -inf where it blocks; -inf behind them up to
// kTileKeys. Their maximum comes back.
template <class T>
inline float mask_row_of(const T* source, int count, float lowest, float* bias) {
  Float most = splat(-kInfinity);
  int filled = 0;
  for_vectors(count, [&](auto lanes, int64_t j) {
    const Float v = lanes.load(source + j);
    const Float allowed = v <= lowest ? splat(-kInfinity) : v;
    store(bias + j, allowed);
    filled = static_cast<int>(j) + kLanes;
    most = most > allowed ? most : allowed;  // lanes behind the last hold 0: never a false "none"
  });
  for (; filled < kTileKeys; filled += kLanes) {
    store(bias + filled, splat(-kInfinity));
  }
  for (int j = count; j % kLanes; ++j) {
    bias[j] = -kInfinity;
  }
  float result = most[0];
  for (int i = 1; i < kLanes; ++i) {
    result = most[i] > result ? most[i] : result;
  }
  return result;
}

inline float mask_row(const MaskView& mask, int64_t offset, int count, float* bias) {
  constexpr float kHalfLowest = -65504.0f, kBf16Lowest = -0x1.FEp127f;
  if (mask.strides[3] == 1) {
    switch (mask.type) {
      case MaskType::kFloat32:
        return mask_row_of(static_cast<const float*>(mask.data) + offset, count,
                           std::numeric_limits<float>::lowest(), bias);
      case MaskType::kBFloat16:
        return mask_row_of(static_cast<const BFloat16*>(mask.data) + offset, count, kBf16Lowest,
                           bias);
      case MaskType::kFloat16:
        return mask_row_of(static_cast<const Float16*>(mask.data) + offset, count, kHalfLowest,
                           bias);
      case MaskType::kBool: {
        const uint8_t* source = static_cast<const uint8_t*>(mask.data) + offset;
        uint8_t bytes[kTileKeys] = {};
        memcpy(bytes, source, count);
        uint64_t any = 0;
        for (int j = 0; j < kTileKeys; j += kLanes) {
          const Word allowed = widen_bytes(load_bits<Byte>(bytes + j));
          store(bias + j, allowed != 0u ? Float{} : splat(-kInfinity));
        }
        for (int j = 0; j < kTileKeys; j += 8) {
          uint64_t word;
          memcpy(&word, bytes + j, sizeof(word));
          any |= word;
        }
        return any ? 0.0f : -kInfinity;
      }
      default:
        break;
    }
  }
  float most = -kInfinity;
  for (int j = 0; j < kTileKeys; ++j) {
    bias[j] = j < count ? mask_value(mask, offset + j * mask.strides[3]) : -kInfinity;
    most = bias[j] > most ? bias[j] : most;
  }
  return most;
}

// The rows of a tile of a dense mask as numbers to add.
struct TileBias {
  const float* rows = nullptr;  // null: nothing to add
  int stride = 0;               // 0: one row for all
  bool none = false;            // nothing is allowed

  TileBias(const Problem& a, int64_t b, int64_t h, int first_row, Range live, int first_key,
           float* scratch) {
    if (a.mask.type == MaskType::kNone) {
      return;
    }
    const int keys = attention::smaller(kTileKeys, a.keys - first_key);
    const bool same = a.mask.strides[2] == 0;
    rows = scratch;
    stride = same ? 0 : kTileKeys;
    none = true;
    const Range read = same ? Range{0, 1} : live;
    for (int i = read.begin; i < read.end; ++i) {
      const int64_t offset = mask_offset(a.mask, b, h, first_row + i, first_key);
      const float most = mask_row(a.mask, offset, keys, scratch + i * kTileKeys);
      none = none && most == -kInfinity;
    }
  }
};

// -- dead keys -----------------------------------------------------------------------------------
// A key is dead for a kv head if no query may attend it. Outside `live` arithmetic knows; inside it
// only a key that holds infinities or NaN is looked at, pair by pair.
class DeadKeys {
 public:
  DeadKeys(const Problem& a, const Sequence& s, int64_t kv_head) : a_(a), s_(s), kv_head_(kv_head) {
    const int rows = live_queries(a, s);
    if (!a.key_lengths.data || a.key_lengths.stride == 0) {
      const int keys = a.key_lengths.data ? clamped(a.key_lengths.at(s.b), s.keys) : s.keys;
      live_ = attention::keys_of_some({0, rows}, s.band, keys);
      return;
    }
    live_ = {INT_MAX, 0};
    for (int i = 0; i < rows; ++i) {
      const Range keys = keys_of(a, s, i);
      if (!is_empty(keys)) {
        live_ = {attention::smaller(live_.begin, keys.begin),
                 attention::larger(live_.end, keys.end)};
      }
    }
  }

  // For keys counted from a tile's first one.
  struct OfTile {
    const DeadKeys& keys;
    int first;
    bool before(int j) const { return !contains(keys.live_, first + j); }
    bool after(int j) const { return keys.nobody_attends(first + j); }
  };
  OfTile of_tile(int first) const { return {*this, first}; }

  // Whether none of these keys is dead, whatever they hold.
  bool none(int first, int count) const {
    return a_.mask.type == MaskType::kNone &&
           (!a_.key_lengths.data || a_.key_lengths.stride == 0) && live_.begin <= first &&
           first + count <= live_.end;
  }

 private:
  bool nobody_attends(int key) const {
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
// The bits of one tile, drawn row by row.
class TileDropout {
 public:
  TileDropout(const Problem& a, int64_t b, int64_t h, int first_row, int first_key)
      : threshold_(static_cast<uint32_t>(a.dropout.threshold)), first_row_(first_row) {
    if (threshold_ == 0) {
      return;
    }
    head_key_ = dropout::absorb(dropout::absorb(a.dropout.row_key, static_cast<uint32_t>(b)),
                                static_cast<uint32_t>(h));
    for (int j = 0; j < kTileKeys; ++j) {
      const uint32_t key = static_cast<uint32_t>(first_key + j);
      columns_[j] = dropout::absorb(a.dropout.column_key, dropout::lattice_unit(key));
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
    return {*this, dropout::absorb(head_key_, dropout::lattice_unit(position)),
            16 * static_cast<uint32_t>(dropout::lattice_bit(position))};
  }

 private:
  uint32_t threshold_;
  int first_row_;
  uint32_t head_key_ = 0;
  uint32_t columns_[kTileKeys], shifts_[kTileKeys];
};

}  // namespace fastattn::FASTATTN_ISA
