"""The warp roles of attention_bwd_sm90.cuh's main kernel: every warp is a coroutine that yields the
conditions it waits for and checks what it reads. Copies and additions complete at random times.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

from sm90_model.backward import Arithmetic, Step, StepMetadata, Work
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
        self.world, self.arithmetic, self.problem = world, world.arithmetic, world.problem
        c = self.config = world.problem.config
        self.work = self.arithmetic.work(world.draw(index))
        self.k, self.v = Buffer(), Buffer()
        self.kv_full = Barrier(2, "kv.full")
        stages, groups = range(c.stages), range(c.groups)
        self.q, self.dout = [Buffer() for _ in stages], [Buffer() for _ in stages]
        self.lse2, self.delta = [Buffer() for _ in stages], [Buffer() for _ in stages]
        self.row_keys = [Buffer() for _ in stages]  # dropout's
        self.metadata: list[StepMetadata | None] = [None for _ in stages]  # a dense mask's
        # What each warp of each warpgroup writes of dS and P: the columns of 16 keys.
        self.ds = [[[Buffer() for _ in range(WARPS)] for _ in groups] for _ in stages]
        self.p = [[Buffer() for _ in range(WARPS)] for _ in groups]
        self.live_keys = [[Buffer() for _ in range(WARPS)] for _ in groups]
        self.dq = [Buffer() for _ in groups]
        self.q_slots = [Slot(f"q{i}", 2, c.groups) for i in stages]
        self.dout_full = [Barrier(2, f"dout{i}.full") for i in stages]
        self.bias_full = [Barrier(1, f"bias{i}.full") for i in stages]
        self.scores_read = Barrier(c.groups, "scores_read")
        self.dq_slots = [Slot(f"dq{g}", WARPS, 1) for g in groups]
        self.scores = NamedBarrier(c.groups * WARPS)
        self.group_barriers = [NamedBarrier(WARPS) for _ in groups]
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
        for metadata in self.arithmetic.metadata(self.work):
            s, step = stage.index, metadata.step
            slot, dout_full = self.q_slots[s], self.dout_full[s]
            yield stage.empty(slot)
            if self.problem.mask:
                self.metadata[s] = metadata
            if self.problem.dropout:
                self.copy(self.row_keys[s], ("row keys", step), slot.full, arrives=False)
            self.copy(self.q[s], ("q", step), slot.full)
            self.copy(self.lse2[s], ("lse2", step), slot.full)
            self.copy(self.dout[s], ("dout", step), dout_full)
            self.copy(self.delta[s], ("delta", step), dout_full)
            if self.problem.bias and not self.problem.fetched:
                yield from self.load_bias(stage, metadata)
            stage.advance()

    # -- an additive mask ----------------------------------------------------------------------
    @property
    def shares_bias_place(self) -> bool:
        """Floats are loaded into dS of the step before."""
        return self.problem.mask == "32" and self.config.splits_keys

    def bias_place(self, stage: int, keys_group: int, half: int) -> list[Buffer]:
        """The buffers of 64 keys of a mask, or of 32: the columns of four warps."""
        if self.config.splits_keys:
            return self.ds[stage ^ half][keys_group]
        rows = self.p if half else self.ds[stage]
        return list(itertools.chain(*(rows[:1] if self.problem.one_row else rows)))

    def load_bias(self, stage: Position, metadata: StepMetadata) -> Role:
        if self.shares_bias_place:
            yield self.after_scores(stage.passed)
        halves = 2 if self.problem.mask == "32" else 1
        full = self.bias_full[stage.index]
        full.arrive(sum(metadata.changes) * halves)
        for group, half in itertools.product(range(len(metadata.changes)), range(halves)):
            if metadata.changes[group]:
                content = ("bias", metadata.step, group, half)
                place = self.bias_place(stage.index, group, half)
                self.copy(place, content, full, expects_bytes=False)

    def after_scores(self, step: int) -> Callable[[], bool]:
        """When dS of the step before has been read."""
        return partial(self.scores_read.passed, step % 2 ^ 1, step - 1)

    # -- dQ --------------------------------------------------------------------------------------
    def add_dq(self, group: int) -> Role:
        position, slot, buffer = Position(1), self.dq_slots[group], self.dq[group]
        for step in self.arithmetic.steps(self.work):
            yield position.full(slot)
            chunk = (step.head, step.row_block, group)
            rank = self.arithmetic.rank(self.work.key_block, step.row_block, self.work.batch)
            if self.world.problem.ordered:
                yield lambda chunk=chunk, rank=rank: self.world.dq_semaphores.get(chunk, 0) == rank
            assert buffer.holds == step
            buffer.readers += 1
            added = self.world.add(chunk, self.work.key_block)
            yield added.has_read
            buffer.readers -= 1
            slot.empty.arrive()
            if self.world.problem.ordered:
                yield added.is_complete
                self.world.dq_semaphores[chunk] = rank + 1
            position.advance()


class Consumer(ConsumerWarp):
    def __init__(self, block: ThreadBlock, group: int, warp: int):
        super().__init__(block, group, warp)
        self.block, self.config, self.problem = block, block.config, block.problem
        self.stage, self.dq_position = Position(self.config.stages), Position(1)

    def run(self) -> Role:
        b = self.block
        steps, taken = list(b.arithmetic.steps(b.work)), 0
        if steps:
            yield partial(b.kv_full.passed, 0, 0)
            yield from self.clear_dead_keys()
        last = not steps
        while not last:
            yield self.stage.full(b.q_slots[self.stage.index])
            step = self.metadata().step if self.problem.mask else steps[taken]
            assert step == steps[taken]
            taken += 1
            ends = yield from self.take_rows(step)
            last = ends if self.problem.mask else taken == len(steps)
        assert taken == len(steps)
        if self.warp == 0:
            b.world.write(b.work, self.group)

    def take_rows(self, step: Step) -> Role:
        """Returns whether it was the last step, if metadata says so."""
        b, s = self.block, self.stage.index
        yield from self.clear_dead_rows(step)
        yield from self.fetch_bias(step)
        self.issue([(b.k, "k"), (b.q[s], ("q", step))])
        yield self.dout_full()
        self.issue([(b.v, "v"), (b.dout[s], ("dout", step))])
        if self.problem.dropout:
            assert b.row_keys[s].holds == ("row keys", step)
        yield from self.finish(1)
        yield from self.add_bias(step)
        assert b.lse2[s].holds == ("lse2", step)
        yield from self.finish(0)
        assert b.delta[s].holds == ("delta", step)
        yield from self.sync_before_stores()
        if self.config.splits_keys:
            self.store(b.ds[s], step)
            yield None
            self.issue([(b.dout[s], ("dout", step))])
            yield from self.sync_scores()
        else:
            self.store(b.p, step)
            self.store(b.ds[s], step)
            yield None
            yield from self.sync_scores()
            self.issue([(b.dout[s], ("dout", step)), *self.all_of(b.p, step)])
        self.issue([(b.k, "k"), *self.all_of(b.ds[s], step)])
        yield from self.finish(1)
        last = yield from self.read_last()
        scores = [] if self.config.splits_keys else self.all_of(b.ds[s], step)
        self.issue([(b.q[s], ("q", step)), *scores])
        yield from self.finish(1)
        self.release_scores()
        yield self.dq_position.empty(b.dq_slots[self.group])
        assert b.dq[self.group].readers == 0, "dQ overwritten while it is added"
        b.dq[self.group].holds = step
        yield None
        b.dq_slots[self.group].full.arrive()
        self.dq_position.advance()
        yield from self.finish(0)
        self.release_rows()
        self.stage.advance()
        return last

    def dout_full(self) -> Callable[[], bool]:
        return self.stage.barrier(self.block.dout_full[self.stage.index])

    def store(self, pieces: list[list[Buffer]], step: Step) -> None:
        own = pieces[self.group][self.warp]
        assert own.readers == 0 and not own.writing, "scores overwrite what is read"
        own.holds = step

    @staticmethod
    def all_of(pieces: list[list[Buffer]], step: Step) -> list[tuple[Buffer, object]]:
        return [(piece, step) for group in pieces for piece in group]

    def sync_scores(self) -> Role:
        yield from self.wait_at(self.block.scores)

    def release_rows(self) -> None:
        if self.warp == 0:
            self.block.q_slots[self.stage.index].empty.arrive()

    # -- what nothing may read -----------------------------------------------------------------
    def clear_dead_keys(self) -> Role:
        """Under a dense mask the warps first exchange which keys are live."""
        b, group_barrier = self.block, self.block.group_barriers[self.group]
        if self.problem.mask:
            b.live_keys[self.group][self.warp].holds = "live keys"
            yield from self.wait_at(group_barrier)
            assert all(word.holds == "live keys" for word in b.live_keys[self.group])
            yield from self.wait_at(group_barrier)
        elif b.work.plan.keys != (0, self.config.keys):
            yield from self.wait_at(group_barrier)

    def clear_dead_rows(self, step: Step) -> Role:
        b, s = self.block, self.stage.index
        clean = b.work.plan.clean
        is_clean = clean[0] <= step.row_block < clean[1]
        if self.metadata().has_dead if self.problem.mask else not is_clean:
            yield self.dout_full()
            assert b.q[s].holds == ("q", step) and b.dout[s].holds == ("dout", step)
            yield from self.wait_at(b.group_barriers[self.group])

    # -- a dense mask --------------------------------------------------------------------------
    def metadata(self) -> StepMetadata:
        metadata = self.block.metadata[self.stage.index]
        assert metadata is not None and metadata.number == self.stage.passed, (
            "another step's metadata"
        )
        return metadata

    def read_last(self) -> Role:
        yield None
        return self.problem.mask and self.metadata().last

    @property
    def keys_group(self) -> int:
        return self.group if self.config.splits_keys else 0

    def is_changed(self) -> bool:
        return self.problem.bias and self.metadata().changes[self.keys_group]

    def own_bias(self, step: Step) -> tuple[list[Buffer], object]:
        """What this warp reads of an additive mask: the columns of its 16 keys."""
        wide, splits = self.problem.mask == "32", self.config.splits_keys
        half = self.warp // 2 if wide else 0
        place = self.block.bias_place(self.stage.index, self.keys_group, half)
        rows = 0 if splits or self.problem.one_row else self.group * WARPS
        columns = (2 * (self.warp % 2), 2 * (self.warp % 2) + 1) if wide else (self.warp,)
        return [place[rows + i] for i in columns], ("bias", step, self.keys_group, half)

    def fetch_bias(self, step: Step) -> Role:
        if not self.problem.fetched or not self.is_changed():
            return
        if self.block.shares_bias_place:
            yield self.block.after_scores(self.stage.passed)
        pieces, content = self.own_bias(step)
        for piece in pieces:
            # Of a row that is broadcast, warpgroups that share keys write the same values.
            assert piece.holds == content or (piece.readers == 0 and not piece.writing)
            piece.holds = content
        yield None

    def add_bias(self, step: Step) -> Role:
        if not self.is_changed():
            return
        if not self.problem.fetched:
            yield self.stage.barrier(self.block.bias_full[self.stage.index])
        pieces, content = self.own_bias(step)
        for piece in pieces:
            assert piece.holds == content, f"{piece.holds} read, {content} wanted"
            piece.readers += 1
        yield None
        for piece in pieces:
            piece.readers -= 1

    def sync_before_stores(self) -> Role:
        if not self.problem.bias:
            return
        if not self.config.splits_keys and self.problem.one_row:
            yield from self.wait_at(self.block.scores)
        elif self.problem.mask == "32":
            yield from self.wait_at(self.block.group_barriers[self.group])

    def release_scores(self) -> None:
        if self.warp == 0 and self.block.shares_bias_place:
            self.block.scores_read.arrive()


class Addition:
    """A bulk addition: it reads its shared memory, then completes."""

    def __init__(self) -> None:
        self.progress = 0

    def has_read(self) -> bool:
        return self.progress > 0

    def is_complete(self) -> bool:
        return self.progress > 1


class World:
    """Global memory, and a random schedule of roles and copies."""

    def __init__(self, arithmetic: Arithmetic, seed: int):
        self.arithmetic, self.problem = arithmetic, arithmetic.problem
        self.chance = random.Random(seed)
        # How soon copies complete: in some runs, only when no role can run.
        self.haste = self.chance.choice((0.2, 0.2, 0.02))
        self.events: list[Callable[[], None]] = []
        self.dq_semaphores: dict[tuple[int, int, int], int] = {}
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
            if self.events and (not ready or self.chance.random() < self.haste):
                self.events.pop(self.chance.randrange(len(self.events)))()
                continue
            assert ready, "deadlock"
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
