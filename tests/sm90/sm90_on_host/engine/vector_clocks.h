// Happens-before: vector clocks of threads and of asynchronous operations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace on_host {

// An actor is a thread of a block or something asynchronous: the wgmma of a warpgroup, the stores
// of a thread (reading shared memory and writing global memory count apart), a load.
constexpr int kThreads = 512, kWarpgroups = kThreads / 128, kStorers = 8, kLoads = 96;
constexpr int kFirstWgmma = kThreads, kFirstReader = kFirstWgmma + kWarpgroups,
              kFirstWriter = kFirstReader + kStorers, kFirstLoad = kFirstWriter + kStorers;
constexpr int kActors = (kFirstLoad + kLoads + 15) / 16 * 16;
// Blocks that have a clock of their own. A block that reuses a number starts long after the
// previous one has ended.
constexpr int kSegments = 16;

inline void take_later(uint32_t (&times)[kActors], const uint32_t (&others)[kActors]) {
  for (int i = 0; i < kActors; ++i) {
    times[i] = std::max(times[i], others[i]);
  }
}

// For every actor: up to which of its times all that it did is ordered before this clock; up to
// which its ordinary writes are visible to asynchronous readers as well; and up to which its reads
// have ended.
struct Clock {
  // Segments that have anything in them, in `fenced` and in `read`.
  uint32_t segments = 0, fences = 0, reads = 0;
  uint32_t grids = 0;  // everything of launches before this one
  uint32_t known[kSegments][kActors], fenced[kSegments][kActors], read[kSegments][kActors];

  void clear() {
    for (int s = 0; s < kSegments; ++s) {
      if (segments >> s & 1) {
        std::memset(known[s], 0, sizeof(known[s]));
      }
      if (fences >> s & 1) {
        std::memset(fenced[s], 0, sizeof(fenced[s]));
      }
      if (reads >> s & 1) {
        std::memset(read[s], 0, sizeof(read[s]));
      }
    }
    segments = fences = reads = grids = 0;
  }
  void join(const Clock& other) {
    for (int s = 0; s < kSegments; ++s) {
      if (other.segments >> s & 1) {
        take_later(known[s], other.known[s]);
      }
      if (other.fences >> s & 1) {
        take_later(fenced[s], other.fenced[s]);
      }
      if (other.reads >> s & 1) {
        take_later(read[s], other.read[s]);
      }
    }
    segments |= other.segments;
    fences |= other.fences;
    reads |= other.reads;
    grids = std::max(grids, other.grids);
  }
  // The ordinary writes of an actor up to this time are visible to asynchronous readers.
  void fence(int segment, int actor, uint32_t time) {
    fences |= 1u << segment;
    fenced[segment][actor] = time;
  }
  void copy(const Clock& other) {
    clear();
    join(other);
  }
};

// Clocks are large and mostly zero: they come from the system as zeros and are used again.
class ClockPool {
 public:
  std::shared_ptr<Clock> take() {
    Clock* clock = nullptr;
    if (free_.empty()) {
      clock = static_cast<Clock*>(std::calloc(1, sizeof(Clock)));
    } else {
      clock = free_.back();
      free_.pop_back();
    }
    return {clock, [this](Clock* c) {
              c->clear();
              free_.push_back(c);
            }};
  }
  void release() {
    for (Clock* clock : free_) {
      std::free(clock);
    }
    free_.clear();
  }

 private:
  std::vector<Clock*> free_;
};
inline ClockPool& clocks() {
  static ClockPool* const pool = new ClockPool;
  return *pool;
}

struct Access {
  uint16_t who = 0;  // 1 + segment * kActors + actor; 0: none
  uint16_t grid = 0;
  uint32_t when = 0;
  uint32_t where = 0;  // in the program
};
static_assert(kSegments * kActors < 1 << 16);
inline bool knows(const Clock& clock, const Access& access) {
  return access.grid < clock.grids ||
         clock.known[(access.who - 1) / kActors][(access.who - 1) % kActors] >= access.when;
}
inline bool has_fence(const Clock& clock, const Access& access) {
  return access.grid < clock.grids ||
         clock.fenced[(access.who - 1) / kActors][(access.who - 1) % kActors] >= access.when;
}
inline bool is_thread(const Access& access) {
  return access.who != 0 && (access.who - 1) % kActors < kThreads;
}

inline bool is_over(const Clock& clock, const Access& read) {
  return knows(clock, read) ||
         clock.read[(read.who - 1) / kActors][(read.who - 1) % kActors] >= read.when;
}

// The actor of the current access, and its clock.
struct Actor {
  Access access;
  const Clock* clock;
  bool asynchronous;
  bool adds = false;  // atomically, in whatever order
};

struct Conflict {
  const char* what = nullptr;
  Access with;
};

}  // namespace on_host
