// fastattn_sm90::primitive, which fastattn/testing/primitives.py calls with inputs of its own.
#include <string>

#include "common/cuda_stream.h"
#include "common/torch_binding.h"
#include "sm90/primitives/primitives.h"

namespace fastattn::sm90 {
namespace {

void primitive(std::string name, Tensor a, Tensor b, Tensor state, Tensor out) {
  for (const Tensor* x : {&a, &b, &state, &out}) {
    STD_TORCH_CHECK(x->is_cuda() && x->is_contiguous(), "tensors must be contiguous, on a GPU");
  }
  const DeviceGuard guard(a.get_device_index());
  cuda::Stream stream = nullptr;
  STD_TORCH_CHECK(cuda::current_stream(a.get_device_index(), &stream), "torch has no CUDA stream");
  const char* failure = run_primitive(name.c_str(), a.data_ptr(), b.data_ptr(),
                                      static_cast<int*>(state.data_ptr()), out.data_ptr(), stream);
  STD_TORCH_CHECK(!failure, name, ": ", failure);
}

}  // namespace
}  // namespace fastattn::sm90

STABLE_TORCH_LIBRARY_FRAGMENT(fastattn_sm90, m) {
  m.def("primitive(str name, Tensor a, Tensor b, Tensor(a!) state, Tensor(b!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_sm90, CUDA, m) {
  m.impl("primitive", TORCH_BOX(&fastattn::sm90::primitive));
}
