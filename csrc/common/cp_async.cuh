// Asynchronous copies of 4 or 16 bytes from global to shared memory (compute capability 8.0), for
// what a thread reads itself: then no barrier is needed, only the wait.
#pragma once

#include <cstdint>

namespace fastattn::cuda {

// Writes zeros instead if `reads` is false; `from` is then not accessed.
// PTX ISA:
// docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
template <int kBytes>
__device__ __forceinline__ void cp_async(void* to, const void* from, bool reads) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(reads ? kBytes : 0)
                 : "memory");
  } else {
    static_assert(kBytes == 4);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(reads ? kBytes : 0)
                 : "memory");
  }
}
// PTX ISA: .../#data-movement-and-conversion-instructions-cp-async-commit-group
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's groups, the last ones, are not complete.
// PTX ISA: .../#data-movement-and-conversion-instructions-cp-async-wait-group
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fastattn::cuda
