"""Attention on Hopper in CUDA C++ (csrc/attention): bf16, fp16, head dims 8 to 256 in steps of 8.

Lengths, packed sequences, causal masks and windows are loop bounds of the same kernels. Keys and
values in pages have kernels of their own, which differ in the addresses of loads. Tensors are read
and written through their strides, which the copy engine (TMA) requires to be multiples of 16 bytes.
The library plans the workspace (csrc/attention/sm90/*/workspace.h): where tiles differ in length
or, at head dim 64, are many, thread blocks draw them from a counter; dropout hashes columns once; a
dense mask becomes bits and classes of tiles; where tiles are few, as in decoding, their keys are
split and another kernel combines the results.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops import _env, _native
from fastattn.ops.attention.calls import (
    AnyCall,
    BackwardCall,
    ForwardCall,
    why_call_unsupported,
    why_no_pages,
)
from fastattn.ops.attention.sm90_bias import (
    ALIGNMENT,
    MASK_DTYPES,
    as_readable,
    gradient_of_constant,
    is_constant,
    rows_of_constant,
)

_library = torch.ops.fastattn_sm90
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256
_MAX_ROWS = 2**28  # the kernels add up positions in 32 bits
_PAGE_SIZES = (16, 32, 64, 128, 256)
# Entries of distance_bias before the first and after the last one that the kernels read:
# kDistancePadding in csrc/attention/attention.h.
_DISTANCE_PADDING = 192


def unavailable() -> str | None:
    return _native.unavailable("sm90")


# -- unsupported calls ----------------------------------------------------------------------------
def _unreadable(name: str, x: Tensor) -> str | None:
    """Why TMA cannot read x in place."""
    if x.stride(-1) != 1:
        return f"needs {name} with a contiguous last dimension, got strides {x.stride()}"
    if x.data_ptr() % ALIGNMENT:
        return f"needs {name} at an address that is a multiple of {ALIGNMENT} bytes"
    step = ALIGNMENT // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride % step or stride <= 0):
            return (
                f"needs strides of {name} that are positive multiples of {step}, got {x.stride()}"
            )
    return None


def _unsupported(call: AnyCall) -> str | None:
    if why := unavailable() or why_call_unsupported(call):
        return why
    q, k, v, mask, rows = call.q, call.k, call.v, call.mask, 2 if call.cu_seqlens_q is None else 0
    if q.dtype not in _DTYPES:
        return f"has kernels for bf16 and fp16, got {q.dtype}"
    for dim in (q.shape[-1], v.shape[-1]):
        if dim % 8 or not 0 < dim <= _MAX_HEAD_DIM:
            return (
                f"is built for head dims that are multiples of 8 up to {_MAX_HEAD_DIM}, got {dim}"
            )
    queries, keys = q.shape[rows], k.shape[rows]
    if call.block_table is not None:
        if keys not in _PAGE_SIZES:
            return f"takes pages of {', '.join(map(str, _PAGE_SIZES))} keys, got {keys}"
        if mask is not None:
            return "has no mask with block_table"
        keys *= call.block_table.shape[1]
    if max(queries, keys) > _MAX_ROWS:
        return f"takes at most {_MAX_ROWS} queries and keys, got {queries} and {keys}"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.numel() and (why := _unreadable(name, x)):
            return why
    if call.key_lengths is not None and call.key_lengths.dim() != 1:
        return f"takes key_lengths per sequence, [B], got {list(call.key_lengths.shape)}"
    if mask is not None and mask.dtype not in MASK_DTYPES:
        return f"takes a mask in bool, bf16, fp16 or fp32, got {mask.dtype}"
    return None


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return _unsupported(call)


def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return why_no_pages(call) or _unsupported(call)


def attention_bwd_uses_lse(call: BackwardCall) -> bool:
    """The gradient of a mask may need a delta that is not computed from `out`."""
    return not call.needs[3]


# -- calls of the library -------------------------------------------------------------------------
def _padded_distances(call: ForwardCall) -> ForwardCall:
    bias = call.distance_bias
    if bias is None:
        return call
    padding = (_DISTANCE_PADDING, _DISTANCE_PADDING)
    return call._replace(distance_bias=F.pad(bias, padding).contiguous())


def _run(op: Any, q: Tensor, *arguments: Any) -> None:
    num_sms = _env.multiprocessors(q.device.type, q.device.index or 0)
    _native.call_with_workspace(op, q.device, q, *arguments, num_sms)


# -- forward --------------------------------------------------------------------------------------
def attention_fwd(call: ForwardCall, out: Tensor, lse: Tensor) -> None:
    keys, mask, table, values = call.k.shape[-2], call.mask, call.block_table, None
    if 0 in call.k.shape[:-1] or (table is not None and table.shape[1] == 0):
        offsets = call.cu_seqlens_q
        rows = call.query_lengths if offsets is None else offsets[-1:]
        return _no_key_at_all(call.sinks, rows, out, lse)
    if mask is not None and is_constant(mask, keys):
        if call.sinks is None:
            mask, values = rows_of_constant(mask)
        else:  # it competes with the sinks
            mask = mask.expand(*mask.shape[:3], keys)
        call = call._replace(mask=mask, mask_tiles=None)
    _run(_library.attention_fwd.default, *_padded_distances(call), out, lse)
    if values is not None:
        lse.add_(torch.where(lse.isneginf(), 0.0, values))


def _no_key_at_all(
    sinks: Tensor | None, query_lengths: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    out.zero_()
    lse.fill_(-torch.inf)
    if sinks is not None:
        lse.copy_(_lse_of_sinks(sinks, lse, query_lengths))


def _lse_of_sinks(sinks: Tensor, lse: Tensor, lengths: Tensor | None) -> Tensor:
    """Like lse, where no row has a key. lengths: how many rows of each batch entry are computed."""
    if lengths is None:
        return sinks[:, None].expand_as(lse)
    rows = torch.arange(lse.shape[-1], device=lse.device)
    return torch.where(rows < lengths.view(-1, 1, 1), sinks[:, None], -torch.inf).view_as(lse)


# -- backward -------------------------------------------------------------------------------------
def attention_bwd(
    call: BackwardCall,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor,
    ddistance_bias: Tensor,
    dsinks: Tensor,
) -> None:
    mask, lse, forward = call.mask, call.lse, call.forward
    if 0 in (*call.q.shape[:-1], *call.k.shape[:-1]):
        return _no_pair_at_all(call, dsinks, dq, dk, dv, dmask, ddistance_bias)
    if mask is not None and is_constant(mask, call.k.shape[-2]) and call.sinks is None:
        gradient_of_constant(dmask, call.dlse, lse)
        (mask, values), dmask = rows_of_constant(mask), dmask.new_empty(0)
        forward = forward._replace(mask_tiles=None)
        lse = torch.where(lse.isneginf(), lse, lse - values)
    forward = _padded_distances(forward)._replace(mask=None if mask is None else as_readable(mask))
    # The kernels write a contiguous ddistance_bias. It has the strides of distance_bias, which
    # follow those of alibi_slopes.
    contiguous = ddistance_bias.contiguous()
    results = (*_results(call, lse), dq, dk, dv, dmask, contiguous, dsinks)
    _run(_library.attention_bwd.default, *forward, *results)
    if contiguous is not ddistance_bias:
        ddistance_bias.copy_(contiguous)


def _results(call: BackwardCall, lse: Tensor) -> tuple[Any, ...]:
    """The forward's results, their gradients, and whether thread blocks add to dq in the order of
    their keys, which gives the same bits in every run. Otherwise they wait for the first one only.

    PyTorch's setting is read when the op runs, as by PyTorch's own ops, in compiled code too; a
    CUDA graph keeps that of its capture.
    """
    out, dout, dlse = call.out, call.dout, call.dlse
    dout = torch.zeros_like(out) if dout is None else _as_readable("dout", dout)
    dlse = None if dlse is None else dlse.contiguous()
    in_order = torch.are_deterministic_algorithms_enabled()
    return _as_readable("out", out), lse.contiguous(), dout, dlse, in_order


def _no_pair_at_all(call: BackwardCall, dsinks: Tensor, *gradients: Tensor) -> None:
    for gradient in (dsinks, *gradients):
        gradient.zero_()
    if dsinks.numel() and call.dlse is not None:  # lse is the sink
        rows = torch.where(call.lse.isneginf(), 0.0, call.dlse)
        dsinks.copy_(rows.sum((0, 2) if rows.dim() == 3 else 1))


def _as_readable(name: str, x: Tensor) -> Tensor:
    """x where TMA can read it."""
    return x.clone(memory_format=torch.contiguous_format) if _unreadable(name, x) else x
