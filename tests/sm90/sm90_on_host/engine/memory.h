// Accesses of threads to registers, shared and global memory, in their order: clocks go from thread
// to thread with barriers, atomics, acquire and release, fences carry them to asynchronous
// operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "engine/reports.h"
#include "engine/state.h"

namespace on_host {
namespace {

// Shared memory as tensor maps and matrix descriptors with the 128-byte swizzle see it.
constexpr uint32_t kBoxRow = 128, kBoxPiece = 16;
uint32_t swizzled(uint32_t address) {
  return address ^ (address >> 7 & 7) << 4;
}

// -- clocks ---------------------------------------------------------------------------------------
uint32_t& now(const Thread& thread) {
  return counters[thread.block->segment][thread.index];
}
void tick(Thread& thread) {
  settle(thread);
  thread.clock->known[thread.block->segment][thread.index] = ++now(thread);
  ++thread.version;
}
void make_clock(std::shared_ptr<Clock>& clock) {
  if (!clock) {
    clock = clocks().take();
  }
}
void release(Thread& thread, std::shared_ptr<Clock>& to) {
  make_clock(to);
  to->join(*thread.clock);
  tick(thread);
}
void acquire(Thread& thread, const std::shared_ptr<Clock>& from) {
  if (from) {
    thread.clock->join(*from);
    ++thread.version;
  }
}
Access access_of(const Block& block, int actor, uint32_t when, uint32_t where) {
  return {static_cast<uint16_t>(1 + block.segment * kActors + actor),
          static_cast<uint16_t>(block.grid->number), when, where};
}
// Clock of an asynchronous operation: a copy of the thread's, to which the caller may add.
std::shared_ptr<Clock> snapshot(Thread& thread) {
  std::shared_ptr<Clock> clock = clocks().take();
  clock->join(*thread.clock);
  tick(thread);
  return clock;
}

// -- accesses -------------------------------------------------------------------------------------
void touch_shared(Thread& thread, uint32_t at, uint32_t bytes, bool write, uint32_t where) {
  Block& block = *thread.block;
  const Actor actor = {access_of(block, thread.index, now(thread), where), thread.clock.get(),
                       false};
  outside(at, bytes, block, actor.access);
  const Conflict conflict = write ? block.shadow.write(at, bytes, actor)
                                  : block.shadow.read(at, bytes, actor, instrumented);
  if (!conflict.what) {
    return;
  }
  if (write && bytes <= sizeof(thread.doubtful.before)) {
    // Harmless if it changes nothing, which is known afterwards.
    thread.doubtful = {actor.access, at, bytes, conflict, {}};
    std::memcpy(thread.doubtful.before, block.memory + at, bytes);
    return;
  }
  report(conflict, actor.access, write ? "writes" : "reads", at, bytes);
}
// The thread's last write is done.
void settle(Thread& thread) {
  Doubtful& doubt = thread.doubtful;
  if (!doubt.bytes) {
    return;
  }
  Block& block = *thread.block;
  const uint32_t bytes = std::exchange(doubt.bytes, 0);
  if (std::memcmp(doubt.before, block.memory + doubt.at, bytes) == 0) {
    block.shadow.write_same(doubt.at, bytes, {doubt.access, thread.clock.get(), false});
  } else {
    report(doubt.conflict, doubt.access, "writes", doubt.at, bytes);
  }
}
void touch_global(Thread& thread, const void* at, uint32_t bytes, bool write, uint32_t where) {
  const Actor actor = {access_of(*thread.block, thread.index, now(thread), where),
                       thread.clock.get(), false};
  const Conflict conflict =
      write
          ? global_shadow.write(at, bytes, actor)
          : global_shadow.read(at, bytes, actor, thread.clock->grids < thread.block->grid->number);
  report(conflict, actor.access, write ? "writes" : "reads", at, bytes);
}
void touch_registers(Thread& thread, size_t at, uint32_t bytes, bool write, uint32_t where) {
  thread.lowest = std::min(thread.lowest, at / 4);
  for (size_t i = at / 4; i <= (at + bytes - 1) / 4; ++i) {
    Register& word = thread.registers[i];
    const uint32_t product = write ? std::max(word.d_of, word.a_of) : word.d_of;
    if (product > thread.completed) {
      fail_here(where, std::string(write ? "writes" : "reads") +
                           " a register of a wgmma that has not been waited for");
    }
    if (product && !write) {
      fail_here(where,
                "nothing keeps the compiler from reading this accumulator before the wgmma is "
                "complete (pin after the wait)");
    }
    word.touched = thread.fences + 1;
    if (write) {
      word.loose = true;
      word.d_of = word.a_of = 0;
    }
  }
}

// Every ordinary access of instrumented code.
void touch(const void* address, uint32_t bytes, bool write, const void* from) {
  if (!current) {
    return;
  }
  settle(*current);
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t on_stack = at - reinterpret_cast<uintptr_t>(current->stack);
  if (on_stack < kStackBytes) {
    touch_registers(*current, on_stack, bytes, write, place_of(from));
    return;
  }
  const uintptr_t in_shared = at - reinterpret_cast<uintptr_t>(current->block->memory);
  if (in_shared < kArrayBytes) {
    touch_shared(*current, static_cast<uint32_t>(in_shared), bytes, write, place_of(from));
    return;
  }
  touch_global(*current, address, bytes, write, place_of(from));
}

}  // namespace

ON_HOST_ENTRY void store_shared(uint32_t at, const void* from, uint32_t bytes) {
  settle(*current);
  touch_shared(*current, at, bytes, true, ON_HOST_WHERE);
  std::memcpy(current->block->memory + at, from, bytes);
}
namespace {
void touch_atomic(const void* at, uint32_t where) {
  settle(*current);
  const Actor actor = {access_of(*current->block, current->index, now(*current), where),
                       current->clock.get(), false, true};
  report(global_shadow.write(at, sizeof(int), actor), actor.access, "changes", at, sizeof(int));
}
}  // namespace

ON_HOST_ENTRY int atomic_add(int* at, int value) {
  touch_atomic(at, ON_HOST_WHERE);
  yield();
  const int before = *at;
  *at += value;
  return before;
}
ON_HOST_ENTRY uint32_t atomic_or(uint32_t* at, uint32_t bits) {
  touch_atomic(at, ON_HOST_WHERE);
  const uint32_t before = *at;
  *at |= bits;
  return before;
}

ON_HOST_ENTRY int atomic_cas(int* at, int compared, int value) {
  touch_atomic(at, ON_HOST_WHERE);
  yield();
  const int before = *at;
  *at = before == compared ? value : before;
  return before;
}

ON_HOST_ENTRY int load_acquire(const int* word) {
  const uint32_t where = ON_HOST_WHERE;
  const auto key = std::make_pair(static_cast<const Thread*>(current), word);
  const auto before = told.find(key);
  if (before != told.end() && before->second == *word) {
    wait_for({Wait::kWord, word, static_cast<uint64_t>(static_cast<int64_t>(*word)), 0, where});
  }
  yield();
  const int value = *word;
  // A semaphore beyond 1 counts those before this one; 1 may only say that the first one has
  // stored.
  current->block->in_order |= value > 1;
  told[key] = value;
  if (!commits(Fault::kNoAcquire, where)) {
    const auto found = released.find(word);
    if (found != released.end()) {
      // Ordinary accesses are in order from here on, asynchronous ones after the next proxy fence.
      make_clock(current->acquired);
      current->acquired->join(*found->second);
      Clock& clock = *current->clock;
      const Clock& from = *found->second;
      for (int s = 0; s < kSegments; ++s) {
        if (from.segments >> s & 1) {
          take_later(clock.known[s], from.known[s]);
        }
      }
      clock.segments |= from.segments;
      ++current->version;
    }
  }
  return value;
}
ON_HOST_ENTRY void store_release(int* word, int value) {
  const uint32_t where = ON_HOST_WHERE;
  told.clear();
  if (!commits(Fault::kNoRelease, where)) {
    std::shared_ptr<Clock> clock = clocks().take();
    clock->join(*current->clock);
    tick(*current);
    released[word] = clock;
  } else {
    released.erase(word);
  }
  *word = value;
  yield();
}
ON_HOST_ENTRY void fence_proxy_async() {
  if (commits(Fault::kNoProxyFence, ON_HOST_WHERE)) {
    return;
  }
  Thread& thread = *current;
  thread.clock->fence(thread.block->segment, thread.index, now(thread));
  tick(thread);
}
// Nothing here writes global memory itself before its own asynchronous operations see it.
ON_HOST_ENTRY void fence_proxy_async_global() {
  if (commits(Fault::kNoProxyFence, ON_HOST_WHERE)) {
    return;
  }
  Thread& thread = *current;
  if (thread.acquired) {
    thread.clock->join(*thread.acquired);
    thread.acquired = nullptr;
  }
  tick(thread);
}

}  // namespace on_host
