// The feed-forward network's bindings for CPU tensors, as ops of fastattn_sm90_on_host: what they
// launch is up to `launcher`.
#include "common/torch_binding.h"
#include "ffn/sm90/workspace.h"

namespace fastattn::ffn {

// Returns nullptr or an error message. step: -1 without a product.
using Launcher = const char* (*)(const char* op, const void* problem, int type, int step);
Launcher launcher = nullptr;

template <DType kType, Step kStep>
const char* ffn_product_sm90(const Product& problem, cuda::Stream stream) {
  return is_guarded(stream)
             ? launcher("ffn_product", &problem, static_cast<int>(kType), static_cast<int>(kStep))
             : kUnguarded;
}
const char* drop_gradient(const DropGradient& problem, cuda::Stream stream) {
  return is_guarded(stream)
             ? launcher("ffn_drop_gradient", &problem, static_cast<int>(problem.dtype), -1)
             : kUnguarded;
}
const char* sum_columns(const SumColumns& problem, cuda::Stream stream) {
  return is_guarded(stream)
             ? launcher("ffn_sum_columns", &problem, static_cast<int>(problem.dtype), -1)
             : kUnguarded;
}

}  // namespace fastattn::ffn

#define CUDA CPU
#define is_cuda is_cpu
#define DeviceGuard HostGuard
#define fastattn_sm90 fastattn_sm90_on_host
#include "ffn/binding_sm90.cpp"

#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY void on_host_launcher(fastattn::ffn::Launcher launcher) {
  fastattn::ffn::launcher = launcher;
}
ENTRY int on_host_independent(const fastattn::ffn::Product* p) {
  return p->independent;
}
// The last workspace's guards, which whoever fills it lifts.
ENTRY void on_host_guard(int on) {
  for (char* guard : fastattn::guards) {
    mprotect(guard, fastattn::kPage, on ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
}
ENTRY void on_host_short_section(int section) {
  fastattn::short_section = section;
}
