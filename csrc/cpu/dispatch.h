// Which instruction set the CPU kernels use. The files *_kernels_cpu.cpp are compiled once for each
// set; the fastest one that the machine supports is used, and tests may choose another.
#pragma once

namespace fastattn {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

// The largest set that this processor supports.
inline Isa largest_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  // Every processor with these also has f16c and the rest of x86-64-v3.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

// The fastest set. Instructions for bf16 products have half the rate of those for fp32 on Intel's
// processors (Emerald Rapids, one thread, in a loop of these alone: 86 and 176 GFLOP/s), so that
// converting to fp32 is faster.
inline Isa fastest_isa() {
  const Isa largest = largest_isa();
#if defined(__x86_64__)
  if (largest == Isa::kAvx512Bf16 && __builtin_cpu_is("intel")) {
    return Isa::kAvx512;
  }
#endif
  return largest;
}

// The set in use: process-wide.
Isa active_isa();
void use_isa(Isa isa);

}  // namespace fastattn

// For the namespace of an op, where `Kernels` is a struct of function pointers: kernels() returns
// those of the set in use. Each compilation of the kernels defines `kKernels` in the namespace of
// its set (FASTATTN_ISA in simd.h).
#define FASTATTN_DECLARE_KERNELS(Kernels, isa) \
  namespace isa {                              \
  extern const Kernels kKernels;               \
  }

#if defined(__x86_64__)
#define FASTATTN_DISPATCH(Kernels)                                                               \
  FASTATTN_DECLARE_KERNELS(Kernels, portable)                                                    \
  FASTATTN_DECLARE_KERNELS(Kernels, avx2)                                                        \
  FASTATTN_DECLARE_KERNELS(Kernels, avx512)                                                      \
  FASTATTN_DECLARE_KERNELS(Kernels, avx512_bf16)                                                 \
  inline const Kernels& kernels() {                                                              \
    constexpr const Kernels* kSets[] = {&portable::kKernels, &avx2::kKernels, &avx512::kKernels, \
                                        &avx512_bf16::kKernels};                                 \
    return *kSets[static_cast<int>(fastattn::active_isa())];                                     \
  }
#else
#define FASTATTN_DISPATCH(Kernels)            \
  FASTATTN_DECLARE_KERNELS(Kernels, portable) \
  inline const Kernels& kernels() {           \
    return portable::kKernels;                \
  }
#endif
