// The Hopper attention forward on the host, for test_sm90_on_host.py: the kernels as they are over
// the machine of sm90_on_host. INSTANCES is a list of INSTANCE(type, head dim, variant).
#include "machine.h"

namespace fastattn::attention {
struct ForwardArguments;
}  // namespace fastattn::attention

// Where launchers, their launch brackets rewritten, bring kernels.
template <class Arguments>
void launch_on_host(void (*kernel)(const Arguments), int blocks, int threads, int bytes,
                    const Arguments& arguments) {
  if (bytes > static_cast<int>(sizeof(on_host::shared))) {
    std::abort();
  }
  on_host::mbarriers.clear();
  // What nobody wrote must not look like zero.
  std::memset(on_host::shared, 0xFF, sizeof(on_host::shared));
  on_host::launch(blocks, threads, [&] { kernel(arguments); });
}

#include "attention/mask_classes_sm90.cuh"
#include "attention_fwd_on_host.cuh"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}
extern "C" cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

namespace fastattn::attention {

const char* hash_columns(const Dropout& dropout, int units, cuda::Stream) {
  for (int unit = 0; unit < units; ++unit) {
    dropout.column_keys[unit] = dropout::column_key(*dropout.seed, dropout.stream, unit);
  }
  return nullptr;
}

const char* classify_mask(const DenseMask& mask, const Lengths& query_lengths,
                          const Lengths& key_lengths, const Band& band, int queries, int keys,
                          cuda::Stream) {
  on_host::launch(plain_count(mask.layout), kPackThreads,
                  [&] { pack_mask_kernel(mask, queries, keys); });
  on_host::launch(class_count(mask.layout), mask.layout.tile_rows, [&] {
    classify_mask_kernel(mask, query_lengths, key_lengths, band, queries, keys);
  });
  return nullptr;
}

}  // namespace fastattn::attention

using namespace fastattn;
using namespace fastattn::attention;

struct View {
  void* data;
  int64_t strides[3];
  operator TensorView() const { return {data, strides[0], strides[1], strides[2]}; }
};

// What binding_sm90.cpp fills in.
struct Call {
  View q, k, v, out;
  float* lse;
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  const int *query_lengths, *key_lengths, *query_offsets, *key_offsets;
  int64_t sequences, max_keys, ends_meet, left, right, diagonal;
  int64_t type, variant;
  const int64_t* seed;
  int64_t stream, threshold;
  const void* mask;
  int64_t mask_type, mask_sizes[4], mask_strides[4];
  double scale;
  int64_t counted;
};

extern "C" const char* run(const Call* c) {
  ForwardProblem p = {};
  p.q = c->q;
  p.k = c->k;
  p.v = c->v;
  p.out = c->out;
  p.lse = c->lse;
  p.batch = static_cast<int>(c->batch);
  p.heads = static_cast<int>(c->heads);
  p.kv_heads = static_cast<int>(c->kv_heads);
  p.queries = static_cast<int>(c->queries);
  p.keys = static_cast<int>(c->keys);
  p.head_dim = static_cast<int>(c->head_dim);
  p.value_dim = static_cast<int>(c->value_dim);
  p.query_lengths = {c->query_lengths, false};
  p.key_lengths = {c->key_lengths, false};
  p.packing = {c->query_offsets, c->key_offsets, static_cast<int>(c->sequences),
               static_cast<int>(c->max_keys), c->ends_meet != 0};
  p.band = {static_cast<int>(c->left), static_cast<int>(c->right), static_cast<int>(c->diagonal)};
  p.scale = static_cast<float>(c->scale);
  int counter = 0;
  p.counter = c->counted ? &counter : nullptr;
  const int widest = std::max(p.head_dim, p.value_dim);
  const Variant variant = static_cast<Variant>(c->variant);
  std::vector<uint32_t> column_keys(dropout::units(p.keys + 128));
  if (variant == Variant::kDropout) {
    const int threshold = static_cast<int>(c->threshold);
    p.dropout = {c->seed, static_cast<uint32_t>(c->stream), threshold,
                 dropout::keep_scale(threshold), column_keys.data()};
  }
  std::vector<uint32_t> bits;
  std::vector<int> plain;
  std::vector<BlockClass> classes;
  if (c->mask) {
    p.mask.data = c->mask;
    p.mask.type = static_cast<MaskType>(c->mask_type);
    p.mask.batch_stride = c->mask_strides[0];
    p.mask.head_stride = c->mask_strides[1];
    p.mask.row_stride = c->mask_strides[2];
    p.mask.column_stride = c->mask_strides[3];
    p.mask.layout =
        mask_layout(static_cast<int>(c->mask_sizes[0]), static_cast<int>(c->mask_sizes[1]),
                    static_cast<int>(c->mask_sizes[2]), p.batch, c->query_lengths || c->key_lengths,
                    p.queries, p.keys, forward_tile_rows(widest, variant), forward_block(widest));
    bits.assign(bit_words(p.mask.layout), ~0u);
    plain.assign(plain_count(p.mask.layout), -1);
    classes.resize(class_count(p.mask.layout));
    p.mask.bits = bits.data();
    p.mask.plain = plain.data();
    p.mask.classes = classes.data();
  }
  const int instance_dim = widest <= 64    ? 64
                           : widest <= 96  ? 96
                           : widest <= 128 ? 128
                           : widest <= 192 ? 192
                                           : 256;
#define INSTANCE(TYPE, DIM, VARIANT)                                           \
  if (c->type == static_cast<int64_t>(DType::TYPE) && instance_dim == DIM &&   \
      variant == Variant::VARIANT) {                                           \
    return attention_fwd_sm90<DType::TYPE, DIM, Variant::VARIANT>(p, nullptr); \
  }
  INSTANCES
  return "not compiled";
}
