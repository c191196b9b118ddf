// The tile queue of a persistent thread block: one thread fetches tiles, from a global counter or
// with a fixed stride, and passes them to the other warps through a ring in shared memory.
#pragma once

#include "sm90/tile/pipeline.cuh"

namespace fastattn::sm90 {

// Tile numbers; this block's first one is blockIdx.x.
struct TileSource {
  int* counter;  // zero at launch; null: every `blocks`-th tile
  int blocks;    // of the grid

  // In two steps, to overlap the latency of the atomic.
  __device__ __forceinline__ int draw(int tile) const {
    return counter ? atomicAdd(counter, 1) : tile;
  }
  __device__ __forceinline__ int drawn(int answer) const { return answer + blocks; }
};

// A tile; `row` < 0: there are no more tiles.
struct TileInfo {
  int row;  // first query of the tile, counted inside its sequence
  int batch, head;
  int queries;  // rows of this sequence that are computed
  int keys;     // keys of this sequence that may be attended
  int origin;   // the sequence's first row in the tensor, 0 unless packed
  int split;    // of the keys, with split-KV
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

  // The fetching thread.
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

  // A reader that is a whole warp and leaves the tile in its slot until it is done, to save
  // registers.
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
