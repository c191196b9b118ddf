"""The barriers of the Hopper attention forward, played through without a GPU.

Every warp of attention_fwd_sm90.cuh is a coroutine here, and copies and stores finish whenever
chance has it. Checked in every run: nobody waits for ever, a wait never passes on another phase
than the one meant, nothing is read that is not there, nothing is overwritten while it is read, and
every tile is written once. Which blocks a warpgroup computes comes from the kernel's own headers
(key_range.h, scheduler.h), compiled for the host and checked against the definition themselves.
"""

import ctypes
import itertools
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SHIM = """
#include "attention/key_range.h"
#include "attention/short_queries.h"
#include "sm90/tile/descriptor.h"
#include "sm90/tile/scheduler.h"
using namespace fastattn;
extern "C" void plan(const int* tile, const int* own, int left, int right, int diagonal,
                     int keys, int block, int skips, int part, int parts, int* result) {
  const auto whole = attention::plan_blocks({tile[0], tile[1]}, {own[0], own[1]},
                                            {left, right, diagonal}, keys, block, skips != 0);
  const auto p = parts > 1 ? attention::part_of(whole, part, parts) : whole;
  const int values[] = {p.loaded.begin, p.loaded.end, p.own.begin,
                        p.own.end,      p.full.begin, p.full.end};
  for (int i = 0; i < 6; ++i) result[i] = values[i];
}
extern "C" void place(int row_tiles, int heads, int section, int tile, int* result) {
  const auto p = sm90::tile_place({row_tiles, heads, section}, tile);
  result[0] = p.row_tile;
  result[1] = p.head;
}
extern "C" void walk(int* state, const int* offsets, int sequences, int heads, int tile_rows,
                     int tile, const int* order) {
  sm90::PackedWalk at = {state[0], state[1], state[2]};
  sm90::walk_to(at, offsets, sequences, heads, tile_rows, tile, order);
  state[0] = at.sequence;
  state[1] = at.first;
  state[2] = at.row_tiles;
}
extern "C" void shorten(long long* n) {
  attention::ForwardProblem p = {};
  p.q = {nullptr, 0, n[0], n[1]};
  p.out = {nullptr, 0, n[2], n[3]};
  p.k = p.v = {nullptr, 0, 0, n[4]};
  p.heads = n[5];
  p.kv_heads = n[6];
  p.queries = n[7];
  p.keys = n[8];
  p.band = {static_cast<int>(n[9]), static_cast<int>(n[10]), static_cast<int>(n[11])};
  p.key_lengths.data = n[12] ? n : nullptr;
  p.query_lengths.data = n[13] ? n : nullptr;
  attention::cut_keys_of_one_query(p);
  attention::merge_groups(p);
  n[0] = p.q.head_stride;
  n[1] = p.q.row_stride;
  n[2] = p.out.head_stride;
  n[3] = p.out.row_stride;
  n[4] = reinterpret_cast<long long>(p.k.data);
  n[5] = p.heads;
  n[7] = p.queries;
  n[8] = p.keys;
  n[9] = attention::band_restricts(p);
}
extern "C" unsigned swizzled(unsigned row, unsigned piece) {
  return sm90::swizzled_offset(row, piece);
}
extern "C" unsigned k_step(int step, int rows) { return sm90::k_major_step(step, rows); }
extern "C" unsigned n_step(int step) { return sm90::n_major_step(step); }
extern "C" unsigned long long k_major(unsigned address) {
  return sm90::descriptor_k_major(address);
}
extern "C" unsigned long long n_major(unsigned address, unsigned chunk) {
  return sm90::descriptor_n_major(address, chunk);
}
"""
WARPS = 4
ROWS = 64
QUEUE_SLOTS = 4
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
    shim = ctypes.CDLL(str(library))
    shim.k_major.restype = shim.n_major.restype = ctypes.c_ulonglong
    return shim


# -- the problem ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """A row of forward_config, with the kinds of restriction it is compiled for."""

    groups: int
    block: int
    query_buffers: int
    stages_output: bool
    takes_turns: bool
    banded: bool
    stages: int = 2
    dropout: bool = False
    dense: bool = False
    # Of an additive mask: pieces that a warpgroup has room for, and pieces of a block.
    bias_ring: int = 0
    bias_pieces: int = 0

    @property
    def skips(self) -> bool:
        return self.banded and not self.takes_turns and not self.dense

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
    section: int = 1
    blocks: int = 2  # thread blocks of the grid
    counted: bool = True
    negate: bool = False
    # The batch entries are packed sequences; ends_meet: their diagonals begin at their ends.
    packed: bool = False
    ends_meet: bool = False
    parts: int = 1  # of the keys of each tile

    def diagonal_of(self, batch: int) -> int:
        queries, keys = self.lengths[batch]
        return keys - queries if self.ends_meet else self.diagonal

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
    part: int = 0


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
        self.tiles *= problem.parts

    def tile(self, number: int) -> Tile | None:
        whole, part = divmod(number, self.problem.parts)
        tile = self.whole_tile(whole)
        return None if tile is None else replace(tile, number=number, part=part)

    def whole_tile(self, number: int) -> Tile | None:
        p, result = self.problem, (ctypes.c_int * 2)()
        if p.packed:
            state, count = (ctypes.c_int * 3)(), len(p.lengths)
            self.native.walk(
                state, self.offsets, count, p.heads, self.config.tile_rows, number, None
            )
            if state[0] == count:
                return None
            self.native.place(state[2], p.heads, p.section, number - state[1], result)
            row = result[0] * self.config.tile_rows
            return Tile(number, row, state[0], result[1], *p.lengths[state[0]])
        if number >= self.tiles // p.parts:
            return None
        self.native.place(self.row_tiles, p.heads * len(p.lengths), p.section, number, result)
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
            rows, own, p.left, p.right, diagonal, tile.keys, c.block, int(c.skips), tile.part,
            p.parts, out,
        )  # fmt: skip
        return Plan((out[0], out[1]), (out[2], out[3]), (out[4], out[5]))

    def blocks(self, tile: Tile) -> list[int]:
        """Those that come for the tile, in their order; under a dense mask chance leaves some out,
        or all of them.
        """
        loaded = range(*self.plan(tile, 0).loaded)[::-1]
        if not self.config.dense:
            return list(loaded)
        chance = random.Random(tile.number)
        wanted = chance.choice((0.0, 0.3, 0.8, 1.0))
        return [n for n in loaded if chance.random() < wanted]

    def is_masked(self, tile: Tile, group: int, n: int) -> bool:
        """Whether a dense mask changes a warpgroup's scores of a block: chance."""
        return random.Random(f"{tile.number} {group} {n}").random() < 0.7

    def is_staged(self, tile: Tile, group: int) -> bool:
        """Whether a warpgroup's rows leave through shared memory; parts leave in fp32."""
        if self.problem.parts > 1:
            return False
        if self.problem.packed and tile.row + (group + 1) * ROWS > tile.queries:
            return False
        return self.config.stages_output


# -- hardware -------------------------------------------------------------------------------------
class Barrier:
    """An mbarrier. `passed` is told which phase is meant and objects to any other."""

    def __init__(self, arrivals: int, name: str):
        self.arrivals = self.missing = arrivals
        self.name, self.bytes, self.complete = name, 0, 0

    def arrive(self, expected: int = 0) -> None:
        assert self.missing > 0, f"too many arrivals at {self.name}"
        self.missing -= 1
        self.bytes += expected
        self._turn_over()

    def deliver(self, count: int) -> None:
        self.bytes -= count
        self._turn_over()

    def _turn_over(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.complete += 1
            self.missing = self.arrivals

    def passed(self, parity: int, phase: int) -> bool:
        ok = self.complete & 1 != parity & 1
        assert not ok or self.complete == phase + 1, f"{self.name} let a wrong phase through"
        return ok


class NamedBarrier:
    """bar.sync and bar.arrive, counted in warps."""

    def __init__(self, warps: int):
        self.warps, self.here, self.generation = warps, 0, 0

    def arrive(self) -> int:
        generation = self.generation
        self.here += 1
        assert self.here <= self.warps, "a named barrier overflows"
        if self.here == self.warps:
            self.here, self.generation = 0, generation + 1
        return generation

    def passed(self, generation: int) -> bool:
        return self.generation > generation


class Buffer:
    """A tile of shared memory: what it holds, who reads it, whether a copy is coming into it."""

    def __init__(self) -> None:
        self.holds: object = None
        self.readers, self.writing = 0, False


class Slot:
    def __init__(self, name: str, full: int, empty: int):
        self.full, self.empty = Barrier(full, f"{name}.full"), Barrier(empty, f"{name}.empty")


class Position:
    """RingPosition."""

    def __init__(self, slots: int):
        self.slots, self.passed = slots, 0

    @property
    def index(self) -> int:
        return self.passed % self.slots

    def full(self, slot: Slot) -> Callable[[], bool]:
        phase = self.passed // self.slots
        return partial(slot.full.passed, phase % 2, phase)

    def empty(self, slot: Slot) -> Callable[[], bool]:
        phase = self.passed // self.slots
        return partial(slot.empty.passed, phase % 2 ^ 1, phase - 1)

    def advance(self) -> None:
        self.passed += 1

    def next(self) -> "Position":
        following = Position(self.slots)
        following.passed = self.passed + 1
        return following


Role = Iterator[Callable[[], bool] | None]


class ThreadBlock:
    """Shared memory and the roles of one thread block."""

    def __init__(self, arithmetic: Arithmetic, index: int, world: "World"):
        self.arithmetic, self.index, self.world = arithmetic, index, world
        c = self.config = arithmetic.config
        groups, stages = range(c.groups), range(c.stages)
        self.q = [[Buffer() for _ in groups] for _ in range(c.query_buffers)]
        self.k, self.v = [Buffer() for _ in stages], [Buffer() for _ in stages]
        self.out = [Buffer() for _ in groups]
        self.q_slots = [[Slot(f"q{i}{g}", 1, 1) for g in groups] for i in range(c.query_buffers)]
        self.k_slots = [Slot(f"k{i}", 1, c.groups) for i in stages]
        self.v_slots = [Slot(f"v{i}", 1, c.groups) for i in stages]
        self.out_slots = [Slot(f"out{g}", WARPS, 1) for g in groups]
        ring = range(c.bias_ring)
        self.bias = [[Buffer() for _ in ring] for _ in groups]
        self.bias_slots = [[Slot(f"bias{g}{i}", 1, WARPS) for i in ring] for g in groups]
        readers = c.groups * (WARPS + (c.stages_output or c.bias_ring > 0))
        self.queue = [Slot(f"queue{i}", 1, readers) for i in range(QUEUE_SLOTS)]
        self.messages: list[tuple[int, Tile | None] | None] = [None] * QUEUE_SLOTS
        self.turns = [NamedBarrier(2 * WARPS) for _ in groups]
        self.meetings = [NamedBarrier(WARPS) for _ in groups]
        self.issued = [[0] * WARPS for _ in groups]

    def roles(self) -> Iterator[tuple[str, Role]]:
        yield f"load {self.index}", self.load()
        for g in range(self.config.groups):
            if self.config.stages_output:
                yield f"store {self.index}.{g}", self.store(g)
            if self.config.bias_ring:
                yield f"bias {self.index}.{g}", self.load_bias(g)
            for w in range(WARPS):
                yield f"consumer {self.index}.{g}.{w}", Consumer(self, g, w).run()

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
        c, position = self.config, Position(QUEUE_SLOTS)
        query, stage = Position(c.query_buffers), Position(c.stages)
        number = self.index
        while True:
            tile = self.arithmetic.tile(number)
            blocks = [] if tile is None else self.arithmetic.blocks(tile)
            slot = self.queue[position.index]
            yield position.empty(slot)
            self.messages[position.index] = (position.passed, tile)
            slot.full.arrive()
            position.advance()
            if tile is None:
                return
            number = self.world.draw(number)

            def load_query(tile: Tile) -> Role:
                for g in range(c.groups):
                    slot = self.q_slots[query.index][g]
                    yield query.empty(slot)
                    self.copy(self.q[query.index][g], ("q", tile, g), slot.full)
                query.advance()

            key_first = c.query_buffers == 1
            if not key_first and blocks:
                yield from load_query(tile)
            for n in blocks:
                slot = self.k_slots[stage.index]
                yield stage.empty(slot)
                self.copy(self.k[stage.index], ("k", tile, n), slot.full)
                if key_first and n == blocks[0]:
                    yield from load_query(tile)
                slot = self.v_slots[stage.index]
                yield stage.empty(slot)
                self.copy(self.v[stage.index], ("v", tile, n), slot.full)
                stage.advance()

    def load_bias(self, group: int) -> Role:
        position, ring = Position(QUEUE_SLOTS), Position(self.config.bias_ring)
        while (tile := (yield from self.take(position))) is not None:
            for n in self.arithmetic.blocks(tile):
                if not self.arithmetic.is_masked(tile, group, n):
                    continue
                for piece in range(self.config.bias_pieces):
                    slot = self.bias_slots[group][ring.index]
                    yield ring.empty(slot)
                    buffer = self.bias[group][ring.index]
                    self.copy(buffer, ("bias", tile, group, n, piece), slot.full)
                    ring.advance()

    def look(self, position: Position) -> Role:
        yield position.full(self.queue[position.index])
        message = self.messages[position.index]
        assert message is not None and message[0] == position.passed
        yield None
        return message[1]

    def release(self, position: Position) -> None:
        message = self.messages[position.index]
        assert message is not None and message[0] == position.passed, "overwritten too early"
        self.queue[position.index].empty.arrive()
        position.advance()

    def take(self, position: Position) -> Role:
        tile = yield from self.look(position)
        self.release(position)
        return tile

    def store(self, group: int) -> Role:
        position, output, slot = Position(QUEUE_SLOTS), Position(1), self.out_slots[group]
        while (tile := (yield from self.take(position))) is not None:
            if not self.arithmetic.is_staged(tile, group):
                continue
            yield output.full(slot)
            buffer = self.out[group]
            assert buffer.holds == ("out", tile, group)
            buffer.readers += 1
            done: list[bool] = []
            self.world.events.append(partial(done.append, True))
            yield lambda done=done: bool(done)
            buffer.readers -= 1
            self.world.write(tile, group)
            slot.empty.arrive()
            output.advance()


class Consumer:
    """One warp of a consumer warpgroup. Warp 0, the leader, stands for what the warpgroup reads."""

    def __init__(self, block: ThreadBlock, group: int, warp: int):
        self.block, self.group, self.warp, self.config = block, group, warp, block.config
        self.query = Position(self.config.query_buffers)
        self.key, self.value = Position(self.config.stages), Position(self.config.stages)
        self.bias = Position(max(self.config.bias_ring, 1))
        self.flying: list[tuple[int, list[Buffer]]] = []
        self.count = 0

    def run(self) -> Role:
        b, position, output = self.block, Position(QUEUE_SLOTS), Position(1)
        if self.config.takes_turns and self.group == self.config.groups - 1:
            self.pass_turn()
        while (tile := (yield from b.look(position))) is not None:
            plan = b.arithmetic.plan(tile, self.group)
            b.world.computed.setdefault((tile, self.group), plan)
            if self.config.dense and (blocks := b.arithmetic.blocks(tile)):
                yield from self.attend_dense(tile, blocks)
            elif not self.config.dense and plan.loaded[0] < plan.loaded[1]:
                yield from self.attend(tile, plan)
            if not b.arithmetic.is_staged(tile, self.group):
                if self.warp == 0:
                    b.world.write(tile, self.group)
                b.release(position)
                continue
            slot, buffer = b.out_slots[self.group], b.out[self.group]
            yield output.empty(slot)
            assert buffer.readers == 0
            buffer.holds = ("out", tile, self.group)
            yield None
            slot.full.arrive()
            output.advance()
            b.release(position)

    def attend(self, tile: Tile, plan: Plan) -> Role:
        yield from self.skip(plan.loaded[1] - plan.own[1])
        yield from self.first_block(tile, plan)
        for n in range(plan.own[1] - 2, plan.own[0] - 1, -1):
            yield from self.next_block(tile, plan, n)
        yield from self.touch_values(tile, plan.own[0])
        yield from self.issue_output(tile, plan.own[0])
        yield from self.finish(0)
        self.release_value()
        self.query.advance()
        yield from self.skip(plan.own[0] - plan.loaded[0])

    def attend_dense(self, tile: Tile, blocks: list[int]) -> Role:
        """Notes come with the values; any block may have dead ones."""
        for before, n in zip([None, *blocks], blocks, strict=False):
            if before is None:
                yield self.query.full(self.block.q_slots[self.query.index][self.group])
                if self.block.arithmetic.problem.negate:
                    yield from self.meet()
            yield self.key.full(self.block.k_slots[self.key.index])
            if before is not None:
                yield from self.await_turn()
            self.issue_scores(tile, n)
            if before is not None:
                yield from self.issue_output(tile, before)
                self.pass_turn()
            at = self.value if before is None else self.value.next()
            yield from self.read_with_values(tile, n, at)
            yield from self.finish(0 if before is None else 1)
            self.release_key(n == blocks[-1])
            yield from self.add_bias(tile, n)
            if before is not None:
                yield from self.finish(0)
                self.release_value()
            assert self.block.v[self.value.index].holds == ("v", tile, n)
            yield from self.meet()
        yield from self.issue_output(tile, blocks[-1])
        yield from self.finish(0)
        self.release_value()
        self.query.advance()

    def add_bias(self, tile: Tile, n: int) -> Role:
        yield None
        b = self.block
        if not self.config.bias_ring or not b.arithmetic.is_masked(tile, self.group, n):
            return
        for piece in range(self.config.bias_pieces):
            slot, buffer = (x[self.group][self.bias.index] for x in (b.bias_slots, b.bias))
            yield self.bias.full(slot)
            assert buffer.holds == ("bias", tile, self.group, n, piece)
            buffer.readers += 1
            yield None
            buffer.readers -= 1
            slot.empty.arrive()
            self.bias.advance()

    def first_block(self, tile: Tile, plan: Plan) -> Role:
        b, n = self.block, plan.own[1] - 1
        yield self.query.full(b.q_slots[self.query.index][self.group])
        if b.arithmetic.problem.negate:
            yield from self.meet()
        yield self.key.full(b.k_slots[self.key.index])
        self.issue_scores(tile, n)
        yield from self.finish(0)
        self.release_key(n == plan.own[0])
        yield from self.drop_weights(tile, n, self.value)
        yield from self.touch_values(tile, n)

    def next_block(self, tile: Tile, plan: Plan, n: int) -> Role:
        yield self.key.full(self.block.k_slots[self.key.index])
        yield from self.await_turn()
        self.issue_scores(tile, n)
        yield from self.issue_output(tile, n + 1)
        self.pass_turn()
        yield from self.finish(1)
        self.release_key(n == plan.own[0])
        yield None
        yield from self.drop_weights(tile, n, self.value.next())
        yield from self.finish(0)
        self.release_value()

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

    def issue_scores(self, tile: Tile, n: int) -> None:
        b = self.block
        q, k = b.q[self.query.index][self.group], b.k[self.key.index]
        self.issue([(q, ("q", tile, self.group)), (k, ("k", tile, n))])

    def issue_output(self, tile: Tile, n: int) -> Role:
        yield self.value.full(self.block.v_slots[self.value.index])
        self.issue([(self.block.v[self.value.index], ("v", tile, n))])

    def drop_weights(self, tile: Tile, n: int, at: Position) -> Role:
        if self.config.dropout:
            yield from self.read_with_values(tile, n, at)

    def read_with_values(self, tile: Tile, n: int, at: Position) -> Role:
        """Every warp reads what has come with the block's values."""
        yield at.full(self.block.v_slots[at.index])
        assert self.block.v[at.index].holds == ("v", tile, n)
        self.block.v[at.index].readers += 1
        yield None
        self.block.v[at.index].readers -= 1

    def touch_values(self, tile: Tile, n: int) -> Role:
        """Zeroes dead rows in every outer block, more often than the kernel, which looks first."""
        b = self.block
        if n in (b.arithmetic.plan(tile, 0).loaded[0], b.arithmetic.plan(tile, 0).loaded[1] - 1):
            yield self.value.full(b.v_slots[self.value.index])
            assert b.v[self.value.index].holds == ("v", tile, n)
            yield from self.meet()

    def meet(self) -> Role:
        barrier = self.block.meetings[self.group]
        generation = barrier.arrive()
        yield partial(barrier.passed, generation)

    def await_turn(self) -> Role:
        if self.config.takes_turns:
            barrier = self.block.turns[self.group]
            generation = barrier.arrive()
            yield partial(barrier.passed, generation)

    def pass_turn(self) -> None:
        if self.config.takes_turns:
            self.block.turns[(self.group + 1) % self.config.groups].arrive()

    def release_key(self, last_of_tile: bool) -> None:
        if self.warp == 0:
            self.block.k_slots[self.key.index].empty.arrive()
            if last_of_tile:
                self.block.q_slots[self.query.index][self.group].empty.arrive()
        self.key.advance()

    def release_value(self) -> None:
        if self.warp == 0:
            self.block.v_slots[self.value.index].empty.arrive()
        self.value.advance()

    def skip(self, count: int) -> Role:
        assert count == 0 or self.config.skips
        for _ in range(count):
            yield self.key.full(self.block.k_slots[self.key.index])
            yield self.value.full(self.block.v_slots[self.value.index])
            yield from self.meet()
            self.release_key(False)
            self.release_value()


class World:
    """Global memory, time and chance."""

    def __init__(self, arithmetic: Arithmetic, seed: int):
        self.arithmetic, self.chance = arithmetic, random.Random(seed)
        self.events: list[Callable[[], None]] = []
        self.written: set[tuple[Tile, int]] = set()
        self.computed: dict[tuple[Tile, int], Plan] = {}
        self.counter = 0

    def draw(self, number: int) -> int:
        blocks = self.arithmetic.problem.blocks
        if not self.arithmetic.problem.counted:
            return number + blocks
        self.counter += 1
        return blocks + self.counter - 1

    def write(self, tile: Tile, group: int) -> None:
        assert (tile, group) not in self.written
        self.written.add((tile, group))

    def play(self) -> None:
        blocks = [
            ThreadBlock(self.arithmetic, i, self) for i in range(self.arithmetic.problem.blocks)
        ]
        live = [[name, role, None] for block in blocks for name, role in block.roles()]
        # Some warps are slow in this run.
        patience = {name: self.chance.choice((1, 1, 1, 8, 60)) for name, _, _ in live}
        while live:
            ready = [entry for entry in live if entry[2] is None or entry[2]()]
            if self.events and (not ready or self.chance.random() < 0.2):
                self.events.pop(self.chance.randrange(len(self.events)))()
                continue
            assert ready, "waiting for ever: " + ", ".join(entry[0] for entry in live)
            entry = self.chance.choice(ready)
            if self.chance.randrange(patience[entry[0]]) and len(ready) > 1:
                continue
            try:
                entry[2] = next(entry[1])
            except StopIteration:
                live.remove(entry)
        assert len(self.written) == self.arithmetic.tiles * self.arithmetic.config.groups


# -- tests ----------------------------------------------------------------------------------------
CONFIGS = {
    "64": Config(3, 128, 2, True, False, False),
    "64 band": Config(3, 128, 2, True, False, True),
    "128": Config(2, 128, 2, True, True, False),
    "128 band": Config(2, 128, 2, True, True, True),
    "192 band": Config(2, 112, 1, False, False, True),
    "256": Config(2, 80, 1, False, False, False),
    "256 band": Config(2, 80, 1, False, False, True),
    "64 dropout": Config(3, 128, 2, True, False, True, dropout=True),
    "128 dropout": Config(2, 128, 2, True, True, True, dropout=True),
    "256 dropout": Config(2, 80, 1, False, False, True, dropout=True),
    "64 dense": Config(3, 128, 2, True, False, True, dense=True),
    "128 dense": Config(2, 128, 2, True, True, True, dense=True),
    "256 dense": Config(2, 80, 1, False, False, True, dense=True),
    "64 bias": Config(2, 128, 2, False, True, True, dense=True, bias_ring=4, bias_pieces=2),
    "128 fp32 bias": Config(2, 128, 1, False, True, True, dense=True, bias_ring=4, bias_pieces=4),
    "256 bias": Config(2, 64, 1, False, False, True, dense=True, bias_ring=2, bias_pieces=1),
    "256 fp32 bias": Config(2, 64, 1, False, False, True, dense=True, bias_ring=2, bias_pieces=2),
}
PLAIN = {
    "no keys": Problem(200, 100, lengths=((200, 0),)),
    "one block": Problem(65, 70),
    "several tiles": Problem(500, 400, heads=3),
    "more thread blocks than tiles": Problem(10, 300, heads=1, blocks=3),
    "fixed strides": Problem(400, 200, heads=4, counted=False),
    "negative scale": Problem(300, 300, negate=True),
    "lengths": Problem(450, 450, lengths=((450, 130), (0, 450), (1, 450), (300, 0), (129, 257))),
}
_PACKED = {"packed": True, "lengths": ((200, 130), (0, 60), (64, 0), (1, 300), (330, 330), (0, 0))}
PLAIN |= {
    "packed": Problem(1 << 20, 1 << 20, blocks=3, **_PACKED),
    "parts": Problem(200, 900, lengths=((200, 900), (130, 300), (200, 0)), parts=3),
    "packed parts": Problem(1 << 20, 1 << 20, blocks=3, parts=4, **_PACKED),
    "packed, nothing": Problem(1 << 20, 1 << 20, packed=True, lengths=((0, 0), (0, 9))),
}
BANDS = {
    "packed causal": Problem(1 << 20, 1 << 20, right=0, section=2, **_PACKED),
    "packed bottom right": Problem(1 << 20, 1 << 20, right=0, left=90, ends_meet=True, **_PACKED),
    "causal": Problem(600, 600, right=0, heads=3, section=2, blocks=3),
    "bottom right, fewer keys": Problem(500, 130, right=0, diagonal=-370),
    "bottom right, more keys": Problem(130, 500, right=0, diagonal=370),
    "window": Problem(450, 450, left=60, right=0),
    "window to both sides": Problem(450, 450, left=130, right=70),
    "window in parts": Problem(300, 900, left=500, right=20, diagonal=600, parts=3),
    "causal parts": Problem(300, 500, right=0, parts=5, counted=False),
    "only the diagonal": Problem(300, 300, left=0, right=0),
    "window past the end": Problem(500, 100, left=20, right=5),
    "causal lengths": Problem(
        450, 450, right=0, section=4, lengths=((450, 130), (0, 450), (70, 450), (300, 0))
    ),
}
# Dropout only adds a reader of what comes with the values.
DROPPED = ("lengths", "causal", "packed bottom right", "window past the end")
# Keys in parts are other plans for the same roles.
CUT = ("64", "64 band", "128 band", "256")
DENSE = ("no keys", "several tiles", "negative scale", "lengths", "causal lengths")


def _runs() -> Iterator[tuple[str, str]]:
    for name, config in CONFIGS.items():
        problems = {**PLAIN, **BANDS} if config.banded else PLAIN
        if config.dropout:
            problems = DROPPED
        if config.dense:
            problems = DENSE
        for problem in problems:
            if name in CUT or "parts" not in problem:
                yield name, problem


@pytest.mark.parametrize(("config", "problem"), list(_runs()))
def test_protocol(native: ctypes.CDLL, config: str, problem: str) -> None:
    arithmetic = Arithmetic(native, CONFIGS[config], {**PLAIN, **BANDS}[problem])
    for seed in range(2):
        World(arithmetic, seed).play()


def test_model_notices_a_missing_meeting(native: ctypes.CDLL, monkeypatch) -> None:
    """Without the meeting in skip(), a late warp misses a phase: the model must see that."""

    def careless(self: Consumer, count: int) -> Role:
        for _ in range(count):
            yield self.key.full(self.block.k_slots[self.key.index])
            yield self.value.full(self.block.v_slots[self.value.index])
            self.release_key(False)
            self.release_value()

    monkeypatch.setattr(Consumer, "skip", careless)
    problem = Problem(192, 4000, right=0, diagonal=3808, left=200, heads=4, blocks=1)
    tall = Config(3, 16, 2, True, False, True)
    with pytest.raises(AssertionError):
        for seed in range(40):
            World(Arithmetic(native, tall, problem), seed).play()


def test_model_notices_a_piece_handed_back_too_early(native: ctypes.CDLL, monkeypatch) -> None:
    """One arrival for the whole warpgroup lets the copy overtake a warp that still reads."""
    init = ThreadBlock.__init__

    def careless(self: ThreadBlock, *args: object) -> None:
        init(self, *args)
        for ring in self.bias_slots:
            for slot in ring:
                slot.empty = Barrier(1, "empty")

    monkeypatch.setattr(ThreadBlock, "__init__", careless)
    with pytest.raises(AssertionError):
        for seed in range(5):
            World(Arithmetic(native, CONFIGS["256 bias"], PLAIN["several tiles"]), seed).play()


@pytest.mark.parametrize("order", [None, (6, 1, 5, 4, 0, 2, 3, 7), (0, 1, 2, 3, 7, 4, 6, 5)])
def test_packed_walk(native: ctypes.CDLL, order: tuple[int, ...] | None) -> None:
    """Growing numbers, some left out, each find their sequence; every tile has one place."""
    rows, heads, tile_rows = [0, 130, 0, 0, 1, 128, 400, 0], 3, 128
    offsets = (ctypes.c_int * 9)(*itertools.accumulate(rows, initial=0))
    given = None if order is None else (ctypes.c_int * 8)(*order)
    rows = [rows[b] for b in order or range(8)]
    wanted = [b for b, n in enumerate(rows) for _ in range(heads * -(-n // tile_rows))]
    for step in (1, 2, 5, 50):
        state = (ctypes.c_int * 3)()
        for number in range(0, len(wanted) + step, step):
            native.walk(state, offsets, len(rows), heads, tile_rows, number, given)
            if number >= len(wanted):
                assert state[0] == len(rows)
                continue
            assert state[0] == wanted[number]
            assert state[1] == wanted.index(wanted[number])
            assert state[2] == -(-rows[state[0]] // tile_rows)


UNLIMITED = 1 << 20


@pytest.mark.parametrize(
    ("queries", "heads_inside", "band", "key_lengths", "merged", "keys", "banded"),
    [
        (1, True, (UNLIMITED, UNLIMITED, 0), True, True, (0, 100), False),
        (1, False, (UNLIMITED, 0, 99), True, True, (0, 100), False),  # decoding, the last row
        (1, False, (UNLIMITED, 0, 0), True, True, (0, 1), False),  # the first row
        (1, False, (9, 0, 99), False, True, (90, 100), False),  # a window
        (1, False, (9, 0, 99), True, False, (0, 100), True),  # key lengths count from key 0
        (1, False, (9, 0, -5), False, False, (0, 100), True),  # no key at all
        (7, False, (UNLIMITED, UNLIMITED, 0), False, True, (0, 100), False),
        (7, True, (UNLIMITED, UNLIMITED, 0), False, False, (0, 100), False),  # no single stride
        (7, False, (UNLIMITED, 0, 93), False, False, (0, 100), True),  # rows differ
        (7, False, (UNLIMITED, 6, 93), False, True, (0, 100), False),  # the band allows all
    ],
)
def test_few_queries(
    native: ctypes.CDLL,
    queries: int,
    heads_inside: bool,
    band: tuple[int, int, int],
    key_lengths: bool,
    merged: bool,
    keys: tuple[int, int],
    banded: bool,
) -> None:
    """Grouped heads become rows only where that addresses the same memory and the same keys."""
    D, H, K, N = 64, 8, 2, 100
    head, row = (D, H * D) if heads_inside else (queries * D, D)
    numbers = [head, row, head, row, K * D, H, K, queries, N, *band, key_lengths, False]
    n = (ctypes.c_longlong * 14)(*numbers)
    native.shorten(n)
    assert n[4] == keys[0] * K * D * 2
    assert (n[8], bool(n[9])) == (keys[1] - keys[0], banded)
    if not merged:
        assert (n[0], n[1], n[5], n[7]) == (head, row, H, queries)
        return
    group = H // K
    assert (n[5], n[7]) == (K, group * queries)
    for h, i in itertools.product(range(H), range(queries)):
        kv_head, member = divmod(h, group)
        for merged_head, merged_row in ((n[0], n[1]), (n[2], n[3])):
            place = kv_head * merged_head + (member * queries + i) * merged_row
            assert place == h * head + i * row


@pytest.mark.parametrize("config", [c for c in CONFIGS if "band" in c])
def test_blocks_against_the_definition(native: ctypes.CDLL, config: str) -> None:
    c = CONFIGS[config]
    sizes, limits = (1, 63, 200, 390), (0, 1, 50, 200, 1 << 20)
    chance = random.Random(0)
    cases = list(itertools.product(sizes, sizes, limits, limits, (False, True)))
    for M, N, left, right, bottom in chance.sample(cases, 80):
        lengths = ((M, N), (chance.randint(0, M), chance.randint(0, N)))
        problem = Problem(M, N, left, right, N - M if bottom else 0, lengths, heads=1)
        arithmetic = Arithmetic(native, c, problem)
        keys = [
            [{j for j in range(N) if problem.allowed(batch, i, j)} for i in range(M)]
            for batch in range(len(lengths))
        ]
        for number in range(arithmetic.tiles):
            tile = arithmetic.tile(number)
            assert tile is not None
            for group in range(c.groups):
                _check_plan(keys[tile.batch], c, tile, group, arithmetic.plan(tile, group))


def _check_plan(keys_of: list[set[int]], c: Config, tile: Tile, group: int, plan: Plan) -> None:
    """keys_of: for each row of the sequence, the keys it may attend by definition."""
    first = tile.row + group * ROWS
    own = keys_of[first : min(first + ROWS, tile.queries)]
    whole = keys_of[tile.row : min(tile.row + c.tile_rows, tile.queries)]
    needed = {j // c.block for keys in own for j in keys}
    loaded = {j // c.block for keys in whole for j in keys}
    assert set(range(*plan.loaded)) == loaded
    assert needed <= set(range(*plan.own)) <= loaded
    assert bool(loaded) == (plan.own[0] < plan.own[1])
    if needed:
        assert set(range(*plan.own)) == (needed if c.skips else loaded)
    full = {
        n
        for n in range(*plan.own)
        if own and all(keys >= set(range(n * c.block, (n + 1) * c.block)) for keys in own)
    }
    assert set(range(*plan.full)) & set(range(*plan.own)) == full


@pytest.mark.parametrize("config", ["64 band", "128 band"])
def test_parts_of_a_plan(native: ctypes.CDLL, config: str) -> None:
    """Parts follow each other, differ by a block at most and keep what a warpgroup must compute."""
    c = CONFIGS[config]
    for N, left, parts in itertools.product((1, 300, 1500), (0, 70, 1 << 20), (2, 3, 7)):
        problem = Problem(400, N, left=left, right=0, diagonal=N - 400, heads=1)
        whole = Arithmetic(native, c, problem)
        cut = Arithmetic(native, c, replace(problem, parts=parts))
        assert cut.tiles == parts * whole.tiles
        for number, group in itertools.product(range(whole.tiles), range(c.groups)):
            tile, plan = whole.tile(number), whole.plan(whole.tile(number), group)
            pieces = [cut.tile(number * parts + i) for i in range(parts)]
            assert [replace(p, number=number, part=0) for p in pieces] == [tile] * parts
            plans = [cut.plan(p, group) for p in pieces]
            loaded = [list(range(*p.loaded)) for p in plans]
            assert list(itertools.chain(*loaded)) == list(range(*plan.loaded))
            assert max(map(len, loaded)) - min(map(len, loaded)) <= 1
            for piece, blocks in zip(plans, loaded, strict=True):
                own, wanted = set(range(*piece.own)), set(range(*plan.own)) & set(blocks)
                assert wanted <= own <= set(blocks)
                # One block at least, for a warpgroup takes part in every tile.
                assert own == wanted or (not wanted and own == set(blocks[:1]))
                assert piece.full == plan.full


@pytest.mark.parametrize(
    ("row_tiles", "heads", "section"), [(1, 1, 1), (5, 7, 1), (5, 7, 4), (3, 8, 16)]
)
def test_tile_order(native: ctypes.CDLL, row_tiles: int, heads: int, section: int) -> None:
    result, places = (ctypes.c_int * 2)(), []
    for tile in range(row_tiles * heads):
        native.place(row_tiles, heads, section, tile, result)
        places.append((result[0], result[1]))
    assert sorted(places) == sorted(itertools.product(range(row_tiles), range(heads)))
    for start in range(0, heads, section):
        within = [row for row, head in places if start <= head < start + section]
        assert within == sorted(within, reverse=True), "the longest tiles come first"


def test_descriptors(native: ctypes.CDLL) -> None:
    """Fields as the PTX manual's matrix descriptor has them."""
    address = 0x2A400
    k_major, n_major = native.k_major(address), native.n_major(address, 80 * 128)
    for value, leading in ((k_major, 1), (n_major, 80 * 128 // 16)):
        assert value & 0x3FFF == address // 16
        assert value >> 16 & 0x3FFF == leading
        assert value >> 32 & 0x3FFF == 1024 // 16
        assert value >> 62 == 1
    # 16 columns on: 32 bytes inside a chunk of 64 columns, then the next chunk.
    assert [native.k_step(i, 80) for i in (0, 1, 3, 4, 9)] == [0, 32, 96, 10240, 20512]
    assert native.n_step(3) == 3 * 16 * 128


def test_swizzle_is_a_permutation_without_bank_conflicts(native: ctypes.CDLL) -> None:
    offsets = {native.swizzled(row, piece) for row in range(64) for piece in range(8)}
    assert offsets == {16 * i for i in range(64 * 8)}
    for piece in range(
        8
    ):  # eight rows of one piece, as a matrix store writes them, touch all banks
        assert len({native.swizzled(row, piece) // 16 % 8 for row in range(8)}) == 8
