// The text of a failure: the thread, its place in the program, the cause. Only the first counts.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "engine/fibers.h"
#include "engine/state.h"

namespace on_host {
namespace {

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
    return "no actor";
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
      return "registers that are not released";
    case Wait::kGrid:
      return "the launch before";
  }
  return "";
}

std::string all_waits() {
  std::string result = "deadlock, all threads wait:";
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

}  // namespace
}  // namespace on_host
