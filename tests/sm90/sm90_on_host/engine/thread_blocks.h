// Thread blocks, from their start with uninitialised memory to their end.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include <sys/mman.h>

#include "engine/memory.h"

namespace on_host {
namespace {

void enter() {
  current->block->grid->launch.body();
  Thread& self = *current;
  settle(self);
  for (const Store& store : self.block->grid->stores) {
    if (store.thread == &self && !store.read) {
      fail(name_of(self) + ": ends before its store issued at " + at_place(store.where) +
           " has read shared memory");
    }
  }
  if (self.completed != self.issued) {
    fail(name_of(self) + ": ends before its wgmma are complete");
  }
  self.done = true;
  --self.block->live;
  leave();
}

void* allocate(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("mmap");
    std::abort();
  }
  return memory;
}

void prepare_thread(Block& block, int index) {
  if (static_cast<int>(block.threads.size()) <= index) {
    block.threads.push_back(std::make_unique<Thread>());
    Thread& made = *block.threads.back();
    made.stack = static_cast<char*>(allocate(kStackBytes));
    made.registers = static_cast<Register*>(allocate(kStackBytes / 4 * sizeof(Register)));
  }
  Thread& thread = *block.threads[index];
  const Thread old = thread;
  thread = {};
  thread.stack = old.stack;
  // An earlier block's stack holds no registers of this one.
  thread.registers = old.registers;
  std::fill(thread.registers + old.lowest, thread.registers + kStackBytes / 4, Register());
  thread.block = &block;
  thread.index = index;
  thread.done = false;
  thread.clock = clocks().take();
  thread.clock->segments = 1u << block.segment;
  thread.clock->grids = first_grid;
  thread.version = 1;
  tick(thread);
  void** top = reinterpret_cast<void**>(thread.stack + kStackBytes) - 1;
  *--top = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) {
    *--top = nullptr;
  }
  thread.stack_pointer = top;
}

void start_block(Grid& grid) {
  std::unique_ptr<Block> made;
  if (spare_blocks.empty()) {
    made = std::make_unique<Block>();
    made->memory = static_cast<char*>(std::aligned_alloc(1024, kArrayBytes));
    made->shadow.resize(kArrayBytes);
  } else {
    made = std::move(spare_blocks.back());
    spare_blocks.pop_back();
  }
  Block& block = *made;
  block.grid = &grid;
  const size_t chosen =
      order < 2 ? 0 : random_below(static_cast<uint32_t>(std::min<size_t>(3, grid.waiting.size())));
  block.number = grid.waiting[chosen];
  grid.waiting.erase(grid.waiting.begin() + static_cast<int64_t>(chosen));
  do {
    next_segment = (next_segment + 1) % kSegments;
  } while (segment_owner[next_segment]);
  block.segment = next_segment;
  segment_owner[block.segment] = &block;
  segment_block[block.segment] = block.number;
  block.triggered = block.in_order = false;
  block.all_said_yes = true;
  block.shadow.clear();
  told.clear();  // its threads have read nothing yet
  // Unwritten memory must not look like zero.
  std::memset(block.memory, 0xFF, kArrayBytes);
  block.mbarriers.clear();
  for (NamedBarrier& b : block.named) {
    b = {};
  }
  for (int group = 0; group < kWarpgroups; ++group) {
    block.products[group] = {};
    block.products[group].base = counters[block.segment][kFirstWgmma + group];
  }
  block.storers = 0;
  block.live = grid.launch.threads;
  block.warps.assign((grid.launch.threads + kWarpLanes - 1) / kWarpLanes, Warp());
  // As many registers as the launch can have given, in units of eight.
  constexpr int kAll = 65536, kUnit = 8, kMax = 255;
  const uint32_t each = std::min(kMax, kAll / grid.launch.threads / kUnit * kUnit);
  for (Warp& warp : block.warps) {
    warp.registers = each;
  }
  block.free_registers = 0;
  for (int i = 0; i < grid.launch.threads; ++i) {
    prepare_thread(block, i);
  }
  ++grid.active;
  blocks.push_back(std::move(made));
}

void trigger(Block& block) {
  if (!block.triggered) {
    block.triggered = true;
    ++block.grid->triggered;
  }
}

void end_block(size_t index) {
  Block& block = *blocks[index];
  if (!block.loads.empty()) {
    fail(text("block %u ends while loads are in flight, one issued at ", block.number) +
         at_place(block.loads[0].where));
  }
  for (int group = 0; group < kWarpgroups; ++group) {
    counters[block.segment][kFirstWgmma + group] += block.products[group].complete;
  }
  if (block.grid->launch.one_by_one) {
    global_shadow.clear();  // the next block has the same static shared memory
  }
  trigger(block);
  --block.grid->active;
  ++block.grid->finished;
  segment_owner[block.segment] = nullptr;
  spare_blocks.push_back(std::move(blocks[index]));
  blocks.erase(blocks.begin() + static_cast<int64_t>(index));
}

void release_memory() {
  for (auto& block : spare_blocks) {
    for (auto& thread : block->threads) {
      munmap(thread->stack, kStackBytes);
      munmap(thread->registers, kStackBytes / 4 * sizeof(Register));
    }
    std::free(block->memory);
  }
  spare_blocks.clear();
  clocks().release();
}

}  // namespace
}  // namespace on_host
