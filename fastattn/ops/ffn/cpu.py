"""The feed-forward network on CPU in C++ (csrc/ffn): fp32, bf16 and fp16 on torch's threads.

The products are our own: biases, activations, dropout, the residual and the sums for the biases'
gradients happen to each block of sums before it leaves the cache, and one call of the library is
the whole forward or backward. Weights may be stored either way; other layouts are copied here.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall

_library = torch.ops.fastattn_cpu
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Activation, gated: numbers and flags of csrc/ffn/ffn.h.
_ACTIVATIONS = {
    "relu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "silu": 3,
    "reglu": 0,
    "geglu": 1,
    "swiglu": 3,
}
_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]


def unavailable() -> str | None:
    return _native.unavailable("cpu")


# -- layout and memory ----------------------------------------------------------------------------
def _matrix(x: Tensor) -> Tensor:
    """x, or rows of it, or a copy: contiguous, or two dimensions of which one is contiguous."""
    if x.is_contiguous():
        return x
    x = x.reshape(-1, x.shape[-1])
    return x if 1 in x.stride() else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """The same with contiguous columns."""
    if x.is_contiguous():
        return x
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _rows_in(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


# The last argument, torch's number of threads, is a key only: C++ asks for it.
@functools.lru_cache(maxsize=256)
def _fwd_floats(
    rows: int, D: int, wide: int, F: int, out: int, size: int, activation: int, threads: int
) -> int:
    return _library.ffn_fwd_scratch(rows, D, wide, F, out, size, activation)


@functools.lru_cache(maxsize=256)
def _bwd_floats(
    rows: int, D: int, wide: int, F: int, out: int, size: int, activation: int, drops: bool,
    threads: int,
) -> int:  # fmt: skip
    return _library.ffn_bwd_scratch(rows, D, wide, F, out, size, activation, drops)


def _refusal(*tensors: Tensor | None) -> str | None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in _DTYPES:
            return f"has kernels for fp32, bf16 and fp16, got {tensor.dtype}"
    return unavailable()


# -- forward --------------------------------------------------------------------------------------
def ffn_fwd_unsupported(call: ForwardCall) -> str | None:
    return _refusal(call.x, call.residual)


def ffn_fwd_workspace(call: ForwardCall) -> _Workspace:
    x, (wide, D), (out, F) = call.x, call.w1.shape, call.w2.shape
    floats = _fwd_floats(
        _rows_in(x), D, wide, F, out, x.element_size(), _ACTIVATIONS[call.activation],
        torch.get_num_threads(),
    )  # fmt: skip
    return [((floats,), torch.float32, False)]


def ffn_fwd(call: ForwardCall, y: Tensor, hidden: Tensor, scratch: Tensor) -> None:
    # A name for each: gathering the options in a list takes longer.
    x, w1, b1, w2, b2, residual, activation, dropout_p, output_dropout_p, seed, stream = call
    _library.ffn_fwd.default._op(
        _matrix(x), _matrix(w1), b1 if b1 is None else b1.contiguous(),
        _matrix(w2), b2 if b2 is None else b2.contiguous(),
        residual if residual is None else residual.contiguous(), _ACTIVATIONS[activation],
        dropout_p, output_dropout_p, seed, stream, y, hidden, scratch,
    )  # fmt: skip


# Results made by the library: here they and the scratch memory take 5 us, of few rows' 30.
def ffn_fwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    x, w1, b1, w2, b2, residual, activation, dropout_p, output_dropout_p, _, _ = args
    if residual is None and dropout_p == 0.0 and output_dropout_p == 0.0 and x.dtype in _DTYPES:
        return _library.ffn_plain_fwd.default._op(x, w1, b1, w2, b2, _ACTIVATIONS[activation])
    return None


# -- backward -------------------------------------------------------------------------------------
def ffn_bwd_unsupported(call: BackwardCall) -> str | None:
    return _refusal(call.dy, call.x)


def ffn_bwd_workspace(call: BackwardCall) -> _Workspace:
    x, (wide, D), (out, F) = call.x, call.w1.shape, call.w2.shape
    drops = call.output_dropout_p > 0 or call.dy.dtype != x.dtype
    floats = _bwd_floats(
        _rows_in(x), D, wide, F, out, x.element_size(), _ACTIVATIONS[call.activation], drops,
        torch.get_num_threads(),
    )  # fmt: skip
    return [((floats,), torch.float32, False)]


def ffn_bwd(
    call: BackwardCall,
    dx: Tensor,
    dw1: Tensor,
    db1: Tensor,
    dw2: Tensor,
    db2: Tensor,
    scratch: Tensor,
) -> None:
    dy, x, w1, _, w2, _, hidden, activation, dropout_p, output_dropout_p, seed, stream, _ = call
    # An input of more than two dimensions may have its rows in any order; so has its gradient.
    dx_rows = (
        dx
        if dx.dim() <= 2 or dx.is_contiguous()
        else torch.empty_like(dx, memory_format=torch.contiguous_format)
    )
    _library.ffn_bwd.default._op(
        _rows(dy), _matrix(x), _matrix(w1), _matrix(w2), hidden.contiguous(),
        _ACTIVATIONS[activation], dropout_p, output_dropout_p, seed, stream, dx_rows, dw1, db1, dw2,
        db2, scratch,
    )  # fmt: skip
    if dx_rows is not dx:
        dx.copy_(dx_rows)
