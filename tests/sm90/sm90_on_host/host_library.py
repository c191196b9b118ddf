"""Bindings of GPU kernels for CPU tensors: a test runs what they launch."""

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sm90_on_host.build import CSRC, CUDA, HERE, compile_cxx, compiler, included, made_once
from sm90_on_host.guarded import guarded
from torch import Tensor

from fastattn.ops import _native

DTYPES = ("kFloat32", "kBFloat16", "kFloat16")


class HostLibrary:
    """source: registers the ops of `namespace`, which take the place of `backend._library`, and
    calls a launcher with a name, the address of a problem, and `codes` integers of the instance.

    Schemas, the conversion of arguments and the workspace are those of the backend's own library;
    sections of the workspace end before inaccessible pages. defines: macros of another build, whose
    namespace differs.
    """

    def __init__(
        self,
        source: Path,
        backend: ModuleType,
        namespace: str,
        codes: int,
        defines: Sequence[str] = (),
    ) -> None:
        self.source, self.backend, self.namespace = source, backend, namespace
        self.defines = [f"-D{define}" for define in defines]
        self.launcher_type = ctypes.CFUNCTYPE(
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, *codes * [ctypes.c_int]
        )
        self.last_workspace: Tensor | None = None

    @functools.cached_property
    def native(self) -> ctypes.CDLL:
        own = Path(torch.__file__).parent
        includes = [f"-I{HERE}", f"-I{CSRC}", "-isystem", own / "include", "-isystem", CUDA]
        links = [f"-L{own / 'lib'}", "-ltorch_cpu", "-lc10"]
        defines = ["-DTORCH_TARGET_VERSION=0x020b000000000000", *self.defines]
        flags = ["-O1", "-g1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique"]
        name = f"{self.source.stem}.so"

        def make(folder: Path) -> None:
            compile_cxx(*flags, *defines, *includes, "-o", folder / name, self.source, *links)

        inputs = [compiler(), flags, defines, own, torch.__version__]
        inputs += included(self.source, [HERE, CSRC]).values()
        made = "_".join([self.source.stem, *(re.sub(r"\W", "_", d) for d in self.defines)])
        path = made_once(made, inputs, make) / name
        torch.ops.load_library(str(path))
        return ctypes.CDLL(str(path))

    def use(self, patch: pytest.MonkeyPatch, launch: Callable[..., str | None]) -> None:
        """From then on `launch` runs what the backend launches; it returns an error or None."""
        message = None

        def launcher(op: bytes, problem: int, *codes: int) -> int | None:
            nonlocal message
            try:
                failure = launch(op.decode(), problem, *codes)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            message = None if failure is None else ctypes.create_string_buffer(failure.encode())
            return None if message is None else ctypes.addressof(message)

        kept = self.launcher_type(launcher)
        patch.setattr(self.native, "kept", kept, raising=False)  # no longer than it is called
        self.native.on_host_launcher(kept)
        patch.setattr(self.backend, "_library", getattr(torch.ops, self.namespace))
        patch.setattr(self.backend, "unavailable", lambda: None)
        patch.setattr(_native, "workspace", self._workspace)
        self.last_workspace = None

    def _workspace(self, size: int, device: torch.device) -> Tensor:
        self.last_workspace = guarded(torch.full((size,), 0xFF, dtype=torch.uint8, device=device))
        return self.last_workspace

    def poison_workspace(self) -> None:
        """The last one, for another launch of its problem."""
        if self.last_workspace is not None:
            self.native.on_host_guard(0)
            self.last_workspace.fill_(0xFF)
            self.native.on_host_guard(1)
