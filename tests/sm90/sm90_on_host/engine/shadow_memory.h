// Shadow memory: the last accesses to every 16 bytes, and whether the next one is ordered after.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/vector_clocks.h"

namespace on_host {

constexpr int kCellBytes = 16, kGrain = 2;
struct Cell {
  // same: other writes of the same value, not ordered with `write`.
  Access write, same[2], reads[3];
  uint32_t crowd = 0;  // more readers
  uint32_t parts = 0;  // pieces of kGrain bytes are distinguished
  bool added = false;  // the last write
};

// The cells of a stretch of memory.
class Shadow {
 public:
  explicit Shadow(bool crowds) : crowds_(crowds) { clear_pools(); }
  void resize(size_t bytes) { cells_.resize(bytes / kCellBytes); }
  void clear() {
    if (first_ < end_) {
      std::fill(cells_.begin() + first_, cells_.begin() + end_, Cell());
      clear_pools();
    }
    first_ = UINT32_MAX;
    end_ = 0;
  }

  // strict: memory that has not been written must not be read.
  Conflict read(uint32_t at, uint32_t bytes, const Actor& actor, bool strict) {
    return visit(at, bytes, [&](Cell& cell) { return read_cell(cell, actor, strict); });
  }
  Conflict write(uint32_t at, uint32_t bytes, const Actor& actor) {
    return visit(at, bytes, [&](Cell& cell) { return write_cell(cell, actor); });
  }
  // A write that changed nothing.
  void write_same(uint32_t at, uint32_t bytes, const Actor& actor) {
    visit(at, bytes, [&](Cell& cell) {
      const auto in_one_warp = [&](const Access& other) {
        return is_thread(other) && (other.who - 1) / 32 == (actor.access.who - 1) / 32;
      };
      if (knows(*actor.clock, cell.write) || in_one_warp(cell.write)) {
        cell.write = actor.access;
        return Conflict();
      }
      for (Access& same : cell.same) {
        if (same.who == 0 || in_one_warp(same) || knows(*actor.clock, same)) {
          same = actor.access;
          break;
        }
      }
      return Conflict();
    });
  }

 private:
  struct Parts {
    Cell cells[kCellBytes / kGrain];
  };
  struct Crowd {
    Access last[kActors];
  };

  void clear_pools() {
    parts_.assign(1, Parts());
    crowds_of_.clear();
    crowds_of_.emplace_back();
    free_crowds_.clear();
  }

  template <class Visit>
  Conflict visit(uint32_t at, uint32_t bytes, Visit one) {
    Conflict first;
    const uint32_t end = at + bytes;
    first_ = std::min(first_, at / kCellBytes);
    end_ = std::max(end_, (end + kCellBytes - 1) / kCellBytes);
    while (at < end && !first.what) {
      Cell& cell = cells_[at / kCellBytes];
      const uint32_t stop = std::min(end, (at / kCellBytes + 1) * kCellBytes);
      if (stop - at == kCellBytes && !cell.parts) {
        first = one(cell);
      } else {
        if (!cell.parts) {
          split(cell);
        }
        for (; at < stop && !first.what; at = at / kGrain * kGrain + kGrain) {
          first = one(parts_[cell.parts].cells[at % kCellBytes / kGrain]);
        }
      }
      at = stop;
    }
    return first;
  }
  void split(Cell& cell) {
    const uint32_t parts = static_cast<uint32_t>(parts_.size());
    parts_.emplace_back();
    for (Cell& part : parts_[parts].cells) {
      part = cell;
      if (cell.crowd) {
        part.crowd = new_crowd();
        *crowds_of_[part.crowd] = *crowds_of_[cell.crowd];
      }
    }
    cell.parts = parts;
  }

  static Conflict check_writes(const Cell& cell, const Actor& actor) {
    const Conflict conflict = check_write(cell, cell.write, actor);
    for (const Access& same : cell.same) {
      if (conflict.what && same.who != 0 && !check_write(cell, same, actor).what) {
        return {};
      }
    }
    return conflict;
  }
  static Conflict check_write(const Cell& cell, const Access& write, const Actor& actor) {
    if (write.who == 0 || write.who == actor.access.who || (cell.added && actor.adds)) {
      return {};
    }
    if (!knows(*actor.clock, write)) {
      return {"without an order after", write};
    }
    if (actor.asynchronous && !has_fence(*actor.clock, write)) {
      return {"without fence.proxy.async after", write};
    }
    return {};
  }

  Conflict read_cell(Cell& cell, const Actor& actor, bool strict) {
    if (strict && cell.write.who == 0) {
      return {"which has not been written", {}};
    }
    const Conflict conflict = check_writes(cell, actor);
    if (conflict.what) {
      return conflict;
    }
    if (cell.crowd) {
      crowds_of_[cell.crowd]->last[(actor.access.who - 1) % kActors] = actor.access;
      return {};
    }
    for (Access& read : cell.reads) {
      if (read.who == actor.access.who || read.who == 0 || knows(*actor.clock, read)) {
        read = actor.access;
        return {};
      }
    }
    if (!crowds_) {
      cell.reads[0] = actor.access;
      return {};
    }
    cell.crowd = new_crowd();
    Crowd& crowd = *crowds_of_[cell.crowd];
    for (Access& read : cell.reads) {
      crowd.last[(read.who - 1) % kActors] = read;
      read = {};
    }
    crowd.last[(actor.access.who - 1) % kActors] = actor.access;
    return {};
  }

  // A cell in conflict stays as it was.
  Conflict write_cell(Cell& cell, const Actor& actor) {
    Conflict conflict = check_write(cell, cell.write, actor);
    for (const Access& same : cell.same) {
      if (same.who != 0 && same.who != actor.access.who && !knows(*actor.clock, same)) {
        conflict = {"without an order after", same};
      }
    }
    const auto check_read = [&](const Access& read) {
      if (read.who != 0 && read.who != actor.access.who && !is_over(*actor.clock, read)) {
        conflict = {"which may still be read by", read};
      }
    };
    for (const Access& read : cell.reads) {
      check_read(read);
    }
    if (cell.crowd) {
      for (const Access& read : crowds_of_[cell.crowd]->last) {
        check_read(read);
      }
    }
    if (conflict.what) {
      return conflict;
    }
    if (cell.crowd) {
      *crowds_of_[cell.crowd] = {};
      free_crowds_.push_back(cell.crowd);
    }
    const uint32_t parts = cell.parts;
    cell = {};
    cell.parts = parts;
    cell.write = actor.access;
    cell.added = actor.adds;
    return {};
  }
  uint32_t new_crowd() {
    if (!free_crowds_.empty()) {
      const uint32_t crowd = free_crowds_.back();
      free_crowds_.pop_back();
      return crowd;
    }
    crowds_of_.push_back(std::make_unique<Crowd>());
    return static_cast<uint32_t>(crowds_of_.size()) - 1;
  }

  const bool crowds_;
  std::vector<Cell> cells_;
  uint32_t first_ = UINT32_MAX, end_ = 0;  // cells that were accessed
  std::vector<Parts> parts_;
  std::vector<std::unique_ptr<Crowd>> crowds_of_;
  std::vector<uint32_t> free_crowds_;
};

// Shadows of whatever pages of global memory are written.
class GlobalShadow {
 public:
  void clear() {
    pages_.clear();
    last_ = nullptr;
    last_page_ = 0;
  }
  // early: of a launch that has not waited for the one before, which may write there later.
  Conflict read(const void* at, uint32_t bytes, const Actor& actor, bool early = false) {
    return visit(at, bytes, [&](uint64_t page, uint32_t offset, uint32_t part) {
      Shadow* shadow = find(page, early);
      return shadow ? shadow->read(offset, part, actor, false) : Conflict();
    });
  }
  Conflict write(const void* at, uint32_t bytes, const Actor& actor) {
    return visit(at, bytes, [&](uint64_t page, uint32_t offset, uint32_t part) {
      return find(page, true)->write(offset, part, actor);
    });
  }

 private:
  static constexpr uint32_t kPage = 4096;
  template <class Visit>
  Conflict visit(const void* pointer, uint32_t bytes, Visit one) {
    uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
    const uintptr_t end = at + bytes;
    Conflict first;
    while (at < end && !first.what) {
      const uintptr_t stop = std::min<uintptr_t>(end, (at / kPage + 1) * kPage);
      first = one(at / kPage, static_cast<uint32_t>(at % kPage), static_cast<uint32_t>(stop - at));
      at = stop;
    }
    return first;
  }
  Shadow* find(uint64_t page, bool create) {
    if (page != last_page_ || (create && !last_)) {
      const auto found = pages_.find(page);
      last_page_ = page;
      last_ = found == pages_.end() ? nullptr : found->second.get();
      if (!last_ && create) {
        auto& made = pages_[page];
        made = std::make_unique<Shadow>(false);
        made->resize(kPage);
        last_ = made.get();
      }
    }
    return last_;
  }

  std::unordered_map<uint64_t, std::unique_ptr<Shadow>> pages_;
  uint64_t last_page_ = 0;
  Shadow* last_ = nullptr;
};

}  // namespace on_host
