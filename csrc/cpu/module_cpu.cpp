// Operators of the library _C_cpu itself (namespace fastattn_cpu): the choice of the instruction
// set, large pages and test settings. Each op's binding registers its kernels in the namespace
// fastattn.
#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "cpu/binding.h"
#include "cpu/dispatch.h"

namespace fastattn {
namespace {

// The sets that this processor supports, the fastest last.
std::vector<Isa> usable_isas() {
  std::vector<Isa> usable{Isa::kPortable};
#if defined(__x86_64__)
  // Every processor with these also has f16c and the rest of x86-64-v3.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    usable.push_back(Isa::kAvx2);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    usable.push_back(Isa::kAvx512);
    if (__builtin_cpu_supports("avx512bf16")) {
      usable.push_back(Isa::kAvx512Bf16);
      // Instructions for bf16 products have half the rate of those for fp32 on Intel's processors
      // (Emerald Rapids, one thread, in a loop of these alone: 86 and 176 GFLOP/s), so that
      // converting to fp32 is faster.
      if (__builtin_cpu_is("intel")) {
        std::swap(usable.end()[-1], usable.end()[-2]);
      }
    }
  }
#endif
  return usable;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{usable_isas().back()};
  return isa;
}

int64_t isa_in_use() {
  return static_cast<int64_t>(active_isa());
}

std::vector<int64_t> usable() {
  std::vector<int64_t> numbers;
  for (Isa isa : usable_isas()) {
    numbers.push_back(static_cast<int64_t>(isa));
  }
  return numbers;
}

void choose_isa(int64_t isa) {
  const std::vector<int64_t> isas = usable();
  STD_TORCH_CHECK(std::find(isas.begin(), isas.end(), isa) != isas.end(),
                  "isa must be one of usable_isas(), got ", isa);
  use_isa(static_cast<Isa>(isa));
}

bool poison_memory(bool on) {
  return poisons_memory().exchange(on);
}

void move_ranges(std::vector<int64_t> addresses, std::vector<int64_t> bytes) {
  STD_TORCH_CHECK(addresses.size() == bytes.size(), "as many addresses as sizes");
  std::vector<std::pair<uintptr_t, int64_t>> ranges;
  for (size_t i = 0; i < bytes.size(); ++i) {
    ranges.emplace_back(static_cast<uintptr_t>(addresses[i]), bytes[i]);
  }
  move_to_large_pages(ranges);
}

void keep_error(std::string text) {
  kept_error() = std::move(text);
}

}  // namespace

std::string& kept_error() {
  static thread_local std::string text;
  return text;
}

std::atomic<bool>& poisons_memory() {
  static std::atomic<bool> on{false};
  return on;
}

Isa active_isa() {
  return active().load(std::memory_order_relaxed);
}
void use_isa(Isa isa) {
  active().store(isa, std::memory_order_relaxed);
}

}  // namespace fastattn

// Increased when an operator of the library changes. fastattn/ops/_native.py looks for it in the
// file before the library is loaded, which registers its kernels.
extern "C" __attribute__((used, visibility("default"))) const char fastattn_cpu_interface[] =
    "fastattn_cpu interface 3";

STABLE_TORCH_LIBRARY(fastattn_cpu, m) {
  m.def("usable_isas() -> int[]");
  m.def("isa() -> int");
  m.def("use_isa(int isa) -> ()");
  m.def("move_to_large_pages(int[] addresses, int[] bytes) -> ()");
  m.def("poison_memory(bool on) -> bool");
  m.def("keep_error(str text) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("usable_isas", TORCH_BOX(&fastattn::usable));
  m.impl("isa", TORCH_BOX(&fastattn::isa_in_use));
  m.impl("use_isa", TORCH_BOX(&fastattn::choose_isa));
  m.impl("move_to_large_pages", TORCH_BOX(&fastattn::move_ranges));
  m.impl("poison_memory", TORCH_BOX(&fastattn::poison_memory));
  m.impl("keep_error", TORCH_BOX(&fastattn::keep_error));
}
