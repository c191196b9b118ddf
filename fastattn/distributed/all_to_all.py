"""Exchanges between processes that hold parts of a sequence with all heads, and processes that hold
whole sequences with 1 / P of the heads (DeepSpeed-Ulysses; Jacobs et al. 2023).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastattn.distributed.derivatives import first_only
from fastattn.distributed.sequence import join_shards, place, split_into_shards

_Group = dist.ProcessGroup | None


def to_heads(tensors: list[Tensor], balanced: list[bool], group: _Group) -> list[Tensor]:
    """Each [B, H, S / P, ...] -> [B, H / P, S, ...]. balanced: the layout of each S."""
    return [*_AllToAll.apply(True, balanced, group, *tensors)]


def to_sequence(tensors: list[Tensor], balanced: list[bool], group: _Group) -> list[Tensor]:
    """Each [B, H / P, S, ...] -> [B, H, S / P, ...]: the inverse of `to_heads`."""
    return [*_AllToAll.apply(False, balanced, group, *tensors)]


def gather_rows(x: Tensor, balanced: bool, group: _Group) -> Tensor:
    """[B, 1, S / P, ...] -> [B, 1, S, ...]. The gradient is the sum of all processes' gradients."""
    return _GatherRows.apply(x, balanced, group)  # type: ignore[no-any-return]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, by_heads: bool, balanced: list[bool], group: _Group, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.by_heads, ctx.balanced, ctx.group = by_heads, balanced, group
        return _exchange([*tensors], balanced, by_heads, group)

    @staticmethod
    @first_only
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[3:]
        needed = [i for i, need in enumerate(needs) if need]
        layouts = [ctx.balanced[i] for i in needed]
        found = iter(
            _exchange([gradients[i] for i in needed], layouts, not ctx.by_heads, ctx.group)
        )
        return None, None, None, *(next(found) if need else None for need in needs)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, balanced: bool, group: _Group) -> Tensor:
        ctx.balanced, ctx.group = balanced, group
        P, _ = place(group)
        sent = _bytes(x.contiguous())
        shards = [torch.empty_like(sent) for _ in range(P)]
        dist.all_gather(shards, sent, group)
        return join_shards([shard.view(x.dtype) for shard in shards], 2, balanced)

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        P, _ = place(ctx.group)
        sent = torch.stack(split_into_shards(gradient, 2, P, ctx.balanced))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        return received.sum(0, dtype=wide).to(gradient.dtype), None, None


def _exchange(
    tensors: list[Tensor], balanced: list[bool], by_heads: bool, group: _Group
) -> tuple[Tensor, ...]:
    """All transfers are started before the first is waited for."""
    P, _ = place(group)
    under_way = []
    for x, layout in zip(tensors, balanced, strict=True):
        parts = x.chunk(P, 1) if by_heads else split_into_shards(x, 2, P, layout)
        sent = _bytes(torch.stack([*parts]))
        received = torch.empty_like(sent)
        transfer = dist.all_to_all_single(received, sent, group=group, async_op=True)
        under_way.append((transfer, sent, received.view(x.dtype), layout))
    found = []
    for transfer, _, received, layout in under_way:
        transfer.wait()
        parts = [*received.unbind(0)]
        found.append(join_shards(parts, 2, layout) if by_heads else torch.cat(parts, 1))
    return tuple(found)


def _bytes(x: Tensor) -> Tensor:
    """Booleans as bytes, which every process group transfers."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x
