"""The torch ops, one folder each, and the code they share. Only the names below are public: they
describe the backends and the machine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from fastattn.ops._env import default_device, device_name, gpu_count, interpreting, versions
from fastattn.ops._select import BackendStatus, Explanation, backend_table

__all__ = [
    "BackendStatus",
    "Call",
    "Explanation",
    "backend_table",
    "cpu_instruction_set",
    "default_device",
    "device_name",
    "extension_unavailable",
    "gpu_count",
    "interpreting",
    "library_unavailable",
    "move_to_large_pages",
    "replay",
    "versions",
]


_PLAIN = (Tensor, nn.Parameter)


def extension_unavailable() -> str | None:
    """Why the extension for PyTorch's autograd cannot be used, or None if it can."""
    from fastattn.ops import _native  # here, so that `import fastattn` loads no native library

    return _native.extension_unavailable()


def library_unavailable(name: str) -> str | None:
    """Why the native library `name` (cpu, cuda, sm90) cannot be used, or None if it can."""
    from fastattn.ops import _native

    return _native.unavailable(name)


def cpu_instruction_set() -> str | None:
    """The instruction set of the CPU kernels: portable, avx2, avx512 or avx512_bf16; None without
    their library.
    """
    from fastattn.ops import _native

    return _native.cpu_isa()


def move_to_large_pages(tensors: Iterable[Tensor]) -> None:
    """Moves the memory of tensors on the CPU, such as weights that every decoding step reads, to
    pages of 2 MB where Linux can (6.1 and newer). Values and addresses stay.
    """
    from fastattn.ops import _native

    storages = [t.untyped_storage() for t in tensors if t.is_cpu and type(t) in _PLAIN]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    if sizes and not _native.unavailable("cpu"):
        torch.ops.fastattn_cpu.move_to_large_pages(list(sizes), list(sizes.values()))


@dataclass(frozen=True)
class Call:
    """A call of an op with fixed arguments; its results, if there are targets, are copied there."""

    op: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    targets: Sequence[Tensor] = ()


def replay(calls: Sequence[Call]) -> Callable[[], None]:
    """A function that makes these calls: in C++ if there is the extension for PyTorch's autograd.
    No gradients are recorded.
    """
    from fastattn.ops import _native

    if (extension := _native.extension()) is not None:
        native = extension.Calls()
        for c in calls:
            schema = c.op._schema
            native.append(schema.name, schema.overload_name, c.targets, tuple(c.args), **c.kwargs)
        return native.run

    @torch.no_grad()
    def run() -> None:
        for c in calls:
            results = c.op._op(*c.args, **c.kwargs)  # without the overload's Python wrapper
            if c.targets:
                for target, result in zip(c.targets, tree_leaves(results), strict=True):
                    target.copy_(result)

    return run
