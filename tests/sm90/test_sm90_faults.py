"""Whether the simulator of Hopper detects faults in the forward that runs on it.

Every fault that it supports (a missing wait, an extra arrival, the other parity, ...) is injected
at every place of a kernel where it is possible, one at a time. The simulator itself must detect
all but the harmless ones: results are not compared here.
"""

from functools import partial
from pathlib import Path

import pytest
import test_sm90_on_host as forward
import torch
from sm90_on_host import bindings
from sm90_on_host.build import build, changed_sources, missing
from sm90_on_host.fault_injector import ORDERS, FaultInjector, Harmless

TESTS = Path(__file__).resolve().parent
pytestmark = [pytest.mark.slow, pytest.mark.long]

# All of these stay in the kernel: they are harmless on this simulator, or because of the code
# around them. PTX does not say that the end of a launch completes its asynchronous stores, and
# barriers that replace another one serve a different purpose.
HARMLESS = (
    Harmless("no pin", "ptx::pin(rP)", "the operand's next values come from pinned scores"),
    Harmless(
        "no bulk wait",
        "} ptx::cp_async_bulk_wait_group();",
        "the end of a launch completes stores",
    ),
    Harmless(
        "no bar.sync",
        "clear_dead_values(own, tile, n);",
        "the ping-pong barrier follows, or clear_dead_values of the last block",
    ),
    Harmless("bulk wait for reads only", "} ptx::cp_async_bulk_wait_group();", "as before"),
)
# One instance, cases that between them need everything it has.
FORWARD = (
    forward.Case(128, "kBounded", M=300, N=420, causal=2, scale=-0.1),
    forward.Case(128, "kBounded", M=520, N=100, H=3, K=3, causal=1),
    forward.Case(128, "kBounded", packed=((40, 50),) * 14, H=1, K=1),
    forward.CASES["128 packed window"],
    # Dead keys to the left of the window: in the last of several blocks.
    forward.Case(128, "kBounded", M=200, N=600, causal=2, window=(40, 0), H=1, K=1),
)


class Forward(FaultInjector):
    """Takes the place of a machine: a call is examined."""

    def call(self, function: str, *arguments: object) -> str | None:
        return self.examine(partial(self.run, function, *arguments))

    def run(self, function: str, *arguments: object) -> str | None:
        bindings.poison_workspace()
        return self.machine.call(function, *arguments)


def test_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    defines = forward.defines(FORWARD[0].instance)
    injector = Forward(build(tmp_path / "forward", TESTS / "sm90_attention.cpp", defines))
    for case in FORWARD:
        monkeypatch.setitem(forward.CASES, "here", case)
        forward.test_forward(lambda _: injector, monkeypatch, "here")
    assert len(injector.detected) > 100
    assert not injector.undetected(HARMLESS)
    assert not injector.unused(HARMLESS)


# Faults that need other instances: a path below csrc/attention/sm90/forward, its text, a wrong one,
# and a case that detects it.
REBUILT = {
    # A late warp misses a phase.
    "no barrier between skipped blocks": (
        "part.cuh",
        "        sync_group();\n        release_key(false);",
        "        release_key(false);",
        forward.Case(64, "kBounded", M=70, N=1500, causal=2, H=1, K=1),
    ),
    # The next metadata overwrites what is still read.
    "as many slots of metadata as of K": (
        "config.cuh",
        "kMetadataSlots = 2 * kStages",
        "kMetadataSlots = kStages",
        forward.Case(64, "kDropout", M=70, N=1000, dropout_p=0.3, H=1, K=1),
    ),
    # The copy overtakes a warp that still reads.
    "one arrival frees a slot of the mask": (
        "storage.cuh",
        "slot.empty.init(kWarpsPerGroup);",
        "slot.empty.init(1);",
        forward.Case(128, "kBias", mask=torch.bfloat16, M=130, N=400, H=1, K=1),
    ),
}


@pytest.mark.parametrize("name", REBUILT)
def test_other_instances(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    file, right, wrong, case = REBUILT[name]
    monkeypatch.setitem(forward.CASES, "here", case)
    defines, source = forward.defines(case.instance), TESTS / "sm90_attention.cpp"
    faulty = changed_sources(tmp_path, f"attention/sm90/forward/{file}", right, wrong)
    machine = build(tmp_path / "right", source, defines)
    for machine.order in ORDERS:
        forward.test_forward(lambda _: machine, monkeypatch, "here")
    machine = build(tmp_path / "wrong", source, defines, csrc=faulty)
    with pytest.raises(RuntimeError, match=r"block \d+"):
        for machine.order in ORDERS:
            forward.test_forward(lambda _: machine, monkeypatch, "here")
