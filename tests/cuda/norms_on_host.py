"""The backend "cuda" of the norms for CPU tensors: its bindings, and its kernels on the simulator
in tests/sm90/sm90_on_host.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from sm90_on_host.build import Machine, build
from sm90_on_host.guarded import guarded
from sm90_on_host.host_library import DTYPES, HostLibrary
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._op import OPS, Op
from fastattn.ops.layer_norm import cuda

TESTS = Path(__file__).resolve().parent
NAMES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
NORMS = tuple(
    f"{op}_{direction}"
    for op in ("layer_norm", "add_layer_norm", "rms_norm")
    for direction in ("fwd", "bwd")
)
HOST = HostLibrary(TESTS / "norm_bindings.cpp", cuda, "fastattn_cuda_on_host", codes=2)
# The op's name, the address of its problem, the types of rows and parameters -> an error or None.
Launch = Callable[[str, int, str, str], str | None]


def index_of(name: str) -> int:
    """Number of a type, an argument of the kernels."""
    return list(NAMES).index(name)


def machine(name: str, defines: Sequence[str] = (), **options: Any) -> Machine:
    """The kernels for rows of a type, such as kBFloat16."""
    return build(TESTS / "norms.cpp", [f"ONLY_TYPE={name}", *defines], **options)


def use(
    patch: pytest.MonkeyPatch, launch: Launch, multiprocessors: int = 1, host: HostLibrary = HOST
) -> None:
    """From then on `launch` runs what the backend launches. One multiprocessor: thread blocks
    compute several rows.
    """

    def run(op: str, problem: int, dtype: int, parameter_dtype: int) -> str | None:
        return launch(op, problem, DTYPES[dtype], DTYPES[parameter_dtype])

    host.use(patch, run)
    patch.setattr(_env, "multiprocessors", lambda *device: multiprocessors)


def replace(patch: pytest.MonkeyPatch, names: Sequence[str] = NORMS) -> None:
    """From then on the reference of these ops is the backend."""
    for name in names:
        op = OPS[name]
        patch.setitem(op._launchers, "reference", functools.partial(_launch, op))


def _between_guards(x: Any) -> Any:
    """Accesses out of bounds fault, unless the tensor must keep its alignment."""
    return guarded(x) if isinstance(x, Tensor) and x.data_ptr() % 16 == 0 else x


def _launch(op: Op, args: Sequence[Any]) -> Sequence[Tensor]:
    (call,) = op.backend_args(args)
    assert getattr(cuda, f"{op.name}_unsupported")(call) is None
    results = op.allocate(args)
    own = [_between_guards(x) for x in results]
    getattr(cuda, op.name)(call._make(map(_between_guards, call)), *own)
    for result, value in zip(results, own, strict=True):
        result.copy_(value)
    return results


@dataclass(frozen=True)
class Tiling:
    """Tiling of a forward, or of a backward with its strips and lines."""

    width: int
    values: int
    threads: int
    rows: int
    strips: int = 1
    lines: int = 1


def tiling_of(op: str, problem: int) -> Tiling:
    forward = op == "norm_fwd"
    numbers = (ctypes.c_int * 6)()
    name = "on_host_forward_tiling" if forward else "on_host_backward_tiling"
    HOST.native[name](ctypes.c_void_p(problem), numbers)
    return Tiling(*numbers[: 4 if forward else 6])
