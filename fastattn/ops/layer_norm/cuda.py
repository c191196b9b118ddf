"""The norms in CUDA C++ (csrc/layer_norm): fp32, bf16, fp16, on NVIDIA GPUs of compute capability
8.0 and newer.

The library's kernels take rows of a single stride and parameters of one dtype, that of the rows or
fp32: other inputs are copied or converted here. It plans the workspace of the backward.
"""

from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _env, _native
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormBackwardCall,
    RmsNormCall,
)
from fastattn.ops.layer_norm.rows import with_one_stride

_library = torch.ops.fastattn_cuda
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_COLUMNS = 1 << 30  # column indices are 32-bit


def unavailable() -> str | None:
    return _native.unavailable("cuda")


# -- unsupported calls ----------------------------------------------------------------------------
def _why_unsupported(x: Tensor, *others: Tensor | torch.dtype | None) -> str | None:
    """x: its rows are as long as those of all others."""
    for other in (x, *others):
        dtype = other.dtype if isinstance(other, Tensor) else other
        if dtype is not None and dtype not in _DTYPES:
            return f"has kernels for fp32, bf16 and fp16, got {dtype}"
    if x.shape[-1] > _MAX_COLUMNS:
        return f"handles rows of up to {_MAX_COLUMNS} elements, got {x.shape[-1]}"
    return unavailable()


def layer_norm_fwd_unsupported(call: LayerNormCall) -> str | None:
    return _why_unsupported(call.x, call.weight, call.bias)


def layer_norm_bwd_unsupported(call: LayerNormBackwardCall) -> str | None:
    return _why_unsupported(call.x, call.weight, call.bias)


def add_layer_norm_fwd_unsupported(call: AddLayerNormCall) -> str | None:
    return _why_unsupported(call.residual, call.x, call.x_bias, call.weight, call.bias)


def add_layer_norm_bwd_unsupported(call: AddLayerNormBackwardCall) -> str | None:
    return _why_unsupported(call.z, call.x_dtype, call.x_bias, call.weight, call.bias)


def rms_norm_fwd_unsupported(call: RmsNormCall) -> str | None:
    return _why_unsupported(call.x, call.weight)


def rms_norm_bwd_unsupported(call: RmsNormBackwardCall) -> str | None:
    return _why_unsupported(call.x, call.weight)


# -- any of the three ------------------------------------------------------------------------------
def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else with_one_stride(x)[0]


def _parameters(dtype: torch.dtype, *given: Tensor | None) -> list[Tensor | None]:
    """In the dtype of the rows if all of them are, else in fp32."""
    if any(x is not None and x.dtype is not dtype for x in given):
        dtype = torch.float32
    return [None if x is None else x.to(dtype).contiguous() for x in given]


def _norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    y: Tensor,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
) -> None:
    """residual and z None: nothing is added. mean None: RMS norm."""
    if y.numel() == 0:
        for statistic in (mean, rstd):
            if statistic is not None:
                statistic.fill_(torch.nan)  # those of no elements
        return
    x_bias, weight, bias = _parameters(y.dtype, x_bias, weight, bias)
    _library.norm_fwd.default(
        _rows(x), _rows(residual), x_bias, weight, bias, eps, dropout_p, dropout_seed,
        dropout_stream, y, z, mean, rstd,
    )  # fmt: skip


def _norm_bwd(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dropout: tuple[float, Tensor | None, int],
    dx: Tensor | None,
    dsum: Tensor | None,
    *parameter_gradients: Tensor | None,
) -> None:
    """z: the input of the norm. dx: the gradient of what was added to it, after dropout; dsum: that
    of z. parameter_gradients: of weight, bias and x_bias. Those that are None are not computed.
    """
    if z.numel() == 0:
        for gradient in parameter_gradients:
            if gradient is not None:
                gradient.zero_()
        return
    if all(gradient is None for gradient in (dx, dsum, *parameter_gradients)):
        return
    [weight] = _parameters(z.dtype, weight)
    _native.call_with_workspace(
        _library.norm_bwd.default, z.device, _rows(dy), _rows(dz), _rows(z), weight,
        None if mean is None else mean.contiguous(), rstd.contiguous(), *dropout, dx, dsum,
        *parameter_gradients,
        _env.multiprocessors(z.device.type, z.device.index or 0),
    )  # fmt: skip


def _wanted(gradient: Tensor, needed: bool, like: Any = True) -> Tensor | None:
    return gradient if needed and like is not None else None


_NO_DROPOUT = (0.0, None, 0)


# -- layer_norm -----------------------------------------------------------------------------------
def layer_norm_fwd(call: LayerNormCall, y: Tensor, mean: Tensor, rstd: Tensor) -> None:
    x, weight, bias, eps = call
    _norm_fwd(x, None, None, weight, bias, eps, *_NO_DROPOUT, y, None, mean, rstd)


def layer_norm_bwd(call: LayerNormBackwardCall, dx: Tensor, dweight: Tensor, dbias: Tensor) -> None:
    dy, x, weight, bias, mean, rstd, _, needs = call
    _norm_bwd(
        dy, None, x, weight, mean, rstd, _NO_DROPOUT, None, _wanted(dx, needs[0]),
        _wanted(dweight, needs[1], weight), _wanted(dbias, needs[2], bias), None,
    )  # fmt: skip


# -- add_layer_norm -------------------------------------------------------------------------------
def add_layer_norm_fwd(
    call: AddLayerNormCall, y: Tensor, z: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    _norm_fwd(*call, y, z, mean, rstd)


def add_layer_norm_bwd(
    call: AddLayerNormBackwardCall,
    dx: Tensor,
    dresidual: Tensor,
    dx_bias: Tensor,
    dweight: Tensor,
    dbias: Tensor,
) -> None:
    dy, dz, z, x_bias, weight, bias, mean, rstd, _, _, dropout_p, seed, stream, needs = call
    _norm_bwd(
        dy, dz, z, weight, mean, rstd, (dropout_p, seed, stream), _wanted(dx, needs[0]),
        _wanted(dresidual, needs[1]), _wanted(dweight, needs[3], weight),
        _wanted(dbias, needs[4], bias), _wanted(dx_bias, needs[2], x_bias),
    )  # fmt: skip


# -- rms_norm -------------------------------------------------------------------------------------
def rms_norm_fwd(call: RmsNormCall, y: Tensor, rstd: Tensor) -> None:
    x, weight, eps = call
    _norm_fwd(x, None, None, weight, None, eps, *_NO_DROPOUT, y, None, None, rstd)


def rms_norm_bwd(call: RmsNormBackwardCall, dx: Tensor, dweight: Tensor) -> None:
    dy, x, weight, rstd, _, needs = call
    _norm_bwd(
        dy, None, x, weight, None, rstd, _NO_DROPOUT, None, _wanted(dx, needs[0]),
        _wanted(dweight, needs[1], weight), None, None,
    )  # fmt: skip
