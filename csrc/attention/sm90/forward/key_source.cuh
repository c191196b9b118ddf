// Global memory of a block of keys or values for the load warp: rows of the tensors, or pages.
#pragma once

#include "attention/sm90/forward/fwd_storage.cuh"
#include "attention/sm90/forward/fwd_tiles.cuh"
#include "sm90/ptx/tma.cuh"

namespace fastattn::attention {

// Rows of a box of a paged tensor: the largest that divides pages and blocks.
FASTATTN_PURE int page_box_rows(const Pages& pages, int block) {
  return smaller(page_size(pages), block & -block);
}

// The keys and values of a tile. Blocks are loaded in this order: K and V of the last one, K and V
// of the one before, ...
template <class Traits, bool kPaged = Traits::kPaged>
struct KeySource {
  const int kv_head, batch, first_key;

  __device__ __forceinline__ KeySource(const ForwardArguments& args, const TileInfo& tile,
                                       int batch_entry)
      : kv_head(tile.head / args.heads_per_kv),
        batch(batch_entry),
        first_key(args.packing.key_offsets ? args.packing.key_offsets[tile.batch] : 0) {}

  __device__ __forceinline__ int first_of(int block) const {
    return first_key + block * Traits::kBlock;
  }
  // Called before the first block that is loaded, the last one.
  __device__ __forceinline__ void begin(int) {}
  // Loads keys or values from `key` on, the first of a block; those from `next` on are loaded
  // afterwards.
  __device__ __forceinline__ void load(typename Traits::KeyTile& to, const CUtensorMap* map,
                                       Barrier& full, int key, int) {
    to.load(map, full, key, kv_head, batch, ptx::kEvictLast);
  }
};

// The page of the next box is read from the block table as soon as a copy has started: in the time
// that the load warp would wait for a free slot.
template <class Traits>
struct KeySource<Traits, true> {
  const Pages& pages;
  const int* const table;  // of the sequence
  const int keys, kv_head;
  int page;  // of the next box

  __device__ __forceinline__ KeySource(const ForwardArguments& args, const TileInfo& tile, int)
      : pages(args.pages),
        table(pages.table + tile.batch * pages.stride),
        keys(tile.keys),
        kv_head(tile.head / args.heads_per_kv) {}

  __device__ __forceinline__ int first_of(int block) const { return block * Traits::kBlock; }
  __device__ __forceinline__ void begin(int last) { page = page_of(first_of(last)); }

  // Page of a box that begins with this key. TMA fills a page outside of the tensor with zeros:
  // there is no entry before the first key, and that of a key beyond the length may be any number.
  __device__ __forceinline__ int page_of(int key) const {
    constexpr int kNoPage = -1;
    return key >= 0 && key < keys ? table[key >> pages.log2_size] : kNoPage;
  }

  __device__ __forceinline__ void load(typename Traits::KeyTile& to, const CUtensorMap* map,
                                       Barrier& full, int key, int next) {
    const int box = page_box_rows(pages, Traits::kBlock);
    full.arrive_expect_bytes(to.kBytes);
#pragma unroll 1
    for (int row = 0; row < Traits::kBlock; row += box) {
      to.load_box(map, full, row, (key + row) & (page_size(pages) - 1), kv_head, page,
                  ptx::kEvictLast);
      const int after = row + box;
      page = page_of(after < Traits::kBlock ? key + after : next);
    }
  }
};

}  // namespace fastattn::attention
