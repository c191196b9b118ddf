"""The search of logits on CPU in C++ (csrc/best_tokens): fp32, one pass while a row is cached."""

import torch
from torch import Tensor

from fastattn.ops import _native

_library = torch.ops.fastattn_cpu


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def best_tokens_unsupported(logits: Tensor, first: int, count: int) -> str | None:
    if logits.dtype is not torch.float32:
        return f"has kernels for fp32, got {logits.dtype}"
    return unavailable()


def best_tokens(
    logits: Tensor, first: int, count: int, log_z: Tensor, best: Tensor, tokens: Tensor
) -> None:
    _library.best_tokens.default(logits.contiguous(), first, log_z, best, tokens)
