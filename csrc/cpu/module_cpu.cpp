// Operators of the library _C_cpu itself (namespace fastattn_cpu): the choice of the instruction
// set, large pages and test settings. Each op's binding registers its kernels in the namespace
// fastattn.
#include <atomic>

#include "cpu/binding.h"
#include "cpu/dispatch.h"

namespace fastattn {
namespace {

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{fastest_isa()};
  return isa;
}

int64_t isa_in_use() {
  return static_cast<int64_t>(active_isa());
}

int64_t largest() {
  return static_cast<int64_t>(largest_isa());
}

int64_t fastest() {
  return static_cast<int64_t>(fastest_isa());
}

void choose_isa(int64_t isa) {
  STD_TORCH_CHECK(isa >= 0 && isa <= largest(), "isa must be from 0 to ", largest(),
                  " on this processor, got ", isa);
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

}  // namespace

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

STABLE_TORCH_LIBRARY(fastattn_cpu, m) {
  m.def("largest_isa() -> int");
  m.def("fastest_isa() -> int");
  m.def("isa() -> int");
  m.def("use_isa(int isa) -> ()");
  m.def("move_to_large_pages(int[] addresses, int[] bytes) -> ()");
  m.def("poison_memory(bool on) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fastattn_cpu, CompositeExplicitAutograd, m) {
  m.impl("largest_isa", TORCH_BOX(&fastattn::largest));
  m.impl("fastest_isa", TORCH_BOX(&fastattn::fastest));
  m.impl("isa", TORCH_BOX(&fastattn::isa_in_use));
  m.impl("use_isa", TORCH_BOX(&fastattn::choose_isa));
  m.impl("move_to_large_pages", TORCH_BOX(&fastattn::move_ranges));
  m.impl("poison_memory", TORCH_BOX(&fastattn::poison_memory));
}
