"""The feed-forward network's bindings for CPU tensors: what they launch runs on a simulator.

Schemas, the conversion of arguments and the workspace are those of the library; sections of the
workspace end before inaccessible pages.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from sm90_on_host.build import CSRC, CUDA, HERE, compile_cxx, workshop
from sm90_on_host.guarded import guarded
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.ffn import sm90

DTYPES = ("kFloat32", "kBFloat16", "kFloat16")
STEPS = ("kUp", "kUpGated", "kDown", "kDhidden", "kDhiddenGated", "kDx", "kDw")
_Launcher = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
)


@dataclass(frozen=True)
class Instance:
    """step: empty for a launch that is not a product."""

    dtype: str
    step: str


# The launch's name, the address of its problem, the instance -> an error message or None.
Launch = Callable[[str, int, Instance], str | None]


@functools.cache
def library() -> ctypes.CDLL:
    """The bindings, which register ops of fastattn_sm90_on_host."""
    path = Path(workshop().name) / "ffn_bindings.so"
    own = Path(torch.__file__).parent
    includes = [f"-I{HERE}", f"-I{CSRC}", "-isystem", own / "include", "-isystem", CUDA]
    links = [f"-L{own / 'lib'}", "-ltorch_cpu", "-lc10"]
    defines = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags = ["-O1", "-g1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique"]
    compile_cxx(*flags, *defines, *includes, "-o", path, HERE / "ffn_bindings.cpp", *links)
    torch.ops.load_library(str(path))
    return ctypes.CDLL(str(path))


def use(patch: pytest.MonkeyPatch, launch: Launch) -> None:
    """From then on `launch` runs what the backend sm90 launches."""
    message = None

    def launcher(op: bytes, problem: int, dtype: int, step: int) -> int | None:
        nonlocal message
        try:
            instance = Instance(DTYPES[dtype], STEPS[step] if step >= 0 else "")
            failure = launch(op.decode(), problem, instance)
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


_workspaces: list[Tensor] = []  # the last one


def workspace(size: int, device: torch.device) -> Tensor:
    _workspaces[:] = [guarded(torch.full((size,), 0xFF, dtype=torch.uint8, device=device))]
    return _workspaces[0]
