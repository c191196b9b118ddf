"""quack's norms, in the CuTe language."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.implementations import (
    Forward,
    Implementation,
    Task,
    needs_package,
    package_version,
)
from fastattn.testing.spec import Inputs


class _LayerNorm(torch.autograd.Function):
    """quack has no autograd function for it: only a forward and, in later releases, a backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        fp32_weight, fp32_bias, eps = rest
        out, rstd, mean = layernorm_fwd(
            x, fp32_weight, fp32_bias, eps=eps, return_rstd=True, return_mean=True
        )
        ctx.save_for_backward(x, fp32_weight, rstd, mean)
        ctx.dtypes = weight.dtype, bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        from quack.rmsnorm import layernorm_bwd

        x, fp32_weight, rstd, mean = ctx.saved_tensors
        dx, dweight, dbias = layernorm_bwd(x, fp32_weight, dout, rstd, mean)
        return dx, dweight.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None, None, None


def _layer_norm(task: Task) -> Forward:
    from quack.rmsnorm import layernorm_fwd

    # It needs fp32 parameters: converted once, as a model would store them.
    fp32 = [task.inputs[n].detach().float() for n in ("weight", "bias")]

    def forward(inputs: Inputs) -> Tensor:
        x, weight, bias, eps = (inputs[n] for n in ("x", "weight", "bias", "eps"))
        if not x.requires_grad:
            return layernorm_fwd(x, *fp32, eps=eps)
        return _LayerNorm.apply(x, weight, bias, *fp32, eps)

    return forward


def _rms_norm(task: Task) -> Forward:
    from quack.rmsnorm import rmsnorm

    return lambda inputs: rmsnorm(inputs["x"], inputs["weight"], eps=inputs["eps"])


def _unsupported(task: Task) -> str | None:
    if task.inputs["x"].dim() != 2:
        return "takes [rows, N]"
    names = ("weight", "bias") if task.op == "layer_norm" else ("weight",)
    missing = [name for name in names if task.inputs.get(name) is None]
    return f"needs {' and '.join(missing)}" if missing else None


def _peer(op: str) -> Implementation:
    return Implementation(
        "quack",
        (op,),
        _layer_norm if op == "layer_norm" else _rms_norm,
        device_types=("cuda",),
        unavailable=needs_package("quack-kernels", "quack.rmsnorm"),
        unsupported=_unsupported,
        version=lambda: package_version("quack-kernels"),
        backend="cute",
        compiles=True,  # for seconds, at the first call of a width
    )


PEERS = (_peer("layer_norm"), _peer("rms_norm"))
