"""Work of thread blocks of the Hopper attention backward: the kernel's own arithmetic (row_range.h,
scheduler.h), compiled for the host.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sm90_plans.shim import Range, compiled

SHIM = """
#include "attention/attention.h"
#include "attention/sm90/backward/layout.h"
#include "attention/sm90/packed_blocks.h"
#include "attention/sm90/masks/row_range.h"
#include "sm90/tile/scheduler.h"
using namespace fastattn;
extern "C" void plan(int first_key, int block_keys, int left, int right, int diagonal, int queries,
                     int keys, int rows, int block_rows, int* result) {
  const auto p = attention::plan_rows(first_key, block_keys, {left, right, diagonal}, queries, keys,
                                      rows, block_rows);
  const int values[] = {p.visited.begin, p.visited.end, p.full.begin, p.full.end,
                        p.clean.begin,   p.clean.end,   p.keys.begin, p.keys.end};
  for (int i = 0; i < 8; ++i) result[i] = values[i];
}
extern "C" void visitors(int row_block, int block_rows, int left, int right, int diagonal,
                         int queries, int keys, int block_keys, int* result) {
  const auto r = attention::visitors(row_block, block_rows, {left, right, diagonal}, queries, keys,
                                     block_keys);
  result[0] = r.begin;
  result[1] = r.end;
}
extern "C" void live_rows(int left, int right, int diagonal, int queries, int keys, int* result) {
  const auto r = attention::rows_of_some({0, keys}, {left, right, diagonal}, queries);
  result[0] = r.begin;
  result[1] = r.end;
}
extern "C" void row_mask(int key, int origin, int left, int right, int diagonal, int queries,
                         int keys, int count, int* result) {
  const auto mask = attention::row_mask(key, origin, {left, right, diagonal}, queries, keys);
  for (int i = 0; i < count; ++i) result[i] = attention::allows(mask, i);
}
extern "C" void next(int head, int row_block, int begin, int end, int* result) {
  const auto step = head < 0 ? attention::first_step({begin, end})
                             : attention::next_step({head, row_block}, {begin, end});
  result[0] = step.head;
  result[1] = step.row_block;
}
extern "C" void place(int blocks, int heads, int swizzle_group, int number, int* result) {
  const auto p = sm90::tile_place({blocks, heads, swizzle_group}, number);
  result[0] = blocks - 1 - p.row_tile;
  result[1] = p.head;
}
extern "C" int packed_blocks(int rows, int sequences, int size) {
  return attention::packed_blocks(rows, sequences, size);
}
extern "C" void packed_block(const int* offsets, int sequences, int size, int number,
                             int* result) {
  result[0] = attention::sequence_of_block(offsets, sequences, size, number);
  result[1] = number - attention::first_block(offsets, result[0], size);
}
extern "C" unsigned scores_offset(int warp, int lane) {
  return attention::scores_offset(warp, lane);
}
extern "C" void sum_element(int number, int* result) {
  const auto e = attention::sum_element(number);
  result[0] = e.row;
  result[1] = e.column;
}
extern "C" unsigned swizzled(unsigned row, unsigned piece) {
  return sm90::swizzled_offset(row, piece);
}
"""


def arithmetic(folder: Path) -> ctypes.CDLL:
    return compiled(folder, SHIM)


@dataclass(frozen=True)
class Config:
    """Rows and keys of a block."""

    rows: int
    keys: int


CONFIGS = {64: Config(128, 128), 128: Config(80, 128), 192: Config(96, 64), 256: Config(64, 64)}


@dataclass(frozen=True)
class Problem:
    M: int
    N: int
    left: int = 1 << 20
    right: int = 1 << 20
    diagonal: int = 0
    lengths: tuple[tuple[int, int], ...] = ((1 << 20, 1 << 20),)  # (queries, keys) per batch entry
    kv_heads: int = 1
    group: int = 1  # query heads of a key/value head
    swizzle_group: int = 1
    head_dim: int = 128

    def sizes(self, batch: int) -> tuple[int, int]:
        queries, keys = self.lengths[batch]
        return min(queries, self.M), min(keys, self.N)

    def allowed(self, batch: int, i: int, j: int) -> bool:
        queries, keys = self.sizes(batch)
        inside = 0 <= i < queries and 0 <= j < keys
        return inside and i + self.diagonal - self.left <= j <= i + self.diagonal + self.right

    @property
    def config(self) -> Config:
        return CONFIGS[self.head_dim]

    @property
    def row_blocks(self) -> int:
        return -(-self.M // self.config.rows)

    @property
    def key_blocks(self) -> int:
        return -(-self.N // self.config.keys)


@dataclass(frozen=True)
class Plan:
    visited: Range
    full: Range
    clean: Range
    keys: Range


@dataclass(frozen=True)
class Work:
    key_block: int
    batch: int
    kv_head: int
    plan: Plan


@dataclass(frozen=True)
class Step:
    """head: query head among those of all batches."""

    head: int
    row_block: int


class Arithmetic:
    """The kernel's own, behind the shim."""

    def __init__(self, native: ctypes.CDLL, problem: Problem):
        self.native, self.problem = native, problem
        self.blocks = problem.key_blocks * problem.kv_heads * len(problem.lengths)

    def work(self, number: int) -> Work:
        p, result = self.problem, (ctypes.c_int * 2)()
        heads = p.kv_heads * len(p.lengths)
        self.native.place(p.key_blocks, heads, p.swizzle_group, number, result)
        batch, kv_head = divmod(result[1], p.kv_heads)
        return Work(result[0], batch, kv_head, self.plan(result[0], batch))

    def plan(self, key_block: int, batch: int) -> Plan:
        p, out = self.problem, (ctypes.c_int * 8)()
        bounds = (p.left, p.right, p.diagonal)
        c = p.config
        self.native.plan(key_block * c.keys, c.keys, *bounds, *p.sizes(batch), p.M, c.rows, out)
        return Plan(*((out[i], out[i + 1]) for i in range(0, 8, 2)))

    def visitors(self, row_block: int, batch: int) -> Range:
        p, out = self.problem, (ctypes.c_int * 2)()
        bounds = (p.left, p.right, p.diagonal)
        c = p.config
        self.native.visitors(row_block, c.rows, *bounds, *p.sizes(batch), c.keys, out)
        return out[0], out[1]

    def live_rows(self, batch: int) -> Range:
        p, out = self.problem, (ctypes.c_int * 2)()
        self.native.live_rows(p.left, p.right, p.diagonal, *p.sizes(batch), out)
        return out[0], out[1]

    def mask(self, key_block: int, row_block: int, batch: int) -> np.ndarray:
        """[keys, rows] of a block, as the consumers' registers are masked."""
        p, c = self.problem, self.problem.config
        out, rows = (ctypes.c_int * c.rows)(), []
        for key in range(key_block * c.keys, (key_block + 1) * c.keys):
            bounds = (p.left, p.right, p.diagonal)
            self.native.row_mask(key, row_block * c.rows, *bounds, *p.sizes(batch), c.rows, out)
            rows.append(list(out))
        return np.array(rows, dtype=bool)

    def steps(self, work: Work) -> Iterator[Step]:
        p, out, at = self.problem, (ctypes.c_int * 2)(), (-1, 0)
        begin, end = work.plan.visited
        for _ in range(p.group * max(end - begin, 0)):
            self.native.next(*at, begin, end, out)
            at = out[0], out[1]
            head = (work.batch * p.kv_heads + work.kv_head) * p.group + at[0]
            yield Step(head, at[1])


PROBLEMS = {
    "one block": Problem(65, 70),
    "several": Problem(300, 400, kv_heads=2),
    "more keys": Problem(170, 400),
    "head dim 64": Problem(300, 300, head_dim=64, kv_heads=2),
    "head dim 192": Problem(300, 200, head_dim=192, kv_heads=2),
    "head dim 256": Problem(200, 200, head_dim=256, kv_heads=2),
    "head dim 192, causal": Problem(200, 200, right=0, head_dim=192, group=2),
    "head dim 256, lengths": Problem(130, 130, head_dim=256, lengths=((130, 65), (70, 130))),
    "grouped queries": Problem(170, 260, group=3, kv_heads=2, swizzle_group=2),
    "no keys": Problem(100, 140, lengths=((100, 0), (0, 140))),
    "lengths": Problem(170, 300, lengths=((170, 130), (0, 300), (1, 300), (90, 0), (129, 257))),
    "causal": Problem(400, 400, right=0, kv_heads=3, swizzle_group=3),
    "bottom right, more keys": Problem(300, 600, right=0, diagonal=300),
    "bottom right, fewer keys": Problem(400, 130, right=0, diagonal=-270),
    "window": Problem(300, 300, left=60, right=0, group=2),
    "window to both sides": Problem(300, 300, left=130, right=70, head_dim=64),
    "only the diagonal": Problem(200, 300, left=0, right=0),
    "window past the end": Problem(400, 100, left=20, right=5),
    "causal lengths": Problem(
        300, 300, right=0, swizzle_group=4, lengths=((300, 130), (0, 300), (70, 300), (200, 0))
    ),
}
