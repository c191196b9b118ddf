"""A dense mask looked at once: which of its tiles are empty, full or partial, which lines are dead.

Backends read a mask's tiles on every call; a `PreparedMask` carries what they look for. Its tiles
are small, so that the tile of any kernel is made of whole ones. Plain torch, without a look at
values by the host: any device, any transformation.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries and keys of a tile: kernels' tiles are multiples of it.
TILE = 16
# A tile's bitmask. 16 bits from KEYS on: key j has a query in the tile that may attend it. 16 from
# QUERIES on: query i has a key. WHOLE: every pair is allowed and an additive mask is 0 in fp32.
KEYS, QUERIES, WHOLE = 0, 16, 32


class PreparedMask(NamedTuple):
    """A mask and what `prepare_mask` found in it; stands for the mask in `attention`.

    tiles: int64 [B or 1, H or 1, ceil(M / 16) or 1, ceil(N / 16) or 1], a bitmask per tile. Where
    the mask has a single line that serves all, so do the tiles. Lines beyond the mask have no bits
    and take nothing from WHOLE.
    """

    mask: Tensor
    tiles: Tensor


def classify(mask: Tensor) -> Tensor:
    """The tile bitmasks of a 4-dimensional mask, bool or floating."""
    mask = mask.detach()
    for dim in range(4):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)  # one line that serves all
    if mask.dtype == torch.bool:
        allowed = plain = mask
    else:
        allowed = ~(mask <= torch.finfo(mask.dtype).min)
        plain = allowed & (mask.float() == 0)
    allowed, plain = _tiled(allowed, False), _tiled(plain, True)
    bits = 1 << torch.arange(TILE, device=mask.device)
    keys = (allowed.any(3) * bits).sum(-1)  # [B, H, tiles of queries, tiles of keys]
    queries = (allowed.any(5) * bits[:, None]).sum(3)
    whole = plain.all(5).all(3).long()
    return keys << KEYS | queries << QUERIES | whole << WHOLE


def _tiled(x: Tensor, beyond: bool) -> Tensor:
    """[B, H, tiles, TILE, tiles, TILE]; a single line fills its tile, others are padded."""
    for dim in (2, 3):
        if x.shape[dim] == 1:
            x = x.expand(*x.shape[:dim], TILE, *x.shape[dim + 1 :])
    x = F.pad(x, (0, -x.shape[3] % TILE, 0, -x.shape[2] % TILE), value=beyond)
    B, H, M, N = x.shape
    return x.reshape(B, H, M // TILE, TILE, N // TILE, TILE)
