// Barriers in shared memory between producers and consumers, and the position in a ring of slots.
#pragma once

#include <cstdint>

#include "sm90/ptx/mbarrier.cuh"

namespace fastattn::sm90 {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;

// An mbarrier, see ptx/mbarrier.cuh.
struct Barrier {
  uint64_t word;

  __device__ __forceinline__ uint32_t address() const { return ptx::shared_address(&word); }
  __device__ __forceinline__ void init(int arrivals) { ptx::mbarrier_init(address(), arrivals); }
  __device__ __forceinline__ void arrive() { ptx::mbarrier_arrive(address()); }
  __device__ __forceinline__ void arrive_expect_bytes(uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(address(), bytes);
  }
  // Expects further bytes before the arrival.
  __device__ __forceinline__ void expect_bytes(uint32_t bytes) {
    ptx::mbarrier_expect_tx(address(), bytes);
  }
  __device__ __forceinline__ void wait(uint32_t parity) { ptx::mbarrier_wait(address(), parity); }
};

// A slot of a ring: the producer waits for `empty` and fills it, consumers release it after `full`.
struct Slot {
  Barrier full, empty;
};

// The next slot of a ring, and the parity of its `full` in this round. `empty` is waited for with
// the other parity, so that the first round passes at once. One register: the load warp has few.
template <int kSlots>
struct RingPosition {
  static_assert((kSlots & (kSlots - 1)) == 0, "slots are counted modulo 2^32");
  uint32_t passed = 0;

  __device__ __forceinline__ int index() const { return passed % kSlots; }
  __device__ __forceinline__ uint32_t phase() const { return passed / kSlots % 2; }
  __device__ __forceinline__ void advance() { ++passed; }
  __device__ __forceinline__ RingPosition next() const { return {passed + 1}; }
};

}  // namespace fastattn::sm90
