"""The torch ops, one folder each, and what they share. Public is what this file names: which
backends there are, and what is known of the machine.
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
    """Why the extension for PyTorch's autograd cannot serve, or None if it can."""
    from fastattn.ops import _native  # not with the package: it looks for native libraries

    return _native.extension_unavailable()


def library_unavailable(name: str) -> str | None:
    """Why the native library `name` (cpu, sm90) cannot serve, or None if it can."""
    from fastattn.ops import _native

    return _native.unavailable(name)


def has_faster_products(dtype: torch.dtype) -> bool:
    """Whether `fastattn.linear` runs the package's own products on CPU tensors of this dtype, as it
    does where they are faster on this processor than PyTorch's.
    """
    from fastattn.ops import _env, _native

    kernels = (torch.float32, torch.bfloat16, torch.float16)
    return dtype in kernels and not _env.slower_products(dtype) and not _native.unavailable("cpu")
