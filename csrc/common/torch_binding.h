// What bindings use of torch: the stable ABI, so that one build works with every torch from 2.11
// on. Only this file and autograd's nodes (csrc/autograd), which have no stable ABI, include torch;
// kernels take plain pointers and sizes. Checks here prevent accesses out of bounds. Python checks
// the arguments that users pass.
#pragma once

// PyTorch's headers check the calls of its C functions with the macro TORCH_ERROR_CODE_CHECK, which
// omits what PyTorch says about an error. It is replaced before the headers that use it.
#include <torch/headeronly/util/shim_utils.h>
#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) \
  if ((call) != TORCH_SUCCESS) {     \
    fastattn::throw_error(#call);    \
  }

#include <stdexcept>
#include <string>

// The text of the last error. Absent before torch 2.13.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace fastattn {

// Throws for a call that has returned an error.
[[noreturn]] inline void throw_error(const char* call) {
  throw std::runtime_error(torch_exception_get_what_without_backtrace
                               ? torch_exception_get_what_without_backtrace()
                               : std::string(call) + " failed; torch >= 2.13 shows the reason");
}

}  // namespace fastattn

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "common/dtype.h"

namespace fastattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
// Kernels run on the current device, which may be another one than the tensors' in raw calls of a
// library's op.
using torch::stable::accelerator::DeviceGuard;

template <class T>
DType dtype_of(const T& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

// The arguments on the dispatcher's stack, taken in the order of the schema. Those that are tensors
// own them: all must be taken before an exception is thrown, or those left are never freed.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}
  template <class T>
  T take() {
    return torch::stable::detail::to<T>(*next_++);
  }
  Tensor tensor() { return take<Tensor>(); }
  std::optional<Tensor> optional() { return take<std::optional<Tensor>>(); }
  std::vector<Tensor> tensors(size_t count) {
    std::vector<Tensor> result;
    while (result.size() < count) {
      result.push_back(tensor());
    }
    return result;
  }

 private:
  StableIValue* next_;
};

// A tensor that the stack keeps.
class TensorOnStack {
 public:
  explicit TensorOnStack(StableIValue place)
      : handle_(torch::stable::detail::to<AtenTensorHandle>(place)) {}
  ScalarType scalar_type() const {
    int32_t type;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &type));
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(type));
  }
  int64_t dim() const {
    int64_t dim;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &dim));
    return dim;
  }
  int64_t size(int64_t d) const {
    int64_t size;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(handle_, d, &size));
    return size;
  }

 private:
  AtenTensorHandle handle_;
};

template <class... Results>
void return_results(StableIValue* stack, const Results&... results) {
  ((*stack++ = torch::stable::detail::from(results)), ...);
}

// Where a tensor's elements lie; a storage that was resized to 0 has none.
inline void* memory_of(const Tensor& tensor, const char* name) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  STD_TORCH_CHECK(bytes > 0 || tensor.numel() == 0, name, " must have memory, got a tensor of ",
                  tensor.numel(), " elements whose storage is empty");
  return tensor.data_ptr();
}

}  // namespace fastattn
