"""Barriers and shared memory of a thread block for models of its warp roles: every wait is a
condition that a coroutine yields. An error of the protocol fails an assertion.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[3] / "csrc"
WARPS = 4
Range = tuple[int, int]
Role = Iterator[Callable[[], bool] | None]


def compiled(folder: Path, source: str) -> ctypes.CDLL:
    """Functions over the kernels' own headers."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    shim, library = folder / "shim.cpp", folder / "shim.so"
    shim.write_text(source)
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", "-o", library, shim]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


class Barrier:
    """An mbarrier. `passed` takes the expected phase and fails on any other."""

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
    """A tile of shared memory: its contents, readers, and whether a copy into it is pending."""

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
        return self.barrier(slot.full)

    def barrier(self, full: Barrier) -> Callable[[], bool]:
        phase = self.passed // self.slots
        return partial(full.passed, phase % 2, phase)

    def empty(self, slot: Slot) -> Callable[[], bool]:
        phase = self.passed // self.slots
        return partial(slot.empty.passed, phase % 2 ^ 1, phase - 1)

    def advance(self) -> None:
        self.passed += 1

    def next(self) -> "Position":
        following = Position(self.slots)
        following.passed = self.passed + 1
        return following


class SharedMemory:
    """Of a thread block. `events` happen at random times."""

    def __init__(self, events: list[Callable[[], None]]):
        self.events = events
        self.issued: list[list[int]] = []  # products, by warpgroup and warp

    def copy(
        self,
        to: Buffer | Sequence[Buffer],
        content: object,
        full: Barrier,
        arrives: bool = True,
        expects_bytes: bool = True,
    ) -> None:
        """Copies one box into one or several buffers. Expects its bytes, with an arrival or without
        one, unless they are expected already.
        """
        buffers = [to] if isinstance(to, Buffer) else to
        for buffer in buffers:
            assert buffer.readers == 0 and not buffer.writing, (
                f"{buffer.holds} overwritten by {content}"
            )
            buffer.writing, buffer.holds = True, None
        if expects_bytes and arrives:
            full.arrive(1)
        elif expects_bytes:
            full.bytes += 1

        def land() -> None:
            for buffer in buffers:
                buffer.writing, buffer.holds = False, content
            full.deliver(1)

        self.events.append(land)


class ConsumerWarp:
    """One warp of a consumer warpgroup. Reads are counted for warp 0, the leader."""

    def __init__(self, memory: SharedMemory, group: int, warp: int):
        self.memory, self.group, self.warp = memory, group, warp
        self.flying: list[tuple[int, list[Buffer]]] = []
        self.count = 0

    def issue(self, reads: list[tuple[Buffer, object]]) -> None:
        if self.warp == 0:
            for buffer, content in reads:
                assert buffer.holds == content, f"{buffer.holds} read, {content} wanted"
                buffer.readers += 1
        self.count += 1
        self.memory.issued[self.group][self.warp] = self.count
        self.flying.append((self.count, [buffer for buffer, _ in reads]))

    def finish(self, pending: int) -> Role:
        """wgmma.wait_group: products are complete once all four warps have issued them."""
        while len(self.flying) > pending:
            number, buffers = self.flying[0]
            yield lambda number=number: min(self.memory.issued[self.group]) >= number
            if self.warp == 0:
                for buffer in buffers:
                    buffer.readers -= 1
            self.flying.pop(0)

    @staticmethod
    def wait_at(barrier: NamedBarrier) -> Role:
        generation = barrier.arrive()
        yield partial(barrier.passed, generation)
