"""How the Triton attention backward is tiled: frozen rows, chosen by a pure function of
architecture, dtype and head dims. Nothing is tuned at run time; benchmarks/tune.py searches
off-line.

The reasons given are what the compiler made of a row (Triton 3.6, ptxas 12.8): registers a thread
and, where it says so, words spilled; of a loop, the instructions that move such words. In half
precision plain and causal calls of one query head to a key head spill at most 4 in a loop over full
tiles; what spills more there under other features stands beside its row. Loops over edge tiles
spill tens, as do those that read masks of 4 and 8 bytes an element. dmask has one loop: on sm_90 it
spills 9 to 35 for some masks at D = 32, 256 and, of 4 and 8 bytes, at D = 64.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastattn.ops import _env
from fastattn.ops.attention.triton.tiles import split_width


@dataclass(frozen=True)
class BwdTile:
    """The tiling of one kernel: block_m queries by block_n keys.

    stages: depth of the load pipeline of the loops over full and partial tiles; edge_stages: of the
    loop over edge tiles. tma: what the loops read comes through tensor descriptors. late: dkdv
    computes dp before p. maxnreg: a cap on registers a thread; pointers in place of descriptors
    would not fit below it.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    late: bool = False
    edge_stages: int = 1
    maxnreg: int | None = None

    def options(self, tma: bool) -> dict[str, Any]:
        """Launch options of the kernel. tma: descriptors cover the call's tensors."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.maxnreg is not None and (tma or not self.tma):
            options["maxnreg"] = self.maxnreg
        return options


@dataclass(frozen=True)
class BwdConfig:
    """dq owns queries, dkdv owns keys; dmask runs on the smaller block of either side.

    separate: dk and dv by two launches, each with the registers of one. precision: of fp32
    products. halves: head dims above it are two equal tiles (and padded more than they need be).
    """

    dq: BwdTile
    dkdv: BwdTile
    separate: bool = False
    precision: str = "ieee"
    halves: int | None = None
    dmask_warps: int = 4

    def widths(self, width: int) -> tuple[int, int]:
        """The two tiles of a head dim; the second may be 0."""
        if self.halves is None:
            return split_width(width)
        whole = 1 << max(4, (width - 1).bit_length())
        return (whole, 0) if whole <= self.halves else (whole // 2, whole // 2)


_T, _C = BwdTile, BwdConfig

# Rows by the widest head dim they serve.
_Rows = tuple[tuple[int, BwdConfig], ...]

# For the interpreter: several tiles in small tensors, and other blocks in each kernel.
_INTERPRETER: _Rows = (
    (64, _C(_T(64, 32, 4, 1), _T(32, 64, 4, 1))),
    (256, _C(_T(32, 64, 4, 1), _T(64, 32, 4, 1, late=True), separate=True, halves=128)),
)

# Hopper: two warpgroups of 64 rows each. Descriptors save 20 to 60 registers over pointers, but
# where several loops use them they are kept in more registers than pointers are.
_SM90: _Rows = (
    # dq 128 registers, so two programs an SM (up to 163 without the cap, which spills nothing in
    # loops over full tiles, up to 8 under dropout over edge tiles); dkdv 194. With dropout their
    # loops over full tiles are 432 and 521 instructions, without 266 and 325.
    (64, _C(_T(128, 64, 8, 3, tma=True, maxnreg=128), _T(64, 128, 8, 3, tma=True))),
    # dq 181, dkdv 255. Its loop over full tiles is 349 to 371 instructions, and spills where more
    # than its accumulators stays: 0 to 2 for grouped heads, packed sequences, lengths or padded
    # windows, up to 4 for packed windows; with dropout 0 to 15 padded, 1 to 20 packed, where
    # 32 x 128 would spill none, but take 762 instructions for 583. Under a soft cap 968, 1 spilled;
    # 32 x 128 would take 573 for half the queries.
    (128, _C(_T(128, 64, 8, 3, tma=True), _T(64, 128, 8, 3, tma=True))),
    # One accumulator [128, 256] at a time; with both every tile spills 42 words.
    (256, _C(_T(128, 32, 8, 2, tma=True), _T(32, 128, 8, 2), separate=True)),
)
# Under a dense mask a third loop needs registers: at D = 128, 64 x 128 spills 30 to 170 words a
# partial tile.
_SM90_DENSE: _Rows = (
    (64, _C(_T(128, 64, 8, 3, tma=True), _T(64, 128, 8, 2, tma=True))),
    (128, _C(_T(128, 64, 8, 2, tma=True), _T(32, 128, 8, 3))),
    (256, _C(_T(128, 32, 8, 2), _T(32, 128, 8, 2), separate=True)),
)
# Beside a bias by distance 64 x 128 spills 39 in the loop over full tiles.
_SM90_DISTANCE_128 = _T(32, 128, 8, 3)
# D = 192 with E = 128: both accumulators fit (255 registers); grouped heads under causality or
# lengths, and packed sequences, spill 2 or 3 in dkdv's loop over full tiles.
_SM90_192_128 = _C(_T(128, 32, 8, 2, tma=True), _T(32, 128, 8, 2, tma=True))

# Blackwell: accumulators live in tensor memory.
_SM100: _Rows = (
    (64, _C(_T(128, 64, 8, 2), _T(64, 128, 8, 2))),  # dq 111 registers, dkdv 237
    (128, _C(_T(64, 64, 4, 2), _T(64, 128, 8, 2))),  # dq 144, dkdv 254
    (256, _C(_T(64, 64, 8, 1), _T(64, 64, 8, 1))),  # dq 226, dkdv 255
)

# A100: mma.sync, 163 KB of shared memory.
_SM80_SHARED_MEMORY = 163 << 10
_SM80: _Rows = (
    (64, _C(_T(128, 64, 8, 2), _T(32, 128, 8, 2))),  # dq 186 registers, dkdv 218
    # 255 both; 128 keys spill.
    (128, _C(_T(64, 64, 4, 2), _T(32, 64, 4, 2))),
    (192, _C(_T(64, 32, 8, 1), _T(32, 64, 8, 1), separate=True)),  # 64 x 64 spills in dq
    (256, _C(_T(64, 64, 8, 1), _T(32, 64, 8, 1), separate=True)),  # dq 251, dk 201, dv 174
)
# With 32 queries dkdv spills where the mask is read.
_SM80_DENSE_128 = _C(_T(64, 64, 4, 2), _T(16, 64, 4, 2))

# Other Ampere, Ada, and the Blackwells without tensor memory: 99 KB of shared memory.
_SMALL: _Rows = (
    _SM80[0],
    (128, _C(_T(64, 32, 4, 2), _T(32, 64, 4, 2))),
    (256, _C(_T(32, 32, 4, 1), _T(32, 32, 4, 1), separate=True)),
)

# fp32 as three TF32 products; "ieee" runs beside the tensor cores and takes ptxas 40 s at D = 128.
# Small tiles of so many warps repeat each other's products: dkdv's loop is 2258 instructions where
# D = 40 is two tiles, 808 where it is one.
_FP32: _Rows = (
    (64, _C(_T(32, 32, 4, 1), _T(32, 32, 8, 1), precision="tf32x3", halves=64)),
    (96, _C(_T(32, 32, 8, 1), _T(32, 32, 8, 1), precision="tf32x3", halves=128)),
    (128, _C(_T(32, 32, 8, 1), _T(32, 32, 8, 1), precision="tf32x3", halves=64)),
    (256, _C(_T(16, 32, 8, 1), _T(32, 16, 8, 1), True, "tf32x3", halves=128)),
)

# AMD (CDNA): 64 KiB of shared memory; "ieee" is what its matrix cores do with fp32.
_AMD: _Rows = (
    (64, _C(_T(128, 32, 4, 1), _T(32, 128, 4, 1))),  # 164 and 300 of 512 registers
    (128, _C(_T(128, 32, 4, 1), _T(32, 64, 4, 1))),  # 280, 312
    (256, _C(_T(64, 16, 4, 1), _T(16, 64, 4, 1))),  # 232, 352
)
_AMD_FP32: _Rows = (
    (64, _C(_T(64, 32, 4, 1), _T(32, 64, 4, 1))),
    (128, _C(_T(32, 32, 4, 1), _T(32, 32, 4, 1))),
    (256, _C(_T(32, 16, 4, 1), _T(16, 32, 4, 1))),
)


def _row(rows: _Rows, width: int) -> BwdConfig:
    return next(config for limit, config in rows if width <= limit)


@functools.cache
def bwd_config(
    arch: str,
    dtype: torch.dtype,
    D: int,
    E: int,
    edges: bool = False,
    dense: bool = False,
    wide: bool = False,
    distance: bool = False,
) -> BwdConfig:
    """edges: some tiles are not full, as under causality, windows, lengths, or at ragged ends.
    dense: a mask, or a key length for every query. wide: a mask of 4 bytes an element or more.
    distance: a bias by distance.
    """
    width = max(D, E)
    if arch == "interpreter":
        return _row(_INTERPRETER, width)
    if not arch.startswith("sm_"):
        return _row(_AMD_FP32 if dtype == torch.float32 else _AMD, width)
    if dtype == torch.float32:
        return _row(_FP32, width)
    if arch == "sm_90":
        return _sm90(D, E, edges, dense, distance)
    if arch in ("sm_100", "sm_103"):
        row = _row(_SM100, width)
        if wide and distance:  # with two stages of an fp64 mask, shared memory is exceeded
            return replace(row, dkdv=replace(row.dkdv, stages=1))
        return row
    if _env.shared_memory(arch) >= _SM80_SHARED_MEMORY:
        if dense and 64 < width <= 128:
            return _SM80_DENSE_128
        # The edge loop under a dense mask keeps two more tiles in shared memory.
        return _row(_SMALL if dense and width > 128 else _SM80, width)
    if wide:  # tiles of the mask would not fit, least of all several on their way
        small = _row(_SMALL, max(width, 128))
        small = replace(small, dq=replace(small.dq, stages=1), dkdv=replace(small.dkdv, stages=1))
    else:
        small = _row(_SMALL, width)
        if dense and 64 < width <= 128:
            small = replace(small, dkdv=_SM80_DENSE_128.dkdv)
    return small


def _sm90(D: int, E: int, edges: bool, dense: bool, distance: bool) -> BwdConfig:
    width = max(D, E)
    if dense:
        return _row(_SM90_DENSE, width)
    if 128 < width <= 192 and D + E <= 320:
        return _SM90_192_128
    config = _row(_SM90, width)
    if width == 128 and distance:
        return replace(config, dkdv=_SM90_DISTANCE_128)
    if width == 128:
        # Beside a loop over edge tiles dp first costs fewer registers, without one it costs some.
        return replace(config, dkdv=replace(config.dkdv, late=edges))
    return config
