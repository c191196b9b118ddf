// Which instruction set the CPU kernels use. The files *_kernels_cpu.cpp are compiled once for each
// set; the fastest one that the machine supports is used, and tests may choose another.
#pragma once

namespace fastattn {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

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
