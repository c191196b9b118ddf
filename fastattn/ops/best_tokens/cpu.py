"""The search of logits on the CPU in C++ (csrc/best_tokens): fp32, one pass while a row is cached.

The kernel is registered under the dispatcher's CPU key.
"""

import torch
from torch import Tensor

from fastattn.ops import _native


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def best_tokens_unsupported(logits: Tensor, first: int, count: int) -> str | None:
    if logits.dtype is not torch.float32:
        return f"has kernels for fp32, got {logits.dtype}"
    return unavailable()
