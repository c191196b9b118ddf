// A call's workspace: one allocation, divided into sections in the order in which they are taken.
// Without memory the same code only computes the size.
#pragma once

#include <cstdint>

namespace fastattn {

class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(void* memory) : memory_(static_cast<char*>(memory)) {}

  int64_t bytes() const { return bytes_; }

  // The next `count` elements, uninitialised; null without memory.
  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 128;  // a line of the L2 cache; bulk copies require 16
    char* section = memory_ ? memory_ + bytes_ : nullptr;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(section);
  }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace fastattn
