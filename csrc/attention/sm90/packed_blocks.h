// Packed sequences in blocks: a number for every block of every sequence, found
// from the offsets alone, without a table. Sequence b has rows offsets[b] to
// offsets[b + 1].
#pragma once

#include "common/pure.h"

namespace fastattn::attention {

// The number of a sequence's first block of `size` rows. Up to the next
// sequence's there is room for all of its blocks, and sometimes for one more,
// which holds nothing. Sequence number `sequences` is the rows behind the last
// one.
FASTATTN_PURE int first_block(const int* offsets, int sequence, int size) {
  return offsets[sequence] / size + sequence;
}

// Numbers that `rows` rows of packed sequences take.
FASTATTN_PURE int packed_blocks(int rows, int sequences, int size) {
  return rows / size + sequences + 1;
}

// The sequence that a number belongs to.
FASTATTN_PURE int sequence_of_block(const int* offsets, int sequences, int size, int number) {
  int first = 0, last = sequences;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (first_block(offsets, middle, size) <= number) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

}  // namespace fastattn::attention
