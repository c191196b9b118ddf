// Attention on the GPU: the arguments that a binding passes to a kernel. Shapes: q [batch, heads,
// queries, head_dim], k [batch, kv_heads, keys, head_dim], v [batch, kv_heads, keys, value_dim],
// out like q with value_dim columns, lse [batch, heads, queries]. Columns are contiguous; all other
// strides are multiples of 16 bytes.
#pragma once

#include "attention/key_range.h"
#include "attention/sm90/masks/mask_classes.h"
#include "common/cuda_stream.h"
#include "common/dropout.h"
#include "common/dtype.h"
#include "common/tensor_view.h"

namespace fastattn::attention {

// One length per batch entry, on the device. Null data: every entry has the full length.
struct Lengths {
  const void* data = nullptr;
  bool wide = false;  // int64, otherwise int32
};

// Packed sequences: sequence b has rows offsets[b] to offsets[b + 1] of the only batch entry.
// Offsets are int32 [sequences + 1] on the device.
struct Packing {
  const int* query_offsets = nullptr;  // null: not packed
  const int* key_offsets = nullptr;
  int sequences = 0;
  int max_queries = 0, max_keys = 0;  // no sequence has more
  // Workspace of the forward, [sequences]: the longest first. Null: in memory order.
  int* order = nullptr;
};

// Keys and values in pages, [pages, kv_heads, size, columns]: key j of sequence b is row j % size
// of page table[b, j / size]. Entries of keys beyond the key length are not read.
struct Pages {
  const int* table = nullptr;  // on the device; null: keys and values are contiguous
  int64_t stride = 0;          // from a sequence's entries to the next one's
  int count = 0;
  int log2_size = 0;
};
FASTATTN_PURE int page_size(const Pages& pages) {
  return 1 << pages.log2_size;
}

// Which pairs of queries and keys may attend, apart from a dense mask.
struct LengthsAndBounds {
  Lengths query_lengths, key_lengths;
  Packing packing;
  Bounds bounds;
  // Bottom-right alignment by the queries and keys of each sequence, instead of bounds.diagonal.
  bool own_diagonals = false;

  bool has_lengths() const { return query_lengths.data || key_lengths.data; }
};

// Fills packing.order. Returns nullptr or an error message.
const char* order_sequences(const Packing& packing, cuda::Stream stream);

// Dropout of attention weights; common/dropout.h defines the random bits.
struct Dropout {
  const int64_t* seed = nullptr;  // on the device: the seed, or with its origin five numbers
  bool has_origin = false;
  uint32_t stream = 0;
  int threshold = 0;
  float keep_scale = 1.0f;
  // Workspace: one hash for every two keys, up to the end of the last block (of at most 128 keys).
  uint32_t* column_keys = nullptr;
};

FASTATTN_PURE dropout::Origin origin_of(const Dropout& dropout) {
  return dropout.has_origin ? dropout::origin_of(dropout.seed) : dropout::Origin{};
}
FASTATTN_PURE uint32_t column_key(const Dropout& dropout, uint32_t unit) {
  return dropout::column_key(*dropout.seed, dropout.stream, origin_of(dropout).column_unit + unit);
}

// Fills column_keys for the first `units` pairs of columns, and with FASTATTN_TRIALS=fwd_counter
// zeroes the counter. Returns nullptr or an error message.
const char* hash_columns(const Dropout& dropout, int units, cuda::Stream stream,
                         int* counter = nullptr);

// A logit for each head that takes part in the sums of its rows and has no value.
struct Sinks {
  const float* data = nullptr;  // [heads]; null: none
  int rows = 0;  // of a head with the same sink: all, unless several heads have become one
};

// A value that is added to the scores of all pairs of one distance: entry j - i + first to that of
// query i and key j, or with own diagonals entry j - i - (keys - queries) + first, by the
// sequence's numbers of keys and queries.
struct DistanceBias {
  const float* data = nullptr;  // entry 0 of the first head; null: none
  int64_t batch_stride = 0, head_stride = 0;
  int first = 0;
};
// Entries before the first and after the last one that can be read: blocks reach beyond the
// tensors, by less than 128 rows or keys.
constexpr int kDistancePadding = 192;

// Score modifications before masks: cap * tanh(score / cap), then a bias is added.
struct ScoreModifications {
  float cap = 0.0f;  // 0: none
  DistanceBias bias;

  bool any() const { return cap > 0.0f || bias.data; }
};

// An additive mask blocks a pair if its value is at or below the lowest finite value of its type.
enum class MaskType { kBool, kBFloat16, kFloat16, kFloat32 };
constexpr float kLowestBFloat16 = -3.38953138925153547590e38f;
constexpr float kLowestFloat16 = -65504.0f;
constexpr float kLowestFloat = -3.40282346638528859812e38f;

// A boolean or additive mask. Strides are in elements, 0 where it is broadcast. TMA loads an
// additive mask; it needs contiguous columns and strides that are multiples of 16 bytes. Otherwise
// the forward copies the mask first and the backward loads it element by element.
struct DenseMask {
  const void* data = nullptr;
  MaskType type = MaskType::kBool;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
  // Tile bitmasks of a prepared mask (fastattn/ops/attention/prepared.py), or null.
  const int64_t* tiles = nullptr;
  int64_t tile_strides[4] = {};
  // Workspace, see mask_classes.h.
  MaskLayout layout = {};
  uint32_t* bits = nullptr;
  int* plain = nullptr;
  BlockClass* classes = nullptr;
  void* copy = nullptr;  // rows of copied_columns(keys); null: read in place
  MaskType copy_type = MaskType::kFloat32;
};

// Whether TMA can read an additive mask in place.
inline bool readable_by_tma(const DenseMask& mask, int keys) {
  constexpr int64_t kAlignment = 16;
  const int64_t bytes = mask.type == MaskType::kFloat32 ? 4 : 2;
  const int64_t strides = mask.batch_stride | mask.head_stride | mask.row_stride;
  return strides >= 0 && strides * bytes % kAlignment == 0 &&
         (mask.column_stride == 1 || keys == 1) &&
         reinterpret_cast<uintptr_t>(mask.data) % kAlignment == 0;
}

// Fills the workspace. Returns nullptr or an error message.
const char* classify_mask(const DenseMask& mask, const LengthsAndBounds& limits, int queries,
                          int keys, cuda::Stream stream);

// Split-KV, where there are fewer tiles than SMs: the keys of every tile are divided into splits.
// Each split writes its output, normalised by itself, and for each row the maximum of its base-2
// scores and the sum of their weights. A second kernel combines the splits. Rows: of all heads.
constexpr int kMaxSplits = 128;
struct alignas(8) RowMaxSum {
  float highest, sum;
};
struct KeySplits {
  int count = 1;
  int64_t rows = 0;
#ifdef FASTATTN_TRIAL_FWD_SPLITS
  int blocks = 0;  // of keys in a split: short sequences have fewer splits
#endif
  float* out = nullptr;          // [count, rows, value_dim]
  RowMaxSum* max_sum = nullptr;  // [count, rows]
};

// Features that an instance supports besides its type and head dim. All support lengths; all but
// kFull support causal masks and windows.
enum class Variant {
  kFull,
  kBounded,
  kDropout,
  kMask,  // boolean
  kBias,  // additive
  kMaskDropout,
  kBiasDropout,
  kSinks,  // bounded; the backward needs none of its own
  kPaged,  // the same for keys and values in pages
  // With score modifications and sinks.
  kScores,         // bounded; the backward decides at run time whether it drops weights
  kScoresDropout,  // the backward needs none of its own
  kScoresDense,    // decides at run time whether it drops weights, and whether the mask is additive
  kPagedScores,    // bounded, for keys and values in pages; not in the backward
};
FASTATTN_PURE bool modifies_scores(Variant variant) {
  return variant >= Variant::kScores;
}
// Whether an instance supports additive masks, and dropout.
FASTATTN_PURE bool is_additive(Variant variant) {
  return variant == Variant::kBias || variant == Variant::kBiasDropout ||
         variant == Variant::kScoresDense;
}
FASTATTN_PURE bool is_paged(Variant variant) {
  return variant == Variant::kPaged || variant == Variant::kPagedScores;
}
FASTATTN_PURE bool has_dropout(Variant variant) {
  return variant == Variant::kDropout || variant == Variant::kMaskDropout ||
         variant == Variant::kBiasDropout || variant == Variant::kScoresDropout ||
         variant == Variant::kScoresDense;
}
FASTATTN_PURE bool is_dense(Variant variant) {
  return is_additive(variant) || variant == Variant::kMask || variant == Variant::kMaskDropout;
}

// Rows of a tile and keys of a block, by the larger head dim rounded up to the instance's.
FASTATTN_PURE int forward_tile_rows(int head_dim, Variant variant) {
  return head_dim <= 64 && !is_additive(variant) && !modifies_scores(variant) ? 192 : 128;
}
FASTATTN_PURE int forward_block(int head_dim, Variant variant = Variant::kFull) {
  if (head_dim > 192 && variant == Variant::kScoresDropout) {
    return 32;  // 64 would spill 24 bytes
  }
  if (head_dim > 128 && (is_additive(variant) || modifies_scores(variant))) {
    return 64;
  }
  return head_dim <= 128 ? 128 : head_dim <= 192 ? 112 : 80;
}

// Arguments of both directions. Pointers to workspace are set by their lay_out
// (sm90/forward/fwd_workspace.h, sm90/backward/bwd_workspace.h).
struct Problem : LengthsAndBounds {
  DType dtype;
  TensorView q, k, v;
  int batch, heads, kv_heads;
  int queries, keys;
  int head_dim, value_dim;
  Dropout dropout;
  DenseMask mask;
  float scale;
  Sinks sinks;
  ScoreModifications modifications;
};

struct ForwardProblem : Problem {
  TensorView out;
  float* lse;
  Pages pages;             // `keys`, the most of a sequence, is a multiple of their size
  KeySplits splits;        // without dropout and dense mask
  int* counter = nullptr;  // workspace, for tiles of unequal length; null: static schedule
};

// Computes out and lse on the current device. Returns nullptr or an error message. Instances:
// 16-bit types, head dims 64, 128, 192 and 256 (the larger head dim rounded up), and variants.
template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_fwd_sm90(const ForwardProblem& problem, cuda::Stream stream);

// The second launch of split-KV.
template <DType kType>
const char* combine_splits(const ForwardProblem& problem, cuda::Stream stream);

// Rows and keys of a block, by the larger head dim rounded up to the instance's. is_short: with
// score modifications, or by has_short_blocks.
FASTATTN_PURE int backward_rows(int head_dim, bool is_short = false) {
  return head_dim <= 64 ? 128 : head_dim <= 128 ? (is_short ? 64 : 80) : head_dim <= 192 ? 96 : 64;
}
FASTATTN_PURE int backward_keys(int head_dim) {
  return head_dim <= 128 ? 128 : 64;
}

// Fills a mask's workspace for the backward. Returns nullptr or an error message.
const char* classify_mask_for_backward(const DenseMask& mask, const LengthsAndBounds& limits,
                                       int queries, int keys, cuda::Stream stream);

// The gradient of an additive mask; sizes are those of the mask, 1 where the gradient is summed.
// splits: thread blocks that share the sum of a tile; if there are several, `partial` holds one
// gradient in fp32 for each.
struct MaskGradient {
  void* data = nullptr;  // null: not needed
  MaskType type = MaskType::kFloat32;
  int sizes[4] = {};
  int64_t strides[4] = {};
  int splits = 1;
  float* partial = nullptr;
};

// Rows and keys of its tiles.
constexpr int kDmaskRows = 128;
constexpr int kDmaskKeys = 64;  // 96 would spill registers

// The gradient of a bias by distance, in bands of distances that overlap. Band n has entries from
// kDmaskKeys n - kBandOrigin on.
struct DistanceGradient {
  float* data = nullptr;  // [batches, heads, entries]; null: not needed
  int batches = 0;        // 1, or one for each sequence
  int64_t rows = 0;       // of data
  int entries = 0, bands = 0;
  float* partial = nullptr;  // workspace, [rows, bands, kBandEntries]
};
constexpr int kBandEntries = 256;
constexpr int kBandOrigin = kDmaskRows - 1;
// The first and the last band whose tiles have an entry.
constexpr int kFirstBand = -1;
FASTATTN_PURE int last_band(int entries) {
  return (entries - 1 + kBandOrigin) / kDmaskKeys;
}
// The bands that have an entry: tiles have distances from -kBandOrigin to 2 kDmaskKeys - 2.
FASTATTN_PURE Range bands_of_entry(int entry) {
  return {(entry + 1) / kDmaskKeys + kFirstBand, (entry + kBandOrigin) / kDmaskKeys + 1};
}

// Gradients that are not needed have null data. Rows of the workspace are padded to blocks.
struct BackwardProblem : Problem {
  TensorView out, dout, dq, dk, dv;
  const float *lse, *dlse;  // dlse may be null
  MaskGradient dmask;
  DistanceGradient ddistance;
  float* dsinks;  // [heads]; null: not needed
  // Workspace.
  float *lse2, *delta;  // one for each row; with an additive mask, lse2 is in natural units
  uint32_t* row_keys;   // dropout's, one for every two rows
  float* dq_sum;        // dq in fp32; head dims are padded to multiples of 64
  int* dq_semaphores;   // one per block of rows and warpgroup
  bool in_order;        // dq is summed in the order of the keys, otherwise in any order
  int* counter;         // one
  float* sink_terms;    // what each row adds to dsinks
};

// FASTATTN_TRIALS=bwd_rows: whether a problem of head dim 128 has 64 rows in a block, not 80. Under
// a causal mask the blocks at the diagonal and the last one waste fewer rows, at few keys more than
// the longer loop costs.
inline bool has_short_blocks([[maybe_unused]] const BackwardProblem& p) {
#ifdef FASTATTN_TRIAL_BWD_ROWS
  constexpr int kMaxShortKeys = 2048;
  const int dim = larger(p.head_dim, p.value_dim);
  const int keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
  return 64 < dim && dim <= 128 && p.bounds.right == 0 && keys <= kMaxShortKeys &&
         !p.dropout.seed && !p.mask.data && !p.modifications.any();
#else
  return false;
#endif
}

// FASTATTN_TRIALS=bwd_dq_once: whether one block of keys has all keys of a sequence. dq is then no
// sum over blocks, and dq_sum is null.
inline bool has_one_key_block([[maybe_unused]] const BackwardProblem& p) {
#ifdef FASTATTN_TRIAL_BWD_DQ_ONCE
  const int keys = p.packing.query_offsets ? p.packing.max_keys : p.keys;
  return keys <= backward_keys(larger(p.head_dim, p.value_dim));
#else
  return false;
#endif
}

// Computes dq, dk and dv on the current device. Returns nullptr or an error message. Instances:
// 16-bit types, the forward's head dims and all its variants but kFull, kSinks and those of pages.
template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_bwd_sm90(const BackwardProblem& problem, cuda::Stream stream);

}  // namespace fastattn::attention
