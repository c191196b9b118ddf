// The library's layout of a workspace, or one whose sections end before inaccessible pages, so that
// accesses behind them fault: sections are aligned to 16 bytes, and up to 15 bytes may lie behind
// them.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <vector>

#define WorkspaceLayout OwnWorkspaceLayout
#include "../../../../csrc/common/workspace_layout.h"
#undef WorkspaceLayout

namespace fastattn {

inline bool guards_sections = true;
// Guards of the last workspace.
inline std::vector<char*> guards;
// Offsets and sizes in bytes of the last workspace, if it has no guards.
inline std::vector<int64_t> sections;
// The section that is 16 bytes too short, for tests of the guards; none if negative.
inline int short_section = -1;
constexpr int64_t kPage = 4096;

class WorkspaceLayout {
 public:
  explicit WorkspaceLayout(void* memory) : memory_(static_cast<char*>(memory)), own_(memory) {
    guards.clear();
    sections.clear();
  }

  int64_t bytes() const { return guards_sections ? bytes_ : own_.bytes(); }

  template <class T>
  T* take(int64_t count) {
    if (!guards_sections) {
      T* section = own_.take<T>(count);
      sections.push_back(reinterpret_cast<char*>(section) - memory_);
      sections.push_back(count * sizeof(T));
      return section;
    }
    constexpr int64_t kAlignment = 16;
    int64_t size = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    size -= sections_++ == short_section ? kAlignment : 0;
    const int64_t end = bytes_ + (size + kPage - 1) / kPage * kPage;
    bytes_ = end + kPage;
    if (!memory_) {
      return nullptr;
    }
    guards.push_back(memory_ + end);
    mprotect(guards.back(), kPage, PROT_NONE);
    return reinterpret_cast<T*>(memory_ + end - size);
  }

 private:
  char* memory_;
  OwnWorkspaceLayout own_;
  int64_t bytes_ = 0;
  int sections_ = 0;
};

}  // namespace fastattn
