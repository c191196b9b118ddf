// The stand-in for a GPU, see engine.h.
#include "engine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/mman.h>

#include "order.h"

// The caller's place in the program, for messages and faults.
#define ON_HOST_ENTRY __attribute__((noinline))
#define ON_HOST_WHERE place_of(__builtin_return_address(0))

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start;

namespace on_host {
namespace {

constexpr size_t kStackBytes = 1 << 16;
constexpr int kNamedBarriers = 16, kWarpgroup = 128, kWarpsPerGroup = kWarpgroup / kWarpLanes;
constexpr uint32_t kArrayBytes = 256 * 1024;

uint32_t place_of(const void* address) {
  return static_cast<uint32_t>(static_cast<const char*>(address) - &__ehdr_start);
}

// -- what is asked for
// ----------------------------------------------------------------------------- Order 0:
// asynchronous operations happen at once, one block after the other. 1: as late as is legal. From 2
// on: whenever chance has it, with chance's other decisions drawn from the number.
uint64_t order = 0;
uint64_t random_state = 0;
bool instrumented = false;

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

// A fault to commit wherever `where` asks for this operation, to see whether it is noticed.
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
};
Fault fault = Fault::kNone;
uint32_t fault_where = 0;
std::map<std::pair<int, uint32_t>, int> sites;
bool records_sites = false;

bool commits(Fault kind, uint32_t where) {
  if (records_sites) {
    ++sites[{static_cast<int>(kind), where}];
  }
  return kind == fault && where == fault_where;
}

// -- state
// -----------------------------------------------------------------------------------------
struct Register {
  uint32_t touched = 0;         // 1 + wgmma fences of the thread before the last ordinary access
  bool loose = false;           // written, and nothing keeps the compiler from doing it later
  uint32_t d_of = 0, a_of = 0;  // the last product it is accumulator or operand of, 1-based
};

struct Wait {
  enum Kind { kNothing, kMbarrier, kNamed, kWarp, kWgmma, kBulk, kWord, kRegisters, kGrid };
  Kind kind = kNothing;
  const void* object = nullptr;
  uint64_t value = 0;
  int number = 0;
  uint32_t where = 0;
};

struct Block;
struct Grid;

// A write in conflict with another access.
struct Doubtful {
  Access access;
  uint32_t at = 0, bytes = 0;
  Conflict conflict;
  char before[kCellBytes];
};

struct Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Register* registers = nullptr;
  size_t lowest = kStackBytes / 4;  // register that was touched
  Block* block = nullptr;
  int index = 0;
  bool done = true;
  Wait wait;
  std::shared_ptr<Clock> clock;
  std::shared_ptr<Clock> acquired;  // from other blocks, before the next proxy fence
  uint32_t version = 0;             // of the clock
  // wgmma
  uint32_t issued = 0, completed = 0, fences = 0;
  std::vector<uint32_t> commits;
  // stores
  int storer = -1;
  uint32_t stores = 0, stores_committed = 0;
  int exchanges = 0;
  Doubtful doubtful;
};

struct Mbarrier {
  int expected = 0, missing = 0;
  int64_t bytes = 0;
  uint32_t complete = 0, address = 0;
  Access initialised;
  bool shown = false;  // to asynchronous operations
  std::shared_ptr<Clock> pending, passed;
  // Of each thread that has waited: 1 + the phases that were complete, and when that was.
  std::vector<uint32_t> seen, seen_at;
};
struct NamedBarrier {
  int expected = 0, here = 0;
  uint64_t generation = 0;
  uint32_t where = 0;
  std::vector<bool> arrived;
  std::shared_ptr<Clock> pending, passed;
};
struct Warp {
  int here = 0;
  uint64_t generation = 0;
  std::shared_ptr<Clock> pending, passed;
  Words words[2][kWarpLanes];
  uint32_t registers = 0;
  bool registers_given = false;
};

struct Wgmma {
  Product form;
  uint32_t where = 0;
  int issued = 0, warp_issued[kWarpsPerGroup] = {};
  float* d[kWarpgroup];
  const uint32_t* a[kWarpgroup][4];
  std::shared_ptr<Clock> clocks[kWarpsPerGroup];
};
struct WgmmaQueue {
  std::deque<Wgmma> waiting;
  uint32_t complete = 0, base = 0;
  // Of every complete product: up to which times threads had read before they issued it.
  struct Reads {
    uint32_t times[kActors];
  };
  std::vector<std::shared_ptr<Reads>> reads;
  uint32_t enqueued() const { return complete + static_cast<uint32_t>(waiting.size()); }
  // The clock of the products a warp issued last, and the versions of its threads' that are in it.
  std::shared_ptr<Clock> clocks[kWarpsPerGroup];
  uint32_t versions[kWarpgroup] = {};
};

// Rows, or the bytes, of a load that have not come yet.
struct Load {
  bool tensor;
  Map map;
  int at[4];
  const char* from;
  uint32_t to, bytes, barrier, where;
  std::vector<uint32_t> pieces;
  std::shared_ptr<Clock> clock;
  int actor;
  Access access;
};
struct Store {
  bool tensor, add, strict, committed = false, read = false;
  Map map;
  int at[4];
  char* to;
  uint32_t from, bytes, where;
  Thread* thread;
  std::shared_ptr<Clock> clock;
  Access reader, writer;
  std::vector<char> data;
};

struct Block {
  Grid* grid = nullptr;
  unsigned number = 0;
  int segment = 0, live = 0;
  bool triggered = false, acquires = false, all_said_yes = true;
  char* memory = nullptr;
  Shadow shadow{true};
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  NamedBarrier named[kNamedBarriers];
  std::map<uint32_t, Mbarrier> mbarriers;
  WgmmaQueue products[kWarpgroups];
  std::vector<Load> loads;
  std::vector<bool> load_actors = std::vector<bool>(kLoads);
  int storers = 0;
  uint32_t free_registers = 0;
};

struct Grid {
  Launch launch;
  uint32_t number = 0;
  std::vector<unsigned> waiting;  // blocks
  int active = 0;
  int64_t triggered = 0, finished = 0;
  std::vector<Store> stores;
  bool complete() const { return finished == launch.blocks && stores.empty(); }
};

std::deque<std::unique_ptr<Grid>> grids;
std::vector<std::unique_ptr<Block>> blocks, spare_blocks;
GlobalShadow global_shadow;
uint32_t counters[kSegments][kActors];
Block* segment_owner[kSegments];
unsigned segment_block[kSegments];
int next_segment = 0;
uint32_t grid_number = 0, first_grid = 0;
// A warp, or one lane of it, that only runs when nothing else can.
struct Starved {
  const Block* block = nullptr;
  int warp = 0, lane = -1;
} starved;
Thread* current = nullptr;
void* scheduler_stack = nullptr;
std::string failure;
bool asked = false;  // somebody will ask for the failure
// What was released with words of global memory.
std::map<const int*, std::shared_ptr<Clock>> released;
// A thread that asks again what it has just been told waits for another answer.
std::map<std::pair<const Thread*, const int*>, int> told;

// -- fibers
// ----------------------------------------------------------------------------------------
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

// -- messages
// --------------------------------------------------------------------------------------
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...) {
  char line[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  return line;
}
std::string at_place(uint32_t where) {
  return text("@0x%x", where);
}
std::string name_of(const Thread& thread) {
  return text("block %u, warp %d, lane %d", thread.block->number, thread.index / kWarpLanes,
              thread.index % kWarpLanes);
}
std::string name_of(const Access& access) {
  if (access.who == 0) {
    return "nobody";
  }
  const int segment = (access.who - 1) / kActors, actor = (access.who - 1) % kActors;
  std::string result = text("block %u, ", segment_block[segment]);
  if (actor < kFirstWgmma) {
    result += text("warp %d, lane %d, at ", actor / kWarpLanes, actor % kWarpLanes);
  } else if (actor < kFirstReader) {
    result += text("a wgmma of warpgroup %d issued at ", actor - kFirstWgmma);
  } else if (actor < kFirstLoad) {
    result += "a store issued at ";
  } else {
    result += "a load issued at ";
  }
  return result + at_place(access.where);
}
// The first failure counts. A thread that fails does not come back.
void fail(const std::string& message) {
  if (failure.empty()) {
    failure = message;
  }
  if (current) {
    leave();
  }
}
void fail_here(uint32_t where, const std::string& what) {
  fail(name_of(*current) + ", at " + at_place(where) + ": " + what);
}

// -- waiting
// ---------------------------------------------------------------------------------------
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
        if (store.thread == &thread && store.committed && (wait.number ? !store.read : true)) {
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
std::string name_of(const Wait& wait) {
  switch (wait.kind) {
    case Wait::kNothing:
      return "nothing";
    case Wait::kMbarrier: {
      const Mbarrier& b = *static_cast<const Mbarrier*>(wait.object);
      return text(
          "the mbarrier at byte %u, parity %d: %u phases complete, %d of %d arrivals and "
          "%lld bytes missing",
          b.address, static_cast<int>(wait.value), b.complete, b.missing, b.expected,
          static_cast<long long>(b.bytes));
    }
    case Wait::kNamed: {
      const NamedBarrier& b = *static_cast<const NamedBarrier*>(wait.object);
      return text("named barrier %d: %d of %d threads are there", wait.number, b.here, b.expected);
    }
    case Wait::kWarp:
      return text("the other lanes of the warp: %d are there",
                  static_cast<const Warp*>(wait.object)->here);
    case Wait::kWgmma:
      return text("its warpgroup's wgmma number %llu of which %u are complete",
                  static_cast<unsigned long long>(wait.value),
                  static_cast<const WgmmaQueue*>(wait.object)->complete);
    case Wait::kBulk:
      return "its stores";
    case Wait::kWord:
      return text("a word of global memory that is %d", static_cast<int>(wait.value));
    case Wait::kRegisters:
      return "registers that nobody gives back";
    case Wait::kGrid:
      return "the launch before";
  }
  return "";
}
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

// -- clocks
// ----------------------------------------------------------------------------------------
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
// What asynchronous operations know: a copy, to which the caller may add.
std::shared_ptr<Clock> snapshot(Thread& thread) {
  std::shared_ptr<Clock> clock = clocks().take();
  clock->join(*thread.clock);
  tick(thread);
  return clock;
}

// Messages are only made when there is something to say.
std::string bytes_of_shared(uint32_t at, uint32_t bytes) {
  return text("bytes %u to %u of shared memory", at, at + bytes);
}
void report(const Conflict& conflict, const Access& who, const char* does, uint32_t at,
            uint32_t bytes) {
  if (conflict.what) {
    fail(name_of(who) + ": " + does + " " + bytes_of_shared(at, bytes) + " " + conflict.what +
         (conflict.with.who ? " " + name_of(conflict.with) : ""));
  }
}
void report(const Conflict& conflict, const Access& who, const char* does, const void* at,
            uint32_t bytes) {
  if (conflict.what) {
    fail(name_of(who) +
         text(": %s %u bytes of global memory at %p %s ", does, bytes, at, conflict.what) +
         name_of(conflict.with));
  }
}
bool outside(uint32_t at, uint32_t bytes, const Block& block, const Access& who) {
  if (at + bytes <= block.grid->launch.shared_bytes) {
    return false;
  }
  fail(name_of(who) + text(": byte %u is outside of the block's shared memory", at));
  return true;
}

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

// -- mbarriers
// -------------------------------------------------------------------------------------
// Whoever waits for the phases of a barrier must have seen the last one before the next is
// complete: parities do not tell it from the one after.
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
  constexpr int64_t kMost = (1 << 20) - 1;
  b.bytes += bytes;
  if (b.bytes > kMost) {
    fail_here(where, "more bytes are announced than an mbarrier can count");
  }
  if (commits(Fault::kFewerBytes, where)) {
    b.bytes -= 16;
  }
  if (commits(Fault::kMoreBytes, where)) {
    b.bytes += 16;
  }
}

// -- copies
// ---------------------------------------------------------------------------------------- Where a
// row of a box lies in the tensor, and how many of its 64 columns are inside.
std::pair<char*, int> row_of(const Map& map, const int (&at)[4], int row) {
  const int64_t place[] = {at[0], at[1] + row, at[2], at[3]};
  char* element = map.data + place[0] * map.strides[0];
  for (int d = 1; d < 4; ++d) {
    if (place[d] < 0 || place[d] >= map.sizes[d]) {
      return {nullptr, 0};
    }
    element += place[d] * map.strides[d];
  }
  return {element, static_cast<int>(std::clamp<int64_t>(map.sizes[0] - place[0], 0, 64))};
}
uint32_t swizzled(uint32_t address) {
  return address ^ (address >> 7 & 7) << 4;
}
constexpr uint32_t kBoxRow = 128, kBoxPiece = 16, kStep = 1024;

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
      const auto [element, columns] = row_of(load.map, load.at, static_cast<int>(row));
      char line[kBoxRow] = {};
      if (columns > 0) {
        std::memcpy(line, element, columns * 2);
        report(global_shadow.read(element, columns * 2, actor), load.access, "reads", element,
               columns * 2);
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
  load.clock->fenced[block.segment][load.actor] = when;
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
  store.strict = block.acquires;
  ++thread.stores;
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
      // What lies outside of the tensor may be anything.
      for (uint32_t i = 0; i < store.bytes && failure.empty(); i += kBoxPiece) {
        const int row = static_cast<int>(i / kBoxRow);
        if (row_of(store.map, store.at, row).second * 2 > static_cast<int>(i % kBoxRow)) {
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
    const auto [element, columns] = row_of(store.map, store.at, static_cast<int>(row));
    if (columns > 0) {
      write(element, store.data.data() + row * kBoxRow, columns * 2);
    }
  }
  return true;
}

// -- wgmma
// -----------------------------------------------------------------------------------------
constexpr int kProductRows = 64, kProductK = 16, kMostColumns = 256;

float as_float(uint16_t bits, bool half) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  if (half) {
    const uint32_t sign = wide & 0x80000000u, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
      const float tiny = static_cast<float>(fraction) * 0x1p-24f;
      std::memcpy(&wide, &tiny, sizeof(wide));
      wide |= sign;
    } else {
      const uint32_t shifted = exponent == 31 ? 255 : exponent + 112;
      wide = sign | shifted << 23 | fraction << 13;
    }
  }
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// The 16-byte pieces of a matrix behind a descriptor with the 128-byte swizzle, of `lines` rows of
// A or columns of B and 16 of k: visit(address, line, k, whether the piece goes along k).
template <class Visit>
void visit_pieces(uint64_t descriptor, bool lines_contiguous, int first, int lines, Visit visit) {
  const uint32_t start = (descriptor & 0x3FFF) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3FFF) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3FFF) << 4;
  constexpr int kElements = kBoxPiece / 2;
  if (lines_contiguous) {
    for (int k = 0; k < kProductK; ++k) {
      for (int line = first; line < first + lines; line += kElements) {
        visit(swizzled(start + line / 64 * leading + k / 8 * stride + k % 8 * 128 + line % 64 * 2),
              line, k);
      }
    }
  } else {
    for (int line = first; line < first + lines; ++line) {
      for (int k = 0; k < kProductK; k += kElements) {
        visit(swizzled(start + line / 8 * stride + line % 8 * 128 + k * 2), line, k);
      }
    }
  }
}

// k-major copy: result[k * lines + line].
void gather(const Block& block, uint64_t descriptor, bool lines_contiguous, int lines, bool half,
            float* result) {
  visit_pieces(descriptor, lines_contiguous, 0, lines, [&](uint32_t address, int line, int k) {
    uint16_t bits[kBoxPiece / 2];
    std::memcpy(bits, block.memory + address, sizeof(bits));
    for (int i = 0; i < static_cast<int>(kBoxPiece) / 2; ++i) {
      const int at = lines_contiguous ? k * lines + line + i : (k + i) * lines + line;
      result[at] = as_float(bits[i], half);
    }
  });
}

void check_product(Block& block, const Wgmma& product, int group) {
  const WgmmaQueue& queue = block.products[group];
  const Access access =
      access_of(block, kFirstWgmma + group, queue.base + queue.complete + 1, product.where);
  for (int warp = 0; warp < kWarpsPerGroup && failure.empty(); ++warp) {
    const Actor actor = {access, product.clocks[warp].get(), true};
    const auto check = [&](const char* reads) {
      return [&, reads](uint32_t address, int, int) {
        if (failure.empty() && !outside(address, kBoxPiece, block, access)) {
          report(block.shadow.read(address, kBoxPiece, actor, instrumented), access, reads, address,
                 kBoxPiece);
        }
      };
    };
    if (!product.form.a[0]) {
      constexpr int kRows = kProductRows / kWarpsPerGroup;
      visit_pieces(product.form.a_descriptor, product.form.a_rows_contiguous, warp * kRows, kRows,
                   check("reads A in"));
    }
    visit_pieces(product.form.b_descriptor, product.form.b_columns_contiguous, 0,
                 product.form.columns, check("reads B in"));
  }
}

bool product_is_ready(const WgmmaQueue& queue) {
  return !queue.waiting.empty() && queue.waiting.front().issued == kWarpgroup;
}
void advance_products(Block& block, int group) {
  WgmmaQueue& queue = block.products[group];
  const Wgmma& product = queue.waiting.front();
  const int columns = product.form.columns;
  check_product(block, product, group);
  static float a[kProductK * kProductRows], b[kProductK * kMostColumns];
  gather(block, product.form.b_descriptor, product.form.b_columns_contiguous, columns,
         product.form.half, b);
  if (!product.form.a[0]) {
    gather(block, product.form.a_descriptor, product.form.a_rows_contiguous, kProductRows,
           product.form.half, a);
  } else {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      for (int i = 0; i < 4; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
        const int k = thread % 4 * 2 + i / 2 * 8;
        const uint32_t pair = *product.a[thread][i];
        a[k * kProductRows + row] = as_float(static_cast<uint16_t>(pair), product.form.half);
        a[(k + 1) * kProductRows + row] =
            as_float(static_cast<uint16_t>(pair >> 16), product.form.half);
      }
    }
  }
  for (int row = 0; row < kProductRows; ++row) {
    // Four threads share a row: each has two of every eight columns.
    float sums[kMostColumns];
    const int first = row / 16 * 32 + row % 8 * 4, half = row / 8 % 2;
    for (int i = 0; i < columns; ++i) {
      sums[i] = product.form.accumulate ? product.d[first + i % 8 / 2][i / 8 * 4 + half * 2 + i % 2]
                                        : 0.0f;
    }
    for (int k = 0; k < kProductK; ++k) {
      const float factor = a[k * kProductRows + row];
      const float* line = b + k * columns;
      for (int i = 0; i < columns; ++i) {
        sums[i] += factor * line[i];
      }
    }
    for (int i = 0; i < columns; ++i) {
      product.d[first + i % 8 / 2][i / 8 * 4 + half * 2 + i % 2] = sums[i];
    }
  }
  // What has been read before a warp issued the product is over when the product is complete.
  auto reads = std::make_shared<WgmmaQueue::Reads>();
  std::memset(reads->times, 0, sizeof(reads->times));
  for (const std::shared_ptr<Clock>& clock : product.clocks) {
    take_later(reads->times, clock->known[block.segment]);
  }
  queue.reads.push_back(reads);
  queue.waiting.pop_front();
  ++queue.complete;
}

// -- the machine at work
// ---------------------------------------------------------------------------
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
void advance(const Operation& operation) {
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
// Carries out one of the operations that are possible, or the oldest of each kind in order 0.
bool advance_one() {
  const std::vector<Operation> all = operations();
  if (all.empty()) {
    return false;
  }
  advance(all[order == 0 ? 0 : random_below(static_cast<uint32_t>(all.size()))]);
  return true;
}

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
  // What an earlier block left on the stack is nobody's register.
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
  block.triggered = block.acquires = false;
  block.all_said_yes = true;
  block.shadow.clear();
  // What nobody wrote must not look like zero.
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
  constexpr int kAll = 65536, kUnit = 8, kMost = 255;
  const uint32_t each = std::min(kMost, kAll / grid.launch.threads / kUnit * kUnit);
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

std::string everybody() {
  std::string result = "all threads wait for ever:";
  std::map<std::string, std::pair<int, const Thread*>> waits;
  for (auto& block : blocks) {
    for (int i = 0; i < block->grid->launch.threads; ++i) {
      const Thread& thread = *block->threads[i];
      if (!thread.done) {
        auto& entry = waits[text("block %u, warp %d: ", block->number, i / kWarpLanes) +
                            name_of(thread.wait) + ", at " + at_place(thread.wait.where)];
        ++entry.first;
        entry.second = &thread;
      }
    }
  }
  for (const auto& [name, entry] : waits) {
    result += text("\n  %d of ", entry.first) + name;
  }
  return result;
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

// Every warp of every block once, in some order. False: nobody could run.
bool run_round() {
  struct Turn {
    Block* block;
    int warp;
  };
  std::vector<Turn> turns;
  bool later_launch_runs = false;
  for (auto& block : blocks) {
    for (int warp = 0; warp < static_cast<int>(block->warps.size()); ++warp) {
      turns.push_back({block.get(), warp});
    }
  }
  if (order > 0) {
    for (size_t i = turns.size(); i > 1; --i) {
      std::swap(turns[i - 1], turns[random_below(static_cast<uint32_t>(i))]);
    }
    // A launch that began early runs ahead: the one before it takes as long as it likes.
    std::stable_partition(turns.begin(), turns.end(),
                          [](const Turn& t) { return t.block->grid != grids.front().get(); });
  }
  bool ran = false;
  for (const Turn& turn : turns) {
    if (later_launch_runs && turn.block->grid == grids.front().get()) {
      break;
    }
    const int count = std::min(kWarpLanes, turn.block->grid->launch.threads - turn.warp * 32);
    const int start = order >= 2 ? static_cast<int>(random_below(count)) : 0;
    for (int i = 0; i < count; ++i) {
      const int lane = (start + i) % count;
      Thread& thread = *turn.block->threads[turn.warp * kWarpLanes + lane];
      if (turn.block == starved.block && turn.warp == starved.warp &&
          (starved.lane < 0 || starved.lane == lane)) {
        continue;
      }
      if (!thread.done && is_ready(thread)) {
        run_thread(thread);
        ran = true;
        later_launch_runs = turn.block->grid != grids.front().get();
      }
      if (!failure.empty()) {
        return false;
      }
    }
    if (order == 0) {
      while (failure.empty() && advance_one()) {
      }
    } else if (chance(1 + order % 5)) {
      advance_one();
    }
    if (!failure.empty()) {
      return false;
    }
  }
  return ran;
}

// A thread that touches memory that is not there, or divides by zero, fails like any other.
alignas(16) char signal_stack[64 * 1024];
void on_bad_address(int, siginfo_t* info, void*) {
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

// -- launches
// --------------------------------------------------------------------------------------
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
        fail(everybody());
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

// -- threads
// ---------------------------------------------------------------------------------------
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
}  // namespace

namespace {
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

// -- memory
// ----------------------------------------------------------------------------------------
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

ON_HOST_ENTRY int load_acquire(const int* word) {
  const uint32_t where = ON_HOST_WHERE;
  current->block->acquires = true;
  const auto key = std::make_pair(static_cast<const Thread*>(current), word);
  const auto before = told.find(key);
  if (before != told.end() && before->second == *word) {
    wait_for({Wait::kWord, word, static_cast<uint64_t>(static_cast<int64_t>(*word)), 0, where});
  }
  yield();
  const int value = *word;
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
  Clock& clock = *thread.clock;
  const int segment = thread.block->segment;
  clock.fenced[segment][thread.index] = now(thread);
  if (thread.storer >= 0) {
    const int writer = kFirstWriter + thread.storer;
    clock.fenced[segment][writer] = clock.known[segment][writer];
  }
  if (thread.acquired) {
    clock.join(*thread.acquired);
    thread.acquired = nullptr;
  }
  tick(thread);
}

// -- barriers
// --------------------------------------------------------------------------------------
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

// -- copies
// ----------------------------------------------------------------------------------------
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
  for (Store& store : current->block->grid->stores) {
    if (store.thread == current) {
      store.committed = true;
    }
  }
  current->stores_committed = current->stores;
}
ON_HOST_ENTRY void bulk_wait_group(bool read_only) {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoBulkWait, where)) {
    return;
  }
  if (!read_only && commits(Fault::kOnlyReadWait, where)) {
    read_only = true;
  }
  wait_for({Wait::kBulk, nullptr, 0, read_only, where});
  Thread& thread = *current;
  if (thread.storer < 0) {
    return;
  }
  // Of this thread's stores the committed ones have read, and have written unless `read_only`.
  const int segment = thread.block->segment;
  const int reader = kFirstReader + thread.storer, writer = kFirstWriter + thread.storer;
  const uint32_t uncommitted = thread.stores - thread.stores_committed;
  thread.clock->known[segment][reader] = counters[segment][reader] - uncommitted;
  if (!read_only) {
    thread.clock->known[segment][writer] = counters[segment][writer] - uncommitted;
  }
  ++thread.version;
}

// -- wgmma
// -----------------------------------------------------------------------------------------
ON_HOST_ENTRY void wgmma(const Product& product) {
  const uint32_t where = ON_HOST_WHERE;
  Thread& thread = *current;
  const int group = thread.index / kWarpgroup, member = thread.index % kWarpgroup;
  const int warp = member / kWarpLanes;
  WgmmaQueue& queue = thread.block->products[group];
  if (thread.fences == 0) {
    fail_here(where, "no wgmma.fence before the first wgmma");
  }
  // Its place in the queue, which it may be the first to ask for.
  if (thread.issued == queue.enqueued()) {
    queue.waiting.emplace_back();
    queue.waiting.back().form = product;
    queue.waiting.back().where = where;
  }
  Wgmma& entry = queue.waiting[thread.issued - queue.complete];
  const Product& form = entry.form;
  if (form.columns != product.columns || form.accumulate != product.accumulate ||
      form.b_descriptor != product.b_descriptor ||
      form.a_rows_contiguous != product.a_rows_contiguous ||
      form.b_columns_contiguous != product.b_columns_contiguous || !form.a[0] != !product.a[0] ||
      (!form.a[0] && form.a_descriptor != product.a_descriptor)) {
    fail_here(where, "the threads of a warpgroup disagree on a wgmma");
  }
  ++thread.issued;
  const auto registers = [&](const void* first) {
    return thread.registers +
           (static_cast<const char*>(first) - static_cast<const char*>(thread.stack)) / 4;
  };
  const auto check = [&](const Register& word, const char* what) {
    if (word.touched == thread.fences + 1) {
      fail_here(where,
                std::string("no wgmma.fence between an access to ") + what + " and the wgmma");
    }
    if (word.loose) {
      fail_here(where, std::string("nothing keeps the compiler from writing ") + what +
                           " behind the wgmma.fence (pin before the fence)");
    }
  };
  Register* word = registers(product.d);
  thread.lowest = std::min(thread.lowest, static_cast<size_t>(word - thread.registers));
  for (int i = 0; i < product.columns / 2; ++i, ++word) {
    check(*word, "an accumulator");
    if (word->a_of > thread.completed) {
      fail_here(where, "an accumulator is still the operand of another wgmma");
    }
    word->d_of = thread.issued;
  }
  for (int i = 0; i < 4 && product.a[0]; ++i) {
    Register& operand = *registers(product.a[i]);
    check(operand, "an operand");
    if (operand.d_of > thread.completed) {
      fail_here(where, "an operand is still the accumulator of another wgmma");
    }
    operand.a_of = thread.issued;
    entry.a[member][i] = product.a[i];
  }
  entry.d[member] = product.d;
  // Threads of a warp issue together: what one of them knows the product knows.
  std::shared_ptr<Clock>& known = queue.clocks[warp];
  if (queue.versions[member] != thread.version) {
    if (!known || known.use_count() > 1) {
      std::shared_ptr<Clock> fresh = clocks().take();
      if (known) {
        fresh->join(*known);
      }
      known = fresh;
    }
    known->join(*thread.clock);
    tick(thread);
    queue.versions[member] = thread.version;
  }
  if (++entry.warp_issued[warp] == kWarpLanes) {
    entry.clocks[warp] = known;
  }
  ++entry.issued;
  yield();
}
ON_HOST_ENTRY void wgmma_fence() {
  if (!commits(Fault::kNoWgmmaFence, ON_HOST_WHERE)) {
    ++current->fences;
  }
}
ON_HOST_ENTRY void wgmma_commit_group() {
  if (!commits(Fault::kNoWgmmaCommit, ON_HOST_WHERE)) {
    current->commits.push_back(current->issued);
  }
}
ON_HOST_ENTRY void wgmma_wait_group(int pending) {
  const uint32_t where = ON_HOST_WHERE;
  if (commits(Fault::kNoWgmmaWait, where)) {
    return;
  }
  if (commits(Fault::kWgmmaWaitForOneLess, where)) {
    ++pending;
  }
  Thread& thread = *current;
  const int groups = static_cast<int>(thread.commits.size()) - pending;
  if (groups <= 0) {
    return;
  }
  const uint32_t products = thread.commits[groups - 1];
  const int group = thread.index / kWarpgroup;
  const WgmmaQueue& queue = thread.block->products[group];
  wait_for({Wait::kWgmma, &queue, products, 0, where});
  thread.completed = std::max(thread.completed, products);
  const int segment = thread.block->segment;
  thread.clock->known[segment][kFirstWgmma + group] = queue.base + thread.completed;
  if (products) {
    take_later(thread.clock->read[segment], queue.reads[products - 1]->times);
  }
  ++thread.version;
}
ON_HOST_ENTRY void pin(const void* first, size_t bytes) {
  if (commits(Fault::kNoPin, ON_HOST_WHERE)) {
    return;
  }
  Thread& thread = *current;
  Register* word = thread.registers + (static_cast<const char*>(first) - thread.stack) / 4;
  for (size_t i = 0; i < bytes / 4; ++i, ++word) {
    if (word->d_of <= thread.completed) {
      word->d_of = 0;
    }
    if (word->a_of <= thread.completed) {
      word->a_of = 0;
    }
    if (word->loose) {
      word->loose = false;
      word->touched = thread.fences + 1;
    }
  }
}

// -- grid
// ------------------------------------------------------------------------------------------
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

// -- what tests ask for
// ----------------------------------------------------------------------------
extern "C" {
void on_host_order(uint64_t order) {
  on_host::order = order;
  on_host::random_state = order;
  on_host::asked = true;
}
// One fault, see Fault; 0: none.
void on_host_fault(int kind, uint32_t where) {
  on_host::fault = static_cast<on_host::Fault>(kind);
  on_host::fault_where = where;
}
// The failure since the last call, null for none.
const char* on_host_failure() {
  static std::string last;
  last = std::exchange(on_host::failure, std::string());
  return last.empty() ? nullptr : last.c_str();
}
void on_host_record(int yes) {
  on_host::records_sites = yes != 0;
  on_host::sites.clear();
}
// Where which faults could have been committed so far: kind, place and how often, in turn.
int on_host_sites(uint32_t* result, int most) {
  int count = 0;
  for (const auto& [site, times] : on_host::sites) {
    if (count < most) {
      result[3 * count] = static_cast<uint32_t>(site.first);
      result[3 * count + 1] = site.second;
      result[3 * count + 2] = static_cast<uint32_t>(times);
    }
    ++count;
  }
  return count;
}

// What a compiler calls at every access under -fsanitize=thread; no other part of its runtime is
// linked.
#define ON_HOST_TOUCH(NAME, BYTES, WRITE)                               \
  ON_HOST_ENTRY void NAME(void* address) {                              \
    on_host::touch(address, BYTES, WRITE, __builtin_return_address(0)); \
  }
#define ON_HOST_TOUCHES(BYTES)                    \
  ON_HOST_TOUCH(__tsan_read##BYTES, BYTES, false) \
  ON_HOST_TOUCH(__tsan_write##BYTES, BYTES, true)
#define ON_HOST_UNALIGNED(BYTES)                            \
  ON_HOST_TOUCH(__tsan_unaligned_read##BYTES, BYTES, false) \
  ON_HOST_TOUCH(__tsan_unaligned_write##BYTES, BYTES, true)
ON_HOST_TOUCHES(1)
ON_HOST_TOUCHES(2)
ON_HOST_TOUCHES(4)
ON_HOST_TOUCHES(8)
ON_HOST_TOUCHES(16)
ON_HOST_UNALIGNED(2)
ON_HOST_UNALIGNED(4)
ON_HOST_UNALIGNED(8)
ON_HOST_UNALIGNED(16)
ON_HOST_ENTRY void __tsan_read_range(void* address, unsigned long bytes) {
  on_host::touch(address, static_cast<uint32_t>(bytes), false, __builtin_return_address(0));
}
ON_HOST_ENTRY void __tsan_write_range(void* address, unsigned long bytes) {
  on_host::touch(address, static_cast<uint32_t>(bytes), true, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {
  on_host::instrumented = true;
}
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
}
