"""The norms on CPU in C++ (csrc/layer_norm): fp32, bf16 and fp16, vectorised, on torch's threads.

The kernels read float parameters and rows with a contiguous last dimension. They convert parameters
of other types into scratch memory; an input of another layout is copied here. Parameter gradients
are summed in two stages: partitions of rows, which do not depend on the number of threads, then
the partitions, whose sums lie in scratch memory too. `..._direct`: the library makes results and
scratch memory itself.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _native
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormBackwardCall,
    RmsNormCall,
)

_library = torch.ops.fastattn_cpu
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]

# Rows that share a partial sum of the parameter gradients: enough to make the second stage cheap.
# The same two numbers as in binding_cpu.cpp.
_PARTITION_ROWS = 32
_MAX_PARTITIONS = 64


def unavailable() -> str | None:
    return _native.unavailable("cpu")


# -- layout and memory ----------------------------------------------------------------------------
def _rows(x: Tensor) -> Tensor:
    """x, or a copy where its rows need more than two strides or are not contiguous themselves."""
    sizes, strides = x.shape, x.stride()
    if strides[-1] != 1 and sizes[-1] > 1:
        return x.contiguous()
    leading = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    leading = leading[:-1] if sizes[-1] != 1 else leading
    breaks = sum(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(leading))
    return x if breaks <= 1 else x.contiguous()


def _optional_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else _rows(x)


def _scratch(
    columns: int, dropout_p: float, partials: int, *parameters: Tensor | None
) -> _Workspace:
    """Room for partial sums, parameters converted to fp32, the hashed columns of the dropout."""
    floats = partials
    for parameter in parameters:
        if parameter is not None and parameter.dtype is not torch.float32:
            floats += columns
    if dropout_p > 0.0:
        floats += (columns + 3) // 4
    return [((floats,), torch.float32, False)] if floats else []


def _partials(z: Tensor, wanted: int) -> int:
    """Elements of the partial sums of the parameter gradients: [partitions, wanted, columns]."""
    columns = z.shape[-1]
    if not wanted or not columns:
        return 0
    rows = z.numel() // columns
    return min(-(-rows // _PARTITION_ROWS), _MAX_PARTITIONS) * wanted * columns


def _refusal(
    activations: Sequence[Tensor | None], parameters: Sequence[Tensor | None]
) -> str | None:
    for tensor in activations:
        if tensor is not None and tensor.dtype not in _DTYPES:
            return f"has kernels for fp32, bf16 and fp16, got {tensor.dtype}"
    for parameter in parameters:
        if parameter is not None:
            if parameter.dtype not in _DTYPES:
                return f"has kernels for fp32, bf16 and fp16, got {parameter.dtype}"
            if not parameter.is_contiguous():
                return f"needs contiguous parameters, got strides {parameter.stride()}"
    return _native.unavailable("cpu")


# -- layer_norm -----------------------------------------------------------------------------------
def layer_norm_fwd_unsupported(call: LayerNormCall) -> str | None:
    return _refusal((call.x,), (call.weight, call.bias))


def layer_norm_fwd_workspace(call: LayerNormCall) -> _Workspace:
    return _scratch(call.x.shape[-1], 0.0, 0, call.weight, call.bias)


def layer_norm_fwd(
    call: LayerNormCall, y: Tensor, mean: Tensor, rstd: Tensor, scratch: Tensor | None = None
) -> None:
    x, weight, bias, eps = call
    _library.layer_norm_fwd.default._op(
        x if x.is_contiguous() else _rows(x), weight, bias, eps, y, mean, rstd, scratch
    )


def layer_norm_fwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    x, weight, bias, _ = args
    if _refusal((x,), (weight, bias)) is None:
        return _library.layer_norm_fwd_direct.default._op(*args)
    return None


def layer_norm_bwd_unsupported(call: LayerNormBackwardCall) -> str | None:
    return _refusal((call.dy, call.x), (call.weight, call.bias))


def layer_norm_bwd_workspace(call: LayerNormBackwardCall) -> _Workspace:
    x, needs = call.x, call.needs
    return _scratch(x.shape[-1], 0.0, _partials(x, needs[1] + needs[2]), call.weight)


def layer_norm_bwd(
    call: LayerNormBackwardCall,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    scratch: Tensor | None = None,
) -> None:
    dy, x, weight, _, mean, rstd, _, _ = call
    _library.layer_norm_bwd.default._op(
        dy if dy.is_contiguous() else _rows(dy), x if x.is_contiguous() else _rows(x), weight,
        mean if mean.is_contiguous() else mean.contiguous(),
        rstd if rstd.is_contiguous() else rstd.contiguous(), dx, dweight, dbias, scratch,
    )  # fmt: skip


def layer_norm_bwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    dy, x, weight, bias, mean, rstd, _, needs = args
    if _refusal((dy, x), (weight, bias)) is None:
        return _library.layer_norm_bwd_direct.default._op(dy, x, weight, bias, mean, rstd, *needs)
    return None


# -- add_layer_norm -------------------------------------------------------------------------------
def add_layer_norm_fwd_unsupported(call: AddLayerNormCall) -> str | None:
    return _refusal((call.x, call.residual), (call.x_bias, call.weight, call.bias))


def add_layer_norm_fwd_workspace(call: AddLayerNormCall) -> _Workspace:
    parameters = call.x_bias, call.weight, call.bias
    return _scratch(call.x.shape[-1], call.dropout_p, 0, *parameters)


def add_layer_norm_fwd(
    call: AddLayerNormCall,
    y: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scratch: Tensor | None = None,
) -> None:
    # A name for each: gathering the others in a list takes longer.
    x, residual, x_bias, weight, bias, eps, dropout_p, seed, stream = call
    _library.add_layer_norm_fwd.default._op(
        x if x.is_contiguous() else _rows(x),
        residual if residual.is_contiguous() else _rows(residual), x_bias, weight, bias, eps,
        dropout_p, seed, stream, y, z, mean, rstd, scratch,
    )  # fmt: skip


def add_layer_norm_fwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    x, residual, x_bias, weight, bias, _, _, _, _ = args
    if _refusal((x, residual), (x_bias, weight, bias)) is None:
        return _library.add_layer_norm_fwd_direct.default._op(*args)
    return None


def add_layer_norm_bwd_unsupported(call: AddLayerNormBackwardCall) -> str | None:
    if call.x_dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {call.x_dtype}"
    return _refusal((call.dy, call.dz, call.z), (call.x_bias, call.weight, call.bias))


def add_layer_norm_bwd_workspace(call: AddLayerNormBackwardCall) -> _Workspace:
    z, needs = call.z, call.needs
    partials = _partials(z, needs[2] + needs[3] + needs[4])
    return _scratch(z.shape[-1], call.dropout_p, partials, call.weight)


def add_layer_norm_bwd(
    call: AddLayerNormBackwardCall,
    dx: Tensor,
    dresidual: Tensor,
    dx_bias: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    scratch: Tensor | None = None,
) -> None:
    dy, dz, z, _, weight, _, mean, rstd, _, _, dropout_p, seed, stream, _ = call
    _library.add_layer_norm_bwd.default._op(
        _optional_rows(dy), _optional_rows(dz), z if z.is_contiguous() else _rows(z), weight,
        mean if mean.is_contiguous() else mean.contiguous(),
        rstd if rstd.is_contiguous() else rstd.contiguous(), dropout_p, seed, stream, dx, dresidual,
        dx_bias, dweight, dbias, scratch,
    )  # fmt: skip


def add_layer_norm_bwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    dy, dz, z, x_bias, weight, bias, mean, rstd, _, x_dtype, *dropout, needs = args
    if x_dtype in _DTYPES and _refusal((dy, dz, z), (x_bias, weight, bias)) is None:
        return _library.add_layer_norm_bwd_direct.default._op(
            dy, dz, z, x_bias, weight, bias, mean, rstd, x_dtype, *dropout, *needs
        )
    return None


# -- rms_norm -------------------------------------------------------------------------------------
def rms_norm_fwd_unsupported(call: RmsNormCall) -> str | None:
    return _refusal((call.x,), (call.weight,))


def rms_norm_fwd_workspace(call: RmsNormCall) -> _Workspace:
    return _scratch(call.x.shape[-1], 0.0, 0, call.weight)


def rms_norm_fwd(call: RmsNormCall, y: Tensor, rstd: Tensor, scratch: Tensor | None = None) -> None:
    x, weight, eps = call
    _library.rms_norm_fwd.default._op(
        x if x.is_contiguous() else _rows(x), weight, eps, y, rstd, scratch
    )


def rms_norm_fwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    x, weight, _ = args
    if _refusal((x,), (weight,)) is None:
        return _library.rms_norm_fwd_direct.default._op(*args)
    return None


def rms_norm_bwd_unsupported(call: RmsNormBackwardCall) -> str | None:
    return _refusal((call.dy, call.x), (call.weight,))


def rms_norm_bwd_workspace(call: RmsNormBackwardCall) -> _Workspace:
    x = call.x
    return _scratch(x.shape[-1], 0.0, _partials(x, int(call.needs[1])), call.weight)


def rms_norm_bwd(
    call: RmsNormBackwardCall, dx: Tensor, dweight: Tensor, scratch: Tensor | None = None
) -> None:
    dy, x, weight, rstd, _, _ = call
    _library.rms_norm_bwd.default._op(
        dy if dy.is_contiguous() else _rows(dy), x if x.is_contiguous() else _rows(x), weight,
        rstd if rstd.is_contiguous() else rstd.contiguous(), dx, dweight, scratch,
    )  # fmt: skip


def rms_norm_bwd_direct(*args: Any) -> tuple[Tensor, ...] | None:
    dy, x, weight, rstd, _, needs = args
    if _refusal((dy, x), (weight,)) is None:
        return _library.rms_norm_bwd_direct.default._op(dy, x, weight, rstd, *needs)
    return None
