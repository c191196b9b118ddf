"""The feed-forward network as two linear layers around an activation: matrix products in the data's
dtype, as in eager PyTorch, and everything between them in fp32 (fp64 for fp64 data).

Functions take the arguments of the torch op of the same name and return its results, None for
gradients that are not needed. `backward_maths` is the backward for double backward: it is
differentiable and recomputes `hidden` from the op's inputs.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops._dropout import SECOND_STREAM, drop_rows, keep_scale

GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
_TANH_SCALE = math.sqrt(2.0 / math.pi)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _gelu_derivative(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))) + x * density


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    t = torch.tanh(_TANH_SCALE * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _TANH_SCALE * (1.0 + 3 * 0.044715 * x * x)


def _silu_derivative(x: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype)),
    "gelu": (F.gelu, _gelu_derivative),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_derivative),
    "silu": (F.silu, _silu_derivative),
}


def _activate(pre: Tensor, activation: str) -> Tensor:
    """[..., F] -> [..., F]; if gated, [..., 2F] -> [..., F]."""
    if activation in GATED:
        gate, up = pre.chunk(2, -1)
        return _ACTIVATIONS[GATED[activation]][0](gate) * up
    return _ACTIVATIONS[activation][0](pre)


def _activate_bwd(da: Tensor, pre: Tensor, activation: str) -> Tensor:
    """The gradient of the pre-activation, from the gradient of the activation."""
    if activation in GATED:
        gate, up = pre.chunk(2, -1)
        function, derivative = _ACTIVATIONS[GATED[activation]]
        return torch.cat([da * up * derivative(gate), da * function(gate)], -1)
    return da * _ACTIVATIONS[activation][1](pre)


def _hidden(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    activation: str,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, Tensor]:
    """(the tensor saved for the backward, the activation after dropout). For relu both are the
    latter, whose sign determines the derivative and the dropout.
    """
    pre = F.linear(x, w1, b1)
    a = drop_rows(_activate(_wide(pre), activation), dropout_p, dropout_seed, dropout_stream)
    a = a.to(x.dtype)
    return (a if activation == "relu" else pre), a


def ffn_fwd(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    residual: Tensor | None,
    activation: str,
    dropout_p: float,
    output_dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, Tensor]:
    hidden, a = _hidden(x, w1, b1, activation, dropout_p, dropout_seed, dropout_stream)
    y = F.linear(a, w2, b2)
    y = drop_rows(y, output_dropout_p, dropout_seed, dropout_stream + SECOND_STREAM)
    return (y if residual is None else (_wide(residual) + y).to(residual.dtype)), hidden


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is ambiguous without columns


def ffn_bwd(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    hidden: Tensor,
    activation: str,
    dropout_p: float,
    output_dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    need_x, need_w1, need_b1, need_w2, need_b2 = needs
    stream = dropout_stream + SECOND_STREAM
    dy = drop_rows(_wide(dy), output_dropout_p, dropout_seed, stream).to(x.dtype)
    rows = _rows(dy)
    if activation == "relu":
        a = hidden
    else:
        a = drop_rows(
            _activate(_wide(hidden), activation), dropout_p, dropout_seed, dropout_stream
        ).to(x.dtype)
    dw2 = rows.t() @ _rows(a) if need_w2 else None
    db2 = _wide(rows).sum(0).to(x.dtype) if need_b2 else None
    if not (need_x or need_w1 or need_b1):
        return None, None, None, dw2, db2
    da = _wide(dy @ w2)
    if activation == "relu":
        dpre = da * keep_scale(dropout_p) * (hidden > 0)
    else:
        da = drop_rows(da, dropout_p, dropout_seed, dropout_stream)
        dpre = _activate_bwd(da, _wide(hidden), activation)
    db1 = _rows(dpre).sum(0).to(x.dtype) if need_b1 else None
    dpre = dpre.to(x.dtype)
    dx = dpre @ w1 if need_x else None
    dw1 = _rows(dpre).t() @ _rows(x) if need_w1 else None
    return dx, dw1, db1, dw2, db2


def backward_maths(
    dy: Tensor,
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    hidden: Tensor,
    activation: str,
    dropout_p: float,
    output_dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    hidden, _ = _hidden(x, w1, b1, activation, dropout_p, dropout_seed, dropout_stream)
    return ffn_bwd(
        dy, x, w1, b1, w2, b2, hidden, activation, dropout_p, output_dropout_p, dropout_seed,
        dropout_stream, needs,
    )  # fmt: skip
