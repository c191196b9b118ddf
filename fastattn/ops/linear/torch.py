"""The linear layer by PyTorch's operators.

Functions return their results, None for gradients that are not needed.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

RETURNS_RESULTS = True


def linear_fwd(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor]:
    return (F.linear(x, w, b),)


def linear_bwd(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])  # -1 is ambiguous without columns
    dx = dw = None
    if needs[0]:
        assert w is not None
        dx = (rows @ w).view(*dy.shape[:-1], w.shape[1])
    if needs[1]:
        assert x is not None
        dw = rows.t() @ x.reshape(rows.shape[0], x.shape[-1])
    wide = torch.promote_types(dy.dtype, torch.float32)
    return dx, dw, rows.sum(0, dtype=wide) if needs[2] else None
