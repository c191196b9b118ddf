// Attention on CPU: what a binding hands to the kernels, the scratch memory they need, and how the
// work is cut. Shapes: q, out, dout, dq [batch, heads, queries, ...], k, v, dk, dv [batch,
// kv_heads, keys, ...], statistics (lse, dlse, delta) [batch, heads, queries] contiguous. Columns
// of q, k, v and their kin are contiguous, all other strides are free. Packed batches have the same
// views with a batch stride of 0: their sequences lie one behind the other in the rows.
//
// Work is cut into tasks that do not depend on the number of threads; workers draw them from a
// Queue. Each task computes its results alone and in one order, so the bits do not depend on who
// does what.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/key_range.h"
#include "common/dtype.h"
#include "common/tensor_view.h"
#include "cpu/dispatch.h"
#include "cpu/threads.h"

namespace fastattn::attention {

// Rows of queries and of keys in a tile. 96 is a multiple of the micro-kernel's 6 rows; 128 keys
// make long products with v (one Zen 5 thread, bf16 forward of 1024 x 1024: 13.0 ms, with 64 keys
// 13.4). Both are multiples of 16, the period of the dropout lattice.
constexpr int kTileRows = 96;
constexpr int kTileKeys = 128;
// Rows of a dense mask that are floats at a time: gradients in bf16 are made of two rows.
constexpr int kBiasRows = 2;

// One query (decoding): keys whose results are a task of their own. Wherever the work is not split
// over workers the results are joined in the same way, so that the bits are the same.
constexpr int kSplitKeys = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// Dims in scratch memory end at whole vectors of any instruction set.
constexpr int64_t padded(int64_t dim) {
  return ceil_div(dim, 16) * 16;
}

enum class MaskType { kNone, kBool, kFloat32, kBFloat16, kFloat16, kFloat64 };

// [batch, heads, queries, keys]; broadcast dimensions have size 1 and stride 0.
struct MaskView {
  MaskType type = MaskType::kNone;
  void* data = nullptr;
  int64_t sizes[4] = {}, strides[4] = {};
};

struct Lengths {
  const void* data = nullptr;  // null: no restriction
  bool wide = false;           // int64, otherwise int32
  int64_t stride = 0;          // queries if there is one a query, otherwise 0

  int64_t at(int64_t index) const {
    return wide ? static_cast<const int64_t*>(data)[index]
                : static_cast<const int32_t*>(data)[index];
  }
};

struct Dropout {
  int threshold = 0;  // 0: no dropout
  float scale = 1.0f;
  uint32_t row_key = 0, column_key = 0;  // hashed up to the stream
};

// One entry of the batch: where its rows begin, how many it has, and its band.
struct Sequence {
  int64_t b;
  int64_t first_query, first_key;
  int queries, keys;
  Bounds band;
};

struct Problem {
  DType type;
  int64_t batch, heads, kv_heads;
  int queries, keys, head_dim, value_dim;  // queries, keys: of the longest entry
  TensorView q, k, v;
  TensorView statistics;  // strides only
  // Packed: [batch + 1] rows at which sequences begin and end. Null: entries of the same size.
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  MaskView mask;
  Lengths key_lengths, query_lengths;
  int window_left, window_right;  // not negative; unlimited: at least queries + keys
  bool bottom_right;              // the last query faces the last key, not the first the first
  float scale;
  Dropout dropout;

  Sequence sequence(int64_t b) const {
    Sequence s = {b, 0, 0, queries, keys, {window_left, window_right, 0}};
    if (cu_seqlens_q) {
      s.first_query = cu_seqlens_q[b];
      s.first_key = cu_seqlens_k[b];
      s.queries = cu_seqlens_q[b + 1] - cu_seqlens_q[b];
      s.keys = cu_seqlens_k[b + 1] - cu_seqlens_k[b];
    }
    s.band.diagonal = bottom_right ? s.keys - s.queries : 0;
    return s;
  }

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 0; }
  int64_t row_tiles() const { return ceil_div(queries, kTileRows); }
  // Rows of a tile that scratch memory has room for, even: short calls touch little memory.
  int64_t rows_in_tile() const {
    return queries < kTileRows ? ceil_div(queries, 2) * 2 : kTileRows;
  }
  int64_t key_tiles() const { return ceil_div(keys, kTileKeys); }
};

struct Forward : Problem {
  TensorView out;
  float* lse;
  float* parts;  // one query and several splits: what each split gives, [batch, heads, splits()]

  int64_t splits() const { return keys > kSplitKeys ? ceil_div(keys, kSplitKeys) : 1; }
  // Heads of a group that one query takes at a time.
  int heads_at_once() const { return static_cast<int>(std::clamp<int64_t>(group(), 1, kTileRows)); }
  // A part: sums weighted by 2^(exponent - m), then m and l.
  int64_t part_floats() const { return padded(value_dim) + padded(2); }
  int64_t parts_floats() const {
    return queries == 1 && splits() > 1 ? batch * heads * splits() * part_floats() : 0;
  }
};

struct Backward : Problem {
  TensorView out, dout;     // null data: the gradient of out is 0
  const float *lse, *dlse;  // dlse may be null
  TensorView dq, dk, dv;    // null data: not wanted
  MaskView dmask;           // type kNone: not wanted
  // sum over a row of out * dout, less dlse: what every dp of the row is compared with
  float* delta;
  // Whether delta comes from the weights, not from the rounded out. A gradient of the mask is a sum
  // of scores' gradients alone, whose rounding nothing hides.
  bool exact_delta;
};

// -- scratch -------------------------------------------------------------------------------------
// Pieces of one worker's memory; from null it only measures.
class Carver {
 public:
  explicit Carver(float* base) : base_(base) {}

  float* take(int64_t count) {
    float* piece = base_ ? base_ + used_ : nullptr;
    used_ += padded(count);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// Sizes count floats, whatever a kernel keeps there. "rows" hold one position a row; "columns" one
// position a column; "pairs" are rows joined two by two where products take pairs of bf16.
struct ForwardScratch {
  float *q_rows, *s, *p, *o, *bias, *rows, *k_columns, *v_pairs, *packed, *parts;
  int64_t floats;

  ForwardScratch(const Forward& a, float* base) {
    Carver carver(base);
    const int64_t D = padded(a.head_dim), E = padded(a.value_dim), N = a.key_tiles() * kTileKeys;
    const int64_t heads = a.heads_at_once();
    const int64_t tile = a.queries == 1 ? 0 : a.rows_in_tile();  // decoding has no tiles of queries
    const int64_t M = tile > heads ? tile : heads;
    q_rows = carver.take(M * D);
    s = carver.take(M * kTileKeys);
    p = carver.take(tile * kTileKeys);
    o = carver.take(tile * E);
    bias = carver.take(kBiasRows * kTileKeys);
    rows = carver.take(tile ? kTileKeys * (D > E ? D : E) : 0);
    k_columns = carver.take(tile ? N * D : 0);
    v_pairs = carver.take(tile ? N * E : 0);
    packed = carver.take(tile ? a.key_tiles() : 0);
    parts = carver.take(2 * heads * a.part_floats());
    floats = carver.used();
  }
};

struct BackwardScratch {
  float *q_rows, *q_pairs, *dout_rows, *dout_pairs;  // of a tile of queries
  float *k_rows, *k_columns, *k_pairs, *v_columns;   // of a tile of keys
  float *s, *dp, *p_pairs, *ds_rows, *ds_pairs, *bias, *sums;
  float *dk, *dv;
  float* dq;  // of every query of a group of heads, or of one tile
  int64_t floats;

  BackwardScratch(const Problem& a, float* base) {
    Carver carver(base);
    const int64_t D = padded(a.head_dim), E = padded(a.value_dim), larger = D > E ? D : E;
    const int64_t M = a.rows_in_tile(), tile = M * kTileKeys;
    q_rows = carver.take(M * D);
    q_pairs = carver.take(M * D);
    dout_rows = carver.take(M * E);
    dout_pairs = carver.take(M * E);
    k_rows = carver.take(kTileKeys * larger);
    k_columns = carver.take(kTileKeys * D);
    k_pairs = carver.take(kTileKeys * D);
    v_columns = carver.take(kTileKeys * E);
    s = carver.take(tile);
    dp = carver.take(tile);
    p_pairs = carver.take(tile);
    ds_rows = carver.take(tile);
    ds_pairs = carver.take(tile);
    bias = carver.take(kBiasRows * kTileKeys);
    sums = carver.take(tile);
    dk = carver.take(kTileKeys * D);
    dv = carver.take(kTileKeys * E);
    dq = carver.take((a.group() > 0 ? a.group() : 1) * a.row_tiles() * M * D);
    floats = carver.used();
  }
};

// -- kernels -------------------------------------------------------------------------------------
// Each draws tasks until there are none. Tasks: forward (batch, kv head, head of the group, tile of
// queries), or (batch, kv head, split) for one query; join_splits (batch, kv head); delta and dq
// (batch, kv head, head, tile of queries); dkv (batch, kv head, tile of keys); all_gradients
// (batch, kv head); dmask (batch or 1, heads or 1, tile of queries or 1, tile of keys or 1).
struct Kernels {
  void (*forward)(const Forward&, Queue&, float* scratch);
  void (*join_splits)(const Forward&, Queue&, float* scratch);
  void (*delta)(const Backward&, Queue&, float* scratch);
  void (*dq)(const Backward&, Queue&, float* scratch);
  void (*dkv)(const Backward&, Queue&, float* scratch);
  void (*all_gradients)(const Backward&, Queue&, float* scratch);
  void (*dmask)(const Backward&, Queue&, float* scratch);
};

FASTATTN_DISPATCH(Kernels)

}  // namespace fastattn::attention
