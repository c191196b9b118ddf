"""The linear layer by torch.nn.functional.linear.

Functions take the arguments of the torch op of the same name and return its results, None for
gradients that are not needed. The backward is differentiable itself.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_fwd(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor]:
    return (F.linear(x, w, b),)


def linear_bwd(
    dy: Tensor, x: Tensor | None, w: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    need_x, need_w, need_b = needs
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])  # -1 is ambiguous without columns
    dx = dw = None
    if need_x:
        assert w is not None
        dx = dy @ w
    if need_w:
        assert x is not None
        dw = rows.t() @ x.reshape(rows.shape[0], x.shape[-1])
    db = None
    if need_b:
        wide = rows if rows.dtype == torch.float64 else rows.float()
        db = wide.sum(0).to(dy.dtype)
    return dx, dw, db
