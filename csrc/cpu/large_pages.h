// Newly mapped memory gets its pages on first access: a page of 4 KB takes 1.3 us, one of 2 MB 90
// us (Linux 6.18 on a virtual EPYC). With small pages this is a tenth of a backward pass in bf16,
// so large buffers request large pages.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace fastattn {

constexpr int64_t kLargePage = 2 << 20;
// Allocations of this size are mapped anew at every call; glibc's malloc reuses smaller ones.
constexpr int64_t kNewlyMappedBytes = 32 << 20;

// Requests large pages where they fit into [data, data + bytes); returns where the first begins.
inline void* request_large_pages(void* data, int64_t bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kLargePage - 1) / kLargePage * kLargePage;
  const int64_t whole = (bytes - static_cast<int64_t>(first - start)) / kLargePage * kLargePage;
#if defined(__linux__)
  if (whole > 0) {
    madvise(reinterpret_cast<void*>(first), whole, MADV_HUGEPAGE);  // a failure is harmless
  }
#endif
  return reinterpret_cast<void*>(first);
}

}  // namespace fastattn
