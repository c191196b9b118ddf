"""Attention on Hopper in CUDA C++ (csrc/attention): bf16, fp16, head dims 8 to 256 in steps of 8.

Lengths, causal masks and windows are loop bounds of the same kernels. Tensors are read and written
through their strides, which the copy engine (TMA) wants to be multiples of 16 bytes. Where tiles
differ in length or are short, thread blocks draw them from a counter: the one piece of workspace.
"""

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


def unavailable() -> str | None:
    return _native.unavailable("sm90")


def _misplaced(name: str, x: Tensor) -> str | None:
    """Why TMA cannot read x in place."""
    if x.stride(3) != 1:
        return f"needs {name} with a contiguous last dimension, got strides {x.stride()}"
    if x.data_ptr() % _ALIGNMENT:
        return f"needs {name} at an address that is a multiple of {_ALIGNMENT} bytes"
    step = _ALIGNMENT // x.element_size()
    for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True):
        if size > 1 and (stride % step or stride <= 0):
            return (
                f"needs strides of {name} that are positive multiples of {step}, got {x.stride()}"
            )
    return None


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
    if why := unavailable():
        return why
    if q.dtype not in _DTYPES:
        return f"has kernels for bf16 and fp16, got {q.dtype}"
    if mask is not None:
        return "has no kernel for a dense mask"
    if dropout_p > 0.0:
        return "has no kernel for dropout"
    if key_lengths is not None and key_lengths.dim() != 1:
        return f"takes key_lengths per sequence, [B], got {list(key_lengths.shape)}"
    for dim in (q.shape[3], v.shape[3]):
        if dim % 8 or not 0 < dim <= _MAX_HEAD_DIM:
            return (
                f"is built for head dims that are multiples of 8 up to {_MAX_HEAD_DIM}, got {dim}"
            )
    if max(q.shape[2], k.shape[2]) > _MAX_ROWS:
        return f"takes at most {_MAX_ROWS} queries and keys, got {q.shape[2]} and {k.shape[2]}"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.numel() and (why := _misplaced(name, x)):
            return why
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
) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """The counter of tiles, where it pays."""
    B, H, M, D = q.shape
    if B * H * -(-M // _TILE_ROWS) <= _ONE_WAVE:
        return []
    unequal = causal != 0 or max(window_left, window_right) >= 0
    unequal = unequal or key_lengths is not None or query_lengths is not None
    if unequal or max(D, v.shape[3]) <= _COUNTED_HEAD_DIM:
        return [((1,), torch.int32, True)]
    return []


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
) -> None:
    if k.shape[2] == 0 or k.shape[1] == 0:  # no row has a key
        out.zero_()
        lse.fill_(-torch.inf)
        return
    _library.attention_fwd.default(
        q,
        k,
        v,
        None if key_lengths is None else key_lengths.contiguous(),
        None if query_lengths is None else query_lengths.contiguous(),
        causal,
        window_left,
        window_right,
        scale,
        out,
        lse,
        counter,
    )
