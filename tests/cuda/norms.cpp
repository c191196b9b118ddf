// Runs the norms' CUDA kernels on the host for test_norms_on_host.py, for rows of ONLY_TYPE: over
// the simulator in sm90_on_host, of which they use threads, warps, barriers and memory.
#include "machine.h"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

#include "layer_norm/norm_bwd.cuh"
#include "layer_norm/norm_fwd.cuh"
#include "layer_norm/sum_partials.cuh"

using namespace fastattn;
using namespace fastattn::norm;

namespace fastattn::norm {
thread_local char norm_memory[227 << 10] __attribute__((aligned(16)));

const char* sum_partials(const BackwardProblem& problem, cuda::Stream stream) {
  return run_sum_partials(problem, stream);
}
}  // namespace fastattn::norm

namespace {
constexpr DType kType = DType::ONLY_TYPE;
const char* kOther = "the instance is one of another type";
}  // namespace

extern "C" void norm_shared_memory(int bytes) {
  cuda::memory_of_multiprocessor = bytes;
}

extern "C" const char* norm_fwd(const ForwardProblem* p, int type, int parameter_type) {
  if (p->type != kType || static_cast<DType>(type) != kType) {
    return kOther;
  }
  const char* failure = static_cast<DType>(parameter_type) == kType
                            ? norm_fwd<kType, kType>(*p, nullptr)
                            : norm_fwd<kType, DType::kFloat32>(*p, nullptr);
  on_host::synchronize();
  return failure;
}

extern "C" const char* norm_bwd(const BackwardProblem* p, int type, int parameter_type) {
  std::memset(norm_memory, 0xFF, sizeof(norm_memory));
  if (p->type != kType || static_cast<DType>(type) != kType) {
    return kOther;
  }
  const char* failure = static_cast<DType>(parameter_type) == kType
                            ? norm_bwd<kType, kType>(*p, nullptr)
                            : norm_bwd<kType, DType::kFloat32>(*p, nullptr);
  on_host::synchronize();
  return failure;
}
