"""The dropout mask as a tensor, for those who want to compare a fused dropout with their own."""

import torch
from torch import Tensor

from fastattn.ops._dropout import attention_keep, row_keep


def dropout_mask(seed: Tensor, stream: int, p: float, shape: tuple[int, ...]) -> Tensor:
    """Which weights an op keeps: bool of `shape`, [B, H, M, N] for attention or [rows, N] for norms
    and ffn.

    seed: int64 [1]. Kept weights are multiplied by 256 / (256 - t), t = floor(256 p + 0.5), at
    least 1 if p > 0 and 256 only if p = 1. The ffn's output dropout uses stream + 2 ** 31.
    """
    if seed.dtype != torch.int64 or seed.shape != (1,):
        raise ValueError(f"seed must be int64 [1], got {seed.dtype} {list(seed.shape)}")
    if len(shape) == 4:
        return attention_keep(seed, stream, p, *shape)
    if len(shape) == 2:
        return row_keep(seed, stream, p, *shape)
    raise ValueError(f"shape must be [B, H, M, N] or [rows, N], got {list(shape)}")
