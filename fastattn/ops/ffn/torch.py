"""The feed-forward network by PyTorch's linear layers and activations, each in the data's dtype,
with fastattn's dropout bits.

Functions return their results, None for gradients that are not needed.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops._dropout import SECOND_STREAM, keep_scale, rows_dropped
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall

RETURNS_RESULTS = True
_aten = torch.ops.aten
_GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
_Derivative = Callable[[Tensor, Tensor], Tensor]
# The function, and (gradient of its result, its argument) -> gradient of the argument.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], _Derivative]] = {
    "relu": (torch.relu, lambda da, x: _aten.threshold_backward.default(da, x, 0)),
    "gelu": (F.gelu, _aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda da, x: _aten.gelu_backward.default(da, x, approximate="tanh"),
    ),
    "silu": (F.silu, _aten.silu_backward.default),
}


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is ambiguous without columns


def _drop_(x: Tensor, p: float, seed: Tensor | None, stream: int) -> Tensor:
    """Sets dropped elements of x [rows, N] to 0, without scaling the kept ones."""
    if p > 0:
        assert seed is not None
        x.masked_fill_(rows_dropped(seed, stream, p, *x.shape), 0.0)
    return x


def _scale_(x: Tensor, p: float) -> Tensor:
    return x.mul_(keep_scale(p)) if p > 0 else x


def _activated(pre: Tensor, call: ForwardCall | BackwardCall) -> Tensor:
    """The activation after dropout, [rows, F]. relu writes it to `pre`."""
    activation, p = call.activation, call.dropout_p
    if activation == "relu":
        a = pre.relu_()
    elif activation in _GATED:
        gate, up = pre.chunk(2, -1)
        a = _ACTIVATIONS[_GATED[activation]][0](gate).mul_(up)
    else:
        a = _ACTIVATIONS[activation][0](pre)
    return _scale_(_drop_(a, p, call.dropout_seed, call.dropout_stream), p)


def _activated_bwd(da: Tensor, pre: Tensor, activation: str) -> Tensor:
    """The gradient of the pre-activation, from the gradient of the activation."""
    if activation not in _GATED:
        return _ACTIVATIONS[activation][1](da, pre)
    gate, up = pre.chunk(2, -1)
    function, derivative = _ACTIVATIONS[_GATED[activation]]
    return torch.cat([derivative(da * up, gate), function(gate).mul_(da)], -1)


# -- ffn_fwd ---------------------------------------------------------------------------------------
def ffn_fwd(call: ForwardCall) -> tuple[Tensor, Tensor]:
    x, residual, p = call.x, call.residual, call.output_dropout_p
    hidden = F.linear(_rows(x), call.w1, call.b1)
    a = _activated(hidden, call)
    y = F.linear(a, call.w2, call.b2)
    y = _drop_(y, p, call.dropout_seed, call.dropout_stream + SECOND_STREAM)
    if residual is None:
        y = _scale_(y, p)
    else:
        y = torch.add(_rows(residual), y, alpha=keep_scale(p)).to(residual.dtype)
    return y.view(*x.shape[:-1], y.shape[1]), hidden.view(*x.shape[:-1], hidden.shape[1])


# -- ffn_bwd ---------------------------------------------------------------------------------------
def ffn_bwd(call: BackwardCall) -> tuple[Tensor | None, ...]:
    (need_x, need_w1, need_b1, need_w2, need_b2), p = call.needs, call.output_dropout_p
    x, hidden, seed, stream = (
        _rows(call.x),
        _rows(call.hidden),
        call.dropout_seed,
        call.dropout_stream,
    )
    dy = _rows(call.dy).to(x.dtype, copy=p > 0)
    dy = _scale_(_drop_(dy, p, seed, stream + SECOND_STREAM), p)
    is_relu, sums = call.activation == "relu", torch.promote_types(x.dtype, torch.float32)
    dw2 = db2 = None
    if need_w2:
        dw2 = dy.t() @ (hidden if is_relu else _activated(hidden, call))
    if need_b2:
        db2 = dy.sum(0, dtype=sums)
    if not (need_x or need_w1 or need_b1):
        return None, None, None, dw2, db2
    da = dy @ call.w2
    if not is_relu:  # relu's saved activation is 0 where it was dropped
        da = _drop_(da, call.dropout_p, seed, stream)
    dpre = _activated_bwd(_scale_(da, call.dropout_p), hidden, call.activation)
    return (
        (dpre @ call.w1).view(call.x.shape) if need_x else None,
        dpre.t() @ x if need_w1 else None,
        dpre.sum(0, dtype=sums) if need_b1 else None,
        dw2,
        db2,
    )
