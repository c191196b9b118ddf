// What the kernels ask of Hopper, on the host: the functions of csrc/sm90/ptx, done at once instead
// of asynchronously. Shared memory is an array; its addresses count from the array's beginning.
// Written from the PTX manual, not from csrc: layouts are decoded from descriptors and tensor maps.
#pragma once

#include "cuda_on_host.h"

namespace on_host {

alignas(1024) inline char shared[256 * 1024];

struct Mbarrier {
  int expected, missing;
  int64_t bytes;
  uint32_t complete;
};
inline std::map<uint32_t, Mbarrier> mbarriers;

inline void turn_over(Mbarrier& b) {
  if (b.missing == 0 && b.bytes == 0) {
    ++b.complete;
    b.missing = b.expected;
    ++changes;
  }
}
inline void complete_bytes(uint32_t barrier, int64_t bytes) {
  mbarriers.at(barrier).bytes -= bytes;
  turn_over(mbarriers.at(barrier));
}

// A tensor map: four dimensions, columns first, strides in bytes, boxes of 64 columns.
struct Map {
  char* data;
  int64_t sizes[4], strides[4];
  int box_rows;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
inline Map map_of(const CUtensorMap* map) {
  Map result;
  std::memcpy(&result, map, sizeof(result));
  return result;
}

// Every element of a box: where it lies in swizzled shared memory, and its address in the tensor or
// null outside of it.
template <class Visit>
void visit_box(const Map& map, uint32_t shared_address, const int (&at)[4], Visit visit) {
  for (int row = 0; row < map.box_rows; ++row) {
    for (int column = 0; column < 64; ++column) {
      const int64_t place[] = {at[0] + column, at[1] + row, at[2], at[3]};
      char* element = map.data;
      for (int d = 0; d < 4; ++d) {
        const bool inside = 0 <= place[d] && place[d] < map.sizes[d];
        element = inside && element ? element + place[d] * map.strides[d] : nullptr;
      }
      uint32_t address = shared_address + row * 128 + column * 2;
      address ^= (address >> 7 & 7) << 4;
      visit(shared + address, element);
    }
  }
}

template <class Element>
float as_float(const void* from) {
  Element element;
  std::memcpy(&element, from, sizeof(element));
  return static_cast<float>(element);
}

// Element (line, k) of a matrix behind a descriptor with the 128-byte swizzle; `line` is a row of A
// or a column of B.
inline const char* element_of(uint64_t descriptor, bool k_contiguous, int line, int k) {
  const uint32_t start = (descriptor & 0x3FFF) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3FFF) << 4;
  if (descriptor >> 62 != 1) {
    std::abort();
  }
  uint32_t address = start;
  if (k_contiguous) {
    address += line / 8 * stride + line % 8 * 128 + k * 2;
  } else {
    address += line / 64 * leading + k / 8 * stride + k % 8 * 128 + line % 64 * 2;
  }
  address ^= (address >> 7 & 7) << 4;
  return shared + address;
}

}  // namespace on_host

namespace fastattn::sm90::ptx {

// -- warp.cuh -------------------------------------------------------------------------------------
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - on_host::shared);
}
inline bool elect_one() {
  return threadIdx.x % on_host::kWarpLanes == 0;
}
template <int kRegisters>
void setmaxnreg_dec() {}
template <int kRegisters>
void setmaxnreg_inc() {}
inline void bar_sync(int id, int threads) {
  on_host::meet(id, threads);
}
inline void bar_arrive(int id, int threads) {
  on_host::arrive(id, threads);
}
inline void fence_proxy_async() {}
inline void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t registers[] = {r0, r1, r2, r3};
  const unsigned lane = threadIdx.x % on_host::kWarpLanes;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const uint32_t row = on_host::from_lane(address, 8 * matrix + lane / 4);
    std::memcpy(on_host::shared + row + lane % 4 * 4, &registers[matrix], 4);
  }
}
inline float ex2(float x) {
  return std::exp2(x);
}
inline float lg2(float x) {
  return std::log2(x);
}
template <class Element>
uint32_t pack(float low, float high) {
  const Element pair[] = {Element(low), Element(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return bits;
}

// -- mbarrier.cuh ---------------------------------------------------------------------------------
inline void mbarrier_init(uint32_t barrier, int arrivals) {
  on_host::mbarriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t barrier) {
  on_host::Mbarrier& b = on_host::mbarriers.at(barrier);
  --b.missing;
  on_host::turn_over(b);
}
inline void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  on_host::mbarriers.at(barrier).bytes += bytes;
}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  mbarrier_expect_tx(barrier, bytes);
  mbarrier_arrive(barrier);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while ((on_host::mbarriers.at(barrier).complete & 1) == parity) {
    on_host::pause();
  }
}

// -- tma.cuh, bulk.cuh ----------------------------------------------------------------------------
constexpr uint64_t kEvictFirst = 0, kEvictLast = 0;
inline void prefetch_tensormap(const CUtensorMap*) {}
inline void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0,
                                      int c1, int c2, int c3, uint64_t) {
  const on_host::Map tensor = on_host::map_of(map);
  on_host::visit_box(tensor, to, {c0, c1, c2, c3}, [](char* inside, const char* element) {
    element ? std::memcpy(inside, element, 2) : std::memset(inside, 0, 2);
  });
  on_host::complete_bytes(barrier, tensor.box_rows * 128);
}
inline void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int c0, int c1,
                                       int c2, int c3) {
  on_host::visit_box(on_host::map_of(map), from, {c0, c1, c2, c3},
                     [](const char* inside, char* element) {
                       if (element) {
                         std::memcpy(element, inside, 2);
                       }
                     });
}
inline void cp_async_bulk_commit_group() {}
inline void cp_async_bulk_wait_group_read() {}
inline void cp_async_bulk_wait_group() {}
inline void cp_async_bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  std::memcpy(on_host::shared + to, from, bytes);
  on_host::complete_bytes(barrier, bytes);
}

// -- wgmma.cuh ------------------------------------------------------------------------------------
inline void wgmma_fence() {}
inline void wgmma_commit_group() {}
// The four warps leave together: by then all have read their operands.
template <int kPending>
void wgmma_wait_group() {
  constexpr int kGroupMeeting = 2000, kGroupThreads = 128;
  on_host::meet(kGroupMeeting + threadIdx.x / kGroupThreads, kGroupThreads);
}
template <class T, int kCount>
void pin(T (&)[kCount]) {}
constexpr int kMajorK = 0, kMajorN = 1;

template <int kN>
struct Wgmma {
  // a: this thread's two rows of A.
  template <class Element>
  static void multiply(float (&d)[kN / 2], const float (&a)[2][16], uint64_t b, int major,
                       int accumulate) {
    for (int i = 0; i < kN / 2; ++i) {
      const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
      float sum = accumulate ? d[i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        sum += a[i / 2 % 2][k] *
               on_host::as_float<Element>(on_host::element_of(b, major == kMajorK, column, k));
      }
      d[i] = sum;
    }
  }
  template <class Element, int kMajor, int kMajorOfA = kMajorK>
  static void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float rows[2][16];
    for (int i = 0; i < 32; ++i) {
      rows[i / 16][i % 16] = on_host::as_float<Element>(
          on_host::element_of(a, kMajorOfA == kMajorK, row + i / 16 * 8, i % 16));
    }
    multiply<Element>(d, rows, b, kMajor, accumulate);
  }
  template <class Element, int kMajor>
  static void rs(float (&d)[kN / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                 int accumulate) {
    const uint32_t own[] = {a0, a1, a2, a3};
    float rows[2][16];
    for (unsigned i = 0; i < 16; ++i) {
      // Lane t of a row's four holds columns 2 t, 2 t + 1 and, in the last two registers, 8 on.
      const unsigned lane = threadIdx.x % 32 / 4 * 4 + i % 4;
      const uint32_t pair = on_host::from_lane(own[i / 4], lane);
      for (int j = 0; j < 2; ++j) {
        const uint16_t half = static_cast<uint16_t>(pair >> (16 * j));
        rows[i / 4 % 2][i / 8 * 8 + i % 4 * 2 + j] = on_host::as_float<Element>(&half);
      }
    }
    multiply<Element>(d, rows, b, kMajor, accumulate);
  }
};

}  // namespace fastattn::sm90::ptx
