"""Loads the optional native libraries in the package's folder when they are first used.

`unavailable("cpu")` loads fastattn/_C_cpu.abi3.so, which registers the CPU kernels of
torch.ops.fastattn and defines torch.ops.fastattn_cpu, or returns the reason why it cannot.
`extension()` returns fastattn._C_autograd, which is built for one version of PyTorch and of Python.
"""

import functools
import importlib.machinery
import logging
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _env

_PACKAGE = Path(__file__).resolve().parent.parent
# The instruction sets of csrc/cpu/dispatch.h, in its order.
_CPU_ISAS = ("portable", "avx2", "avx512", "avx512_bf16")
_INTERFACE = 6  # kInterface of csrc/autograd/derivative.h
_CPU_INTERFACE = b"fastattn_cpu interface 3\0"  # in the file, by csrc/cpu/module_cpu.cpp
# Commands that build a library that `pip install .` may leave out.
_BUILD = {
    name: f"FASTATTN_NATIVE=cpu,autograd,{name} pip install --no-build-isolation ."
    for name in ("sm90", "cuda")
}
_log = logging.getLogger("fastattn")


@functools.cache
def unavailable(library: str) -> str | None:
    """Why the library cannot be used, phrased to follow "backend cpu ...", or None once it is
    loaded. For the CPU library the reason is also logged, once.
    """
    why = _load_failure(library)
    if why and library == "cpu":
        _log.warning("ops on the CPU run PyTorch's operators: backend cpu %s", why)
    return why


def _load_failure(library: str) -> str | None:
    path = _env.library_file(f"_C_{library}.abi3.so", _PACKAGE)
    if not path.is_file():
        return (
            f"needs the native library {library}, which was not built: with torch and "
            f"{'nvcc' if library in _BUILD else 'a compiler'} installed, "
            f"`{_BUILD.get(library, 'pip install --no-build-isolation .')}` builds it"
        )
    try:
        if library == "cpu" and _CPU_INTERFACE not in path.read_bytes():
            return (
                f"has a native library from other sources, {path.name}: "
                "`pip install --no-build-isolation .` builds it again"
            )
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"cannot load its native library {path.name}: {error}"
    if library == "cpu":
        # By dtype, in the order of csrc/common/dtype.h.
        limits = [
            _env.product_limit(dtype)[0] for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        call_unobserved(torch.ops.fastattn_cpu.set_product_limits, limits)
    return None


def call_unobserved(op: Any, *args: Any) -> Any:
    """Calls an op that takes and returns no tensors, so that dispatch modes, functorch transforms
    and tracers do not see the call.
    """
    no_keys = torch._C.DispatchKeySet.from_raw_repr(0)
    with torch._C._ForceDispatchKeyGuard(no_keys, no_keys):
        return op(*args)


def workspace(size: int, device: torch.device) -> Tensor:
    """For a call of a GPU library, which says how many bytes (`testing.poisoned_results` puts NaN
    there).
    """
    return torch.empty(size, dtype=torch.uint8, device=device)


def call_with_workspace(op: Any, device: torch.device, *args: Any) -> None:
    """Calls an op of a GPU library whose last argument is its workspace. Without one that it needs,
    it launches nothing and returns the size.
    """
    if size := op(*args, None):
        op(*args, workspace(size, device))


@functools.cache
def extension_unavailable() -> str | None:
    """Why there is no `extension()`, or None once it is loaded."""
    version, suffix = _env.torch_version(), importlib.machinery.EXTENSION_SUFFIXES[0]
    path = _PACKAGE / f"_C_autograd_{re.sub(r'[^0-9A-Za-z]', '_', version)}{suffix}"
    remedy = "`pip install --no-build-isolation .` builds it"
    if not path.is_file():
        built = "was built for another" if any(_PACKAGE.glob("_C_autograd_*")) else "was not built"
        return f"the extension autograd for torch {version} under this Python {built}: {remedy}"
    if why := unavailable("cpu"):
        return why
    loader = importlib.machinery.ExtensionFileLoader("fastattn._C_autograd", str(path))
    spec = importlib.machinery.ModuleSpec(loader.name, loader, origin=str(path))
    try:
        module = loader.create_module(spec)
        loader.exec_module(module)
    except Exception as error:  # loading registers nodes with PyTorch, which may fail
        return f"cannot load its extension {path.name}: {type(error).__name__}: {error}"
    if getattr(module, "interface", None) != _INTERFACE:
        return f"the extension {path.name} was built from other sources: {remedy}"
    sys.modules[loader.name] = module
    return None


def extension() -> Any:
    """The module fastattn._C_autograd, or None if it cannot be used."""
    return None if extension_unavailable() else sys.modules["fastattn._C_autograd"]


def usable_cpu_isas() -> tuple[str, ...]:
    """The instruction sets of the CPU kernels that this processor supports, the fastest last."""
    _load_cpu()
    return tuple(_CPU_ISAS[isa] for isa in torch.ops.fastattn_cpu.usable_isas())


def cpu_isa() -> str | None:
    """The instruction set that the CPU kernels use, None without the library."""
    return None if unavailable("cpu") else _CPU_ISAS[torch.ops.fastattn_cpu.isa()]


def use_cpu_isa(name: str) -> None:
    """Makes the CPU kernels of this process use this instruction set, not the fastest one."""
    usable = usable_cpu_isas()
    if name not in usable:
        raise ValueError(f"name must be one of {', '.join(usable)} on this processor, got {name!r}")
    torch.ops.fastattn_cpu.use_isa(_CPU_ISAS.index(name))


def _load_cpu() -> None:
    if why := unavailable("cpu"):
        raise RuntimeError(f"fastattn {why}")
