"""The bindings of the Hopper kernels for CPU tensors: what they launch runs on a simulator.

Schemas, the conversion of arguments, the plan and the workspace are those of the library; sections
of the workspace end before inaccessible pages, except within `own_layout`.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sm90_on_host.build import CSRC, CUDA, HERE, compile_cxx, workshop
from sm90_on_host.guarded import guarded
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.attention import sm90

DTYPES = ("kFloat32", "kBFloat16", "kFloat16")
VARIANTS = (
    "kFull", "kBounded", "kDropout", "kMask", "kBias", "kMaskDropout", "kBiasDropout", "kSinks",
    "kScores", "kScoresDropout", "kScoresMask", "kScoresMaskDropout",
)  # fmt: skip
_Launcher = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int
)


@dataclass(frozen=True)
class Instance:
    dtype: str
    head_dim: int
    variant: str


# The op's name, the address of its problem, the instance -> an error message or None.
Launch = Callable[[str, int, Instance], str | None]


@functools.cache
def library() -> ctypes.CDLL:
    """The bindings, which register ops of fastattn_sm90_on_host."""
    path = Path(workshop().name) / "bindings.so"
    own = Path(torch.__file__).parent
    includes = [f"-I{HERE}", f"-I{CSRC}", "-isystem", own / "include", "-isystem", CUDA]
    links = [f"-L{own / 'lib'}", "-ltorch_cpu", "-lc10"]
    defines = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags = ["-O1", "-g1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique"]
    compile_cxx(*flags, *defines, *includes, "-o", path, HERE / "bindings.cpp", *links)
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def use(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    """From then on `launch` runs what the backend sm90 launches."""
    message = None

    def launcher(op: bytes, problem: int, dtype: int, head_dim: int, variant: int) -> int | None:
        nonlocal message
        try:
            failure = launch(
                op.decode(), problem, Instance(DTYPES[dtype], head_dim, VARIANTS[variant])
            )
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        message = None if failure is None else ctypes.create_string_buffer(failure.encode())
        return None if message is None else ctypes.addressof(message)

    kept = _Launcher(launcher)
    patch.setattr(library(), "kept", kept, raising=False)  # no longer than it is called
    library().on_host_launcher(kept)
    patch.setattr(sm90, "_library", torch.ops.fastattn_sm90_on_host)
    patch.setattr(sm90, "unavailable", lambda: None)
    patch.setattr(_native, "workspace", workspace)


@dataclass(frozen=True)
class Plan:
    """Of a forward."""

    splits: int
    counted: bool
    ordered: bool
    copied: int  # bytes of an element of a mask, 0 if it is not copied


def plan_of(problem: int) -> Plan:
    result = (ctypes.c_int * 4)()
    library().on_host_forward_plan(ctypes.c_void_p(problem), result)
    return Plan(result[0], bool(result[1]), bool(result[2]), result[3])


_workspaces: list[Tensor] = []  # the last one


def workspace(size: int, device: torch.device) -> Tensor:
    _workspaces[:] = [guarded(torch.full((size,), 0xFF, dtype=torch.uint8, device=device))]
    return _workspaces[0]


def poison_workspace() -> None:
    """The last one, for another launch of its problem."""
    library().on_host_guard(0)
    _workspaces[0].fill_(0xFF)
    library().on_host_guard(1)


@contextlib.contextmanager
def own_layout() -> Iterator[None]:
    """Inside, workspaces have the library's own layout, without guards between sections."""
    library().on_host_guards_sections(0)
    try:
        yield
    finally:
        library().on_host_guards_sections(1)


def sections() -> tuple[list[tuple[int, int]], int]:
    """Offset and size of each section of the last workspace in the library's own layout, and the
    size that was asked for.
    """
    most = 32
    numbers = (ctypes.c_int64 * (2 * most))()
    count = library().on_host_sections(numbers, most)
    assert count <= most
    return [(numbers[2 * i], numbers[2 * i + 1]) for i in range(count)], _workspaces[0].numel()


def plan(splits: int, counted: bool, ordered: bool) -> None:
    """The forward's from then on; its own again with no splits."""
    library().on_host_plan(splits, int(counted), int(ordered))
