// The GPU simulator, see engine.h, and its interface to the tests. One translation unit, split into
// headers: the kernels' compiler calls `touch` at every memory access.
//
// Read the headers of engine/ in this order: vector_clocks.h and shadow_memory.h, state.h,
// faults.h, fibers.h, reports.h, memory.h, then barriers.h, warps.h, bulk_copies.h and wgmma.h, and
// last thread_blocks.h, scheduler.h and launches.h.
#include "engine.h"

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "engine/launches.h"
#include "engine/warps.h"

extern "C" {
void on_host_order(uint64_t order) {
  on_host::order = order;
  on_host::random_state = order;
  on_host::asked = true;
}
// One fault, see Fault; 0: none.
void on_host_fault(int kind, uint32_t where) {
  on_host::fault = static_cast<on_host::Fault>(kind);
  on_host::fault_where = where;
}
// The failure since the last call, null for none.
const char* on_host_failure() {
  static std::string last;
  last = std::exchange(on_host::failure, std::string());
  return last.empty() ? nullptr : last.c_str();
}
// Frees the memory that the next launch would use again.
void on_host_release() {
  on_host::release_memory();
}
void on_host_record(int yes) {
  on_host::records_sites = yes != 0;
  on_host::sites.clear();
}
// The places where faults can be injected, found so far: kind, address and count of each.
int on_host_sites(uint32_t* result, int most) {
  const std::map<uint64_t, int> sorted(on_host::sites.begin(), on_host::sites.end());
  int count = 0;
  for (const auto& [site, times] : sorted) {
    if (count < most) {
      result[3 * count] = static_cast<uint32_t>(site >> 32);
      result[3 * count + 1] = static_cast<uint32_t>(site);
      result[3 * count + 2] = static_cast<uint32_t>(times);
    }
    ++count;
  }
  return count;
}

// Called by the compiler's code at every access under -fsanitize=thread; the sanitizer's runtime is
// not linked.
#define ON_HOST_TOUCH(NAME, BYTES, WRITE)                               \
  ON_HOST_ENTRY void NAME(void* address) {                              \
    on_host::touch(address, BYTES, WRITE, __builtin_return_address(0)); \
  }
#define ON_HOST_TOUCHES(BYTES)                    \
  ON_HOST_TOUCH(__tsan_read##BYTES, BYTES, false) \
  ON_HOST_TOUCH(__tsan_write##BYTES, BYTES, true)
#define ON_HOST_UNALIGNED(BYTES)                            \
  ON_HOST_TOUCH(__tsan_unaligned_read##BYTES, BYTES, false) \
  ON_HOST_TOUCH(__tsan_unaligned_write##BYTES, BYTES, true)
ON_HOST_TOUCHES(1)
ON_HOST_TOUCHES(2)
ON_HOST_TOUCHES(4)
ON_HOST_TOUCHES(8)
ON_HOST_TOUCHES(16)
ON_HOST_UNALIGNED(2)
ON_HOST_UNALIGNED(4)
ON_HOST_UNALIGNED(8)
ON_HOST_UNALIGNED(16)
ON_HOST_ENTRY void __tsan_read_range(void* address, unsigned long bytes) {
  on_host::touch(address, static_cast<uint32_t>(bytes), false, __builtin_return_address(0));
}
ON_HOST_ENTRY void __tsan_write_range(void* address, unsigned long bytes) {
  on_host::touch(address, static_cast<uint32_t>(bytes), true, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {
  on_host::instrumented = true;
}
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
}  // extern "C"
