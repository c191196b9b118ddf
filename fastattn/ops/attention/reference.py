"""Attention in its textbook form, with all restrictions (Vaswani et al. 2017, equation 1).

Half-precision data is computed in fp32 and rounded once. Functions take the arguments of the torch
op of the same name and return its results, None for gradients that are not needed. They are
differentiable, and used for double backward too.

B batch, H query heads, K key/value heads, G = H / K heads in a group, M queries, N keys, D and E
head dims. A row (query) or key is dead if no pair with it is allowed, else live.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.ops._dropout import attention_keep, keep_scale

TOP_LEFT, BOTTOM_RIGHT, BOTTOM_RIGHT_LENGTHS = 1, 2, 3


def allowed_pairs(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    rows: Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """Which query may attend to which key: bool [B or 1, H or 1, M, N].

    rows: an index [R] of queries; the result and `mask` then have R rows in place of M. offset: the
    diagonal's, if it is known.
    """
    M, N = q.shape[2], k.shape[2]
    rows = torch.arange(M, device=q.device) if rows is None else rows
    i = rows[:, None]
    j = torch.arange(N, device=q.device)
    if offset is None:
        offset = _diagonal_offset(M, N, key_lengths, query_lengths, causal)
    diagonal = i + offset
    allowed = torch.ones(1, 1, rows.shape[0], N, dtype=torch.bool, device=q.device)
    if causal:
        allowed = allowed & (j <= diagonal)
    if window_left >= 0:
        allowed = allowed & (j >= diagonal - window_left)
    if window_right >= 0:
        allowed = allowed & (j <= diagonal + window_right)
    if key_lengths is not None:  # [B] or [B, M]
        lengths = key_lengths[:, None] if key_lengths.dim() == 1 else key_lengths[:, rows]
        allowed = allowed & (j < lengths[:, None, :, None])
    if query_lengths is not None:  # [B]
        allowed = allowed & (i < query_lengths.reshape(-1, 1, 1, 1))
    if mask is not None:
        blocked = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        allowed = allowed & ~blocked
    return allowed


def _diagonal_offset(
    M: int, N: int, key_lengths: Tensor | None, query_lengths: Tensor | None, causal: int
) -> int | Tensor:
    """Key i + this number is on the diagonal of query i; [B, 1, 1, 1] if it depends on lengths."""
    n: int | Tensor = N
    m: int | Tensor = M
    if causal == BOTTOM_RIGHT_LENGTHS and key_lengths is not None:
        n = key_lengths.clamp(0, N).reshape(-1, 1, 1, 1)
    if causal == BOTTOM_RIGHT_LENGTHS and query_lengths is not None:
        m = query_lengths.clamp(0, M).reshape(-1, 1, 1, 1)
    return n - m if causal >= BOTTOM_RIGHT else 0


def _entries_of_pairs(
    M: int,
    N: int,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    rows: Tensor,
    offset: int | Tensor | None = None,
) -> Tensor:
    """The entry of distance_bias that each pair adds, [B or 1, 1, R, N]; any one for a pair whose
    distance no allowed pair has. rows: as in `allowed_pairs`.
    """
    if offset is None:
        offset = _diagonal_offset(M, N, key_lengths, query_lengths, causal)
    first = (N if causal >= BOTTOM_RIGHT else M) - 1
    j = torch.arange(N, device=rows.device)
    entry = j - rows[:, None] - offset + first
    entry = entry.clamp(0, max(M + N - 2, 0))
    return entry if entry.dim() == 4 else entry[None, None]


def bias_of_pairs(
    distance_bias: Tensor,
    M: int,
    N: int,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    rows: Tensor | None = None,
    offset: int | Tensor | None = None,
) -> Tensor:
    """The value that distance_bias adds to each score, [B or 1, H, M, N]; any value for a blocked
    pair. rows, offset: as in `allowed_pairs`.
    """
    rows = torch.arange(M, device=distance_bias.device) if rows is None else rows
    entries = _entries_of_pairs(M, N, key_lengths, query_lengths, causal, rows, offset)
    if entries.shape[0] == 1:
        return distance_bias[:, :, entries[0, 0]]
    B, H = entries.shape[0], distance_bias.shape[1]
    entries = entries.expand(B, H, -1, -1)
    values = distance_bias.expand(B, H, distance_bias.shape[2])
    return values.gather(2, entries.flatten(2)).view(entries.shape)


def _sum_by_distance(
    ds: Tensor,
    distance_bias: Tensor,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
) -> Tensor:
    """The gradient of distance_bias, from the gradient of the scores [B, H, M, N]."""
    B, H, M, N = ds.shape
    rows = torch.arange(M, device=ds.device)
    entries = _entries_of_pairs(M, N, key_lengths, query_lengths, causal, rows)
    sums = ds.new_zeros(B, H, distance_bias.shape[2])
    sums = sums.scatter_add(2, entries.expand(ds.shape).flatten(2), ds.flatten(2))
    return sums.sum_to_size(distance_bias.shape)


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


def _softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> _Softmax:
    (B, H, M, _), (K, N) = q.shape, k.shape[1:3]
    G = H // K if K else 0
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    offset = _diagonal_offset(M, N, key_lengths, query_lengths, causal)
    allowed = allowed_pairs(
        q, k, mask, key_lengths, query_lengths, causal, window_left, window_right, offset=offset
    )
    live_rows = allowed.any(-1)[..., None]
    heads = allowed.any(-2)  # [B or 1, H or 1, N]
    if heads.shape[1] == H and H != K:
        heads = heads.unflatten(1, (K, G)).any(2)
    live_keys = heads[..., None]

    # Dead positions may hold any values, NaN included, which must not affect results.
    q = torch.where(live_rows, q, 0).to(dtype).reshape(B, K, G, M, q.shape[3])
    k = torch.where(live_keys, k, 0).to(dtype)[:, :, None]
    v = torch.where(live_keys, v, 0).to(dtype)[:, :, None]

    s = (q @ k.transpose(-1, -2)) * scale
    slope = None
    if softcap > 0.0:
        ratio = torch.tanh(s / softcap)
        s, slope = softcap * ratio, 1 - ratio * ratio
    pairs = allowed.expand(B, H, M, N).reshape(B, K, G, M, N)
    if mask is not None and mask.dtype != torch.bool:
        bias = torch.where(allowed, mask.to(dtype), 0)
        s = s + bias.expand(B, H, M, N).reshape(B, K, G, M, N)
    if distance_bias is not None:
        bias = bias_of_pairs(
            distance_bias.to(dtype), M, N, key_lengths, query_lengths, causal, offset=offset
        )
        s = s + torch.where(allowed, bias, 0).expand(B, H, M, N).reshape(B, K, G, M, N)
    s = torch.where(pairs, s, -torch.inf)

    # A row with no allowed key: weights 0, lse -inf or the sink.
    highest = s.detach().amax(-1, keepdim=True) if N else s.new_full((B, K, G, M, 1), -torch.inf)
    sink = s.new_full((1, 1, 1, 1, 1), -torch.inf)
    if sinks is not None:
        sink = sinks.to(dtype).view(1, K, G, 1, 1)
        if query_lengths is not None:
            rows = torch.arange(M, device=q.device) < query_lengths[:, None]
            sink = torch.where(rows[:, None, None, :, None], sink, -torch.inf)
    highest = torch.maximum(highest, sink.detach())
    highest = torch.where(highest.isneginf(), 0, highest)
    weights, sink_weight = torch.exp(s - highest), torch.exp(sink - highest)
    total = weights.sum(-1, keepdim=True) + sink_weight
    divisor = torch.where(total == 0, 1, total)
    p, p_sink = weights / divisor, (sink_weight / divisor).squeeze(-1)
    lse = torch.where(total == 0, -torch.inf, torch.log(divisor) + highest)
    if sinks is not None:  # of a row with a key, rounded up to be above the sink
        above = _just_above(sink.detach())
        up = (above - lse).detach()
        lse = lse + torch.where(pairs.any(-1, keepdim=True) & (up > 0), up, 0)

    drop = None
    if dropout_p > 0.0:
        assert dropout_seed is not None
        keep = attention_keep(dropout_seed, dropout_stream, dropout_p, B, H, M, N)
        drop = (keep.to(dtype) * keep_scale(dropout_p)).reshape(B, K, G, M, N)
    return _Softmax(q, k, v, live_rows, live_keys, p, p_sink, lse.squeeze(-1), slope, drop)


def _just_above(x: Tensor) -> Tensor:
    """A number that is larger by one or two units in the last place, without nextafter, which has
    no translation to ONNX.
    """
    limits = torch.finfo(x.dtype)
    step = (x.abs() * limits.eps).clamp(min=limits.tiny)
    return torch.where(x.isneginf(), limits.min, x + step)


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, Tensor]:
    t = _softmax(
        q, k, v, mask, key_lengths, query_lengths, distance_bias, sinks, softcap, causal,
        window_left, window_right, scale, dropout_p, dropout_seed, dropout_stream,
    )  # fmt: skip
    return _results(t, q)[:2]


def _results(t: _Softmax, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """out and lse, and the weights [B, H, M, N] in the dtype of the computation."""
    p = t.p if t.drop is None else t.p * t.drop
    out = (p @ t.v).flatten(1, 2)  # [B, H, M, E]
    return out.to(q.dtype), t.lse.flatten(1, 2), p.flatten(1, 2)


def attention_with_weights_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """others: those of `attention_fwd`, then whether the weights are averaged over the heads."""
    *options, average = others
    out, lse, weights = _results(_softmax(q, k, v, mask, *options), q)
    return out, lse, (weights.sum(1) / max(q.shape[1], 1) if average else weights).to(q.dtype)


def attention_bwd(*call: Any) -> tuple[Tensor | None, ...]:
    """call: the arguments of `attention_with_weights_bwd` without dweights and average."""
    dout, dlse, *options, needs = call
    return attention_with_weights_bwd(*(dout, dlse, None, *options, False, needs))


def attention_with_weights_bwd(
    dout: Tensor | None,
    dlse: Tensor | None,
    dweights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    average: bool,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Recomputes the softmax; `out` and `lse` are for other backends."""
    t = _softmax(
        q, k, v, mask, key_lengths, query_lengths, distance_bias, sinks, softcap, causal,
        window_left, window_right, scale, dropout_p, dropout_seed, dropout_stream,
    )  # fmt: skip
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
    dproduct = (ds if t.slope is None else ds * t.slope) * scale
    dq = (dproduct @ t.k).reshape(q.shape)
    dk = (dproduct.transpose(-1, -2) @ t.q).sum(2)
    ds = ds.reshape(B, H, M, k.shape[2])
    dmask = ddistance_bias = dsinks = None
    if needs[3] and mask is not None:
        dmask = ds.sum_to_size(mask.shape).to(mask.dtype)
    if needs[4] and distance_bias is not None:
        ddistance_bias = _sum_by_distance(ds, distance_bias, key_lengths, query_lengths, causal)
        ddistance_bias = ddistance_bias.to(distance_bias.dtype)
    if needs[5] and sinks is not None:
        dsinks = dsink.sum((0, 3)).reshape(sinks.shape).to(sinks.dtype)
    return (
        dq.to(q.dtype) if needs[0] else None,
        dk.to(k.dtype) if needs[1] else None,
        dv.reshape(v.shape).to(v.dtype) if needs[2] else None,
        dmask,
        ddistance_bias,
        dsinks,
    )


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    rows: Tensor,
    heads: Tensor,
) -> Tensor:
    """The softmax of the selected rows and heads, [B, heads, rows, N]. It is not an op, so autocast
    must be turned off for its operators.
    """
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return attention_weights(
                q, k, mask, key_lengths, query_lengths, distance_bias, sinks, softcap, causal,
                window_left, window_right, scale, rows, heads,
            )  # fmt: skip
    if mask is not None:
        mask = mask if mask.shape[1] == 1 else mask[:, heads]
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    allowed = allowed_pairs(
        q, k, mask, key_lengths, query_lengths, causal, window_left, window_right, rows
    )
    bias = None if mask is None or mask.dtype == torch.bool else mask
    if distance_bias is not None:
        M, N = q.shape[2], k.shape[2]
        pairs = bias_of_pairs(
            distance_bias[:, heads], M, N, key_lengths, query_lengths, causal, rows
        )
        bias = pairs if bias is None else pairs + bias
    if bias is not None:
        allowed = torch.where(allowed, bias, -torch.inf)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k = k[:, heads // group]
    sinks = None if sinks is None else sinks[heads]
    selected = _softmax(
        q[:, heads][:, :, rows], k, k, allowed, None, None, None, sinks, softcap,
        0, -1, -1, scale, 0.0, None, 0,
    )  # fmt: skip
    return selected.p.flatten(1, 2)


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


def attention_paged_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return attention_fwd(
        q, keys_of_pages(k, block_table), keys_of_pages(v, block_table), mask, None, key_lengths,
        query_lengths, distance_bias, sinks, softcap, causal, window_left, window_right, scale, 0.0,
        None, 0,
    )  # fmt: skip


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


def _own_diagonals(causal: int) -> int:
    """The same alignment in a padded batch with lengths."""
    return BOTTOM_RIGHT_LENGTHS if causal == BOTTOM_RIGHT else causal


def attention_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, Tensor]:
    """Pads, calls `attention_fwd`, packs. q [T, H, D], k [S, K, D], v [S, K, E]."""
    T = q.shape[0]
    queries = padded(cu_seqlens_q, max_seqlen_q, T)
    keys = padded(cu_seqlens_k, max_seqlen_k, k.shape[0])
    out, lse = attention_fwd(
        queries.pad(q).transpose(1, 2), keys.pad(k).transpose(1, 2), keys.pad(v).transpose(1, 2),
        None, None, keys.lengths, queries.lengths, distance_bias, sinks, softcap,
        _own_diagonals(causal), window_left, window_right,
        scale, dropout_p, dropout_seed, dropout_stream,
    )  # fmt: skip
    packed_lse = queries.pack(lse.transpose(1, 2), T, -torch.inf)  # [T, H]
    return queries.pack(out.transpose(1, 2), T, 0.0), packed_lse.transpose(0, 1)


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
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    T, S = q.shape[0], k.shape[0]
    queries, keys = padded(cu_seqlens_q, max_seqlen_q, T), padded(cu_seqlens_k, max_seqlen_k, S)
    dq, dk, dv, _, ddistance_bias, dsinks = attention_bwd(
        None if dout is None else queries.pad(dout).transpose(1, 2),
        None if dlse is None else queries.pad(dlse.transpose(0, 1)).transpose(1, 2),
        queries.pad(q).transpose(1, 2), keys.pad(k).transpose(1, 2), keys.pad(v).transpose(1, 2),
        None, None, keys.lengths, queries.lengths, out, lse, distance_bias, sinks, softcap,
        _own_diagonals(causal), window_left, window_right,
        scale, dropout_p, dropout_seed, dropout_stream, [*needs[:3], False, *needs[3:]],
    )  # fmt: skip
    return (
        None if dq is None else queries.pack(dq.transpose(1, 2), T, 0.0),
        None if dk is None else keys.pack(dk.transpose(1, 2), S, 0.0),
        None if dv is None else keys.pack(dv.transpose(1, 2), S, 0.0),
        ddistance_bias,
        dsinks,
    )
