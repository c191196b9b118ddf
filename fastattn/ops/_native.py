"""Loads the optional native libraries that stand beside the package; for backend modules only.

`unavailable("cpu")` loads fastattn/_C_cpu.abi3.so on first use, which defines
torch.ops.fastattn_cpu, or says why it cannot.
"""

import functools
from pathlib import Path

import torch

_PACKAGE = Path(__file__).resolve().parent.parent
# The words of csrc/common/isa.h, in its order.
_CPU_ISAS = ("portable", "avx2", "avx512")


@functools.cache
def unavailable(library: str) -> str | None:
    """Why the library cannot serve, phrased to follow "backend cpu ...", or None once loaded."""
    path = _PACKAGE / f"_C_{library}.abi3.so"
    if not path.is_file():
        return (
            f"needs the native library {library}, which was not built: with torch and a compiler "
            "installed, `pip install --no-build-isolation .` builds it"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"cannot load its native library {path.name}: {error}"
    return None


def usable_cpu_isas() -> tuple[str, ...]:
    """The instruction sets of the CPU kernels that this processor runs, the best one last."""
    _load_cpu()
    return _CPU_ISAS[: torch.ops.fastattn_cpu.best_isa() + 1]


def use_cpu_isa(name: str) -> None:
    """Makes the CPU kernels of this process use one instruction set instead of the best one."""
    usable = usable_cpu_isas()
    if name not in usable:
        raise ValueError(f"name must be one of {', '.join(usable)} on this processor, got {name!r}")
    torch.ops.fastattn_cpu.use_isa(_CPU_ISAS.index(name))


def _load_cpu() -> None:
    if why := unavailable("cpu"):
        raise RuntimeError(f"fastattn {why}")
