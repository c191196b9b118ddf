"""A model of the barriers of the Hopper attention backward, without a GPU.

As test_sm90_protocol.py does for the forward: every warp of attention_bwd_sm90.cuh is a coroutine,
copies and additions complete at random times, and only as many thread blocks run at once as are
resident on the GPU. Also checked: the blocks of keys add to a block of rows in order, each once,
and none waits for one that has not started; an additive mask is loaded into the buffer of dS after
the last read of dS, and is not overwritten before it has been read. What a thread block visits
comes from the kernel's own headers, which are checked against the definition.
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


def _detects(native: ctypes.CDLL, problem: Problem) -> None:
    with pytest.raises(AssertionError):
        for seed in range(20):
            World(Arithmetic(native, problem), seed).play()


def test_model_detects_a_wait_for_a_skipped_block(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of keys that skips a block of rows does not wait, and is not waited for."""

    def counts_all(self: Arithmetic, key_block: int, row_block: int, batch: int) -> int:
        return key_block - self.visitors(row_block, batch)[0]

    monkeypatch.setattr(Arithmetic, "rank", counts_all)
    _detects(native, DENSE["dense mask"])


def test_model_detects_a_missing_barrier(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ reads what the other warpgroup has not written yet."""

    def careless(self: Consumer) -> Role:
        yield None

    monkeypatch.setattr(Consumer, "sync_scores", careless)
    _detects(native, PROBLEMS["several"])


def test_model_detects_a_single_buffer_of_scores(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One barrier a step is enough only for two buffers of dS."""
    make = ThreadBlock.__init__

    def shared(self: ThreadBlock, world: World, index: int) -> None:
        make(self, world, index)
        self.ds[1] = self.ds[0]

    monkeypatch.setattr(ThreadBlock, "__init__", shared)
    _detects(native, PROBLEMS["several"])


def test_model_detects_shared_weights_beside_two_stages(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One buffer of P is enough only where one buffer of Q says that it has been read."""
    monkeypatch.setitem(CONFIGS, 192, Config(3, 96, 2, 64, False))
    _detects(native, PROBLEMS["head dim 192"])


def test_model_detects_an_order_against_the_semaphores(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last keys first: the only running thread block waits for one that has not begun."""
    forwards = Arithmetic.work

    def backwards(self: Arithmetic, number: int) -> Work:
        return forwards(self, self.blocks - 1 - number)

    monkeypatch.setattr(Arithmetic, "work", backwards)
    _detects(native, PROBLEMS["one at a time"])


_FLOATS = "bias 32, head dim 128"


def test_model_detects_a_last_step_that_is_asked_for_too_late(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Q has been released, its metadata may be another step's."""
    release = Consumer.release_rows

    def late(self: Consumer) -> None:
        release(self)
        self.metadata()

    monkeypatch.setattr(Consumer, "release_rows", late)
    _detects(native, DENSE["dense mask"])


@pytest.mark.parametrize("way", ["", ", fetched"])
def test_model_detects_floats_that_come_too_early(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Half of them lie where the products with dS of the step before still read."""

    def at_once(self: ThreadBlock, step: int) -> Callable[[], bool]:
        return lambda: True

    monkeypatch.setattr(ThreadBlock, "after_scores", at_once)
    _detects(native, DENSE[f"bias 32{way}, head dim 128"])


def test_model_detects_scores_released_too_early(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the metadata has been read, but before the products with dS are complete."""
    look, release = Consumer.read_last, Consumer.release_scores

    def early(self: Consumer) -> Role:
        release(self)
        return (yield from look(self))

    monkeypatch.setattr(Consumer, "read_last", early)
    monkeypatch.setattr(Consumer, "release_scores", lambda self: None)
    _detects(native, DENSE[_FLOATS])


def test_model_detects_one_warpgroup_that_reads_for_all(
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
    _detects(native, DENSE[_FLOATS])


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
def test_model_detects_scores_over_a_mask_that_is_still_read(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def careless(self: Consumer) -> Role:
        yield None

    monkeypatch.setattr(Consumer, "sync_before_stores", careless)
    _detects(native, DENSE[problem])


def test_model_detects_a_missing_barrier_of_all_warpgroups_over_one_row(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a row is broadcast, warpgroups that share keys need a barrier of all of them."""

    def careless(self: Consumer) -> Role:
        yield from self.wait_at(self.block.group_barriers[self.group])

    monkeypatch.setattr(Consumer, "sync_before_stores", careless)
    _detects(native, DENSE["bias 32, one row, head dim 256"])


def test_model_detects_a_missing_wait_for_a_mask(
    native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier = Position.barrier

    def careless(self: Position, full: Barrier) -> Callable[[], bool]:
        return (lambda: True) if full.name.startswith("bias") else barrier(self, full)

    monkeypatch.setattr(Position, "barrier", careless)
    _detects(native, DENSE["bias 16, head dim 64"])
