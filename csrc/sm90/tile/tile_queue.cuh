// How a persistent thread block learns its next tile: one thread draws it, from a counter in global
// memory or by fixed strides, and hands it to every other warp through a small ring in shared
// memory.
#pragma once

#include "sm90/tile/pipeline.cuh"

namespace fastattn::sm90 {

// Draws tile numbers: this block's first one is blockIdx.x.
struct TileSource {
  int* counter;  // zero at launch; null: every `blocks`-th tile
  int blocks;    // of the grid

  // In two splits, so that memory can take its time to answer.
  __device__ __forceinline__ int draw(int tile) const {
    return counter ? atomicAdd(counter, 1) : tile;
  }
  __device__ __forceinline__ int drawn(int answer) const { return answer + blocks; }
};

// What is handed over; `row` < 0: there are no more tiles.
struct TileInfo {
  int row;  // first query of the tile, counted inside its sequence
  int batch, head;
  int queries;  // rows of this sequence that are computed
  int keys;     // keys of this sequence that may be attended
  int origin;   // the tensor's row that is the sequence's row 0; not 0 only if sequences are packed
  int split;    // of the keys, where they are cut
};

struct TileQueue {
  static constexpr int kSlots = 4;
  using Position = RingPosition<kSlots>;

  TileInfo infos[kSlots];
  Slot slots[kSlots];

  __device__ __forceinline__ void init(int readers) {
    for (Slot& slot : slots) {
      slot.full.init(1);
      slot.empty.init(readers);
    }
  }

  // The drawing thread.
  __device__ __forceinline__ void put(Position& at, const TileInfo& info) {
    slots[at.index()].empty.wait(at.phase() ^ 1);
    infos[at.index()] = info;
    slots[at.index()].full.arrive();
    at.advance();
  }

  // A reader that is one thread.
  __device__ __forceinline__ TileInfo take(Position& at) {
    slots[at.index()].full.wait(at.phase());
    const TileInfo info = infos[at.index()];
    slots[at.index()].empty.arrive();
    at.advance();
    return info;
  }

  // A reader that is a whole warp and leaves the info where it is until it is done with the
  // tile: registers are scarcer than slots.
  __device__ __forceinline__ const TileInfo& peek(const Position& at) {
    slots[at.index()].full.wait(at.phase());
    return infos[at.index()];
  }
  __device__ __forceinline__ void release_warp(Position& at, int lane) {
    __syncwarp();
    if (lane == 0) {
      slots[at.index()].empty.arrive();
    }
    at.advance();
  }
};

}  // namespace fastattn::sm90
