// Numbers the blocks of packed sequences. The numbers follow from the offsets alone, without a
// table. Sequence b has rows offsets[b] to offsets[b + 1].
#pragma once

#include "common/pure.h"

namespace fastattn::attention {

// The number of a sequence's first block of `size` rows. Between it and the next sequence's there
// are numbers for all of its blocks, and sometimes one for an empty block. Sequence number
// `sequences` is the rows after the last sequence.
FASTATTN_PURE int first_block(const int* offsets, int sequence, int size) {
  return offsets[sequence] / size + sequence;
}

// How many numbers `rows` rows of packed sequences need.
FASTATTN_PURE int packed_blocks(int rows, int sequences, int size) {
  return rows / size + sequences + 1;
}

// The sequence that a number belongs to, by bisection.
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
