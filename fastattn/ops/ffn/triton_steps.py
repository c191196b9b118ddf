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
from fastattn.ops.ffn.config import (
    GATED,
    MAPPED,
    SUMMED,
    GemmTile,
    elementwise_tile,
    rows_per_group,
)
from fastattn.ops.ffn.triton_elementwise import (
    activate_kernel,
    differentiate_kernel,
    drop_gradient_kernel,
    finish_kernel,
    sum_groups_kernel,
)
from fastattn.ops.ffn.triton_gemm import dhidden_kernel, down_kernel, product_kernel, up_kernel

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

    def __init__(self, width: int, few: bool = False):
        """few: for a small count and a large width."""
        rows, self._columns = (4, 1024) if few else (64, 32)
        self.width = width
        self._kernel = BoundLaunch(
            sum_groups_kernel, (width,), {"BLOCK_M": rows, "BLOCK_N": self._columns}, num_warps=4
        )

    def __call__(self, count: int, sums: Tensor | None, out: Tensor) -> None:
        _launch(self._kernel, ceil_div(self.width, self._columns), sums, out, count)


def group_count(rows: int, width: int) -> int:
    """The number of groups of rows, which is the number of partial sums."""
    return ceil_div(rows, rows_per_group(rows, width))


def _dropout(p: float) -> tuple[int, float]:
    return threshold(p), keep_scale(p)


def _activation_constants(activation: str, dropout_p: float, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "ACTIVATION": GATED.get(activation, activation),
        "GATED": activation in GATED,
        "DROPOUT": dropout_p > 0.0,
        "EXACT": dtype == torch.float32,
    }


def activate(width: int, dtype: torch.dtype, activation: str, dropout_p: float) -> Elementwise:
    """Called with (rows, pre, a, seed, stream)."""
    constants = _activation_constants(activation, dropout_p, dtype)
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
    constants = _activation_constants(activation, dropout_p, dtype)
    return ElementwiseAndSums(differentiate_kernel, width, _dropout(dropout_p), constants)


# -- products -------------------------------------------------------------------------------------


class Multiplication:
    """A matrix product. It is called with its operands a [rows, K] and b [N, K] and the arguments
    listed at the function that makes it.

    Operands must have the layouts of those passed here. Tensor descriptors are made once; a call
    sets their addresses and number of rows.
    """

    def __init__(
        self,
        kernel: Any,
        tile: GemmTile,
        a: Tensor,
        b: Tensor,
        scalars: tuple[Any, ...],
        constants: dict[str, Any],
        *,
        paired: bool = False,
        over_rows: bool = False,
    ):
        """paired: rows n and n + N / 2 of b (gate and up) give one column of the result. over_rows:
        rows are the summed dimension, a [M, rows] and b [N, rows].
        """
        self._tile, self._over_rows = tile, over_rows
        self._tile_columns = tile.block_n // 2 if paired else tile.block_n
        self._columns = b.shape[0] // 2 if paired else b.shape[0]
        self._features = a.shape[0] if over_rows else a.shape[1]
        last = (a.stride(1) == 1, b.stride(1) == 1)
        tma = tile.tma and _fits_descriptor(a) and _fits_descriptor(b) and (last[1] or not paired)
        strides = (0, 0, 0, 0) if tma else (*a.stride(), *b.stride())
        descriptors: dict[int, DescriptorTemplate | None] = {}
        if tma:
            descriptors[0] = _descriptor_template(a, tile.block_m, tile.block_k, dynamic=True)
            b_block = tile.block_n, tile.block_k
            descriptors[1] = _descriptor_template(b, *b_block, paired=paired, dynamic=over_rows)
        self._kernel = BoundLaunch(
            kernel, (self._columns, self._features, *strides, *scalars),
            constants | {
                "TMA": tma,
                "A_LAST": last[0],
                "B_LAST": last[1],
                "PRECISION": tile.precision,
                "GROUP": tile.group,
                **({} if kernel is product_kernel else {"SUBTILES": tile.subtiles}),
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k,
            },
            descriptors, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def __call__(self, a: Tensor, b: Tensor, *others: Any) -> None:
        tile, rows = self._tile, a.shape[1] if self._over_rows else a.shape[0]
        tiles = ceil_div(a.shape[0], tile.block_m) * ceil_div(self._columns, self._tile_columns)
        tiles *= tile.splits
        programs = min(tiles, tile.programs) if tile.programs else tiles
        _launch(self._kernel, programs, a, b, *others, rows)


def _fits_descriptor(x: Tensor) -> bool:
    """Whether x's strides fit a tensor descriptor: one dimension is contiguous, the other's stride
    is a multiple of 16 bytes and not 0. (The address is checked in each call.)
    """
    if x.numel() == 0:
        return False
    steps = sorted(x.stride())
    return steps[0] == 1 and steps[1] > 0 and steps[1] * x.element_size() % 16 == 0


def _descriptor_template(
    x: Tensor, rows: int, block_k: int, *, dynamic: bool, paired: bool = False
) -> DescriptorTemplate:
    """The descriptor of [rows, K] with its contiguous dimension last; paired: of [2, rows / 2, K].
    dynamic: whether sizes change between calls.
    """
    if paired:
        half = x.shape[0] // 2
        steps = [half * x.stride(0), x.stride(0), 1]
        return descriptor_template(x, [2, half, x.shape[1]], steps, [2, rows // 2, block_k])
    dims = (0, 1) if x.stride(1) == 1 else (1, 0)
    block = (rows, block_k)
    return descriptor_template(
        x, [x.shape[d] for d in dims], [x.stride(dims[0]), 1], [block[d] for d in dims],
        dims if dynamic else None,
    )  # fmt: skip


def up(tile: GemmTile, x: Tensor, w1: Tensor, activation: str, dropout_p: float) -> Multiplication:
    """Called with (x, w1, bias, hidden, a, seed, stream)."""
    constants = _activation_constants(activation, dropout_p, x.dtype)
    return Multiplication(
        up_kernel, tile, x, w1, _dropout(dropout_p), constants, paired=activation in GATED
    )


def down(
    tile: GemmTile, a: Tensor, w2: Tensor, residual: Tensor | None, dropout_p: float
) -> Multiplication:
    """Called with (a, w2, bias, residual, y, seed, stream)."""
    stride = 0 if residual is None else residual.stride(0)
    scalars = (stride, *_dropout(dropout_p))
    return Multiplication(down_kernel, tile, a, w2, scalars, {"DROPOUT": dropout_p > 0.0})


def dhidden(
    tile: GemmTile, dy: Tensor, w2: Tensor, activation: str, dropout_p: float
) -> Multiplication:
    """Called with (dy, w2ᵀ, hidden, dpre, a, sums, seed, stream)."""
    constants = _activation_constants(activation, dropout_p, dy.dtype)
    return Multiplication(dhidden_kernel, tile, dy, w2.t(), _dropout(dropout_p), constants)


class PlainProduct:
    """out = a bᵀ. Called with (a, b, out [, partials]); partials: [splits, *out] in fp32, if the
    summed dimension is split. over_rows: as in Multiplication.
    """

    def __init__(self, tile: GemmTile, a: Tensor, b: Tensor, *, over_rows: bool):
        constants = {"OVER_ROWS": over_rows, "SPLITS": tile.splits}
        self._splits = tile.splits
        self._add: SumOverGroups | None = None
        self._multiply = Multiplication(
            product_kernel, tile, a, b, (), constants, over_rows=over_rows
        )

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, partials: Tensor | None = None) -> None:
        if partials is None:
            self._multiply(a, b, out)
            return
        self._multiply(a, b, partials)
        if self._add is None or self._add.width != out.numel():
            self._add = SumOverGroups(out.numel(), few=True)
        self._add(self._splits, partials, out)
