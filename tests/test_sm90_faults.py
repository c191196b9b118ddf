"""Whether the stand-in for Hopper notices faults in the forward that runs on it.

Every fault that it knows of, a wait left out, an arrival too many, the other parity, is committed
at every place of a kernel where it is possible, one at a time. All but harmless ones must be
noticed, by the machine itself: nobody looks at results here.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import test_sm90_on_host as forward
from sm90_on_host.build import CSRC, FAULTS, LATE, RANDOM, Machine, Place, build, missing

TESTS = Path(__file__).resolve().parent
ORDERS = (LATE, RANDOM, RANDOM + 1)
pytestmark = pytest.mark.slow

# A fault, what the lines of source have that it is committed at, and why it does no harm here.
HARMLESS = (
    ("no pin", "ptx::pin(rP)", "the operand's next values come from pinned scores"),
    ("no bulk wait", "} ptx::cp_async_bulk_wait_group();", "the end of a launch completes stores"),
    ("no syncwarp", "void release_warp(", "g++ reads the message long before it is released"),
    ("bulk wait for reads only", "} ptx::cp_async_bulk_wait_group();", "as before"),
)


class Saboteur:
    """Stands for a machine: a call runs once as it should, then with every fault."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.noticed: dict[tuple[int, int], bool] = {}

    def call(self, function: str, *arguments: object) -> str | None:
        run = partial(self.machine.call, function, *arguments)
        self.machine.record(True)
        for self.machine.order in ORDERS:
            if failure := run():
                return failure
        places = self.machine.places()
        self.machine.record(False)
        for place in places:
            self.noticed[place.key] = self.noticed.get(place.key, False) or self.notices(run, place)
        return run()

    def notices(self, run: Callable[[], str | None], place: Place) -> bool:
        self.machine.commit(place)
        try:
            for self.machine.order in ORDERS:
                if run() is not None:
                    return True
        finally:
            self.machine.commit(None)
        return False

    def unnoticed(self) -> list[str]:
        """Those that are not harmless."""
        places = [key for key, noticed in self.noticed.items() if not noticed]
        described = [(FAULTS[fault], _lines(self.machine, address)) for fault, address in places]
        return [
            f"{fault}: {lines}"
            for fault, lines in described
            if not any(fault == kind and part in lines for kind, part, _ in HARMLESS)
        ]


def _lines(machine: Machine, address: int) -> str:
    """The line of source at an address, after the line before it, and those that call it."""
    places = re.findall(r"([\w.]+):(\d+)", machine.source(address))
    files = {path.name: path.read_text().splitlines() for path in CSRC.rglob("*.cuh")}
    lines = [files[name][int(n) - 2 : int(n)] for name, n in places if name in files]
    return " < ".join(" ".join(line.strip() for line in pair) for pair in lines)


# One instance, cases that between them need everything it has.
FORWARD = (
    forward.Case(128, "kBand", M=300, N=420, causal=2, scale=-0.1),
    forward.Case(128, "kBand", M=520, N=100, H=3, K=3, causal=1),
    forward.Case(128, "kBand", packed=((40, 50),) * 14, H=1, K=1),
    forward.CASES["128 packed window"],
)


def test_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := missing():
        pytest.skip(reason)
    instance = f"INSTANCES={FORWARD[0].instance}"
    saboteur = Saboteur(build(tmp_path / "forward", TESTS / "sm90_attention.cpp", [instance]))
    for case in FORWARD:
        monkeypatch.setitem(forward.CASES, "here", case)
        forward.test_forward(lambda _: saboteur, "here")
    assert len(saboteur.noticed) > 100
    assert not saboteur.unnoticed()
