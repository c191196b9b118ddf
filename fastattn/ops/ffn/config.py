"""Who computes the matrix products of the Triton feed-forward network: frozen rows, chosen by a
pure function of shape, dtype and architecture, each product with the reason of the choice. Nothing
is tuned at run time; benchmarks/tune.py times what `candidates` offers off-line.
"""

from dataclasses import dataclass, replace

import torch

# Gated activations by the function of the gate.
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


@dataclass(frozen=True)
class ElementwiseTile:
    """Rows and columns a program of the kernels between the products takes at a time."""

    block_m: int
    block_n: int
    warps: int = 4


# Of the kernels that only map elements: bits of dropout cost less the more share their keys. Of
# those that also sum over rows: a gated derivative keeps 119 of the registers a thread at 2048.
MAPPED, SUMMED = 4096, 2048


def elementwise_tile(width: int, elements: int) -> ElementwiseTile:
    """256 columns of 16-bit data are 16 bytes for each lane of a warp."""
    block_n = min(256, max(16, 1 << (width - 1).bit_length()))
    return ElementwiseTile(elements // block_n, block_n)


def rows_per_group(rows: int, width: int) -> int:
    """Rows that are summed into one partial sum: enough groups to fill a GPU (about 2048 programs),
    few enough that partial sums are a small part of the traffic.
    """
    tile = elementwise_tile(width, SUMMED)
    groups = min(256, max(32, 2048 * tile.block_n // max(1, width)))
    return tile.block_m * max(1, -(-rows // (tile.block_m * groups)))


@dataclass(frozen=True)
class GemmTile:
    """One tiling of our matrix product.

    group: rows of tiles that are processed together, column by column, so that their operands stay
    in the L2 cache. programs: of a persistent grid, 0 for one program a tile. splits: of the summed
    dimension, whose partial products are added in order by another kernel. parts: pieces of a tile
    that the work at its end takes one after the other. tma: operands through tensor descriptors.
    precision: of fp32 products, never plain TF32.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group: int = 8
    programs: int = 0
    splits: int = 1
    parts: int = 1
    tma: bool = False
    precision: str = "ieee"


@dataclass(frozen=True)
class Product:
    """Who computes a matrix product: our kernel in a tiling, or (None) the library; and why."""

    tile: GemmTile | None
    reason: str


@dataclass(frozen=True)
class ForwardConfig:
    """up: x w1ᵀ with bias, activation and dropout; down: a w2ᵀ with bias, dropout and residual."""

    up: Product
    down: Product


@dataclass(frozen=True)
class BackwardConfig:
    """dhidden: dy w2 with the activation's derivative, the activation computed again and sums for
    db1; dx: dpre w1; dw1: dpreᵀ x; dw2: dyᵀ a.
    """

    dhidden: Product
    dx: Product
    dw1: Product
    dw2: Product


_LIBRARY = {
    "hopper": Product(
        None,
        "not measured for our kernels; the library's products reach 609 to 685 TFLOP/s forward, "
        "614 to 680 backward (bf16, relu, eager, 16384 x 1024 and 8192 x 4096, one H200)",
    ),
    "blackwell": Product(None, "not measured"),
    "ampere": Product(None, "not measured"),
    "amd": Product(None, "not measured"),
}


def family(arch: str) -> str:
    """Architectures that share rows."""
    if not arch.startswith("sm_"):
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(int(arch[3:]) // 10, "ampere")


def forward_config(
    arch: str, dtype: torch.dtype, rows: int, D: int, F: int, E: int, activation: str
) -> ForwardConfig:
    """x [rows, D], F hidden features, y [rows, E]."""
    library = _LIBRARY[family(arch)]
    return ForwardConfig(library, library)


def backward_config(
    arch: str, dtype: torch.dtype, rows: int, D: int, F: int, E: int, activation: str
) -> BackwardConfig:
    library = _LIBRARY[family(arch)]
    return BackwardConfig(library, library, library, library)


# -- what is worth timing -------------------------------------------------------------------------

_T = GemmTile
# 132 programs are one for each multiprocessor of an H100 SXM or H200. All of these compile without
# spills (Triton 3.6, ptxas 12.8).
_HOPPER = (
    # 208 KB of shared memory; 200 to 253 registers. In quarters the ends stage little of it.
    _T(128, 256, 64, 8, 4, programs=132, parts=4, tma=True),
    _T(128, 256, 64, 8, 3, programs=132, parts=4, tma=True),
    _T(128, 256, 64, 8, 4, parts=4, tma=True),
    _T(128, 128, 64, 8, 4, programs=132, parts=2, tma=True),
    _T(128, 128, 64, 4, 3, parts=4, tma=True),
)
# The gradients of gate and up are two more tiles: 128 x 256 spills 32 words or more in quarters.
_HOPPER_GATED_GRADIENT = (
    _T(128, 128, 64, 8, 4, programs=132, parts=4, tma=True),
    _T(128, 256, 64, 8, 3, programs=132, parts=8, tma=True),
)
# Taller tiles read less of the other operand, but leave no registers to a derivative.
_HOPPER_NOT_GRADIENT = (_T(256, 128, 64, 8, 4, programs=132, parts=2, tma=True),)
_HALF: dict[str, tuple[GemmTile, ...]] = {
    "hopper": _HOPPER,
    "blackwell": (_T(128, 128, 64, 4, 3, parts=4, tma=True),),
    # 80 KB of shared memory; every GPU from Ampere on has 99.
    "ampere": (_T(128, 128, 32, 8, 4, parts=2), _T(128, 128, 32, 8, 3, parts=4)),
    "amd": (_T(128, 128, 64, 4, 2, parts=2),),
}
# Without work at its end a tile stages its sums in one piece, which 4 warps have no registers for.
_BLACKWELL_PLAIN = (_T(128, 128, 64, 8, 3, tma=True),)
_SINGLE: dict[str, tuple[GemmTile, ...]] = {
    # Three TF32 products for one: correct to fp32's last bits and several times faster than FMA.
    "hopper": (_T(64, 128, 32, 8, 3, parts=2, precision="tf32x3"),),
    "blackwell": (_T(64, 128, 32, 8, 3, parts=2, precision="tf32x3"),),
    "ampere": (_T(64, 128, 32, 8, 3, parts=2, precision="tf32x3"),),
    # The matrix cores multiply fp32 as it is.
    "amd": (_T(128, 128, 32, 4, 2, parts=2),),
}
# Multiprocessors to keep busy where a grid is not persistent, and the fewest steps over the summed
# dimension that are worth a piece of their own.
_PROGRAMS, _STEPS_A_PIECE = 132, 16


def split(tile: GemmTile, M: int, N: int, K: int) -> GemmTile:
    """The tile with as many pieces of K as fill a GPU with [M, N], up to 8."""
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    pieces = min((tile.programs or _PROGRAMS) // max(1, tiles), K // tile.block_k // _STEPS_A_PIECE)
    return replace(tile, splits=max(1, min(8, pieces)))


def tiles(
    arch: str, dtype: torch.dtype, product: str, activation: str = "relu"
) -> tuple[GemmTile, ...]:
    """Tilings of ours worth timing for a product of ForwardConfig or BackwardConfig."""
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
    """What is worth timing, direction fwd or bwd: the shipped row, then rows that change one of its
    products. Products run one after the other: the best row has the best of each, whichever rows
    they come from.
    """
    W = 2 * F if activation in GATED else F
    if direction == "fwd":
        shipped = forward_config(arch, dtype, rows, D, F, E, activation)
        return [shipped] + [
            replace(shipped, **{name: Product(tile, "candidate")})
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
