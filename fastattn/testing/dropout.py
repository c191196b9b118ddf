"""The dropout mask as a tensor, to compare fused dropout with other implementations."""

import torch
from torch import Tensor

from fastattn.ops._dropout import attention_keep, row_keep


def dropout_mask(seed: Tensor, stream: int, p: float, shape: tuple[int, ...]) -> Tensor:
    """Which weights an op keeps: bool of `shape`, [B, H, M, N] for attention or [rows, N] for norms
    and ffn.

    seed: int64 [1], or for attention [5] as in `fastattn.attention`. Kept weights are multiplied by
    256 / (256 - t), where t is floor(256 p + 0.5), but at least 1 if p > 0 and at most 255 if
    p < 1. ffn's output dropout has stream + 2 ** 31.
    """
    if seed.dtype != torch.int64 or seed.shape not in ((1,), (5,) if len(shape) == 4 else (1,)):
        wanted = "int64 [1], or [5] for attention"
        raise ValueError(f"seed must be {wanted}, got {seed.dtype} {list(seed.shape)}")
    if len(shape) == 4:
        return attention_keep(seed, stream, p, *shape)
    if len(shape) == 2:
        return row_keep(seed, stream, p, *shape)
    raise ValueError(f"shape must be [B, H, M, N] or [rows, N], got {list(shape)}")
