// Threads are fibers of one host thread: they run until they wait or yield.
#pragma once

#include "engine/faults.h"
#include "engine/state.h"

namespace on_host {
namespace {

#if !defined(__x86_64__)
#error "threads are switched by a few instructions of x86-64"
#endif
extern "C" void on_host_switch(void** from, void* to);
asm(R"(
.text
.globl on_host_switch
.hidden on_host_switch
.type on_host_switch, @function
on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size on_host_switch, .-on_host_switch
)");

void leave() {
  Thread* self = current;
  on_host_switch(&self->stack_pointer, scheduler_stack);
}

bool is_ready(const Thread& thread) {
  const Wait& wait = thread.wait;
  switch (wait.kind) {
    case Wait::kNothing:
      return true;
    case Wait::kMbarrier:
      return (static_cast<const Mbarrier*>(wait.object)->complete & 1) != wait.value;
    case Wait::kNamed:
      return static_cast<const NamedBarrier*>(wait.object)->generation != wait.value;
    case Wait::kWarp:
      return static_cast<const Warp*>(wait.object)->generation != wait.value;
    case Wait::kWgmma:
      return static_cast<const WgmmaQueue*>(wait.object)->complete >= wait.value;
    case Wait::kBulk: {
      for (const Store& store : thread.block->grid->stores) {
        const bool is_waited_for = store.thread == &thread && store.number <= wait.value;
        if (is_waited_for && (wait.number ? !store.read : true)) {
          return false;
        }
      }
      return true;
    }
    case Wait::kWord:
      return *static_cast<const int*>(wait.object) != static_cast<int>(wait.value);
    case Wait::kRegisters:
      return thread.block->free_registers >= wait.value ||
             static_cast<const Warp*>(wait.object)->registers == static_cast<uint32_t>(wait.number);
    case Wait::kGrid:
      return wait.value <= first_grid;
  }
  return true;
}

// Checks the thread's last write, see memory.h.
void settle(Thread& thread);
void wait_for(const Wait& wait) {
  settle(*current);
  current->wait = wait;
  if (!is_ready(*current) || chance(16)) {
    do {
      leave();
    } while (!is_ready(*current));
  }
  current->wait = {};
}
// A moment at which others may run.
void yield() {
  if (chance(8)) {
    leave();
  }
}

}  // namespace
}  // namespace on_host
