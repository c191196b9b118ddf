"""Attention on Hopper in CUDA C++ (csrc/attention): bf16, fp16, head dims 8 to 256 in steps of 8.

Lengths, packed sequences, causal masks and windows are loop bounds of the same kernels. Tensors are
read and written through their strides, which the copy engine (TMA) wants to be multiples of 16
bytes. Workspace: where tiles differ in length or are short, thread blocks draw them from a counter;
dropout hashes columns once; a dense mask becomes bits and classes of tiles; where tiles are few, as
in decoding, their keys are cut into parts, which another kernel joins.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops import _native

_library = torch.ops.fastattn_sm90
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_ROWS = 2**28  # the kernels add up positions in 32 bits
_ALIGNMENT = 16  # bytes
# Every tile starts at once below this: the smallest Hopper GPU has 114 multiprocessors.
_ONE_WAVE = 114
# Rows of a tile are 192 at head dim 64, otherwise 128.
_TILE_ROWS = 128
# Up to this head dim a counter beats fixed strides for equal tiles too: +5 % at head dim 64 (H200).
_COUNTED_HEAD_DIM = 64


# Keys of the largest block: hashed columns fill the last block up.
_MAX_BLOCK = 128
_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]
_COUNTER: tuple[tuple[int, ...], torch.dtype, bool] = ((1,), torch.int32, True)
_NO_COUNTER: tuple[tuple[int, ...], torch.dtype, bool] = ((0,), torch.int32, False)
# Keys are cut where tiles leave more than a fifth of the multiprocessors without work. None of this
# is measured: joining costs a launch, about as much as a multiprocessor takes for 4 blocks of keys;
# a row's part is written and read again in the time that 8 keys take.
_FEW_TILES = 0.8 * _ONE_WAVE
_CUT_BLOCKS = 8  # fewest blocks of keys to cut
_PART_BLOCKS = 2  # fewest of a part
_PART_KEYS_PER_ROW = 8
_MAX_PARTS = 128
_ENOUGH = 0.85  # of the best share of busy multiprocessors
# Packed sequences are sorted, longest first, where the last tiles may be long ones that the others
# wait for: a block of keys takes a microsecond or two, the sorting launch two or three (estimates).
_ORDER_KEYS = 1024
# More queries than this are not merged with those of other heads (csrc/attention/short_queries.h).
_SHORT_QUERIES = 128


def unavailable() -> str | None:
    return _native.unavailable("sm90")


def _misplaced(name: str, x: Tensor) -> str | None:
    """Why TMA cannot read x in place."""
    if x.stride(-1) != 1:
        return f"needs {name} with a contiguous last dimension, got strides {x.stride()}"
    if x.data_ptr() % _ALIGNMENT:
        return f"needs {name} at an address that is a multiple of {_ALIGNMENT} bytes"
    step = _ALIGNMENT // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride % step or stride <= 0):
            return (
                f"needs strides of {name} that are positive multiples of {step}, got {x.stride()}"
            )
    return None


def _unsupported(q: Tensor, k: Tensor, v: Tensor, queries: int, keys: int) -> str | None:
    """What neither the padded nor the packed form can do."""
    if why := unavailable():
        return why
    if q.dtype not in _DTYPES:
        return f"has kernels for bf16 and fp16, got {q.dtype}"
    for dim in (q.shape[-1], v.shape[-1]):
        if dim % 8 or not 0 < dim <= _MAX_HEAD_DIM:
            return (
                f"is built for head dims that are multiples of 8 up to {_MAX_HEAD_DIM}, got {dim}"
            )
    if max(queries, keys) > _MAX_ROWS:
        return f"takes at most {_MAX_ROWS} queries and keys, got {queries} and {keys}"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.numel() and (why := _misplaced(name, x)):
            return why
    return None


def _bias_unsupported(k: Tensor, mask: Tensor) -> str | None:
    """What the kernels cannot make of an additive mask."""
    if mask.dtype not in (*_DTYPES, torch.float32):
        return f"takes an additive mask in bf16, fp16 or fp32, got {mask.dtype}"
    if mask.shape[3] != k.shape[2]:
        return f"takes an additive mask with a column for each of {k.shape[2]} keys, got 1"
    return None


def _copied_bytes(dtype: torch.dtype, mask: Tensor) -> int:
    """Of an element of an additive mask if it must be copied because the copy engine cannot read it
    in place or because its dtype is neither q's nor float32; otherwise 0.
    """
    if mask.dtype == torch.bool:
        return 0
    size = mask.element_size()
    strides = [s for n, s in zip(mask.shape, mask.stride(), strict=True) if n > 1]
    in_rows = (mask.shape[3] == 1 or mask.stride(3) == 1) and not any(
        s * size % _ALIGNMENT for s in strides[: -1 if mask.shape[3] > 1 else None]
    )
    if in_rows and mask.data_ptr() % _ALIGNMENT == 0 and mask.dtype in (dtype, torch.float32):
        return 0
    return size if mask.dtype == dtype else 4


def _mask_scratch(
    mask: Tensor, dtype: torch.dtype, split: bool, head_dim: int, B: int, M: int, N: int
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """What csrc/attention/mask_classes.h lays out: bits of the mask, classes of tiles, a copy of an
    additive mask where there must be one. dtype: q's. split: tiles differ between batch entries.
    """
    batches, heads, rows, _ = (
        1 if stride == 0 else size for size, stride in zip(mask.shape, mask.stride(), strict=True)
    )
    additive = mask.dtype != torch.bool
    wide = 64 if additive else 112 if head_dim <= 192 else 80
    block = 128 if head_dim <= 128 else wide
    tile_rows = 192 if head_dim <= 64 and not additive else 128
    blocks = -(-N // block)
    groups, group_rows = (1, 1) if rows == 1 else (-(-M // 64), 64)
    plain = batches * heads * groups * blocks
    classes = (B if split else batches) * heads * -(-M // tile_rows) * blocks
    copied = batches * heads * (1 if rows == 1 else M) * -(-N // 8) * 8
    words = copied * _copied_bytes(dtype, mask) // 4
    return (plain * (4 * group_rows + 1) + classes * 8 + words,), torch.int32, False


def _column_keys(keys: int) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """One hash for every two columns that dropped weights may have."""
    return ((keys + _MAX_BLOCK) // 2,), torch.int32, False


@functools.lru_cache(maxsize=4096)
def _parts(tiles: int, rows: int, blocks: int, block: int) -> int:
    """Parts to cut the keys of every tile into: the fewest that keep nearly as many multiprocessors
    busy as any number can. rows: of a tile; blocks: of keys, each of so many.
    """
    least = max(_PART_BLOCKS, -(-_PART_KEYS_PER_ROW * rows // block))
    most = min(_MAX_PARTS, blocks // least)
    if tiles == 0 or tiles >= _FEW_TILES or blocks < _CUT_BLOCKS or most < 2:
        return 1
    busy = [n / (_ONE_WAVE * -(-n // _ONE_WAVE)) for n in range(tiles, tiles * most + 1, tiles)]
    return next(i for i, share in enumerate(busy, 1) if share >= _ENOUGH * max(busy))


def _shapes(head_dim: int) -> tuple[int, int]:
    """Rows of a tile and keys of a block, without a dense mask."""
    return (192 if head_dim <= 64 else 128), (
        128 if head_dim <= 128 else 112 if head_dim <= 192 else 80
    )


def _parts_of_batch(
    q: Tensor, k: Tensor, v: Tensor, merges: bool, causal: int, left: int, right: int
) -> tuple[int, int]:
    """Tiles and parts of their keys. merges: rows of heads that share keys may form one tile."""
    B, H, M, D = q.shape
    K, N = k.shape[1:3]
    tile_rows, block = _shapes(max(D, v.shape[3]))
    if merges and K and M <= _SHORT_QUERIES and (M == 1 or q.stride(1) == M * q.stride(2)):
        H, M = K, H // K * M
    tiles = B * H * -(-M // tile_rows)
    if tiles >= _FEW_TILES:
        return tiles, 1
    right = 0 if causal else right
    reach = N if left < 0 or right < 0 else min(N, left + right + M)
    if causal == 1:
        reach = min(reach, M)
    return tiles, _parts(tiles, min(M, tile_rows), -(-reach // block), block)


def _room(parts: int, rows: int, value_dim: int) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Of each part: output, maximum and sum of every row."""
    return (parts, rows * (value_dim + 2)), torch.float32, False


def attention_fwd_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    if why := _unsupported(q, k, v, q.shape[2], k.shape[2]):
        return why
    if key_lengths is not None and key_lengths.dim() != 1:
        return f"takes key_lengths per sequence, [B], got {list(key_lengths.shape)}"
    if mask is not None and dropout_p > 0.0:
        return "has no kernel for dropout under a dense mask"
    if mask is not None and mask.dtype != torch.bool:
        return _bias_unsupported(k, mask)
    return None


def attention_fwd_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> _Workspace:
    """The counter of tiles, where it pays, and what dropout, a dense mask or cut keys need."""
    B, H, M, D = q.shape
    if mask is not None:
        split = key_lengths is not None or query_lengths is not None
        scratch = _mask_scratch(mask, q.dtype, split, max(D, v.shape[3]), B, M, k.shape[2])
        return [_COUNTER, scratch]
    if dropout_p > 0.0:
        return [_COUNTER, _column_keys(k.shape[2])]
    unequal = causal != 0 or max(window_left, window_right) >= 0
    merges = query_lengths is None and (M == 1 or not unequal)
    tiles, parts = _parts_of_batch(q, k, v, merges, causal, window_left, window_right)
    if parts > 1:
        counter = _COUNTER if tiles * parts > _ONE_WAVE else _NO_COUNTER
        return [counter, _room(parts, B * H * M, v.shape[3])]
    if B * H * -(-M // _TILE_ROWS) <= _ONE_WAVE:
        return []
    unequal = unequal or key_lengths is not None or query_lengths is not None
    return [_COUNTER] if unequal or max(D, v.shape[3]) <= _COUNTED_HEAD_DIM else []


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
    counter: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    if k.shape[2] == 0 or k.shape[1] == 0:  # no row has a key
        out.zero_()
        lse.fill_(-torch.inf)
        return
    _library.attention_fwd.default(
        q,
        k,
        v,
        mask,
        mask_tiles,
        None if key_lengths is None else key_lengths.contiguous(),
        None if query_lengths is None else query_lengths.contiguous(),
        causal,
        window_left,
        window_right,
        scale,
        dropout_p,
        dropout_seed,
        dropout_stream,
        out,
        lse,
        counter if counter is not None and counter.numel() else None,
        scratch,
    )


# -- backward -------------------------------------------------------------------------------------

# Blocks of rows are 64 to 128 rows long; shared memory and sums of dq have whole 64 columns.
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 64, 128
_CHUNK_COLUMNS = 64
_TURNS_PER_BLOCK = 3  # one a consumer warpgroup
_MAX_BIAS_STRIDE = 2**28 - 1  # the kernels add up eight of them in 32 bits
_DMASK_ROWS, _DMASK_KEYS = 128, 64  # of a tile of a mask's gradient
_MAX_DMASK_PARTS = 64  # that a tile's sum is cut into, where tiles are few
# Thread blocks add to dq in the order of their keys: the same bits in every run. Without an order
# nobody waits, which may be faster; that has not been measured.
_IN_ORDER = True


def attention_bwd_unsupported(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> str | None:
    if why := _unsupported(q, k, v, q.shape[2], k.shape[2]):
        return why
    if mask is not None and needs[3] and mask.dtype.itemsize > q.dtype.itemsize:
        # What dout and the rounded output have in common is not as exact.
        return f"computes the gradient of a mask in {q.dtype}, got one in {mask.dtype}"
    if mask is not None and mask.dtype != torch.bool:
        lines = zip(mask.shape[2:], mask.stride()[2:], strict=True)
        if any(size > 1 and abs(stride) > _MAX_BIAS_STRIDE for size, stride in lines):
            return (
                f"takes an additive mask with strides of rows and keys up to {_MAX_BIAS_STRIDE}, "
                f"got {mask.stride()}"
            )
    if mask is not None and dropout_p > 0.0:
        return "has no kernel for dropout under a dense mask"
    if key_lengths is not None and key_lengths.dim() != 1:
        return f"takes key_lengths per sequence, [B], got {list(key_lengths.shape)}"
    return None


def attention_bwd_workspace(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> _Workspace:
    B, H, M, D = q.shape
    head_dim = max(D, v.shape[3])
    workspace = _bwd_workspace(B * H, M, 0, head_dim, dropout_p)
    if mask is not None:
        split = key_lengths is not None or query_lengths is not None
        workspace.append(_bwd_mask_scratch(mask, split, head_dim, B, M, k.shape[2]))
        if needs[3] and (parts := _dmask_parts(mask, B, H, M, k.shape[2])) > 1:
            workspace.append(((parts, *mask.shape), torch.float32, False))
    return workspace


def _bwd_workspace(
    heads: int, queries: int, sequences: int, head_dim: int, dropout_p: float
) -> _Workspace:
    """lse and delta of every row, and dropout's hash of every two, dq in fp32, and who adds to it
    next. sequences: packed ones, each of which begins a block of rows.
    """
    rows = heads * (queries + _MAX_BLOCK_ROWS * (sequences + 1))
    columns = -(-head_dim // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    blocks = heads * (queries // _MIN_BLOCK_ROWS + sequences + 1)
    return [
        ((2 * rows + (rows // 2 if dropout_p > 0.0 else 0),), torch.float32, False),
        ((rows, columns), torch.float32, False),
        ((1 + _TURNS_PER_BLOCK * blocks,), torch.int32, False),
    ]


def _bwd_mask_scratch(
    mask: Tensor, split: bool, head_dim: int, B: int, M: int, N: int
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """What csrc/attention/mask_classes.h lays out of the transposed mask: blocks are rows, tiles
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
    classes = (B if split else batches) * heads * tiles * blocks
    return (plain * (4 * group_keys + 1) + classes * 8,), torch.int32, False


def _dmask_parts(mask: Tensor, B: int, H: int, M: int, N: int) -> int:
    """What the sum of a tile is cut into, so that about two thread blocks a multiprocessor share
    the pairs of blocks that it stands for.
    """
    whole = (B, H, -(-M // _DMASK_ROWS), -(-N // _DMASK_KEYS))
    own = (1 if size == 1 else n for size, n in zip(mask.shape, whole, strict=True))
    tiles = max(1, math.prod(own))
    return max(1, min(_MAX_DMASK_PARTS, 2 * _ONE_WAVE // tiles, math.prod(whole) // tiles))


def _placed(name: str, x: Tensor) -> Tensor:
    """x where TMA can read it."""
    return x.clone(memory_format=torch.contiguous_format) if _misplaced(name, x) else x


def attention_bwd(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor,
    statistics: Tensor,
    dq_sum: Tensor,
    turns: Tensor,
    scratch: Tensor | None = None,
    dmask_parts: Tensor | None = None,
) -> None:
    if 0 in (q.shape[0], q.shape[1], q.shape[2], k.shape[2]):  # no pair at all
        for gradient in (dq, dk, dv, dmask):
            gradient.zero_()
        return
    _library.attention_bwd.default(
        torch.zeros_like(out) if dout is None else _placed("dout", dout),
        None if dlse is None else dlse.contiguous(),
        q,
        k,
        v,
        mask,
        mask_tiles,
        None if key_lengths is None else key_lengths.contiguous(),
        None if query_lengths is None else query_lengths.contiguous(),
        _placed("out", out),
        lse.contiguous(),
        causal,
        window_left,
        window_right,
        scale,
        dropout_p,
        dropout_seed,
        dropout_stream,
        _IN_ORDER,
        dq,
        dk,
        dv,
        dmask,
        statistics,
        dq_sum,
        turns,
        scratch,
        dmask_parts,
    )


# -- packed sequences -----------------------------------------------------------------------------


def attention_varlen_fwd_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    return _unsupported(q, k, v, q.shape[0], k.shape[0])


def attention_varlen_fwd_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> _Workspace:
    """The counter of tiles and what dropout or cut keys need."""
    if dropout_p > 0.0:
        return [_COUNTER, _column_keys(min(max_seqlen_k, k.shape[0]))]
    T, H, D = q.shape
    E, sequences = v.shape[2], cu_seqlens_q.shape[0] - 1
    tile_rows, block = _shapes(max(D, E))
    # Each sequence may end in a tile of its own.
    tiles = min(-(-T // tile_rows) + sequences, -(-max_seqlen_q // tile_rows) * sequences)
    rows, keys = min(max_seqlen_q, tile_rows), min(max_seqlen_k, k.shape[0])
    parts = _parts(H * tiles, rows, -(-keys // block), block)
    ordered = sequences > 1 and H * tiles * parts > _ONE_WAVE and keys >= _ORDER_KEYS
    ordered = ordered and window_left < 0  # a left window makes tiles equal
    counter = ((1 + sequences if ordered else 1,), torch.int32, True)
    return [counter, _room(parts, H * T, E)] if parts > 1 else [counter]


def attention_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
    counter: Tensor,
    scratch: Tensor | None = None,
) -> None:
    """q [T, H, D], k [S, K, D], v [S, K, E], lse [H, T]."""
    if k.shape[0] == 0 or k.shape[1] == 0:  # no row has a key
        out.zero_()
        lse.fill_(-torch.inf)
        return
    _library.attention_varlen_fwd.default(
        q,
        k,
        v,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        max_seqlen_k,
        causal,
        window_left,
        window_right,
        scale,
        dropout_p,
        dropout_seed,
        dropout_stream,
        out,
        lse,
        counter,
        scratch,
    )


def attention_varlen_bwd_unsupported(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> str | None:
    return _unsupported(q, k, v, q.shape[0], k.shape[0])


def attention_varlen_bwd_workspace(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> _Workspace:
    T, H, D = q.shape
    sequences = cu_seqlens_q.shape[0] - 1
    return _bwd_workspace(H, T, sequences, max(D, v.shape[2]), dropout_p)


def attention_varlen_bwd(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    statistics: Tensor,
    dq_sum: Tensor,
    turns: Tensor,
) -> None:
    if 0 in (q.shape[0], q.shape[1], k.shape[0]):  # no pair at all
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    _library.attention_varlen_bwd.default(
        torch.zeros_like(out) if dout is None else _placed("dout", dout),
        None if dlse is None else dlse.contiguous(),
        q,
        k,
        v,
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        _placed("out", out),
        lse.contiguous(),
        max_seqlen_q,
        max_seqlen_k,
        causal,
        window_left,
        window_right,
        scale,
        dropout_p,
        dropout_seed,
        dropout_stream,
        _IN_ORDER,
        dq,
        dk,
        dv,
        statistics,
        dq_sum,
        turns,
    )
