// Launches and what orders them: a dependent one (griddepcontrol) may begin before the last has
// ended.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include <signal.h>

#include "engine/scheduler.h"

namespace on_host {
namespace {

// Accesses to unmapped memory and divisions by zero are failures like any other.
alignas(16) char signal_stack[64 * 1024];
void on_bad_address(int, siginfo_t* info, void*) {
  if (operates) {
    failure = text("a copy: there is no memory at %p", info->si_addr);
    siglongjmp(before_operation, 1);
  }
  if (!current) {
    signal(SIGSEGV, SIG_DFL);
    signal(SIGFPE, SIG_DFL);
    return;
  }
  failure = name_of(*current) + (info->si_signo == SIGFPE
                                     ? std::string(": divides by zero")
                                     : text(": there is no memory at %p", info->si_addr));
  leave();
}
struct CatchBadAddresses {
  struct sigaction before, before_division;
  stack_t stack_before;
  CatchBadAddresses() {
    stack_t stack = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof(signal_stack);
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = on_bad_address;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
    sigaction(SIGFPE, &action, &before_division);
  }
  ~CatchBadAddresses() {
    sigaction(SIGSEGV, &before, nullptr);
    sigaction(SIGFPE, &before_division, nullptr);
    sigaltstack(&stack_before, nullptr);
  }
};

}  // namespace

void enqueue(Launch launch) {
  if (!launch.dependent) {
    synchronize();
  }
  if (launch.threads > kThreads || launch.shared_bytes > kSharedBytes) {
    std::fprintf(stderr, "too many threads or too much shared memory\n");
    std::abort();
  }
  auto grid = std::make_unique<Grid>();
  grid->launch = std::move(launch);
  grid->number = grid_number++;
  for (unsigned i = 0; i < grid->launch.blocks; ++i) {
    grid->waiting.push_back(i);
  }
  grids.push_back(std::move(grid));
}

void synchronize() {
  const CatchBadAddresses catching;
  while (!grids.empty() && failure.empty()) {
    first_grid = grids.front()->number;
    if (grids.front()->complete()) {
      grids.pop_front();
      continue;
    }
    start_blocks();
    choose_starved();
    const bool ran = run_round();
    for (size_t i = blocks.size(); i-- > 0 && failure.empty();) {
      if (blocks[i]->live == 0) {
        end_block(i);
      }
    }
    if (!ran && failure.empty() && !advance_one() && !blocks.empty()) {
      if (starved.block) {
        starved = {};
        continue;
      }
      bool waiting = true;
      for (auto& block : blocks) {
        waiting = waiting && block->live > 0;
      }
      if (waiting) {
        fail(all_waits());
      }
    }
  }
  if (!failure.empty()) {
    for (auto& block : blocks) {
      segment_owner[block->segment] = nullptr;
      block->loads.clear();
      std::fill(block->load_actors.begin(), block->load_actors.end(), false);
    }
    // Their threads are in the middle of something: they are not used again.
    for (auto& block : blocks) {
      for (auto& thread : block->threads) {
        thread->clock = nullptr;
      }
      spare_blocks.push_back(std::move(block));
    }
    blocks.clear();
    grids.clear();
  }
  grid_number = first_grid = 0;
  starved = {};
  global_shadow.clear();
  released.clear();
  told.clear();
  if (!failure.empty() && !asked) {
    std::fprintf(stderr, "%s\n", failure.c_str());
    std::abort();
  }
}

ON_HOST_ENTRY void grid_wait() {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoGridWait, where)) {
    return;
  }
  wait_for({Wait::kGrid, nullptr, current->block->grid->number, 0, where});
  current->clock->grids = std::max(current->clock->grids, current->block->grid->number);
  ++current->version;
}
void grid_launch_dependents() {
  trigger(*current->block);
  yield();
}

}  // namespace on_host
