"""Attention by PyTorch's fused operators, adapted to the semantics of fastattn.

CPU: aten's flash attention and its backward. CUDA: aten's flash attention for half precision
without a dense mask, else its memory-efficient attention; neither has run on a GPU here yet.
Dropout, the gradient of a mask, fp64 on a GPU and other devices: matrix products and a softmax,
with memory O(M N).

aten's operators differ from fastattn's semantics as follows. Dead rows and keys are set to 0 before
the call if they could affect results, and the results of dead rows are replaced afterwards. Blocked
pairs, other than by aten's causal flag, are -inf in an additive mask. In the backward, dead rows
have lse +inf, so that their weights are exactly 0. Different head dims are padded. The gradient of
lse is passed in additional columns of dout (1), out (-dlse) and v (0), so that aten's delta =
rowsum(dout * out) becomes delta - dlse.

Functions return their results, None for gradients that are not needed.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops._dropout import attention_dropped, keep_scale
from fastattn.ops.attention.calls import (
    BackwardCall,
    ForwardCall,
    PackedBackwardCall,
    PackedForwardCall,
    score_changes,
)
from fastattn.ops.attention.torch_kernels import (
    is_fused,
    kernels,
    packed_bwd,
    packed_fwd,
    packed_live,
    packed_refusal,
    pad,
    padded_head_dim,
)
from fastattn.ops.attention.torch_problem import Problem, prepare, wide, zero_dead, zero_unsafe

RETURNS_RESULTS = True
_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_Gradients = tuple[Tensor | None, ...]
# The rounding error of larger scores would change weights noticeably, so forward and backward must
# compute them in the same way. Checked on the CPU only.
_HUGE = 1e6


def _is_empty(call: ForwardCall | BackwardCall) -> bool:
    return 0 in (*call.q.shape[:3], call.k.shape[2])


def _has_huge_scores(lse: Tensor) -> bool:
    return lse.is_cpu and bool((lse.nan_to_num(neginf=0.0).abs() > _HUGE).any())


# -- attention_fwd ---------------------------------------------------------------------------------
def _refusal(call: Any) -> str | None:
    dtype = call.q.dtype
    return None if dtype in _DTYPES else f"takes fp32, bf16, fp16 and fp64, got {dtype}"


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return _refusal(call) or score_changes(call)


def attention_fwd(call: ForwardCall, first: int = 0) -> tuple[Tensor, Tensor]:
    """first: the index of the first batch element, for the dropout bits."""
    q, E = call.q, call.v.shape[3]
    if _is_empty(call):
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide(q.dtype), device=q.device)
        return q.new_zeros(*q.shape[:3], E), lse
    fused = is_fused(call)
    t = prepare(call, fused)
    if fused:
        width = padded_head_dim(q, max(q.shape[3], E))
        forward, _ = kernels(t, width)
        out, lse = forward(t._replace(q=pad(t.q, width), k=pad(t.k, width), v=pad(t.v, width)))
        out = out if width == E else out[..., :E]
    else:
        out, lse = _products_fwd(t, call, first)
    if t.live_rows is not None:
        out = out.masked_fill_(~t.live_rows, 0.0)
        lse = torch.where(t.live_rows[..., 0], lse, -math.inf)
    return out, lse


# -- attention_bwd ---------------------------------------------------------------------------------
def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return _refusal(call) or score_changes(call)


def attention_bwd(call: BackwardCall, first: int = 0) -> _Gradients:
    needs = call.needs
    if _is_empty(call):
        inputs = (call.q, call.k, call.v, call.mask, call.distance_bias, call.sinks)
        pairs = zip(inputs, needs, strict=True)
        return tuple(None if x is None or not n else torch.zeros_like(x) for x, n in pairs)
    needs_dmask = needs[3] and call.mask is not None
    fused = is_fused(call) and not needs_dmask and not _has_huge_scores(call.lse)
    t = prepare(call, fused)
    dout = torch.zeros_like(call.out) if call.dout is None else call.dout
    dlse, lse = call.dlse, call.lse
    if t.live_rows is not None:
        rows = t.live_rows[..., 0]
        dout = (zero_unsafe if fused else zero_dead)(t.live_rows, dout)
        dlse = None if dlse is None else torch.where(rows, dlse, 0)
        lse = torch.where(rows, lse, math.inf)
    if fused:
        dq, dk, dv = _fused_bwd(t, call.out, lse, dout, dlse)
        dmask = None
    else:
        dq, dk, dv, dmask = _products_bwd(t, call, first, dout, dlse, needs_dmask)
    dq = dq if t.sign > 0 else dq * t.sign
    found = (dq, dk, dv, dmask, None, None)
    return tuple(x if n else None for x, n in zip(found, needs, strict=True))


def _with_dlse(out: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and dout with a column for dlse; in half precision two, for its high and its low bits."""
    if dlse is None:
        return out, dout
    high = -dlse.to(out.dtype)
    columns = [high] if out.dtype == dlse.dtype else [high, (-dlse - high).to(out.dtype)]
    return torch.cat([out, torch.stack(columns, -1)], -1), F.pad(dout, (0, len(columns)), value=1.0)


def _fused_bwd(
    t: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    D, E = t.q.shape[3], t.v.shape[3]
    out, dout = _with_dlse(out, dout, dlse)
    width = padded_head_dim(t.q, max(D, out.shape[3]))
    rows = t._replace(q=pad(t.q, width), k=pad(t.k, width), v=pad(t.v, width))
    _, backward = kernels(t, width)
    dq, dk, dv = backward(rows, pad(dout, width), pad(out, width), lse)
    return (dq, dk, dv) if width == D == E else (dq[..., :D], dk[..., :D], dv[..., :E])


# -- products and a softmax ------------------------------------------------------------------------
def _by_group(x: Tensor, K: int) -> Tensor:
    """[B, H, M, D] -> [B, K, H / K * M, D]: the rows of the query heads of each key/value head."""
    B, H, M, D = x.shape
    return x.reshape(B, K, H // K * M, D)


def _scores(t: Problem) -> Tensor:
    """The scores [B, H, M, N] in fp32 (fp64); 0 in dead rows, whose softmax would be NaN."""
    (B, H, M, _), (_, K, N, _), dtype = t.q.shape, t.k.shape, wide(t.q.dtype)
    s = _by_group(t.q.to(dtype) * t.scale, K) @ t.k.to(dtype).transpose(-1, -2)
    s = s.view(B, H, M, N)
    if t.bias is not None:
        s += t.bias
    return s if t.live_rows is None else zero_dead(t.live_rows, s)


def _dropped(call: ForwardCall | BackwardCall, first: int) -> Tensor:
    (B, H, M, _), N, seed = call.q.shape, call.k.shape[2], call.dropout_seed
    assert seed is not None
    return attention_dropped(seed, call.dropout_stream, call.dropout_p, B, H, M, N, first)


def _products_fwd(t: Problem, call: ForwardCall, first: int) -> tuple[Tensor, Tensor]:
    s = _scores(t)
    p = torch.softmax(s, -1)
    lse = s.amax(-1) - p.amax(-1).log()  # a row's largest weight is 1 / sum(exp(s - max))
    if call.dropout_p > 0:
        p.masked_fill_(_dropped(call, first), 0.0)
    out = _by_group(p, t.v.shape[1]) @ t.v.to(p.dtype)
    out = out.view(*t.q.shape[:3], t.v.shape[3]) * keep_scale(call.dropout_p)
    return out.to(t.q.dtype), lse


def _products_bwd(
    t: Problem,
    call: BackwardCall,
    first: int,
    dout: Tensor,
    dlse: Tensor | None,
    needs_dmask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    (B, H, M, D), (_, K, N, _), mask = t.q.shape, t.k.shape, call.mask
    p = torch.softmax(_scores(t), -1)
    dout = _by_group(dout.to(p.dtype) * keep_scale(call.dropout_p), K)
    dp = (dout @ t.v.to(p.dtype).transpose(-1, -2)).view(B, H, M, N)
    kept = p
    if call.dropout_p > 0:
        dropped = _dropped(call, first)
        kept = p.masked_fill(dropped, 0.0)
        dp.masked_fill_(dropped, 0.0)
    dv = _by_group(kept, K).transpose(-1, -2) @ dout
    ds = _aten._softmax_backward_data.default(dp, p, -1, p.dtype)
    if dlse is not None:
        ds.addcmul_(p, dlse[..., None])
    q = _by_group(t.q.to(p.dtype) * t.scale, K)
    dq = (_by_group(ds, K) @ t.k.to(p.dtype) * t.scale).view(B, H, M, D)
    dk = _by_group(ds, K).transpose(-1, -2) @ q
    dmask = None
    if needs_dmask and mask is not None:
        dmask = ds.sum_to_size(mask.shape).to(mask.dtype)
    return dq.to(t.q.dtype), dk.to(t.q.dtype), dv.to(t.q.dtype), dmask


# -- attention_varlen ------------------------------------------------------------------------------
# On CUDA one kernel computes all sequences; elsewhere there is a call for each sequence.
def _packed_refusal(call: PackedForwardCall | PackedBackwardCall) -> str | None:
    return score_changes(call) or (packed_refusal if call.q.is_cuda else _refusal)(call)


def _is_packed_empty(call: PackedForwardCall | PackedBackwardCall) -> bool:
    return 0 in (*call.q.shape[:2], call.k.shape[0], call.cu_seqlens_q.shape[0] - 1)


def _packed_problem(call: PackedForwardCall | PackedBackwardCall, size: int) -> Problem:
    """The problem with q, k and v padded to head dim `size`, [T, heads, size]."""
    live, sign = packed_live(call)[0], (call.scale > 0) - (call.scale < 0)
    q, k, v = (pad(x, size) for x in (torch.where(live, call.q, 0) * sign, call.k, call.v))
    return Problem(q, k, v, None, call.causal != 0, live, abs(call.scale) or 1.0, sign)


def _sequences(call: PackedForwardCall | PackedBackwardCall) -> list[tuple[slice, slice]]:
    """The slices of each sequence's queries and keys."""
    offsets = (call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist())
    return [*zip(*([slice(*ends) for ends in pairwise(x)] for x in offsets), strict=True)]


def _heads(x: Tensor, rows: slice) -> Tensor:
    """[T, H, D] -> [1, H, S, D]."""
    return x[rows].transpose(0, 1)[None]


def attention_varlen_fwd_unsupported(call: PackedForwardCall) -> str | None:
    return _packed_refusal(call)


def attention_varlen_fwd(call: PackedForwardCall) -> tuple[Tensor, Tensor]:
    q, k, v, _, _, _, _, *options = call
    (T, H, D), E = q.shape, v.shape[2]
    if q.is_cuda and not _is_packed_empty(call):
        t = _packed_problem(call, padded_head_dim(q, max(D, E)))
        out, lse = packed_fwd(t, call)
        live = t.live_rows
        assert live is not None
        return torch.where(live, out[..., :E], 0), torch.where(live[:, 0, 0], lse, -math.inf)
    out = q.new_zeros(T, H, E)
    lse = q.new_full((H, T), -math.inf, dtype=wide(q.dtype))
    for b, (rows, keys) in enumerate(_sequences(call)):
        inputs = (_heads(q, rows), _heads(k, keys), _heads(v, keys), None, None, None, None)
        out_b, lse_b = attention_fwd(ForwardCall._make([*inputs, *options]), b)
        out[rows], lse[:, rows] = out_b[0].transpose(0, 1), lse_b[0]
    return out, lse


def attention_varlen_bwd_unsupported(call: PackedBackwardCall) -> str | None:
    return _packed_refusal(call)


def attention_varlen_bwd(call: PackedBackwardCall) -> _Gradients:
    dout, dlse, q, k, v, _, _, out, lse, _, _, *options, needs = call
    if q.is_cuda and not _is_packed_empty(call):
        return _packed_bwd(call)
    gradients = [
        x.new_zeros(x.shape) if n else None for x, n in zip((q, k, v), needs, strict=False)
    ]
    for b, (rows, keys) in enumerate(_sequences(call)):
        results = [_heads(out, rows), lse[None, :, rows]]
        inputs = [
            None if dout is None else _heads(dout, rows),
            None if dlse is None else dlse[None, :, rows],
            *(_heads(q, rows), _heads(k, keys), _heads(v, keys), None, None, None, None),
        ]
        call_b = BackwardCall._make(
            [*inputs, *results, *options, [*needs[:3], False, False, False]]
        )
        gradients_b = attention_bwd(call_b, b)
        for gradient, gradient_b, at in zip(
            gradients, gradients_b, (rows, keys, keys), strict=False
        ):
            if gradient is not None and gradient_b is not None:
                gradient[at] = gradient_b[0].transpose(0, 1)
    return (*gradients, None, None)


def _packed_bwd(call: PackedBackwardCall) -> _Gradients:
    (live, live_keys), (D, E) = packed_live(call), (call.q.shape[2], call.v.shape[2])
    dout = torch.zeros_like(call.out) if call.dout is None else torch.where(live, call.dout, 0)
    dlse = None if call.dlse is None else torch.where(live[..., 0], call.dlse.t(), 0)
    lse = torch.where(live[:, 0, 0], call.lse, math.inf)
    out, dout = _with_dlse(call.out, dout, dlse)
    size = padded_head_dim(call.q, max(D, out.shape[2]))
    t = _packed_problem(call, size)
    dq, dk, dv = packed_bwd(t, pad(dout, size), pad(out, size), lse, call)
    found = (
        torch.where(live, dq[..., :D] * t.sign, 0),
        torch.where(live_keys, dk[..., :D], 0),
        torch.where(live_keys, dv[..., :E], 0),
        None,
        None,
    )
    return tuple(x if needed else None for x, needed in zip(found, call.needs, strict=True))
