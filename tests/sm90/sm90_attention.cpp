// Runs the Hopper attention forward on the host for test_sm90_on_host.py: the unchanged kernels
// over the simulator in sm90_on_host. INSTANCES is a list of INSTANCE(type, head dim, variant).
#include "machine.h"

namespace fastattn::attention {
struct ForwardArguments;
}  // namespace fastattn::attention

// Called by launchers, whose <<<>>> is rewritten.
template <class Arguments>
void launch_on_host(void (*kernel)(const Arguments), int blocks, int threads, int bytes,
                    const Arguments& arguments) {
  on_host::enqueue(
      {blocks, threads, [kernel, arguments] { kernel(arguments); }, static_cast<uint32_t>(bytes)});
}

#include "attention/sm90/forward/attention_fwd_sm90.cuh"
#include "attention/sm90/forward/combine_splits.cuh"
#include "attention/sm90/forward/order_sequences.cuh"
#include "attention/sm90/forward/short_queries.h"
#include "attention/sm90/masks/mask_classes_sm90.cuh"

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
                          const Lengths& key_lengths, const Bounds& bounds, int queries, int keys,
                          cuda::Stream) {
  on_host::launch(plain_count(mask.layout), kPackThreads,
                  [&] { pack_mask_kernel(mask, queries, keys); });
  on_host::launch(class_count(mask.layout), mask.layout.tile_rows, [&] {
    classify_mask_kernel(mask, query_lengths, key_lengths, bounds, queries, keys);
  });
  return nullptr;
}

const char* order_sequences(const Packing& packing, cuda::Stream) {
  on_host::launch(1, kOrderThreads, [&] { order_sequences_kernel(packing); });
  return nullptr;
}

template <DType kType>
const char* combine_splits(const ForwardProblem& p, cuda::Stream) {
  const CombineArguments args = combine_arguments(p);
  on_host::enqueue({(args.rows + kCombineWarps - 1) / kCombineWarps, kCombineThreads,
                    [args] { combine_splits_kernel<typename TypeOf<kType>::Element>(args); },
                    on_host::kSharedBytes, true});
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

// The arguments that the bindings set.
struct Call {
  View q, k, v, out;
  float* lse;
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  const int *query_lengths, *key_lengths, *query_offsets, *key_offsets;
  int64_t sequences, max_keys, bottom_right, left, right, diagonal;
  int64_t type, variant;
  const int64_t* seed;
  int64_t stream, threshold;
  const void* mask;
  int64_t mask_type, mask_sizes[4], mask_strides[4], mask_copied;
  double scale;
  int64_t counted, splits, ordered;
};

// The order of sequences whose keys begin at these offsets.
extern "C" const char* order(const int* offsets, int sequences, int max_keys, int* result) {
  Packing packing;
  packing.key_offsets = offsets;
  packing.sequences = sequences;
  packing.max_keys = max_keys;
  packing.order = result;
  return order_sequences(packing, nullptr);
}

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
               static_cast<int>(c->max_keys), c->bottom_right != 0};
  std::vector<int> order(c->sequences, -1);
  p.packing.order = c->ordered ? order.data() : nullptr;
  p.bounds = {static_cast<int>(c->left), static_cast<int>(c->right), static_cast<int>(c->diagonal)};
  p.scale = static_cast<float>(c->scale);
  int counter = 0;
  p.counter = c->counted ? &counter : nullptr;
  const int widest = std::max(p.head_dim, p.value_dim);
  const Variant variant = static_cast<Variant>(c->variant);
  std::vector<uint32_t> column_keys(dropout::units(p.keys + 128));
  if (has_dropout(variant)) {
    const int threshold = static_cast<int>(c->threshold);
    p.dropout = {c->seed, static_cast<uint32_t>(c->stream), threshold,
                 dropout::keep_scale(threshold), column_keys.data()};
  }
  std::vector<uint32_t> bits;
  std::vector<int> plain;
  std::vector<BlockClass> classes;
  std::vector<uint4> copy;
  if (c->mask) {
    p.mask.data = c->mask;
    p.mask.type = static_cast<MaskType>(c->mask_type);
    p.mask.batch_stride = c->mask_strides[0];
    p.mask.head_stride = c->mask_strides[1];
    p.mask.row_stride = c->mask_strides[2];
    p.mask.column_stride = c->mask_strides[3];
    p.mask.layout = mask_layout(
        static_cast<int>(c->mask_sizes[0]), static_cast<int>(c->mask_sizes[1]),
        static_cast<int>(c->mask_sizes[2]), p.batch, c->query_lengths || c->key_lengths, p.queries,
        p.keys, forward_tile_rows(widest, variant), forward_block(widest, variant));
    bits.assign(bit_words(p.mask.layout), ~0u);
    plain.assign(plain_count(p.mask.layout), -1);
    classes.resize(class_count(p.mask.layout));
    p.mask.bits = bits.data();
    p.mask.plain = plain.data();
    p.mask.classes = classes.data();
    if (c->mask_copied) {
      const bool own = p.mask.type == (c->type == 1 ? MaskType::kBFloat16 : MaskType::kFloat16);
      p.mask.copy_type = own ? p.mask.type : MaskType::kFloat32;
      const int64_t bytes = copied_elements(p.mask.layout, p.queries, p.keys) * (own ? 2 : 4);
      copy.resize(bytes / sizeof(uint4));
      std::memset(copy.data(), 0xFF, bytes);
      p.mask.copy = copy.data();
    }
  }
  const int64_t rows = int64_t{1} * p.batch * p.heads * p.queries;
  std::vector<float> split_outputs(c->splits * rows * p.value_dim, NAN);
  std::vector<RowMaxSum> split_max_sum(c->splits * rows, {NAN, NAN});
  p.splits = {static_cast<int>(c->splits), rows, split_outputs.data(), split_max_sum.data()};
  if (variant == Variant::kFull || variant == Variant::kBounded) {
    cut_keys_of_one_query(p);
    merge_groups(p);
  }
  const int instance_dim = widest <= 64    ? 64
                           : widest <= 96  ? 96
                           : widest <= 128 ? 128
                           : widest <= 192 ? 192
                                           : 256;
#define INSTANCE(TYPE, DIM, VARIANT)                                                          \
  if (c->type == static_cast<int64_t>(DType::TYPE) && instance_dim == DIM &&                  \
      variant == Variant::VARIANT) {                                                          \
    const char* failure = attention_fwd_sm90<DType::TYPE, DIM, Variant::VARIANT>(p, nullptr); \
    on_host::synchronize();                                                                   \
    return failure;                                                                           \
  }
  INSTANCES
  return "not compiled";
}
