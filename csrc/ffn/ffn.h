// The feed-forward network on CPU: what a binding hands to the kernels and how the work is cut.
//
//   y = dropout_out(dropout(act(x w1^T + b1)) w2^T + b2) [+ residual]
//
// Everything is a matrix product and what becomes of its sums while they are in the cache (Finish):
// the forward is two products, the backward four. A product packs its right operand into panels and
// cuts the result into blocks of rows and panels. Each block is computed by one worker, every
// sum in one order, so the bits depend neither on the number of threads nor on the block. With few
// rows an fp32 weight is read as it lies and sums have another order; batch-invariant products have
// that one always.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cpu/dispatch.h"
#include "cpu/row_dropout.h"

namespace fastattn::ffn {

// A block of a result: a multiple of the micro-kernels' 12 and 6 rows. A panel and a strip of rows
// of kBlockDepth 32-bit units stay in the first cache (one Zen 5 thread, 256 rows, D = 512, F =
// 2048, forward in bf16 and fp32: 2.18 and 4.6 ms, at depth 256 2.24 and more than 5).
constexpr int kBlockRows = 96;
constexpr int kBlockDepth = 128;
constexpr int kBlockPanels = 16;
// The widest panel: two AVX-512 vectors.
constexpr int kMaxPanel = 32;
constexpr int kMaxLanes = 16;
// The padding keeps a block's rows, or its depth, from falling into few sets of the first cache: an
// odd number of lines.
constexpr int kOperandPitch = kBlockDepth + 16;
constexpr int kAcrossPitch = kBlockRows + 16;
// What a worker needs: its block of the left operand, and of the sums or of shallow panels.
constexpr int64_t kOperandFloats = kBlockDepth * kAcrossPitch;
static_assert(kBlockRows * kOperandPitch <= kOperandFloats);
constexpr int64_t kWorkerFloats =
    kOperandFloats + kBlockRows * kBlockPanels * kMaxPanel + kBlockDepth * kMaxPanel;

// Up to this depth a weight's gradient is stored from registers.
constexpr int kShallowDepth = 96;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

enum class Activation : int { kRelu = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3 };

// Columns from row to row of what is kept between two products: an odd number of lines, so that a
// block's rows fall into many sets of the caches (2048 x 512, F = 2048 in bf16, one Zen 5 thread,
// backward with relu: 41.5 ms become 39.7).
inline int64_t inner_pitch(int64_t columns, DType type) {
  const int64_t line = type == DType::kFloat32 ? 16 : 32;
  return (ceil_div(columns, line) | 1) * line;
}

// Strides count elements; one of them is 1.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0, column_stride = 1;

  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
};

// What becomes of a block of sums. Data are of the product's type unless said otherwise.
struct Finish {
  enum Kind { kStore, kActivate, kDifferentiate };
  Kind kind = kStore;
  Dropout dropout;
  const void* bias = nullptr;  // [columns], may be null

  // kStore: out = dropout(sum + bias) + residual; the sums alone where columns are not contiguous
  DType out_type = DType::kFloat32;
  Matrix out;
  const void* residual = nullptr;  // of out's type, contiguous rows; may be null

  // kActivate: hidden = sum + bias, activated = dropout(act(hidden)); relu leaves the latter in
  // hidden. kDifferentiate: the sums are the gradient of `activated`; reads hidden, writes dhidden,
  // `activated` again unless it is null, and the column sums of dhidden of each block of rows.
  Activation activation = Activation::kRelu;
  void* hidden = nullptr;     // [rows, columns]
  void* activated = nullptr;  // [rows, columns or gate], rows inner_pitch() apart
  void* dhidden = nullptr;    // [rows, columns], likewise
  float* partials = nullptr;  // [blocks of rows][columns]; may be null
};

// a [rows, depth] times b [depth, columns].
struct Product {
  explicit Product(DType type) : type(type) {}

  DType type;
  Matrix a, b;
  // Gated: of the forward's hidden columns [0, gate) and [gate, 2 gate), those that belong together
  // share a panel; the backward has `gate` sums a row. Otherwise 0.
  int64_t gate = 0;
  // b's panels; null where workers pack for themselves: a single block of rows reads a panel once.
  float* packed = nullptr;
  // Both operands are contiguous along the depth and read as they lie.
  bool unpacked = false;
  // Its transpose may be computed in its place: the sums alone are stored, and there is memory to
  // pack either operand.
  bool either_way = false;
  Finish finish;

  int64_t row_blocks() const { return ceil_div(a.rows, kBlockRows); }
  bool can_be_unpacked() const {
    return type == DType::kFloat32 && a.column_stride == 1 && b.row_stride == 1;
  }
  // As a weight's gradient of few rows is: sums go from registers into rows of the result.
  bool is_shallow() const {
    return either_way && a.columns <= kShallowDepth && a.column_stride != 1 && b.column_stride == 1;
  }
  bool shares_panels() const { return row_blocks() > 1 && !unpacked; }
  // Floats that `packed` holds, for any instruction set.
  static int64_t packed_floats(int64_t rows, int64_t depth, int64_t columns, bool gated = false) {
    const int64_t pitch = gated ? 2 * ceil_div(columns / 2, kMaxLanes) * kMaxLanes
                                : ceil_div(columns, kMaxPanel) * kMaxPanel;
    return rows > kBlockRows ? depth * pitch : 0;
  }
};

// The gradient of the output as the products read it, and the sums of its columns by blocks of
// rows.
struct Output {
  int64_t rows, columns;
  DType dy_type;
  Matrix dy;
  Dropout dropout;
  DType type;
  void* dropped = nullptr;    // [rows, columns] in `type`; may be null
  float* partials = nullptr;  // [blocks of rows][columns]; may be null
};

struct Kernels {
  int panel;          // columns
  int unpacked_rows;  // of the left operand, up to which packing the right one does not pay
  void (*pack)(const Product&, int64_t first_panel, int64_t last_panel);
  void (*multiply)(const Product&, int64_t row_block, int64_t first_panel, int64_t last_panel,
                   float* worker);
  void (*drop_output)(const Output&, int64_t row_block);
  // result[c] = sum of the partials' column c, for columns [first, last)
  void (*reduce)(const float* partials, int64_t count, int64_t columns, void* result, DType type,
                 int64_t first, int64_t last);
};

FASTATTN_DISPATCH(Kernels)

}  // namespace fastattn::ffn
