// TMA: one thread copies a box of a tensor between global and shared memory. A tensor map describes
// the tensor. Elements of the box outside the tensor are read as zero and never written; the
// expected bytes include them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fastattn::sm90::ptx {

// L2 eviction priorities as 64-bit policies, the values that createpolicy gives for the whole
// access.
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// PTX ISA:
// docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// PTX ISA: .../#data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map,
                                                          uint32_t barrier, int c0, int c1, int c2,
                                                          int c3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from,
                                                           int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// PTX ISA: .../#data-movement-and-conversion-instructions-cp-async-bulk-commit-group
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores, except the last kPending groups, have read their shared memory.
// PTX ISA: .../#data-movement-and-conversion-instructions-cp-async-bulk-wait-group
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's stores are complete.
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace fastattn::sm90::ptx
