// Schedules warps in some order, starves some of them, and runs asynchronous operations in between.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <setjmp.h>

#include "engine/bulk_copies.h"
#include "engine/thread_blocks.h"
#include "engine/wgmma.h"

namespace on_host {
namespace {

struct Operation {
  Block* block;
  Grid* grid;
  int kind;  // 0: load, 1: store, 2: wgmma
  size_t index;
};
std::vector<Operation> operations() {
  std::vector<Operation> all;
  for (auto& block : blocks) {
    for (size_t i = 0; i < block->loads.size(); ++i) {
      all.push_back({block.get(), nullptr, 0, i});
    }
    for (int group = 0; group < kWarpgroups; ++group) {
      if (product_is_ready(block->products[group])) {
        all.push_back({block.get(), nullptr, 2, static_cast<size_t>(group)});
      }
    }
  }
  for (auto& grid : grids) {
    for (size_t i = 0; i < grid->stores.size(); ++i) {
      all.push_back({nullptr, grid.get(), 1, i});
    }
  }
  return all;
}
void carry_out(const Operation& operation) {
  if (operation.kind == 0) {
    advance_load(*operation.block, operation.index);
  } else if (operation.kind == 2) {
    advance_products(*operation.block, static_cast<int>(operation.index));
  } else {
    std::vector<Store>& stores = operation.grid->stores;
    if (advance_store(stores[operation.index])) {
      std::swap(stores[operation.index], stores.back());
      stores.pop_back();
    }
  }
}
// An operation that touches memory that is not there fails, see launches.h.
sigjmp_buf before_operation;
bool operates = false;
void advance(const Operation& operation) {
  operates = true;
  if (sigsetjmp(before_operation, 0) == 0) {
    carry_out(operation);
  }
  operates = false;
}
// Carries out one of the operations that are possible, or the oldest of each kind in order 0.
bool advance_one() {
  const std::vector<Operation> all = operations();
  if (all.empty()) {
    return false;
  }
  advance(all[order == 0 ? 0 : random_below(static_cast<uint32_t>(all.size()))]);
  return true;
}

void run_thread(Thread& thread) {
  current = &thread;
  threadIdx.x = thread.index;
  blockIdx.x = thread.block->number;
  blockDim.x = thread.block->grid->launch.threads;
  gridDim.x = static_cast<unsigned>(thread.block->grid->launch.blocks);
  shared = thread.block->memory;
  on_host_switch(&scheduler_stack, thread.stack_pointer);
  current = nullptr;
  shared = spare_shared;
}

int most_blocks(const Grid& grid) {
  return grid.launch.one_by_one || order == 0 ? 1 : 2 + static_cast<int>(order % 2);
}

void start_blocks() {
  bool may_begin = true;
  for (auto& grid : grids) {
    const bool first = grid == grids.front();
    if (!first && !(may_begin && grid->launch.dependent)) {
      break;
    }
    while (!grid->waiting.empty() && grid->active < most_blocks(*grid)) {
      start_block(*grid);
    }
    // Only the launch right behind may begin before the first one has ended.
    may_begin = first && order > 0 && grid->triggered == grid->launch.blocks;
  }
}

void choose_starved() {
  constexpr uint32_t kRounds = 24;
  if (!blocks.empty() && chance(kRounds)) {
    const Block& block = *blocks[random_below(static_cast<uint32_t>(blocks.size()))];
    starved.block = &block;
    starved.warp = static_cast<int>(random_below(static_cast<uint32_t>(block.warps.size())));
    starved.lane = random_below(2) ? -1 : static_cast<int>(random_below(kWarpLanes));
  }
}

// Every warp of every block once, in some order. False: nothing happened.
bool run_round() {
  struct Slot {
    Block* block;
    int warp;
  };
  std::vector<Slot> slots;
  bool later_launch_runs = false;
  for (auto& block : blocks) {
    for (int warp = 0; warp < static_cast<int>(block->warps.size()); ++warp) {
      slots.push_back({block.get(), warp});
    }
  }
  if (order > 0) {
    for (size_t i = slots.size(); i > 1; --i) {
      std::swap(slots[i - 1], slots[random_below(static_cast<uint32_t>(i))]);
    }
    // A launch that began early runs ahead; the previous one is delayed arbitrarily.
    std::stable_partition(slots.begin(), slots.end(),
                          [](const Slot& t) { return t.block->grid != grids.front().get(); });
  }
  bool ran = false;
  for (const Slot& slot : slots) {
    if (later_launch_runs && slot.block->grid == grids.front().get()) {
      break;
    }
    const int count = std::min(kWarpLanes, slot.block->grid->launch.threads - slot.warp * 32);
    const int start = order >= 2 ? static_cast<int>(random_below(count)) : 0;
    for (int i = 0; i < count; ++i) {
      const int lane = (start + i) % count;
      Thread& thread = *slot.block->threads[slot.warp * kWarpLanes + lane];
      if (slot.block == starved.block && slot.warp == starved.warp &&
          (starved.lane < 0 || starved.lane == lane)) {
        continue;
      }
      if (!thread.done && is_ready(thread)) {
        run_thread(thread);
        ran = true;
        later_launch_runs = slot.block->grid != grids.front().get();
      }
      if (!failure.empty()) {
        return false;
      }
    }
    if (order == 0) {
      while (failure.empty() && advance_one()) {
        ran = true;
      }
    } else if (chance(1 + order % 5)) {
      ran = advance_one() || ran;  // a thread may wait for it
    }
    if (!failure.empty()) {
      return false;
    }
  }
  return ran;
}

}  // namespace
}  // namespace on_host
