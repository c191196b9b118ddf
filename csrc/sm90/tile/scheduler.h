// The tile scheduler of a persistent attention kernel: which rows of which head tile number t is.
//
// Heads are grouped into L2 swizzle groups, whose keys and values fit into the L2 cache together.
// Within a group the last rows of every head come first: under a causal mask their tiles are the
// longest, and short tiles at the end balance the load.
#pragma once

#include <cstdint>

#include "common/pure.h"

namespace fastattn::sm90 {

struct TileOrder {
  int row_tiles;      // tiles of one head
  int heads;          // of all batches
  int swizzle_group;  // heads of an L2 swizzle group; 1: head after head
};

struct TilePlace {
  int row_tile;
  int head;
};

FASTATTN_PURE TilePlace tile_place(const TileOrder& order, int tile) {
  const int group_tiles = order.swizzle_group * order.row_tiles;
  const int swizzle_group = tile / group_tiles;
  const int within = tile - swizzle_group * group_tiles;
  const int first_head = swizzle_group * order.swizzle_group;
  const int left = order.heads - first_head;
  const int width = order.swizzle_group < left ? order.swizzle_group : left;
  const int rank = within / width;
  return {order.row_tiles - 1 - rank, first_head + within - rank * width};
}

// The tile scheduler of packed sequences. Tiles are numbered sequence by sequence, `tile_rows` rows
// each, none for an empty sequence. Callers ask for increasing numbers. order: the sequences in the
// order of their tiles; null: in memory order.
struct PackedTileScheduler {
  int sequence;   // position in that order
  int first;      // number of this sequence's first tile
  int row_tiles;  // tiles of one head of it
};

FASTATTN_PURE int sequence_at(const int32_t* order, int place) {
  return order ? order[place] : place;
}

// Advances to the sequence of tile number `tile`, or to `sequences` if there is no such tile.
// Sequence b has rows offsets[b] to offsets[b + 1].
FASTATTN_PURE void advance_to(PackedTileScheduler& scheduler, const int32_t* offsets, int sequences,
                              int heads, int tile_rows, int tile, const int32_t* order = nullptr) {
  for (; scheduler.sequence < sequences; ++scheduler.sequence) {
    const int sequence = sequence_at(order, scheduler.sequence);
    const int rows = offsets[sequence + 1] - offsets[sequence];
    scheduler.row_tiles = (rows + tile_rows - 1) / tile_rows;
    if (tile < scheduler.first + scheduler.row_tiles * heads) {
      return;
    }
    scheduler.first += scheduler.row_tiles * heads;
  }
}

}  // namespace fastattn::sm90
