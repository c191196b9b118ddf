// Asynchronous copies between global and shared memory, with tensor maps (TMA) or plain: loads that
// an mbarrier counts, stores and additions in bulk groups. Bytes are transferred in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/barriers.h"

namespace on_host {
namespace {

// Where a row of a box lies in the tensor, and how many of its 128 bytes are inside.
std::pair<char*, int> row_of(const Map& map, const int (&at)[4], int row) {
  const int64_t place[] = {at[0], at[1] + row, at[2], at[3]};
  char* element = map.data + place[0] * map.strides[0];
  for (int d = 1; d < 4; ++d) {
    if (place[d] < 0 || place[d] >= map.sizes[d]) {
      return {nullptr, 0};
    }
    element += place[d] * map.strides[d];
  }
  const int64_t inside = (map.sizes[0] - place[0]) * map.strides[0];
  return {element, static_cast<int>(std::clamp<int64_t>(inside, 0, kBoxRow))};
}
constexpr uint32_t kStep = 1024;  // bytes that come together

void free_load(Block& block, size_t index) {
  Load& load = block.loads[index];
  block.load_actors[load.actor - kFirstLoad] = false;
  std::swap(load, block.loads.back());
  block.loads.pop_back();
}

// Some of the load's bytes come.
void advance_load(Block& block, size_t index) {
  Load& load = block.loads[index];
  const Actor actor = {load.access, load.clock.get(), true};
  const size_t count =
      order == 0 ? load.pieces.size() : 1 + random_below(static_cast<uint32_t>(load.pieces.size()));
  uint32_t done = 0;
  for (size_t i = 0; i < count && failure.empty(); ++i) {
    const uint32_t piece = load.pieces.back();
    load.pieces.pop_back();
    const uint32_t size = std::min(kStep, load.bytes - piece * kStep);
    done += size;
    const uint32_t to = load.to + piece * kStep;
    report(block.shadow.write(to, size, actor), load.access, "overwrites", to, size);
    if (!load.tensor) {
      report(global_shadow.read(load.from + piece * kStep, size, actor), load.access, "reads",
             load.from + piece * kStep, size);
      std::memcpy(block.memory + to, load.from + piece * kStep, size);
      continue;
    }
    for (uint32_t row = piece * kStep / kBoxRow; row < (piece * kStep + size) / kBoxRow; ++row) {
      const auto [element, inside] = row_of(load.map, load.at, static_cast<int>(row));
      char line[kBoxRow] = {};
      if (inside > 0) {
        std::memcpy(line, element, inside);
        report(global_shadow.read(element, inside, actor), load.access, "reads", element, inside);
      }
      for (uint32_t i = 0; i < kBoxRow; i += kBoxPiece) {
        std::memcpy(block.memory + swizzled(load.to + row * kBoxRow + i), line + i, kBoxPiece);
      }
    }
  }
  Mbarrier& b = block.mbarriers.at(load.barrier);
  b.bytes -= done;
  const Access access = load.access;
  if (load.pieces.empty()) {
    make_clock(b.pending);
    b.pending->join(*load.clock);
    free_load(block, index);
  }
  turn_over(b, access);
}

void start_load(Load load) {
  Block& block = *current->block;
  const uint32_t where = load.where;
  const auto b = block.mbarriers.find(load.barrier);
  if (b == block.mbarriers.end() || !b->second.shown) {
    fail_here(where, text("the mbarrier at byte %u has not been shown to asynchronous copies",
                          load.barrier));
  }
  outside(load.to, load.bytes, block, access_of(block, current->index, 0, where));
  int actor = 0;
  while (actor < kLoads && block.load_actors[actor]) {
    ++actor;
  }
  if (actor == kLoads) {
    fail_here(where, "more loads are in flight than are told apart");
  }
  block.load_actors[actor] = true;
  load.actor = kFirstLoad + actor;
  const uint32_t when = ++counters[block.segment][load.actor];
  load.access = access_of(block, load.actor, when, where);
  load.clock = snapshot(*current);
  load.clock->segments |= 1u << block.segment;
  load.clock->known[block.segment][load.actor] = when;
  load.clock->fence(block.segment, load.actor, when);
  for (uint32_t piece = 0; piece * kStep < load.bytes; ++piece) {
    load.pieces.push_back(piece);
  }
  std::reverse(load.pieces.begin(), load.pieces.end());
  if (order >= 2) {
    for (size_t i = load.pieces.size(); i > 1; --i) {
      std::swap(load.pieces[i - 1], load.pieces[random_below(static_cast<uint32_t>(i))]);
    }
  }
  block.loads.push_back(std::move(load));
  yield();
}

void start_store(Store store) {
  Thread& thread = *current;
  Block& block = *thread.block;
  if (thread.storer < 0) {
    if (block.storers == kStorers) {
      fail_here(store.where, "more threads store than are told apart");
    }
    thread.storer = block.storers++;
  }
  store.thread = &thread;
  store.strict = block.in_order;
  store.number = ++thread.stores;
  outside(store.from, store.bytes, block, access_of(block, thread.index, 0, store.where));
  const int reader = kFirstReader + thread.storer, writer = kFirstWriter + thread.storer;
  store.reader = access_of(block, reader, ++counters[block.segment][reader], store.where);
  store.writer = access_of(block, writer, ++counters[block.segment][writer], store.where);
  store.clock = snapshot(thread);
  block.grid->stores.push_back(std::move(store));
  yield();
}

// First the store reads its shared memory, then it writes: false, then true.
bool advance_store(Store& store) {
  if (!store.read) {
    Block& block = *store.thread->block;
    const Actor actor = {store.reader, store.clock.get(), true};
    const auto check = [&](uint32_t from, uint32_t bytes) {
      report(block.shadow.read(from, bytes, actor, instrumented), store.reader, "reads", from,
             bytes);
    };
    store.data.resize(store.bytes);
    if (store.tensor) {
      // Values outside of the tensor may be anything.
      for (uint32_t i = 0; i < store.bytes && failure.empty(); i += kBoxPiece) {
        const int row = static_cast<int>(i / kBoxRow);
        if (row_of(store.map, store.at, row).second > static_cast<int>(i % kBoxRow)) {
          check(swizzled(store.from + i), kBoxPiece);
        }
        std::memcpy(store.data.data() + i, block.memory + swizzled(store.from + i), kBoxPiece);
      }
    } else {
      check(store.from, store.bytes);
      std::memcpy(store.data.data(), block.memory + store.from, store.bytes);
    }
    store.read = true;
    return false;
  }
  const Actor actor = {store.writer, store.clock.get(), true, store.add && !store.strict};
  const auto write = [&](char* to, const char* from, uint32_t bytes) {
    report(global_shadow.write(to, bytes, actor), store.writer, "writes", to, bytes);
    if (!store.add) {
      std::memcpy(to, from, bytes);
      return;
    }
    for (uint32_t i = 0; i < bytes; i += sizeof(float)) {
      float sum, added;
      std::memcpy(&sum, to + i, sizeof(float));
      std::memcpy(&added, from + i, sizeof(float));
      sum += added;
      std::memcpy(to + i, &sum, sizeof(float));
    }
  };
  if (!store.tensor) {
    write(store.to, store.data.data(), store.bytes);
    return true;
  }
  for (uint32_t row = 0; row < store.bytes / kBoxRow; ++row) {
    const auto [element, inside] = row_of(store.map, store.at, static_cast<int>(row));
    if (inside > 0) {
      write(element, store.data.data() + row * kBoxRow, inside);
    }
  }
  return true;
}

}  // namespace

ON_HOST_ENTRY void tensor_load(uint32_t to, const Map& map, uint32_t barrier, const int (&at)[4]) {
  Load load = {};
  load.where = ON_HOST_WHERE;
  load.tensor = true;
  load.map = map;
  std::copy(at, at + 4, load.at);
  load.to = to;
  load.bytes = map.box_rows * kBoxRow;
  load.barrier = barrier;
  if (to % 128) {
    fail_here(load.where, "TMA writes to multiples of 128 bytes");
  }
  start_load(std::move(load));
}
ON_HOST_ENTRY void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  Load load = {};
  load.where = ON_HOST_WHERE;
  load.from = static_cast<const char*>(from);
  load.to = to;
  load.bytes = bytes;
  load.barrier = barrier;
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) {
    fail_here(load.where, "bulk copies take multiples of 16 bytes");
  }
  start_load(std::move(load));
}
ON_HOST_ENTRY void tensor_store(const Map& map, uint32_t from, const int (&at)[4]) {
  Store store = {};
  store.where = ON_HOST_WHERE;
  store.tensor = true;
  store.map = map;
  std::copy(at, at + 4, store.at);
  store.from = from;
  store.bytes = map.box_rows * kBoxRow;
  if (from % 128) {
    fail_here(store.where, "TMA reads from multiples of 128 bytes");
  }
  start_store(std::move(store));
}
ON_HOST_ENTRY void bulk_store(void* to, uint32_t from, uint32_t bytes, bool add) {
  Store store = {};
  store.where = ON_HOST_WHERE;
  store.add = add;
  store.to = static_cast<char*>(to);
  store.from = from;
  store.bytes = bytes;
  if (from % 16 || reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16) {
    fail_here(store.where, "bulk copies take multiples of 16 bytes");
  }
  start_store(std::move(store));
}
ON_HOST_ENTRY void bulk_commit_group() {
  if (commits(Fault::kNoBulkCommit, ON_HOST_WHERE)) {
    return;
  }
  current->store_groups.push_back(current->stores);
}
ON_HOST_ENTRY void bulk_wait_group(int pending, bool read_only) {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoBulkWait, where)) {
    return;
  }
  if (!read_only && commits(Fault::kOnlyReadWait, where)) {
    read_only = true;
  }
  Thread& thread = *current;
  const std::vector<uint32_t>& groups = thread.store_groups;
  const int waited_for = static_cast<int>(groups.size()) - pending;
  const uint32_t last = waited_for > 0 ? groups[waited_for - 1] : 0;
  wait_for({Wait::kBulk, nullptr, last, read_only, where});
  if (thread.storer < 0) {
    return;
  }
  // This thread's stores up to `last` have read, and have written unless `read_only`.
  const int segment = thread.block->segment;
  const int reader = kFirstReader + thread.storer, writer = kFirstWriter + thread.storer;
  const uint32_t later = thread.stores - last;
  uint32_t& reads = thread.clock->known[segment][reader];
  reads = std::max(reads, counters[segment][reader] - later);
  if (!read_only) {
    // PTX ISA, async proxy: a bulk copy that is complete has a proxy fence behind it.
    uint32_t& writes = thread.clock->known[segment][writer];
    writes = std::max(writes, counters[segment][writer] - later);
    thread.clock->fence(segment, writer, writes);
  }
  ++thread.version;
}

}  // namespace on_host
