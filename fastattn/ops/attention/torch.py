"""Attention by PyTorch's fused operators, adapted to the semantics of fastattn.

CPU: aten's flash attention and its backward. CUDA: aten's flash attention for half precision
without a dense mask, else its memory-efficient attention. Dropout, a soft cap, the gradient of a
mask or of a bias by distance, a mask in fp32 of data in half precision, fp64 on a GPU and other
devices: matrix products and a softmax, with memory O(M N). A bias by distance is a dense mask, so
its memory is O(M N) too.

aten's operators differ from fastattn's semantics as follows. Dead rows and keys are set to 0 before
the call if they could affect results, and the results of dead rows are replaced afterwards. Blocked
pairs, other than by aten's causal flag, are -inf in an additive mask. In the backward, dead rows
have lse +inf, so that their weights are exactly 0. Different head dims are padded. The gradient of
lse is passed in additional columns of dout (1), out (-dlse) and v (0), so that aten's delta =
rowsum(dout * out) becomes delta - dlse. Attention sinks change out and lse after the forward, and
nothing in the backward, which gets these. Keys and values in pages are gathered first.

Functions return their results, None for gradients that are not needed.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops._dropout import attention_dropped, keep_scale
from fastattn.ops.attention.calls import (
    AnyCall,
    BackwardCall,
    CausalKind,
    ForwardCall,
    has_few_keys,
    why_call_unsupported,
    why_no_pages,
    why_no_weights,
)
from fastattn.ops.attention.torch_kernels import (
    is_fused,
    kernels,
    packed_bwd,
    packed_fwd,
    packed_live,
    pad,
    padded_head_dim,
    sequence_of,
    why_not_packed,
)
from fastattn.ops.attention.torch_problem import (
    Problem,
    prepare,
    sum_by_distance,
    wide,
    zero_dead,
    zero_unsafe,
)

RETURNS_RESULTS = True
_aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_Gradients = tuple[Tensor | None, ...]
# The rounding error of larger scores, or of larger products that cancel in a score, would change
# weights noticeably, so forward and backward must compute them in the same way. Checked on the CPU
# only.
_HUGE = 1e6


def _is_empty(call: AnyCall) -> bool:
    return 0 in (*call.q.shape[:3], call.k.shape[2])


def _has_huge_scores(call: BackwardCall) -> bool:
    lse, q, k = call.lse, call.q, call.k
    if not lse.is_cpu or q.numel() == 0 or k.numel() == 0:
        return False
    if bool((lse.nan_to_num(neginf=0.0).abs() > _HUGE).any()):
        return True
    if _largest_products(q, k) * abs(call.scale) <= _HUGE:
        return False
    t = prepare(call, False)  # without values at dead positions, which must not decide
    return _largest_products(t.q, t.k) * abs(call.scale) > _HUGE


def _largest_products(q: Tensor, k: Tensor) -> float:
    """A bound of the products that a score adds up; NaN if a value is."""
    largest_q, largest_k = (torch.linalg.vector_norm(x, math.inf).item() for x in (q, k))
    return largest_q * largest_k * q.shape[3]


# -- attention_fwd ---------------------------------------------------------------------------------
def _why_unsupported(call: AnyCall) -> str | None:
    if why := why_call_unsupported(call):
        return why
    dtype = call.q.dtype
    if dtype not in _DTYPES:
        return f"takes fp32, bf16, fp16 and fp64, got {dtype}"
    return why_not_packed(call) if call.cu_seqlens_q is not None and call.q.is_cuda else None


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return _why_unsupported(call)


def attention_fwd(call: ForwardCall) -> tuple[Tensor, Tensor]:
    if call.cu_seqlens_q is not None:
        return _packed_fwd(call)
    if (table := call.block_table) is not None:
        k, v = (_gathered(x, table) for x in (call.k, call.v))
        call = call._replace(k=k, v=v, block_table=None)
    return _padded_fwd(call, 0)


def _padded_fwd(call: ForwardCall, first: int) -> tuple[Tensor, Tensor]:
    """first: the index of the first batch element, for the dropout bits."""
    q, E = call.q, call.v.shape[3]
    if _is_empty(call):
        lse = torch.zeros(q.shape[:3], dtype=wide(q.dtype), device=q.device)
        return q.new_zeros(*q.shape[:3], E), lse + _dead_lse(call)
    fused = is_fused(call)
    t = prepare(call, fused)
    if fused:
        width = padded_head_dim(q, max(q.shape[3], E))
        forward, _ = kernels(t, width)
        out, lse = forward(t._replace(q=pad(t.q, width), k=pad(t.k, width), v=pad(t.v, width)))
        out = out if width == E else out[..., :E]
    else:
        out, lse = _products_fwd(t, call, first)
    if call.sinks is not None:
        keys_weight, lse = _with_sinks(lse, call.sinks[:, None])
        out = out * keys_weight[..., None]
    out = out.to(q.dtype)
    if t.live_rows is not None:
        out = out.masked_fill_(~t.live_rows, 0.0)
        lse = torch.where(t.live_rows[..., 0], lse, _dead_lse(call))
    return out, lse


def _gathered(pages: Tensor, block_table: Tensor) -> Tensor:
    """[P, K, page, D] and [B, T] -> [B, K, T * page, D], stored as [B, T * page, K, D]. Keys beyond
    the key length may have entries that are no page.
    """
    (P, K, page, D), (B, T) = pages.shape, block_table.shape
    if P == 0:
        return pages.new_zeros(B, K, T * page, D)
    found = pages.transpose(1, 2)[block_table.clamp(0, P - 1)]  # [B, T, page, K, D]
    return found.flatten(1, 2).transpose(1, 2)


def _with_sinks(lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of all keys together, and lse with the sinks: above them, as of rows with a key.
    sinks: broadcastable to lse.
    """
    above = torch.nextafter(sinks, sinks.new_full((), math.inf))
    return torch.sigmoid(lse - sinks), torch.maximum(torch.logaddexp(lse, sinks), above)


def _dead_lse(call: ForwardCall) -> Tensor | float:
    """The lse of rows without an allowed key, broadcastable to [B, H, M]."""
    if call.sinks is None:
        return -math.inf
    sinks, lengths = call.sinks[:, None], call.query_lengths
    if lengths is None:
        return sinks
    i = torch.arange(call.q.shape[2], device=call.q.device)
    return torch.where(i < lengths[:, None, None], sinks, -math.inf)


# -- attention_bwd ---------------------------------------------------------------------------------
def attention_bwd_unsupported(call: BackwardCall) -> str | None:
    return _why_unsupported(call) or why_no_pages(call)


def attention_bwd_uses_lse(call: BackwardCall) -> bool:
    """True for the fused kernels; products compute the softmax again. The kernels compute delta
    from the rounded out, whose error shows where gradients vanish in theory, as with one key.
    """
    needs_scores = (call.needs[3] and call.mask is not None) or (
        call.needs[4] and call.distance_bias is not None
    )
    return is_fused(call) and not (has_few_keys(call) or needs_scores or _has_huge_scores(call))


def attention_bwd(call: BackwardCall) -> _Gradients:
    return _padded_bwd(call, 0, None) if call.cu_seqlens_q is None else _packed_bwd(call)


def _padded_bwd(call: BackwardCall, first: int, dweights: Tensor | None) -> _Gradients:
    """dweights: the gradient of the weights after dropout, [B, H, M, N]."""
    needs = call.needs
    if _is_empty(call):
        inputs = (call.q, call.k, call.v, call.mask, call.distance_bias)
        pairs = zip(inputs, needs[:5], strict=True)
        zeros = [None if x is None or not n else torch.zeros_like(x) for x, n in pairs]
        return (*zeros, _dsinks(None, call.dlse, call.lse, call.sinks) if needs[5] else None)
    needs_dmask = needs[3] and call.mask is not None
    needs_dbias = needs[4] and call.distance_bias is not None
    fused = attention_bwd_uses_lse(call) and dweights is None
    t = prepare(call, fused)
    dout = torch.zeros_like(call.out) if call.dout is None else call.dout
    dlse, lse = call.dlse, call.lse
    if t.live_rows is not None:
        rows = t.live_rows[..., 0]
        dout = (zero_unsafe if fused else zero_dead)(t.live_rows, dout)
        dlse = None if dlse is None else torch.where(rows, dlse, 0)
        lse = torch.where(rows, lse, math.inf)
    dmask = dbias = delta = None
    if fused:
        dq, dk, dv = _fused_bwd(t, call.out, lse, dout, dlse)
        if needs[5] and call.dout is not None:
            delta = _delta(call.dout, call.out, call.lse)
    else:
        dq, dk, dv, ds, delta = _products_bwd(t, call, first, dout, dlse, dweights)
        if needs_dmask and call.mask is not None:
            dmask = ds.sum_to_size(call.mask.shape).to(call.mask.dtype)
        dbias = sum_by_distance(call, ds) if needs_dbias else None
    dsinks = _dsinks(delta, call.dlse, call.lse, call.sinks) if needs[5] else None
    dq = dq if t.sign > 0 else dq * t.sign
    found = (dq, dk, dv, dmask, dbias, dsinks)
    return tuple(x if n else None for x, n in zip(found, needs, strict=True))


def _delta(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    return (dout.to(lse.dtype) * out).sum(-1)


def _dsinks(
    delta: Tensor | None, dlse: Tensor | None, lse: Tensor, sinks: Tensor | None
) -> Tensor | None:
    """[H], None without sinks. A row without an allowed key has out 0, and the sink or -inf as lse.
    delta: the sum of each row's weights times their gradients.
    """
    if sinks is None:
        return None
    sink, row = sinks[:, None], torch.zeros_like(lse)
    if delta is not None:
        row = delta.masked_fill(lse <= sink, 0.0)  # where dout may be NaN
    row = row if dlse is None else row - dlse
    return -(torch.exp(sink - lse) * row).masked_fill(lse.isneginf(), 0.0).sum((0, 2))


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


def _scores(t: Problem, call: ForwardCall | BackwardCall) -> tuple[Tensor, Tensor | None]:
    """The scores [B, H, M, N] in fp32 (fp64); 0 in dead rows, whose softmax would be NaN. Also the
    scores over the soft cap, if there is one.
    """
    (B, H, M, _), (_, K, N, _), dtype = t.q.shape, t.k.shape, wide(t.q.dtype)
    s = _by_group(t.q.to(dtype) * t.scale, K) @ t.k.to(dtype).transpose(-1, -2)
    s = s.view(B, H, M, N)
    ratio = None
    if call.softcap > 0:
        ratio = s.div_(call.softcap).tanh_()
        s = ratio * call.softcap
    if t.bias is not None:
        s += t.bias
    return s if t.live_rows is None else zero_dead(t.live_rows, s), ratio


def _softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of each row and its lse."""
    p = torch.softmax(s, -1)
    return p, s.amax(-1) - p.amax(-1).log()  # a row's largest weight is 1 / sum(exp(s - max))


def _dropped(call: ForwardCall | BackwardCall, first: int) -> Tensor:
    (B, H, M, _), N, seed = call.q.shape, call.k.shape[2], call.dropout_seed
    assert seed is not None
    return attention_dropped(seed, call.dropout_stream, call.dropout_p, B, H, M, N, first)


def _products_fwd(t: Problem, call: ForwardCall, first: int) -> tuple[Tensor, Tensor]:
    p, lse = _softmax(_scores(t, call)[0])
    if call.dropout_p > 0:
        p.masked_fill_(_dropped(call, first), 0.0)
    out = _by_group(p, t.v.shape[1]) @ t.v.to(p.dtype)
    return out.view(*t.q.shape[:3], t.v.shape[3]) * keep_scale(call.dropout_p), lse


def _products_bwd(
    t: Problem,
    call: BackwardCall,
    first: int,
    dout: Tensor,
    dlse: Tensor | None,
    dweights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, the gradient of the scores [B, H, M, N], and delta [B, H, M] for the sinks."""
    (B, H, M, D), (_, K, N, _) = t.q.shape, t.k.shape
    s, ratio = _scores(t, call)
    p, lse = _softmax(s)
    if call.sinks is not None:
        p *= _with_sinks(lse, call.sinks[:, None])[0][..., None]
    dout = _by_group(dout.to(p.dtype) * keep_scale(call.dropout_p), K)
    dp = (dout @ t.v.to(p.dtype).transpose(-1, -2)).view(B, H, M, N)
    if dweights is not None:
        if t.live_rows is not None:
            dweights = zero_dead(t.live_rows, dweights)
        dp = dp.add(dweights, alpha=keep_scale(call.dropout_p))
    kept = p
    if call.dropout_p > 0:
        dropped = _dropped(call, first)
        kept = p.masked_fill(dropped, 0.0)
        dp.masked_fill_(dropped, 0.0)
    dv = _by_group(kept, K).transpose(-1, -2) @ dout
    ds = _aten._softmax_backward_data.default(dp, p, -1, p.dtype)
    if dlse is not None:
        ds.addcmul_(p, dlse[..., None])
    dproduct = _by_group(ds if ratio is None else ds * (1 - ratio * ratio), K)
    q = _by_group(t.q.to(p.dtype) * t.scale, K)
    dq = (dproduct @ t.k.to(p.dtype) * t.scale).view(B, H, M, D)
    dk = dproduct.transpose(-1, -2) @ q
    delta = (p * dp).sum(-1) if call.needs[5] else None
    return dq.to(t.q.dtype), dk.to(t.q.dtype), dv.to(t.q.dtype), ds, delta


# -- attention_with_weights ------------------------------------------------------------------------
# Context by the op `attention_fwd`, weights by a softmax of their own.
def attention_with_weights_fwd_unsupported(call: Any) -> str | None:
    return why_no_weights(call) or _why_unsupported(call)


def attention_with_weights_fwd(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    *forward, average = call
    (B, H, M, _), N = call.q.shape, call.k.shape[2]
    out, lse = torch.ops.fastattn.attention_fwd.default(*forward)
    if _is_empty(call):
        return out, lse, call.q.new_zeros((B, M, N) if average else (B, H, M, N))
    t = prepare(call, False)
    p, own_lse = _softmax(_scores(t, call)[0])
    if call.sinks is not None:
        p *= _with_sinks(own_lse, call.sinks[:, None])[0][..., None]
    if t.live_rows is not None:
        p = p.masked_fill_(~t.live_rows, 0.0)
    if call.dropout_p > 0:
        p = p.masked_fill_(_dropped(call, 0), 0.0).mul_(keep_scale(call.dropout_p))
    return out, lse, (p.mean(1) if average else p).to(call.q.dtype)


attention_with_weights_bwd_unsupported = attention_with_weights_fwd_unsupported


def attention_with_weights_bwd(call: Any) -> _Gradients:
    dout, dlse, dweights, *others, average, needs = call
    if dweights is None:
        return torch.ops.fastattn.attention_bwd.default(dout, dlse, *others, needs)  # type: ignore[no-any-return]
    if average:
        H = call.q.shape[1]
        dweights = (dweights / H)[:, None].expand(-1, H, -1, -1)
    return _padded_bwd(BackwardCall._make([dout, dlse, *others, needs]), 0, dweights)


# -- packed sequences ------------------------------------------------------------------------------
# On CUDA one kernel computes all sequences; elsewhere there is a call for each sequence.
def _is_packed_empty(call: AnyCall) -> bool:
    assert call.cu_seqlens_q is not None
    return 0 in (*call.q.shape[:2], call.k.shape[0], call.cu_seqlens_q.shape[0] - 1)


def _packed_problem(call: AnyCall, size: int) -> Problem:
    """The problem with q, k and v padded to head dim `size`, [T, heads, size]."""
    live, sign = packed_live(call)[0], (call.scale > 0) - (call.scale < 0)
    q, k, v = (pad(x, size) for x in (torch.where(live, call.q, 0) * sign, call.k, call.v))
    return Problem(q, k, v, None, call.causal != 0, live, abs(call.scale) or 1.0, sign)


def _sequences(call: ForwardCall) -> Iterator[tuple[slice, slice, ForwardCall]]:
    """The slices of each sequence's queries and keys, and its call."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    offsets = (call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist())
    ends = zip(*(pairwise(x) for x in offsets), strict=True)
    for b, (rows, keys) in enumerate((slice(*q), slice(*k)) for q, k in ends):
        q, k, v = _heads(call.q, rows), _heads(call.k, keys), _heads(call.v, keys)
        bias = call.distance_bias
        bias = None if bias is None else _bias_of_sequence(call, bias, b, rows, keys)
        yield rows, keys, call._replace(q=q, k=k, v=v, cu_seqlens_q=None, distance_bias=bias)


def _heads(x: Tensor, rows: slice) -> Tensor:
    """[T, H, D] -> [1, H, S, D]."""
    return x[rows].transpose(0, 1)[None]


def _bias_of_sequence(call: ForwardCall, bias: Tensor, b: int, rows: slice, keys: slice) -> Tensor:
    """The part of distance_bias, or of its gradient, of sequence b: [1, H, its queries + keys - 1],
    a view.
    """
    m, n = rows.stop - rows.start, keys.stop - keys.start
    at = call.max_seqlen_q - m if call.causal <= CausalKind.TOP_LEFT else call.max_seqlen_k - n
    b = b if bias.shape[0] > 1 else 0
    return bias[b : b + 1, :, at : at + max(m + n - 1, 0)]


def _packed_fwd(call: ForwardCall) -> tuple[Tensor, Tensor]:
    q, sinks, (T, H, D), E = call.q, call.sinks, call.q.shape, call.v.shape[2]
    if q.is_cuda and not _is_packed_empty(call):
        t = _packed_problem(call, padded_head_dim(q, max(D, E)))
        out, lse = packed_fwd(t, call)
        live, out = t.live_rows, out[..., :E]
        assert live is not None and call.cu_seqlens_q is not None
        dead_lse: Tensor | float = -math.inf
        if sinks is not None:
            keys_weight, lse = _with_sinks(lse, sinks[:, None])
            out = (out * keys_weight.t()[..., None]).to(q.dtype)
            positions = torch.arange(T, device=q.device)
            in_sequence = sequence_of(positions, call.cu_seqlens_q)[1]
            dead_lse = torch.where(in_sequence, sinks[:, None], -math.inf)
        return torch.where(live, out, 0), torch.where(live[:, 0, 0], lse, dead_lse)
    out = q.new_zeros(T, H, E)
    lse = q.new_full((H, T), -math.inf, dtype=wide(q.dtype))
    for b, (rows, _, of_sequence) in enumerate(_sequences(call)):
        out_b, lse_b = _padded_fwd(of_sequence, b)
        out[rows], lse[:, rows] = out_b[0].transpose(0, 1), lse_b[0]
    return out, lse


def _packed_bwd(call: BackwardCall) -> _Gradients:
    if call.q.is_cuda and not _is_packed_empty(call):
        return _packed_bwd_of_kernel(call)
    dout, dlse, out, lse, needs = call.dout, call.dlse, call.out, call.lse, call.needs
    inputs = (call.q, call.k, call.v, None, call.distance_bias, call.sinks)
    gradients = [
        None if x is None or not n else torch.zeros_like(x, memory_format=torch.contiguous_format)
        for x, n in zip(inputs, needs, strict=True)
    ]
    for b, (rows, keys, of_sequence) in enumerate(_sequences(call.forward)):
        own = BackwardCall(
            None if dout is None else _heads(dout, rows),
            None if dlse is None else dlse[None, :, rows],
            _heads(out, rows), lse[None, :, rows], *of_sequence, needs,
        )  # fmt: skip
        found = _padded_bwd(own, b, None)
        for gradient, part, at in zip(gradients[:3], found[:3], (rows, keys, keys), strict=True):
            if gradient is not None and part is not None:
                gradient[at] = part[0].transpose(0, 1)
        *_, dbias, dsinks = gradients
        if dbias is not None and found[4] is not None:
            _bias_of_sequence(call.forward, dbias, b, rows, keys).add_(found[4])
        if dsinks is not None and found[5] is not None:
            dsinks += found[5]
    return tuple(gradients)


def _packed_bwd_of_kernel(call: BackwardCall) -> _Gradients:
    (live, live_keys), (D, E) = packed_live(call), (call.q.shape[2], call.v.shape[2])
    dout = torch.zeros_like(call.out) if call.dout is None else torch.where(live, call.dout, 0)
    dlse = None if call.dlse is None else torch.where(live[..., 0], call.dlse.t(), 0)
    lse = torch.where(live[:, 0, 0], call.lse, math.inf)
    out, dout = _with_dlse(call.out, dout, dlse)
    size = padded_head_dim(call.q, max(D, out.shape[2]))
    t = _packed_problem(call, size)
    dq, dk, dv = packed_bwd(t, pad(dout, size), pad(out, size), lse, call)
    dsinks = None
    if call.needs[5] and call.sinks is not None:
        delta = None
        if call.dout is not None:
            dout, out = (x.transpose(0, 1)[None] for x in (call.dout, call.out))
            delta = _delta(dout, out, call.lse[None])
        dlses = None if call.dlse is None else call.dlse[None]
        dsinks = _dsinks(delta, dlses, call.lse[None], call.sinks)
    found = (
        torch.where(live, dq[..., :D] * t.sign, 0),
        torch.where(live_keys, dk[..., :D], 0),
        torch.where(live_keys, dv[..., :E], 0),
        None,
        None,
        dsinks,
    )
    return tuple(x if needed else None for x, needed in zip(found, call.needs, strict=True))
