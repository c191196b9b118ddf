"""The barriers of the Hopper attention backward, played through without a GPU.

As test_sm90_protocol.py does for the forward: every warp of attention_bwd_sm90.cuh is a coroutine,
copies and additions finish whenever chance has it, and only as many thread blocks run at once as
the GPU has room for. Checked besides: the blocks of keys add to a block of rows in their order,
each once, and none waits for one that has not begun; an additive mask comes into the place of dS
when nobody reads that any more, and nothing takes its place before it has been read. What a thread
block visits comes from the kernel's own headers, which are checked against the definition.
"""

import ctypes
from collections.abc import Callable

import pytest
from sm90_model import backward
from sm90_model.backward import CONFIGS, DENSE, PROBLEMS, Arithmetic, Config, Problem, Work
from sm90_model.backward_roles import Consumer, ThreadBlock, World
from sm90_model.hardware import Barrier, Position, Role


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return backward.arithmetic(tmp_path_factory.mktemp("shim"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("problem", PROBLEMS | DENSE)
def test_protocol(native: ctypes.CDLL, problem: str, seed: int) -> None:
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

    monkeypatch.setattr(Consumer, "sync_scores", careless)
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


_FLOATS = "bias 32, head dim 128"


def test_model_notices_a_last_step_that_is_asked_for_too_late(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When Q has been handed back, the metadata beside it may be another step's."""
    release = Consumer.release_rows

    def late(self: Consumer) -> None:
        release(self)
        self.metadata()

    monkeypatch.setattr(Consumer, "release_rows", late)
    _notices(native, DENSE["dense mask"])


@pytest.mark.parametrize("way", ["", ", fetched"])
def test_model_notices_floats_that_come_too_early(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Half of them lie where the products with dS of the step before still read."""

    def at_once(self: ThreadBlock, step: int) -> Callable[[], bool]:
        return lambda: True

    monkeypatch.setattr(ThreadBlock, "after_scores", at_once)
    _notices(native, DENSE[f"bias 32{way}, head dim 128"])


def test_model_notices_scores_handed_back_too_early(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the last metadata has been looked at, before the products with dS are complete."""
    look, release = Consumer.read_last, Consumer.release_scores

    def early(self: Consumer) -> Role:
        release(self)
        return (yield from look(self))

    monkeypatch.setattr(Consumer, "read_last", early)
    monkeypatch.setattr(Consumer, "release_scores", lambda self: None)
    _notices(native, DENSE[_FLOATS])


def test_model_notices_one_warpgroup_that_reads_for_all(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of dS are every warpgroup's: one arrival does not speak for the other."""
    make = ThreadBlock.__init__

    def careless(self: ThreadBlock, world: World, index: int) -> None:
        make(self, world, index)
        self.scores_read = Barrier(1, "scores_read")

    def first(self: Consumer) -> None:
        if self.warp == 0 and self.group == 0 and self.block.shares_bias_place:
            self.block.scores_read.arrive()

    monkeypatch.setattr(ThreadBlock, "__init__", careless)
    monkeypatch.setattr(Consumer, "release_scores", first)
    _notices(native, DENSE[_FLOATS])


@pytest.mark.parametrize(
    "problem",
    [
        _FLOATS,  # other warps of the warpgroup read them
        "bias 32, fetched, head dim 64",
        "bias 32, head dim 192",
        "bias 16, one row, head dim 192",  # other warpgroups do
        "bias 16, one row fetched, head dim 256",
    ],
)
def test_model_notices_scores_over_a_mask_that_is_still_read(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def careless(self: Consumer) -> Role:
        yield None

    monkeypatch.setattr(Consumer, "sync_before_stores", careless)
    _notices(native, DENSE[problem])


def test_model_notices_warpgroups_that_do_not_meet_over_one_row(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one row serves warpgroups that share keys, the meeting is for all of them."""

    def careless(self: Consumer) -> Role:
        yield from self.wait_at(self.block.group_barriers[self.group])

    monkeypatch.setattr(Consumer, "sync_before_stores", careless)
    _notices(native, DENSE["bias 32, one row, head dim 256"])


def test_model_notices_a_mask_that_nobody_waits_for(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Position.barrier

    def careless(self: Position, full: Barrier) -> Callable[[], bool]:
        return (lambda: True) if full.name.startswith("bias") else barrier(self, full)

    monkeypatch.setattr(Position, "barrier", careless)
    _notices(native, DENSE["bias 16, head dim 64"])
