// Attention on the GPU: what a binding hands to a kernel. Shapes: q [batch, heads, queries,
// head_dim], k [batch, kv_heads, keys, head_dim], v [batch, kv_heads, keys, value_dim], out like q
// with value_dim columns, lse [batch, heads, queries]. Columns are contiguous; all other strides
// are free multiples of 16 bytes.
#pragma once

#include "attention/key_range.h"
#include "attention/mask_classes.h"
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
  int max_keys = 0;        // no sequence has more
  bool ends_meet = false;  // a sequence's diagonal leads through its last row and last key
};

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

// A boolean or additive mask; strides in elements, 0 where it is broadcast. An additive mask has
// pairs of columns at multiples of two elements' size, for consumers read two at once.
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
};

// Fills the workspace; nullptr, or why it could not.
const char* classify_mask(const DenseMask& mask, const Lengths& query_lengths,
                          const Lengths& key_lengths, const Band& band, int queries, int keys,
                          cuda::Stream stream);

// What an instance is compiled for besides type and head dim. All know lengths, all but the first
// causal masks and windows.
enum class Variant {
  kFull,
  kBand,
  kDropout,
  kMask,  // boolean
  kBias,  // additive
};

// Rows of a tile and keys of a block, by the larger head dim rounded up to that of an instance.
FASTATTN_PURE int forward_tile_rows(int head_dim, Variant variant) {
  return head_dim <= 64 && variant != Variant::kBias ? 192 : 128;
}
FASTATTN_PURE int forward_block(int head_dim) {
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
  Band band;
  Dropout dropout;
  DenseMask mask;
  float scale;
  int* counter;  // one zero, for tiles of unequal length; null: tiles are dealt out evenly
};

// Computes out and lse on the current device; nullptr, or why it could not. Instances: 16-bit
// types, head dims 64, 96, 128, 192 and 256 (the larger of head_dim and value_dim rounded up), and
// variants.
template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_fwd_sm90(const ForwardProblem& problem, cuda::Stream stream);

// Gradients; those that nobody wants have null data. Scratch memory in rows padded to blocks of at
// most 128 queries, head dims padded to multiples of 64: statistics two floats a row, dq_sum a row
// of dq in fp32.
struct BackwardProblem {
  TensorView q, k, v, out, dout, dq, dk, dv;
  const float *lse, *dlse;  // dlse may be null
  int batch, heads, kv_heads;
  int queries, keys;
  int head_dim, value_dim;
  Lengths query_lengths, key_lengths;
  Band band;
  float scale;
  float *statistics, *dq_sum;
  int* turns;    // three a block of rows, or null: dq is summed in any order
  int* counter;  // one
};

// Computes dq, dk and dv on the current device; nullptr, or why it could not. Instances: 16-bit
// types, head dims as the forward's.
template <DType kType, int kHeadDim>
const char* attention_bwd_sm90(const BackwardProblem& problem, cuda::Stream stream);

}  // namespace fastattn::attention
