// Runs a hardware primitive by its name; the kernels are in primitives.cuh.
#pragma once

#include "common/cuda_stream.h"

namespace fastattn::sm90 {

// state: two integers, zero. Returns an error message, or null.
const char* run_primitive(const char* name, const void* a, const void* b, int* state, void* out,
                          cuda::Stream stream);

}  // namespace fastattn::sm90
