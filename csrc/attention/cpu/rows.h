// Keys and values of a tile where they lie, contiguous or in pages, and their prefetch.
#pragma once

#include "attention/cpu/softmax.h"

namespace fastattn::attention::cpu::FASTATTN_ISA {

// Rows that are processed together. Groups begin at multiples of it, so that none is in two pages.
constexpr int kGroup = 4;
static_assert(kTileKeys % kMinPage == 0 && kMinPage % kGroup == 0);

// Keys or values of one head, at most a tile's: one row after another or, if kPaged, in pages that
// are smaller than a tile.
template <class T, bool kPaged>
struct Rows {
  // Where kMinPage rows each begin, first those with row 0; if contiguous, where all do.
  const T* parts[kPaged ? kTileKeys / kMinPage : 1];
  int64_t stride = 0;
  int count = 0, dim = 0;
  int before = 0;  // rows of the first part before row 0
  bool prefetch_all = false;

  Rows() {}  // does not set parts
  // Row j, the first of a group; the group's other rows follow.
  const T* group(int j) const {
    if constexpr (kPaged) {
      const unsigned row = before + j;
      return parts[row / kMinPage] + row % kMinPage * stride;
    }
    return parts[0] + j * stride;
  }
};

// Prefetches rows into L2, a few at a time beside computations. The hardware prefetcher follows
// contiguous rows, but not their first ones, nor rows far apart, nor far enough ahead for main
// memory. L2, because prefetches into L1 occupy the few buffers that its misses need (pages of 4 KB
// from main memory, one Zen 4 thread: 24 GB/s, and 15 into L1).
template <class T, bool kPaged>
class Prefetch {
 public:
  // passes: how many times the computation beside them loops over its own rows. With many, one row
  // for each of its groups suffices, which delays its own cache misses less.
  explicit Prefetch(const Rows<T, kPaged>& rows, int passes = 1)
      : rows_(rows), one_row_(passes >= kGroup) {
    constexpr int kBeginning = 4096 / sizeof(T);
    end_ = rows.prefetch_all ? rows.count
                             : smaller(rows.count, ceil_div(kBeginning, larger(rows.dim, 1)));
    row_ = end_ > 0 ? rows.group(0) : nullptr;
  }

  // Beside a group: one row, or kGroup, the last of which may lie after the end (prefetches of
  // memory that does not exist do nothing). always_inline: GCC 12 removes calls of a function that
  // only prefetches.
  __attribute__((always_inline)) void next() { one_row_ ? prefetch<1>() : prefetch<kGroup>(); }
  __attribute__((always_inline)) void rest() {
    while (j_ < end_) {
      prefetch<1>();
    }
  }

 private:
  // kCount rows of one part.
  template <int kCount>
  __attribute__((always_inline)) void prefetch() {
    if (j_ >= end_) {
      return;
    }
    constexpr int kLine = 64 / sizeof(T);
    if (kPaged && (rows_.before + j_) % kMinPage == 0) {
      row_ = rows_.group(j_);
    }
    const int64_t stride = rows_.stride;
    for (int d = 0; d < rows_.dim; d += kLine) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        __builtin_prefetch(row_ + i * stride + d, 0, 2);
      }
    }
    row_ += kCount * stride;
    j_ += kCount;
  }

  const Rows<T, kPaged>& rows_;
  const T* row_;  // row j_, unless a part begins there
  int j_ = 0, end_;
  bool one_row_;
};

// `count` keys (or values) of a tile of a sequence from `first` on, a multiple of kGroup.
template <class T, bool kPaged>
inline Rows<T, kPaged> rows_of_keys(const Problem& a, const TensorView& x, const Sequence& s,
                                    int64_t h, int first, int count, int dim, bool prefetch_all) {
  Rows<T, kPaged> rows;
  rows.stride = x.row_stride;
  rows.count = count;
  rows.dim = dim;
  rows.prefetch_all = prefetch_all;
  const T* data = static_cast<const T*>(x.data);
  if constexpr (kPaged) {
    rows.before = first % kMinPage;
    const int32_t* table = a.pages.table + s.b * a.pages.per_sequence;
    int part = 0;
    // Only keys before the length are counted, so that the table's entry is a page.
    for (int row = first - rows.before; row < first + count; row += kMinPage) {
      rows.parts[part++] = data + table[row >> a.pages.shift] * x.batch_stride + h * x.head_stride +
                           (row & (a.pages.size - 1)) * x.row_stride;
    }
  } else {
    const bool in_page = a.pages.table && count > 0;
    rows.parts[0] =
        data + (in_page ? paged_offset(a.pages, x, s, h, first) : key_offset(x, s, h, first));
  }
  return rows;
}

}  // namespace fastattn::attention::cpu::FASTATTN_ISA
