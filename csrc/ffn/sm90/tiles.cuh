// A launch's arguments and the number of its tiles.
#pragma once

#include "ffn/sm90/config.cuh"
#include "ffn/sm90/tile_order.h"

namespace fastattn::ffn {

struct ProductArguments {
  CUtensorMap a, b;
  // Tensor maps of the epilogue, if it uses them. loaded: hidden of kDhidden, or the residual; out:
  // hidden of kUp, dpre, y, dx or dw.
  CUtensorMap loaded, out, activated;
  int rows, columns, steps;  // steps: of 64 of the summed dimension, in each part of a tile
  int row_tiles, column_tiles, parts;
  Epilogue epilogue;
#ifdef FASTATTN_TRIAL_FFN_DEPENDENT
  bool independent;
#endif
};

__device__ __forceinline__ int tile_count(const ProductArguments& args) {
  return args.row_tiles * args.column_tiles * args.parts;
}
__device__ __forceinline__ TilePlace tile_place(const ProductArguments& args, int number) {
  return tile_place(args.row_tiles, args.column_tiles, number);
}

}  // namespace fastattn::ffn
