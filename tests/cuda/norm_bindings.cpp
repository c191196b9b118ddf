// The bindings of the norms' CUDA kernels for CPU tensors, as ops of fastattn_cuda_on_host: what
// they launch is up to `launcher`.
#include "common/torch_binding.h"
#include "layer_norm/norm_cuda.h"

namespace fastattn::norm {

// Returns nullptr or an error message.
using Launcher = const char* (*)(const char* op, const void* problem, int type, int parameter_type);
Launcher launcher = nullptr;

template <DType kType, DType kParameterType>
const char* norm_fwd(const ForwardProblem& problem, cuda::Stream stream) {
  return is_guarded(stream) ? launcher("norm_fwd", &problem, static_cast<int>(kType),
                                       static_cast<int>(kParameterType))
                            : kUnguarded;
}
template <DType kType, DType kParameterType>
const char* norm_bwd(const BackwardProblem& problem, cuda::Stream stream) {
  return is_guarded(stream) ? launcher("norm_bwd", &problem, static_cast<int>(kType),
                                       static_cast<int>(kParameterType))
                            : kUnguarded;
}

}  // namespace fastattn::norm

#define CUDA CPU
#define is_cuda is_cpu
#define DeviceGuard HostGuard
#ifndef fastattn_cuda  // builds in one process have different namespaces
#define fastattn_cuda fastattn_cuda_on_host
#endif
#include "layer_norm/binding_cuda.cpp"

#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY void on_host_launcher(fastattn::norm::Launcher launcher) {
  fastattn::norm::launcher = launcher;
}
// The last workspace's guards, which whoever fills it lifts.
ENTRY void on_host_guard(int on) {
  for (char* guard : fastattn::guards) {
    mprotect(guard, fastattn::kPage, on ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
}
// The section of later workspaces that is 16 bytes too short; none if negative.
ENTRY void on_host_short_section(int section) {
  fastattn::short_section = section;
}
ENTRY void on_host_forward_tiling(const fastattn::norm::ForwardProblem* p, int* result) {
  const auto& t = p->tiling;
  const int values[] = {t.width, t.values, t.threads, t.rows};
  std::copy(values, values + 4, result);
}
ENTRY void on_host_backward_tiling(const fastattn::norm::BackwardProblem* p, int* result) {
  const auto& t = p->tiling;
  const int values[] = {t.width, t.values, t.threads, t.rows, p->strips, p->lines};
  std::copy(values, values + 6, result);
}
