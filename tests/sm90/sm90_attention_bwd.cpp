// Runs the Hopper attention backward on the host for test_sm90_bwd_on_host.py: the kernels over the
// simulator in sm90_on_host. All instances, or those of ONLY_HEAD_DIM in bf16, or of these
// ONLY_VARIANT; with ONLY_DMASK only the gradient of its mask and the launch before it.
#include "machine.h"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

#include "attention/sm90/backward/attention_bwd_sm90.cuh"
#include "attention/sm90/backward/mask_classes_bwd_sm90.cuh"
#include "attention/sm90/masks/mask_classes_sm90.cuh"

namespace fastattn::attention {

const char* classify_mask_for_backward(const DenseMask& mask, const Lengths& query_lengths,
                                       const Lengths& key_lengths, const Bounds& bounds,
                                       int queries, int keys, cuda::Stream) {
  const MaskLayout& layout = mask.layout;
  on_host::launch(plain_count(layout), kPackThreads,
                  [&] { pack_mask_kernel(transposed(mask), keys, queries); });
  on_host::launch(class_count(layout), layout.tile_rows, [&] {
    classify_mask_kernel(transposed(mask), key_lengths, query_lengths, transposed(bounds), keys,
                         queries);
  });
  const int64_t blocks = int64_t{layout.class_batches} * layout.class_heads * layout.blocks;
  on_host::launch(ceil_div(static_cast<int>(blocks), kRankThreads), kRankThreads,
                  [&] { rank_tiles_kernel(layout, mask.classes); });
  return nullptr;
}

}  // namespace fastattn::attention

using namespace fastattn;
using namespace fastattn::attention;

namespace {
template <DType kType, int kHeadDim>
const char* run(const BackwardProblem& problem) {
  const bool drops = problem.dropout.seed;
  if (problem.mask.data && problem.mask.type == MaskType::kBool) {
    return drops ? attention_bwd_sm90<kType, kHeadDim, Variant::kMaskDropout>(problem, nullptr)
                 : attention_bwd_sm90<kType, kHeadDim, Variant::kMask>(problem, nullptr);
  }
  if (problem.mask.data) {
    return drops ? attention_bwd_sm90<kType, kHeadDim, Variant::kBiasDropout>(problem, nullptr)
                 : attention_bwd_sm90<kType, kHeadDim, Variant::kBias>(problem, nullptr);
  }
  return drops ? attention_bwd_sm90<kType, kHeadDim, Variant::kDropout>(problem, nullptr)
               : attention_bwd_sm90<kType, kHeadDim, Variant::kBounded>(problem, nullptr);
}

template <DType kType>
const char* run(int head_dim, const BackwardProblem& problem) {
  return head_dim <= 64    ? run<kType, 64>(problem)
         : head_dim <= 96  ? run<kType, 96>(problem)
         : head_dim <= 128 ? run<kType, 128>(problem)
         : head_dim <= 192 ? run<kType, 192>(problem)
                           : run<kType, 256>(problem);
}

template <int kHeadDim, Variant kVariant>
const char* run_dmask(const BackwardProblem& problem) {
  using Traits = BackwardTraits<__nv_bfloat16, kHeadDim, kVariant>;
  BackwardArguments args;
  if (!set_arguments<Traits>(args, problem, TypeOf<DType::kBFloat16>::kMapType)) {
    return kRefusedMap;
  }
  launch(attention_bwd_prepare_kernel<Traits>, args.row_blocks * problem.batch * problem.heads,
         kPrepareThreads, 0, nullptr, args, false);
  return launch_dmask<DType::kBFloat16, kHeadDim, Traits::kDropout>(problem, args, 0, nullptr);
}
}  // namespace

struct View {
  void* data;
  int64_t strides[3];
  operator TensorView() const { return {data, strides[0], strides[1], strides[2]}; }
};

// The arguments that the bindings set.
struct Call {
  View q, k, v, out, dout, dq, dk, dv;
  const float *lse, *dlse;
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  const int *query_lengths, *key_lengths, *query_offsets, *key_offsets;
  int64_t sequences, max_queries, bottom_right, left, right, diagonal;
  const int64_t* seed;
  int64_t stream;
  double dropout_p, scale;
  const void* mask;
  int64_t mask_type, mask_sizes[4], mask_strides[4];
  const int64_t* tiles;
  int64_t tile_strides[4];
  int* workspace;
  void* dmask;
  int64_t dmask_sizes[4], dmask_strides[4], splits;
  float* partial;
  float *lse_delta, *dq_sum;
  int* dq_semaphores;
  int64_t in_order, half;
};

extern "C" const char* attention_bwd(const Call* c) {
  BackwardProblem p = {};
  p.q = c->q;
  p.k = c->k;
  p.v = c->v;
  p.out = c->out;
  p.dout = c->dout;
  p.dq = c->dq;
  p.dk = c->dk;
  p.dv = c->dv;
  p.lse = c->lse;
  p.dlse = c->dlse;
  p.batch = static_cast<int>(c->batch);
  p.heads = static_cast<int>(c->heads);
  p.kv_heads = static_cast<int>(c->kv_heads);
  p.queries = static_cast<int>(c->queries);
  p.keys = static_cast<int>(c->keys);
  p.head_dim = static_cast<int>(c->head_dim);
  p.value_dim = static_cast<int>(c->value_dim);
  p.query_lengths = {c->query_lengths, false};
  p.key_lengths = {c->key_lengths, false};
  p.packing.query_offsets = c->query_offsets;
  p.packing.key_offsets = c->key_offsets;
  p.packing.sequences = static_cast<int>(c->sequences);
  p.packing.bottom_right = c->bottom_right != 0;
  p.packing.max_queries = static_cast<int>(c->max_queries);
  p.bounds = {static_cast<int>(c->left), static_cast<int>(c->right), static_cast<int>(c->diagonal)};
  if (c->dropout_p > 0.0) {
    const int threshold = dropout::threshold(c->dropout_p);
    p.dropout = {c->seed, static_cast<uint32_t>(c->stream), threshold,
                 dropout::keep_scale(threshold), nullptr};
  }
  p.scale = static_cast<float>(c->scale);
  p.lse_delta = c->lse_delta;
  p.dq_sum = c->dq_sum;
  p.counter = c->dq_semaphores;
  p.dq_semaphores = c->in_order ? c->dq_semaphores + 1 : nullptr;
  const int widest = std::max(p.head_dim, p.value_dim);
  if (c->mask) {
    p.mask.data = c->mask;
    p.mask.type = static_cast<MaskType>(c->mask_type);
    p.mask.batch_stride = c->mask_strides[0];
    p.mask.head_stride = c->mask_strides[1];
    p.mask.row_stride = c->mask_strides[2];
    p.mask.column_stride = c->mask_strides[3];
    p.mask.tiles = c->tiles;
    std::copy(c->tile_strides, c->tile_strides + 4, p.mask.tile_strides);
    p.mask.layout =
        backward_mask_layout(static_cast<int>(c->mask_sizes[0]), static_cast<int>(c->mask_sizes[1]),
                             static_cast<int>(c->mask_sizes[3]), p.batch,
                             c->query_lengths || c->key_lengths, p.queries, p.keys, widest);
    place_in_workspace(p.mask, c->workspace);
    p.dmask.data = c->dmask;
    p.dmask.type = p.mask.type;
    std::copy(c->dmask_sizes, c->dmask_sizes + 4, p.dmask.sizes);
    std::copy(c->dmask_strides, c->dmask_strides + 4, p.dmask.strides);
    p.dmask.splits = static_cast<int>(c->splits);
    p.dmask.partial = c->partial;
  }
#if defined(ONLY_DMASK)
  const char* failure = run_dmask<ONLY_HEAD_DIM, Variant::ONLY_VARIANT>(p);
#elif defined(ONLY_VARIANT)  // compiles in seconds
  const char* failure =
      attention_bwd_sm90<DType::kBFloat16, ONLY_HEAD_DIM, Variant::ONLY_VARIANT>(p, nullptr);
#elif defined(ONLY_HEAD_DIM)
  const char* failure = run<DType::kBFloat16, ONLY_HEAD_DIM>(p);
#else
  const char* failure =
      c->half ? run<DType::kFloat16>(widest, p) : run<DType::kBFloat16>(widest, p);
#endif
  on_host::synchronize();
  return failure;
}
