"""The linear layer as torch's library computes it.

Functions take the arguments of the torch op of the same name and return its results, None for
gradients that are not needed. The backward is differentiable torch itself.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_fwd(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor]:
    return (F.linear(x, w, b),)


def linear_bwd(dy: Tensor, x: Tensor, w: Tensor, needs: list[bool]) -> tuple[Tensor | None, ...]:
    need_x, need_w, need_b = needs
    rows = dy.reshape(math.prod(dy.shape[:-1]), dy.shape[-1])  # -1 cannot be told from no columns
    dx = dy @ w if need_x else None
    dw = rows.t() @ x.reshape(rows.shape[0], x.shape[-1]) if need_w else None
    db = None
    if need_b:
        wide = rows if rows.dtype == torch.float64 else rows.float()
        db = wide.sum(0).to(x.dtype)
    return dx, dw, db
