// What CPU bindings share: new results, workspace, and calls to the other backends.
//
// Python defines the schemas of the namespace `fastattn`. A CPU binding registers two overloads of
// an op: the default one allocates the results; `.out` writes into given results. Calls that have
// no CPU kernel go to the other backends.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/torch_binding.h"
#include "cpu/large_pages.h"
#include "cpu/row_dropout.h"

// How PyTorch allocates memory on the CPU. Outside the stable ABI: absent if a version has none.
namespace c10 {
__attribute__((weak)) void* alloc_cpu(size_t bytes);
__attribute__((weak)) void free_cpu(void* data);
}  // namespace c10

namespace fastattn {

inline bool has_kernels_for(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
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

inline int64_t bytes_of(const Tensor& x) {
  return x.numel() * static_cast<int64_t>(x.element_size());
}

// Requests large pages for a large result, before it is written. (A 2048 x 8000 fp32 product of
// depth 256, two Zen 4 threads: 81 ms with small pages, 59 ms with large ones.)
inline const Tensor& with_large_pages(const Tensor& result) {
  const int64_t bytes = bytes_of(result);
  if (bytes >= kNewlyMappedBytes && result.is_contiguous()) {
    request_large_pages(memory_of(result, "a result"), bytes);
  }
  return result;
}

// -- memory ---------------------------------------------------------------------------------------
// Tests set this to fill new results and workspace with NaN.
std::atomic<bool>& poisons_memory();

inline void poison(void* data, int64_t bytes) {
  if (bytes > 0 && poisons_memory().load(std::memory_order_relaxed)) {
    memset(data, 0xFF, bytes);  // NaN in every floating type
  }
}

// Calls create(), which returns a tensor with `bytes` of new memory. Where the memory is not
// enough, the exception is PyTorch's, of which the stable ABI has the text alone, and only from
// torch 2.13 on: PyTorch throws it again for another allocation of this size.
template <class Create>
Tensor allocated(int64_t bytes, const Create& create) {
  try {
    return create();
  } catch (...) {
    if (c10::alloc_cpu && c10::free_cpu) {
      c10::free_cpu(c10::alloc_cpu(static_cast<size_t>(bytes)));
    }
    throw;
  }
}

// An uninitialised CPU tensor.
inline Tensor new_tensor(torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         torch::headeronly::IntHeaderOnlyArrayRef strides, ScalarType type) {
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  uint64_t elements = 1;  // wraps where the sizes are too large for PyTorch, too
  for (int64_t size : sizes) {
    elements *= size;
  }
  const auto create = [&] {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()),
                                                    sizes.data(), strides.data(), dtype,
                                                    aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
  };
  Tensor result = allocated(elements * aoti_torch_dtype_element_size(dtype), create);
  poison(result.data_ptr(), bytes_of(result));
  return result;
}

inline Tensor new_contiguous(torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  constexpr size_t kUsualDims = 16;
  std::array<int64_t, kUsualDims> usual;
  std::vector<int64_t> many(sizes.size() > kUsualDims ? sizes.size() : 0);
  int64_t* strides = many.empty() ? usual.data() : many.data();
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return new_tensor(sizes, {strides, sizes.size()}, type);
}

inline Tensor new_vector(int64_t count, ScalarType type) {
  return new_contiguous({&count, 1}, type);
}

inline Tensor contiguous_copy(const Tensor& x) {
  return allocated(bytes_of(x), [&] { return torch::stable::contiguous(x); });
}

inline Tensor as_contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : contiguous_copy(x);
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& x) {
  return x ? std::optional(as_contiguous(*x)) : x;
}

// Workspace of one call: on the stack if it is small, which is faster than creating a tensor.
template <int64_t kLocalFloats>
class Workspace {
 public:
  explicit Workspace(int64_t floats) : floats_(floats) {
    if (floats > kLocalFloats) {
      tensor_ = new_vector(floats, ScalarType::Float);
      next_ = static_cast<float*>(tensor_->data_ptr());
    } else {
      poison(local_, floats * sizeof(float));
    }
  }
  Workspace(const Workspace&) = delete;

  int64_t floats() const { return floats_; }

  // The next `count` elements.
  template <class T = float>
  T* take(int64_t count) {
    static_assert(sizeof(T) == sizeof(float));
    STD_TORCH_CHECK(count <= floats_ - taken_, "workspace must have ", count - (floats_ - taken_),
                    " more elements");
    float* first = next_ + taken_;
    taken_ += count;
    return reinterpret_cast<T*>(first);
  }

 private:
  std::optional<Tensor> tensor_;
  int64_t floats_, taken_ = 0;
  float* next_ = local_;
  alignas(64) float local_[kLocalFloats];
};

// -- arguments ------------------------------------------------------------------------------------
// Rows of a tensor [..., columns].
template <class T>
int64_t rows_in(const T& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    rows *= x.size(d);
  }
  return rows;
}

// keys: workspace of floats_for_dropout() elements.
inline int64_t floats_for_dropout(double p, int64_t columns) {
  return p > 0 ? (columns + 3) / 4 : 0;
}

inline Dropout dropout_of(double p, const std::optional<Tensor>& seed, uint32_t stream,
                          int64_t columns, float* keys) {
  Dropout result;
  result.threshold = dropout::threshold(p);
  if (!result) {
    return result;
  }
  STD_TORCH_CHECK(seed.has_value(), "dropout_seed must be given when dropout_p > 0");
  result.scale = dropout::keep_scale(result.threshold);
  result.seed = *data_of<const int64_t>(*seed, "dropout_seed", 1, ScalarType::Long);
  result.stream = stream;
  uint32_t* words = reinterpret_cast<uint32_t*>(keys);
  const uint32_t key = dropout::stream_key(dropout::kColumnTag, result.seed, stream);
  for (int64_t unit = 0; unit < floats_for_dropout(p, columns); ++unit) {
    words[unit] = dropout::absorb(key, static_cast<uint32_t>(unit));
  }
  result.column_keys = words;
  return result;
}

// The results that `.out` is given, the last arguments; none where the op creates its results.
template <bool kGiven>
std::vector<Tensor> given_results(StableIValue* stack, size_t arguments, size_t results) {
  return Arguments(stack + arguments - results).tensors(kGiven ? results : 0);
}

// -- the other backends ---------------------------------------------------------------------------
// The text of the exception that the other backend has raised in this thread, which PyTorch does
// not pass on before torch 2.13 and adds a traceback to since. Python sets it.
std::string& kept_error();

// Passes a call that has no CPU kernel to the first other backend that supports it, through the
// op's `backend` overload with an empty name. kGiven: the last arguments are the results, as those
// of `.out`.
template <bool kGiven>
void pass_to_other_backend(const char* op, StableIValue* stack, size_t arguments, size_t results) {
  constexpr size_t kMaxArguments = 32;
  std::array<StableIValue, kMaxArguments> values;
  STD_TORCH_CHECK(arguments < values.size(), op, " has too many arguments");
  std::copy_n(stack, arguments, values.begin());
  std::vector<Tensor> given = given_results<kGiven>(stack, arguments, results);
  values[kGiven ? arguments - results : arguments] = torch::stable::detail::from(std::string());
  kept_error().clear();
  if (torch_call_dispatcher(op, "backend", values.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    if (!kept_error().empty()) {
      throw std::runtime_error(kept_error());
    }
    throw_error(op);
  }
  if (!kGiven) {
    std::copy_n(values.begin(), results, stack);
    return;
  }
  const std::vector<Tensor> computed = Arguments(values.data()).tensors(results);
  for (size_t i = 0; i < results; ++i) {
    torch::stable::copy_(given[i], computed[i]);
  }
  for (const Tensor& result : given) {
    *stack++ = torch::stable::detail::from(result);
  }
}

// Whether the kernels support the dtypes of tensors at these places of the stack; those at
// `optional` may be None.
inline bool have_kernels(const StableIValue* stack, std::initializer_list<int> places,
                         std::initializer_list<int> optional = {}) {
  const auto is_supported = [](StableIValue tensor) {
    return has_kernels_for(TensorOnStack(tensor).scalar_type());
  };
  return std::all_of(places.begin(), places.end(),
                     [&](int place) { return is_supported(stack[place]); }) &&
         std::all_of(optional.begin(), optional.end(), [&](int place) {
           const auto* tensor = torch::stable::detail::to<StableIValue*>(stack[place]);
           return !tensor || is_supported(*tensor);
         });
}

// Registers the functions `op` and `op`_out as the overloads of an op. Calls for which `supported`,
// an expression of the arguments on `stack` and of kGiven, is false go to the other backends.
#define FASTATTN_CPU_OP(m, op, supported)                 \
  FASTATTN_CPU_OVERLOAD(m, op, "", op, false, supported); \
  FASTATTN_CPU_OVERLOAD(m, op, ".out", op##_out, true, supported)
#define FASTATTN_CPU_OVERLOAD(m, op, overload, function, is_given, supported)          \
  m.impl(#op overload, [](StableIValue* stack, uint64_t arguments, uint64_t results) { \
    constexpr bool kGiven = is_given;                                                  \
    if (supported) {                                                                   \
      TORCH_BOX(function)(stack, arguments, results);                                  \
    } else {                                                                           \
      pass_to_other_backend<kGiven>("fastattn::" #op, stack, arguments, results);      \
    }                                                                                  \
  })

// -- threads --------------------------------------------------------------------------------------
inline int64_t threads() {
  return torch::stable::get_num_threads();
}

// Calls body(worker) for each of [0, workers) on PyTorch's intra-op threads; a thread may run
// several workers.
constexpr auto kOnThreads = [](int64_t workers, const auto& body) {
  if (workers == 1) {
    return body(0);
  }
  torch::stable::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      body(worker);
    }
  });
};

}  // namespace fastattn
