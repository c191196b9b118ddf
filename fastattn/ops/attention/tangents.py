"""The tangents of attention's results in PyTorch's operators, for forward-mode differentiation on
every device.

With the weights p, p_sink of the sink, the derivative c of the soft cap (1 without one), the
tangents of the scores s' = c scale (q' k^T + q k'^T) + mask' + bias', and z = 0 for dropped
weights, else the scale of kept ones:

    lse' = sum_j p s' + p_sink sink'        out' = (z p) v' + (z p (s' - lse')) v

This is computed for blocks of queries, so memory is linear in the number of queries and keys. Data
of half precision is computed in fp32. The operators are differentiable.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.ops._dropout import attention_dropped, keep_scale
from fastattn.ops.attention.calls import CausalKind, ForwardCall, has_pattern, is_restricted
from fastattn.ops.attention.reference import (
    allowed_pairs,
    bias_of_pairs,
    gathered,
    keys_of_pages,
    live,
    pad,
    soft_capped,
)

_ROWS = 128  # queries of a block; dropout needs a multiple of 16
_SCORES = 2**18  # scores of a block, unless one key/value head has more: 1 MB stays in a cache

_Tangents = Sequence[Tensor | None]


@dataclass(frozen=True)
class _Block:
    """A range of queries, and the range of keys outside which none of them may attend."""

    first: int
    end: int
    first_key: int
    end_key: int


def _blocks(call: ForwardCall) -> Iterator[_Block]:
    M, N = call.q.shape[2], call.k.shape[2]
    by_lengths = call.causal == CausalKind.BOTTOM_RIGHT_LENGTHS and not (
        call.key_lengths is None and call.query_lengths is None
    )
    shift = N - M if call.causal >= CausalKind.BOTTOM_RIGHT else 0
    left, right = call.window_left, 0 if call.causal else call.window_right
    for first in range(0, M, _ROWS):
        end, first_key, end_key = min(first + _ROWS, M), 0, N
        if left >= 0 and not by_lengths:
            first_key = max(0, first + shift - left)
        if right >= 0 and not by_lengths:
            end_key = min(N, end + shift + right)
        yield _Block(first, end, first_key, end_key)


def _allowed(call: ForwardCall, block: _Block) -> Tensor | None:
    """[B or 1, H or 1, rows, keys of the block]; None if all pairs are allowed."""
    if not is_restricted(call):
        return None
    pairs = allowed_pairs(call, torch.arange(block.first, block.end, device=call.q.device))
    return pairs[..., block.first_key : block.end_key]


def _rows(mask: Tensor | None, block: _Block) -> Tensor | None:
    if mask is None or mask.shape[2] == 1:
        return mask
    return mask[:, :, block.first : block.end]


def _live_keys(call: ForwardCall) -> Tensor | None:
    """Keys to which some query may attend, [B or 1, K or 1, N, 1]; None if each block's range of
    keys excludes the others.
    """
    if not has_pattern(call):
        return None
    N, found = call.k.shape[2], torch.zeros((), dtype=torch.bool, device=call.q.device)
    for block in _blocks(call):
        pairs = _allowed(call, _Block(block.first, block.end, 0, N))
        assert pairs is not None
        found = found | pairs.any(-2, keepdim=True)
    return live(found, call.q.shape[1], call.k.shape[1])[1]


class _Operands:
    """The inputs and their tangents in the dtype of the computation, 0 where dead."""

    def __init__(self, call: ForwardCall, tangents: ForwardCall, lse: Tensor):
        (B, H, M, _), K = call.q.shape, call.k.shape[1]
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        sinks = lse.new_full((1,), -torch.inf) if call.sinks is None else call.sinks
        dead_rows, live_keys = (lse <= sinks[:, None])[..., None], _live_keys(call)
        grouped = (B, K, H // K, M)
        self.dead_rows = dead_rows.reshape(*grouped, 1)

        def queries(x: Tensor) -> Tensor:  # [B, K, G, M, D]
            return torch.where(dead_rows, 0, x).to(dtype).reshape(*grouped, x.shape[3])

        def keys(x: Tensor) -> Tensor:  # [B, K, N, D or E], contiguous
            x = x if live_keys is None else torch.where(live_keys, x, 0)
            return x.to(dtype).contiguous()

        self.q, self.k, self.v = queries(call.q), keys(call.k), keys(call.v)
        self.v_tangent = None if tangents.v is None else keys(tangents.v)
        # scale (q' k^T + q k'^T), as one product.
        factors = []
        if tangents.q is not None:
            factors.append((queries(tangents.q) * call.scale, self.k))
        if tangents.k is not None:
            factors.append((self.q * call.scale, keys(tangents.k)))
        self.left = self.right = None
        if factors:
            self.left = torch.cat([left for left, _ in factors], -1)
            self.right = torch.cat([right for _, right in factors], -1)
        self.mask_tangent = tangents.mask
        self.bias_tangent = tangents.distance_bias
        self.sinks = self.sinks_tangent = None  # [1, K, G, 1]
        if call.sinks is not None:
            self.sinks = call.sinks.to(dtype).view(1, K, H // K, 1)
        if tangents.sinks is not None:
            self.sinks_tangent = tangents.sinks.to(dtype).view(1, K, H // K, 1)


def attention_tangents(
    args: Sequence[Any], tangents: _Tangents, results: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    fields = len(ForwardCall._fields)
    call, given = ForwardCall._make(args[:fields]), ForwardCall._make(tangents[:fields])
    if call.cu_seqlens_q is not None:
        return _packed_tangents(call, given, *results)
    if (table := call.block_table) is not None:
        k, v = (None if x is None else keys_of_pages(x, table) for x in (given.k, given.v))
        call, given = gathered(call), given._replace(k=k, v=v)  # type: ignore[arg-type]
    return _padded_tangents(call, given, *results)


def _padded_tangents(
    call: ForwardCall, given: ForwardCall, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    (B, H, M, _), N = call.q.shape, call.k.shape[2]
    of_dead = torch.zeros_like(lse)
    if given.sinks is not None:  # the lse of a row without a key is the sink, if not -inf
        of_dead = torch.where(lse.isneginf(), 0, given.sinks[:, None].to(lse.dtype))
    if 0 in (B, H, M, N):
        return torch.zeros_like(out), of_dead
    x = _Operands(call, given, lse)
    found = [_of_rows(call, x, block) for block in _blocks(call)]
    out_tangent, lse_tangent = (torch.cat(parts, 3) for parts in zip(*found, strict=True))
    out_tangent = torch.where(x.dead_rows, 0, out_tangent)
    lse_tangent = torch.where(x.dead_rows, of_dead.reshape(lse_tangent.shape), lse_tangent)
    return out_tangent.reshape(out.shape).to(out.dtype), lse_tangent.reshape(lse.shape)


def _of_rows(call: ForwardCall, x: _Operands, block: _Block) -> tuple[Tensor, Tensor]:
    """The tangents of a block's rows: out' [B, K, G, rows, E], lse' [B, K, G, rows, 1]."""
    (B, K, G), rows = x.q.shape[:3], block.end - block.first
    keys = block.end_key - block.first_key
    if keys <= 0:
        return x.v.new_zeros(B, K, G, rows, x.v.shape[3]), x.v.new_zeros(B, K, G, rows, 1)
    allowed = _allowed(call, block)
    # Key/value heads, then elements of the batch, that are computed together.
    heads = min(K, max(1, _SCORES // (G * rows * keys)))
    entries = 1 if heads < K else min(B, max(1, _SCORES // (K * G * rows * keys)))
    of_entries = []
    for b in range(0, B, entries):
        of_heads = [
            _of_heads(
                call, x, block, allowed,
                range(b, min(b + entries, B)), range(h, min(h + heads, K)),
            )
            for h in range(0, K, heads)
        ]  # fmt: skip
        of_entries.append([torch.cat(parts, 1) for parts in zip(*of_heads, strict=True)])
    out_tangent, lse_tangent = (torch.cat(parts, 0) for parts in zip(*of_entries, strict=True))
    return out_tangent, lse_tangent


def _of_heads(
    call: ForwardCall,
    x: _Operands,
    block: _Block,
    allowed: Tensor | None,
    entries: range,
    heads: range,
) -> tuple[Tensor, Tensor]:
    (b, k_heads), G, rows = (len(entries), len(heads)), x.q.shape[2], block.end - block.first
    keys = block.end_key - block.first_key
    shape = (b, k_heads, G, rows, keys)  # of the scores

    def of_block(t: Tensor) -> Tensor:
        return t.narrow(0, entries.start, b).narrow(1, heads.start, k_heads)

    def queries_of(t: Tensor) -> Tensor:  # [b k, G rows, D or E]
        t = of_block(t).narrow(3, block.first, rows)
        return t.reshape(b * k_heads, G * rows, t.shape[4])

    def keys_of(t: Tensor) -> Tensor:  # [b k, keys, D or E]
        return of_block(t).narrow(2, block.first_key, keys).reshape(b * k_heads, keys, t.shape[3])

    def broadcast(t: Tensor) -> Tensor:  # [B or 1, H or 1, ...] -> [b or 1, k or 1, G or 1, ...]
        t = t if t.shape[0] == 1 else t.narrow(0, entries.start, b)
        if t.shape[1] == 1:
            return t.unsqueeze(2)
        t = t.reshape(t.shape[0], t.shape[1] // G, G, *t.shape[2:])
        return t.narrow(1, heads.start, k_heads)

    def of_keys(t: Tensor) -> Tensor:  # the block's rows of a mask -> [b or 1, ..., keys]
        if t.shape[3] > 1:
            t = t.narrow(3, block.first_key, keys)
        return broadcast(t)

    def by_distance(t: Tensor) -> Tensor:  # distance_bias or its tangent, as scores
        positions = torch.arange(block.first, block.end, device=t.device)
        pairs = bias_of_pairs(call._replace(distance_bias=t), positions)
        return broadcast(pairs[..., block.first_key : block.end_key]).to(q.dtype)

    q, k = queries_of(x.q), keys_of(x.k).transpose(1, 2)
    mask = _rows(call.mask, block)
    s = torch.baddbmm(q.new_zeros(1, 1, 1), q, k, beta=0, alpha=call.scale)
    s, slope = soft_capped(s, call)
    if mask is not None and mask.dtype != torch.bool:
        s = (s.view(shape) + of_keys(mask).to(q.dtype)).view(s.shape)
    if call.distance_bias is not None:
        s = (s.view(shape) + by_distance(call.distance_bias)).view(s.shape)
    if allowed is not None:
        blocked = ~broadcast(allowed)
        s = s.view(shape).masked_fill(blocked, -torch.inf)
        dead_rows = of_block(x.dead_rows).narrow(3, block.first, rows)
        s = torch.where(dead_rows, 0, s)  # their results are replaced at the end
        s = s.reshape(b * k_heads, G * rows, keys)
    if x.sinks is None:
        p = torch.softmax(s, -1)
    else:
        sinks = x.sinks[:, heads.start : heads.stop, :, :, None].expand(*shape[:4], 1)
        p = torch.softmax(torch.cat([s, sinks.reshape(*s.shape[:2], 1)], -1), -1)[..., :-1]

    ds = None  # s'
    if x.left is not None and x.right is not None:
        ds = torch.bmm(queries_of(x.left), keys_of(x.right).transpose(1, 2))
        ds = ds if slope is None else ds * slope
    if x.bias_tangent is not None:
        shift = by_distance(x.bias_tangent)
        if allowed is not None:
            shift = torch.where(broadcast(allowed), shift, 0)
        shift = shift.expand(shape)
        ds = (shift if ds is None else ds.view(shape) + shift).reshape(s.shape)
    if x.mask_tangent is not None:
        assert allowed is not None
        change = _rows(x.mask_tangent, block)
        assert change is not None
        change = torch.where(broadcast(allowed), of_keys(change).to(q.dtype), 0)
        ds = change.expand(shape) if ds is None else ds.view(shape) + change
        ds = ds.reshape(s.shape)
    dp = None  # p (s' - lse')
    lse_tangent = torch.zeros_like(s[..., :1])
    if ds is not None:
        lse_tangent = (p * ds).sum(-1, keepdim=True)
    if x.sinks_tangent is not None:
        shift = x.sinks_tangent[:, heads.start : heads.stop, :, :, None].expand(*shape[:4], 1)
        p_sink = 1 - p.sum(-1, keepdim=True)
        lse_tangent = lse_tangent + p_sink * shift.reshape(p_sink.shape)
    if ds is not None or x.sinks_tangent is not None:
        dp = -lse_tangent * p if ds is None else (ds - lse_tangent) * p

    kept = 1.0
    if call.dropout_p > 0.0:
        assert call.dropout_seed is not None
        dropped = attention_dropped(
            call.dropout_seed, call.dropout_stream, call.dropout_p,
            b, k_heads * G, rows, block.end_key,
            first=entries.start, first_head=heads.start * G, first_row=block.first,
        )[..., block.first_key :].reshape(s.shape)  # fmt: skip
        kept = keep_scale(call.dropout_p)
        p = p.masked_fill(dropped, 0.0)
        dp = None if dp is None else dp.masked_fill(dropped, 0.0)
    out_tangent = None
    if x.v_tangent is not None:
        out_tangent = torch.bmm(p, keys_of(x.v_tangent))
    if dp is not None:
        change = torch.bmm(dp, keys_of(x.v))
        out_tangent = change if out_tangent is None else out_tangent + change
    assert out_tangent is not None  # at least one input has a tangent
    out_tangent = out_tangent * kept
    return out_tangent.view(*shape[:4], -1), lse_tangent.view(*shape[:4], 1)


def _packed_tangents(
    call: ForwardCall, given: ForwardCall, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    T = call.q.shape[0]
    padded, queries, keys = pad(call)
    sides = ((queries, given.q), (keys, given.k), (keys, given.v))
    q, k, v = (None if x is None else side.pad(x).transpose(1, 2) for side, x in sides)
    padded_lse = queries.pad(lse.transpose(0, 1)).transpose(1, 2)  # [B, H, S]
    out_tangent, lse_tangent = _padded_tangents(
        padded,
        given._replace(q=q, k=k, v=v),  # type: ignore[arg-type]
        queries.pad(out).transpose(1, 2),
        torch.where(queries.real[:, None], padded_lse, -torch.inf),
    )
    return (
        queries.pack(out_tangent.transpose(1, 2), T, 0.0),
        queries.pack(lse_tangent.transpose(1, 2), T, 0.0).transpose(0, 1),
    )
