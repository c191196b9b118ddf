"""Configs of the Triton feed-forward network: the tiles of its kernels, and whether PyTorch or a
Triton kernel computes the first product, with the reason. They are chosen by a pure function of
shape, dtype and architecture. Nothing is tuned at run time; benchmarks/tune.py times `candidates`
off-line.
"""

import functools
from dataclasses import dataclass

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
# their keys. SUMMED: of kernels that also sum over rows; a gated derivative has 119 registers at
# 2048.
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
class UpTile:
    """The config of `up_kernel`.

    subtiles: the number of column blocks in which the epilogue processes a tile. group: rows of
    tiles that are processed together, column by column, so that their operands stay in the L2
    cache. programs: of a persistent grid; 0: one program for each tile. tma: whether operands are
    loaded through tensor descriptors.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    subtiles: int
    group: int = 8
    programs: int = 0
    tma: bool = False


@dataclass(frozen=True)
class Up:
    """How the first product and what follows it, the activation and its dropout, are computed: by
    `up_kernel` with this tile or, with None, by PyTorch's product and an elementwise kernel; why;
    and whether that was measured.
    """

    tile: UpTile | None
    reason: str
    measured: bool = False


# By GPU family; the first tile is used, the others are timed off-line. All of them compile without
# spills (Triton 3.6, ptxas 12.8). 132 programs are one for each multiprocessor of an H100 SXM or
# H200.
_TILES: dict[str, tuple[UpTile, ...]] = {
    # 80 KB of shared memory; every GPU since Ampere has at least 99.
    "ampere": (UpTile(128, 128, 32, 8, 4, subtiles=2), UpTile(128, 128, 32, 8, 3, subtiles=4)),
    # 208 KB of shared memory; with 4 subtiles, the epilogue needs little of it.
    "hopper": (
        UpTile(128, 256, 64, 8, 4, subtiles=4, programs=132, tma=True),
        UpTile(128, 256, 64, 8, 3, subtiles=4, programs=132, tma=True),
        UpTile(128, 256, 64, 8, 4, subtiles=4, tma=True),
        UpTile(128, 128, 64, 8, 4, subtiles=2, programs=132, tma=True),
        UpTile(256, 128, 64, 8, 4, subtiles=2, programs=132, tma=True),
    ),
    "blackwell": (UpTile(128, 128, 64, 4, 3, subtiles=4, tma=True),),
    "amd": (UpTile(128, 128, 64, 4, 2, subtiles=2),),
}
# Between a product of PyTorch and the activation, the hidden tensor is written and read once more
# than in an epilogue. The read takes `features` / D of the time of the product, both at the peak
# rates of a GPU: (TFLOP/s of bf16 with fp32 sums) / (TB/s).
_PEAK_RATES = {
    "sm_80": (153, "A100"), "sm_86": (76, "RTX 3090"), "sm_89": (164, "RTX 4090"),
    "sm_90": (206, "H200"), "sm_100": (281, "B200"), "sm_120": (117, "RTX 5090"),
    "gfx942": (246, "MI300X"),
}  # fmt: skip
# A library's product may be ahead of Triton's by about this share of its time. On most GPUs the
# saved read is more up to 2185 features, on an RTX 5090 up to 1671, on an RTX 3090 up to 1085.
_LEAST_SHARE = 0.07
_MOST_FEATURES = 2048
# Two tiles for each multiprocessor of most GPUs. With fewer, some multiprocessors are idle, where
# libraries split the sum; the hidden tensor then stays in the L2 cache.
_LEAST_TILES = 256


def family(arch: str) -> str:
    """The GPU family; its architectures share tiles."""
    if not arch.startswith("sm_"):
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(int(arch[3:]) // 10, "ampere")


def _up(arch: str, features: int, gpu: str) -> Up:
    if family(arch) == "blackwell":
        return Up(
            None,
            "the largest tile without spills, 128 x 128, reads as much shared memory for a product "
            "as a multiprocessor delivers in its time",
        )
    return Up(
        _TILES[family(arch)][0],
        f"the epilogue saves a read of the hidden tensor, {features} / D of the product's time at "
        f"the peak rates of an {gpu}",
    )


# First product of calls with many tiles of few features.
_UP = {arch: _up(arch, *rates) for arch, rates in _PEAK_RATES.items()}


@functools.cache
def _listed(arch: str) -> str:
    """The architecture, or the oldest one of its family in the tables."""
    return arch if arch in _UP else next(a for a in _UP if family(a) == family(arch))


def up_config(arch: str, dtype: torch.dtype, rows: int, D: int, W: int, *, work: bool) -> Up:
    """x [rows, D], w1 [W, D]. work: whether anything is left to do after PyTorch's product."""
    if not work:
        return Up(None, "PyTorch's product adds the bias and computes relu itself")
    if dtype == torch.float32:
        return Up(
            None, "its precision follows torch.backends.cuda.matmul, as in the other products"
        )
    arch = _listed(arch)
    up, (features, _) = _UP[arch], _PEAK_RATES[arch]
    most = min(_MOST_FEATURES, int(features / _LEAST_SHARE))
    if D > most:
        return Up(None, f"over {most} features the saved read is a small part of the time")
    if up.tile is None:
        return up
    tiles = -(-rows // up.tile.block_m) * -(-W // up.tile.block_n)
    if tiles < _LEAST_TILES:
        return Up(None, f"fewer than {_LEAST_TILES} tiles do not fill the GPU")
    return up


def candidates(arch: str, dtype: torch.dtype, rows: int, D: int, W: int, *, work: bool) -> list[Up]:
    """Configs to time: the default one, then PyTorch's product and every tile."""
    default = up_config(arch, dtype, rows, D, W, work=work)
    if dtype == torch.float32:
        return [default]
    tiles = (None, *_TILES[family(arch)])
    return [default, *(Up(tile, "candidate") for tile in tiles if tile != default.tile)]
