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
from sm90_on_host.bindings import DTYPES
from sm90_on_host.build import CSRC, CUDA, HERE, Machine, build, compile_cxx, workshop
from sm90_on_host.guarded import guarded
from torch import Tensor

from fastattn.ops import _env, _native
from fastattn.ops._op import OPS, Op
from fastattn.ops.layer_norm import cuda

TESTS = Path(__file__).resolve().parent
NAMES = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16, "kFloat16": torch.float16}
NORMS = tuple(
    f"{op}_{direction}"
    for op in ("layer_norm", "add_layer_norm", "rms_norm")
    for direction in ("fwd", "bwd")
)
_Launcher = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
)
# The op's name, the address of its problem, the types of rows and parameters -> an error or None.
Launch = Callable[[str, int, str, str], str | None]


def index_of(name: str) -> int:
    """Of a type, as the kernels are called with it."""
    return list(NAMES).index(name)


@functools.cache
def library() -> ctypes.CDLL:
    """The bindings, which register ops of fastattn_cuda_on_host."""
    path = Path(workshop().name) / "norm_bindings.so"
    own = Path(torch.__file__).parent
    includes = [f"-I{HERE}", f"-I{CSRC}", "-isystem", own / "include", "-isystem", CUDA]
    links = [f"-L{own / 'lib'}", "-ltorch_cpu", "-lc10"]
    defines = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags = ["-O1", "-g1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique"]
    compile_cxx(*flags, *defines, *includes, "-o", path, TESTS / "norm_bindings.cpp", *links)
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def machine(folder: Path, name: str, **options: Any) -> Machine:
    """The kernels for rows of a type, such as kBFloat16."""
    return build(folder, TESTS / "norms.cpp", [f"ONLY_TYPE={name}"], **options)


_workspaces: list[Tensor] = []  # the last one


def _workspace(size: int, device: torch.device) -> Tensor:
    _workspaces[:] = [guarded(torch.full((size,), 0xFF, dtype=torch.uint8, device=device))]
    return _workspaces[0]


def poison_workspace() -> None:
    """The last one, for another launch of its problem."""
    if _workspaces:
        library().on_host_guard(0)
        _workspaces[0].fill_(0xFF)
        library().on_host_guard(1)


def use(patch: pytest.MonkeyPatch, launch: Launch, multiprocessors: int = 1) -> None:
    """From then on `launch` runs what the backend launches. One multiprocessor: thread blocks
    compute several rows.
    """
    message = None

    def launcher(op: bytes, problem: int, dtype: int, parameter_dtype: int) -> int | None:
        nonlocal message
        try:
            failure = launch(op.decode(), problem, DTYPES[dtype], DTYPES[parameter_dtype])
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        message = None if failure is None else ctypes.create_string_buffer(failure.encode())
        return None if message is None else ctypes.addressof(message)

    kept = _Launcher(launcher)
    patch.setattr(library(), "kept", kept, raising=False)  # no longer than it is called
    library().on_host_launcher(kept)
    patch.setattr(cuda, "_library", torch.ops.fastattn_cuda_on_host)
    patch.setattr(cuda, "unavailable", lambda: None)
    patch.setattr(_env, "multiprocessors", lambda *device: multiprocessors)
    patch.setattr(_native, "workspace", _workspace)
    _workspaces.clear()


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
    """Of a forward, or of a backward with its strips and lines."""

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
    library()[name](ctypes.c_void_p(problem), numbers)
    return Tiling(*numbers[: 4 if forward else 6])
