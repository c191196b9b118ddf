// wgmma: a warpgroup multiplies a 64 x 16 by a 16 x N tile of 16-bit elements on the tensor cores,
// asynchronously. Each thread holds N / 2 accumulators; A comes from shared memory or registers, B
// from shared memory through a matrix descriptor. Between issue and the matching wait, accumulators
// and A registers must not be accessed: `pin` keeps the compiler from moving accesses there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fastattn::sm90::ptx {

// Orders register writes before the wgmma that reads them.
// PTX ISA:
// docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-multiply-and-accumulate-instructions-wgmma-fence
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the wgmma issued so far as a group.
// PTX ISA: .../#asynchronous-multiply-and-accumulate-instructions-wgmma-commit-group
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `kPending` groups are pending.
// PTX ISA: .../#asynchronous-multiply-and-accumulate-instructions-wgmma-wait-group
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the compiler moves no use of these registers across it.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(registers[i])::"memory");
  }
}
__device__ __forceinline__ void pin(uint64_t& value) {
  asm volatile("" : "+l"(value)::"memory");
}

// How the 16 x N tile of B lies in shared memory: with k or with n contiguous.
constexpr int kMajorK = 0, kMajorN = 1;

// Wgmma<N>::ss and ::rs: D[64, N] = A B or D += A B; A from shared memory or from registers. kMajor
// is B's; A in shared memory has k contiguous unless kMajorOfA says that its rows are.
template <int kN>
struct Wgmma;

// The first R accumulators as PTX operands ...
// clang-format off
#define FASTATTN_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FASTATTN_D16 FASTATTN_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FASTATTN_D24 FASTATTN_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FASTATTN_D32 FASTATTN_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTATTN_D40 FASTATTN_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FASTATTN_D48 FASTATTN_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FASTATTN_D56 FASTATTN_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FASTATTN_D64 FASTATTN_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTATTN_D72 FASTATTN_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FASTATTN_D80 FASTATTN_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FASTATTN_D88 FASTATTN_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FASTATTN_D96 FASTATTN_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FASTATTN_D104 FASTATTN_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FASTATTN_D112 FASTATTN_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FASTATTN_D120 FASTATTN_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FASTATTN_D128 FASTATTN_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
// ... and as outputs of an asm statement.
#define FASTATTN_OUT8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FASTATTN_OUT16(d, i) FASTATTN_OUT8(d, i), FASTATTN_OUT8(d, i + 8)
#define FASTATTN_OUT24(d, i) FASTATTN_OUT16(d, i), FASTATTN_OUT8(d, i + 16)
#define FASTATTN_OUT32(d, i) FASTATTN_OUT24(d, i), FASTATTN_OUT8(d, i + 24)
#define FASTATTN_OUT40(d, i) FASTATTN_OUT32(d, i), FASTATTN_OUT8(d, i + 32)
#define FASTATTN_OUT48(d, i) FASTATTN_OUT40(d, i), FASTATTN_OUT8(d, i + 40)
#define FASTATTN_OUT56(d, i) FASTATTN_OUT48(d, i), FASTATTN_OUT8(d, i + 48)
#define FASTATTN_OUT64(d, i) FASTATTN_OUT56(d, i), FASTATTN_OUT8(d, i + 56)
#define FASTATTN_OUT72(d, i) FASTATTN_OUT64(d, i), FASTATTN_OUT8(d, i + 64)
#define FASTATTN_OUT80(d, i) FASTATTN_OUT72(d, i), FASTATTN_OUT8(d, i + 72)
#define FASTATTN_OUT88(d, i) FASTATTN_OUT80(d, i), FASTATTN_OUT8(d, i + 80)
#define FASTATTN_OUT96(d, i) FASTATTN_OUT88(d, i), FASTATTN_OUT8(d, i + 88)
#define FASTATTN_OUT104(d, i) FASTATTN_OUT96(d, i), FASTATTN_OUT8(d, i + 96)
#define FASTATTN_OUT112(d, i) FASTATTN_OUT104(d, i), FASTATTN_OUT8(d, i + 104)
#define FASTATTN_OUT120(d, i) FASTATTN_OUT112(d, i), FASTATTN_OUT8(d, i + 112)
#define FASTATTN_OUT128(d, i) FASTATTN_OUT120(d, i), FASTATTN_OUT8(d, i + 120)

// One wgmma with R accumulators; ACCUMULATE is the number of the operand that asks for D += A B.
#define FASTATTN_WGMMA(N, TYPE, R, A_AND_B, ACCUMULATE, MODIFIERS)                                \
  "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #ACCUMULATE ", 0;\n"                     \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                 \
  " {" FASTATTN_D##R "}, " A_AND_B ", accumulate, 1, 1, " MODIFIERS ";\n}\n"

// I1 to I6 are the numbers of the operands after the R = N / 2 accumulators and the first input.
// PTX ISA: .../#asynchronous-multiply-and-accumulate-instructions-wgmma-mma-async
#define FASTATTN_WGMMA_SS(N, TYPE, R, I1, I2, I3, I4)                                             \
  asm volatile(FASTATTN_WGMMA(N, TYPE, R, "%" #R ", %" #I1, I2, "%" #I3 ", %" #I4)                \
               : FASTATTN_OUT##R(d, 0)                                                            \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorOfA), "n"(kMajor))
#define FASTATTN_WGMMA_RS(N, TYPE, R, I1, I2, I3, I4, I5, I6)                                     \
  asm volatile(FASTATTN_WGMMA(N, TYPE, R, "{%" #R ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4, I5,   \
                              "%" #I6)                                                            \
               : FASTATTN_OUT##R(d, 0)                                                            \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(kMajor))
#define FASTATTN_WGMMA_SHAPE(N, R, I1, I2, I3, I4, I5, I6)                                        \
  template <>                                                                                     \
  struct Wgmma<N> {                                                                               \
    template <class Element, int kMajor, int kMajorOfA = kMajorK>                                 \
    static __device__ __forceinline__ void ss(float (&d)[R], uint64_t a, uint64_t b,              \
                                              int accumulate) {                                   \
      if constexpr (std::is_same_v<Element, __half>) {                                            \
        FASTATTN_WGMMA_SS(N, "f16", R, I1, I2, I3, I4);                                           \
      } else {                                                                                    \
        FASTATTN_WGMMA_SS(N, "bf16", R, I1, I2, I3, I4);                                          \
      }                                                                                           \
    }                                                                                             \
    template <class Element, int kMajor>                                                          \
    static __device__ __forceinline__ void rs(float (&d)[R], uint32_t a0, uint32_t a1,            \
                                              uint32_t a2, uint32_t a3, uint64_t b,               \
                                              int accumulate) {                                   \
      if constexpr (std::is_same_v<Element, __half>) {                                            \
        FASTATTN_WGMMA_RS(N, "f16", R, I1, I2, I3, I4, I5, I6);                                   \
      } else {                                                                                    \
        FASTATTN_WGMMA_RS(N, "bf16", R, I1, I2, I3, I4, I5, I6);                                  \
      }                                                                                           \
    }                                                                                             \
  };

FASTATTN_WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22)
FASTATTN_WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38)
FASTATTN_WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46)
FASTATTN_WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54)
FASTATTN_WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62)
FASTATTN_WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70)
FASTATTN_WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102)
FASTATTN_WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

#undef FASTATTN_WGMMA_SHAPE
#undef FASTATTN_WGMMA_RS
#undef FASTATTN_WGMMA_SS
#undef FASTATTN_WGMMA

}  // namespace fastattn::sm90::ptx
