// The bindings of the Hopper kernels for CPU tensors, as ops of fastattn_sm90_on_host: what they
// launch is up to `launcher`.
#include "attention/attention.h"
#include "attention/sm90/forward/fwd_workspace.h"
#include "common/torch_binding.h"

namespace fastattn::attention {

// Returns nullptr or an error message.
using Launcher = const char* (*)(const char* op, const void* problem, int type, int head_dim,
                                 int variant);
Launcher launcher = nullptr;
// Instead of the forward's own; none if splits is 0.
ForwardPlan given_plan = {};

template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_fwd_sm90(const ForwardProblem& problem, cuda::Stream stream) {
  return is_guarded(stream) ? launcher("attention_fwd", &problem, static_cast<int>(kType), kHeadDim,
                                       static_cast<int>(kVariant))
                            : kUnguarded;
}
template <DType kType, int kHeadDim, Variant kVariant>
const char* attention_bwd_sm90(const BackwardProblem& problem, cuda::Stream stream) {
  return is_guarded(stream) ? launcher("attention_bwd", &problem, static_cast<int>(kType), kHeadDim,
                                       static_cast<int>(kVariant))
                            : kUnguarded;
}

inline ForwardPlan plan_or_given(const ForwardProblem& problem, Variant variant, int num_sms) {
  return given_plan.splits ? given_plan : plan_forward(problem, variant, num_sms);
}

}  // namespace fastattn::attention

#define CUDA CPU
#define is_cuda is_cpu
#define DeviceGuard HostGuard
#ifndef fastattn_sm90  // builds in one process have different namespaces
#define fastattn_sm90 fastattn_sm90_on_host
#endif
#define plan_forward plan_or_given
#include "attention/binding_bwd_sm90.cpp"
#include "attention/binding_fwd_sm90.cpp"
#undef plan_forward

#define ENTRY extern "C" __attribute__((visibility("default")))

ENTRY void on_host_launcher(fastattn::attention::Launcher launcher) {
  fastattn::attention::launcher = launcher;
}
ENTRY void on_host_plan(int splits, int counted, int ordered) {
  fastattn::attention::given_plan = {splits, counted != 0, ordered != 0};
}
// The last workspace's guards, which whoever fills it lifts.
ENTRY void on_host_guard(int on) {
  for (char* guard : fastattn::guards) {
    mprotect(guard, fastattn::kPage, on ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
}
// Whether workspaces from then on have guards, or the library's own layout.
ENTRY void on_host_guards_sections(int on) {
  fastattn::guards_sections = on != 0;
}
// The offset and the size of each section of the last workspace without guards; returns how many.
ENTRY int on_host_sections(int64_t* result, int most) {
  const auto& sections = fastattn::sections;
  const size_t count = std::min(sections.size(), static_cast<size_t>(2 * most));
  std::copy(sections.begin(), sections.begin() + count, result);
  return static_cast<int>(sections.size() / 2);
}
ENTRY void on_host_short_section(int section) {
  fastattn::short_section = section;
}
// Splits of the keys, whether there is a counter, an order of sequences, and the bytes of an
// element of a copied mask.
ENTRY void on_host_forward_plan(const fastattn::attention::ForwardProblem* p, int* result) {
  const int copied = p->mask.copy_type == fastattn::attention::MaskType::kFloat32 ? 4 : 2;
  const int values[] = {p->splits.count, p->counter != nullptr, p->packing.order != nullptr,
                        p->mask.copy ? copied : 0};
  std::copy(values, values + 4, result);
}
// Whether thread blocks add to dq in the order of their keys.
ENTRY int on_host_adds_in_order(const fastattn::attention::BackwardProblem* p) {
  return p->in_order;
}
ENTRY int on_host_dmask_splits(const fastattn::attention::BackwardProblem* p) {
  return p->dmask.splits;
}
ENTRY int on_host_num_splits(int64_t tiles, int rows, int blocks, int block, int num_sms) {
  return fastattn::attention::num_splits(tiles, rows, blocks, block, num_sms);
}
