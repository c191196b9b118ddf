// The simulator's state: threads, barriers, copies and products in flight, blocks and launches.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"
#include "engine/shadow_memory.h"
#include "engine/vector_clocks.h"

namespace on_host {
namespace {

constexpr size_t kStackBytes = 1 << 16;
constexpr int kNamedBarriers = 16, kWarpgroup = 128, kWarpsPerGroup = kWarpgroup / kWarpLanes;
constexpr uint32_t kArrayBytes = 256 * 1024;

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
  uint32_t stores = 0;
  std::vector<uint32_t> store_groups;  // stores up to the end of each committed group
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
  // For each thread that has waited: 1 + the phases that were complete, and when that was.
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
  // Reads before every complete product: up to which times threads had read when they issued it.
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
  bool tensor, add, strict, read = false;
  Map map;
  int at[4];
  char* to;
  uint32_t from, bytes, where;
  uint32_t number;  // of the thread's stores, from 1 on
  Thread* thread;
  std::shared_ptr<Clock> clock;
  Access reader, writer;
  std::vector<char> data;
};

struct Block {
  Grid* grid = nullptr;
  unsigned number = 0;
  int segment = 0, live = 0;
  bool triggered = false, in_order = false, all_said_yes = true;
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
bool asked = false;  // the test will read the failure
// The clocks that words of global memory were released with.
std::map<const int*, std::shared_ptr<Clock>> released;
// The last value that a thread has polled: it waits for another one.
std::map<std::pair<const Thread*, const int*>, int> told;

}  // namespace
}  // namespace on_host
