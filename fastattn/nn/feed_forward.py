"""The position-wise feed-forward network: `PositionWiseFFN`, and the test whether one can be fused.

`fused_activation` returns the `ffn` op's name of the activation if the modules of a network may run
as one op.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import functional
from fastattn.nn.fusion import DropoutStreams, active_p, is_unmodified, weight_and_bias

_FUNCTIONS = ((F.relu, "relu"), (torch.relu, "relu"), (F.gelu, "gelu"), (F.silu, "silu"))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# Activations that the `ffn` op computes.
_GATED: dict[str, Callable[[Tensor], Tensor]] = {"reglu": F.relu, "geglu": F.gelu, "swiglu": F.silu}
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": F.silu,
}


class GatedActivation(nn.Module):
    """`act(gate) * up` of an x whose last dimension holds gate and up, in this order.

    name: "reglu", "geglu", "swiglu", which a layer computes in one op with its linear maps, or
    "geglu_tanh", whose gelu is the tanh approximation, unfused.
    """

    functions: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        **_GATED,
        "geglu_tanh": _gelu_tanh,
    }

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in self.functions:
            raise ValueError(f"name must be one of {tuple(self.functions)}, got {name!r}")
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.functions[self.name](gate) * up

    def extra_repr(self) -> str:
        return self.name


def activation_name(activation: Any) -> str | None:
    """The `ffn` op's name for a function or module, None if it is not supported."""
    for function, name in _FUNCTIONS:
        if activation is function:
            return name
    if not isinstance(activation, nn.Module):
        return None
    if not is_unmodified(activation, nn.ReLU, nn.GELU, nn.SiLU, GatedActivation):
        return None
    if isinstance(activation, GatedActivation):
        return activation.name if activation.name in _GATED else None
    if isinstance(activation, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(activation.approximate)
    return "relu" if isinstance(activation, nn.ReLU) else "silu"


def fused_activation(
    linear1: nn.Module, activation: Any, dropout: nn.Module, linear2: nn.Module
) -> str | None:
    """The activation's name if one op computes the same as these modules, else None."""
    if _is_dense(linear1) and is_unmodified(dropout, nn.Dropout) and _is_dense(linear2):
        return activation_name(activation)
    return None


def _is_dense(linear: nn.Module) -> bool:
    """Whether it is unmodified, with a dense weight and a bias that is not broadcast."""
    if not is_unmodified(linear, nn.Linear):
        return False
    weight, bias = weight_and_bias(linear)
    return weight.layout is torch.strided and (bias is None or bias.shape == weight.shape[:1])


class PositionWiseFFN(nn.Module):
    """`linear2(dropout(activation(linear1(x))))` at every position.

    input_size, hidden_size: widths of x and of the hidden layer. output_size: default input_size.
    activation: relu, gelu, gelu_tanh, silu, or gated: reglu, geglu, swiglu. If gated, `linear1` has
    2 * hidden_size rows, the gate's first: act(gate) * up (Shazeer 2020).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        output_size: int | None = None,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _UNGATED and activation not in _GATED:
            known = ", ".join((*_UNGATED, *_GATED))
            raise ValueError(f"activation must be one of {known}, got {activation!r}")
        self.activation = activation
        rows = 2 * hidden_size if activation in _GATED else hidden_size
        output_size = input_size if output_size is None else output_size
        self.linear1 = nn.Linear(input_size, rows, bias=bias, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(hidden_size, output_size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x `[..., input_size]` -> `[..., output_size]`; another last size raises ValueError."""
        if x.dim() == 0 or x.shape[-1] != self.linear1.in_features:
            raise ValueError(f"x must be [..., {self.linear1.in_features}], got {list(x.shape)}")
        if fused_activation(self.linear1, F.relu, self.dropout, self.linear2) is None:
            return self.linear2(self.dropout(self._activate(self.linear1(x))))
        p = active_p(self.dropout)
        return functional.ffn(
            x,
            self.linear1.weight,
            self.linear1.bias,
            self.linear2.weight,
            self.linear2.bias,
            self.activation,
            dropout_p=p,
            **DropoutStreams(x.device).take(p),
        )

    def _activate(self, hidden: Tensor) -> Tensor:
        if self.activation in _GATED:
            gate, up = hidden.chunk(2, dim=-1)
            return _GATED[self.activation](gate) * up
        return _UNGATED[self.activation](hidden)

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
