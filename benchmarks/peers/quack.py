"""quack's norms, in the CuTe language."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import (
    adapter,
    of_package,
    refusing,
    without_parameters,
)
from fastattn.testing.spec import Inputs


class _LayerNorm(torch.autograd.Function):
    """quack has no autograd function for it: only a forward and, in later releases, a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        out, rstd, mean = layernorm_fwd(
            x, weight, bias, eps=eps, return_rstd=True, return_mean=True
        )
        ctx.save_for_backward(x, weight, rstd, mean)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        from quack.rmsnorm import layernorm_bwd

        x, weight, rstd, mean = ctx.saved_tensors
        return *layernorm_bwd(x, weight, dout, rstd, mean), None


def _with_fp32_parameters(inputs: Inputs) -> Inputs:
    """Which it needs; a model would store them."""
    return inputs | {name: inputs[name].float() for name in ("weight", "bias")}


@refusing(without_parameters)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    from quack.rmsnorm import layernorm_fwd

    weight, bias, rows = weight.float(), bias.float(), x.reshape(-1, x.shape[-1])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias)):
        return _LayerNorm.apply(rows, weight, bias, eps).view(x.shape)
    return layernorm_fwd(rows, weight, bias, eps=eps).view(x.shape)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=eps)


PEERS = tuple(
    adapter(
        "quack",
        op,
        function,
        prepare=prepare,
        device_types=("cuda",),
        **of_package("quack-kernels", "quack.rmsnorm"),
        backend="cute",
        compiles=True,  # for seconds, at the first call of a width
    )
    for op, function, prepare in (
        ("layer_norm", layer_norm, _with_fp32_parameters),
        ("rms_norm", rms_norm, None),
    )
)
