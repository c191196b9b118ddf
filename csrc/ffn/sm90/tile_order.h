// The order in which a product's tiles are computed.
#pragma once

#include "common/pure.h"

namespace fastattn::ffn {

struct TilePlace {
  int row_tile, column_tile, part;
};

// Tiles go through groups of eight rows of tiles, column by column: those that are computed at the
// same time share rows of a and columns of b in the L2 cache. The first parts of all tiles come
// first, if tiles are computed in parts.
FASTATTN_PURE TilePlace tile_place(int row_tiles, int column_tiles, int number) {
  constexpr int kGroupTiles = 8;
  const int part = number / (row_tiles * column_tiles);
  number -= part * row_tiles * column_tiles;
  const int group = number / (kGroupTiles * column_tiles);
  const int within = number - group * kGroupTiles * column_tiles;
  const int left = row_tiles - group * kGroupTiles;
  const int height = left < kGroupTiles ? left : kGroupTiles;
  const int column = within / height;
  return {group * kGroupTiles + within - column * height, column, part};
}

}  // namespace fastattn::ffn
