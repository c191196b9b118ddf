// One small kernel for each hardware primitive that the Hopper kernels are built from, so that a
// failure on a GPU names the primitive. Inputs and expected results:
// fastattn/testing/primitives.py.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "common/cuda_launch.cuh"
#include "sm90/ptx/grid.cuh"
#include "sm90/ptx/wgmma.cuh"
#include "sm90/tile/accumulator.cuh"
#include "sm90/tile/launch.cuh"
#include "sm90/tile/shared_tile.cuh"
#include "sm90/tile/tensor_map.cuh"

namespace fastattn::sm90::primitives {

// a and b: inputs. state: two integers, zero at launch. out: the result.
struct Arguments {
  CUtensorMap map;  // of a, or of out for a store: kTensor in [B, S, H, D] storage
  const void *a, *b;
  int* state;
  void* out;
  int launch_number;  // counts from 0
};

constexpr TensorShape kTensor = {2, 3, 70, 96};
// Where TMA loads and stores a tile of 64 x 128: it exceeds the tensor's rows and columns.
constexpr int kTileBatch = 1, kTileHead = 2, kTileRow = 40, kTileColumns = 128;

// -- wgmma ----------------------------------------------------------------------------------------
enum class OperandA { kSharedK, kSharedM, kRegisters };  // in shared memory: k or m contiguous

// out[64, N] = a[64, K] b[K, N].
template <class Element, int kN, OperandA kA, int kMajorOfB>
struct Product {
  static constexpr int kThreads = kWarpgroup, kBlocks = 1, kK = 128;
  static constexpr bool kTransposesA = kA == OperandA::kSharedM;
  static constexpr int kColumns = (kN + kChunkColumns - 1) / kChunkColumns * kChunkColumns;
  using TileA = std::conditional_t<kTransposesA, SharedTile<Element, kK, kMmaRows>,
                                   SharedTile<Element, kMmaRows, kK>>;
  using TileB = std::conditional_t<kMajorOfB == ptx::kMajorK, SharedTile<Element, kN, kK>,
                                   SharedTile<Element, kK, kColumns>>;
  struct Shared {
    TileA a;
    TileB b;
  };

  // Element (row, column) of the tile is from[row * row_stride + column * column_stride].
  template <class Tile>
  static __device__ void fill(Tile& tile, int columns, const Element* from, int row_stride,
                              int column_stride) {
    constexpr int kPieceColumns = kPieceBytes / sizeof(Element);
    for (int i = threadIdx.x; i < Tile::kRows * columns; i += kThreads) {
      const int row = i / columns, column = i % columns, in_chunk = column % kChunkColumns;
      char* to = reinterpret_cast<char*>(tile.data) + column / kChunkColumns * Tile::kChunkBytes +
                 swizzled_offset(row, in_chunk / kPieceColumns);
      reinterpret_cast<Element*>(to)[in_chunk % kPieceColumns] =
          from[row * row_stride + column * column_stride];
    }
  }

  static __device__ uint64_t a_at(const Shared& shared, int step) {
    return kTransposesA ? descriptor_at(descriptor_n_major(shared.a.address(), TileA::kChunkBytes),
                                        n_major_step(step))
                        : descriptor_at(descriptor_k_major(shared.a.address()),
                                        k_major_step(step, kMmaRows));
  }
  static __device__ uint64_t b_at(const Shared& shared, int step) {
    return kMajorOfB == ptx::kMajorK
               ? descriptor_at(descriptor_k_major(shared.b.address()), k_major_step(step, kN))
               : descriptor_at(descriptor_n_major(shared.b.address(), TileB::kChunkBytes),
                               n_major_step(step));
  }

  static __device__ void run(Shared& shared, const Arguments& args) {
    const AccumulatorThread thread{static_cast<int>(threadIdx.x) / kWarp,
                                   static_cast<int>(threadIdx.x) % kWarp};
    const Element* a = static_cast<const Element*>(args.a);
    const Element* b = static_cast<const Element*>(args.b);
    fill(shared.a, kTransposesA ? kMmaRows : kK, a, kTransposesA ? 1 : kK, kTransposesA ? kK : 1);
    const bool k_major = kMajorOfB == ptx::kMajorK;
    fill(shared.b, k_major ? kK : kN, b, k_major ? 1 : kN, k_major ? kN : 1);
    ptx::fence_proxy_async();
    __syncthreads();

    uint32_t operand[kK / 4];
#pragma unroll
    for (int i = 0; i < kK / 4; ++i) {
      const int row = thread.upper_row() + i % 2 * kRowStep;
      const int column = i / 4 * kMmaK + i / 2 % 2 * 8 + thread.first_column();
      operand[i] = *reinterpret_cast<const uint32_t*>(a + row * kK + column);
    }
    float acc[kN / 2];
    ptx::pin(acc);
    ptx::pin(operand);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kK / kMmaK; ++step) {
      if constexpr (kA == OperandA::kRegisters) {
        ptx::Wgmma<kN>::template rs<Element, kMajorOfB>(
            acc, operand[4 * step], operand[4 * step + 1], operand[4 * step + 2],
            operand[4 * step + 3], b_at(shared, step), step > 0);
      } else {
        constexpr int kMajorOfA = kTransposesA ? ptx::kMajorN : ptx::kMajorK;
        ptx::Wgmma<kN>::template ss<Element, kMajorOfB, kMajorOfA>(acc, a_at(shared, step),
                                                                   b_at(shared, step), step > 0);
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::pin(acc);
    ptx::pin(operand);
    const int row = thread.upper_row();
    store_global(static_cast<float*>(args.out) + row * kN, kN, kMmaRows - row, kN, acc, thread);
  }
};

// -- matrices of 8 x 8 ----------------------------------------------------------------------------
// a: four registers of each lane. out: four matrices of eight rows of 16 bytes.
template <bool kTransposes>
struct StoreMatrix {
  static constexpr int kThreads = kWarp, kBlocks = 1;
  struct Shared {
    uint4 rows[kWarp];
  };
  static __device__ void run(Shared& shared, const Arguments& args) {
    const int lane = threadIdx.x;
    const uint4 r = static_cast<const uint4*>(args.a)[lane];
    const uint32_t to = ptx::shared_address(&shared.rows[lane]);
    if constexpr (kTransposes) {
      ptx::stmatrix_x4_trans(to, r.x, r.y, r.z, r.w);
    } else {
      ptx::stmatrix_x4(to, r.x, r.y, r.z, r.w);
    }
    __syncwarp();
    static_cast<uint4*>(args.out)[lane] = shared.rows[lane];
  }
};

// The inverse of StoreMatrix.
template <bool kTransposes>
struct LoadMatrix {
  static constexpr int kThreads = kWarp, kBlocks = 1;
  using Shared = typename StoreMatrix<kTransposes>::Shared;
  static __device__ void run(Shared& shared, const Arguments& args) {
    const int lane = threadIdx.x;
    shared.rows[lane] = static_cast<const uint4*>(args.a)[lane];
    __syncwarp();
    uint32_t r[4];
    const uint32_t from = ptx::shared_address(&shared.rows[lane]);
    if constexpr (kTransposes) {
      ptx::ldmatrix_x4_trans(from, r);
    } else {
      ptx::ldmatrix_x4(from, r);
    }
    static_cast<uint4*>(args.out)[lane] = {r[0], r[1], r[2], r[3]};
  }
};

// -- copies ---------------------------------------------------------------------------------------
struct TileStorage {
  SharedTile<__nv_bfloat16, kMmaRows, kTileColumns> tile;
  Barrier full;
};

// out[64, 128]: the box, 0 where it exceeds the tensor a.
struct TensorLoad {
  static constexpr int kThreads = kWarpgroup, kBlocks = 1;
  using Shared = TileStorage;
  static __device__ void run(Shared& shared, const Arguments& args) {
    if (threadIdx.x == 0) {
      shared.full.init(1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.tile.load(&args.map, shared.full, kTileRow, kTileHead, kTileBatch, ptx::kEvictFirst);
    }
    shared.full.wait(0);
    constexpr int kPieces = kRowBytes / kPieceBytes,
                  kRowPieces = kTileColumns / kChunkColumns * kPieces;
    for (int i = threadIdx.x; i < kMmaRows * kRowPieces; i += kThreads) {
      const int row = i / kRowPieces, piece = i % kRowPieces;
      const char* from = reinterpret_cast<const char*>(shared.tile.data) +
                         piece / kPieces * shared.tile.kChunkBytes +
                         swizzled_offset(row, piece % kPieces);
      static_cast<uint4*>(args.out)[i] = *reinterpret_cast<const uint4*>(from);
    }
  }
};

// The box of the tensor out = a[64, 128]; nothing else is written.
struct TensorStore {
  static constexpr int kThreads = kWarpgroup, kBlocks = 1;
  using Shared = TileStorage;
  static __device__ void run(Shared& shared, const Arguments& args) {
    using Fill = Product<__nv_bfloat16, kChunkColumns, OperandA::kSharedK, ptx::kMajorK>;
    Fill::fill(shared.tile, kTileColumns, static_cast<const __nv_bfloat16*>(args.a), kTileColumns,
               1);
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.tile.store(&args.map, kTensor.columns, kTileRow, kTileHead, kTileBatch);
      ptx::cp_async_bulk_wait_group();
    }
  }
};

// out[2, 64]: a stored, and a added to b twice. out begins as (anything, b).
struct BulkCopies {
  static constexpr int kThreads = kWarp, kBlocks = 1, kCount = 64;
  struct Shared {
    BulkBuffer<float, kCount> values;
    Barrier full;
  };
  static __device__ void run(Shared& shared, const Arguments& args) {
    if (threadIdx.x == 0) {
      shared.full.init(1);
      ptx::fence_mbarrier_init();
      shared.full.arrive_expect_bytes(shared.values.kBytes);
      shared.values.load(static_cast<const float*>(args.a), shared.full);
      shared.full.wait(0);
      float* out = static_cast<float*>(args.out);
      const uint32_t from = shared.values.address();
      ptx::cp_async_bulk_store(out, from, shared.values.kBytes);
      ptx::cp_reduce_async_bulk_add(out + kCount, from, shared.values.kBytes);
      ptx::cp_reduce_async_bulk_add(out + kCount, from, shared.values.kBytes);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group();
    }
  }
};

// -- barriers -------------------------------------------------------------------------------------
// A warp passes the squares of 0 to kRounds - 1 to another through a ring of two slots. out: their
// sum, of each lane.
struct MbarrierRing {
  static constexpr int kThreads = 2 * kWarp, kBlocks = 1, kRounds = 100;
  struct Shared {
    Slot slots[2];
    int values[2];
  };
  static __device__ void run(Shared& shared, const Arguments& args) {
    const int lane = threadIdx.x % kWarp;
    if (threadIdx.x == 0) {
      for (Slot& slot : shared.slots) {
        slot.full.init(1);
        slot.empty.init(1);
      }
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    int sum = 0;
#pragma unroll 1
    for (RingPosition<2> at; at.passed < kRounds; at.advance()) {
      Slot& slot = shared.slots[at.index()];
      if (threadIdx.x < kWarp) {
        slot.empty.wait(at.phase() ^ 1);
        __syncwarp();  // a lane that is late would miss the phase
        if (lane == 0) {
          shared.values[at.index()] = at.passed * at.passed;
          slot.full.arrive();
        }
      } else {
        slot.full.wait(at.phase());
        sum += shared.values[at.index()];
        __syncwarp();
        if (lane == 0) {
          slot.empty.arrive();
        }
      }
    }
    if (threadIdx.x >= kWarp) {
      static_cast<int*>(args.out)[lane] = sum;
    }
  }
};

// Ping-pong order of two warpgroups. out: the warpgroup of each turn.
struct NamedBarriers {
  static constexpr int kThreads = 2 * kWarpgroup, kBlocks = 1, kRounds = 16;
  struct Shared {
    int turns;
  };
  static __device__ void run(Shared& shared, const Arguments& args) {
    const int group = threadIdx.x / kWarpgroup;
    if (threadIdx.x == 0) {
      shared.turns = 0;
    }
    __syncthreads();
    if (group == 1) {
      ptx::bar_arrive(1, kThreads);  // warpgroup 0 begins
    }
#pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      ptx::bar_sync(1 + group, kThreads);
      if (threadIdx.x % kWarpgroup == 0) {
        static_cast<int*>(args.out)[shared.turns++] = group;
      }
      if (group == 0 || round + 1 < kRounds) {
        ptx::bar_arrive(1 + (group ^ 1), kThreads);
      }
    }
  }
};

// out: the warpgroups that got their registers. kGroups more request them than release them.
template <int kGroups, int kProducer, int kConsumer>
struct Registers {
  static constexpr int kThreads = (kGroups + 1) * kWarpgroup, kBlocks = 1;
  struct Shared {};
  static __device__ void run(Shared&, const Arguments& args) {
    const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
    if (group == 0) {
      ptx::setmaxnreg_dec<kProducer>();
    } else {
      ptx::setmaxnreg_inc<kConsumer>();
    }
    if (threadIdx.x % kWarpgroup == 0) {
      static_cast<int*>(args.out)[group] = 1;
    }
  }
};

// -- grids ----------------------------------------------------------------------------------------
// Thread blocks add a[ticket] to out in the order of their tickets, of which rounding tells.
struct Semaphore {
  static constexpr int kThreads = kWarp, kBlocks = 48, kCount = 4;
  struct Shared {
    BulkBuffer<float, kCount> values;
  };
  static __device__ void run(Shared& shared, const Arguments& args) {
    if (threadIdx.x != 0) {
      return;
    }
    int* tickets = args.state;
    int* semaphore = args.state + 1;
    const int ticket = atomicAdd(tickets, 1);
    for (int i = 0; i < kCount; ++i) {
      shared.values.data[i] = static_cast<const float*>(args.a)[ticket * kCount + i];
    }
    ptx::fence_proxy_async();
    while (ptx::load_acquire(semaphore) != ticket) {
    }
    ptx::fence_proxy_async_global();
    if (ticket == 0) {
      ptx::cp_async_bulk_store(args.out, shared.values.address(), shared.values.kBytes);
    } else {
      ptx::cp_reduce_async_bulk_add(args.out, shared.values.address(), shared.values.kBytes);
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group();
    ptx::store_release(semaphore, ticket + 1);
  }
};

// Each launch may start before the previous one has ended. out[kLaunches + 1, count] begins with 0:
// row i + 1 is computed from row i, in reverse order.
struct DependentLaunch {
  static constexpr int kThreads = kWarp, kBlocks = 8, kLaunches = 3;
  struct Shared {};
  static __device__ void run(Shared&, const Arguments& args) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    // Stores late, so that a launch that does not wait reads what is not there yet.
    constexpr int64_t kDelay = 100'000;  // clock cycles
    for (const int64_t start = clock64(); clock64() - start < kDelay;) {
    }
    constexpr int kCount = kBlocks * kThreads;
    const int at = blockIdx.x * kThreads + threadIdx.x;
    int* from = static_cast<int*>(args.out) + args.launch_number * kCount;
    from[kCount + at] = 2 * from[kCount - 1 - at] + at;
  }
};

// -- arithmetic -----------------------------------------------------------------------------------
// out[3, n]: 2^a, log2(b) and 1 / b.
struct Exponentials {
  static constexpr int kThreads = kWarpgroup, kBlocks = 1;
  struct Shared {};
  static __device__ void run(Shared&, const Arguments& args) {
    float* out = static_cast<float*>(args.out);
    out[threadIdx.x] = ptx::ex2(static_cast<const float*>(args.a)[threadIdx.x]);
    const float b = static_cast<const float*>(args.b)[threadIdx.x];
    out[kThreads + threadIdx.x] = ptx::lg2(b);
    out[2 * kThreads + threadIdx.x] = ptx::rcp(b);
  }
};

// -- launches -------------------------------------------------------------------------------------
template <class Primitive>
__global__ void __launch_bounds__(Primitive::kThreads, 1)
    primitive_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(sm90::kTileAlignment) char shared_memory[];
  Primitive::run(*reinterpret_cast<typename Primitive::Shared*>(shared_memory), args);
}

template <class Primitive>
const char* launch_primitive(Arguments args, cudaStream_t stream) {
  constexpr bool kStores = std::is_same_v<Primitive, TensorStore>;
  if (kStores || std::is_same_v<Primitive, TensorLoad>) {
    const TensorView view = {kStores ? args.out : const_cast<void*>(args.a),
                             int64_t{kTensor.rows} * kTensor.heads * kTensor.columns,
                             kTensor.columns, int64_t{kTensor.heads} * kTensor.columns};
    if (!encode_tensor_map(&args.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, view, kTensor, kMmaRows)) {
      return "the driver refused a tensor map";
    }
  }
  int index = 0;
  cuda::Device device;
  static std::atomic<uint64_t> allowed{0};
  const auto kernel = primitive_kernel<Primitive>;
  constexpr int kBytes = sizeof(typename Primitive::Shared);
  cudaError_t error = cuda::current_device(&index, &device);
  error = error ? error : cuda::allow_shared_memory(kernel, kBytes, index, allowed);
  constexpr int kLaunches =
      std::is_same_v<Primitive, DependentLaunch> ? DependentLaunch::kLaunches : 1;
  for (args.launch_number = 0; !error && args.launch_number < kLaunches; ++args.launch_number) {
    error = launch(kernel, Primitive::kBlocks, Primitive::kThreads, kBytes, stream, args,
                   args.launch_number > 0);
  }
  return error ? cudaGetErrorString(error) : nullptr;
}

struct Entry {
  const char* name;
  const char* (*launch)(Arguments args, cudaStream_t stream);
};

// Every shape and operand order of wgmma that the kernels use, in both types.
#define FASTATTN_PRODUCT(A, B, N)                                                 \
  {"wgmma " #A " " #B " n" #N " bf16",                                            \
   &launch_primitive<Product<__nv_bfloat16, N, OperandA::k##A, ptx::kMajor##B>>}, \
  {                                                                               \
    "wgmma " #A " " #B " n" #N " fp16",                                           \
        &launch_primitive<Product<__half, N, OperandA::k##A, ptx::kMajor##B>>     \
  }

constexpr Entry kPrimitives[] = {
    {"mbarrier", &launch_primitive<MbarrierRing>},
    {"named barriers", &launch_primitive<NamedBarriers>},
    {"setmaxnreg 40 232", &launch_primitive<Registers<2, 40, 232>>},
    {"setmaxnreg 24 240", &launch_primitive<Registers<2, 24, 240>>},
    {"setmaxnreg 32 160", &launch_primitive<Registers<3, 32, 160>>},
    {"TMA load", &launch_primitive<TensorLoad>},
    {"TMA store", &launch_primitive<TensorStore>},
    {"bulk copies", &launch_primitive<BulkCopies>},
    {"stmatrix", &launch_primitive<StoreMatrix<false>>},
    {"stmatrix trans", &launch_primitive<StoreMatrix<true>>},
    {"ldmatrix", &launch_primitive<LoadMatrix<false>>},
    {"ldmatrix trans", &launch_primitive<LoadMatrix<true>>},
    {"ex2 lg2 rcp", &launch_primitive<Exponentials>},
    {"semaphore", &launch_primitive<Semaphore>},
    {"dependent launch", &launch_primitive<DependentLaunch>},
    FASTATTN_PRODUCT(SharedK, K, 32),
    FASTATTN_PRODUCT(SharedK, K, 64),
    FASTATTN_PRODUCT(SharedK, K, 80),
    FASTATTN_PRODUCT(SharedK, K, 112),
    FASTATTN_PRODUCT(SharedK, K, 128),
    FASTATTN_PRODUCT(SharedK, K, 256),
    FASTATTN_PRODUCT(SharedK, N, 64),
    FASTATTN_PRODUCT(SharedK, N, 128),
    FASTATTN_PRODUCT(SharedK, N, 256),
    FASTATTN_PRODUCT(SharedM, K, 64),
    FASTATTN_PRODUCT(SharedM, K, 80),
    FASTATTN_PRODUCT(SharedM, K, 96),
    FASTATTN_PRODUCT(SharedM, N, 64),
    FASTATTN_PRODUCT(SharedM, N, 128),
    FASTATTN_PRODUCT(SharedM, N, 256),
    FASTATTN_PRODUCT(Registers, N, 64),
    FASTATTN_PRODUCT(Registers, N, 96),
    FASTATTN_PRODUCT(Registers, N, 128),
    FASTATTN_PRODUCT(Registers, N, 192),
    FASTATTN_PRODUCT(Registers, N, 256),
};

#undef FASTATTN_PRODUCT

// The primitive of this name, or null.
inline const Entry* find_primitive(const char* name) {
  for (const Entry& entry : kPrimitives) {
    if (std::strcmp(entry.name, name) == 0) {
      return &entry;
    }
  }
  return nullptr;
}

}  // namespace fastattn::sm90::primitives
