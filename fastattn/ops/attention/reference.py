"""Attention in its textbook form, with all restrictions (Vaswani et al. 2017, equation 1).

Half-precision data is computed in fp32 and rounded once. The functions with the name of a torch op
take its arguments, the fields of a tuple of calls.py, and return its results, None for gradients
that are not needed. They are differentiable, and used for double backward too.

B batch, H query heads, K key/value heads, G = H / K heads in a group, M queries, N keys, D and E
head dims. A row (query) or key is dead if no pair with it is allowed, else live.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.ops._dropout import attention_keep, keep_scale
from fastattn.ops.attention.calls import (
    AnyCall,
    BackwardCall,
    CausalKind,
    ForwardCall,
    WeightsBackwardCall,
    WeightsForwardCall,
    unrestricted,
    why_call_unsupported,
    why_no_weights,
)

Offset = int | Tensor


def allowed_pairs(
    call: ForwardCall, rows: Tensor | None = None, offset: Offset | None = None
) -> Tensor:
    """Which query of a padded call may attend to which key: bool [B or 1, H or 1, M, N]. rows: an
    index [R] of queries; the result then has R rows in place of M. offset: the diagonal's, if known
    (the exporter to ONNX loses a name where it is computed twice).
    """
    N, mask = call.k.shape[2], call.mask
    key_lengths, query_lengths = call.key_lengths, call.query_lengths
    selected = torch.arange(call.q.shape[2], device=call.q.device) if rows is None else rows
    i = selected[:, None]
    j = torch.arange(N, device=call.q.device)
    diagonal = i + (_diagonal_offset(call) if offset is None else offset)
    allowed = torch.ones(1, 1, selected.shape[0], N, dtype=torch.bool, device=call.q.device)
    if call.causal:
        allowed = allowed & (j <= diagonal)
    if call.window_left >= 0:
        allowed = allowed & (j >= diagonal - call.window_left)
    if call.window_right >= 0:
        allowed = allowed & (j <= diagonal + call.window_right)
    if key_lengths is not None:  # [B] or [B, M]
        lengths = key_lengths[:, None] if key_lengths.dim() == 1 else key_lengths[:, selected]
        allowed = allowed & (j < lengths[:, None, :, None])
    if query_lengths is not None:  # [B]
        allowed = allowed & (i < query_lengths.reshape(-1, 1, 1, 1))
    if mask is not None:
        mask = mask if rows is None or mask.shape[2] == 1 else mask[:, :, rows]
        blocked = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        allowed = allowed & ~blocked
    return allowed


def live(allowed: Tensor, H: int, K: int) -> tuple[Tensor, Tensor]:
    """The live rows [B or 1, H or 1, M, 1] and keys [B or 1, K or 1, N, 1]."""
    keys = allowed.any(-2)  # [B or 1, H or 1, N]
    if keys.shape[1] == H and H != K:
        keys = keys.unflatten(1, (K, H // K)).any(2)
    return allowed.any(-1)[..., None], keys[..., None]


def _diagonal_offset(call: ForwardCall) -> Offset:
    """Key i + this number is on the diagonal of query i; [B, 1, 1, 1] if it depends on lengths."""
    n: Any = call.k.shape[2]
    m: Any = call.q.shape[2]
    if call.causal == CausalKind.BOTTOM_RIGHT_LENGTHS:
        ends = (call.key_lengths, n), (call.query_lengths, m)
        n, m = (most if x is None else x.clamp(0, most).reshape(-1, 1, 1, 1) for x, most in ends)
    return n - m if call.causal >= CausalKind.BOTTOM_RIGHT else 0  # type: ignore[no-any-return]


def _entries_of_pairs(
    call: ForwardCall, rows: Tensor | None = None, offset: Offset | None = None
) -> Tensor:
    """The entry of distance_bias that each pair adds, [B or 1, 1, R, N]; any one for a pair whose
    distance no allowed pair has. rows, offset: as in `allowed_pairs`.
    """
    M, N = call.q.shape[2], call.k.shape[2]
    rows = torch.arange(M, device=call.q.device) if rows is None else rows
    first = (N if call.causal >= CausalKind.BOTTOM_RIGHT else M) - 1
    j = torch.arange(N, device=rows.device)
    entry = j - rows[:, None] - (_diagonal_offset(call) if offset is None else offset) + first
    entry = entry.clamp(0, max(M + N - 2, 0))
    return entry if entry.dim() == 4 else entry[None, None]


def bias_of_pairs(
    call: ForwardCall, rows: Tensor | None = None, offset: Offset | None = None
) -> Tensor:
    """The value that distance_bias adds to each score, [B or 1, H, M, N]; any value for a blocked
    pair. rows, offset: as in `allowed_pairs`.
    """
    bias, entries = call.distance_bias, _entries_of_pairs(call, rows, offset)
    assert bias is not None
    if entries.shape[0] == 1:
        return bias[:, :, entries[0, 0]]
    B, H = entries.shape[0], bias.shape[1]
    entries = entries.expand(B, H, -1, -1)
    values = bias.expand(B, H, bias.shape[2])
    return values.gather(2, entries.flatten(2)).view(entries.shape)


def soft_capped(s: Tensor, call: ForwardCall) -> tuple[Tensor, Tensor | None]:
    """The scores after the soft cap, and its derivative if there is one."""
    if call.softcap <= 0.0:
        return s, None
    ratio = torch.tanh(s / call.softcap)
    return call.softcap * ratio, 1 - ratio * ratio


def _sum_by_distance(ds: Tensor, call: ForwardCall) -> Tensor:
    """The gradient of distance_bias, from the gradient of the scores [B, H, M, N]."""
    bias, entries = call.distance_bias, _entries_of_pairs(call)
    assert bias is not None
    sums = ds.new_zeros(*ds.shape[:2], bias.shape[2])
    sums = sums.scatter_add(2, entries.expand(ds.shape).flatten(2), ds.flatten(2))
    return sums.sum_to_size(bias.shape)


@dataclass
class _Softmax:
    """The inputs in the dtype of the computation, 0 where dead, and the softmax of the scores."""

    q: Tensor  # [B, K, G, M, D]
    k: Tensor  # [B, K, 1, N, D]
    v: Tensor  # [B, K, 1, N, E]
    live_rows: Tensor  # [B or 1, H or 1, M, 1]
    live_keys: Tensor  # [B or 1, K or 1, N, 1]
    p: Tensor  # [B, K, G, M, N]
    p_sink: Tensor  # [B, K, G, M]: the weight of the sink, 0 without sinks
    lse: Tensor  # [B, K, G, M]
    slope: Tensor | None  # [B, K, G, M, N]: the derivative of the soft cap
    drop: Tensor | None  # [B, K, G, M, N]: 0 or the scale of kept weights


def _softmax(call: ForwardCall) -> _Softmax:
    q, k, v, mask = call[:4]
    (B, H, M, _), (K, N) = q.shape, k.shape[1:3]
    G = H // K if K else 0
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    offset = _diagonal_offset(call)
    allowed = allowed_pairs(call, offset=offset)
    live_rows, live_keys = live(allowed, H, K)

    # Dead positions may hold any values, NaN included, which must not affect results.
    q = torch.where(live_rows, q, 0).to(dtype).reshape(B, K, G, M, q.shape[3])
    k = torch.where(live_keys, k, 0).to(dtype)[:, :, None]
    v = torch.where(live_keys, v, 0).to(dtype)[:, :, None]

    s, slope = soft_capped((q @ k.transpose(-1, -2)) * call.scale, call)
    pairs = allowed.expand(B, H, M, N).reshape(B, K, G, M, N)
    if mask is not None and mask.dtype != torch.bool:
        bias = torch.where(allowed, mask.to(dtype), 0)
        s = s + bias.expand(B, H, M, N).reshape(B, K, G, M, N)
    if call.distance_bias is not None:
        call = call._replace(distance_bias=call.distance_bias.to(dtype))
        bias = bias_of_pairs(call, offset=offset)
        s = s + torch.where(allowed, bias, 0).expand(B, H, M, N).reshape(B, K, G, M, N)
    s = torch.where(pairs, s, -torch.inf)

    # A row with no allowed key: weights 0, lse -inf or the sink.
    highest = s.detach().amax(-1, keepdim=True) if N else s.new_full((B, K, G, M, 1), -torch.inf)
    sink = s.new_full((1, 1, 1, 1, 1), -torch.inf)
    if call.sinks is not None:
        sink = call.sinks.to(dtype).view(1, K, G, 1, 1)
        if call.query_lengths is not None:
            rows = torch.arange(M, device=q.device) < call.query_lengths[:, None]
            sink = torch.where(rows[:, None, None, :, None], sink, -torch.inf)
    highest = torch.maximum(highest, sink.detach())
    highest = torch.where(highest.isneginf(), 0, highest)
    weights, sink_weight = torch.exp(s - highest), torch.exp(sink - highest)
    total = weights.sum(-1, keepdim=True) + sink_weight
    divisor = torch.where(total == 0, 1, total)
    p, p_sink = weights / divisor, (sink_weight / divisor).squeeze(-1)
    lse = torch.where(total == 0, -torch.inf, torch.log(divisor) + highest)
    if call.sinks is not None:  # of a row with a key, rounded up to be above the sink
        above = _just_above(sink.detach())
        up = (above - lse).detach()
        lse = lse + torch.where(pairs.any(-1, keepdim=True) & (up > 0), up, 0)

    drop = None
    if call.dropout_p > 0.0:
        assert call.dropout_seed is not None
        keep = attention_keep(call.dropout_seed, call.dropout_stream, call.dropout_p, B, H, M, N)
        drop = (keep.to(dtype) * keep_scale(call.dropout_p)).reshape(B, K, G, M, N)
    return _Softmax(q, k, v, live_rows, live_keys, p, p_sink, lse.squeeze(-1), slope, drop)


def _just_above(x: Tensor) -> Tensor:
    """A number that is larger by one or two units in the last place, without nextafter, which has
    no translation to ONNX.
    """
    limits = torch.finfo(x.dtype)
    step = (x.abs() * limits.eps).clamp(min=limits.tiny)
    return torch.where(x.isneginf(), limits.min, x + step)


def attention_fwd(*args: Any) -> tuple[Tensor, Tensor]:
    """args: the fields of `ForwardCall`."""
    call = ForwardCall(*args)
    if call.cu_seqlens_q is None:
        return _results(_softmax(gathered(call)), call.q)[:2]
    padded, queries, _ = pad(call)
    out, lse = _results(_softmax(padded), call.q)[:2]
    T = call.q.shape[0]
    packed_lse = queries.pack(lse.transpose(1, 2), T, -torch.inf)  # [T, H]
    return queries.pack(out.transpose(1, 2), T, 0.0), packed_lse.transpose(0, 1)


def _results(t: _Softmax, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse, and the weights [B, H, M, N] in the dtype of the computation."""
    p = t.p if t.drop is None else t.p * t.drop
    out = (p @ t.v).flatten(1, 2)  # [B, H, M, E]
    return out.to(q.dtype), t.lse.flatten(1, 2), p.flatten(1, 2)


def attention_with_weights_fwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """args: the fields of `WeightsForwardCall`."""
    call = WeightsForwardCall(*args)
    out, lse, weights = _results(_softmax(ForwardCall._make(call[:-1])), call.q)
    weights = weights.sum(1) / max(call.q.shape[1], 1) if call.average else weights
    return out, lse, weights.to(call.q.dtype)


def attention_fwd_unsupported(call: AnyCall) -> str | None:
    return why_call_unsupported(call)


attention_bwd_unsupported = attention_fwd_unsupported


def attention_with_weights_fwd_unsupported(call: Any) -> str | None:
    return why_no_weights(call)


attention_with_weights_bwd_unsupported = attention_with_weights_fwd_unsupported


def attention_bwd(*args: Any) -> tuple[Tensor | None, ...]:
    """args: the fields of `BackwardCall`."""
    call = BackwardCall(*args)
    dout, dlse, forward, needs = call.dout, call.dlse, call.forward, call.needs
    if call.cu_seqlens_q is not None:
        forward, queries, keys = pad(forward)
        dout = None if dout is None else queries.pad(dout).transpose(1, 2)
        dlse = None if dlse is None else queries.pad(dlse.transpose(0, 1)).transpose(1, 2)
        dq, dk, dv, *others = _gradients(dout, dlse, None, forward, False, needs)
        packed = (
            None if x is None else side.pack(x.transpose(1, 2), like.shape[0], 0.0)
            for x, side, like in ((dq, queries, call.q), (dk, keys, call.k), (dv, keys, call.v))
        )
        return (*packed, *others)
    if call.block_table is not None:
        dq, dk, dv, *others = _gradients(dout, dlse, None, gathered(forward), False, needs)
        dk, dv = (
            None if x is None else _pages_of_keys(x, pages, call.block_table)
            for x, pages in ((dk, call.k), (dv, call.v))
        )
        return (dq, dk, dv, *others)
    return _gradients(dout, dlse, None, forward, False, needs)


def attention_with_weights_bwd(*args: Any) -> tuple[Tensor | None, ...]:
    """args: the fields of `WeightsBackwardCall`."""
    dout, dlse, dweights, _, _, *forward, average, needs = WeightsBackwardCall(*args)
    return _gradients(dout, dlse, dweights, ForwardCall(*forward), average, needs)


def _gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    dweights: Tensor | None,
    call: ForwardCall,
    average: bool,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Computes the softmax of a padded call again."""
    q, k, v, mask = call[:4]
    t = _softmax(call)
    B, H, M, _ = q.shape
    grouped = t.q.shape[:4]  # B, K, G, M
    dv = torch.zeros_like(t.v)
    ds = torch.zeros_like(t.p)  # gradient of the scores
    dsink = torch.zeros_like(t.p_sink)
    dp = torch.zeros_like(t.p)  # gradient of the weights
    if dweights is not None:
        if average:
            dweights = (dweights / H)[:, None].expand(-1, H, -1, -1)
        dp = torch.where(t.live_rows, dweights, 0).to(t.p.dtype).reshape(t.p.shape)
    if dout is not None:
        dout = torch.where(t.live_rows, dout, 0).to(t.p.dtype).reshape(*grouped, v.shape[3])
        p = t.p if t.drop is None else t.p * t.drop
        dv = (p.transpose(-1, -2) @ dout).sum(2)  # [B, K, N, E]
        dp = dp + dout @ t.v.transpose(-1, -2)
    if dout is not None or dweights is not None:
        dp = dp if t.drop is None else dp * t.drop
        delta = (t.p * dp).sum(-1, keepdim=True)
        ds = t.p * (dp - delta)
        dsink = -t.p_sink * delta.squeeze(-1)
    if dlse is not None:
        dlse = (
            torch.where(t.lse.reshape(B, H, M).isneginf(), 0, dlse).to(t.p.dtype).reshape(grouped)
        )
        ds = ds + t.p * dlse[..., None]
        dsink = dsink + t.p_sink * dlse
    dproduct = (ds if t.slope is None else ds * t.slope) * call.scale
    dq = (dproduct @ t.k).reshape(q.shape)
    dk = (dproduct.transpose(-1, -2) @ t.q).sum(2)
    ds = ds.reshape(B, H, M, k.shape[2])
    dmask = ddistance_bias = dsinks = None
    if needs[3] and mask is not None:
        dmask = ds.sum_to_size(mask.shape).to(mask.dtype)
    if needs[4] and (bias := call.distance_bias) is not None:
        ddistance_bias = _sum_by_distance(ds, call).to(bias.dtype)
    if needs[5] and (sinks := call.sinks) is not None:
        dsinks = dsink.sum((0, 3)).reshape(sinks.shape).to(sinks.dtype)
    return (
        dq.to(q.dtype) if needs[0] else None,
        dk.to(k.dtype) if needs[1] else None,
        dv.reshape(v.shape).to(v.dtype) if needs[2] else None,
        dmask,
        ddistance_bias,
        dsinks,
    )


def attention_weights(call: ForwardCall, rows: Tensor, heads: Tensor) -> Tensor:
    """The softmax of the selected rows and heads of a padded call, [B, heads, rows, N]. It is not
    an op, so autocast must be turned off for its operators.
    """
    q, k, mask = call.q, call.k, call.mask
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return attention_weights(call, rows, heads)
    mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
    call = call._replace(mask=mask)
    allowed = allowed_pairs(call, rows)
    added = None if mask is None or mask.dtype == torch.bool else mask
    if added is not None and added.shape[2] > 1:
        added = added[:, :, rows]
    if call.distance_bias is not None:
        call = call._replace(distance_bias=call.distance_bias[:, heads])
        pairs = bias_of_pairs(call, rows)
        added = pairs if added is None else pairs + added
    if added is not None:
        allowed = torch.where(allowed, added, -torch.inf)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k = k[:, heads // group]
    selected = unrestricted(call)._replace(
        q=q[:, heads][:, :, rows], k=k, v=k, mask=allowed, distance_bias=None,
        sinks=None if call.sinks is None else call.sinks[heads],
    )  # fmt: skip
    return _softmax(selected).p.flatten(1, 2)


# -- pages ----------------------------------------------------------------------------------------
def keys_of_pages(pages: Tensor, block_table: Tensor) -> Tensor:
    """[P, K, page, D] and [B, T] -> [B, K, T * page, D]. Entries that are no page, which only keys
    beyond the key length may have, give rows of another page.
    """
    (P, K, page, D), (B, T) = pages.shape, block_table.shape
    if P == 0:
        return pages.new_zeros(B, K, T * page, D)
    found = pages[block_table.clamp(0, P - 1)]  # [B, T, K, page, D]
    return found.transpose(1, 2).flatten(2, 3)


def gathered(call: ForwardCall) -> ForwardCall:
    """The call with the keys and values of its pages."""
    table = call.block_table
    if table is None:
        return call
    k, v = (keys_of_pages(x, table) for x in (call.k, call.v))
    return call._replace(k=k, v=v, block_table=None)


def _pages_of_keys(x: Tensor, pages: Tensor, block_table: Tensor) -> Tensor:
    """The sums for each page of a gradient [B, K, T * page, D]."""
    (P, _, page, _), T = pages.shape, block_table.shape[1]
    if P == 0:
        return torch.zeros_like(pages)
    by_page = x.unflatten(2, (T, page)).transpose(1, 2)  # [B, T, K, page, D]
    table = block_table.clamp(0, P - 1).long()
    return torch.zeros_like(pages).index_put((table,), by_page, accumulate=True)


# -- packed sequences -----------------------------------------------------------------------------
@dataclass
class Padded:
    """How packed sequences correspond to a padded batch."""

    rows: Tensor  # [B, S]: the row of the packed tensor; T, one after the last, for padding
    real: Tensor  # [B, S]: False for padding
    lengths: Tensor  # [B]

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, S, ...], zeros in the padding."""
        spare = x.new_zeros(1, *x.shape[1:])
        return torch.cat([x, spare])[self.rows]

    def pack(self, x: Tensor, T: int, fill: float) -> Tensor:
        """[B, S, ...] -> [T, ...]; rows that belong to no sequence hold `fill`."""
        packed = x.new_full((T + 1, *x.shape[2:]), fill)
        return packed.index_put((self.rows,), x)[:T]


def padded(cu_seqlens: Tensor, max_seqlen: int, T: int) -> Padded:
    start, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    offsets = torch.arange(max_seqlen, device=cu_seqlens.device)
    real = offsets < lengths[:, None]
    return Padded(torch.where(real, start[:, None] + offsets, T), real, lengths)


def pad(call: ForwardCall) -> tuple[ForwardCall, Padded, Padded]:
    """A packed call as a padded one, and how its queries and keys correspond."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    queries = padded(call.cu_seqlens_q, call.max_seqlen_q, call.q.shape[0])
    keys = padded(call.cu_seqlens_k, call.max_seqlen_k, call.k.shape[0])
    causal = call.causal
    if causal == CausalKind.BOTTOM_RIGHT:
        causal = CausalKind.BOTTOM_RIGHT_LENGTHS
    sides = ((queries, call.q), (keys, call.k), (keys, call.v))
    q, k, v = (side.pad(x).transpose(1, 2) for side, x in sides)
    return (
        call._replace(
            q=q, k=k, v=v, key_lengths=keys.lengths, query_lengths=queries.lengths,
            cu_seqlens_q=None, cu_seqlens_k=None, causal=causal,
        ),
        queries,
        keys,
    )  # fmt: skip
