// Launches primitives.cuh.
#include "sm90/primitives/primitives.cuh"

#include "sm90/primitives/primitives.h"

namespace fastattn::sm90 {

const char* run_primitive(const char* name, const void* a, const void* b, int* state, void* out,
                          cuda::Stream stream) {
  const primitives::Entry* entry = primitives::find_primitive(name);
  return entry ? entry->launch({{}, a, b, state, out, 0}, stream) : "there is no such primitive";
}

}  // namespace fastattn::sm90
