"""Attention on CPU in C++ (csrc/attention): fp32, bf16 and fp16, tiled, on torch's threads.

Every restriction, dropout and gradient of the written semantics, padded and packed. The kernels
read tensors through their strides; only a last dimension that is not contiguous is copied here.
Work is proportional to the tiles that hold an allowed pair, and the results do not depend on the
number of threads.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.attention.calls import (
    BackwardCall,
    ForwardCall,
    PackedBackwardCall,
    PackedForwardCall,
)

_library = torch.ops.fastattn_cpu
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_POSITIONS = 2**28  # the kernels add up positions in 32 bits
_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def _refusal(dtype: torch.dtype, queries: int, keys: int) -> str | None:
    if dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {dtype}"
    if max(queries, keys) > _MAX_POSITIONS:
        return f"takes at most {_MAX_POSITIONS} queries and keys, got {queries}, {keys}"
    return unavailable()


@functools.lru_cache(maxsize=4096)
def _workspace(
    measure: str, threads: int, q: torch.Size, k: torch.Size, v: torch.Size
) -> _Workspace:
    """Remembered: asking the library costs a good part of a small forward."""
    (B, H, M, D), (K, N) = q, k[1:3]
    floats = getattr(_library, measure).default(B, H, K, M, N, D, v[3])
    return [((floats,), torch.float32, False)]


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


# The kernels write rows: a gradient of another layout gets its values from a copy.
def _written(results: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else _rows(x) for x in results]


def _copy_back(results: Sequence[Tensor | None], written: Sequence[Tensor | None]) -> None:
    for result, rows in zip(results, written, strict=True):
        if result is not None and rows is not None and rows is not result:
            result.copy_(rows)


# -- attention_fwd ---------------------------------------------------------------------------------
def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[2], call.k.shape[2])


def attention_fwd_workspace(call: ForwardCall) -> _Workspace:
    threads = torch.get_num_threads()
    return _workspace("attention_fwd_scratch", threads, call.q.shape, call.k.shape, call.v.shape)


def attention_fwd(call: ForwardCall, out: Tensor, lse: Tensor, scratch: Tensor) -> None:
    # A name for each: gathering the options in a list takes 0.13 us longer.
    (
        q, k, v, mask, _, key_lengths, query_lengths, causal, left, right, scale, dropout_p, seed,
        stream,
    ) = call  # fmt: skip
    _library.attention_fwd.default(
        _rows(q), _rows(k), _rows(v), mask, _contiguous(key_lengths), _contiguous(query_lengths),
        causal, left, right, scale, dropout_p, seed, stream, out, lse, scratch,
    )  # fmt: skip


# Results made by the library, for calls without restrictions: making them here takes longer than a
# small call's kernel (one Zen 5 thread, fp32, 4 heads of 16 queries and keys: 4.7 us, with results,
# scratch memory and 16 arguments from here 11.5). `_op` skips a Python frame, 0.3 us. A scale of
# None is the default one.
def attention_fwd_direct(
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
    scale: float | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, ...] | None:
    if (
        mask is None
        and key_lengths is None
        and query_lengths is None
        and window_left < 0
        and window_right < 0
        and dropout_p == 0.0
        and q.dtype in _DTYPES
        and q.numel() <= _MAX_POSITIONS
        and k.numel() <= _MAX_POSITIONS
    ):
        return _library.attention_plain_fwd.default._op(q, k, v, causal, scale)
    return None


# -- attention_bwd ---------------------------------------------------------------------------------
def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[2], call.k.shape[2])


def attention_bwd_workspace(call: BackwardCall) -> _Workspace:
    threads = torch.get_num_threads()
    return _workspace("attention_bwd_scratch", threads, call.q.shape, call.k.shape, call.v.shape)


def attention_bwd(
    call: BackwardCall, dq: Tensor, dk: Tensor, dv: Tensor, dmask: Tensor, scratch: Tensor
) -> None:
    dout, dlse, q, k, v, mask, _, key_lengths, query_lengths, out, lse, *options, needs = call
    results = [x if needed else None for x, needed in zip((dq, dk, dv), needs[:3], strict=True)]
    written = _written(results)
    _library.attention_bwd.default(
        None if dout is None else _rows(dout), _contiguous(dlse), _rows(q), _rows(k), _rows(v),
        mask, _contiguous(key_lengths), _contiguous(query_lengths), _rows(out), lse.contiguous(),
        *options, *written, dmask if needs[3] and mask is not None else None, scratch,
    )  # fmt: skip
    _copy_back(results, written)


def attention_bwd_direct(
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
) -> tuple[Tensor, ...] | None:
    if (
        dout is not None
        and dlse is None
        and mask is None
        and key_lengths is None
        and query_lengths is None
        and window_left < 0
        and window_right < 0
        and dropout_p == 0.0
        and all(needs[:3])
        and q.dtype in _DTYPES
    ):
        lse = lse if lse.is_contiguous() else lse.contiguous()
        return _library.attention_plain_bwd.default._op(dout, q, k, v, out, lse, causal, scale)
    return None


# -- attention_varlen_fwd --------------------------------------------------------------------------
# The upper bounds of the lengths are not used: the library reads the offsets.
def _sequences(call: PackedForwardCall | PackedBackwardCall) -> tuple[Tensor, ...]:
    return (
        _rows(call.q), _rows(call.k), _rows(call.v),
        call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous(),
    )  # fmt: skip


def attention_varlen_fwd_unsupported(call: PackedForwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[0], call.k.shape[0])


def attention_varlen_fwd_workspace(call: PackedForwardCall) -> _Workspace:
    floats = _library.attention_varlen_fwd_scratch.default(*_sequences(call))
    return [((floats,), torch.float32, False)]


def attention_varlen_fwd(
    call: PackedForwardCall, out: Tensor, lse: Tensor, scratch: Tensor
) -> None:
    _, _, _, _, _, _, _, *options = call
    _library.attention_varlen_fwd.default(*_sequences(call), *options, out, lse, scratch)


# -- attention_varlen_bwd --------------------------------------------------------------------------
def attention_varlen_bwd_unsupported(call: PackedBackwardCall) -> str | None:
    return _refusal(call.q.dtype, call.q.shape[0], call.k.shape[0])


def attention_varlen_bwd_workspace(call: PackedBackwardCall) -> _Workspace:
    floats = _library.attention_varlen_bwd_scratch.default(*_sequences(call))
    return [((floats,), torch.float32, False)]


def attention_varlen_bwd(
    call: PackedBackwardCall, dq: Tensor, dk: Tensor, dv: Tensor, scratch: Tensor
) -> None:
    dout, dlse, _, _, _, _, _, out, lse, _, _, *options, needs = call
    results = [x if needed else None for x, needed in zip((dq, dk, dv), needs, strict=True)]
    written = _written(results)
    _library.attention_varlen_bwd.default(
        None if dout is None else _rows(dout), _contiguous(dlse), *_sequences(call), _rows(out),
        lse.contiguous(), *options, *written, scratch,
    )  # fmt: skip
    _copy_back(results, written)
