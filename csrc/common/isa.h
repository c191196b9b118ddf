// Which instruction set the CPU kernels use. Each set is compiled in a file of its own; the best
// one that the machine runs is taken, and tests may choose another.
#pragma once

namespace fastattn {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };
constexpr int kIsas = 3;

// The best set that this processor runs.
inline Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16")) {
    return Isa::kAvx512;
  }
  // f16c and the other parts of x86-64-v3 come with every processor that has these.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    return Isa::kAvx2;
  }
#endif
  return Isa::kPortable;
}

// The set in use: process-wide.
Isa active_isa();
void use_isa(Isa isa);

}  // namespace fastattn
