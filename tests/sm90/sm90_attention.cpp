// Runs the Hopper attention forward on the host for test_sm90_on_host.py: the unchanged kernels
// over the simulator in sm90_on_host. The instance is that of ONLY_DTYPE,
// ONLY_HEAD_DIM and ONLY_VARIANT.
#include "machine.h"

namespace fastattn::attention {
struct ForwardArguments;
}  // namespace fastattn::attention

int launched_threads = 0;  // of a thread block

// Called by launchers, whose <<<>>> is rewritten.
template <class Arguments>
void launch_on_host(void (*kernel)(const Arguments), int blocks, int threads, int bytes,
                    const Arguments& arguments) {
  launched_threads = threads;
  on_host::enqueue(
      {blocks, threads, [kernel, arguments] { kernel(arguments); }, static_cast<uint32_t>(bytes)});
}

#include "attention/sm90/forward/attention_fwd_sm90.cuh"
#include "attention/sm90/forward/combine_splits.cuh"
#include "attention/sm90/forward/order_sequences.cuh"
#include "attention/sm90/masks/hash_columns.cuh"
#include "attention/sm90/masks/mask_classes_sm90.cuh"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}
extern "C" cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

namespace fastattn::attention {

const char* hash_columns(const Dropout& dropout, int units, cuda::Stream, int* counter) {
  const int blocks = larger(ceil_div(units, kHashThreads), counter ? 1 : 0);
  if (blocks > 0) {
#ifdef FASTATTN_TRIAL_FWD_COUNTER
    const auto kernel = [=] { hash_columns_kernel(dropout, units, counter); };
#else
    const auto kernel = [=] { hash_columns_kernel(dropout, units); };
#endif
    on_host::enqueue({static_cast<unsigned>(blocks), kHashThreads, kernel});
  }
  return nullptr;
}

const char* classify_mask(const DenseMask& mask, const LengthsAndBounds& limits, int queries,
                          int keys, cuda::Stream) {
  on_host::launch(plain_count(mask.layout), kPackThreads,
                  [&] { pack_mask_kernel(mask, queries, keys); });
  on_host::launch(class_count(mask.layout), mask.layout.tile_rows,
                  [&] { classify_mask_kernel(mask, limits, queries, keys); });
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

// The order of sequences whose keys begin at these offsets.
extern "C" const char* order(const int* offsets, int sequences, int max_keys, int* result) {
  Packing packing;
  packing.key_offsets = offsets;
  packing.sequences = sequences;
  packing.max_keys = max_keys;
  packing.order = result;
  return order_sequences(packing, nullptr);
}

// Heads of an L2 swizzle group, by the rows of a tile, on a GPU with 132 multiprocessors.
extern "C" int swizzle_group(int heads, int queries, int keys, int head_dim, int tile_rows) {
  ForwardProblem p = {};
  p.batch = 1;
  p.heads = p.kv_heads = heads;
  p.queries = queries;
  p.keys = keys;
  p.head_dim = p.value_dim = head_dim;
  return swizzle_group_heads(p, tile_rows, 132);
}

// Threads of a block of the last launch.
extern "C" int last_threads() {
  return launched_threads;
}

extern "C" const char* attention_fwd(const ForwardProblem* problem) {
  const char* failure = attention_fwd_sm90<DType::ONLY_DTYPE, ONLY_HEAD_DIM, Variant::ONLY_VARIANT>(
      *problem, nullptr);
  on_host::synchronize();
  return failure;
}
