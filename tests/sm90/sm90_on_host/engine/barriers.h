// Barriers: mbarriers in shared memory, which count arrivals and bytes; named ones (bar.sync).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "engine/memory.h"

namespace on_host {
namespace {

// -- mbarrier -------------------------------------------------------------------------------------
// A thread that waits for a barrier's phases must observe each before the next completes: parities
// do not distinguish it from the one after.
void check_waiters(const Mbarrier& b, const Access& who) {
  const int segment = (who.who - 1) / kActors;
  for (int thread = 0; thread < kThreads && b.complete; ++thread) {
    const uint32_t at = b.seen_at[thread];
    const bool is_past = b.pending && std::max(b.pending->known[segment][thread],
                                               b.pending->read[segment][thread]) >= at;
    if (b.seen[thread] && !(b.seen[thread] == b.complete + 1 && is_past)) {
      fail(name_of(who) +
           text(": phase %u of the mbarrier at byte %u may be complete before warp %d, lane %d "
                "has seen the one before",
                b.complete, b.address, thread / kWarpLanes, thread % kWarpLanes));
      return;
    }
  }
}
void turn_over(Mbarrier& b, const Access& who) {
  if (b.missing == 0 && b.bytes < 0) {
    fail(name_of(who) + text(": %lld bytes more than announced come to the mbarrier at byte %u",
                             -static_cast<long long>(b.bytes), b.address));
  }
  if (b.missing == 0 && b.bytes == 0) {
    check_waiters(b, who);
    ++b.complete;
    b.missing = b.expected;
    make_clock(b.passed);
    if (b.pending) {
      b.passed->join(*b.pending);
    }
    b.pending = nullptr;
  }
}
Mbarrier& mbarrier_at(uint32_t address, uint32_t where) {
  const auto found = current->block->mbarriers.find(address);
  if (found == current->block->mbarriers.end()) {
    fail_here(where, text("there is no mbarrier at byte %u", address));
  }
  if (!knows(*current->clock, found->second.initialised)) {
    fail_here(where, text("the mbarrier at byte %u may not be initialised yet", address));
  }
  return found->second;
}
void arrive_at(Mbarrier& b, uint32_t where) {
  if (b.missing == 0) {
    fail_here(where,
              text("the mbarrier at byte %u has had all its %d arrivals", b.address, b.expected));
  }
  --b.missing;
  release(*current, b.pending);
  turn_over(b, access_of(*current->block, current->index, now(*current), where));
  yield();
}
void expect_at(Mbarrier& b, uint32_t bytes, uint32_t where) {
  constexpr int64_t kMax = (1 << 20) - 1;
  b.bytes += bytes;
  if (b.bytes > kMax) {
    fail_here(where, "more bytes are announced than an mbarrier can count");
  }
  if (commits(Fault::kFewerBytes, where)) {
    b.bytes -= 16;
  }
  if (commits(Fault::kMoreBytes, where)) {
    b.bytes += 16;
  }
}

}  // namespace

ON_HOST_ENTRY void mbarrier_init(uint32_t address, int arrivals) {
  const uint32_t where = ON_HOST_WHERE;
  if (address % 8 || arrivals < 1 ||
      outside(address, 8, *current->block, access_of(*current->block, current->index, 0, where))) {
    fail_here(where, text("there is no mbarrier at byte %u for %d arrivals", address, arrivals));
  }
  if (commits(Fault::kArrivalsExpected, where)) {
    ++arrivals;
  }
  touch_shared(*current, address, 8, true, where);
  Mbarrier& b = current->block->mbarriers[address];
  b = {};
  b.expected = b.missing = arrivals;
  b.address = address;
  b.seen.resize(kThreads);
  b.seen_at.resize(kThreads);
  b.initialised = access_of(*current->block, current->index, now(*current), where);
}
ON_HOST_ENTRY void fence_mbarrier_init() {
  if (commits(Fault::kNoMbarrierInitFence, ON_HOST_WHERE)) {
    return;
  }
  for (auto& [address, b] : current->block->mbarriers) {
    b.shown = b.shown || b.initialised.who == access_of(*current->block, current->index, 0, 0).who;
  }
}
ON_HOST_ENTRY void mbarrier_arrive(uint32_t barrier) {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoArrival, where)) {
    return;
  }
  Mbarrier& b = mbarrier_at(barrier, where);
  arrive_at(b, where);
  if (commits(Fault::kTwoArrivals, where)) {
    arrive_at(b, where);
  }
}
ON_HOST_ENTRY void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  const uint32_t where = ON_HOST_WHERE;
  expect_at(mbarrier_at(barrier, where), bytes, where);
}
ON_HOST_ENTRY void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  const uint32_t where = ON_HOST_WHERE;
  Mbarrier& b = mbarrier_at(barrier, where);
  expect_at(b, bytes, where);
  if (!commits(Fault::kNoArrival, where)) {
    arrive_at(b, where);
  }
}
ON_HOST_ENTRY void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const uint32_t where = ON_HOST_WHERE;
  // What the thread polls afterwards is for another step.
  const auto first = told.lower_bound({current, nullptr});
  told.erase(first, std::find_if(first, told.end(),
                                 [](const auto& entry) { return entry.first.first != current; }));
  if (commits(Fault::kNoMbarrierWait, where)) {
    return;
  }
  if (commits(Fault::kOtherParity, where)) {
    parity ^= 1;
  }
  Mbarrier& b = mbarrier_at(barrier, where);
  wait_for({Wait::kMbarrier, &b, parity, 0, where});
  uint32_t& seen = b.seen[current->index];
  if (seen && b.complete > seen) {
    fail_here(where, text("the mbarrier at byte %u has completed %u phases since this thread's "
                          "last wait: one was missed",
                          barrier, b.complete + 1 - seen));
  }
  seen = b.complete + 1;
  b.seen_at[current->index] = now(*current);
  acquire(*current, b.passed);
}

// -- bar.sync, bar.arrive -------------------------------------------------------------------------
namespace {

NamedBarrier& arrive_named(int id, int threads, uint32_t where) {
  if (id < 0 || id >= kNamedBarriers || threads <= 0 || threads % kWarpLanes) {
    fail_here(where, text("there is no barrier %d of %d threads", id, threads));
  }
  NamedBarrier& b = current->block->named[id];
  if (b.here && b.expected != threads) {
    fail_here(where,
              text("barrier %d is one of %d threads here, of %d at ", id, threads, b.expected) +
                  at_place(b.where));
  }
  b.expected = threads;
  b.where = where;
  b.arrived.resize(kThreads);
  if (b.arrived[current->index]) {
    fail_here(where, text("arrives a second time at barrier %d before it is complete", id));
  }
  b.arrived[current->index] = true;
  release(*current, b.pending);
  if (++b.here == threads) {
    b.here = 0;
    b.arrived.assign(kThreads, false);
    b.passed = std::move(b.pending);
    b.pending = nullptr;
    ++b.generation;
  }
  return b;
}

void sync_named(int id, int threads, uint32_t where) {
  const uint64_t generation = current->block->named[id].generation;
  NamedBarrier& b = arrive_named(id, threads, where);
  if (b.generation == generation) {
    wait_for({Wait::kNamed, &b, generation, id, where});
  }
  acquire(*current, b.passed);
}

}  // namespace

ON_HOST_ENTRY void bar_sync(int id, int threads) {
  const uint32_t where = ON_HOST_WHERE;
  if (!commits(Fault::kNoBarSync, where)) {
    sync_named(id, threads, where);
  }
}
ON_HOST_ENTRY void bar_arrive(int id, int threads) {
  const uint32_t where = ON_HOST_WHERE;
  if (!commits(Fault::kNoBarArrive, where)) {
    arrive_named(id, threads, where);
    yield();
  }
}
ON_HOST_ENTRY int syncthreads_and(int value) {
  const uint32_t where = ON_HOST_WHERE;
  Block& block = *current->block;
  if (!value) {
    block.all_said_yes = false;
  }
  const int threads = block.grid->launch.threads;
  sync_named(0, threads, where);
  const int result = block.all_said_yes;
  sync_named(0, threads, where);
  block.all_said_yes = true;
  return result;
}

}  // namespace on_host
