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
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from sm90_model import backward
from sm90_model.backward import CONFIGS, PROBLEMS, Arithmetic, Config, Problem, Step, Work
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


class ThreadBlock(SharedMemory):
    def __init__(self, world: "World", index: int):
        super().__init__(world.events)
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


class Consumer(ConsumerWarp):
    def __init__(self, block: ThreadBlock, group: int, warp: int):
        super().__init__(block, group, warp)
        self.block, self.config = block, block.config
        self.stage, self.dq_position = Position(self.config.stages), Position(1)

    def run(self) -> Role:
        b = self.block
        steps = list(b.arithmetic.steps(b.work))
        if steps:
            yield partial(b.kv_full.passed, 0, 0)
            if b.work.plan.keys != (0, self.config.keys):
                yield from self.wait_at(b.meetings[self.group])
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
            yield from self.wait_at(b.meetings[self.group])
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
        yield from self.wait_at(self.block.scores)

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


# Blocks of keys pass over blocks of rows, and their turns with them.
DENSE = {
    "dense mask": Problem(
        400, 500, group=2, resident=3, empty=((0, 0), (1, 2), (2, 0), (2, 2), (0, 2))
    ),
    "dense mask, one at a time": Problem(400, 500, resident=1, right=0, empty=((0, 1), (1, 1))),
}


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return backward.arithmetic(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("problem", PROBLEMS | DENSE)
def test_protocol(native: ctypes.CDLL, problem: str) -> None:
    for seed in range(2):
        World(Arithmetic(native, (PROBLEMS | DENSE)[problem]), seed).play()


def _notices(native: ctypes.CDLL, problem: Problem) -> None:
    with pytest.raises(AssertionError):
        for seed in range(20):
            World(Arithmetic(native, problem), seed).play()


def test_model_notices_a_turn_of_nobody(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of keys that passes over waits for none, and nobody waits for it."""

    def counts_all(self: Arithmetic, key_block: int, row_block: int, batch: int) -> int:
        return key_block - self.visitors(row_block, batch)[0]

    monkeypatch.setattr(Arithmetic, "rank", counts_all)
    _notices(native, DENSE["dense mask"])


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
