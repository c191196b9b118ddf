// Newly mapped memory gets its pages on first access: a page of 4 KB takes 1.3 us, one of 2 MB 90
// us (Linux 6.18 on a virtual EPYC). With small pages this is a tenth of a backward pass in bf16,
// so large buffers request large pages.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

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

// Moves memory that is in use, [address, address + bytes) each, to large pages: those at least half
// of which it covers, with whatever else is there. Adjacent pages are moved in one call (260 MB,
// one Zen 5 thread: 0.09 s instead of 0.6).
inline void move_to_large_pages(const std::vector<std::pair<uintptr_t, int64_t>>& ranges) {
#if defined(__linux__)
  constexpr int kCollapse = 25;          // MADV_COLLAPSE, since Linux 6.1; a failure is harmless
  std::map<uintptr_t, int64_t> covered;  // bytes of each large page
  for (const auto& [address, bytes] : ranges) {
    for (uintptr_t at = address, end = address + bytes; at < end;) {
      const uintptr_t page = at / kLargePage, next = std::min(end, (page + 1) * kLargePage);
      covered[page] += static_cast<int64_t>(next - at);
      at = next;
    }
  }
  uintptr_t first = 0, last = 0;
  const auto move = [&] {
    if (last > first) {
      madvise(reinterpret_cast<void*>(first * kLargePage), (last - first) * kLargePage, kCollapse);
    }
  };
  for (const auto& [page, bytes] : covered) {
    if (2 * bytes < kLargePage) {
      continue;
    }
    if (page != last) {
      move();
      first = page;
    }
    last = page + 1;
  }
  move();
#endif
}

}  // namespace fastattn
