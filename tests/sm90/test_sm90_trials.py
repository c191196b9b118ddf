"""The forms of Hopper kernels that FASTATTN_TRIALS builds, on the simulator: results, and whether
faults in what is new are detected. Those of `ffn_loop` are in test_sm90_ffn.py.
"""

from functools import partial
from pathlib import Path

import pytest
import test_sm90_on_host as forward
from native_build import build_script
from sm90_on_host.build import FAULTS, MUTATION, Machine, Mutation, Place, build, missing
from test_sm90_faults import Forward

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


def machine_of(
    source: str, trials: str, defines: list[str], mutations: tuple[Mutation, ...] = ()
) -> Machine:
    """The machine that FASTATTN_TRIALS builds."""
    if reason := missing():
        pytest.skip(reason)
    macros = [flag.removeprefix("-D") for flag in build_script().trial_flags(trials)]
    return build(TESTS / source, defines + macros, mutations=mutations)


class Waits(Forward):
    """Injects the faults "no grid wait" alone."""

    def _injects(self, place: Place) -> bool:
        return FAULTS[place.fault] == "no grid wait"


# -- the forward's tile scheduler ------------------------------------------------------------------
_FORWARD = partial(machine_of, "sm90_attention.cpp", "fwd_swizzle,fwd_counter")
_ZEROING = Mutation("attention/sm90/masks/hash_columns.cuh", "*counter = 0;", "*counter = 1;")
_CASES = ("64 causal", "64 packed splits", "64 mask", "128 packed dropout", "128 causal splits")


@pytest.mark.parametrize("name", _CASES)
def test_forward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = _FORWARD(forward.defines(forward.CASES[name].instance))
    forward.test_forward(lambda _: machine, monkeypatch, name)


@pytest.mark.parametrize("name", ["64 causal", "128 packed dropout"])
def test_counter_is_zeroed_before_it_is_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = _FORWARD(forward.defines(forward.CASES[name].instance), (_ZEROING,))
    injector = Waits(machine)
    forward.test_forward(lambda _: injector, monkeypatch, name)
    assert injector.detected and not injector.undetected()
    machine.inject(Place(MUTATION, 0, 1))
    with pytest.raises((AssertionError, RuntimeError)):
        forward.test_forward(lambda _: machine, monkeypatch, name)


def test_swizzle_group() -> None:
    """At most two waves of tiles, and keys and values that fit into L2."""
    instance = forward.CASES["128 causal splits"].instance
    capped, today = (build_of(forward.defines(instance)).library for build_of in (_FORWARD, _today))
    for queries, most in ((512, 64), (2048, 16), (4096, 8), (16384, 2), (1 << 20, 1)):
        at = (256, queries, queries, 128, 128)
        assert capped.swizzle_group(*at) == min(most, today.swizzle_group(*at)) >= 1


def _today(defines: list[str]) -> Machine:
    return build(TESTS / "sm90_attention.cpp", defines)
