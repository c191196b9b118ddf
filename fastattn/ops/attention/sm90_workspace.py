"""The workspace of the Hopper attention kernels and the plan behind it: tile counters, hashed
columns, what a dense mask becomes, and the splits of the keys.

The sizes are those that csrc/attention lays out; tests hold the two together.
"""

import functools
import math

import torch
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops.attention.calls import (
    BackwardCall,
    ForwardCall,
    PackedBackwardCall,
    PackedForwardCall,
)
from fastattn.ops.attention.sm90_bias import is_constant, is_readable

# Rows of a tile are 192 at head dim 64, otherwise 128.
_TILE_ROWS = 128
# Up to this head dim a counter beats fixed strides for equal tiles too: +5 % at head dim 64 (H200).
_COUNTED_HEAD_DIM = 64
# Keys of the largest block: hashed columns fill the last block up.
_MAX_BLOCK = 128
_Buffer = tuple[tuple[int, ...], torch.dtype, bool]
_Workspace = list[_Buffer]
_COUNTER: _Buffer = ((1,), torch.int32, True)
_NO_COUNTER: _Buffer = ((0,), torch.int32, False)
# Keys are split where tiles leave more than a fifth of the SMs without work. None of this is
# measured: combining costs a launch, about as much as an SM takes for 4 blocks of keys; a row's
# partial result is written and read again in the time that 8 keys take.
_FEW_TILES = 0.8  # of the SMs
_MIN_BLOCKS = 8  # fewest blocks of keys to split
_MIN_SPLIT_BLOCKS = 2  # fewest blocks of a split
_SPLIT_KEYS_PER_ROW = 8
_MAX_SPLITS = 128
_ENOUGH = 0.85  # of the best share of busy SMs
# Packed sequences are sorted, longest first, where the last tiles may be long ones that the others
# wait for: a block of keys takes a microsecond or two, the sorting launch two or three (estimates).
_ORDER_KEYS = 1024
# More queries than this are not merged with those of other heads (csrc/attention/sm90/forward).
_SHORT_QUERIES = 128


def _num_sms(x: Tensor) -> int:
    return _env.multiprocessors(x.device.type, x.device.index or 0)


# -- forward ---------------------------------------------------------------------------------------
def copied_bytes(dtype: torch.dtype, mask: Tensor) -> int:
    """Of an element of an additive mask if it must be copied because the copy engine cannot read it
    in place or because its dtype is neither q's nor float32; otherwise 0.
    """
    if mask.dtype == torch.bool:
        return 0
    if is_readable(mask) and mask.dtype in (dtype, torch.float32):
        return 0
    return mask.element_size() if mask.dtype == dtype else 4


def mask_scratch(
    mask: Tensor, dtype: torch.dtype, by_batch: bool, head_dim: int, B: int, M: int, N: int
) -> _Buffer:
    """What sm90/masks/mask_classes.h lays out: bits of the mask, classes of tiles, a copy of an
    additive mask where there must be one. dtype: q's. by_batch: tiles differ between batch entries.
    """
    batches, heads, rows, _ = (
        1 if stride == 0 else size for size, stride in zip(mask.shape, mask.stride(), strict=True)
    )
    additive = mask.dtype != torch.bool and not is_constant(mask, N)
    wide = 64 if additive else 112 if head_dim <= 192 else 80
    block = 128 if head_dim <= 128 else wide
    tile_rows = 192 if head_dim <= 64 and not additive else 128
    blocks = -(-N // block)
    groups, group_rows = (1, 1) if rows == 1 else (-(-M // 64), 64)
    plain = batches * heads * groups * blocks
    classes = (B if by_batch else batches) * heads * -(-M // tile_rows) * blocks
    copied = batches * heads * (1 if rows == 1 else M) * -(-N // 8) * 8
    words = copied * copied_bytes(dtype, mask) // 4 if additive else 0
    return (plain * (4 * group_rows + 1) + classes * 8 + words,), torch.int32, False


def _column_keys(keys: int) -> _Buffer:
    """One hash for every two columns that dropped weights may have."""
    return ((keys + _MAX_BLOCK) // 2,), torch.int32, False


@functools.lru_cache(maxsize=4096)
def num_splits(tiles: int, rows: int, blocks: int, block: int, num_sms: int) -> int:
    """Splits of the keys of every tile: the fewest that keep nearly as many SMs busy as any number
    can. rows: of a tile; blocks: of keys, each of so many.
    """
    least = max(_MIN_SPLIT_BLOCKS, -(-_SPLIT_KEYS_PER_ROW * rows // block))
    most = min(_MAX_SPLITS, blocks // least)
    few = tiles < _FEW_TILES * num_sms
    if tiles == 0 or not few or blocks < _MIN_BLOCKS or most < 2:
        return 1
    busy = [n / (num_sms * -(-n // num_sms)) for n in range(tiles, tiles * most + 1, tiles)]
    return next(i for i, share in enumerate(busy, 1) if share >= _ENOUGH * max(busy))


def _shapes(head_dim: int) -> tuple[int, int]:
    """Rows of a tile and keys of a block, without a dense mask."""
    return (192 if head_dim <= 64 else 128), (
        128 if head_dim <= 128 else 112 if head_dim <= 192 else 80
    )


def _tiles_and_splits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merges: bool,
    causal: int,
    left: int,
    right: int,
    num_sms: int,
) -> tuple[int, int]:
    """Tiles and splits of their keys. merges: rows of heads that share keys may form one tile."""
    B, H, M, D = q.shape
    K, N = k.shape[1:3]
    tile_rows, block = _shapes(max(D, v.shape[3]))
    if merges and K and M <= _SHORT_QUERIES and (M == 1 or q.stride(1) == M * q.stride(2)):
        H, M = K, H // K * M
    tiles = B * H * -(-M // tile_rows)
    if tiles >= _FEW_TILES * num_sms:
        return tiles, 1
    right = 0 if causal else right
    reach = N if left < 0 or right < 0 else min(N, left + right + M)
    if causal == 1:
        reach = min(reach, M)
    return tiles, num_splits(tiles, min(M, tile_rows), -(-reach // block), block, num_sms)


def _split_workspace(splits: int, rows: int, value_dim: int) -> _Buffer:
    """Of each split: output, maximum and sum of every row."""
    return (splits, rows * (value_dim + 2)), torch.float32, False


def attention_fwd_workspace(call: ForwardCall) -> _Workspace:
    """The counter of tiles, where it pays, and what dropout, a dense mask or split keys need."""
    q, k, v, mask, _, key_lengths, query_lengths, causal, left, right, *_ = call
    B, H, M, D = q.shape
    if mask is not None:
        by_batch = key_lengths is not None or query_lengths is not None
        N = k.shape[2]
        (words,), dtype, zeroed = mask_scratch(mask, q.dtype, by_batch, max(D, v.shape[3]), B, M, N)
        # Dropout's columns come first, in whole 16 bytes.
        columns = -(-_column_keys(N)[0][0] // 4) * 4 if call.dropout_p > 0.0 else 0
        return [_COUNTER, ((columns + words,), dtype, zeroed)]
    if call.dropout_p > 0.0:
        return [_COUNTER, _column_keys(k.shape[2])]
    unequal = causal != 0 or max(left, right) >= 0
    merges = query_lengths is None and (M == 1 or not unequal)
    num_sms = _num_sms(q)
    tiles, splits = _tiles_and_splits(q, k, v, merges, causal, left, right, num_sms)
    if splits > 1:
        counter = _COUNTER if tiles * splits > num_sms else _NO_COUNTER
        return [counter, _split_workspace(splits, B * H * M, v.shape[3])]
    if B * H * -(-M // _TILE_ROWS) <= num_sms:  # every tile starts at once
        return []
    unequal = unequal or key_lengths is not None or query_lengths is not None
    return [_COUNTER] if unequal or max(D, v.shape[3]) <= _COUNTED_HEAD_DIM else []


def attention_varlen_fwd_workspace(call: PackedForwardCall) -> _Workspace:
    """The counter of tiles and what dropout or split keys need."""
    keys = min(call.max_seqlen_k, call.k.shape[0])
    if call.dropout_p > 0.0:
        return [_COUNTER, _column_keys(keys)]
    (T, H, D), E, longest = call.q.shape, call.v.shape[2], call.max_seqlen_q
    sequences = call.cu_seqlens_q.shape[0] - 1
    tile_rows, block = _shapes(max(D, E))
    # Each sequence may end in a tile of its own.
    tiles = min(-(-T // tile_rows) + sequences, -(-longest // tile_rows) * sequences)
    rows = min(longest, tile_rows)
    num_sms = _num_sms(call.q)
    splits = num_splits(H * tiles, rows, -(-keys // block), block, num_sms)
    ordered = sequences > 1 and H * tiles * splits > num_sms and keys >= _ORDER_KEYS
    ordered = ordered and call.window_left < 0  # a left window makes tiles equal
    counter = ((1 + sequences if ordered else 1,), torch.int32, True)
    return [counter, _split_workspace(splits, H * T, E)] if splits > 1 else [counter]


# -- backward --------------------------------------------------------------------------------------
# Blocks of rows are 64 to 128 rows long; shared memory and sums of dq have whole 64 columns.
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 64, 128
_CHUNK_COLUMNS = 64
_SEMAPHORES_PER_BLOCK = 3  # of dq, one per consumer warpgroup
_DMASK_ROWS, _DMASK_KEYS = 128, 64  # of a tile of a mask's gradient
_MAX_DMASK_SPLITS = 64  # of a tile's sum, where tiles are few


def attention_bwd_workspace(call: BackwardCall) -> _Workspace:
    (B, H, M, D), N, mask = call.q.shape, call.k.shape[2], call.mask
    head_dim = max(D, call.v.shape[3])
    workspace = _bwd_workspace(B * H, M, 0, head_dim, call.dropout_p)
    if mask is not None:
        by_batch = call.key_lengths is not None or call.query_lengths is not None
        workspace.append(_bwd_mask_scratch(mask, by_batch, head_dim, B, M, N))
        splits = _dmask_splits(mask, B, H, M, N) if call.needs[3] else 1
        if splits > 1 and not is_constant(mask, N):
            workspace.append(((splits, *mask.shape), torch.float32, False))
    return workspace


def attention_varlen_bwd_workspace(call: PackedBackwardCall) -> _Workspace:
    T, H, D = call.q.shape
    sequences = call.cu_seqlens_q.shape[0] - 1
    return _bwd_workspace(H, T, sequences, max(D, call.v.shape[2]), call.dropout_p)


def _bwd_workspace(
    heads: int, queries: int, sequences: int, head_dim: int, dropout_p: float
) -> _Workspace:
    """lse and delta of every row, and dropout's hash of every two, dq in fp32, and the semaphores
    that order its additions. sequences: packed ones, each of which begins a block of rows.
    """
    rows = heads * (queries + _MAX_BLOCK_ROWS * (sequences + 1))
    columns = -(-head_dim // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    blocks = heads * (queries // _MIN_BLOCK_ROWS + sequences + 1)
    return [
        ((2 * rows + (rows // 2 if dropout_p > 0.0 else 0),), torch.float32, False),
        ((rows, columns), torch.float32, False),
        ((1 + _SEMAPHORES_PER_BLOCK * blocks,), torch.int32, False),
    ]


def _bwd_mask_scratch(
    mask: Tensor, by_batch: bool, head_dim: int, B: int, M: int, N: int
) -> _Buffer:
    """What sm90/masks/mask_classes.h lays out of the transposed mask: blocks are rows, tiles
    keys.
    """
    batches, heads, _, keys = (
        1 if stride == 0 else size for size, stride in zip(mask.shape, mask.stride(), strict=True)
    )
    block = 128 if head_dim <= 64 else 80 if head_dim <= 128 else 96 if head_dim <= 192 else 64
    blocks = -(-M // block)
    groups, group_keys = (1, 1) if keys == 1 else (-(-N // 64), 64)
    plain = batches * heads * groups * blocks
    tiles = -(-N // (128 if head_dim <= 128 else 64))
    classes = (B if by_batch else batches) * heads * tiles * blocks
    return (plain * (4 * group_keys + 1) + classes * 8,), torch.int32, False


def _dmask_splits(mask: Tensor, B: int, H: int, M: int, N: int) -> int:
    """Splits of the sum of a tile, so that about two thread blocks per SM share
    the pairs of blocks that it stands for.
    """
    whole = (B, H, -(-M // _DMASK_ROWS), -(-N // _DMASK_KEYS))
    own = (1 if size == 1 else n for size, n in zip(mask.shape, whole, strict=True))
    tiles = max(1, math.prod(own))
    most = 2 * _num_sms(mask) // tiles
    return max(1, min(_MAX_DMASK_SPLITS, most, math.prod(whole) // tiles))
