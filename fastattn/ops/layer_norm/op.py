"""The torch ops of the norms: schemas, shapes of the results, backends in order of preference.

Statistics are saved in fp32 (fp64 for fp64 data); any backward may follow any forward.
"""

from typing import Any

import torch
from torch import Tensor

from fastattn.ops._autograd import differentiable
from fastattn.ops._op import Backend, Op
from fastattn.ops.layer_norm import reference
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormBackwardCall,
    RmsNormCall,
)

_PACKAGE = "fastattn.ops.layer_norm"
# The arguments and results, of any of the ops, that have a row for each row of x.
_ROWS = ("x", "residual", "y", "z", "mean", "rstd", "dy", "dz", "dx", "dresidual")
_BACKENDS = (
    Backend("cuda", automatic=False),
    Backend("triton", automatic=False),
    Backend("cpu"),
    Backend("torch"),
    Backend("reference"),
)


def _normalised(like: Tensor) -> tuple[Tensor, Tensor]:
    """(empty y of like's shape, contiguous; an empty statistic of each row).

    empty_like is PyTorch's fastest allocation. torch.empty takes half a microsecond less with the
    sizes as separate arguments than with a torch.Size.
    """
    y = torch.empty_like(like, memory_format=torch.contiguous_format)
    dtype, rows = like.dtype, like.shape[:-1]
    wide = dtype is torch.float32 or dtype is torch.float64
    if not rows:
        return y, like.new_empty((), dtype=dtype if wide else torch.float32)
    if wide:
        return y, like.new_empty(*rows)
    return y, torch.empty(*rows, dtype=torch.float32, device=like.device)


def _contiguous(
    like: Tensor | None, needed: bool, other: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """An empty contiguous gradient of `like`, or a tensor [0] like `other` if it is not needed."""
    if needed and like is not None:
        return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    return other.new_empty(0)


def _layer_norm_fwd_outputs(call: LayerNormCall) -> tuple[Tensor, ...]:
    y, mean = _normalised(call.x)
    return y, mean, torch.empty_like(mean)


def _layer_norm_bwd_outputs(call: LayerNormBackwardCall) -> tuple[Tensor, ...]:
    x, needs = call.x, call.needs
    return (
        _contiguous(x, needs[0], x),
        _contiguous(call.weight, needs[1], x),
        _contiguous(call.bias, needs[2], x),
    )


def _add_layer_norm_fwd_outputs(call: AddLayerNormCall) -> tuple[Tensor, ...]:
    y, mean = _normalised(call.residual)
    return y, torch.empty_like(y), mean, torch.empty_like(mean)


def _add_layer_norm_bwd_outputs(call: AddLayerNormBackwardCall) -> tuple[Tensor, ...]:
    z, needs = call.z, call.needs
    return (
        _contiguous(z, needs[0], z, call.x_dtype),
        _contiguous(z, needs[1], z),
        _contiguous(call.x_bias, needs[2], z),
        _contiguous(call.weight, needs[3], z),
        _contiguous(call.bias, needs[4], z),
    )


def _rms_norm_fwd_outputs(call: RmsNormCall) -> tuple[Tensor, ...]:
    return _normalised(call.x)


def _rms_norm_bwd_outputs(call: RmsNormBackwardCall) -> tuple[Tensor, ...]:
    x, needs = call.x, call.needs
    return _contiguous(x, needs[0], x), _contiguous(call.weight, needs[1], x)


def _op(name: str, call_type: Any, results: str, outputs: Any) -> Op:
    public_name, _, direction = name.rpartition("_")
    backward, arguments = direction == "bwd", call_type._fields
    return Op(
        name, call_type, results, outputs, _PACKAGE, _BACKENDS, public_name=public_name,
        data="x_dtype" if "x_dtype" in arguments else "x", is_derivative=backward,
        contiguous=("dy", "dz") if "dz" in arguments else ("dy",) if backward else (),
        batched=_ROWS, dropout=("dropout_p",) if "dropout_p" in arguments else (),
        decomposition="reference" if name.startswith("rms") else "decomposition",
    )  # fmt: skip


layer_norm = differentiable(
    _op(
        "layer_norm_fwd",
        LayerNormCall,
        "Tensor y, Tensor mean, Tensor rstd",
        _layer_norm_fwd_outputs,
    ),
    _op(
        "layer_norm_bwd",
        LayerNormBackwardCall,
        "Tensor dx, Tensor dweight, Tensor dbias",
        _layer_norm_bwd_outputs,
    ),
    reference.layer_norm_bwd,
    forward_maths=reference.layer_norm_fwd,
    gradients={"dx": "x", "dweight": "weight", "dbias": "bias"},
    result_gradients={"y": "dy"},
)

add_layer_norm = differentiable(
    _op(
        "add_layer_norm_fwd",
        AddLayerNormCall,
        "Tensor y, Tensor z, Tensor mean, Tensor rstd",
        _add_layer_norm_fwd_outputs,
    ),
    _op(
        "add_layer_norm_bwd",
        AddLayerNormBackwardCall,
        "Tensor dx, Tensor dresidual, Tensor dx_bias, Tensor dweight, Tensor dbias",
        _add_layer_norm_bwd_outputs,
    ),
    reference.add_layer_norm_bwd,
    forward_maths=reference.add_layer_norm_fwd,
    gradients={
        "dx": "x",
        "dresidual": "residual",
        "dx_bias": "x_bias",
        "dweight": "weight",
        "dbias": "bias",
    },
    result_gradients={"y": "dy", "z": "dz"},
    dtypes={"x_dtype": "x"},
    # Both are the gradient of the sum: the backward writes half as much.
    equal_gradients={("x", "residual"): "dropout_p"},
)

rms_norm = differentiable(
    _op("rms_norm_fwd", RmsNormCall, "Tensor y, Tensor rstd", _rms_norm_fwd_outputs),
    _op("rms_norm_bwd", RmsNormBackwardCall, "Tensor dx, Tensor dweight", _rms_norm_bwd_outputs),
    reference.rms_norm_bwd,
    forward_maths=reference.rms_norm_fwd,
    gradients={"dx": "x", "dweight": "weight"},
    result_gradients={"y": "dy"},
)
