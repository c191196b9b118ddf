"""Blocks of the Hopper attention backward: the kernel's own arithmetic, compiled for the host."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

from sm90_plans.shim import Range, compiled

SHIM = """
#include "attention/attention.h"
#include "attention/sm90/packed_blocks.h"
#include "attention/sm90/masks/row_range.h"
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
extern "C" int packed_blocks(int rows, int sequences, int size) {
  return attention::packed_blocks(rows, sequences, size);
}
extern "C" void packed_block(const int* offsets, int sequences, int size, int number,
                             int* result) {
  result[0] = attention::sequence_of_block(offsets, sequences, size, number);
  result[1] = number - attention::first_block(offsets, result[0], size);
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


class Arithmetic:
    """The kernel's own, behind the shim."""

    def __init__(self, native: ctypes.CDLL, problem: Problem):
        self.native, self.problem = native, problem

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
