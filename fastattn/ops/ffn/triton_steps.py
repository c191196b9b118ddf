"""The steps of the Triton feed-forward network: kernels bound to the arguments that depend only on
widths, strides and options. A step is called with tensors (None for results that are not needed)
and, if it has dropout, seed and stream.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fastattn.ops._dropout import keep_scale, threshold
from fastattn.ops._triton_launch import BoundLaunch, DescriptorTemplate, descriptor_template
from fastattn.ops.ffn.config import GATED, MAPPED, SUMMED, UpTile, elementwise_tile, rows_per_group
from fastattn.ops.ffn.triton_elementwise import (
    activate_kernel,
    differentiate_kernel,
    drop_gradient_kernel,
    finish_kernel,
    sum_groups_kernel,
)
from fastattn.ops.ffn.triton_up import up_kernel

_TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv takes 4 µs on the host."""
    return -(-a // b)


def _launch(kernel: BoundLaunch, programs: int, *leading: Any) -> None:
    if programs:
        kernel((programs, 1, 1), *leading)


class Elementwise:
    """A kernel over tiles of [rows, width]; the functions that make one list its arguments."""

    def __init__(
        self, kernel: Any, width: int, scalars: tuple[Any, ...], constants: dict[str, Any]
    ):
        self._tile = tile = elementwise_tile(width, MAPPED)
        self._columns = ceil_div(width, tile.block_n)
        blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        self._kernel = BoundLaunch(
            kernel, (width, *scalars), constants | blocks, num_warps=tile.warps
        )

    def __call__(self, rows: int, *tensors: Any) -> None:
        programs = ceil_div(rows, self._tile.block_m) * self._columns
        _launch(self._kernel, programs, *tensors, rows)


class ElementwiseAndSums:
    """A kernel over groups of rows of [rows, width] that also sums them; called as Elementwise."""

    def __init__(
        self, kernel: Any, width: int, scalars: tuple[Any, ...], constants: dict[str, Any]
    ):
        tile = elementwise_tile(width, SUMMED)
        self._width, self._columns = width, ceil_div(width, tile.block_n)
        blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        self._kernel = BoundLaunch(
            kernel, (width, *scalars), constants | blocks, num_warps=tile.warps
        )

    def __call__(self, rows: int, *tensors: Any) -> None:
        size = rows_per_group(rows, self._width)
        _launch(self._kernel, ceil_div(rows, size) * self._columns, *tensors, rows, size)


class SumOverGroups:
    """Adds partial sums. Called with (count, sums [count, width], out [width])."""

    def __init__(self, width: int):
        self._programs = ceil_div(width, 32)
        self._kernel = BoundLaunch(
            sum_groups_kernel, (width,), {"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=4
        )

    def __call__(self, count: int, sums: Tensor | None, out: Tensor) -> None:
        _launch(self._kernel, self._programs, sums, out, count)


def group_count(rows: int, width: int) -> int:
    """The number of groups of rows, which is the number of partial sums."""
    return ceil_div(rows, rows_per_group(rows, width))


def _dropout(p: float) -> tuple[int, float]:
    return threshold(p), keep_scale(p)


def _activation_constants(activation: str, dropout_p: float) -> dict[str, Any]:
    return {
        "ACTIVATION": GATED.get(activation, activation),
        "GATED": activation in GATED,
        "DROPOUT": dropout_p > 0.0,
    }


def activate(width: int, dtype: torch.dtype, activation: str, dropout_p: float) -> Elementwise:
    """Called with (rows, pre, a, seed, stream)."""
    constants = _activation_constants(activation, dropout_p) | {"EXACT": dtype == torch.float32}
    return Elementwise(activate_kernel, width, _dropout(dropout_p), constants)


def finish(width: int, residual: Tensor | None, dropout_p: float) -> Elementwise:
    """Called with (rows, product, residual, y, seed, stream)."""
    stride = 0 if residual is None else residual.stride(0)
    scalars = (stride, *_dropout(dropout_p))
    return Elementwise(finish_kernel, width, scalars, {"DROPOUT": dropout_p > 0.0})


def drop_gradient(dy: Tensor, dtype: torch.dtype, dropout_p: float) -> ElementwiseAndSums:
    """Called with (rows, dy, dropped, sums, seed, stream). dy: [rows, width]; dtype: x's."""
    constants = {"DROPOUT": dropout_p > 0.0, "ROUND_TO": _TL_DTYPES[dtype]}
    scalars = (dy.stride(0), *_dropout(dropout_p))
    return ElementwiseAndSums(drop_gradient_kernel, dy.shape[1], scalars, constants)


def differentiate(
    width: int, dtype: torch.dtype, activation: str, dropout_p: float
) -> ElementwiseAndSums:
    """Called with (rows, da, hidden, dpre, a, sums, seed, stream)."""
    constants = _activation_constants(activation, dropout_p) | {"EXACT": dtype == torch.float32}
    return ElementwiseAndSums(differentiate_kernel, width, _dropout(dropout_p), constants)


# -- the first product -----------------------------------------------------------------------------


class UpProduct:
    """The first product with its epilogue. Called with (x, w1, bias, hidden, a, seed, stream).

    Operands must have the layouts of those passed here. Tensor descriptors are made once; a call
    sets their addresses and number of rows.
    """

    def __init__(self, tile: UpTile, x: Tensor, w1: Tensor, activation: str, dropout_p: float):
        self._tile = tile
        gated = activation in GATED
        # Columns n (gate) and F + n (up) of w1's product give one column of the result.
        width = w1.shape[0] // 2 if gated else w1.shape[0]
        self._columns = ceil_div(width, tile.block_n // 2 if gated else tile.block_n)
        tma = tile.tma and _fits_descriptor(x) and _fits_descriptor(w1)
        descriptors: dict[int, DescriptorTemplate | None] = {}
        if tma:
            x_block = [tile.block_m, tile.block_k]
            descriptors[0] = descriptor_template(
                x, [*x.shape], [*x.stride()], x_block, resized=True
            )
            descriptors[1] = _weights_template(w1, tile, gated)
        strides = (0, 0, 0, 0) if tma else (*x.stride(), *w1.stride())
        constants = _activation_constants(activation, dropout_p)
        self._kernel = BoundLaunch(
            up_kernel, (width, x.shape[1], *strides, *_dropout(dropout_p)),
            constants | {
                "TMA": tma,
                "GROUP": tile.group,
                "SUBTILES": tile.subtiles,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
            },
            descriptors, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def __call__(self, x: Tensor, w1: Tensor, *others: Any) -> None:
        tile, rows = self._tile, x.shape[0]
        tiles = ceil_div(rows, tile.block_m) * self._columns
        programs = min(tiles, tile.programs) if tile.programs else tiles
        _launch(self._kernel, programs, x, w1, *others, rows)


def _fits_descriptor(x: Tensor) -> bool:
    """Whether the strides of x, [rows, columns], fit a tensor descriptor: columns are contiguous,
    and rows a multiple of 16 bytes apart, not 0. (The address is checked in each call.)
    """
    step = x.stride(0)
    return x.stride(1) == 1 and step > 0 and step * x.element_size() % 16 == 0


def _weights_template(w1: Tensor, tile: UpTile, gated: bool) -> DescriptorTemplate:
    """The descriptor of [columns, K]; gated: of [2, columns / 2, K]."""
    if not gated:
        return descriptor_template(w1, [*w1.shape], [*w1.stride()], [tile.block_n, tile.block_k])
    half = w1.shape[0] // 2
    strides = [half * w1.stride(0), *w1.stride()]
    block = [2, tile.block_n // 2, tile.block_k]
    return descriptor_template(w1, [2, half, w1.shape[1]], strides, block)
