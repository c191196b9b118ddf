// Warp-wide operations: lanes synchronise, exchange values, elect one, change their registers.
#pragma once

#include <cstdint>
#include <utility>

#include "engine/memory.h"

namespace on_host {
namespace {

Warp& own_warp() {
  return current->block->warps[current->index / kWarpLanes];
}
void meet_warp(uint32_t where) {
  Warp& warp = own_warp();
  const uint64_t generation = warp.generation;
  if (++warp.here == kWarpLanes) {
    warp.here = 0;
    ++warp.generation;
    return;
  }
  wait_for({Wait::kWarp, &warp, generation, 0, where});
}

}  // namespace

ON_HOST_ENTRY void syncwarp() {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoSyncwarp, where)) {
    return;
  }
  Warp& warp = own_warp();
  release(*current, warp.pending);
  if (warp.here == kWarpLanes - 1) {
    warp.passed = std::move(warp.pending);
    warp.pending = nullptr;
  }
  meet_warp(where);
  acquire(*current, warp.passed);
}

ON_HOST_ENTRY const Words* exchange(const Words& own) {
  const uint32_t where = ON_HOST_WHERE;
  Warp& warp = own_warp();
  Words* words = warp.words[current->exchanges++ % 2];
  words[current->index % kWarpLanes] = own;
  meet_warp(where);
  return words;
}

unsigned elected_lane() {
  return static_cast<unsigned>(order * 7 + current->index / kWarpLanes * 5) % kWarpLanes;
}

ON_HOST_ENTRY void setmaxnreg(int registers, bool more) {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kMoreRegisters, where)) {
    registers += 8;
  }
  if (registers < 24 || registers > 256 || registers % 8) {
    fail_here(where, text("setmaxnreg takes no %d registers", registers));
  }
  Warp& warp = own_warp();
  meet_warp(where);
  const uint32_t wanted = static_cast<uint32_t>(registers);
  if (warp.registers != wanted) {
    if (more != (wanted > warp.registers)) {
      fail_here(where, text("setmaxnreg from %u to %u registers goes the other way", warp.registers,
                            wanted));
    }
    if (more) {
      wait_for({Wait::kRegisters, &warp, (wanted - warp.registers) * uint64_t{kWarpLanes},
                registers, where});
    }
    if (warp.registers != wanted) {
      current->block->free_registers += (warp.registers - wanted) * kWarpLanes;
      warp.registers = wanted;
    }
  }
  meet_warp(where);
}

}  // namespace on_host
