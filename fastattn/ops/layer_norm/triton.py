"""The norms in Triton, the portable GPU path: launchers of the kernels in triton_kernels.py.

`norm_fwd` and `norm_bwd` implement all three ops. For each combination of dtypes, row length and
strides, the launches are bound once and cached; a call then passes pointers and the number of rows.
Inputs are copied if their rows are not contiguous or do not have a single stride.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattn.ops import _env
from fastattn.ops._dropout import keep_scale, threshold
from fastattn.ops._triton_launch import DTYPES, BoundLaunch, LaunchCache, too_old
from fastattn.ops.layer_norm.calls import (
    AddLayerNormBackwardCall,
    AddLayerNormCall,
    LayerNormBackwardCall,
    LayerNormCall,
    RmsNormBackwardCall,
    RmsNormCall,
)
from fastattn.ops.layer_norm.config import (
    ALIGNED,
    BackwardConfig,
    ForwardConfig,
    backward_config,
    forward_config,
    multiprocessors,
    row_sums_config,
    sum_config,
)
from fastattn.ops.layer_norm.rows import with_one_stride
from fastattn.ops.layer_norm.triton_kernels import (
    norm_bwd_kernel,
    norm_fwd_kernel,
    norm_fwd_long_kernel,
    norm_row_sums_kernel,
    sum_partials_kernel,
)

_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]

# Column indices are 32-bit, and a block may extend beyond the end of a row.
_LONGEST_ROW = 1 << 30
# CUDA's limit of the first dimension of a grid.
_MAX_PROGRAMS = (1 << 31) - 1


# -- forward and backward -------------------------------------------------------------------------


def _arch(x: Tensor) -> str:
    # get_device() is faster than the attribute `device`.
    return _env.architecture("cuda", x.get_device()) if x.is_cuda else _env.architecture("cpu", 0)


def _optional_rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if x is None else with_one_stride(x)


def _unit(N: int, *strides: int) -> int:
    """The largest power of two up to 16 that divides row length and strides. Kernels get them
    divided by it, so that the compiler sees the alignment.
    """
    bits = N
    for stride in strides:
        bits |= stride
    return min(bits & -bits, 16)


def _parameter(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _why_unsupported(
    activations: Sequence[Tensor | None], parameters: Sequence[Tensor | None]
) -> str | None:
    """Device and row length are those of the last activation."""
    for x in (*activations, *parameters):
        if x is not None and x.dtype not in DTYPES:
            return f"has kernels for float16, bfloat16 and float32, got {x.dtype}"
    x = activations[-1]
    assert x is not None
    if x.shape[-1] > _LONGEST_ROW:
        return f"handles rows of up to {_LONGEST_ROW} elements, got {x.shape[-1]}"
    return too_old(_arch(x))


# -- forward --------------------------------------------------------------------------------------


class _ForwardPlan(NamedTuple):
    launch: BoundLaunch
    ROWS: int
    max_programs: int


_forward_plans = LaunchCache()


def norm_fwd(
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
    *,
    config: ForwardConfig | None = None,
) -> None:
    """Any of the three forwards. z None: no residual is added. mean None: RMS norm.

    config: used instead of `forward_config`'s.
    """
    M, N = rstd.numel(), x.shape[-1]
    if M == 0:
        return
    if N == 0:  # the mean of no elements
        rstd.fill_(float("nan"))
        if mean is not None:
            mean.fill_(float("nan"))
        return
    x, stride_x = with_one_stride(x)
    residual, stride_residual = _optional_rows(residual)
    weight, bias, x_bias = _parameter(weight), _parameter(bias), _parameter(x_bias)
    arch, dropout = _arch(x), dropout_p > 0.0 and z is not None
    key = (
        config, arch, x.get_device(), x.dtype, _dtype(residual), _dtype(x_bias), _dtype(weight),
        _dtype(bias), mean is None, dropout, N, stride_x, stride_residual, M >> 31 > 0,
    )  # fmt: skip
    plan = _forward_plans.get(key)
    if plan is None:
        unit = _unit(N, stride_x, stride_residual)
        c = config or forward_config(arch, N, z is not None, unit >= ALIGNED)
        limit = c.programs * multiprocessors(arch) if c.programs else _MAX_PROGRAMS
        launch = _bind_forward(c, N, (stride_x, stride_residual), unit, dropout)
        plan = _forward_plans.remember(key, _ForwardPlan(launch, c.ROWS, limit))
    programs = min((M - 1) // plan.ROWS + 1, plan.max_programs)
    plan.launch(
        (programs, 1, 1), x, residual, x_bias, weight, bias, dropout_seed if dropout else None, y,
        z, mean, rstd, M, dropout_stream, threshold(dropout_p), keep_scale(dropout_p), eps,
    )  # fmt: skip


def _bind_forward(
    c: ForwardConfig, N: int, strides: tuple[int, int], unit: int, dropout: bool
) -> BoundLaunch:
    scalars = (N // unit, *(stride // unit for stride in strides))
    if c.BLOCK < N:
        constants = {
            "UNIT": unit,
            "DROPOUT": dropout,
            "EXACT": N % c.BLOCK == 0,
            "BLOCK": c.BLOCK,
            "STAGES": c.stages,
        }
        return BoundLaunch(norm_fwd_long_kernel, scalars, constants, **c.options())
    constants = {
        "UNIT": unit,
        "DROPOUT": dropout,
        "EXACT": N == c.BLOCK,
        "ROWS": c.ROWS,
        "BLOCK": c.BLOCK,
        "PARAMETERS": c.parameters,
        "STAGES": c.stages,
    }
    return BoundLaunch(norm_fwd_kernel, scalars, constants, **c.options())


# -- backward -------------------------------------------------------------------------------------


class _BackwardPlan(NamedTuple):
    """row_sums: only for long rows. total: only for gradients of parameters."""

    config: BackwardConfig
    main: BoundLaunch
    row_sums: BoundLaunch | None
    total: BoundLaunch | None


_backward_plans = LaunchCache()


def _row_blocks(c: BackwardConfig, N: int) -> int:
    """The number of column blocks of a row, each computed by another program."""
    return c.ROW_BLOCKS or -(-N // c.BLOCK)


def _lines(c: BackwardConfig, arch: str, M: int, N: int) -> int:
    """Programs per block of columns; each loops over rows and writes a line of partial sums."""
    programs = c.programs * multiprocessors(arch) // _row_blocks(c, N)
    return min((M - 1) // c.ROWS + 1, max(1, programs))


def norm_bwd_config(dy: Tensor | None, dz: Tensor | None, z: Tensor, sums: int) -> BackwardConfig:
    """The default config. sums: the number of parameters that need a gradient."""
    tensors, N = 2 * (dy is not None) + (dz is not None), z.shape[-1]
    return backward_config(
        _arch(z), N, z.element_size(), max(1, tensors), sums, _unit(N) >= ALIGNED
    )


def norm_bwd_workspace(c: BackwardConfig, z: Tensor, sums: int) -> _Workspace:
    """Partial sums of the parameter gradients and, for long rows, the sums along rows."""
    if z.numel() == 0:
        return [((0,), torch.float32, False)]
    N = z.shape[-1]
    M = z.numel() // N
    lines = _lines(c, _arch(z), M, N) if sums else 0
    partials = (sums, lines, N), torch.float32, False
    return [partials] if c.ROW_BLOCKS else [partials, ((2, M), torch.float32, False)]


def norm_bwd(
    dy: Tensor | None,
    dz: Tensor | None,
    z: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    dx: Tensor | None,
    dresidual: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dx_bias: Tensor | None,
    partials: Tensor,
    row_sums: Tensor | None = None,
    *,
    config: BackwardConfig | None = None,
) -> None:
    """Any of the three backwards; results that are None are not computed. z: the input of the norm.

    partials, row_sums: the workspace of `norm_bwd_workspace` for `config`, or the default config.
    """
    gradients = [g for g in (dweight, dbias, dx_bias) if g is not None]
    M, N = rstd.numel(), z.shape[-1]
    if z.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return
    if not gradients and dx is None and dresidual is None:
        return
    dy, stride_dy = _optional_rows(dy)
    dz, stride_dz = _optional_rows(dz)
    z, stride_z = with_one_stride(z)
    weight, mean, rstd = _parameter(weight), _parameter(mean), rstd.contiguous()
    arch, dropout = _arch(z), dropout_p > 0.0
    key = (
        config, arch, z.get_device(), z.dtype, _dtype(dy), _dtype(dz), _dtype(weight), mean is None,
        _dtype(dx), _dtype(dresidual), _dtype(dweight), _dtype(dbias), _dtype(dx_bias), dropout, N,
        stride_dy, stride_dz, stride_z, M >> 31 > 0,
    )  # fmt: skip
    plan = _backward_plans.get(key)
    if plan is None:
        c = config or norm_bwd_config(dy, dz, z, len(gradients))
        needed = (dweight is not None, dbias is not None, dx_bias is not None)
        strides = (stride_dy, stride_dz, stride_z)
        plan = _bind_backward(c, arch, N, strides, needed, dropout, dy is not None)
        _backward_plans.remember(key, plan)
    lines = _lines(plan.config, arch, M, N)
    if plan.row_sums is not None:
        plan.row_sums((M, 1, 1), dy, z, weight, mean, rstd, row_sums, M)
    plan.main(
        (lines * _row_blocks(plan.config, N), 1, 1),
        dy, dz, z, weight, mean, rstd, row_sums if plan.row_sums is not None else None,
        dropout_seed if dropout else None, dx, dresidual, partials if gradients else None, M,
        dropout_stream, threshold(dropout_p), keep_scale(dropout_p),
    )  # fmt: skip
    if plan.total is not None:
        blocks = -(-N // plan.total.constants["BLOCK"])
        plan.total((blocks, len(gradients), 1), partials, dweight, dbias, dx_bias, lines)


def _bind_backward(
    c: BackwardConfig,
    arch: str,
    N: int,
    strides: tuple[int, int, int],
    needed: tuple[bool, bool, bool],
    dropout: bool,
    has_dy: bool,
) -> _BackwardPlan:
    """needed: the gradients of weight, bias and x_bias."""
    unit = _unit(N, *strides)
    stride_dy, stride_dz, stride_z = (stride // unit for stride in strides)
    constants = {
        "UNIT": unit,
        "DWEIGHT": needed[0],
        "DBIAS": needed[1],
        "DX_BIAS": needed[2],
        "DROPOUT": dropout,
        "EXACT": N % c.BLOCK == 0 and N // c.BLOCK == _row_blocks(c, N),
        "ROWS": c.ROWS,
        "BLOCK": c.BLOCK,
        "ROW_BLOCKS": c.ROW_BLOCKS,
        "KEEP_WEIGHT": c.keep_weight,
        "STAGES": c.stages,
    }
    scalars = (N // unit, stride_dy, stride_dz, stride_z)
    main = BoundLaunch(norm_bwd_kernel, scalars, constants, **c.options())
    row_sums = total = None
    if c.ROW_BLOCKS == 0 and has_dy:
        tile = row_sums_config(arch)
        constants = {"UNIT": unit, "EXACT": N % tile.BLOCK == 0, "BLOCK": tile.BLOCK}
        lengths = (N // unit, stride_dy, stride_z)
        row_sums = BoundLaunch(norm_row_sums_kernel, lengths, constants, **tile.options())
    if any(needed):
        tile = sum_config(arch, N)
        constants = {"UNIT": _unit(N), "LINES": tile.LINES, "BLOCK": tile.BLOCK}
        total = BoundLaunch(sum_partials_kernel, (N // _unit(N),), constants, **tile.options())
    return _BackwardPlan(c, main, row_sums, total)


# -- layer_norm -----------------------------------------------------------------------------------


def layer_norm_fwd_unsupported(call: LayerNormCall) -> str | None:
    return _why_unsupported((call.x,), (call.weight, call.bias))


def layer_norm_fwd(call: LayerNormCall, y: Tensor, mean: Tensor, rstd: Tensor) -> None:
    x, weight, bias, eps = call
    norm_fwd(x, None, None, weight, bias, eps, 0.0, None, 0, y, None, mean, rstd)


def layer_norm_bwd_unsupported(call: LayerNormBackwardCall) -> str | None:
    return _why_unsupported((call.dy, call.x), (call.weight, call.bias))


def layer_norm_bwd_workspace(call: LayerNormBackwardCall) -> _Workspace:
    dy, x, weight, bias, _, _, _, needs = call
    sums = (needs[1] and weight is not None) + (needs[2] and bias is not None)
    return norm_bwd_workspace(norm_bwd_config(dy, None, x, sums), x, sums)


def layer_norm_bwd(
    call: LayerNormBackwardCall, dx: Tensor, dweight: Tensor, dbias: Tensor, *workspace: Tensor
) -> None:
    dy, x, weight, bias, mean, rstd, _, needs = call
    norm_bwd(
        dy, None, x, weight, mean, rstd, 0.0, None, 0,
        dx if needs[0] else None, None,
        dweight if needs[1] and weight is not None else None,
        dbias if needs[2] and bias is not None else None, None, *workspace,
    )  # fmt: skip


# -- add_layer_norm -------------------------------------------------------------------------------


def add_layer_norm_fwd_unsupported(call: AddLayerNormCall) -> str | None:
    return _why_unsupported((call.x, call.residual), (call.x_bias, call.weight, call.bias))


def add_layer_norm_fwd(
    call: AddLayerNormCall, y: Tensor, z: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    norm_fwd(*call, y, z, mean, rstd)


def add_layer_norm_bwd_unsupported(call: AddLayerNormBackwardCall) -> str | None:
    if call.x_dtype not in DTYPES:
        return f"has kernels for float16, bfloat16 and float32, got {call.x_dtype}"
    return _why_unsupported((call.dy, call.dz, call.z), (call.x_bias, call.weight, call.bias))


def _add_sums(call: AddLayerNormBackwardCall) -> tuple[bool, bool, bool]:
    """Whether the gradients of x_bias, weight and bias are needed."""
    needs = call.needs
    return (
        needs[2] and call.x_bias is not None,
        needs[3] and call.weight is not None,
        needs[4] and call.bias is not None,
    )


def add_layer_norm_bwd_workspace(call: AddLayerNormBackwardCall) -> _Workspace:
    z, sums = call.z, sum(_add_sums(call))
    return norm_bwd_workspace(norm_bwd_config(call.dy, call.dz, z, sums), z, sums)


def add_layer_norm_bwd(
    call: AddLayerNormBackwardCall,
    dx: Tensor,
    dresidual: Tensor,
    dx_bias: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    *workspace: Tensor,
) -> None:
    dy, dz, z, _, weight, _, mean, rstd, _, _, dropout_p, seed, stream, needs = call
    sums = _add_sums(call)
    norm_bwd(
        dy, dz, z, weight, mean, rstd, dropout_p, seed, stream,
        dx if needs[0] else None, dresidual if needs[1] else None,
        dweight if sums[1] else None, dbias if sums[2] else None, dx_bias if sums[0] else None,
        *workspace,
    )  # fmt: skip


# -- rms_norm -------------------------------------------------------------------------------------


def rms_norm_fwd_unsupported(call: RmsNormCall) -> str | None:
    return _why_unsupported((call.x,), (call.weight,))


def rms_norm_fwd(call: RmsNormCall, y: Tensor, rstd: Tensor) -> None:
    x, weight, eps = call
    norm_fwd(x, None, None, weight, None, eps, 0.0, None, 0, y, None, None, rstd)


def rms_norm_bwd_unsupported(call: RmsNormBackwardCall) -> str | None:
    return _why_unsupported((call.dy, call.x), (call.weight,))


def rms_norm_bwd_workspace(call: RmsNormBackwardCall) -> _Workspace:
    sums = int(call.needs[1] and call.weight is not None)
    return norm_bwd_workspace(norm_bwd_config(call.dy, None, call.x, sums), call.x, sums)


def rms_norm_bwd(
    call: RmsNormBackwardCall, dx: Tensor, dweight: Tensor, *workspace: Tensor
) -> None:
    dy, x, weight, rstd, _, needs = call
    norm_bwd(
        dy, None, x, weight, None, rstd, 0.0, None, 0,
        dx if needs[0] else None, None,
        dweight if needs[1] and weight is not None else None, None, None, *workspace,
    )  # fmt: skip
