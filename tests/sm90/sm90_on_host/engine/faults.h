// Settings of the tests: the order of asynchronous operations, and a fault to inject.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "engine.h"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;

// The caller's place in the program, for messages and faults.
#define ON_HOST_ENTRY __attribute__((noinline))
#define ON_HOST_WHERE place_of(__builtin_return_address(0))

namespace on_host {
namespace {

uint32_t place_of(const void* address) {
  return static_cast<uint32_t>(static_cast<const char*>(address) - &__ehdr_start);
}

// Order 0: asynchronous operations complete at once, one block after the other. 1: as late as is
// legal. From 2 on: at random; the number is the seed of this and all other random choices.
uint64_t order = 0;
uint64_t random_state = 0;
bool instrumented = false;  // ordinary accesses are known

uint32_t random_below(uint32_t count) {
  random_state += 0x9E3779B97F4A7C15u;
  uint64_t x = random_state;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>((x ^ x >> 31) >> 32) % count;
}
bool chance(uint32_t one_in) {
  return order >= 2 && random_below(one_in) == 0;
}

// A fault to inject where `where` executes this operation, to see whether it is detected.
enum class Fault {
  kNone,
  kNoWgmmaFence,
  kNoWgmmaCommit,
  kNoWgmmaWait,
  kWgmmaWaitForOneLess,
  kNoPin,
  kNoProxyFence,
  kNoMbarrierWait,
  kOtherParity,
  kNoArrival,
  kTwoArrivals,
  kFewerBytes,
  kMoreBytes,
  kNoBarSync,
  kNoBarArrive,
  kNoSyncwarp,
  kNoBulkCommit,
  kNoBulkWait,
  kOnlyReadWait,
  kNoMbarrierInitFence,
  kNoGridWait,
  kNoAcquire,
  kNoRelease,
  kMoreRegisters,
  kArrivalsExpected,
  kMutation,  // where: its number
};
Fault fault = Fault::kNone;
uint32_t fault_where = 0;
std::unordered_map<uint64_t, int> sites;  // of a kind << 32 and a place
bool records_sites = false;

bool commits(Fault kind, uint32_t where) {
  if (records_sites) {
    ++sites[uint64_t{static_cast<uint32_t>(kind)} << 32 | where];
  }
  return kind == fault && where == fault_where;
}

}  // namespace

bool mutated(uint32_t number) {
  return commits(Fault::kMutation, number);
}
}  // namespace on_host
