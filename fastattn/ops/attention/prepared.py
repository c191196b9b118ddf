"""A dense mask with its tiles classified: empty, full or partial, and which rows and columns are
empty.

GPU backends otherwise classify the tiles of a mask in every call. The tiles here are small, so that
the tiles of all kernels consist of whole ones. The classification uses PyTorch operators and does
not read values on the host, so it works on any device and under any transform.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The queries and keys of a tile. The tile sizes of kernels are multiples of it.
TILE = 16
# The positions of a tile's bits. 16 from KEYS on: a query of the tile may attend to key j. 16 from
# QUERIES on: query i may attend to a key of the tile. WHOLE: all pairs are allowed and, for an
# additive mask, all values are 0 in fp32.
KEYS, QUERIES, WHOLE = 0, 16, 32


class PreparedMask(NamedTuple):
    """A mask with its tile bitmasks, made by `prepare_mask` for the `mask` of `attention`.

    tiles: int64 [B or 1, H or 1, ceil(M / 16) or 1, ceil(N / 16) or 1], a bitmask for each tile;
    1 where the mask is broadcast. Rows and columns beyond the mask have no bits and do not affect
    WHOLE.
    """

    mask: Tensor
    tiles: Tensor


def classify(mask: Tensor) -> Tensor:
    """The tile bitmasks of a 4-dimensional mask, bool or floating."""
    mask = mask.detach()
    for dim in range(4):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)  # not expanded
    if mask.dtype == torch.bool:
        allowed = unchanged = mask
    else:
        allowed = ~(mask <= torch.finfo(mask.dtype).min)
        unchanged = allowed & (mask.float() == 0)
    allowed, unchanged = _tiled(allowed, False), _tiled(unchanged, True)
    bits = 1 << torch.arange(TILE, device=mask.device)
    keys = (allowed.any(3) * bits).sum(-1)  # [B, H, tiles of queries, tiles of keys]
    queries = (allowed.any(5) * bits[:, None]).sum(3)
    whole = unchanged.all(5).all(3).long()
    return keys << KEYS | queries << QUERIES | whole << WHOLE


def _tiled(x: Tensor, beyond: bool) -> Tensor:
    """[B, H, tiles, TILE, tiles, TILE]; a dimension of size 1 is broadcast, others are padded."""
    for dim in (2, 3):
        if x.shape[dim] == 1:
            x = x.expand(*x.shape[:dim], TILE, *x.shape[dim + 1 :])
    x = F.pad(x, (0, -x.shape[3] % TILE, 0, -x.shape[2] % TILE), value=beyond)
    B, H, M, N = x.shape
    return x.reshape(B, H, M // TILE, TILE, N // TILE, TILE)
