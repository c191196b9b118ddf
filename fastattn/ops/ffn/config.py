"""Configs of the matrix products of the Triton feed-forward network: whether torch.mm or a Triton
kernel computes them, with the reason. They are chosen by a pure function of shape, dtype and
architecture. Nothing is tuned at run time; benchmarks/tune.py times `candidates` off-line.
"""

from dataclasses import dataclass, replace

import torch

# Gated activations by the function of the gate.
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


@dataclass(frozen=True)
class ElementwiseTile:
    """Rows and columns of the tiles of the kernels between the products."""

    block_m: int
    block_n: int
    warps: int = 4


# Elements of a tile of kernels that only map elements: in larger tiles more dropout bits share
# their keys. Of kernels that also sum over rows: a gated derivative has 119 registers at 2048.
MAPPED, SUMMED = 4096, 2048


def elementwise_tile(width: int, elements: int) -> ElementwiseTile:
    """Tiles have up to 256 columns: with 16-bit data, 16 bytes for each lane of a warp."""
    block_n = min(256, max(16, 1 << (width - 1).bit_length()))
    return ElementwiseTile(elements // block_n, block_n)


def rows_per_group(rows: int, width: int) -> int:
    """The number of rows in one partial sum: there are enough groups to fill a GPU (about 2048
    programs), and so few that the partial sums are a small part of the traffic.
    """
    tile = elementwise_tile(width, SUMMED)
    groups = min(256, max(32, 2048 * tile.block_n // max(1, width)))
    return tile.block_m * max(1, -(-rows // (tile.block_m * groups)))


@dataclass(frozen=True)
class GemmTile:
    """The config of a Triton matrix product.

    group: rows of tiles that are processed together, column by column, so that their operands stay
    in the L2 cache. programs: of a persistent grid; 0: one program for each tile. splits: of the
    summed dimension (split-K); another kernel adds the partial products in order. subtiles: the
    number of column blocks in which the epilogue processes a tile. tma: whether operands are loaded
    through tensor descriptors. precision: of fp32 products, never plain TF32.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 0
    splits: int = 1
    subtiles: int = 1
    tma: bool = False
    precision: str = "ieee"


@dataclass(frozen=True)
class Product:
    """A matrix product by a Triton kernel with this tile or, with None, by torch.mm; and why."""

    tile: GemmTile | None
    reason: str


@dataclass(frozen=True)
class ForwardConfig:
    """up: x w1ᵀ + b1, activation and dropout. down: a w2ᵀ + b2, dropout and residual."""

    up: Product
    down: Product


@dataclass(frozen=True)
class BackwardConfig:
    """dhidden: dy w2, the derivative of the activation, the recomputed activation and sums for db1.
    dx: dpre w1. dw1: dpreᵀ x. dw2: dyᵀ a.
    """

    dhidden: Product
    dx: Product
    dw1: Product
    dw2: Product


_TORCH = {
    "hopper": Product(
        None,
        "Triton is not measured; PyTorch's products reach 609 to 685 TFLOP/s forward, 614 to 680 "
        "backward (bf16, relu, eager, 16384 x 1024 and 8192 x 4096, one H200)",
    ),
    "blackwell": Product(None, "not measured"),
    "ampere": Product(None, "not measured"),
    "amd": Product(None, "not measured"),
}


def family(arch: str) -> str:
    """The GPU family; its architectures share configs."""
    if not arch.startswith("sm_"):
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(int(arch[3:]) // 10, "ampere")


def forward_config(
    arch: str, dtype: torch.dtype, rows: int, D: int, F: int, E: int, activation: str
) -> ForwardConfig:
    """x [rows, D], F hidden features, y [rows, E]."""
    product = _TORCH[family(arch)]
    return ForwardConfig(product, product)


def backward_config(
    arch: str, dtype: torch.dtype, rows: int, D: int, F: int, E: int, activation: str
) -> BackwardConfig:
    product = _TORCH[family(arch)]
    return BackwardConfig(product, product, product, product)


# -- candidates of an off-line search -------------------------------------------------------------

_T = GemmTile
# 132 programs are one for each multiprocessor of an H100 SXM or H200. All of these compile without
# spills (Triton 3.6, ptxas 12.8).
_HOPPER = (
    # 208 KB of shared memory; 200 to 253 registers. With 4 subtiles, epilogues need little of it.
    _T(128, 256, 64, 8, 4, programs=132, subtiles=4, tma=True),
    _T(128, 256, 64, 8, 3, programs=132, subtiles=4, tma=True),
    _T(128, 256, 64, 8, 4, subtiles=4, tma=True),
    _T(128, 128, 64, 8, 4, programs=132, subtiles=2, tma=True),
    _T(128, 128, 64, 4, 3, subtiles=4, tma=True),
)
# The gradients of gate and up are two more tiles: 128 x 256 in 4 subtiles spills 32 words or more.
_HOPPER_GATED_GRADIENT = (
    _T(128, 128, 64, 8, 4, programs=132, subtiles=4, tma=True),
    _T(128, 256, 64, 8, 3, programs=132, subtiles=8, tma=True),
)
# Taller tiles read less of the other operand, but leave no registers for a derivative.
_HOPPER_NOT_GRADIENT = (_T(256, 128, 64, 8, 4, programs=132, subtiles=2, tma=True),)
_HALF: dict[str, tuple[GemmTile, ...]] = {
    "hopper": _HOPPER,
    "blackwell": (_T(128, 128, 64, 4, 3, subtiles=4, tma=True),),
    # 80 KB of shared memory; every GPU since Ampere has at least 99.
    "ampere": (_T(128, 128, 32, 8, 4, subtiles=2), _T(128, 128, 32, 8, 3, subtiles=4)),
    "amd": (_T(128, 128, 64, 4, 2, subtiles=2),),
}
# Without an epilogue a tile is staged whole, for which 4 warps do not have enough registers.
_BLACKWELL_PLAIN = (_T(128, 128, 64, 8, 3, tma=True),)
_SINGLE: dict[str, tuple[GemmTile, ...]] = {
    # Three TF32 products for one fp32 product: as accurate, and several times faster than FMA.
    "hopper": (_T(64, 128, 32, 8, 3, subtiles=2, precision="tf32x3"),),
    "blackwell": (_T(64, 128, 32, 8, 3, subtiles=2, precision="tf32x3"),),
    "ampere": (_T(64, 128, 32, 8, 3, subtiles=2, precision="tf32x3"),),
    # AMD's matrix cores multiply in fp32.
    "amd": (_T(128, 128, 32, 4, 2, subtiles=2),),
}
# Programs that fill a GPU if the grid is not persistent; the minimum of steps over K for a split.
_PROGRAMS, _STEPS_PER_SPLIT = 132, 16


def split(tile: GemmTile, M: int, N: int, K: int) -> GemmTile:
    """The tile with as many splits of K as fill a GPU with [M, N], at most 8."""
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    programs = tile.programs or _PROGRAMS
    splits = min(programs // max(1, tiles), K // tile.block_k // _STEPS_PER_SPLIT)
    return replace(tile, splits=max(1, min(8, splits)))


def tiles(
    arch: str, dtype: torch.dtype, product: str, activation: str = "relu"
) -> tuple[GemmTile, ...]:
    """Tiles to time for a product of ForwardConfig or BackwardConfig."""
    kind = family(arch)
    if dtype == torch.float32:
        return _SINGLE[kind]
    if kind == "blackwell" and product in ("dx", "dw1", "dw2"):
        return _BLACKWELL_PLAIN
    if kind != "hopper":
        return _HALF[kind]
    if product == "dhidden":
        return _HOPPER_GATED_GRADIENT if activation in GATED else _HOPPER[:4]
    return (*_HOPPER, *_HOPPER_NOT_GRADIENT)


def candidates(
    direction: str,
    arch: str,
    dtype: torch.dtype,
    rows: int,
    D: int,
    F: int,
    E: int,
    activation: str,
) -> list[ForwardConfig] | list[BackwardConfig]:
    """Configs to time, direction fwd or bwd: the default one, then those that change one of its
    products. As products run one after the other, the best config combines the best of each.
    """
    W = 2 * F if activation in GATED else F
    if direction == "fwd":
        default = forward_config(arch, dtype, rows, D, F, E, activation)
        return [default] + [
            replace(default, **{name: Product(tile, "candidate")})
            for name in ("up", "down")
            for tile in tiles(arch, dtype, name, activation)
        ]
    sizes = {"dx": (rows, D, W), "dw1": (W, D, rows), "dw2": (E, F, rows)}
    base = backward_config(arch, dtype, rows, D, F, E, activation)
    found = [base]
    for name in ("dhidden", *sizes):
        for tile in tiles(arch, dtype, name, activation):
            chosen = split(tile, *sizes[name]) if name in sizes else tile
            found.append(replace(base, **{name: Product(chosen, "candidate")}))
    return found
