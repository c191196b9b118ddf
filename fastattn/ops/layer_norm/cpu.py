"""The norms on CPU in C++ (csrc/layer_norm): fp32, bf16 and fp16, vectorised, on torch's threads.

The kernels read float parameters and rows with a contiguous last dimension. They convert parameters
of other types into scratch memory; an input of another layout is copied here. Parameter gradients
are summed in two stages: partitions of rows, which do not depend on the number of threads, then
the partitions, whose sums lie in scratch memory too. `..._direct`: the library makes results and
scratch memory itself.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from fastattn.ops import _native

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
def layer_norm_fwd_unsupported(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> str | None:
    return _refusal((x,), (weight, bias))


def layer_norm_fwd_workspace(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> _Workspace:
    return _scratch(x.shape[-1], 0.0, 0, weight, bias)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scratch: Tensor | None = None,
) -> None:
    _library.layer_norm_fwd.default(
        x if x.is_contiguous() else _rows(x), weight, bias, eps, y, mean, rstd, scratch
    )


def layer_norm_fwd_direct(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...] | None:
    if _refusal((x,), (weight, bias)) is None:
        return _library.layer_norm_fwd_direct.default._op(x, weight, bias, eps)
    return None


def layer_norm_bwd_unsupported(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> str | None:
    return _refusal((dy, x), (weight, bias))


def layer_norm_bwd_workspace(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> _Workspace:
    return _scratch(x.shape[-1], 0.0, _partials(x, needs[1] + needs[2]), weight)


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    needs: Sequence[bool],
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    scratch: Tensor | None = None,
) -> None:
    _library.layer_norm_bwd.default(
        dy if dy.is_contiguous() else _rows(dy),
        x if x.is_contiguous() else _rows(x),
        weight,
        mean if mean.is_contiguous() else mean.contiguous(),
        rstd if rstd.is_contiguous() else rstd.contiguous(),
        dx,
        dweight,
        dbias,
        scratch,
    )


def layer_norm_bwd_direct(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor, ...] | None:
    if _refusal((dy, x), (weight, bias)) is None:
        return _library.layer_norm_bwd_direct.default._op(dy, x, weight, bias, mean, rstd, *needs)
    return None


# -- add_layer_norm -------------------------------------------------------------------------------
def add_layer_norm_fwd_unsupported(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    return _refusal((x, residual), (x_bias, weight, bias))


def add_layer_norm_fwd_workspace(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> _Workspace:
    return _scratch(x.shape[-1], dropout_p, 0, x_bias, weight, bias)


def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    y: Tensor,
    z: Tensor,
    mean: Tensor,
    rstd: Tensor,
    scratch: Tensor | None = None,
) -> None:
    _library.add_layer_norm_fwd.default(
        x if x.is_contiguous() else _rows(x),
        residual if residual.is_contiguous() else _rows(residual),
        x_bias,
        weight,
        bias,
        eps,
        dropout_p,
        dropout_seed,
        dropout_stream,
        y,
        z,
        mean,
        rstd,
        scratch,
    )


def add_layer_norm_fwd_direct(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> tuple[Tensor, ...] | None:
    if _refusal((x, residual), (x_bias, weight, bias)) is None:
        return _library.add_layer_norm_fwd_direct.default._op(
            x, residual, x_bias, weight, bias, eps, dropout_p, dropout_seed, dropout_stream
        )
    return None


def add_layer_norm_bwd_unsupported(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> str | None:
    if x_dtype not in _DTYPES:
        return f"has kernels for fp32, bf16 and fp16, got {x_dtype}"
    return _refusal((dy, dz, z), (x_bias, weight, bias))


def add_layer_norm_bwd_workspace(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> _Workspace:
    partials = _partials(z, needs[2] + needs[3] + needs[4])
    return _scratch(z.shape[-1], dropout_p, partials, weight)


def add_layer_norm_bwd(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
    dx: Tensor,
    dresidual: Tensor,
    dx_bias: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    scratch: Tensor | None = None,
) -> None:
    _library.add_layer_norm_bwd.default(
        _optional_rows(dy),
        _optional_rows(dz),
        z if z.is_contiguous() else _rows(z),
        weight,
        mean if mean.is_contiguous() else mean.contiguous(),
        rstd if rstd.is_contiguous() else rstd.contiguous(),
        dropout_p,
        dropout_seed,
        dropout_stream,
        dx,
        dresidual,
        dx_bias,
        dweight,
        dbias,
        scratch,
    )


def add_layer_norm_bwd_direct(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    x_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    x_dtype: torch.dtype,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> tuple[Tensor, ...] | None:
    if x_dtype in _DTYPES and _refusal((dy, dz, z), (x_bias, weight, bias)) is None:
        parameters, dropout = (x_bias, weight, bias), (dropout_p, dropout_seed, dropout_stream)
        return _library.add_layer_norm_bwd_direct.default._op(
            dy, dz, z, *parameters, mean, rstd, x_dtype, *dropout, *needs
        )
    return None


# -- rms_norm -------------------------------------------------------------------------------------
def rms_norm_fwd_unsupported(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    return _refusal((x,), (weight,))


def rms_norm_fwd_workspace(x: Tensor, weight: Tensor | None, eps: float) -> _Workspace:
    return _scratch(x.shape[-1], 0.0, 0, weight)


def rms_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    y: Tensor,
    rstd: Tensor,
    scratch: Tensor | None = None,
) -> None:
    _library.rms_norm_fwd.default(
        x if x.is_contiguous() else _rows(x), weight, eps, y, rstd, scratch
    )


def rms_norm_fwd_direct(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, ...] | None:
    if _refusal((x,), (weight,)) is None:
        return _library.rms_norm_fwd_direct.default._op(x, weight, eps)
    return None


def rms_norm_bwd_unsupported(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, needs: Sequence[bool]
) -> str | None:
    return _refusal((dy, x), (weight,))


def rms_norm_bwd_workspace(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, needs: Sequence[bool]
) -> _Workspace:
    return _scratch(x.shape[-1], 0.0, _partials(x, int(needs[1])), weight)


def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    needs: Sequence[bool],
    dx: Tensor,
    dweight: Tensor,
    scratch: Tensor | None = None,
) -> None:
    _library.rms_norm_bwd.default(
        dy if dy.is_contiguous() else _rows(dy),
        x if x.is_contiguous() else _rows(x),
        weight,
        rstd if rstd.is_contiguous() else rstd.contiguous(),
        dx,
        dweight,
        scratch,
    )


def rms_norm_bwd_direct(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, needs: Sequence[bool]
) -> tuple[Tensor, ...] | None:
    if _refusal((dy, x), (weight,)) is None:
        return _library.rms_norm_bwd_direct.default._op(dy, x, weight, rstd, *needs)
    return None
