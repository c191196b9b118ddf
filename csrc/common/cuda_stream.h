// PyTorch's current CUDA stream, for bindings, which include neither CUDA's headers nor those of
// PyTorch's CUDA library. It comes from a C function of that library, looked up once, because a
// library linked against it would not load with a PyTorch without CUDA.
#pragma once

#include <dlfcn.h>

#include <cstdint>

// The type that cudaStream_t points to.
struct CUstream_st;

namespace fastattn::cuda {

using Stream = CUstream_st*;

// torch's current stream of a device; false if torch has no CUDA.
inline bool current_stream(int device, Stream* stream) {
  using Getter = int32_t (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream"))
                   : nullptr;
  }();
  void* handle = nullptr;
  if (!getter || getter(device, &handle) != 0) {
    return false;
  }
  *stream = static_cast<Stream>(handle);
  return true;
}

}  // namespace fastattn::cuda
