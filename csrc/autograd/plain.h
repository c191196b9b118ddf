// Whether a call is plain: nobody watches or transforms torch's ops, and every tensor is one whose
// memory kernels may read. What `are_ops_watched` asks in Python, from the same state.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "autograd/torch_versions.h"

namespace fastattn::autograd {

// Modes, transforms, tracers and autocast are dispatch keys that a thread includes, or no longer
// excludes. Inference mode changes keys too, of autograd alone.
inline bool is_plain_thread(bool casts) {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  uint64_t included = keys.included_.raw_repr() ^ c10::default_included_set.raw_repr();
  uint64_t excluded = keys.excluded_.raw_repr() ^ c10::default_excluded_set.raw_repr();
  excluded &= ~kNames.raw_repr();
  if (c10::InferenceMode::is_enabled()) {
    included &= ~c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView).raw_repr();
    excluded &= ~c10::autograd_dispatch_keyset.raw_repr();
  }
  if (!casts) {
    excluded &= ~c10::autocast_dispatch_keyset.raw_repr();
  }
  return included == 0 && excluded == 0 && !at::impl::torch_function_mode_enabled() &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION) &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

// A dense CPU tensor: neither wrapped, lazily negated, sparse nor nested. No native op takes fp64,
// and its refusal takes 8 us.
inline bool is_plain_tensor(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kCPU({c10::DispatchKey::CPU});
  constexpr c10::DispatchKeySet kPlain({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                        c10::DispatchKey::AutogradCPU,
                                        c10::DispatchKey::AutocastCPU});
  const uint64_t keys = tensor.key_set().raw_repr();
  return (keys & ~kPlain.raw_repr()) == 0 && (keys & kCPU.raw_repr()) == kCPU.raw_repr() &&
         tensor.scalar_type() != at::kDouble;
}

}  // namespace fastattn::autograd
