"""A model of the barriers of the Hopper attention forward, without a GPU.

Every warp of attention_fwd_sm90.cuh is a coroutine here, and copies and stores complete at random
times. Every run checks: there is no deadlock, a wait never passes in another phase than the
intended one, buffers are not read before they are written nor overwritten while they are read, and
every tile is written once. Which blocks a warpgroup computes comes from the kernel's own headers
(key_range.h, scheduler.h), compiled for the host and checked against the definition separately.
"""

import ctypes
import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sm90_model import forward
from sm90_model.forward import CONFIGS, Arithmetic, Config, Plan, Problem, Tile
from sm90_model.hardware import (
    WARPS,
    Barrier,
    Buffer,
    ConsumerWarp,
    NamedBarrier,
    Position,
    Role,
    SharedMemory,
    Slot,
)

QUEUE_SLOTS = 4


class ThreadBlock(SharedMemory):
    """Shared memory and the roles of one thread block."""

    def __init__(self, arithmetic: Arithmetic, index: int, world: "World"):
        super().__init__(world.events)
        self.arithmetic, self.index, self.world = arithmetic, index, world
        c = self.config = arithmetic.config
        groups, stages = range(c.groups), range(c.stages)
        self.q = [[Buffer() for _ in groups] for _ in range(c.query_buffers)]
        self.k, self.v = [Buffer() for _ in stages], [Buffer() for _ in stages]
        self.metadata = [Buffer() for _ in range(2 * c.stages)]
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
        self.infos: list[tuple[int, Tile | None] | None] = [None] * QUEUE_SLOTS
        self.ping_pong = [NamedBarrier(2 * WARPS) for _ in groups]
        self.group_barriers = [NamedBarrier(WARPS) for _ in groups]
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

    def load(self) -> Role:
        c, position = self.config, Position(QUEUE_SLOTS)
        query, stage = Position(c.query_buffers), Position(c.stages)
        number = self.index
        while True:
            tile = self.arithmetic.tile(number)
            blocks = [] if tile is None else self.arithmetic.blocks(tile)
            slot = self.queue[position.index]
            yield position.empty(slot)
            self.infos[position.index] = (position.passed, tile)
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
                if c.dropout or c.dense:
                    self.copy(
                        self.metadata_slot(stage), ("metadata", tile, n), slot.full, arrives=False
                    )
                self.copy(self.k[stage.index], ("k", tile, n), slot.full)
                if key_first and n == blocks[0]:
                    yield from load_query(tile)
                slot = self.v_slots[stage.index]
                yield stage.empty(slot)
                self.copy(self.v[stage.index], ("v", tile, n), slot.full)
                stage.advance()

    def metadata_slot(self, at: Position) -> Buffer:
        return self.metadata[at.passed % len(self.metadata)]

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

    def peek(self, position: Position) -> Role:
        yield position.full(self.queue[position.index])
        info = self.infos[position.index]
        assert info is not None and info[0] == position.passed
        yield None
        return info[1]

    def release(self, position: Position) -> None:
        info = self.infos[position.index]
        assert info is not None and info[0] == position.passed, "overwritten too early"
        self.queue[position.index].empty.arrive()
        position.advance()

    def take(self, position: Position) -> Role:
        tile = yield from self.peek(position)
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


class Consumer(ConsumerWarp):
    def __init__(self, block: ThreadBlock, group: int, warp: int):
        super().__init__(block, group, warp)
        self.block, self.config = block, block.config
        self.query = Position(self.config.query_buffers)
        self.key, self.value = Position(self.config.stages), Position(self.config.stages)
        self.bias = Position(max(self.config.bias_ring, 1))

    def run(self) -> Role:
        b, position, output = self.block, Position(QUEUE_SLOTS), Position(1)
        if self.config.ping_pong and self.group == self.config.groups - 1:
            self.arrive_ping_pong()
        while (tile := (yield from b.peek(position))) is not None:
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
        """Metadata is loaded with K; every other block has dead values."""
        for before, n in zip([None, *blocks], blocks, strict=False):
            if before is None:
                yield self.query.full(self.block.q_slots[self.query.index][self.group])
                if self.block.arithmetic.problem.negate:
                    yield from self.sync_group()
            yield self.key.full(self.block.k_slots[self.key.index])
            if before is not None:
                yield from self.wait_ping_pong()
            self.issue_scores(tile, n)
            if before is not None:
                yield from self.issue_output(tile, before)
                self.arrive_ping_pong()
            at = self.value if before is None else self.value.next()
            yield from self.read_metadata(tile, n, at)
            yield from self.finish(0 if before is None else 1)
            self.release_key(n == blocks[-1])
            yield from self.add_bias(tile, n)
            if before is not None:
                yield from self.finish(0)
                self.release_value()
            yield from self.read_metadata(tile, n, self.value)
            if n % 2:
                yield self.value.full(self.block.v_slots[self.value.index])
                assert self.block.v[self.value.index].holds == ("v", tile, n)
                yield from self.sync_group()
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
            yield from self.sync_group()
        yield self.key.full(b.k_slots[self.key.index])
        self.issue_scores(tile, n)
        yield from self.finish(0)
        self.release_key(n == plan.own[0])
        yield from self.drop_weights(tile, n, self.value)
        yield from self.touch_values(tile, n)

    def next_block(self, tile: Tile, plan: Plan, n: int) -> Role:
        yield self.key.full(self.block.k_slots[self.key.index])
        yield from self.wait_ping_pong()
        self.issue_scores(tile, n)
        yield from self.issue_output(tile, n + 1)
        self.arrive_ping_pong()
        yield from self.finish(1)
        self.release_key(n == plan.own[0])
        yield None
        yield from self.drop_weights(tile, n, self.value.next())
        yield from self.finish(0)
        self.release_value()

    def issue_scores(self, tile: Tile, n: int) -> None:
        b = self.block
        q, k = b.q[self.query.index][self.group], b.k[self.key.index]
        self.issue([(q, ("q", tile, self.group)), (k, ("k", tile, n))])

    def issue_output(self, tile: Tile, n: int) -> Role:
        yield self.value.full(self.block.v_slots[self.value.index])
        self.issue([(self.block.v[self.value.index], ("v", tile, n))])

    def drop_weights(self, tile: Tile, n: int, at: Position) -> Role:
        if self.config.dropout:
            yield from self.read_metadata(tile, n, at)

    def read_metadata(self, tile: Tile, n: int, at: Position) -> Role:
        """Every warp reads what was loaded with the block's K, whose slot may be free already."""
        metadata = self.block.metadata_slot(at)
        assert metadata.holds == ("metadata", tile, n)
        metadata.readers += 1
        yield None
        metadata.readers -= 1

    def touch_values(self, tile: Tile, n: int) -> Role:
        """Zeroes dead rows in every outer block, more often than the kernel, which tests first."""
        b = self.block
        if n in (b.arithmetic.plan(tile, 0).loaded[0], b.arithmetic.plan(tile, 0).loaded[1] - 1):
            yield self.value.full(b.v_slots[self.value.index])
            assert b.v[self.value.index].holds == ("v", tile, n)
            yield from self.sync_group()

    def sync_group(self) -> Role:
        yield from self.wait_at(self.block.group_barriers[self.group])

    def wait_ping_pong(self) -> Role:
        if self.config.ping_pong:
            yield from self.wait_at(self.block.ping_pong[self.group])

    def arrive_ping_pong(self) -> None:
        if self.config.ping_pong:
            self.block.ping_pong[(self.group + 1) % self.config.groups].arrive()

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
            yield from self.sync_group()
            self.release_key(False)
            self.release_value()


class World:
    """Global memory, and a random schedule of roles and copies."""

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
            assert ready, "deadlock: " + ", ".join(entry[0] for entry in live)
            entry = self.chance.choice(ready)
            if self.chance.randrange(patience[entry[0]]) and len(ready) > 1:
                continue
            try:
                entry[2] = next(entry[1])
            except StopIteration:
                live.remove(entry)
        assert len(self.written) == self.arithmetic.tiles * self.arithmetic.config.groups


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
    "splits": Problem(200, 900, lengths=((200, 900), (130, 300), (200, 0)), splits=3),
    "packed splits": Problem(1 << 20, 1 << 20, blocks=3, splits=4, **_PACKED),
    "packed, nothing": Problem(1 << 20, 1 << 20, packed=True, lengths=((0, 0), (0, 9))),
}
BOUNDED = {
    "packed causal": Problem(1 << 20, 1 << 20, right=0, swizzle_group=2, **_PACKED),
    "packed bottom right": Problem(
        1 << 20, 1 << 20, right=0, left=90, bottom_right=True, **_PACKED
    ),
    "causal": Problem(600, 600, right=0, heads=3, swizzle_group=2, blocks=3),
    "bottom right, fewer keys": Problem(500, 130, right=0, diagonal=-370),
    "bottom right, more keys": Problem(130, 500, right=0, diagonal=370),
    "window": Problem(450, 450, left=60, right=0),
    "window to both sides": Problem(450, 450, left=130, right=70),
    "window in splits": Problem(300, 900, left=500, right=20, diagonal=600, splits=3),
    "causal splits": Problem(300, 500, right=0, splits=5, counted=False),
    "only the diagonal": Problem(300, 300, left=0, right=0),
    "window past the end": Problem(500, 100, left=20, right=5),
    "causal lengths": Problem(
        450, 450, right=0, swizzle_group=4, lengths=((450, 130), (0, 450), (70, 450), (300, 0))
    ),
}
# Dropout only adds a reader of what is loaded with K.
DROPPED = ("lengths", "causal", "packed bottom right", "window past the end")
# Split-KV only changes the plans of the same roles.
SPLIT = ("64", "64 bounded", "128 bounded", "256")
DENSE = ("no keys", "several tiles", "negative scale", "lengths", "causal lengths")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return forward.arithmetic(tmp_path_factory.mktemp("shim"))


def _runs() -> Iterator[tuple[str, str]]:
    for name, config in CONFIGS.items():
        problems = {**PLAIN, **BOUNDED} if config.bounded else PLAIN
        if config.dropout:
            problems = DROPPED
        if config.dense:
            problems = DENSE
        for problem in problems:
            if name in SPLIT or "splits" not in problem:
                yield name, problem


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("config", "problem"), list(_runs()))
def test_protocol(native: ctypes.CDLL, config: str, problem: str, seed: int) -> None:
    World(Arithmetic(native, CONFIGS[config], {**PLAIN, **BOUNDED}[problem]), seed).play()


def test_model_detects_a_missing_barrier(native: ctypes.CDLL, monkeypatch) -> None:
    """Without the barrier in skip(), a late warp misses a phase: the model must detect that."""

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


def test_model_detects_too_few_metadata_slots(native: ctypes.CDLL, monkeypatch) -> None:
    """With as many as there are slots of K, the next metadata overwrites what is still read."""
    init = ThreadBlock.__init__

    def careless(self: ThreadBlock, *args: object) -> None:
        init(self, *args)
        self.metadata = self.metadata[: self.config.stages]

    monkeypatch.setattr(ThreadBlock, "__init__", careless)
    with pytest.raises(AssertionError):
        for seed in range(20):
            World(Arithmetic(native, CONFIGS["64 dropout"], PLAIN["lengths"]), seed).play()


def test_model_detects_a_slot_released_too_early(native: ctypes.CDLL, monkeypatch) -> None:
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
