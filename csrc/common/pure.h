// FASTATTN_PURE marks functions of numbers alone, which kernels, host code and tests share.
#pragma once

#ifndef FASTATTN_PURE
#ifdef __CUDACC__
#define FASTATTN_PURE static __host__ __device__ __forceinline__ constexpr
#else
// Internal linkage: files compiled for different instruction sets must not share one copy.
#define FASTATTN_PURE [[maybe_unused]] static inline constexpr
#endif
#endif

// FASTATTN_INLINE marks longer member functions of structs that these files share: inlined, they
// leave no copy compiled for one instruction set that the linker could choose for all.
#define FASTATTN_INLINE __attribute__((always_inline))
