// Runs the Hopper attention backward on the host for test_sm90_bwd_on_host.py: the kernels over the
// simulator in sm90_on_host. All instances, or those of ONLY_HEAD_DIM in bf16, or of these
// ONLY_VARIANT; with ONLY_DMASK only the gradient of its mask and the launch before it, with
// ONLY_DISTANCE only that of distance_bias.
#include "machine.h"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

// Accesses to memory that is not there end a launch with an error, too.
inline void __trap() {
  *reinterpret_cast<volatile int*>(uintptr_t{16}) = 0;
}

#include "attention/sm90/backward/main/attention_bwd_sm90.cuh"
#include "attention/sm90/backward/mask_classes_bwd_sm90.cuh"
#include "attention/sm90/masks/mask_classes_sm90.cuh"

namespace fastattn::attention {

const char* classify_mask_for_backward(const DenseMask& mask, const LengthsAndBounds& limits,
                                       int queries, int keys, cuda::Stream) {
  const MaskLayout& layout = mask.layout;
  on_host::launch(plain_count(layout), kPackThreads,
                  [&] { pack_mask_kernel(transposed(mask), keys, queries); });
  on_host::launch(class_count(layout), layout.tile_rows, [&] {
    classify_mask_kernel(transposed(mask), transposed(limits), keys, queries);
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
  if (problem.modifications.any()) {
    return problem.mask.data
               ? attention_bwd_sm90<kType, kHeadDim, Variant::kScoresDense>(problem, nullptr)
               : attention_bwd_sm90<kType, kHeadDim, Variant::kScores>(problem, nullptr);
  }
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
         : head_dim <= 128 ? run<kType, 128>(problem)
         : head_dim <= 192 ? run<kType, 192>(problem)
                           : run<kType, 256>(problem);
}

#if defined(ONLY_DMASK) || defined(ONLY_DISTANCE)
// The gradient of the mask or of distance_bias alone.
template <int kHeadDim, Variant kVariant>
const char* run_gradient(const BackwardProblem& problem) {
  using Traits = BackwardTraits<__nv_bfloat16, kHeadDim, kVariant>;
  BackwardArguments args;
  if (!set_arguments<Traits>(args, problem, TypeOf<DType::kBFloat16>::kMapType, 1)) {
    return kRefusedMap;
  }
  launch(attention_bwd_prepare_kernel<Traits>, args.row_blocks * problem.batch * problem.heads,
         kPrepareThreads, 0, nullptr, args, false);
#if defined(ONLY_DISTANCE)
  return launch_distance_gradient<DType::kBFloat16, kHeadDim, kVariant>(problem, args, 0, nullptr);
#else
  return launch_dmask<DType::kBFloat16, kHeadDim, kVariant>(problem, args, 0, nullptr);
#endif
}
#endif
}  // namespace

extern "C" const char* attention_bwd(const BackwardProblem* problem) {
  const BackwardProblem& p = *problem;
#if defined(ONLY_DMASK) || defined(ONLY_DISTANCE)
  const char* failure = run_gradient<ONLY_HEAD_DIM, Variant::ONLY_VARIANT>(p);
#elif defined(ONLY_VARIANT)  // compiles in seconds
  const char* failure =
      attention_bwd_sm90<DType::kBFloat16, ONLY_HEAD_DIM, Variant::ONLY_VARIANT>(p, nullptr);
#elif defined(ONLY_HEAD_DIM)
  const char* failure = run<DType::kBFloat16, ONLY_HEAD_DIM>(p);
#else
  const int widest = std::max(p.head_dim, p.value_dim);
  const char* failure = p.dtype == DType::kFloat16 ? run<DType::kFloat16>(widest, p)
                                                   : run<DType::kBFloat16>(widest, p);
#endif
  on_host::synchronize();
  return failure;
}
