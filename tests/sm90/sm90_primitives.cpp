// Runs the primitives of csrc/sm90/primitives on the host for test_sm90_primitives.py.
#include "machine.h"

extern "C" const char* cudaGetErrorString(cudaError_t) {
  return "an error of CUDA";
}

#include "sm90/primitives/primitives.cuh"

using namespace fastattn::sm90::primitives;

// The name of primitive number `index`, or null behind the last one.
extern "C" const char* primitive_name(int64_t index) {
  constexpr int64_t kCount = sizeof(kPrimitives) / sizeof(kPrimitives[0]);
  return index < kCount ? kPrimitives[index].name : nullptr;
}

extern "C" const char* primitive(const char* name, const void* a, const void* b, int* state,
                                 void* out) {
  const Entry* entry = find_primitive(name);
  const char* failure = entry ? entry->launch({{}, a, b, state, out, 0}, nullptr) : "unknown name";
  on_host::synchronize();
  return failure;
}
