// Synchronisation between thread blocks through global memory, and programmatic dependent launch.
#pragma once

namespace fastattn::sm90::ptx {

// PTX ISA:
// docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
__device__ __forceinline__ int load_acquire(const int* word) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// PTX ISA: .../#data-movement-and-conversion-instructions-st
__device__ __forceinline__ void store_release(int* word, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Orders this thread's view of global memory before its asynchronous copies to global memory.
// Without the state space the compiler adds a fence for the whole device. The other direction needs
// none: a copy that has been waited for is ordered.
// PTX ISA: .../#parallel-synchronization-and-communication-instructions-membar-fence
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Waits until the launches before this one have ended and their writes are visible.
// PTX ISA: .../#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next launch may start once every thread block has called this or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace fastattn::sm90::ptx
