"""The C++ kernel on the CPU (csrc/topk_logsumexp) for fp32: two passes over a row, which the first
leaves in the cache.

The kernel is registered under the dispatcher's CPU key.
"""

import torch
from torch import Tensor

from fastattn.ops import _native


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def topk_logsumexp_unsupported(logits: Tensor, first: int, count: int) -> str | None:
    if logits.dtype is not torch.float32:
        return f"has kernels for fp32, got {logits.dtype}"
    return unavailable()
