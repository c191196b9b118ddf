"""Attention on Hopper in CUDA C++ (csrc/attention): bf16, fp16, head dims 8 to 256 in steps of 8.

Lengths, packed sequences, causal masks and windows are loop bounds of the same kernels. Tensors are
read and written through their strides, which the copy engine (TMA) wants to be multiples of 16
bytes. Workspace: where tiles differ in length or are short, thread blocks draw them from a counter;
dropout hashes columns once; a dense mask becomes bits and classes of tiles.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops import _native

_library = torch.ops.fastattn_sm90
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_BIAS_HEAD_DIM = 128  # beyond it an additive mask takes more registers than there are
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


def _bias_unsupported(q: Tensor, v: Tensor, mask: Tensor) -> str | None:
    """Why an additive mask cannot be read where it is, two neighbours at a time."""
    if mask.dtype not in (q.dtype, torch.float32):
        return f"takes an additive mask in {q.dtype} or float32, got {mask.dtype}"
    if max(q.shape[3], v.shape[3]) > _MAX_BIAS_HEAD_DIM:
        return (
            f"takes an additive mask up to head dim {_MAX_BIAS_HEAD_DIM}, "
            f"got {max(q.shape[3], v.shape[3])}"
        )
    strides = [s for n, s in zip(mask.shape, mask.stride(), strict=True) if n > 1]
    contiguous = mask.shape[3] > 1 and mask.stride(3) == 1 and mask.shape[3] % 2 == 0
    if not contiguous or any(s % 2 for s in strides[:-1]):
        return (
            "takes an additive mask whose keys are contiguous and even in number, in rows at even "
            f"strides, got shape {list(mask.shape)} and strides {mask.stride()}"
        )
    if mask.data_ptr() % (2 * mask.element_size()):
        return "takes an additive mask at an address that is a multiple of two elements"
    return None


def _mask_scratch(
    mask: Tensor, split: bool, head_dim: int, B: int, M: int, N: int
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """What csrc/attention/mask_classes.h lays out: bits of the mask, classes of tiles. split: tiles
    differ between batch entries.
    """
    batches, heads, rows, _ = (
        1 if stride == 0 else size for size, stride in zip(mask.shape, mask.stride(), strict=True)
    )
    block = 128 if head_dim <= 128 else 112 if head_dim <= 192 else 80
    tile_rows = 192 if head_dim <= 64 and mask.dtype == torch.bool else 128
    blocks = -(-N // block)
    groups, group_rows = (1, 1) if rows == 1 else (-(-M // 64), 64)
    plain = batches * heads * groups * blocks
    classes = (B if split else batches) * heads * -(-M // tile_rows) * blocks
    return (plain * (4 * group_rows + 1) + classes * 8,), torch.int32, False


def _column_keys(keys: int) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """One hash for every two columns that dropped weights may have."""
    return ((keys + _MAX_BLOCK) // 2,), torch.int32, False


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
        return _bias_unsupported(q, v, mask)
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
    """The counter of tiles, where it pays, and what dropout or a dense mask needs."""
    B, H, M, D = q.shape
    if mask is not None:
        split = key_lengths is not None or query_lengths is not None
        scratch = _mask_scratch(mask, split, max(D, v.shape[3]), B, M, k.shape[2])
        return [_COUNTER, scratch]
    if dropout_p > 0.0:
        return [_COUNTER, _column_keys(k.shape[2])]
    if B * H * -(-M // _TILE_ROWS) <= _ONE_WAVE:
        return []
    unequal = causal != 0 or max(window_left, window_right) >= 0
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
        counter,
        scratch,
    )


# -- backward -------------------------------------------------------------------------------------

# Blocks of rows are 64 to 128 rows long; shared memory and sums of dq have whole 64 columns.
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 64, 128
_CHUNK_COLUMNS = 64
_TURNS_PER_BLOCK = 3  # one a consumer warpgroup
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
    if mask is not None:
        return "has no backward for a dense mask"
    if dropout_p > 0.0:
        return "has no backward for dropout"
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
    """lse and delta of every row, dq in fp32, and who adds to it next."""
    B, H, M, D = q.shape
    rows = B * H * (M + _MAX_BLOCK_ROWS)
    columns = -(-max(D, v.shape[3]) // _CHUNK_COLUMNS) * _CHUNK_COLUMNS
    blocks = B * H * (M // _MIN_BLOCK_ROWS + 1)
    return [
        ((2, rows), torch.float32, False),
        ((rows, columns), torch.float32, False),
        ((1 + _TURNS_PER_BLOCK * blocks,), torch.int32, False),
    ]


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
) -> None:
    if 0 in (q.shape[0], q.shape[1], q.shape[2], k.shape[2]):  # no pair at all
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    _library.attention_bwd.default(
        torch.zeros_like(out) if dout is None else _placed("dout", dout),
        None if dlse is None else dlse.contiguous(),
        q,
        k,
        v,
        None if key_lengths is None else key_lengths.contiguous(),
        None if query_lengths is None else query_lengths.contiguous(),
        _placed("out", out),
        lse.contiguous(),
        causal,
        window_left,
        window_right,
        scale,
        _IN_ORDER,
        dq,
        dk,
        dv,
        statistics,
        dq_sum,
        turns,
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
    return [_COUNTER, _column_keys(min(max_seqlen_k, k.shape[0]))][: 2 if dropout_p > 0.0 else 1]


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
    column_keys: Tensor | None = None,
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
        column_keys,
    )
