"""The norms in Triton, the portable GPU path: launchers of the kernels in triton_kernels.py.

`norm_fwd` and `norm_bwd` serve the three ops. What follows from dtypes, row length and strides is
worked out once per combination and remembered as bound launches; a call then passes pointers and
the number of rows. Rows that are not one stride apart, or not contiguous themselves, are copied.
"""

from collections.abc import Sequence
from itertools import pairwise
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
    cores,
    forward_config,
    row_sums_config,
    sum_config,
)
from fastattn.ops.layer_norm.triton_kernels import (
    norm_bwd_kernel,
    norm_fwd_kernel,
    norm_fwd_long_kernel,
    norm_row_sums_kernel,
    sum_partials_kernel,
)

_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]

# Columns are counted in 32 bits, with room for a block beyond the end.
_LONGEST_ROW = 1 << 30
# CUDA's limit on programs along the first dimension of a grid.
_MOST_PROGRAMS = (1 << 31) - 1


# -- what both directions need --------------------------------------------------------------------


def _arch(x: Tensor) -> str:
    # get_device() is quicker than the device itself, and -1 on a CPU.
    return _env.architecture("cuda", x.get_device()) if x.is_cuda else _env.architecture("cpu", 0)


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x, or a copy where one number does not say how far apart its rows are; and that number."""
    N = x.shape[-1]
    if x.is_contiguous():
        return x, N
    if x.stride(-1) == 1 or N == 1:
        pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
        leading = [(size, stride) for size, stride in pairs if size != 1]
        if all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(leading)):
            return x, leading[-1][1] if leading else N
    return x.contiguous(), N


def _optional_rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if x is None else _rows(x)


def _unit(N: int, *strides: int) -> int:
    """What row length and strides are divided by for the kernels, whose compiler then sees how many
    elements lie behind one aligned address: the largest power of two up to 16.
    """
    together = N
    for stride in strides:
        together |= stride
    return min(together & -together, 16)


def _parameter(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.contiguous()


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


def _refusal(
    activations: Sequence[Tensor | None], parameters: Sequence[Tensor | None]
) -> str | None:
    """Of the last activation's device and row length."""
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
    most_programs: int


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
    """Any of the forwards: z None adds no residual, mean None does not centre.

    config: a tiling to use instead of the shipped one.
    """
    M, N = rstd.numel(), x.shape[-1]
    if M == 0:
        return
    if N == 0:  # the mean of nothing
        rstd.fill_(float("nan"))
        if mean is not None:
            mean.fill_(float("nan"))
        return
    x, stride_x = _rows(x)
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
        most = c.programs * cores(arch) if c.programs else _MOST_PROGRAMS
        launch = _bind_forward(c, N, (stride_x, stride_residual), unit, dropout)
        plan = _forward_plans.remember(key, _ForwardPlan(launch, c.ROWS, most))
    programs = min((M - 1) // plan.ROWS + 1, plan.most_programs)
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
    """row_sums: where rows are long. total: where a parameter wants its gradient."""

    config: BackwardConfig
    walk: BoundLaunch
    row_sums: BoundLaunch | None
    total: BoundLaunch | None


_backward_plans = LaunchCache()


def _parts(c: BackwardConfig, N: int) -> int:
    """Programs that share a row."""
    return c.PARTS or -(-N // c.BLOCK)


def _lines(c: BackwardConfig, arch: str, M: int, N: int) -> int:
    """Programs that loop over tiles of the same columns, and write a line of partial sums each."""
    return min((M - 1) // c.ROWS + 1, max(1, c.programs * cores(arch) // _parts(c, N)))


def norm_bwd_config(dy: Tensor | None, dz: Tensor | None, z: Tensor, sums: int) -> BackwardConfig:
    """The shipped tiling. sums: how many parameters want their gradient."""
    tensors, N = 2 * (dy is not None) + (dz is not None), z.shape[-1]
    return backward_config(
        _arch(z), N, z.element_size(), max(1, tensors), sums, _unit(N) >= ALIGNED
    )


def norm_bwd_workspace(c: BackwardConfig, z: Tensor, sums: int) -> _Workspace:
    """Partial sums of the parameter gradients, one behind the other, and sums along long rows."""
    if z.numel() == 0:
        return [((0,), torch.float32, False)]
    N = z.shape[-1]
    M = z.numel() // N
    lines = _lines(c, _arch(z), M, N) if sums else 0
    pieces: _Workspace = [((sums, lines, N), torch.float32, False)]
    return pieces if c.PARTS else [*pieces, ((2, M), torch.float32, False)]


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
    """Any of the backwards; results that are None are not wanted. z is what was normalised.

    partials, row_sums: of `norm_bwd_workspace` for the same config, by default the shipped one.
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
    z, stride_z = _rows(z)
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
        wanted = (dweight is not None, dbias is not None, dx_bias is not None)
        strides = (stride_dy, stride_dz, stride_z)
        plan = _bind_backward(c, arch, N, strides, wanted, dropout, dy is not None)
        _backward_plans.remember(key, plan)
    lines = _lines(plan.config, arch, M, N)
    if plan.row_sums is not None:
        plan.row_sums((M, 1, 1), dy, z, weight, mean, rstd, row_sums, M)
    plan.walk(
        (lines * _parts(plan.config, N), 1, 1),
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
    wanted: tuple[bool, bool, bool],
    dropout: bool,
    normalised: bool,
) -> _BackwardPlan:
    """wanted: gradients of weight, bias and x_bias. normalised: dy is given."""
    unit = _unit(N, *strides)
    stride_dy, stride_dz, stride_z = (stride // unit for stride in strides)
    constants = {
        "UNIT": unit,
        "DWEIGHT": wanted[0],
        "DBIAS": wanted[1],
        "DX_BIAS": wanted[2],
        "DROPOUT": dropout,
        "EXACT": N % c.BLOCK == 0 and N // c.BLOCK == _parts(c, N),
        "ROWS": c.ROWS,
        "BLOCK": c.BLOCK,
        "PARTS": c.PARTS,
        "KEEP_WEIGHT": c.keep_weight,
        "STAGES": c.stages,
    }
    scalars = (N // unit, stride_dy, stride_dz, stride_z)
    walk = BoundLaunch(norm_bwd_kernel, scalars, constants, **c.options())
    row_sums = total = None
    if c.PARTS == 0 and normalised:
        tile = row_sums_config(arch)
        constants = {"UNIT": unit, "EXACT": N % tile.BLOCK == 0, "BLOCK": tile.BLOCK}
        lengths = (N // unit, stride_dy, stride_z)
        row_sums = BoundLaunch(norm_row_sums_kernel, lengths, constants, **tile.options())
    if any(wanted):
        tile = sum_config(arch, N)
        constants = {"UNIT": _unit(N), "LINES": tile.LINES, "BLOCK": tile.BLOCK}
        total = BoundLaunch(sum_partials_kernel, (N // _unit(N),), constants, **tile.options())
    return _BackwardPlan(c, walk, row_sums, total)


# -- layer_norm -----------------------------------------------------------------------------------


def layer_norm_fwd_unsupported(call: LayerNormCall) -> str | None:
    return _refusal((call.x,), (call.weight, call.bias))


def layer_norm_fwd(call: LayerNormCall, y: Tensor, mean: Tensor, rstd: Tensor) -> None:
    x, weight, bias, eps = call
    norm_fwd(x, None, None, weight, bias, eps, 0.0, None, 0, y, None, mean, rstd)


def layer_norm_bwd_unsupported(call: LayerNormBackwardCall) -> str | None:
    return _refusal((call.dy, call.x), (call.weight, call.bias))


def layer_norm_bwd_workspace(call: LayerNormBackwardCall) -> _Workspace:
    dy, x, weight, bias, _, _, _, needs = call
    sums = (needs[1] and weight is not None) + (needs[2] and bias is not None)
    return norm_bwd_workspace(norm_bwd_config(dy, None, x, sums), x, sums)


def layer_norm_bwd(
    call: LayerNormBackwardCall, dx: Tensor, dweight: Tensor, dbias: Tensor, *scratch: Tensor
) -> None:
    dy, x, weight, bias, mean, rstd, _, needs = call
    norm_bwd(
        dy, None, x, weight, mean, rstd, 0.0, None, 0,
        dx if needs[0] else None, None,
        dweight if needs[1] and weight is not None else None,
        dbias if needs[2] and bias is not None else None, None, *scratch,
    )  # fmt: skip


# -- add_layer_norm -------------------------------------------------------------------------------


def add_layer_norm_fwd_unsupported(call: AddLayerNormCall) -> str | None:
    return _refusal((call.x, call.residual), (call.x_bias, call.weight, call.bias))


def add_layer_norm_fwd(
    call: AddLayerNormCall, y: Tensor, z: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    norm_fwd(*call, y, z, mean, rstd)


def add_layer_norm_bwd_unsupported(call: AddLayerNormBackwardCall) -> str | None:
    if call.x_dtype not in DTYPES:
        return f"has kernels for float16, bfloat16 and float32, got {call.x_dtype}"
    return _refusal((call.dy, call.dz, call.z), (call.x_bias, call.weight, call.bias))


def _add_sums(call: AddLayerNormBackwardCall) -> tuple[bool, bool, bool]:
    """Whether x_bias, weight and bias want their gradients."""
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
    *scratch: Tensor,
) -> None:
    dy, dz, z, _, weight, _, mean, rstd, _, _, dropout_p, seed, stream, needs = call
    sums = _add_sums(call)
    norm_bwd(
        dy, dz, z, weight, mean, rstd, dropout_p, seed, stream,
        dx if needs[0] else None, dresidual if needs[1] else None,
        dweight if sums[1] else None, dbias if sums[2] else None, dx_bias if sums[0] else None,
        *scratch,
    )  # fmt: skip


# -- rms_norm -------------------------------------------------------------------------------------


def rms_norm_fwd_unsupported(call: RmsNormCall) -> str | None:
    return _refusal((call.x,), (call.weight,))


def rms_norm_fwd(call: RmsNormCall, y: Tensor, rstd: Tensor) -> None:
    x, weight, eps = call
    norm_fwd(x, None, None, weight, None, eps, 0.0, None, 0, y, None, None, rstd)


def rms_norm_bwd_unsupported(call: RmsNormBackwardCall) -> str | None:
    return _refusal((call.dy, call.x), (call.weight,))


def rms_norm_bwd_workspace(call: RmsNormBackwardCall) -> _Workspace:
    sums = int(call.needs[1] and call.weight is not None)
    return norm_bwd_workspace(norm_bwd_config(call.dy, None, call.x, sums), call.x, sums)


def rms_norm_bwd(call: RmsNormBackwardCall, dx: Tensor, dweight: Tensor, *scratch: Tensor) -> None:
    dy, x, weight, rstd, _, needs = call
    norm_bwd(
        dy, None, x, weight, None, rstd, 0.0, None, 0,
        dx if needs[0] else None, None,
        dweight if needs[1] and weight is not None else None, None, None, *scratch,
    )  # fmt: skip
