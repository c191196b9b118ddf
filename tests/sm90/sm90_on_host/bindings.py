"""The bindings of the Hopper kernels for CPU tensors: what they launch runs on a simulator.

The plan is that of the library, too (see host_library.py). Sections of the workspace end before
inaccessible pages, except within `own_layout`.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from sm90_on_host.build import HERE
from sm90_on_host.host_library import DTYPES, HostLibrary
from torch import Tensor

from fastattn.ops._op import Op
from fastattn.ops.attention import sm90

VARIANTS = (
    "kFull", "kBounded", "kDropout", "kMask", "kBias", "kMaskDropout", "kBiasDropout", "kSinks",
    "kPaged", "kScores", "kScoresDropout", "kScoresDense", "kPagedScores",
)  # fmt: skip
HOST = HostLibrary(HERE / "bindings.cpp", sm90, "fastattn_sm90_on_host", codes=3)


@dataclass(frozen=True)
class Instance:
    dtype: str
    head_dim: int
    variant: str


# The op's name, the address of its problem, the instance -> an error message or None.
Launch = Callable[[str, int, Instance], str | None]


def use(patch: pytest.MonkeyPatch, launch: Launch, host: HostLibrary = HOST) -> None:
    """From then on `launch` runs what the backend sm90 launches."""

    def run(op: str, problem: int, dtype: int, head_dim: int, variant: int) -> str | None:
        return launch(op, problem, Instance(DTYPES[dtype], head_dim, VARIANTS[variant]))

    host.use(patch, run)


@dataclass(frozen=True)
class Plan:
    """Plan of a forward."""

    splits: int
    counted: bool
    ordered: bool
    copied: int  # bytes of an element of a mask, 0 if it is not copied


def plan_of(problem: int) -> Plan:
    result = (ctypes.c_int * 4)()
    HOST.native.on_host_forward_plan(ctypes.c_void_p(problem), result)
    return Plan(result[0], bool(result[1]), bool(result[2]), result[3])


@contextlib.contextmanager
def own_layout() -> Iterator[None]:
    """Inside, workspaces have the library's own layout, without guards between sections."""
    HOST.native.on_host_guards_sections(0)
    try:
        yield
    finally:
        HOST.native.on_host_guards_sections(1)


def sections() -> tuple[list[tuple[int, int]], int]:
    """Offset and size of each section of the last workspace in the library's own layout, and the
    size that was asked for.
    """
    most = 32
    numbers = (ctypes.c_int64 * (2 * most))()
    count = HOST.native.on_host_sections(numbers, most)
    assert count <= most and HOST.last_workspace is not None
    sizes = [(numbers[2 * i], numbers[2 * i + 1]) for i in range(count)]
    return sizes, HOST.last_workspace.numel()


def plan(splits: int, counted: bool, ordered: bool) -> None:
    """The forward's from then on; its own again with no splits."""
    HOST.native.on_host_plan(splits, int(counted), int(ordered))


def run_simulated(op: Op, args: Sequence[Any], results: Sequence[Tensor]) -> None:
    """Launches what the backend does, which must not refuse it."""
    (call,) = op.backend_args(args)
    assert getattr(sm90, f"{op.name}_unsupported")(call) is None
    getattr(sm90, op.name)(call, *results)
