"""Ring attention (Liu, Zaharia, Abbeel 2023): each process holds a shard of the sequence.

Keys and values are passed around the ring; each process attends its queries to the shard it holds,
and partial results are merged by their lse. The backward passes the gradients of keys and values
around with them. The next shard is transferred while the current one is computed.

Causal work is balanced by the layout: of 2 P chunks, process r holds chunks r and 2 P - 1 - r, so
all have the same number of pairs at every step. `shard_sequence` and `unshard_sequence` convert.

Shapes: P processes, B batch, H query heads, K key heads, S = the whole sequence, D, E head dims.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn._arguments import autocast, check_attention_inputs, check_scale

_FULL, _TOP_LEFT = 0, 1  # codes of the op's `causal`
_WHOLE, _FIRST, _SECOND = slice(None), 0, 1


def shard_sequence(
    x: Tensor, dim: int, *, causal: bool, group: dist.ProcessGroup | None = None
) -> Tensor:
    """This process's shard of `x` along `dim`: 1 / P of it, or two chunks of 1 / (2 P) if causal.

    Raises ValueError if the size is not divisible.
    """
    P, rank = _place(group)
    count = 2 * P if causal else P
    if x.shape[dim] % count:
        raise ValueError(
            f"x must have a size along dim {dim} that {count} divides, got {x.shape[dim]}"
        )
    chunks = x.chunk(count, dim)
    if not causal:
        return chunks[rank].contiguous()
    return torch.cat([chunks[rank], chunks[2 * P - 1 - rank]], dim)


def unshard_sequence(
    shard: Tensor, dim: int, *, causal: bool, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The whole tensor, on every process, from each process's `shard`. Records no gradient."""
    P, _ = _place(group)
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(P)]
    dist.all_gather(shards, shard.detach().contiguous(), group)
    if not causal:
        return torch.cat(shards, dim)
    halves = [shard.chunk(2, dim) for shard in shards]
    ascending = [first for first, _ in halves]
    return torch.cat([*ascending, *(second for _, second in reversed(halves))], dim)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of the whole sequence, for this process's queries.

    Args:
        q: [B, H, S / P, D]; k: [B, K, S / P, D]; v: [B, K, S / P, E], shards from
            `shard_sequence`. Every process calls with the same shapes.
        causal: query i attends keys j <= i; needs the layout of `shard_sequence(causal=True)`.
        scale: default D ** -0.5. group: default all processes.

    Returns:
        out [B, H, S / P, E] in q's dtype, or (out, lse), lse fp32 [B, H, S / P]. Differentiable
        once, lse too.
    """
    q, k, v = autocast(q, k, v)
    check_attention_inputs(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k must have q's {q.shape[2]} positions, got {k.shape[2]}")
    if causal and q.shape[2] % 2:
        raise ValueError(f"q must hold two chunks of equal length, got {q.shape[2]} positions")
    scale = check_scale(scale, q.shape[3])
    out, lse = _Ring.apply(q, k, v, causal, scale, _Neighbours.of(group))
    return (out, lse) if return_lse else out


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The number of processes, and this process's rank."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group must contain the calling process, global rank {dist.get_rank()}")
    return dist.get_world_size(group), rank


@dataclass(frozen=True)
class _Neighbours:
    """Sends to the next process of the ring, receives from the one before."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "_Neighbours":
        return cls(group, *_place(group))

    def start_pass(self, *tensors: Tensor) -> tuple[list[Tensor], list[Any]]:
        """Starts sending contiguous tensors on; returns the receive buffers and the requests."""
        received = [torch.empty_like(x) for x in tensors]
        if self.size == 1:
            return list(tensors), []
        following, preceding = (self._global((self.rank + step) % self.size) for step in (1, -1))
        transfers = []
        for sent, arriving in zip(tensors, received, strict=True):
            transfers.append(dist.P2POp(dist.isend, sent, following, self.group))
            transfers.append(dist.P2POp(dist.irecv, arriving, preceding, self.group))
        return received, dist.batch_isend_irecv(transfers)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _share(rank: int, owner: int, causal: bool) -> tuple[Any, Any, int] | None:
    """Which half of this rank's queries attends which half of the owner's keys, and the op's causal
    code; None for no pairs.

    Causal: a process holds chunks r and 2 P - 1 - r in ascending order, so its own shard is causal.
    With an owner of lower rank, both query chunks attend its first key chunk only; with one of
    higher rank, the second query chunk attends both.
    """
    if not causal:
        return _WHOLE, _WHOLE, _FULL
    if owner == rank:
        return _WHOLE, _WHOLE, _TOP_LEFT
    return (_WHOLE, _FIRST, _FULL) if owner < rank else (_SECOND, _WHOLE, _FULL)


def _half(x: Tensor, which: Any) -> Tensor:
    """One half along dim 2, or all."""
    return x if which == _WHOLE else x.chunk(2, 2)[which]


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges a partial result into the running `out` and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse)
    empty = total == float("-inf")
    weight, part_weight = (
        torch.exp(x - total).masked_fill_(empty, 0.0)[..., None] for x in (lse, part_lse)
    )
    out.mul_(weight).add_(part * part_weight)
    lse.copy_(total)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, ring: _Neighbours
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
        lse = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
        held = [k.contiguous(), v.contiguous()]
        for step in range(ring.size):
            arriving, transfers = ring.start_pass(*held) if step + 1 < ring.size else (held, [])
            share = _share(ring.rank, (ring.rank - step) % ring.size, causal)
            if share is not None:
                rows, keys, kind = share
                part, part_lse = torch.ops.fastattn.attention_fwd(
                    _half(q, rows), _half(held[0], keys), _half(held[1], keys),
                    None, None, None, None, None, None, 0.0, kind, -1, -1, scale, 0.0, None, 0,
                )  # fmt: skip
                _merge(_half(out, rows), _half(lse, rows), part, part_lse)
            for transfer in transfers:
                transfer.wait()
            held = arriving
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.causal, ctx.scale, ctx.ring = causal, scale, ring
        ctx.set_materialize_grads(False)
        return result, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, wide = ctx.ring, lse.dtype
        dout = torch.zeros_like(out) if dout is None else dout
        held = [k.contiguous(), v.contiguous()]
        dq = torch.zeros_like(q, dtype=wide)
        held_grads = [torch.zeros_like(x, dtype=wide) for x in held]
        for step in range(ring.size):
            arriving, transfers = ring.start_pass(*held) if step + 1 < ring.size else (held, [])
            share = _share(ring.rank, (ring.rank - step) % ring.size, ctx.causal)
            if share is not None:
                rows, keys, kind = share
                parts = torch.ops.fastattn.attention_bwd(
                    _half(dout, rows),
                    None if dlse is None else _half(dlse, rows).contiguous(),
                    _half(q, rows), _half(held[0], keys), _half(held[1], keys),
                    None, None, None, None, _half(out, rows), _half(lse, rows).contiguous(),
                    None, None, 0.0, kind, -1, -1, ctx.scale, 0.0, None, 0,
                    [True, True, True, False, False, False],
                )  # fmt: skip
                _half(dq, rows).add_(parts[0])
                for total, part in zip(held_grads, parts[1:3], strict=True):
                    _half(total, keys).add_(part)
            # Gradients move with their keys and values; the last step returns them to the owner.
            arrived, gradient_transfers = ring.start_pass(*held_grads)
            for transfer in (*transfers, *gradient_transfers):
                transfer.wait()
            held, held_grads = arriving, arrived
        dk, dv = held_grads
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
