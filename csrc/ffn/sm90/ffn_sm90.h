// The feed-forward network on Hopper: what its launches compute, without CUDA or torch.
//
//   y = dropout_out(dropout(act(x w1^T + b1)) w2^T + b2) [+ residual]
//
// Every matrix product is one kernel (ffn_product_sm90.cuh), an instance for each type and step:
//
//   step            out           of a          and b         epilogue
//   kUp             hidden, a     x [M, D]      w1 [F, D]     + b1, activation, dropout
//   kUpGated        hidden, a     x [M, D]      w1 [2F, D]    the same for pairs of gate and up
//   kDown           y [M, E]      a [M, F]      w2 [E, F]     + b2, dropout, + residual
//   kDhidden        dpre, a       dy [M, E]     w2 [E, F]     dropout, derivative, column sums
//   kDhiddenGated   dpre, a       dy [M, E]     w2 [E, F]     the same for pairs
//   kDx             dx [M, D]     dpre [M, W]   w1 [W, D]     none
//   kDw             dw1 [W, D]    dpre [M, W]   x [M, D]      none (dw2 [E, F]: dy and a)
//
// M rows, W = F or 2F. hidden and dpre are [M, W], the activation after dropout `a` is [M, F]. relu
// saves a instead of hidden; the backward computes the others' again from hidden. All operands are
// read where they are: no copy is transposed.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "ffn/activation.h"

namespace fastattn::ffn {

enum class Step { kUp, kUpGated, kDown, kDhidden, kDhiddenGated, kDx, kDw };

constexpr bool is_gated(Step step) {
  return step == Step::kUpGated || step == Step::kDhiddenGated;
}

// 16-bit elements of contiguous columns; rows are `stride` elements apart.
struct Matrix {
  void* data = nullptr;
  int rows = 0, columns = 0;
  int64_t stride = 0;
};

struct Dropout {
  const int64_t* seed = nullptr;  // null: no dropout
  uint32_t stream = 0;
  int threshold = 0;
  float keep_scale = 1.0f;
};

// Tensors have the product's type and contiguous rows unless noted. Results that are null are not
// written.
struct Epilogue {
  void* out = nullptr;        // hidden (null for relu), y, dpre, dx or dw
  void* activated = nullptr;  // a, of kUp and kDhidden
  Activation activation = Activation::kRelu;
  Dropout dropout;
  const void* bias = nullptr;  // may be null
  // kDown
  const void* residual = nullptr;  // of out's type; may be null
  int64_t residual_stride = 0;
  bool out_is_float = false;  // kDw: out has fp32 parts
  // kDhidden
  const void* hidden = nullptr;
  float* sums = nullptr;  // of dpre's columns: [row_tiles(rows)][W]
};

struct Product {
  DType dtype;
  Matrix a, b;
  Epilogue epilogue;
  int parts = 1;  // of kDw: out is fp32 [parts][rows of the result][columns] if there are more
  // FASTATTN_TRIALS=ffn_dependent: whether the product reads nothing that the launch before it
  // writes and writes nothing that it accesses, so that the two may run at the same time.
  bool independent = false;
};

// The sizes of a product's result (of `a` and not of hidden, for the gated steps) and of its sums.
struct ProductShape {
  int rows, columns, depth;
};
constexpr ProductShape shape_of(Step step, const Matrix& a, const Matrix& b) {
  switch (step) {
    case Step::kUpGated:
      return {a.rows, b.rows / 2, a.columns};
    case Step::kUp:
    case Step::kDown:
      return {a.rows, b.rows, a.columns};
    case Step::kDw:
      return {a.columns, b.columns, a.rows};
    default:
      return {a.rows, b.columns, a.columns};
  }
}

// Rows of a tile of every product, and what one step of a tile sums over.
constexpr int kTileRows = 128, kDepth = 64;
constexpr int tiles_of(int size, int tile) {
  return (size + tile - 1) / tile;
}
constexpr int row_tiles(int rows) {
  return tiles_of(rows, kTileRows);
}

// The gradient of a weight sums over the rows of a batch and may have few tiles for a GPU's
// multiprocessors. Then each tile is computed in parts (split-K), of some of the steps each, which
// sum_columns adds. Their number is the one of the shortest time, in steps: waves of tiles times
// steps, and the addition. It is the same on every GPU, so results have the same bits.
constexpr int kDwColumns = 256;
constexpr int kMaxParts = 8;
constexpr int parts_of_dw(const ProductShape& shape) {
  constexpr int kMultiprocessors = 132;  // of an H100 or H200
  // The addition: its launch, and how many tiles of parts are written and read in a step's time.
  constexpr int kFewestSteps = 16, kLaunchSteps = 8, kPartsOfStep = 8;
  const int tiles = row_tiles(shape.rows) * tiles_of(shape.columns, kDwColumns);
  const int steps = tiles_of(shape.depth, kDepth);
  int best = 1, shortest = tiles_of(tiles, kMultiprocessors) * steps;
  for (int parts = 2; parts <= kMaxParts && tiles <= 2 * kMultiprocessors; ++parts) {
    const int steps_of_part = tiles_of(steps, parts);
    const int time = tiles_of(tiles * parts, kMultiprocessors) * steps_of_part + kLaunchSteps +
                     tiles * parts / kPartsOfStep;
    if (steps_of_part >= kFewestSteps && time < shortest) {
      best = parts;
      shortest = time;
    }
  }
  return best;
}

// Returns nullptr or an error message.
template <DType kType, Step kStep>
const char* ffn_product_sm90(const Product& product, cuda::Stream stream);

// -- column sums ----------------------------------------------------------------------------------
// The gradient of y as the products read it, and the sums of its columns.
struct DropGradient {
  DType dtype;        // of the products
  const void* dy;     // [rows, columns]
  bool dy_is_float;   // otherwise of the products' type
  void* dropped;      // after dropout, in the products' type; may be null
  float* sums;        // [row_tiles(rows)][columns]; may be null
  int rows, columns;  // columns: a multiple of 8
  Dropout dropout;
};
const char* drop_gradient(const DropGradient& problem, cuda::Stream stream);

// out[c] = the sum of column c, always added in the same order. columns: a multiple of 8. out:
// aligned to 16 bytes.
struct SumColumns {
  DType dtype;  // of out
  const float* sums;
  void* out;
  int rows, columns;
};
const char* sum_columns(const SumColumns& problem, cuda::Stream stream);

}  // namespace fastattn::ffn
