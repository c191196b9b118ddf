"""Work of thread blocks of the Hopper attention forward: the kernel's own arithmetic (key_range.h,
scheduler.h), compiled for the host.
"""

import ctypes
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from sm90_plans.shim import Range, compiled

SHIM = """
#include "attention/key_range.h"
#include "attention/sm90/forward/short_queries.h"
#include "sm90/tile/scheduler.h"
using namespace fastattn;
extern "C" void plan(const int* tile, const int* own, int left, int right, int diagonal,
                     int keys, int block, int skips, int split, int splits, int* result) {
  const auto whole = attention::plan_blocks({tile[0], tile[1]}, {own[0], own[1]},
                                            {left, right, diagonal}, keys, block, skips != 0);
  const auto p = splits > 1 ? attention::split_of(whole, split, splits) : whole;
  const int values[] = {p.loaded.begin, p.loaded.end, p.own.begin,
                        p.own.end,      p.full.begin, p.full.end};
  for (int i = 0; i < 6; ++i) result[i] = values[i];
}
extern "C" void place(int row_tiles, int heads, int swizzle_group, int tile, int* result) {
  const auto p = sm90::tile_place({row_tiles, heads, swizzle_group}, tile);
  result[0] = p.row_tile;
  result[1] = p.head;
}
extern "C" int wants_bounded(int queries, int keys, int head_dim, int value_dim, int right,
                          int sequences) {
  attention::ForwardProblem p = {};
  p.queries = queries;
  p.packing.sequences = sequences;
  p.keys = keys;
  p.head_dim = head_dim;
  p.value_dim = value_dim;
  p.bounds = {queries + keys, right, 0};
  return attention::wants_bounded(p);
}
"""
ROWS = 64


def arithmetic(folder: Path) -> ctypes.CDLL:
    return compiled(folder, SHIM)


@dataclass(frozen=True)
class Config:
    """Config of an instance. skips: a warpgroup skips blocks that only others need."""

    groups: int
    block: int
    skips: bool

    @property
    def tile_rows(self) -> int:
        return ROWS * self.groups


@dataclass(frozen=True)
class Problem:
    M: int
    N: int
    left: int = 1 << 20
    right: int = 1 << 20
    diagonal: int = 0
    lengths: tuple[tuple[int, int], ...] = ((1 << 20, 1 << 20),)  # (queries, keys) per batch entry
    heads: int = 2
    swizzle_group: int = 1
    # The batch entries are packed sequences; bottom_right: their diagonals begin at their ends.
    packed: bool = False
    bottom_right: bool = False
    splits: int = 1  # of the keys of each tile

    def diagonal_of(self, batch: int) -> int:
        queries, keys = self.lengths[batch]
        return keys - queries if self.bottom_right else self.diagonal

    def allowed(self, batch: int, i: int, j: int) -> bool:
        queries, keys = self.lengths[batch]
        inside = 0 <= i < min(queries, self.M) and 0 <= j < min(keys, self.N)
        middle = i + self.diagonal_of(batch)
        return inside and middle - self.left <= j <= middle + self.right


@dataclass(frozen=True)
class Plan:
    loaded: Range
    own: Range
    full: Range


@dataclass(frozen=True)
class Tile:
    number: int
    row: int
    batch: int
    head: int
    queries: int
    keys: int
    split: int = 0


class Arithmetic:
    """The kernel's own, behind the shim."""

    def __init__(self, native: ctypes.CDLL, config: Config, problem: Problem):
        self.native, self.config, self.problem = native, config, problem
        self.row_tiles = -(-problem.M // config.tile_rows)
        self.tiles = self.row_tiles * problem.heads * len(problem.lengths)
        if problem.packed:
            rows = [queries for queries, _ in problem.lengths]
            self.tiles = problem.heads * sum(-(-n // config.tile_rows) for n in rows)
            ends = itertools.accumulate(rows, initial=0)
            self.offsets = (ctypes.c_int * (len(rows) + 1))(*ends)
        self.tiles *= problem.splits

    def tile(self, number: int) -> Tile | None:
        whole, split = divmod(number, self.problem.splits)
        tile = self.whole_tile(whole)
        return None if tile is None else replace(tile, number=number, split=split)

    def whole_tile(self, number: int) -> Tile | None:
        p, result = self.problem, (ctypes.c_int * 2)()
        if p.packed:
            state, count = (ctypes.c_int * 3)(), len(p.lengths)
            self.native.advance(
                state, self.offsets, count, p.heads, self.config.tile_rows, number, None
            )
            if state[0] == count:
                return None
            self.native.place(state[2], p.heads, p.swizzle_group, number - state[1], result)
            row = result[0] * self.config.tile_rows
            return Tile(number, row, state[0], result[1], *p.lengths[state[0]])
        if number >= self.tiles // p.splits:
            return None
        self.native.place(self.row_tiles, p.heads * len(p.lengths), p.swizzle_group, number, result)
        batch, head = divmod(result[1], p.heads)
        queries, keys = p.lengths[batch]
        row = result[0] * self.config.tile_rows
        return Tile(number, row, batch, head, min(queries, p.M), min(keys, p.N))

    def plan(self, tile: Tile, group: int) -> Plan:
        c, p, pair, out = self.config, self.problem, ctypes.c_int * 2, (ctypes.c_int * 6)()
        row = tile.row + group * ROWS
        rows = pair(tile.row, min(tile.row + c.tile_rows, tile.queries))
        own = pair(row, min(row + ROWS, tile.queries))
        diagonal = p.diagonal_of(tile.batch)
        self.native.plan(
            rows, own, p.left, p.right, diagonal, tile.keys, c.block, int(c.skips), tile.split,
            p.splits, out,
        )  # fmt: skip
        return Plan((out[0], out[1]), (out[2], out[3]), (out[4], out[5]))


# Bounded, by head dim.
CONFIGS = {
    64: Config(3, 128, True),
    128: Config(2, 128, False),
    192: Config(2, 112, True),
    256: Config(2, 80, True),
}
