// The functions of csrc/sm90/ptx for the host, over the simulator (engine.h). Written from the PTX
// manual, not from csrc: layouts are decoded from descriptors and tensor maps.
#pragma once

#include "cuda_on_host.h"

namespace on_host {

static_assert(sizeof(Map) <= sizeof(CUtensorMap));
inline Map map_of(const CUtensorMap* map) {
  Map result;
  std::memcpy(static_cast<void*>(&result), map, sizeof(result));
  return result;
}

}  // namespace on_host

#define ON_HOST inline __attribute__((always_inline))

namespace fastattn::sm90::ptx {

// -- warp.cuh -------------------------------------------------------------------------------------
ON_HOST uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - on_host::shared);
}
ON_HOST bool elect_one() {
  return threadIdx.x % on_host::kWarpLanes == on_host::elected_lane();
}
template <int kRegisters>
ON_HOST void setmaxnreg_dec() {
  on_host::setmaxnreg(kRegisters, false);
}
template <int kRegisters>
ON_HOST void setmaxnreg_inc() {
  on_host::setmaxnreg(kRegisters, true);
}
ON_HOST void bar_sync(int id, int threads) {
  on_host::bar_sync(id, threads);
}
ON_HOST void bar_arrive(int id, int threads) {
  on_host::bar_arrive(id, threads);
}
ON_HOST void fence_proxy_async() {
  on_host::fence_proxy_async();
}
// Row i of matrix j lies where lane 8 j + i says, and that lane writes it. Lane 4 i + j has
// elements 2 j and 2 j + 1 of row i, or of column i.
ON_HOST void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const on_host::Words* words = on_host::exchange({{r0, r1, r2, r3, address}});
  const unsigned lane = threadIdx.x % on_host::kWarpLanes;
  uint32_t row[4];
  for (unsigned i = 0; i < 4; ++i) {
    row[i] = words[lane % 8 * 4 + i].word[lane / 8];
  }
  on_host::store_shared(address, row, sizeof(row));
}
ON_HOST void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                               uint32_t r3) {
  const on_host::Words* words = on_host::exchange({{r0, r1, r2, r3, address}});
  const unsigned lane = threadIdx.x % on_host::kWarpLanes;
  uint16_t row[8];
  for (unsigned i = 0; i < 8; ++i) {
    row[i] = static_cast<uint16_t>(words[i * 4 + lane % 8 / 2].word[lane / 8] >> 16 * (lane % 2));
  }
  on_host::store_shared(address, row, sizeof(row));
}
// Lane 4 i + j gets elements 2 j and 2 j + 1 of row i of each matrix.
ON_HOST void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  const uint4 row = *reinterpret_cast<const uint4*>(on_host::shared + address);
  const on_host::Words* words = on_host::exchange({{row.x, row.y, row.z, row.w}});
  const unsigned lane = threadIdx.x % on_host::kWarpLanes;
  for (unsigned j = 0; j < 4; ++j) {
    r[j] = words[8 * j + lane / 4].word[lane % 4];
  }
}
ON_HOST void ldmatrix_x4_trans(uint32_t address, uint32_t (&r)[4]) {
  const uint4 row = *reinterpret_cast<const uint4*>(on_host::shared + address);
  const on_host::Words* words = on_host::exchange({{row.x, row.y, row.z, row.w}});
  const unsigned lane = threadIdx.x % on_host::kWarpLanes, column = lane / 4;
  for (unsigned j = 0; j < 4; ++j) {
    uint16_t pair[2];
    for (unsigned i = 0; i < 2; ++i) {
      const uint32_t word = words[8 * j + lane % 4 * 2 + i].word[column / 2];
      pair[i] = static_cast<uint16_t>(word >> 16 * (column % 2));
    }
    std::memcpy(&r[j], pair, sizeof(pair));
  }
}
ON_HOST float ex2(float x) {
  return std::exp2(x);
}
ON_HOST float lg2(float x) {
  return std::log2(x);
}
ON_HOST float rcp(float x) {
  return 1.0f / x;
}
template <class Element>
ON_HOST uint32_t pack(float low, float high) {
  const Element pair[] = {Element(low), Element(high)};
  uint32_t bits;
  std::memcpy(&bits, pair, sizeof(bits));
  return bits;
}

// -- mbarrier.cuh ---------------------------------------------------------------------------------
ON_HOST void mbarrier_init(uint32_t barrier, int arrivals) {
  on_host::mbarrier_init(barrier, arrivals);
}
ON_HOST void fence_mbarrier_init() {
  on_host::fence_mbarrier_init();
}
ON_HOST void mbarrier_arrive(uint32_t barrier) {
  on_host::mbarrier_arrive(barrier);
}
ON_HOST void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  on_host::mbarrier_expect_tx(barrier, bytes);
}
ON_HOST void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  on_host::mbarrier_arrive_expect_tx(barrier, bytes);
}
ON_HOST void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  on_host::mbarrier_wait(barrier, parity);
}

// -- tma.cuh, bulk.cuh ----------------------------------------------------------------------------
constexpr uint64_t kEvictNormal = 0, kEvictFirst = 0, kEvictLast = 0;
ON_HOST void prefetch_tensormap(const CUtensorMap*) {}
ON_HOST void cp_async_bulk_tensor_load(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                       int c0, int c1, int c2, int c3, uint64_t) {
  on_host::tensor_load(to, on_host::map_of(map), barrier, {c0, c1, c2, c3});
}
ON_HOST void cp_async_bulk_tensor_store(const CUtensorMap* map, uint32_t from, int c0, int c1,
                                        int c2, int c3) {
  on_host::tensor_store(on_host::map_of(map), from, {c0, c1, c2, c3});
}
ON_HOST void cp_async_bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  on_host::bulk_load(to, from, bytes, barrier);
}
ON_HOST void cp_async_bulk_store(void* to, uint32_t from, uint32_t bytes) {
  on_host::bulk_store(to, from, bytes, false);
}
ON_HOST void cp_reduce_async_bulk_add(void* to, uint32_t from, uint32_t bytes) {
  on_host::bulk_store(to, from, bytes, true);
}
ON_HOST void cp_async_bulk_commit_group() {
  on_host::bulk_commit_group();
}
template <int kPending>
ON_HOST void cp_async_bulk_wait_group_read() {
  on_host::bulk_wait_group(kPending, true);
}
ON_HOST void cp_async_bulk_wait_group() {
  on_host::bulk_wait_group(0, false);
}

// -- wgmma.cuh ------------------------------------------------------------------------------------
ON_HOST void wgmma_fence() {
  on_host::wgmma_fence();
}
ON_HOST void wgmma_commit_group() {
  on_host::wgmma_commit_group();
}
template <int kPending>
ON_HOST void wgmma_wait_group() {
  on_host::wgmma_wait_group(kPending);
}
template <class T, int kCount>
ON_HOST void pin(T (&registers)[kCount]) {
  on_host::pin(registers, sizeof(registers));
}
ON_HOST void pin(uint64_t&) {}  // no product has it
constexpr int kMajorK = 0, kMajorN = 1;

// Registers of A are taken by reference: they are read when the product is computed.
template <int kN>
struct Wgmma {
  template <class Element, int kMajor, int kMajorOfA = kMajorK>
  static ON_HOST void ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    on_host::wgmma({kN,
                    std::is_same_v<Element, __half>,
                    kMajorOfA == kMajorN,
                    kMajor == kMajorN,
                    accumulate != 0,
                    d,
                    {},
                    a,
                    b});
  }
  template <class Element, int kMajor>
  static ON_HOST void rs(float (&d)[kN / 2], const uint32_t& a0, const uint32_t& a1,
                         const uint32_t& a2, const uint32_t& a3, uint64_t b, int accumulate) {
    on_host::wgmma({kN,
                    std::is_same_v<Element, __half>,
                    false,
                    kMajor == kMajorN,
                    accumulate != 0,
                    d,
                    {&a0, &a1, &a2, &a3},
                    0,
                    b});
  }
};

// -- grid.cuh -------------------------------------------------------------------------------------
ON_HOST int load_acquire(const int* word) {
  return on_host::load_acquire(word);
}
ON_HOST void store_release(int* word, int value) {
  on_host::store_release(word, value);
}
ON_HOST void fence_proxy_async_global() {
  on_host::fence_proxy_async_global();
}
ON_HOST void griddepcontrol_wait() {
  on_host::grid_wait();
}
ON_HOST void griddepcontrol_launch_dependents() {
  on_host::grid_launch_dependents();
}

}  // namespace fastattn::sm90::ptx
