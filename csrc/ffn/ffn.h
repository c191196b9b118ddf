// The feed-forward network on CPU: the kernels' arguments and how the work is divided.
//
//   y = dropout_out(dropout(act(x w1^T + b1)) w2^T + b2) [+ residual]
//
// The forward is two matrix products, the backward four, each with an epilogue that uses its sums
// while they are in the cache. A product packs its right operand into panels and divides the result
// into blocks of rows and panels. One worker computes a block, every sum in one order, so the bits
// depend neither on the number of threads nor on the block. With few rows a weight is not packed
// and sums have another order, which batch-invariant products of rows with a weight always use.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cpu/dispatch.h"
#include "cpu/row_dropout.h"
#include "ffn/activation.h"

namespace fastattn::ffn {

// A block of a result: a multiple of the micro-kernels' 12 and 6 rows. A panel and a strip of rows
// of kBlockDepth 32-bit units stay in the L1 cache (one Zen 5 thread, 256 rows, D = 512, F = 2048,
// forward in bf16 and fp32: 2.18 and 4.6 ms, at depth 256 2.24 and more than 5).
constexpr int kBlockRows = 96;
constexpr int kBlockDepth = 128;
constexpr int kBlockPanels = 16;
// The widest panel: two AVX-512 vectors.
constexpr int kMaxPanel = 32;
constexpr int kMaxLanes = 16;
// An odd number of cache lines, so that rows (or the depth) map to many sets of the L1 cache.
constexpr int kOperandPitch = kBlockDepth + 16;
constexpr int kAcrossPitch = kBlockRows + 16;
// A worker's workspace for products of at most `rows` rows: its sums (or shallow panels, for which
// rows = kBlockRows), and unless operands are read in place its left block and a panel of its own.
constexpr int64_t sum_floats(int64_t rows) {
  return (rows < kBlockRows ? rows : kBlockRows) * kBlockPanels * kMaxPanel;
}
constexpr int64_t kOperandFloats = kBlockDepth * kAcrossPitch;
static_assert(kBlockRows * kOperandPitch <= kOperandFloats);
constexpr int64_t worker_floats(int64_t rows, bool in_place = false) {
  return sum_floats(rows) + (in_place ? 0 : kOperandFloats + kBlockDepth * kMaxPanel);
}

// Columns that are a multiple of a page apart map to one set of the L1 cache. From copy_rows rows
// of the left operand on, a product in place copies parts of a right one with such columns, or with
// any columns if it converts them.
constexpr int kAliasBytes = 4096;
constexpr bool copies_columns(int64_t rows, int copy_rows, bool converts, int64_t stride_bytes) {
  return rows >= copy_rows && (converts || stride_bytes % kAliasBytes == 0);
}

// Largest depth for which a weight's gradient is stored from registers.
constexpr int kShallowDepth = 96;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Row stride of what is kept between two products: an odd number of lines, as above (2048 x 512, F
// = 2048 in bf16, one Zen 5 thread, backward with relu: 39.7 ms instead of 41.5).
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

// Epilogue of a block of sums. Tensors have the product's dtype unless noted.
struct Epilogue {
  enum Kind { kStore, kActivate, kDifferentiate };
  Kind kind = kStore;
  Dropout dropout;
  const void* bias = nullptr;  // [columns], may be null

  // kStore: out = dropout(sum + bias) + residual; the sums alone where columns are not contiguous
  DType out_type = DType::kFloat32;
  Matrix out;
  const void* residual = nullptr;  // of out's type, contiguous rows; may be null

  // kActivate: hidden = sum + bias, activated = dropout(act(hidden)); relu stores the latter in
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
  // Gated (otherwise 0): the forward's hidden columns c and gate + c share a panel; the backward
  // has `gate` sums per row.
  int64_t gate = 0;
  // b's packed panels; null if workers pack their own: a single block of rows reads a panel once.
  float* packed = nullptr;
  // Both operands are contiguous along the depth and read in place.
  bool unpacked = false;
  // The transposed product may be computed instead: the sums alone are stored, and there is memory
  // to pack either operand.
  bool may_transpose = false;
  Epilogue epilogue;

  int64_t row_blocks() const { return ceil_div(a.rows, kBlockRows); }
  bool can_be_unpacked() const { return a.column_stride == 1 && b.row_stride == 1; }
  // Such as a weight's gradient with few rows: sums are stored from registers to the result.
  bool is_shallow() const {
    return may_transpose && a.columns <= kShallowDepth && a.column_stride != 1 &&
           b.column_stride == 1;
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
  int panel;  // columns
  // Rows of the left operand up to which the right one is not packed, by dtype.
  int unpacked_rows[3];
  // See copies_columns; by dtype.
  int copy_rows[3];
  bool converts_copies[3];
  void (*pack)(const Product&, int64_t first_panel, int64_t last_panel);
  void (*multiply)(const Product&, int64_t row_block, int64_t first_panel, int64_t last_panel,
                   float* workspace);
  void (*drop_output)(const Output&, int64_t row_block);
  // result[c] = sum of the partials' column c, for columns [first, last)
  void (*reduce)(const float* partials, int64_t count, int64_t columns, void* result, DType type,
                 int64_t first, int64_t last);
};

FASTATTN_DISPATCH(Kernels)

// Whether products of `rows` rows read operands that are contiguous along the depth unpacked.
inline bool are_unpacked(int64_t rows, DType type, bool batch_invariant) {
  return batch_invariant || rows <= kernels().unpacked_rows[static_cast<int>(type)];
}

}  // namespace fastattn::ffn
