// The Hopper attention backward on the host, for test_sm90_bwd_on_host.py: the kernels over the
// machine of sm90_on_host, and what only they ask of it.
#include "machine.h"

namespace fastattn::sm90::ptx {

// Row i of matrix j as lane 8 j + i has its address; a thread holds two elements of a column.
inline void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                              uint32_t r3) {
  const uint32_t registers[] = {r0, r1, r2, r3};
  const unsigned lane = threadIdx.x % on_host::kWarpLanes;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    for (unsigned i = 0; i < 2; ++i) {
      const uint32_t row = on_host::from_lane(address, 8 * matrix + lane % 4 * 2 + i);
      const uint16_t element = static_cast<uint16_t>(registers[matrix] >> (16 * i));
      std::memcpy(on_host::shared + row + lane / 4 * 2, &element, sizeof(element));
    }
  }
}

inline void cp_async_bulk_store(void* to, uint32_t from, uint32_t bytes) {
  std::memcpy(to, on_host::shared + from, bytes);
}
inline void cp_reduce_async_bulk_add(void* to, uint32_t from, uint32_t bytes) {
  const float* added = reinterpret_cast<const float*>(on_host::shared + from);
  for (uint32_t i = 0; i < bytes / sizeof(float); ++i) {
    static_cast<float*>(to)[i] += added[i];
  }
}

inline int load_acquire(const int* word) {
  return *word;
}
inline void store_release(int* word, int value) {
  *word = value;
}
inline void fence_proxy_async_all() {}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace fastattn::sm90::ptx

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

template <class Kernel, class Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel,
                               const Arguments& arguments) {
  on_host::mbarriers.clear();
  // What nobody wrote must not look like zero.
  std::memset(on_host::shared, 0xFF, sizeof(on_host::shared));
  on_host::launch(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments); });
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

#include "attention_bwd_on_host.cuh"
using namespace fastattn;
using namespace fastattn::attention;

namespace {
template <DType kType>
const char* run(int head_dim, const BackwardProblem& problem) {
  switch (head_dim) {
    case 64:
      return attention_bwd_sm90<kType, 64>(problem, nullptr);
    case 96:
      return attention_bwd_sm90<kType, 96>(problem, nullptr);
    case 128:
      return attention_bwd_sm90<kType, 128>(problem, nullptr);
    case 192:
      return attention_bwd_sm90<kType, 192>(problem, nullptr);
    case 256:
      return attention_bwd_sm90<kType, 256>(problem, nullptr);
  }
  return "there is no such instance";
}
}  // namespace

// tensors: q, k, v, out, dout, dq, dk, dv, each with strides of batch, heads and rows. sizes:
// batch, heads, kv_heads, queries, keys, head_dim, value_dim. band: left, right, diagonal. Lengths:
// int32.
extern "C" const char* attention_bwd(int instance, bool half, void** tensors,
                                     const int64_t* strides, const float* lse, const float* dlse,
                                     const int* sizes, const int* query_lengths,
                                     const int* key_lengths, const int* band, float scale,
                                     float* statistics, float* dq_sum, int* turns, bool in_order) {
  BackwardProblem p;
  TensorView* const views[] = {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv};
  for (int i = 0; i < 8; ++i) {
    *views[i] = {tensors[i], strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
  }
  p.lse = lse;
  p.dlse = dlse;
  p.batch = sizes[0];
  p.heads = sizes[1];
  p.kv_heads = sizes[2];
  p.queries = sizes[3];
  p.keys = sizes[4];
  p.head_dim = sizes[5];
  p.value_dim = sizes[6];
  p.query_lengths = {query_lengths, false};
  p.key_lengths = {key_lengths, false};
  p.band = {band[0], band[1], band[2]};
  p.scale = scale;
  p.statistics = statistics;
  p.dq_sum = dq_sum;
  p.counter = turns;
  p.turns = in_order ? turns + 1 : nullptr;
  return half ? run<DType::kFloat16>(instance, p) : run<DType::kBFloat16>(instance, p);
}
