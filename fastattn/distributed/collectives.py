"""Collectives with gradients over one dimension of a mesh, and `Group`, what they need of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer versions of torch have other names for them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Group:
    """The processes along one dimension of a mesh; a group of one does not communicate."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This process's part of a tensor that all hold."""
        if self.size == 1:
            return x
        length = x.shape[dim] // self.size
        return x.narrow(dim, self.rank * length, length).contiguous()

    def join(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all processes, one after the other."""
        if self.size == 1:
            return x
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _all_gather(parts, x.contiguous(), group=self.group)
        if dim == 0:
            return parts
        return parts.unflatten(0, (self.size, -1)).movedim(0, dim).flatten(dim, dim + 1)

    def index_in_part(self, index: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Indices of rows of which each process has `length` -> those into this process's rows, and
        whether they are in them. For rows of other processes they are 0, for rows that no process
        has they stay out of range.
        """
        own = index - self.rank * length
        inside = (own >= 0) & (own < length)
        exists = (index >= 0) & (index < self.size * length)
        return own.masked_fill(exists & ~inside, 0), inside

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size == 1:
            return x
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.group)
        return x

    def part_of_sum(self, x: Tensor, dim: int) -> Tensor:
        """`part` of `sum`, in one collective."""
        if self.size == 1:
            return x
        first = x.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        total = torch.empty_like(first[0])
        _reduce_scatter(total, first.flatten(0, 1), group=self.group)
        return total


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """This process's part of an x that all hold and continue with alike."""
    return _exchange(x, lambda x: group.part(x, dim), lambda dy: group.join(dy, dim), group)


def gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """The whole x, with which all processes continue alike."""
    return _exchange(x, lambda x: group.join(x, dim), lambda dy: group.part(dy, dim), group)


def gather_shared(x: Tensor, dim: int, group: Group) -> Tensor:
    """The whole x, which each process multiplies by its share of the weights."""
    return _exchange(x, lambda x: group.join(x, dim), lambda dy: group.part_of_sum(dy, dim), group)


def shared(x: Tensor, group: Group) -> Tensor:
    """An x that all processes hold and each multiplies by its share of the weights."""
    return _exchange(x, lambda x: x.view_as(x), group.sum, group)


def sum_gradients(tensors: Sequence[Tensor], group: Group) -> Sequence[Tensor]:
    """Tensors that all processes hold and each applies to its rows: their gradients are summed, in
    one collective.
    """
    if group.size == 1 or not tensors:
        return tensors
    return _SumGradients.apply(group, *tensors)  # type: ignore[no-any-return]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.group.sum(torch.cat([dx.flatten() for dx in gradients]))
        parts = total.split([dx.numel() for dx in gradients])
        return None, *(x.view_as(dx) for x, dx in zip(parts, gradients, strict=True))


def sum_whole(x: Tensor, group: Group) -> Tensor:
    """The sum of the processes' terms, with which all continue alike."""
    return _exchange(x, group.sum, lambda dy: dy, group)


def sum_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This process's part of the sum of the processes' terms."""
    return _exchange(x, lambda x: group.part_of_sum(x, dim), lambda dy: group.join(dy, dim), group)


def _exchange(
    x: Tensor,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    group: Group,
) -> Tensor:
    return x if group.size == 1 else _Exchange.apply(x, forward, backward)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.exchange = backward
        return forward(x)  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(dy), None, None
