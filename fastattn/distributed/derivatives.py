"""Autograd functions of context_parallel_attention have a first derivative only."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A decorator of `backward`: differentiating its results raises NotImplementedError."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        return tuple(
            _NoDerivative.apply(x.detach().requires_grad_()) if isinstance(x, Tensor) else x
            for x in found
        )

    return wrapper


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "context_parallel_attention has no second derivative: it was differentiated twice"
        )
