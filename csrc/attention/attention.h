// Attention on the GPU: what a binding hands to a kernel. Shapes: q [batch, heads, queries,
// head_dim], k [batch, kv_heads, keys, head_dim], v [batch, kv_heads, keys, value_dim], out like q
// with value_dim columns, lse [batch, heads, queries]. Columns are contiguous; all other strides
// are free multiples of 16 bytes.
#pragma once

#include "attention/key_range.h"
#include "attention/sm90/masks/mask_classes.h"
#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/tensor_view.h"

namespace fastattn::attention {

// One length a batch entry, on the device; null data: every entry has the whole length.
struct Lengths {
  const void* data = nullptr;
  bool wide = false;  // int64, otherwise int32
};

// Sequences one behind the other in the rows of one batch entry: sequence b has the rows from
// offsets[b] to offsets[b + 1]. Offsets are int32 [sequences + 1] on the device.
struct Packing {
  const int* query_offsets = nullptr;  // null: not packed
  const int* key_offsets = nullptr;
  int sequences = 0;
  int max_keys = 0;           // no sequence has more
  bool bottom_right = false;  // a sequence's diagonal leads through its last row and last key
  int max_queries = 0;        // no sequence has more; the backward's
  // Workspace of the forward, [sequences]: the longest one comes first. Null: as they lie.
  int* order = nullptr;
};

// Fills packing.order; nullptr, or why it could not.
const char* order_sequences(const Packing& packing, cuda::Stream stream);

// Attention weights are dropped as common/dropout.h says.
struct Dropout {
  const int64_t* seed = nullptr;  // one number on the device
  uint32_t stream = 0;
  int threshold = 0;
  float keep_scale = 1.0f;
  // Workspace for the hash of every pair of columns: keys / 2, the keys rounded up to blocks of any
  // instance (at most 128 keys).
  uint32_t* column_keys = nullptr;
};

// Fills column_keys for the first `units` pairs of columns; nullptr, or why it could not.
const char* hash_columns(const Dropout& dropout, int units, cuda::Stream stream);

// Values at or below the lowest finite one of their type block.
enum class MaskType { kBool, kBFloat16, kFloat16, kFloat32 };
constexpr float kLowestBFloat16 = -3.38953138925153547590e38f;
constexpr float kLowestFloat16 = -65504.0f;
constexpr float kLowestFloat = -3.40282346638528859812e38f;

// A boolean or additive mask; strides in elements, 0 where it is broadcast. An additive one is read
// by TMA, which asks for contiguous columns and strides of whole 16 bytes; where it has none, it is
// copied first, and in the backward fetched element by element.
struct DenseMask {
  const void* data = nullptr;
  MaskType type = MaskType::kBool;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, column_stride = 0;
  // A prepared mask's words (fastattn/ops/attention/prepared.py), or null.
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

// Fills the workspace; nullptr, or why it could not.
const char* classify_mask(const DenseMask& mask, const Lengths& query_lengths,
                          const Lengths& key_lengths, const Bounds& bounds, int queries, int keys,
                          cuda::Stream stream);

// Keys cut into parts, where tiles are too few for all processors: every part of a tile is a tile
// of its own and leaves its output, normalised by itself, and for each row the maximum of its
// scores in base 2 and the sum of their weights. Another kernel joins them. Rows: of all heads.
constexpr int kMaxSplits = 128;
struct alignas(8) RowMaxSum {
  float highest, sum;
};
struct KeySplits {
  int count = 1;
  int64_t rows = 0;
  float* out = nullptr;          // [count, rows, value_dim]
  RowMaxSum* max_sum = nullptr;  // [count, rows]
};

// What an instance is compiled for besides type and head dim. All know lengths, all but the first
// causal masks and windows.
enum class Variant {
  kFull,
  kBounded,
  kDropout,
  kMask,  // boolean
  kBias,  // additive
  kMaskDropout,
  kBiasDropout,
};
FASTATTN_PURE bool is_additive(Variant variant) {
  return variant == Variant::kBias || variant == Variant::kBiasDropout;
}
FASTATTN_PURE bool has_dropout(Variant variant) {
  return variant == Variant::kDropout || variant == Variant::kMaskDropout ||
         variant == Variant::kBiasDropout;
}
FASTATTN_PURE bool is_dense(Variant variant) {
  return is_additive(variant) || variant == Variant::kMask || variant == Variant::kMaskDropout;
}

// Rows of a tile and keys of a block, by the larger head dim rounded up to that of an instance.
FASTATTN_PURE int forward_tile_rows(int head_dim, Variant variant) {
  return head_dim <= 64 && !is_additive(variant) ? 192 : 128;
}
FASTATTN_PURE int forward_block(int head_dim, Variant variant = Variant::kFull) {
  if (head_dim > 128 && is_additive(variant)) {
    return 64;
  }
  return head_dim <= 128 ? 128 : head_dim <= 192 ? 112 : 80;
}

struct ForwardProblem {
  TensorView q, k, v, out;
  float* lse;
  int batch, heads, kv_heads;
  int queries, keys;
  int head_dim, value_dim;
  Lengths query_lengths, key_lengths;
  Packing packing;
  Bounds bounds;
  Dropout dropout;
  DenseMask mask;
  KeySplits splits;  // without dropout and dense mask
  float scale;
  int* counter;  // one zero, for tiles of unequal length; null: tiles are dealt out evenly
};

// Computes out and lse on the current device; nullptr, or why it could not. Instances: 16-bit
// types, head dims 64, 96, 128, 192 and 256 (the larger of head_dim and value_dim rounded up), and
// variants.
template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_fwd_sm90(const ForwardProblem& problem, cuda::Stream stream);

// The second launch where keys are cut.
template <DType kType>
const char* combine_splits(const ForwardProblem& problem, cuda::Stream stream);

// Rows and keys of a block, by the larger head dim rounded up to that of an instance.
FASTATTN_PURE int backward_rows(int head_dim) {
  return head_dim <= 64 ? 128 : head_dim <= 128 ? 80 : head_dim <= 192 ? 96 : 64;
}
FASTATTN_PURE int backward_keys(int head_dim) {
  return head_dim <= 128 ? 128 : 64;
}

// The backward walks over rows: its bits, classes and tiles are those of the transposed mask, whose
// rows are keys. mask_*: sizes of the mask, 1 where broadcast.
FASTATTN_PURE MaskLayout backward_mask_layout(int mask_batches, int mask_heads, int mask_keys,
                                              int batch, bool split, int queries, int keys,
                                              int head_dim) {
  return mask_layout(mask_batches, mask_heads, mask_keys, batch, split, keys, queries,
                     backward_keys(head_dim), backward_rows(head_dim));
}

// Of the backward's workspace: how many words it has, and where its parts begin.
FASTATTN_PURE int64_t backward_mask_words(const MaskLayout& layout) {
  constexpr int64_t kClassWords = sizeof(BlockClass) / sizeof(int);
  return bit_words(layout) + class_count(layout) * kClassWords + plain_count(layout);
}
inline void place_in_workspace(DenseMask& mask, int* words) {
  mask.bits = reinterpret_cast<uint32_t*>(words);
  mask.classes = reinterpret_cast<BlockClass*>(words + bit_words(mask.layout));
  mask.plain = reinterpret_cast<int*>(mask.classes + class_count(mask.layout));
}

// Fills a mask's workspace for the backward; nullptr, or why it could not.
const char* classify_mask_for_backward(const DenseMask& mask, const Lengths& query_lengths,
                                       const Lengths& key_lengths, const Bounds& bounds,
                                       int queries, int keys, cuda::Stream stream);

// The gradient of an additive mask; sizes are those of the mask, 1 where it is summed over. parts:
// what each tile of the gradient is cut into, and room for as many gradients in fp32 if there are
// several.
struct MaskGradient {
  void* data = nullptr;  // null: nobody wants it
  MaskType type = MaskType::kFloat32;
  int sizes[4] = {};
  int64_t strides[4] = {};
  int splits = 1;
  float* partial = nullptr;
};

// Rows and keys of its tiles.
constexpr int kDmaskRows = 128;
constexpr int kDmaskKeys = 64;  // with 96 registers spill

// Gradients; those that nobody wants have null data. Scratch memory in rows padded to blocks of at
// most 128 queries, those of each of packed sequences and one more; head dims padded to multiples
// of 64: statistics two floats a row, and half a word with dropout, dq_sum a row of dq in fp32.
struct BackwardProblem {
  TensorView q, k, v, out, dout, dq, dk, dv;
  const float *lse, *dlse;  // dlse may be null
  int batch, heads, kv_heads;
  int queries, keys;
  int head_dim, value_dim;
  Lengths query_lengths, key_lengths;
  Packing packing;
  Bounds bounds;
  Dropout dropout;  // its workspace is not needed
  DenseMask mask;   // laid out by backward_mask_layout
  MaskGradient dmask;
  float scale;
  float *lse_delta, *dq_sum;
  int* dq_semaphores;  // three a block of rows, or null: dq is summed in any order
  int* counter;        // one
};

// Computes dq, dk and dv on the current device; nullptr, or why it could not. Instances: 16-bit
// types, head dims as the forward's, all its variants but the first.
template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_bwd_sm90(const BackwardProblem& problem, cuda::Stream stream);

}  // namespace fastattn::attention
