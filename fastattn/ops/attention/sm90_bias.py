"""Preparation of additive masks for the Hopper attention kernels.

One with a value a query and no dimension of keys changes no weight unless it blocks: the kernels
get a boolean mask, and `lse` the value; beside sinks, which it competes with, they get a mask of
all keys. The copy engine (TMA) reads the others where they are, if their rows are contiguous and
strides whole 16 bytes; for the backward they are copied otherwise (the forward copies while it
classifies).
"""

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of what the copy engine reads
MASK_DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


def is_constant(mask: Tensor, keys: int) -> bool:
    """Whether an additive mask has one value for all of several keys."""
    return mask.dtype != torch.bool and mask.shape[3] == 1 < keys


def rows_of_constant(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that such a mask allows, [B or 1, H or 1, M or 1, 1], and its values, [..., M or 1]."""
    lines = _without_repeats(mask)
    return ~(lines <= torch.finfo(mask.dtype).min), lines[..., 0].float()


def gradient_of_constant(dmask: Tensor, dlse: Tensor | None, lse: Tensor) -> None:
    """Gradient of such a mask, by lse, which is all that it changes."""
    if dlse is None or dmask.numel() == 0:
        dmask.zero_()
        return
    rows = torch.where(lse.isneginf(), 0.0, dlse)[..., None]
    summed = [dim for dim in range(3) if dmask.shape[dim] == 1]
    dmask.copy_(rows.sum(summed, keepdim=True) if summed else rows)


def is_readable(mask: Tensor) -> bool:
    """Whether the copy engine can read an additive mask where it is."""
    size = mask.element_size()
    strides = [s for n, s in zip(mask.shape, mask.stride(), strict=True) if n > 1]
    in_rows = (mask.shape[3] == 1 or mask.stride(3) == 1) and not any(
        s * size % ALIGNMENT for s in strides[: -1 if mask.shape[3] > 1 else None]
    )
    return in_rows and mask.data_ptr() % ALIGNMENT == 0


def as_readable(mask: Tensor) -> Tensor:
    """A mask where the copy engine can read it. One that is expanded over keys stays as it is: the
    backward fetches its elements.
    """
    if mask.dtype == torch.bool or is_readable(mask) or mask.stride(3) == 0:
        return mask
    lines, step = _without_repeats(mask), ALIGNMENT // mask.element_size()
    keys = mask.shape[3]
    rows = lines.new_empty(*lines.shape[:3], -(-keys // step) * step)
    return rows[..., :keys].copy_(lines).expand(mask.shape)


def _without_repeats(mask: Tensor) -> Tensor:
    """Size 1 instead of stride 0, but for keys."""
    for dim in range(3):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask
