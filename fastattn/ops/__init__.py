"""The torch ops, one folder each, and the code they share. Only the names below are public: they
describe the backends and the machine.
"""

import torch

from fastattn.ops._env import default_device, device_name, interpreting, versions
from fastattn.ops._select import BackendStatus, Explanation, backend_table

__all__ = [
    "BackendStatus",
    "Explanation",
    "backend_table",
    "default_device",
    "device_name",
    "extension_unavailable",
    "has_faster_products",
    "interpreting",
    "library_unavailable",
    "versions",
]


def extension_unavailable() -> str | None:
    """Why the extension for PyTorch's autograd cannot be used, or None if it can."""
    from fastattn.ops import _native  # here, so that `import fastattn` loads no native library

    return _native.extension_unavailable()


def library_unavailable(name: str) -> str | None:
    """Why the native library `name` (cpu, cuda, sm90) cannot be used, or None if it can."""
    from fastattn.ops import _native

    return _native.unavailable(name)


def has_faster_products(dtype: torch.dtype) -> bool:
    """Whether fastattn's matrix products are faster than PyTorch's on this processor in this dtype.
    `fastattn.linear` then uses them on CPU tensors.
    """
    from fastattn.ops import _env, _native

    kernels = (torch.float32, torch.bfloat16, torch.float16)
    return dtype in kernels and not _env.slower_products(dtype) and not _native.unavailable("cpu")
