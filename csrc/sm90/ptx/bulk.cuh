// Bulk copies of contiguous bytes between global and shared memory: no tensor map, sizes and
// addresses are multiples of 16 bytes. Stores are committed and waited for like those of TMA
// (tma.cuh).
#pragma once

#include <cstdint>

namespace fastattn::sm90::ptx {

// PTX ISA:
// docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
__device__ __forceinline__ void cp_async_bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                                   uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Adds floats to those in global memory, each addition atomic.
// PTX ISA: .../#data-movement-and-conversion-instructions-cp-reduce-async-bulk
__device__ __forceinline__ void cp_reduce_async_bulk_add(void* to, uint32_t from, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

}  // namespace fastattn::sm90::ptx
