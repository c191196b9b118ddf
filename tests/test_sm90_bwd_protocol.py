"""The barriers of the Hopper attention backward, played through without a GPU.

As test_sm90_protocol.py does for the forward: every warp of attention_bwd_sm90.cuh is a coroutine,
copies and additions finish whenever chance has it, and only as many thread blocks run at once as
the GPU has room for. Checked besides: the blocks of keys add to a block of rows in their order,
each once, and none waits for one that has not begun. What a thread block visits comes from the
kernel's own headers, which are checked against the definition.
"""

import ctypes
import itertools
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sm90_protocol import Barrier, Buffer, NamedBarrier, Position, Role, Slot
from torch import Tensor

from fastattn.ops.attention import sm90

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SHIM = """
#include "attention/attention.h"
#include "attention/backward_layout.h"
#include "attention/packed_blocks.h"
#include "attention/row_range.h"
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
extern "C" void place(int blocks, int heads, int section, int number, int* result) {
  const auto p = sm90::tile_place({blocks, heads, section}, number);
  result[0] = blocks - 1 - p.row_tile;
  result[1] = p.head;
}
extern "C" long long mask_words(int batches, int heads, int mask_keys, int batch, int split,
                                int queries, int keys, int head_dim) {
  return attention::backward_mask_words(attention::backward_mask_layout(
      batches, heads, mask_keys, batch, split, queries, keys, head_dim));
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
WARPS = 4
Range = tuple[int, int]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.cpp", folder / "shim.so"
    source.write_text(SHIM)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", "-o", library, source]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


# -- the problem ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """A row of backward_config. keys: of a block. splits_keys: weights stay in registers."""

    groups: int
    rows: int
    stages: int
    keys: int
    splits_keys: bool


CONFIGS = {
    64: Config(2, 128, 2, 128, True),
    128: Config(2, 80, 2, 128, True),
    192: Config(3, 96, 1, 64, False),
    256: Config(2, 64, 1, 64, False),
}


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
    section: int = 1
    resident: int = 2  # thread blocks that run at once
    ordered: bool = True
    head_dim: int = 128
    # Blocks of (keys, rows) that a dense mask empties, by the remainder of their numbers.
    empty: tuple[tuple[int, int], ...] = ()

    def is_empty(self, key_block: int, row_block: int) -> bool:
        return (key_block % 3, row_block % 3) in self.empty

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
        self.native.place(p.key_blocks, heads, p.section, number, result)
        batch, kv_head = divmod(result[1], p.kv_heads)
        return Work(result[0], batch, kv_head, self.plan(result[0], batch))

    def plan(self, key_block: int, batch: int) -> Plan:
        p, out = self.problem, (ctypes.c_int * 8)()
        band = (p.left, p.right, p.diagonal)
        c = p.config
        self.native.plan(key_block * c.keys, c.keys, *band, *p.sizes(batch), p.M, c.rows, out)
        return Plan(*((out[i], out[i + 1]) for i in range(0, 8, 2)))

    def visitors(self, row_block: int, batch: int) -> Range:
        p, out = self.problem, (ctypes.c_int * 2)()
        band = (p.left, p.right, p.diagonal)
        c = p.config
        self.native.visitors(row_block, c.rows, *band, *p.sizes(batch), c.keys, out)
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
            band = (p.left, p.right, p.diagonal)
            self.native.row_mask(key, row_block * c.rows, *band, *p.sizes(batch), c.rows, out)
            rows.append(list(out))
        return np.array(rows, dtype=bool)

    def steps(self, work: Work) -> Iterator[Step]:
        p, out, at = self.problem, (ctypes.c_int * 2)(), (-1, 0)
        begin, end = work.plan.visited
        for _ in range(p.group * max(end - begin, 0)):
            self.native.next(*at, begin, end, out)
            at = out[0], out[1]
            head = (work.batch * p.kv_heads + work.kv_head) * p.group + at[0]
            if not p.is_empty(work.key_block, at[1]):
                yield Step(head, at[1])

    def rank(self, key_block: int, row_block: int, batch: int) -> int:
        """How many blocks of keys add to a block of rows before this one."""
        first = self.visitors(row_block, batch)[0]
        before = range(first, key_block)
        return sum(not self.problem.is_empty(n, row_block) for n in before)


# -- roles ----------------------------------------------------------------------------------------
class ThreadBlock:
    def __init__(self, world: "World", index: int):
        self.world, self.arithmetic = world, world.arithmetic
        c = self.config = world.problem.config
        self.work = self.arithmetic.work(world.draw(index))
        self.k, self.v = Buffer(), Buffer()
        self.kv_full = Barrier(2, "kv.full")
        stages, groups = range(c.stages), range(c.groups)
        self.q, self.dout = [Buffer() for _ in stages], [Buffer() for _ in stages]
        self.lse2, self.delta = [Buffer() for _ in stages], [Buffer() for _ in stages]
        # What each warp of each warpgroup has written of dS and P.
        self.ds = [[[Buffer() for _ in range(WARPS)] for _ in groups] for _ in stages]
        self.p = [[Buffer() for _ in range(WARPS)] for _ in groups]
        self.dq = [Buffer() for _ in groups]
        self.q_slots = [Slot(f"q{i}", 2, c.groups) for i in stages]
        self.dout_slots = [Slot(f"dout{i}", 2, c.groups) for i in stages]
        self.dq_slots = [Slot(f"dq{g}", WARPS, 1) for g in groups]
        self.scores = NamedBarrier(c.groups * WARPS)
        self.meetings = [NamedBarrier(WARPS) for _ in groups]
        self.issued = [[0] * WARPS for _ in groups]

    def roles(self) -> Iterator[Role]:
        if any(True for _ in self.arithmetic.steps(self.work)):
            yield self.load()
            for g in range(self.config.groups):
                yield self.add_dq(g)
        for g, w in itertools.product(range(self.config.groups), range(WARPS)):
            yield Consumer(self, g, w).run()

    def copy(self, buffer: Buffer, content: object, full: Barrier) -> None:
        assert buffer.readers == 0 and not buffer.writing, (
            f"{buffer.holds} overwritten by {content}"
        )
        buffer.writing, buffer.holds = True, None
        full.arrive(1)

        def land() -> None:
            buffer.writing, buffer.holds = False, content
            full.deliver(1)

        self.world.events.append(land)

    def load(self) -> Role:
        self.copy(self.k, "k", self.kv_full)
        self.copy(self.v, "v", self.kv_full)
        stage = Position(self.config.stages)
        for step in self.arithmetic.steps(self.work):
            s = stage.index
            yield stage.empty(self.q_slots[s])
            self.copy(self.q[s], ("q", step), self.q_slots[s].full)
            self.copy(self.lse2[s], ("lse2", step), self.q_slots[s].full)
            yield stage.empty(self.dout_slots[s])
            self.copy(self.dout[s], ("dout", step), self.dout_slots[s].full)
            self.copy(self.delta[s], ("delta", step), self.dout_slots[s].full)
            stage.advance()

    def add_dq(self, group: int) -> Role:
        position, slot, buffer = Position(1), self.dq_slots[group], self.dq[group]
        for step in self.arithmetic.steps(self.work):
            yield position.full(slot)
            chunk = (step.head, step.row_block, group)
            rank = self.arithmetic.rank(self.work.key_block, step.row_block, self.work.batch)
            if self.world.problem.ordered:
                yield lambda chunk=chunk, rank=rank: self.world.turns.get(chunk, 0) == rank
            assert buffer.holds == step
            buffer.readers += 1
            added = self.world.add(chunk, self.work.key_block)
            yield added.has_read
            buffer.readers -= 1
            slot.empty.arrive()
            if self.world.problem.ordered:
                yield added.is_complete
                self.world.turns[chunk] = rank + 1
            position.advance()


class Consumer:
    """One warp of a consumer warpgroup. Warp 0, the leader, stands for what the warpgroup reads."""

    def __init__(self, block: ThreadBlock, group: int, warp: int):
        self.block, self.group, self.warp, self.config = block, group, warp, block.config
        self.stage, self.dq_position = Position(self.config.stages), Position(1)
        self.flying: list[tuple[int, list[Buffer]]] = []
        self.count = 0

    def run(self) -> Role:
        b = self.block
        steps = list(b.arithmetic.steps(b.work))
        if steps:
            yield partial(b.kv_full.passed, 0, 0)
            if b.work.plan.keys != (0, self.config.keys):
                yield from self.meet(b.meetings[self.group])
        for step in steps:
            yield from self.take_rows(step)
        if self.warp == 0:
            b.world.write(b.work, self.group)

    def take_rows(self, step: Step) -> Role:
        b, s = self.block, self.stage.index
        if not b.work.plan.clean[0] <= step.row_block < b.work.plan.clean[1]:
            yield self.stage.full(b.q_slots[s])
            yield self.stage.full(b.dout_slots[s])
            assert b.q[s].holds == ("q", step) and b.dout[s].holds == ("dout", step)
            yield from self.meet(b.meetings[self.group])
        yield self.stage.full(b.q_slots[s])
        self.issue([(b.k, "k"), (b.q[s], ("q", step))])
        yield self.stage.full(b.dout_slots[s])
        self.issue([(b.v, "v"), (b.dout[s], ("dout", step))])
        yield from self.finish(1)
        assert b.lse2[s].holds == ("lse2", step)
        yield from self.finish(0)
        assert b.delta[s].holds == ("delta", step)
        if self.config.splits_keys:
            self.store(b.ds[s], step)
            yield None
            self.issue([(b.dout[s], ("dout", step))])
            yield from self.show_scores()
        else:
            self.store(b.p, step)
            self.store(b.ds[s], step)
            yield None
            yield from self.show_scores()
            self.issue([(b.dout[s], ("dout", step)), *self.all_of(b.p, step)])
        self.issue([(b.k, "k"), *self.all_of(b.ds[s], step)])
        yield from self.finish(1)
        self.release(b.dout_slots[s])
        scores = [] if self.config.splits_keys else self.all_of(b.ds[s], step)
        self.issue([(b.q[s], ("q", step)), *scores])
        yield from self.finish(1)
        yield self.dq_position.empty(b.dq_slots[self.group])
        assert b.dq[self.group].readers == 0, "dQ overwritten while it is added"
        b.dq[self.group].holds = step
        yield None
        b.dq_slots[self.group].full.arrive()
        self.dq_position.advance()
        yield from self.finish(0)
        self.release(b.q_slots[s])
        self.stage.advance()

    def store(self, pieces: list[list[Buffer]], step: Step) -> None:
        own = pieces[self.group][self.warp]
        assert own.readers == 0, "scores overwritten while products read them"
        own.holds = step

    @staticmethod
    def all_of(pieces: list[list[Buffer]], step: Step) -> list[tuple[Buffer, object]]:
        return [(piece, step) for group in pieces for piece in group]

    def show_scores(self) -> Role:
        yield from self.meet(self.block.scores)

    @staticmethod
    def meet(barrier: NamedBarrier) -> Role:
        generation = barrier.arrive()
        yield partial(barrier.passed, generation)

    def issue(self, reads: list[tuple[Buffer, object]]) -> None:
        if self.warp == 0:
            for buffer, content in reads:
                assert buffer.holds == content, f"{buffer.holds} read, {content} wanted"
                buffer.readers += 1
        self.count += 1
        self.block.issued[self.group][self.warp] = self.count
        self.flying.append((self.count, [buffer for buffer, _ in reads]))

    def finish(self, pending: int) -> Role:
        """wgmma.wait_group: products are complete once all four warps have issued them."""
        while len(self.flying) > pending:
            number, buffers = self.flying[0]
            yield lambda number=number: min(self.block.issued[self.group]) >= number
            if self.warp == 0:
                for buffer in buffers:
                    buffer.readers -= 1
            self.flying.pop(0)

    def release(self, slot: Slot) -> None:
        if self.warp == 0:
            slot.empty.arrive()


class Addition:
    """A bulk addition: first it has read its shared memory, then it is complete."""

    def __init__(self) -> None:
        self.progress = 0

    def has_read(self) -> bool:
        return self.progress > 0

    def is_complete(self) -> bool:
        return self.progress > 1


class World:
    """Global memory, time and chance."""

    def __init__(self, arithmetic: Arithmetic, seed: int):
        self.arithmetic, self.problem = arithmetic, arithmetic.problem
        self.chance = random.Random(seed)
        self.events: list[Callable[[], None]] = []
        self.turns: dict[tuple[int, int, int], int] = {}
        self.added: dict[tuple[int, int, int], list[int]] = {}
        self.running: dict[tuple[int, int, int], Addition] = {}
        self.written: set[tuple[Work, int]] = set()
        self.counter = 0

    def draw(self, index: int) -> int:
        del index  # thread blocks may begin in any order: the counter numbers them
        self.counter += 1
        return self.counter - 1

    def add(self, chunk: tuple[int, int, int], key_block: int) -> Addition:
        before = self.running.get(chunk)
        if self.problem.ordered:
            assert before is None or before.is_complete(), "added before the last one was complete"
        self.added.setdefault(chunk, []).append(key_block)
        addition = self.running[chunk] = Addition()

        def advance() -> None:
            addition.progress += 1
            if addition.progress == 1:
                self.events.append(advance)

        self.events.append(advance)
        return addition

    def write(self, work: Work, group: int) -> None:
        assert (work, group) not in self.written
        self.written.add((work, group))

    def play(self) -> None:
        waiting = list(range(self.arithmetic.blocks))
        resident: list[list[list]] = []
        patience: dict[int, int] = {}
        while waiting or resident:
            while waiting and len(resident) < self.problem.resident:
                block = ThreadBlock(self, waiting.pop(0))
                # Some warps are slow in this run.
                resident.append([[role, None] for role in block.roles()])
                for entry in resident[-1]:
                    patience[id(entry)] = self.chance.choice((1, 1, 1, 8, 60))
            live = [(roles, entry) for roles in resident for entry in roles]
            ready = [(roles, e) for roles, e in live if e[1] is None or e[1]()]
            if self.events and (not ready or self.chance.random() < 0.2):
                self.events.pop(self.chance.randrange(len(self.events)))()
                continue
            assert ready, "waiting for ever"
            roles, entry = self.chance.choice(ready)
            if self.chance.randrange(patience[id(entry)]) and len(ready) > 1:
                continue
            try:
                entry[1] = next(entry[0])
            except StopIteration:
                roles.remove(entry)
                if not roles:
                    resident.remove(roles)
        self.check()

    def check(self) -> None:
        p = self.problem
        c = p.config
        assert len(self.written) == self.arithmetic.blocks * c.groups
        for batch, head, row_block in itertools.product(
            range(len(p.lengths)), range(p.kv_heads * p.group), range(p.row_blocks)
        ):
            expected = [
                n
                for n in range(p.key_blocks)
                if not p.is_empty(n, row_block)
                and any(
                    p.allowed(batch, i, j)
                    for i in range(row_block * c.rows, (row_block + 1) * c.rows)
                    for j in range(n * c.keys, (n + 1) * c.keys)
                )
            ]
            for g in range(c.groups):
                chunk = (batch * p.kv_heads * p.group + head, row_block, g)
                found = self.added.get(chunk, [])
                assert (found if p.ordered else sorted(found)) == expected


# -- tests ----------------------------------------------------------------------------------------
PROBLEMS = {
    "one block": Problem(65, 70),
    "several": Problem(300, 400, kv_heads=2, resident=3),
    "one at a time": Problem(170, 400, resident=1),
    "head dim 64": Problem(300, 300, head_dim=64, kv_heads=2),
    "head dim 192": Problem(300, 200, head_dim=192, kv_heads=2),
    "head dim 256": Problem(200, 200, head_dim=256, kv_heads=2),
    "head dim 192, causal": Problem(200, 200, right=0, head_dim=192, group=2, resident=3),
    "head dim 256, lengths": Problem(130, 130, head_dim=256, lengths=((130, 65), (70, 130))),
    "in any order": Problem(200, 400, ordered=False, resident=3),
    "grouped queries": Problem(170, 260, group=3, kv_heads=2, section=2),
    "no keys": Problem(100, 140, lengths=((100, 0), (0, 140))),
    "lengths": Problem(170, 300, lengths=((170, 130), (0, 300), (1, 300), (90, 0), (129, 257))),
    "causal": Problem(400, 400, right=0, kv_heads=3, section=3, resident=4),
    "causal, all at once": Problem(300, 600, right=0, diagonal=300, resident=5),
    "bottom right, fewer keys": Problem(400, 130, right=0, diagonal=-270),
    "window": Problem(300, 300, left=60, right=0, group=2),
    "window to both sides": Problem(300, 300, left=130, right=70, head_dim=64),
    "only the diagonal": Problem(200, 300, left=0, right=0),
    "window past the end": Problem(400, 100, left=20, right=5),
    "causal lengths": Problem(
        300, 300, right=0, section=4, lengths=((300, 130), (0, 300), (70, 300), (200, 0))
    ),
}


# Blocks of keys pass over blocks of rows, and their turns with them.
DENSE = {
    "dense mask": Problem(
        400, 500, group=2, resident=3, empty=((0, 0), (1, 2), (2, 0), (2, 2), (0, 2))
    ),
    "dense mask, one at a time": Problem(400, 500, resident=1, right=0, empty=((0, 1), (1, 1))),
}


@pytest.mark.parametrize("problem", PROBLEMS | DENSE)
def test_protocol(native: ctypes.CDLL, problem: str) -> None:
    for seed in range(2):
        World(Arithmetic(native, (PROBLEMS | DENSE)[problem]), seed).play()


def test_model_notices_a_turn_of_nobody(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of keys that passes over waits for none, and nobody waits for it."""

    def counts_all(self: Arithmetic, key_block: int, row_block: int, batch: int) -> int:
        return key_block - self.visitors(row_block, batch)[0]

    monkeypatch.setattr(Arithmetic, "rank", counts_all)
    _notices(native, DENSE["dense mask"])


def _notices(native: ctypes.CDLL, problem: Problem) -> None:
    with pytest.raises(AssertionError):
        for seed in range(20):
            World(Arithmetic(native, problem), seed).play()


def test_model_notices_a_missing_barrier(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ reads what the other warpgroup has not written yet."""

    def careless(self: Consumer) -> Role:
        yield None

    monkeypatch.setattr(Consumer, "show_scores", careless)
    _notices(native, PROBLEMS["several"])


def test_model_notices_a_single_buffer_of_scores(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One barrier a step is enough only for two buffers of dS."""
    make = ThreadBlock.__init__

    def shared(self: ThreadBlock, world: World, index: int) -> None:
        make(self, world, index)
        self.ds[1] = self.ds[0]

    monkeypatch.setattr(ThreadBlock, "__init__", shared)
    _notices(native, PROBLEMS["several"])


def test_model_notices_shared_weights_beside_two_stages(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer of P is enough only where one buffer of Q says that it has been read."""
    monkeypatch.setitem(CONFIGS, 192, Config(3, 96, 2, 64, False))
    _notices(native, PROBLEMS["head dim 192"])


def test_model_notices_an_order_against_the_turns(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last keys first: the only running thread block waits for one that has not begun."""
    forwards = Arithmetic.work

    def backwards(self: Arithmetic, number: int) -> Work:
        return forwards(self, self.blocks - 1 - number)

    monkeypatch.setattr(Arithmetic, "work", backwards)
    _notices(native, PROBLEMS["one at a time"])


def test_plans_against_the_definition(native: ctypes.CDLL) -> None:
    sizes, limits = (1, 63, 200, 390), (0, 1, 50, 200, 1 << 20)
    chance = random.Random(0)
    cases = list(itertools.product(sizes, sizes, limits, limits, (False, True), CONFIGS))
    for M, N, left, right, bottom, head_dim in chance.sample(cases, 60):
        lengths = ((M, N), (chance.randint(0, M), chance.randint(0, N)))
        p = Problem(M, N, left, right, N - M if bottom else 0, lengths, head_dim=head_dim)
        arithmetic = Arithmetic(native, p)
        for batch in range(len(lengths)):
            pairs = [[p.allowed(batch, i, j) for j in range(N)] for i in range(M)]
            for n in range(p.key_blocks):
                _check_plan(p, batch, pairs, n, arithmetic)


def _check_plan(
    p: Problem, batch: int, pairs: list[list[bool]], n: int, arithmetic: Arithmetic
) -> None:
    """pairs: [M][N], what is allowed by definition."""
    plan, queries = arithmetic.plan(n, batch), p.sizes(batch)[0]
    c = p.config
    own = range(n * c.keys, min((n + 1) * c.keys, p.N))
    live_keys = {j - n * c.keys for j in own if any(row[j] for row in pairs)}
    visited = set()
    for m in range(p.row_blocks):
        rows = range(m * c.rows, min((m + 1) * c.rows, p.M))
        if not any(pairs[i][j] for i in rows for j in own):
            continue
        visited.add(m)
        begin, end = arithmetic.visitors(m, batch)
        assert begin <= n < end
        computed = [i for i in rows if i < queries]
        whole = len(own) == c.keys and all(pairs[i][j] for i in computed for j in own)
        assert (plan.full[0] <= m < plan.full[1]) == whole
        alive = all(any(pairs[i]) for i in rows)
        assert (plan.clean[0] <= m < plan.clean[1]) == alive
    assert set(range(*plan.visited)) == visited
    if visited:  # no keys are read otherwise
        assert set(range(*plan.keys)) == live_keys


def _block(x: np.ndarray, index: int, size: int, live: Range) -> np.ndarray:
    """Rows of a block as products see them: 0 past the end and where nothing may be read."""
    block = np.zeros((size, x.shape[1]))
    rows = x[index * size : (index + 1) * size]
    block[: len(rows)] = rows
    block[: live[0]], block[live[1] :] = 0, 0
    return block


def _walk(arithmetic: Arithmetic, x: dict[str, np.ndarray], scale: float) -> dict[str, np.ndarray]:
    """The gradients by the kernel's steps; x: q, k, v, dout, lse, delta, [B, heads, rows, ...]."""
    p, c = arithmetic.problem, arithmetic.problem.config
    # Nothing is there before the first block of keys has stored it.
    dq = np.full((*x["q"].shape[:2], p.row_blocks * c.rows, x["q"].shape[3]), np.nan)
    dk, dv = np.full_like(x["k"], np.nan), np.full_like(x["v"], np.nan)
    every = (0, 1 << 30)
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(arithmetic.blocks):
            w = arithmetic.work(number)
            live = arithmetic.live_rows(w.batch)
            k, v = (
                _block(x[n][w.batch, w.kv_head], w.key_block, c.keys, w.plan.keys) for n in "kv"
            )
            sum_k, sum_v = np.zeros_like(k), np.zeros_like(v)
            for step in arithmetic.steps(w):
                m, head = step.row_block, step.head - w.batch * x["q"].shape[1]
                clean = w.plan.clean[0] <= m < w.plan.clean[1]
                own = every if clean else (max(live[0] - m * c.rows, 0), live[1] - m * c.rows)
                q, dout = (_block(x[n][w.batch, head], m, c.rows, own) for n in ("q", "dout"))
                rows = np.arange(m * c.rows, (m + 1) * c.rows)
                dead = (rows < live[0]) | (rows >= live[1])
                at = np.minimum(rows, p.M - 1)
                lse = np.where(dead, np.inf, x["lse"][w.batch, head, at])
                delta = np.where(dead, 0, x["delta"][w.batch, head, at])
                weights = np.exp(k @ q.T * scale - lse)
                ds = weights * (v @ dout.T - delta)
                if not w.plan.full[0] <= m < w.plan.full[1]:
                    allowed = arithmetic.mask(w.key_block, m, w.batch)
                    weights, ds = np.where(allowed, weights, 0), np.where(allowed, ds, 0)
                sum_v += weights @ dout
                sum_k += ds @ q
                first = arithmetic.visitors(m, w.batch)[0] == w.key_block
                part = dq[w.batch, head, m * c.rows : (m + 1) * c.rows]
                part[:] = ds.T @ k + (0 if first else part)
            keys = slice(w.key_block * c.keys, min((w.key_block + 1) * c.keys, p.N))
            dk[w.batch, w.kv_head, keys] = sum_k[: keys.stop - keys.start] * scale
            dv[w.batch, w.kv_head, keys] = sum_v[: keys.stop - keys.start]
    for batch, m in itertools.product(range(len(p.lengths)), range(p.row_blocks)):
        begin, end = arithmetic.visitors(m, batch)
        if begin >= end:
            dq[batch, :, m * c.rows : (m + 1) * c.rows] = 0
    return {"dq": dq[:, :, : p.M] * scale, "dk": dk, "dv": dv}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_walk_gives_the_gradients(native: ctypes.CDLL, problem: str) -> None:
    """Plans, masks and zeroing together, with NaN wherever nothing may be read."""
    p, chance, D = PROBLEMS[problem], np.random.default_rng(0), 4
    B, H, K, scale = len(p.lengths), p.kv_heads * p.group, p.kv_heads, -0.7
    q, dout = (chance.standard_normal((B, H, p.M, D)) for _ in range(2))
    k, v = (chance.standard_normal((B, K, p.N, D)) for _ in range(2))
    allowed = np.array(
        [[[p.allowed(b, i, j) for j in range(p.N)] for i in range(p.M)] for b in range(B)]
    )[:, None]
    dead_rows, dead_keys = ~allowed.any(3)[..., None], ~allowed.any(2)[..., None]
    keys, values = (x.repeat(p.group, 1) for x in (k, v))
    scores = np.where(allowed, q @ keys.swapaxes(2, 3) * scale, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(scores).sum(3))
        weights = np.where(allowed, np.exp(scores - lse[..., None]), 0)
    dlse = chance.standard_normal(lse.shape)
    delta = ((weights @ values) * dout).sum(3) - dlse
    ds = weights * (dout @ values.swapaxes(2, 3) - delta[..., None])
    expected = {"dq": ds @ keys * scale}
    for name, pairs in (
        ("dk", ds.swapaxes(2, 3) @ q * scale),
        ("dv", weights.swapaxes(2, 3) @ dout),
    ):
        expected[name] = pairs.reshape(B, K, p.group, p.N, D).sum(2)
    x = {"lse": lse, "delta": delta}
    for name, value, dead in (
        ("q", q, dead_rows),
        ("dout", dout, dead_rows),
        ("k", k, dead_keys),
        ("v", v, dead_keys),
    ):
        x[name] = np.where(dead, np.nan, value)
    x["lse"] = np.where(dead_rows[..., 0], -np.inf, lse)
    found = _walk(Arithmetic(native, p), x, scale)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-9, err_msg=name)
        nothing = np.broadcast_to(dead_rows if name == "dq" else dead_keys, value.shape)
        assert (found[name][nothing] == 0).all()


@pytest.mark.parametrize(("blocks", "heads", "section"), [(1, 1, 1), (5, 7, 1), (5, 7, 4)])
def test_first_keys_come_first(native: ctypes.CDLL, blocks: int, heads: int, section: int) -> None:
    """What a block of keys waits for in its turn has a smaller number."""
    result, places = (ctypes.c_int * 2)(), []
    for number in range(blocks * heads):
        native.place(blocks, heads, section, number, result)
        places.append((result[0], result[1]))
    assert sorted(places) == sorted(itertools.product(range(blocks), range(heads)))
    for head in range(heads):
        assert [n for n, h in places if h == head] == list(range(blocks))


@pytest.mark.parametrize(
    "lengths", [[], [0], [1], [80], [65, 0, 130, 1, 64], [0, 0, 79, 81, 160, 0], [7] * 50]
)
@pytest.mark.parametrize(("size", "slack"), [(64, 0), (80, 1), (128, 300)])
def test_every_block_of_packed_sequences_has_a_number(
    native: ctypes.CDLL, lengths: list[int], size: int, slack: int
) -> None:
    """Those of the rows behind the last sequence too, and at most one a sequence holds nothing."""
    offsets, sequences = [0, *itertools.accumulate(lengths)], len(lengths)
    rows, result = offsets[-1] + slack, (ctypes.c_int * 2)()
    found = []
    for number in range(native.packed_blocks(rows, sequences, size)):
        native.packed_block(
            (ctypes.c_int * len(offsets))(*offsets), sequences, size, number, result
        )
        found.append((result[0], result[1]))
    assert found == sorted(set(found))
    for sequence, count in enumerate([*lengths, slack]):
        blocks = [block for owner, block in found if owner == sequence]
        assert blocks == list(range(len(blocks)))
        assert -(-count // size) <= len(blocks) <= -(-count // size) + 1


def test_scores_reach_the_layout_that_wgmma_reads(native: ctypes.CDLL) -> None:
    """stmatrix.trans of a warp's 16 x 16 piece of dS^T: rows are queries, keys contiguous."""
    for warp in range(WARPS):
        for matrix in range(4):
            # Registers of the accumulator: keys 0 to 7 or 8 to 15, queries 0 to 7 or 8 to 15.
            first_key, first_query = 16 * warp + matrix % 2 * 8, matrix // 2 * 8
            for row in range(8):
                expected = native.swizzled(first_query + row, first_key // 8)
                assert native.scores_offset(warp, 8 * matrix + row) == expected


def test_sums_of_dq_keep_every_element(native: ctypes.CDLL) -> None:
    """The finishing kernel finds each element where a thread of the accumulator's layout put it."""
    columns, result = 80, (ctypes.c_int * 2)()
    elements = {}
    for thread, register in itertools.product(range(128), range(columns // 2)):
        lane = thread % 32
        row = thread // 32 * 16 + lane // 4 + register % 4 // 2 * 8
        column = register // 4 * 8 + lane % 4 * 2 + register % 2
        elements[(register // 4 * 128 + thread) * 4 + register % 4] = (row, column)
    assert sorted(elements) == list(range(64 * columns))
    for number, element in elements.items():
        native.sum_element(number, result)
        assert (result[0], result[1]) == element


def _arguments(M: int, D: int, E: int | None = None, N: int = 70, **given: object) -> list[object]:
    """The arguments of attention_bwd, in the schema's order."""
    q, k = (torch.empty(2, 3, n, D, dtype=torch.bfloat16) for n in (M, N))
    v = k.new_empty(2, 3, N, D if E is None else E)
    names = {"dout": None, "dlse": None, "q": q, "k": k, "v": v, "mask": None, "mask_tiles": None,
             "key_lengths": None, "query_lengths": None, "out": None, "lse": None, "causal": 0,
             "window_left": -1, "window_right": -1, "scale": 1.0, "dropout_p": 0.0,
             "dropout_seed": None, "dropout_stream": 0,
             "needs": (True, True, True, False)}  # fmt: skip
    return list((names | given).values())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    refuses = sm90.attention_bwd_unsupported
    assert refuses(*_arguments(65, 64)) is None
    assert refuses(*_arguments(65, 256, 8, key_lengths=torch.ones(2))) is None
    mask = torch.ones(1, 1, 65, 70)
    assert refuses(*_arguments(65, 64, mask=mask.bool())) is None
    assert "dense mask" in refuses(*_arguments(65, 64, mask=mask.bool(), dropout_p=0.1))
    assert refuses(*_arguments(65, 64, mask=mask)) is None
    needed = (True, True, True, True)
    assert refuses(*_arguments(65, 64, mask=mask.bfloat16(), needs=needed)) is None
    assert "torch.float32" in refuses(*_arguments(65, 64, mask=mask, needs=needed))
    for stride, refused in (((1 << 40, 0, 70, 1), False), ((0, 0, 1 << 28, 1), True)):
        far = torch.empty_strided((2, 1, 65, 70), stride, device="meta")
        assert ("strides" in (refuses(*_arguments(65, 64, mask=far)) or "")) == refused
    assert refuses(*_arguments(65, 64, dropout_p=0.1)) is None
    assert "[2, 65]" in refuses(*_arguments(65, 64, key_lengths=torch.ones(2, 65)))
    assert "got 264" in refuses(*_arguments(65, 264))


def _packed_arguments(T: int, D: int, sequences: int, **given: object) -> list[object]:
    """Those of attention_varlen_bwd."""
    q, k = (torch.empty(n, 3, D, dtype=torch.bfloat16) for n in (T, 70))
    offsets = torch.zeros(sequences + 1, dtype=torch.int32)
    names = {"dout": None, "dlse": None, "q": q, "k": k, "v": k, "cu_seqlens_q": offsets,
             "cu_seqlens_k": offsets, "out": None, "lse": None, "max_seqlen_q": 9,
             "max_seqlen_k": 9, "causal": 0, "window_left": -1, "window_right": -1, "scale": 1.0,
             "dropout_p": 0.0, "dropout_seed": None, "dropout_stream": 0,
             "needs": (True, True, True)}  # fmt: skip
    return list((names | given).values())


def test_packed_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "unavailable", lambda: None)
    refuses = sm90.attention_varlen_bwd_unsupported
    assert refuses(*_packed_arguments(65, 64, 3)) is None
    assert refuses(*_packed_arguments(65, 64, 3, dropout_p=0.1)) is None
    assert "got 264" in refuses(*_packed_arguments(65, 264, 3))


@pytest.mark.parametrize("M", [1, 63, 64, 65, 80, 96, 128, 129, 1000, 4097])
@pytest.mark.parametrize("sequences", [0, 1, 7])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_workspace_holds_every_block(
    native: ctypes.CDLL, M: int, sequences: int, dropout_p: float
) -> None:
    drops = {"dropout_p": dropout_p}
    for head_dim, c in CONFIGS.items():
        if sequences:
            workspace = sm90.attention_varlen_bwd_workspace(
                *_packed_arguments(M, head_dim, sequences, **drops)
            )
            blocks, heads = native.packed_blocks(M, sequences, c.rows), 3
        else:
            workspace = sm90.attention_bwd_workspace(*_arguments(M, head_dim, **drops))
            blocks, heads = -(-M // c.rows), 2 * 3
        statistics, dq_sum, turns = (shape for shape, _, _ in workspace)
        # lse, delta, and a word for every two rows.
        assert 2 * statistics[0] >= (5 if dropout_p else 4) * heads * blocks * c.rows
        assert dq_sum[0] * dq_sum[1] >= heads * blocks * c.rows * head_dim
        assert turns[0] >= 1 + heads * blocks * c.groups


@pytest.mark.parametrize("shape", [(2, 3, 65, 270), (2, 1, 1, 270), (1, 3, 65, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("lengths", [None, torch.ones(2)])
def test_workspace_of_a_mask(
    native: ctypes.CDLL, shape: tuple[int, ...], lengths: Tensor | None
) -> None:
    """Python allocates what the kernels lay out."""
    native.mask_words.restype = ctypes.c_longlong
    mask = torch.ones(shape, dtype=torch.bool)
    for head_dim in (8, 64, 96, 128, 192, 256):
        arguments = _arguments(65, head_dim, N=270, mask=mask, key_lengths=lengths)
        (words,), dtype, zeroed = sm90.attention_bwd_workspace(*arguments)[-1]
        split = lengths is not None
        B, H, _, keys = shape
        assert words == native.mask_words(B, H, keys, 2, split, 65, 270, head_dim)
        assert (dtype, zeroed) == (torch.int32, False)


@pytest.mark.parametrize(
    ("shape", "count"), [((2, 3, 65, 270), 1), ((1, 3, 65, 270), 2), ((1, 1, 1, 270), 6)]
)
def test_parts_of_a_mask_gradient(shape: tuple[int, ...], count: int) -> None:
    """Where tiles are few, what they are broadcast over is shared out; never more than there is."""
    mask = torch.ones(shape)
    for needed in (False, True):
        arguments = _arguments(65, 64, N=270, mask=mask, needs=(True, True, True, needed))
        scratch = sm90.attention_bwd_workspace(*arguments)[4:]
        wanted = [((count, *shape), torch.float32, False)] if needed and count > 1 else []
        assert scratch == wanted
