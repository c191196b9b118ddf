// Attention on the GPU: what a binding hands to a kernel. Shapes: q [batch, heads, queries,
// head_dim], k [batch, kv_heads, keys, head_dim], v [batch, kv_heads, keys, value_dim], out like q
// with value_dim columns, lse [batch, heads, queries]. Columns are contiguous; all other strides
// are free multiples of 16 bytes.
#pragma once

#include "attention/key_range.h"
#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/tensor_view.h"

namespace fastattn::attention {

// One length a batch entry, on the device; null data: every entry has the whole length.
struct Lengths {
  const void* data = nullptr;
  bool wide = false;  // int64, otherwise int32
};

struct ForwardProblem {
  TensorView q, k, v, out;
  float* lse;
  int batch, heads, kv_heads;
  int queries, keys;
  int head_dim, value_dim;
  Lengths query_lengths, key_lengths;
  Band band;
  float scale;
  int* counter;  // one zero, for tiles of unequal length; null: tiles are dealt out evenly
};

// Computes out and lse on the current device; nullptr, or why it could not. Instances: 16-bit
// types, head dims 64, 96, 128, 192 and 256 (the larger of head_dim and value_dim rounded up), and
// whether the band restricts anything.
template <DType kType, int kHeadDim, bool kBanded>
const char* attention_fwd_sm90(const ForwardProblem& problem, cuda::Stream stream);

}  // namespace fastattn::attention
