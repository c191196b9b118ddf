"""Blocks of an attention matrix whose queries and keys are divided into chunks: the calls of the
attention op that compute them, and how their results are merged.

A block is a rectangle of queries of one chunk and keys of another. Restrictions by distance (causal
and window) are low <= j - i <= high for query i and key j. A block contains only rows and keys for
which they allow a pair, so that they become the op's own causal restriction and window. Lengths,
masks and biases by distance are sliced.

Shapes: M queries and N keys of the whole sequences; B batch, H query heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattn.ops._select import OPS, select
from fastattn.ops.attention.calls import BackwardCall, ForwardCall
from fastattn.ops.attention.op import CAUSAL

_TOP_LEFT, _BOTTOM_RIGHT = CAUSAL["top_left"], CAUSAL["bottom_right"]
_BY_LENGTHS = CAUSAL["bottom_right_lengths"]
# Dropout bits belong to tiles of 16 x 16 pairs: with dropout, blocks start at multiples of it.
DROPOUT_TILE = 16


class Rectangle(NamedTuple):
    """Rows and keys of a pair of chunks, counted in the chunks, and the bounds low <= j - i <= high
    of the pairs in it, counted in the block.
    """

    first_row: int
    rows: int
    first_key: int
    keys: int
    low: int
    high: int


def rectangles(m: int, n: int, low: int, high: int, unit: int) -> tuple[Rectangle, ...]:
    """Rectangles that together have all pairs of m rows and n keys with low <= j - i <= high, and
    no rows and keys without such a pair. They start at multiples of `unit`.

    All but a first one of at most unit x unit have low <= 0 <= high, as the op's windows have. This
    needs a multiple of `unit` between low and high.
    """
    low, high = max(low, 1 - m), min(high, n - 1)
    if low > high:
        return ()
    found = []
    first_row = _up(max(0, -high), unit)
    first_key = _up(max(0, low), unit)
    if first_row + high > 0 and high < 0:  # rows just above first_row have a few keys
        start = first_row - unit
        rows, keys = min(m, first_row) - start, min(n, first_row + high)
        if rows + start + high > 0:
            found.append(Rectangle(start, rows, 0, keys, low + start, high + start))
    if first_key - low > 0 and low > 0:  # keys just before first_key have a few rows
        start = first_key - unit
        rows, keys = min(m, first_key - low), min(n, first_key) - start
        if keys + start - low > 0:
            found.append(Rectangle(0, rows, start, keys, low - start, high - start))
    rows, keys = min(m, n - low) - first_row, min(n, m + high) - first_key
    if rows > 0 and keys > 0:
        shift = first_row - first_key
        found.append(Rectangle(first_row, rows, first_key, keys, low + shift, high + shift))
    return tuple(found)


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit


@dataclass(frozen=True)
class Call:
    """What attention of the whole sequences is. options: the op's arguments without the inputs that
    may require a gradient. key_lengths are [B], or [B, M / P] for the queries of this process;
    dropout_seed is [5], see `attention`.
    """

    M: int
    N: int
    options: ForwardCall
    backend: str | None

    @property
    def bounds(self) -> tuple[int, int]:
        """low and high: a pair is blocked unless low <= j - i <= high."""
        unlimited, causal = self.M + self.N, self.options.causal
        left, right = self.options.window_left, self.options.window_right
        if causal == _BY_LENGTHS:  # key_lengths and a mask of each block instead
            return -unlimited, unlimited
        offset = self.N - self.M if causal == _BOTTOM_RIGHT else 0
        low = offset - left if left >= 0 else -unlimited
        high = offset + right if right >= 0 else unlimited
        return low, min(high, offset) if causal else high

    @property
    def unit(self) -> int:
        return DROPOUT_TILE if self.options.dropout_p > 0 else 1

    def rectangles(self, query: int, m: int, key: int, n: int) -> tuple[Rectangle, ...]:
        """Those of the chunk of m queries from `query` on and of the n keys from `key` on."""
        low, high = (bound + query - key for bound in self.bounds)
        return rectangles(m, n, low, high, self.unit)


class Inputs(NamedTuple):
    """q and mask have this process's rows, k and v one chunk of keys, mask all keys (or one row or
    key for all, as in `attention`), distance_bias all distances. Gradients have the same shapes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    distance_bias: Tensor | None


class Block:
    """A rectangle of the chunk of queries that starts at this process's row `row`, position `query`
    of the whole sequence, and of the chunk of keys at position `key`.
    """

    def __init__(self, call: Call, at: Rectangle, row: int, query: int, key: int):
        self.call, self.at = call, at
        self.rows = slice(row + at.first_row, row + at.first_row + at.rows)
        self.keys = slice(at.first_key, at.first_key + at.keys)
        self.query, self.key = query + at.first_row, key + at.first_key

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Its out and lse."""
        return self._run(torch.ops.fastattn.attention_fwd, *self._forward_call(x))  # type: ignore[no-any-return]

    def backward(
        self,
        x: Inputs,
        out: Tensor,
        m: Tensor,
        log_sum: Tensor,
        dout: Tensor | None,
        dlse: Tensor | None,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients of its part of each of `x`, None where not needed. out, m, log_sum, dout
        and dlse are those of the merged result, for this process's rows.

        A backend that may compute the weights again, instead of taking them from lse, gets the
        block's own out and lse, which are computed again.
        """
        forward = self._forward_call(x)
        needs = [need and y is not None for need, y in zip(needs, x, strict=True)]

        def call_with(
            dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor
        ) -> BackwardCall:
            return BackwardCall._make([dout, dlse, out, lse, *forward, [*needs, False]])

        out, m, log_sum = (self.of_rows(y) for y in (out, m, log_sum))
        dout = None if dout is None else self.of_rows(dout)
        dlse = None if dlse is None else self.of_rows(dlse).contiguous()
        call = call_with(dout, dlse, out, m + log_sum)
        if not _uses_lse(call, self.call.backend):
            own_out, own_lse = self.forward(x)
            call = call_with(
                *_own_gradients(own_out, own_lse, out, m, log_sum, dout, dlse), own_out, own_lse
            )
        found = self._run(torch.ops.fastattn.attention_bwd, *call)
        dmask, dbias = found[3:5]
        if needs[3] and x.mask is not None:
            dmask = dmask.sum_to_size(self.of_mask(x.mask).shape)
        gradients = (*found[:3], dmask, dbias)
        return [y if need else None for y, need in zip(gradients, needs, strict=True)]

    # -- parts of tensors -------------------------------------------------------------------------
    def of_rows(self, x: Tensor) -> Tensor:
        return x[:, :, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[:, :, self.keys]

    def of_mask(self, x: Tensor) -> Tensor:
        x = x if x.shape[2] == 1 else x[:, :, self.rows]
        return x if x.shape[3] == 1 else x[..., self.key : self.key + self.at.keys]

    def add_to(self, totals: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """Adds the results of `backward` to the gradients of all of `Inputs`, in place."""
        parts = (self.of_rows, self.of_keys, self.of_keys, self.of_mask)
        for part, total, gradient in zip(parts, totals[:4], gradients[:4], strict=True):
            if total is not None and gradient is not None:
                part(total).add_(gradient)
        total, gradient = totals[4], gradients[4]
        if total is None or gradient is None:
            return
        if self.call.options.causal == _BY_LENGTHS:
            by_sequence = torch.zeros_like(total).expand(gradient.shape[0], -1, -1).contiguous()
            by_sequence.scatter_add_(2, self._entries(gradient), gradient)
            total.add_(by_sequence.sum_to_size(total.shape))
        else:
            total[..., self._distances].add_(gradient)

    def _run(self, op: Any, *args: Any) -> Any:
        backend = self.call.backend
        return op.default(*args) if backend is None else op.backend(*args, backend)

    # -- arguments of the op ----------------------------------------------------------------------
    @property
    def _distances(self) -> slice:
        """Slice of the entries of distance_bias, without own lengths."""
        first = self.key - self.query + self.call.M - self.at.rows
        return slice(first, first + self.at.rows + self.at.keys - 1)

    def _entries(self, like: Tensor) -> Tensor:
        """The entries of distance_bias for the block's distances, if the diagonal is that of each
        sequence's own lengths: [B, H, rows + keys - 1]. Any entry for a distance that no allowed
        pair has.
        """
        M, N = self.call.M, self.call.N
        steps = torch.arange(self.at.rows + self.at.keys - 1, device=like.device)
        entries = steps + self.key - self.query - self.at.rows + N - self._offsets
        B, H = entries.shape[0], like.shape[1]
        return entries.clamp(0, M + N - 2)[:, None].expand(B, H, -1)

    @property
    def _offsets(self) -> Tensor:
        """The offset of the diagonal by each sequence's own lengths, [B, 1]."""
        options = self.call.options
        ends = (options.key_lengths, self.call.N), (options.query_lengths, self.call.M)
        n, m = (most if x is None else x.clamp(0, most)[:, None] for x, most in ends)
        return n - m  # type: ignore[return-value]

    def _forward_call(self, x: Inputs) -> ForwardCall:
        call, at, causal, left, right = self.call.options, self.at, 0, -1, -1
        mask = None if x.mask is None else self.of_mask(x.mask)
        key_lengths, allowed = self._key_lengths(x.q.device), self._allowed(x.q.device)
        if allowed is not None:
            mask = allowed if mask is None else _intersection(mask, allowed)
        query_lengths = call.query_lengths
        if query_lengths is not None:
            query_lengths = (query_lengths - self.query).clamp(min=0)
        bias = x.distance_bias
        if bias is not None and call.causal == _BY_LENGTHS:
            entries = self._entries(bias)
            bias = bias.expand(entries.shape[0], -1, -1).gather(2, entries)
        elif bias is not None:
            bias = bias[..., self._distances]
        if call.causal != _BY_LENGTHS and not self._is_small:
            left = -at.low if at.low > 1 - at.rows else -1
            right = at.high if at.high < at.keys - 1 else -1
            if right == 0:
                causal, right = _TOP_LEFT, -1
        seed = call.dropout_seed
        if seed is not None:
            seed = torch.cat([seed[:3], seed[3:4] + self.query, seed[4:] + self.key])
        return call._replace(
            q=self.of_rows(x.q), k=self.of_keys(x.k), v=self.of_keys(x.v), mask=mask,
            key_lengths=key_lengths, query_lengths=query_lengths, distance_bias=bias,
            causal=causal, window_left=left, window_right=right, dropout_seed=seed,
        )  # fmt: skip

    @property
    def _is_small(self) -> bool:
        """Whether the op's windows cannot express the bounds, and a mask does."""
        return not self.at.low <= 0 <= self.at.high

    def _key_lengths(self, device: torch.device) -> Tensor | None:
        call, lengths = self.call.options, self.call.options.key_lengths
        if call.causal == _BY_LENGTHS:  # [B, rows]: the causal restriction limits keys of each row
            ends = self.query + 1 + torch.arange(self.at.rows, device=device) + self._offsets
            lengths = ends if lengths is None else torch.minimum(ends, lengths[:, None])
        elif lengths is not None and lengths.dim() == 2:
            lengths = lengths[:, self.rows]
        return None if lengths is None else (lengths - self.key).clamp(min=0)

    def _allowed(self, device: torch.device) -> Tensor | None:
        """A mask for bounds that the op's arguments cannot express, [B or 1, 1, rows, keys]."""
        left = self.call.options.window_left
        by_lengths = self.call.options.causal == _BY_LENGTHS and left >= 0
        if not (by_lengths or self._is_small):
            return None
        i = torch.arange(self.at.rows, device=device)[:, None]
        j = torch.arange(self.at.keys, device=device)
        if by_lengths:
            diagonal = i + self.query - self.key + self._offsets[..., None]
            return (j >= diagonal - left)[:, None]
        return ((j - i >= self.at.low) & (j - i <= self.at.high))[None, None]


def _intersection(mask: Tensor, allowed: Tensor) -> Tensor:
    return mask & allowed if mask.dtype == torch.bool else torch.where(allowed, mask, -torch.inf)


def _uses_lse(call: BackwardCall, backend: str | None) -> bool:
    """Whether out and lse of this backward may be those of a softmax over more keys."""
    op = OPS["attention_bwd"]
    uses_lse = getattr(op.module(select(op, call, backend)), "attention_bwd_uses_lse", None)
    return uses_lse is not None and uses_lse(call)


def _own_gradients(
    own_out: Tensor,
    own_lse: Tensor,
    out: Tensor,
    m: Tensor,
    log_sum: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Those of own_out and own_lse, which have been merged into the others."""
    weight = torch.exp(own_lse - m - log_sum).masked_fill_(own_lse == -torch.inf, 0.0)
    live = weight > 0  # in other rows, gradients may be NaN
    own_dlse = None if dlse is None else torch.where(live, dlse * weight, 0)
    if dout is None:
        return None, own_dlse
    own_dout = torch.where(live[..., None], dout * weight[..., None], 0).to(out.dtype)
    change = (own_dout.to(m.dtype) * (own_out.to(m.dtype) - out)).sum(-1)
    return own_dout, change if own_dlse is None else own_dlse + change


# -- merged results -------------------------------------------------------------------------------
# lse is m + log_sum, where m is the largest lse of the merged results: beside a large m, the sum in
# one number would be rounded, and with it the weights of the results.
def merge(out: Tensor, m: Tensor, log_sum: Tensor, part: Tensor | None, part_lse: Tensor) -> None:
    """Merges results for further keys into `out`, `m` and `log_sum`, in place. part: None for a
    value of 0.
    """
    highest = torch.maximum(m, part_lse)
    shift = highest.masked_fill(highest == -torch.inf, 0.0)  # -inf - (-inf) is NaN
    old, new = m - shift + log_sum, part_lse - shift
    total = torch.logaddexp(old, new)
    empty = total == -torch.inf
    weight, part_weight = (
        torch.exp(x - total).masked_fill_(empty, 0.0)[..., None] for x in (old, new)
    )
    out.mul_(weight)
    if part is not None:
        out.add_(part * part_weight)
    m.copy_(highest)
    log_sum.copy_(total)


def merge_sinks(
    out: Tensor,
    m: Tensor,
    log_sum: Tensor,
    sinks: Tensor,
    query_lengths: Tensor | None,
    rows: Tensor,
) -> Tensor:
    """Adds the sinks [H] to the sum of each row, in place. rows: the positions of the queries, of
    which those beyond query_lengths have no sink. Returns lse; as in `attention`, that of a row
    without a key is the sink, and that of every other row is larger.
    """
    sink = sinks[:, None]
    if query_lengths is not None:
        sink = torch.where(rows < query_lengths[:, None, None], sink, -torch.inf)
    above = torch.nextafter(sink, torch.full_like(sink, torch.inf))
    has_key = m != -torch.inf
    merge(out, m, log_sum, None, sink)
    return torch.where(has_key, torch.maximum(m + log_sum, above), sink)


def sink_gradients(
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    m: Tensor,
    log_sum: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> Tensor:
    """[H], the part of these rows."""
    row = torch.zeros_like(lse)
    if dout is not None:
        delta = (dout.to(lse.dtype) * out).sum(-1)
        row = torch.where(lse > sinks[:, None], delta, 0)  # dout may be NaN in rows without a key
    row = row if dlse is None else row - dlse
    weight = torch.exp(sinks[:, None] - m - log_sum)
    return -torch.where(lse == -torch.inf, 0, weight * row).sum((0, 2))
