// Asynchronous copies to shared memory: nothing but NaN until the wait for their group. The
// simulator does not check their accesses.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "engine.h"

namespace fastattn::cuda {

#define UNCHECKED __attribute__((noinline, no_sanitize("thread"))) inline

// Copies of a thread, in groups that it has not waited for. Groups are counted.
struct Copies {
  static constexpr int kMax = 64;
  struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool reads;
    int group;
  };
  Copy copies[kMax];
  int count, group;
};
inline Copies copies_of[1024];

// At the start of a thread: the run before may have ended early.
UNCHECKED void forget_copies() {
  copies_of[threadIdx.x] = {};
}
template <int kBytes>
UNCHECKED void cp_async(void* to, const void* from, bool reads) {
  Copies& own = copies_of[threadIdx.x];
  if (own.count == Copies::kMax) {
    std::abort();
  }
  std::memset(to, 0xFF, kBytes);
  own.copies[own.count++] = {to, from, kBytes, reads, own.group};
}
UNCHECKED void cp_async_commit_group() {
  ++copies_of[threadIdx.x].group;
}
UNCHECKED void complete(int pending) {
  Copies& own = copies_of[threadIdx.x];
  int left = 0;
  for (int i = 0; i < own.count; ++i) {
    const Copies::Copy copy = own.copies[i];
    if (copy.group >= own.group - pending) {
      own.copies[left++] = copy;
    } else if (copy.reads) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
  }
  own.count = left;
}
template <int kPending>
inline void cp_async_wait_group() {
  complete(kPending);
}

#undef UNCHECKED

}  // namespace fastattn::cuda
