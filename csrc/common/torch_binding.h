// What bindings need of torch: the stable ABI, so that one build serves every torch from 2.11 on.
// The only file that includes torch, but for autograd's nodes (csrc/autograd), which have no stable
// ABI; kernels see plain pointers and sizes. Checks here are the last
// line before memory is touched: they refuse what would read or write out of bounds. Arguments that
// people give are checked in Python.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "common/dtype.h"
#include "common/large_pages.h"

namespace fastattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor, const char* name) {
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

// Where a tensor's elements lie; a storage that was given up (resized to nothing) has none.
inline void* memory_of(const Tensor& tensor, const char* name) {
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  STD_TORCH_CHECK(bytes > 0 || tensor.numel() == 0, name, " must have memory, got a tensor of ",
                  tensor.numel(), " elements whose storage is empty");
  return tensor.data_ptr();
}

// The data of a contiguous CPU tensor of `count` elements of type T.
template <class T>
inline T* data_of(const Tensor& tensor, const char* name, int64_t count, ScalarType type) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == type && tensor.is_contiguous() &&
                      tensor.numel() == count,
                  name, " must be a contiguous CPU tensor of ", count,
                  " elements of the expected type, got ", tensor.numel(), " elements");
  return static_cast<T*>(memory_of(tensor, name));
}

// A result that is about to be written. (2048 x 8000 floats of a product 256 deep, two Zen 4
// threads: with small pages 81 ms, with large ones 59.)
inline const Tensor& fresh(const Tensor& result) {
  const int64_t bytes = result.numel() * static_cast<int64_t>(result.element_size());
  if (bytes >= kAlwaysFresh && result.is_contiguous()) {
    ask_for_large_pages(memory_of(result, "a result"), bytes);
  }
  return result;
}

// An uninitialised CPU tensor.
inline Tensor new_tensor(torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         torch::headeronly::IntHeaderOnlyArrayRef strides, ScalarType type) {
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle result;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                  strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &result));
  return Tensor(result);
}

// Consecutive pieces of a float32 workspace, or of `local` memory where no workspace was given.
class Scratch {
 public:
  explicit Scratch(const std::optional<Tensor>& workspace, float* local = nullptr,
                   int64_t local_floats = 0)
      : next_(local), left_(local_floats) {
    if (workspace) {
      left_ = workspace->numel();
      next_ = data_of<float>(*workspace, "scratch", left_, ScalarType::Float);
    }
  }

  template <class T>
  T* take(int64_t count) {
    static_assert(sizeof(T) == sizeof(float));
    STD_TORCH_CHECK(count <= left_, "scratch must have ", count - left_, " more elements");
    float* piece = next_;
    next_ += count;
    left_ -= count;
    return reinterpret_cast<T*>(piece);
  }

 private:
  float* next_;
  int64_t left_;
};

}  // namespace fastattn
