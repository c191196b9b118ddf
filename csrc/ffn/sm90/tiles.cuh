// A launch's arguments, and the order of its tiles.
#pragma once

#include "common/pure.h"
#include "ffn/sm90/config.cuh"

namespace fastattn::ffn {

struct ProductArguments {
  CUtensorMap a, b;
  int rows, columns, steps;  // steps: of 64 of the summed dimension
  int row_tiles, column_tiles;
  Epilogue epilogue;
};

struct TilePlace {
  int row_tile, column_tile;
};

// Tiles go through groups of eight rows of tiles, column by column: those that are computed at the
// same time share rows of a and columns of b in the L2 cache.
FASTATTN_PURE TilePlace tile_place(int row_tiles, int column_tiles, int number) {
  constexpr int kGroupTiles = 8;
  const int group = number / (kGroupTiles * column_tiles);
  const int within = number - group * kGroupTiles * column_tiles;
  const int left = row_tiles - group * kGroupTiles;
  const int height = left < kGroupTiles ? left : kGroupTiles;
  const int column = within / height;
  return {group * kGroupTiles + within - column * height, column};
}

__device__ __forceinline__ int tile_count(const ProductArguments& args) {
  return args.row_tiles * args.column_tiles;
}

}  // namespace fastattn::ffn
