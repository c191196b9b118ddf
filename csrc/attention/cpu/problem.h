// Attention on CPU: the kernels' arguments, their workspace, and how the work is divided. Shapes:
// q, out, dout, dq [batch, heads, queries, ...], k, v, dk, dv [batch, kv_heads, keys, ...], lse,
// dlse, delta [batch, heads, queries] contiguous. The other tensors have contiguous columns and any
// other strides. Packed batches have the same views with a batch stride of 0: their sequences
// follow each other in the rows.
//
// Tasks do not depend on the number of threads; workers take them from a Queue. Each task computes
// its results alone and in one order, so the bits do not depend on which worker runs it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention/key_range.h"
#include "common/dropout.h"
#include "common/dtype.h"
#include "common/tensor_view.h"
#include "cpu/dispatch.h"
#include "cpu/threads.h"

namespace fastattn::attention::cpu {

// Rows of queries and of keys in a tile. 96 is a multiple of the micro-kernel's 6 rows; 128 keys
// make the products with v deep (one Zen 5 thread, bf16 forward of 1024 x 1024: 13.0 ms, with 64
// keys 13.4). Both are multiples of 16, the period of the dropout lattice.
constexpr int kTileRows = 96;
constexpr int kTileKeys = 128;
// Rows of a dense mask that are held as floats: gradients in bf16 are computed for two rows at a
// time.
constexpr int kBiasRows = 2;
// Distances between the rows and keys of a tile, rounded up.
constexpr int kTileDistances = kTileRows + kTileKeys;
// Number of tasks that compute sums by distance: tile n of the keys belongs to task n %
// kDistanceParts. With fewer, workers could be idle; each takes 2 / head_dim of q's memory in fp32.
constexpr int kDistanceParts = 8;
// Floats of one tile's sums by distance: rows for each lane of a vector, with margins of a vector.
constexpr int kMaxLanes = 16;
constexpr int kTileSums = kMaxLanes * (kTileDistances + kMaxLanes) + kMaxLanes;

// Largest number of queries, in all heads that share keys, that are computed without packing keys.
// One query of each head never packs them (decode.h; with AVX-512 not measured).
constexpr int kFewRows = 8;
// Largest number of keys for which delta is computed from the weights in half precision: the
// rounding error of out shows where gradients vanish in theory, as in rows with one key.
constexpr int kFewKeys = 4;
// Keys of a split for few queries. Where one worker computes all splits, it combines them in the
// same way, so that the bits are the same.
constexpr int kSplitKeys = 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
// Dims in the workspace are padded to whole vectors of any instruction set.
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
  int64_t stride = 0;          // queries if there is a length per query, otherwise 0

  // Clamped to [0, most], which it is without lengths.
  FASTATTN_INLINE int at(int64_t index, int most) const {
    if (!data) {
      return most;
    }
    const int64_t length =
        wide ? static_cast<const int64_t*>(data)[index] : static_cast<const int32_t*>(data)[index];
    return static_cast<int>(length < 0 ? 0 : length > most ? most : length);
  }
};

// A bias for each head and distance: (query i, key j) adds entry j - i - diagonal + first.
struct DistanceBias {
  float* data = nullptr;  // [batch or 1, heads, count], rows contiguous; null: none
  int64_t batch = 0, batch_stride = 0, head_stride = 0;
  int64_t count = 0, first = 0;

  FASTATTN_INLINE float* row(int64_t b, int64_t h) const {
    return data + (batch > 1 ? b * batch_stride : 0) + h * head_stride;
  }
};

// Keys and values in pages of 2^shift keys, at least kMinPage: key j of sequence b is row j %
// size of page table[b * per_sequence + j / size]. The batch strides of k and v are those of pages.
// Entries for keys beyond the key length may be any numbers and are not read.
constexpr int kMinPage = 16;
struct Pages {
  const int32_t* table = nullptr;  // null: keys and values are not in pages
  int64_t per_sequence = 0;
  int size = 0, shift = 0;

  int32_t of(int64_t b, int key) const { return table[b * per_sequence + (key >> shift)]; }
};

struct Dropout {
  int threshold = 0;  // 0: no dropout
  float scale = 1.0f;
  uint32_t row_key = 0, column_key = 0;  // hashed up to the stream
  dropout::Origin origin;
};

// One entry of the batch: where its rows begin, how many it has, and its causal or window bounds.
struct Sequence {
  int64_t b;
  int64_t first_query, first_key;
  int queries, keys;
  Bounds bounds;
};

struct Problem {
  DType type;
  int64_t batch, heads, kv_heads;
  int queries, keys, head_dim, value_dim;  // queries, keys: of the longest entry
  TensorView q, k, v;
  TensorView lse_strides;  // of lse, dlse and delta; no data
  // Packed: [batch + 1] rows at which sequences begin and end. Null: entries of the same size.
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  Pages pages;  // of the forward alone
  MaskView mask;
  Lengths key_lengths, query_lengths;
  int window_left, window_right;  // not negative; unlimited: at least queries + keys
  int64_t causal;                 // as in the schema
  float scale;
  DistanceBias distance_bias;
  const float* sinks;  // [heads], null: none
  float softcap;       // 0: none
  Dropout dropout;

  FASTATTN_INLINE Sequence sequence(int64_t b) const {
    Sequence s = {b, 0, 0, queries, keys, {window_left, window_right, 0}};
    if (cu_seqlens_q) {
      s.first_query = cu_seqlens_q[b];
      s.first_key = cu_seqlens_k[b];
      s.queries = cu_seqlens_q[b + 1] - cu_seqlens_q[b];
      s.keys = cu_seqlens_k[b + 1] - cu_seqlens_k[b];
    }
    if (causal == kBottomRight) {
      s.bounds.diagonal = s.keys - s.queries;
    } else if (causal == kBottomRightLengths) {
      s.bounds.diagonal = key_lengths.at(b, s.keys) - query_lengths.at(b, s.queries);
    }
    return s;
  }

  // Factor applied to scores; capped scores already have the scale.
  FASTATTN_INLINE float score_scale() const { return softcap > 0.0f ? 1.0f : scale; }
  FASTATTN_INLINE float sink(int64_t h) const {
    return sinks ? sinks[h] : -std::numeric_limits<float>::infinity();
  }
  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 0; }
  // Whether these are few queries. Queries of a sequence that attends to itself are not: in a
  // padded batch they would be more, and a sentence's scores must have the same bits there.
  bool is_few(int64_t queries, int64_t keys) const {
    return queries == 1 || (queries != keys && queries * group() <= kFewRows);
  }
  bool is_few(const Sequence& s) const { return is_few(s.queries, s.keys); }
  // Whether those of all sequences are.
  bool all_few() const { return queries == 1 || (!cu_seqlens_q && is_few(queries, keys)); }
  // Whether no row of the sequence may attend more than kFewKeys keys, by its length and the
  // window.
  bool has_few_keys(const Sequence& s) const {
    const int length = key_lengths.stride == 0 ? key_lengths.at(s.b, s.keys) : s.keys;
    return length <= kFewKeys || int64_t{window_left} + window_right < kFewKeys;
  }
  int64_t row_tiles() const { return ceil_div(queries, kTileRows); }
  // Rows of a tile in the workspace, even; few if there are few queries.
  int64_t rows_in_tile() const {
    return queries < kTileRows ? ceil_div(queries, 2) * 2 : kTileRows;
  }
  int64_t key_tiles() const { return ceil_div(keys, kTileKeys); }
};

struct Forward : Problem {
  TensorView out;
  float* lse;  // null: only the weights are wanted
  // Few queries, several splits: their results [batch, heads x queries, splits()].
  float* partials;
  // The weights of out after dropout, [batch, heads, queries, keys] contiguous, or their mean over
  // the heads [batch, queries, keys]; null: not wanted.
  float* weights = nullptr;
  bool average = false;

  int64_t splits() const { return keys > kSplitKeys ? ceil_div(keys, kSplitKeys) : 1; }
  // Heads of a group that are computed together for few queries, and the most rows these have: of
  // this call, or of a sequence of a packed one that is not few itself.
  int heads_at_once() const { return static_cast<int>(std::clamp<int64_t>(group(), 1, kTileRows)); }
  FASTATTN_INLINE int rows_at_once() const {
    const int64_t few = all_few() ? std::min<int64_t>(group() * queries, kTileRows) : kFewRows;
    return std::max(heads_at_once(), static_cast<int>(few));
  }
  // A partial result: o weighted by 2^(exponent - m), then m and l.
  int64_t partial_floats() const { return padded(value_dim) + padded(2); }
  int64_t partials_floats() const {
    const int64_t rows = batch * heads * queries;
    return all_few() && splits() > 1 ? rows * splits() * partial_floats() : 0;
  }
  // Partial results of row h * s.queries + i, for query i of head h.
  FASTATTN_INLINE float* partials_of(const Sequence& s, int64_t row) const {
    return partials + (s.b * heads * queries + row) * splits() * partial_floats();
  }
};

struct Backward : Problem {
  TensorView out, dout;         // null data: the gradient of out is 0
  const float *lse, *dlse;      // dlse may be null
  TensorView dq, dk, dv;        // null data: not wanted
  MaskView dmask;               // type kNone: not wanted
  DistanceBias ddistance_bias;  // null data: not wanted
  float* dsinks;                // [heads], null: not wanted
  // rowsum(out * dout) - dlse, which is subtracted from every dp of the row
  float* delta;
  // A row's weights are 2^(exponent - m - log_sum): m is lse * log2(e) and log_sum is 0, or, where
  // lse is too large to be exact (kLargeLse), m is the highest exponent.
  float *m, *log_sum;
  float* distance_sums;  // see distance_sums_of
  // Whether delta is computed from the weights instead of the rounded out. The mask's gradient is a
  // sum of ds alone and would show the rounding error (see kFewKeys, too).
  bool exact_delta;
  // The gradient of the weights (see Forward), null: 0.
  const float* dweights = nullptr;
  bool average = false;

  FASTATTN_INLINE int64_t distance_parts() const {
    return std::min<int64_t>(kDistanceParts, key_tiles());
  }
  // Tasks over the tiles of keys of a kv head; task i computes tiles i, i + key_tasks(), ...
  FASTATTN_INLINE int64_t key_tasks() const {
    return ddistance_bias.data ? distance_parts() : key_tiles();
  }
  // Sums of ds by distance over one part of the keys: that of (query i, key j) is at
  // j - i + queries - 1.
  FASTATTN_INLINE float* distance_sums_of(const Sequence& s, int64_t h, int64_t part) const {
    const int64_t before =
        cu_seqlens_q ? s.first_query + s.first_key : s.b * (int64_t{queries} + keys);
    const int64_t distances = int64_t{s.queries} + s.keys;
    return distance_sums + before * heads * distance_parts() +
           (h * distance_parts() + part) * distances;
  }
  int64_t distance_sums_floats() const {
    if (!ddistance_bias.data) {
      return 0;
    }
    const int64_t positions = cu_seqlens_q ? int64_t{cu_seqlens_q[batch]} + cu_seqlens_k[batch]
                                           : batch * (int64_t{queries} + keys);
    return padded(positions * heads * distance_parts());
  }
};

// -- workspace -----------------------------------------------------------------------------------
// Sections of one worker's workspace; with null it only counts their size.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}

  float* take(int64_t count) {
    float* section = base_ ? base_ + used_ : nullptr;
    used_ += padded(count);
    return section;
  }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

// Sizes count floats, whatever a kernel stores there. Forms (operands.h): "rows" have one position
// per row, "columns" one per column, "pairs" are two rows interleaved if units are bf16.
struct ForwardWorkspace {
  float *q_rows, *s, *p, *o, *bias, *rows, *k_columns, *v_pairs, *packed, *partials;
  float* highest;  // of each row, after each tile of keys; used only if weights are wanted
  int64_t floats;

  FASTATTN_INLINE ForwardWorkspace(const Forward& a, float* base)
      : ForwardWorkspace(a, base, !a.all_few()) {}

  FASTATTN_INLINE ForwardWorkspace(const Forward& a, float* base, bool has_tiles) {
    Arena arena(base);
    const int64_t D = padded(a.head_dim), E = padded(a.value_dim), N = a.key_tiles() * kTileKeys;
    const int64_t few = a.rows_at_once();
    const int64_t tile = has_tiles ? a.rows_in_tile() : 0;
    const int64_t M = tile > few ? tile : few;
    q_rows = arena.take(M * D);
    s = arena.take(M * kTileKeys * (a.weights ? a.key_tiles() : 1));
    p = arena.take(tile * kTileKeys);
    o = arena.take(tile * E);
    bias = arena.take(kBiasRows * kTileKeys + kTileDistances);
    rows = arena.take(tile ? kTileKeys * (D > E ? D : E) : 0);
    k_columns = arena.take(tile ? N * D : 0);
    v_pairs = arena.take(tile ? N * E : 0);
    packed = arena.take(tile ? a.key_tiles() : 0);
    partials = arena.take(2 * few * a.partial_floats());
    highest = arena.take(a.weights ? a.key_tiles() * tile : 0);
    floats = arena.used();
  }
};

struct BackwardWorkspace {
  float *q_rows, *q_pairs, *dout_rows, *dout_pairs;  // of a tile of queries
  float *k_rows, *k_columns, *k_pairs, *v_columns;   // of a tile of keys
  float *s, *dp, *p_pairs, *ds_rows, *ds_pairs, *bias, *sums;
  float* by_distance;
  float *dk, *dv;
  float* dq;  // of every query of a group of heads, or of one tile
  int64_t floats;

  FASTATTN_INLINE BackwardWorkspace(const Backward& a, float* base) {
    Arena arena(base);
    const int64_t D = padded(a.head_dim), E = padded(a.value_dim), larger = D > E ? D : E;
    const int64_t M = a.rows_in_tile(), tile = M * kTileKeys;
    q_rows = arena.take(M * D);
    q_pairs = arena.take(M * D);
    dout_rows = arena.take(M * E);
    dout_pairs = arena.take(M * E);
    k_rows = arena.take(kTileKeys * larger);
    k_columns = arena.take(kTileKeys * D);
    k_pairs = arena.take(kTileKeys * D);
    v_columns = arena.take(kTileKeys * E);
    s = arena.take(tile);
    dp = arena.take(tile);
    p_pairs = arena.take(tile);
    ds_rows = arena.take(tile);
    ds_pairs = arena.take(tile);
    bias = arena.take(kBiasRows * kTileKeys + kTileDistances);
    sums = arena.take(tile);
    by_distance = arena.take(a.ddistance_bias.data ? kTileSums : 0);
    dk = arena.take(kTileKeys * D);
    dv = arena.take(kTileKeys * E);
    dq = arena.take((a.group() > 0 ? a.group() : 1) * a.row_tiles() * M * D);
    floats = arena.used();
  }
};

// -- kernels -------------------------------------------------------------------------------------
// Each takes tasks until none is left. Tasks: forward (batch, kv head, head of the group, tile of
// queries), or (batch, kv head, split) for few queries; weights (batch, tile of queries), all heads
// in order; combine_splits (batch, kv head); delta and dq (batch, kv head, head, tile of queries);
// dkv (batch, kv head, key task); all_gradients (batch, kv head); dmask (batch or 1, heads or 1,
// tile of queries or 1, tile of keys or 1); ddistance_bias (batch or 1, head), after dkv or
// all_gradients; dsinks (head).
struct Kernels {
  void (*forward)(const Forward&, Queue&, float* workspace);
  void (*weights)(const Forward&, Queue&, float* workspace);
  void (*combine_splits)(const Forward&, Queue&, float* workspace);
  void (*delta)(const Backward&, Queue&, float* workspace);
  void (*dq)(const Backward&, Queue&, float* workspace);
  void (*dkv)(const Backward&, Queue&, float* workspace);
  void (*all_gradients)(const Backward&, Queue&, float* workspace);
  void (*dmask)(const Backward&, Queue&, float* workspace);
  void (*ddistance_bias)(const Backward&, Queue&, float* workspace);
  void (*dsinks)(const Backward&, Queue&, float* workspace);
};

FASTATTN_DISPATCH(Kernels)

}  // namespace fastattn::attention::cpu
