// Element types as the native code sees them, without torch: a tag for run time and storage types
// for templates.
#pragma once

#include <cstdint>

namespace fastattn {

enum class DType { kFloat32, kBFloat16, kFloat16 };

// Storage only: arithmetic is in float.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace fastattn
