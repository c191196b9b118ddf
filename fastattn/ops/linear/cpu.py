"""A linear layer on CPU in C++, on the matrix products of the feed-forward network (csrc/ffn).

torch's fp32 products come from Intel's MKL, which is far from the speed of other makers' processors
(on AMD's Zen 5 about half of it): there these products are worth taking from torch. So are those of
half precision where no instruction multiplies matrices.
"""

import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from fastattn.ops import _env, _native

_library = torch.ops.fastattn_cpu
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]

# Multiply-adds from which a call is worth taking: looking at it takes 2 us. Where the op must be
# found in Python that is 8 us more, and gradients are dearer (of one row, twice torch's time).
_WORTH_A_LOOK = 1 << 15
_WORTH_TAKING = 3 << 19
# Worded once: eager calls ask.
_LACKS = "lacks this processor's instructions for products in half precision, torch has them"


class _Order(threading.local):
    """Of the sums of this thread's products."""

    batch_invariant = False


_order = _Order()


def unavailable() -> str | None:
    return _native.unavailable("cpu")


def batch_invariant(on: bool) -> bool:
    """Makes this thread's fp32 products, those of the feed-forward network too, add in an order
    that does not depend on the number of rows; returns what was set before.
    """
    before, _order.batch_invariant = _order.batch_invariant, on
    if unavailable() is None:
        _library.batch_invariant(on)
    return before


def left_to_torch(dtype: torch.dtype) -> str | None:
    """Why torch's own products are quicker, for all that is known of the processor."""
    return _LACKS if _env.has_quick_products(dtype) else None


def is_worth_taking(x: Tensor, w: Tensor, graph: bool) -> bool:
    """Whether torch's own product of these would take longer; graph: gradients will be computed."""
    dtype = x.dtype
    quick = not _env.has_slow_blas() if dtype is torch.float32 else _env.has_quick_products(dtype)
    if quick or dtype not in _DTYPES:
        return False
    # Batch-invariant calls are those of generation, recorded once: all are taken there.
    if _order.batch_invariant:
        return True
    slow = graph or _native.extension() is None
    return x.numel() * w.shape[0] >= (_WORTH_TAKING if slow else _WORTH_A_LOOK)


def _refusal(x: Tensor) -> str | None:
    if x.dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {x.dtype}"
    return unavailable()


# -- layout and memory ----------------------------------------------------------------------------
def _matrix(x: Tensor) -> Tensor:
    """x, or rows of it, or a copy: contiguous, or two dimensions of which one is contiguous."""
    if x.is_contiguous():
        return x
    x = x.reshape(-1, x.shape[-1])
    return x if 1 in x.stride() else x.contiguous()


def _rows_in(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


# The last argument, torch's number of threads, is a key only: C++ asks for it.
@functools.lru_cache(maxsize=256)
def _fwd_floats(rows: int, D: int, out: int, size: int, threads: int) -> int:
    return _library.linear_fwd_scratch(rows, D, out, size)


@functools.lru_cache(maxsize=256)
def _bwd_floats(rows: int, D: int, out: int, size: int, threads: int) -> int:
    return _library.linear_bwd_scratch(rows, D, out, size)


# -- forward --------------------------------------------------------------------------------------
def linear_fwd_unsupported(x: Tensor, w: Tensor, b: Tensor | None) -> str | None:
    return _refusal(x)


def linear_fwd_workspace(x: Tensor, w: Tensor, b: Tensor | None) -> _Workspace:
    out, D = w.shape
    floats = _fwd_floats(_rows_in(x), D, out, x.element_size(), torch.get_num_threads())
    return [((floats,), torch.float32, False)]


def linear_fwd(x: Tensor, w: Tensor, b: Tensor | None, y: Tensor, scratch: Tensor) -> None:
    bias = b if b is None else b.contiguous()
    _library.linear_fwd.default(_matrix(x), _matrix(w), bias, y, scratch)


# Results made by the library: here they and the scratch memory take 4 us.
def linear_fwd_direct(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...] | None:
    if x.dtype in _DTYPES:
        return (_library.linear_plain_fwd.default._op(x, w, b),)
    return None


# -- backward -------------------------------------------------------------------------------------
def linear_bwd_unsupported(dy: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> str | None:
    return _refusal(x)


def linear_bwd_workspace(dy: Tensor, x: Tensor, w: Tensor, needs: Sequence[bool]) -> _Workspace:
    out, D = w.shape
    floats = _bwd_floats(_rows_in(x), D, out, x.element_size(), torch.get_num_threads())
    return [((floats,), torch.float32, False)]


def linear_bwd(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    needs: Sequence[bool],
    dx: Tensor,
    dw: Tensor,
    db: Tensor,
    scratch: Tensor,
) -> None:
    # An input of more than two dimensions may have its rows in any order; so has its gradient.
    dx_rows = (
        dx
        if dx.dim() <= 2 or dx.is_contiguous()
        else torch.empty_like(dx, memory_format=torch.contiguous_format)
    )
    if not dy.is_contiguous():
        dy = dy.reshape(-1, dy.shape[-1])
        dy = dy if dy.stride(1) == 1 else dy.contiguous()
    _library.linear_bwd.default(dy, _matrix(x), _matrix(w), dx_rows, dw, db, scratch)
    if dx_rows is not dx:
        dx.copy_(dx_rows)
