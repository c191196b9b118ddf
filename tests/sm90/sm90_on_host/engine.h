// The GPU simulator's interface for the kernels: threads, barriers, asynchronous operations.
// machine.h and cuda_on_host.h call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace on_host {

constexpr int kWarpLanes = 32;
constexpr uint32_t kSharedBytes = 227 * 1024;
// Shared memory of the running thread's block; unused memory between launches.
alignas(1024) inline char spare_shared[kSharedBytes];
inline char* shared = spare_shared;

// -- launches -------------------------------------------------------------------------------------
struct Launch {
  int64_t blocks;
  int threads;
  std::function<void()> body;
  uint32_t shared_bytes = kSharedBytes;
  bool dependent = false;   // may begin while the launch before it still runs
  bool one_by_one = false;  // kernels with static shared memory, of which there is only one
};
void enqueue(Launch launch);
// Runs all that is enqueued.
void synchronize();
inline void launch(int64_t blocks, int threads, std::function<void()> body) {
  enqueue({blocks, threads, std::move(body), kSharedBytes, false, true});
  synchronize();
}

// -- faults ---------------------------------------------------------------------------------------
// Whether a mutation of the source is active, see build.py's Mutation.
bool mutated(uint32_t number);

// -- threads --------------------------------------------------------------------------------------
// Lanes of a warp must execute the same warp-wide operations.
void syncwarp();
void bar_sync(int id, int threads);
void bar_arrive(int id, int threads);
int syncthreads_and(int value);
// Every lane leaves a value, result[lane]. Valid until the next exchange but one.
struct Words {
  uint32_t word[5];
};
const Words* exchange(const Words& own);
unsigned elected_lane();
void setmaxnreg(int registers, bool more);

// -- memory ---------------------------------------------------------------------------------------
// Ordinary accesses that no compiler has instrumented.
void store_shared(uint32_t at, const void* from, uint32_t bytes);
int atomic_add(int* at, int value);
uint32_t atomic_or(uint32_t* at, uint32_t bits);
int atomic_cas(int* at, int compared, int value);
int load_acquire(const int* word);
void store_release(int* word, int value);
// Proxy fences of shared memory, and of global memory acquired through flags.
void fence_proxy_async();
void fence_proxy_async_global();

// -- barriers -------------------------------------------------------------------------------------
void mbarrier_init(uint32_t barrier, int arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(uint32_t barrier);
void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes);
void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes);
void mbarrier_wait(uint32_t barrier, uint32_t parity);

// -- copies ---------------------------------------------------------------------------------------
// Four dimensions, columns first; boxes of rows of 128 bytes. strides: in bytes.
struct Map {
  char* data;
  int64_t sizes[4], strides[4];  // of columns, rows, heads, batch
  int box_rows;
};
void tensor_load(uint32_t to, const Map& map, uint32_t barrier, const int (&at)[4]);
void tensor_store(const Map& map, uint32_t from, const int (&at)[4]);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void bulk_store(void* to, uint32_t from, uint32_t bytes, bool add);
void bulk_commit_group();
void bulk_wait_group(int pending, bool read_only);

// -- wgmma ----------------------------------------------------------------------------------------
struct Product {
  int columns;
  bool half;  // fp16, otherwise bf16
  bool a_rows_contiguous, b_columns_contiguous, accumulate;
  float* d;
  const uint32_t* a[4];  // registers; null: a_descriptor
  uint64_t a_descriptor, b_descriptor;
};
void wgmma(const Product& product);
void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_group(int pending);
void pin(const void* registers, size_t bytes);

// -- grid -----------------------------------------------------------------------------------------
void grid_wait();
void grid_launch_dependents();

}  // namespace on_host
