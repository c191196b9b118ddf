"""`torch.vmap` over an op. If the batch elements of all mapped arguments and results are
independent, the mapped dimension is folded into the batch of one call; otherwise the op is called
for each index of the mapped dimension.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastattn.ops._op import Op


def rule(op: "Op", call: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The batching rule of one overload: (info, in_dims, *arguments) -> (results, out_dims)."""

    def apply(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        dims = [
            in_dims[i] if i in op.tensors and x is not None else None for i, x in enumerate(args)
        ]
        size = info.batch_size
        run = _in_one_call if _is_independent(op, dims, args) else _in_a_loop
        results = run(op, call, size, dims, args)
        return op.as_declared(results), op.as_declared((0,) * len(results))

    return apply


def _is_independent(op: "Op", dims: Sequence[int | None], args: Sequence[Any]) -> bool:
    """Whether one call can compute all elements: only tensors with a batch are mapped, no result is
    a sum over the batch, and there is no dropout, whose bits depend on the position in the batch.
    """
    names = op.arguments
    if not op.batched or any(args[names.index(p)] for p in op.dropout):
        return False
    if any(args[names.index(name)] is not None for name in op.unfoldable):
        return False
    if any(d is not None and names[i] not in op.batched for i, d in enumerate(dims[: len(names)])):
        return False
    if "needs" not in names:
        return True
    needs = args[names.index("needs")]
    return all(
        name in op.batched or not needed for name, needed in zip(op.results, needs, strict=True)
    )


def _in_one_call(
    op: "Op", call: Callable[..., Any], size: int, dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Tensor, ...]:
    given, batch = list(args), 0
    for i in op.tensors:
        if (x := args[i]) is None:
            continue
        name, d = op.arguments[i], dims[i]
        # A batch of 1 is broadcast.
        if name in op.batched or (name in op.broadcast and x.shape[0] != 1):
            x = x.unsqueeze(0).expand(size, *x.shape) if d is None else x.movedim(d, 0)
            if i == op.first_tensor:
                batch = x.shape[1]
            given[i] = x.flatten(0, 1) if op.batch_is_one_dimension else x

    def mapped(x: Tensor) -> Tensor:
        if op.is_derivative and x.shape == (0,):  # a gradient that is not needed
            return x.new_empty(size, 0)
        return x.unflatten(0, (size, batch)) if op.batch_is_one_dimension else x

    return tuple(map(mapped, _as_tuple(call(*given))))


def _in_a_loop(
    op: "Op", call: Callable[..., Any], size: int, dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Tensor, ...]:
    if size == 0:
        raise ValueError(f"{op.name}: vmap must map over at least one element here, got 0")
    elements = [
        _as_tuple(
            call(*(x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)))
        )
        for i in range(size)
    ]
    return tuple(torch.stack(results) for results in zip(*elements, strict=True))


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)
