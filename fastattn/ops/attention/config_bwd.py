"""How the Triton attention backward is tiled: frozen rows, chosen by a pure function of architecture, dtype and head
dims. Nothing is tuned at run time; benchmarks/tune.py times what `candidates` offers off-line.

The reasons given are what the compiler made of each row (Triton 3.6, ptxas 12.8): registers a thread, and whether the
loops over full tiles spill. The tensor cores' share of time is not in them.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastattn.ops.attention.triton_tiles import split_width


@dataclass(frozen=True)
class BwdTile:
    """The tiling of one kernel: block_m queries by block_n keys.

    stages: depth of the load pipeline over full and partial tiles; edge_stages: over edge tiles. tma: the operands of
    the loop come through tensor descriptors. late: dkdv computes dp before p. maxnreg: a cap on registers a thread.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
    late: bool = False
    edge_stages: int = 1
    maxnreg: int | None = None

    def options(self) -> dict[str, Any]:
        """Launch options of the kernel."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


@dataclass(frozen=True)
class BwdConfig:
    """dq owns queries, dkdv owns keys; dmask runs on the smaller block of either side.

    separate: dk and dv by two launches, each with the registers of one. precision: of fp32 products. widest: a head dim
    is cut into two tiles where one would be wider.
    """

    dq: BwdTile
    dkdv: BwdTile
    separate: bool = False
    precision: str = "ieee"
    widest: int = 256
    dmask_warps: int = 4

    def widths(self, width: int) -> tuple[int, int]:
        """The two tiles of a head dim; the second may be 0."""
        first, second = split_width(width)
        return (first // 2, first // 2) if first > self.widest and second == 0 else (first, second)


_T, _C = BwdTile, BwdConfig

# Rows by the widest head dim they serve.
_Rows = tuple[tuple[int, BwdConfig], ...]

# Several tiles in small tensors, and other blocks for the two kernels: what the interpreter is to go through.
_INTERPRETER: _Rows = (
    (64, _C(_T(64, 32, 4, 1), _T(32, 64, 4, 1))),
    (256, _C(_T(32, 64, 4, 1), _T(64, 32, 4, 1, late=True), separate=True, widest=128)),
)

# Hopper. Two warpgroups of 64 rows; descriptors save 20 to 60 registers over pointers.
_SM90: _Rows = (
    # dq 122 registers (two programs an SM), dkdv 211.
    (64, _C(_T(128, 64, 8, 3, tma=True), _T(64, 128, 8, 3, tma=True))),
    # dq 185, dkdv 255 with 2 to 6 registers spilled outside the loops.
    (128, _C(_T(128, 64, 8, 3, tma=True), _T(64, 128, 8, 3, tma=True))),
    # One accumulator of [128, 256] at a time: together they spill 42 words a tile.
    (256, _C(_T(128, 32, 8, 2, tma=True), _T(32, 128, 8, 2, tma=True), separate=True)),
)
# Under a dense mask three loops share the registers: 64 x 128 would spill 30 to 170 words a partial tile.
_SM90_DENSE_128 = _C(_T(128, 64, 8, 2, tma=True), _T(32, 128, 8, 3))

# Blackwell: accumulators live in tensor memory.
_SM100: _Rows = (
    (64, _C(_T(128, 64, 8, 2), _T(64, 128, 8, 2))),  # dq 111 registers, dkdv 237
    (128, _C(_T(64, 64, 4, 2), _T(64, 128, 8, 2))),  # dq 144, dkdv 255
    (256, _C(_T(64, 64, 8, 1), _T(64, 64, 8, 1))),  # dq 226, dkdv 255
)

# Ampere: mma.sync, 163 KiB of shared memory.
_SM80: _Rows = (
    (64, _C(_T(128, 64, 8, 2), _T(32, 128, 8, 2))),  # dq 186 registers, dkdv 218
    (128, _C(_T(64, 64, 4, 2), _T(32, 64, 4, 2))),  # 255 and 255; 128 keys spill
    (256, _C(_T(64, 64, 8, 1), _T(32, 64, 8, 1), separate=True)),  # 251; dk 201, dv 174
)

# Ada, and the Blackwells without tensor memory: 99 KiB of shared memory.
_SMALL: _Rows = (
    _SM80[0],
    _SM80[1],
    (256, _C(_T(32, 32, 4, 1), _T(32, 32, 4, 1), separate=True)),
)

# fp32 as three TF32 products of mma.sync; "ieee" runs on the CUDA cores and takes ptxas half a minute at D = 128.
_FP32: _Rows = (
    (64, _C(_T(32, 32, 4, 1), _T(32, 32, 8, 1), precision="tf32x3")),
    (128, _C(_T(32, 32, 8, 1), _T(32, 32, 8, 1), precision="tf32x3", widest=64)),
    (256, _C(_T(16, 32, 8, 1), _T(32, 16, 8, 1), True, "tf32x3", widest=128)),
)

# AMD (CDNA): 64 KiB of shared memory, 512 vector registers; "ieee" is what its matrix cores do with fp32.
_AMD: _Rows = (
    (64, _C(_T(128, 32, 4, 1), _T(32, 128, 4, 1))),
    (128, _C(_T(128, 32, 4, 1), _T(32, 64, 4, 1))),
    (256, _C(_T(64, 16, 4, 1), _T(16, 64, 4, 1))),
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
    banded: bool = False,
    dense: bool = False,
) -> BwdConfig:
    """banded: causal or a window; dense: a mask, or a key length for every query."""
    width = max(D, E)
    if arch == "interpreter":
        return _row(_INTERPRETER, width)
    if not arch.startswith("sm_"):
        return _row(_AMD_FP32 if dtype == torch.float32 else _AMD, width)
    if dtype == torch.float32:
        return _row(_FP32, width)
    if arch == "sm_90":
        if 64 < width <= 128:
            if dense:
                return _SM90_DENSE_128
            config = _row(_SM90, width)
            # With a second loop, over edge tiles, dp first leaves more registers; without one it takes some.
            return replace(config, dkdv=replace(config.dkdv, late=banded))
        return _row(_SM90, width)
    if arch in ("sm_100", "sm_103"):
        return _row(_SM100, width)
    return _row(_SM80 if arch == "sm_80" else _SMALL, width)


def candidates(
    arch: str,
    dtype: torch.dtype,
    D: int,
    E: int,
    causal: bool = False,
    dense: bool = False,
) -> list[BwdConfig]:
    """What is worth timing: the shipped row, then rows that change one kernel of it. Their times add up, so the best
    row has the best dq and the best dkdv, whichever rows they are from."""
    base = bwd_config(arch, dtype, D, E, causal, dense)
    width = max(D, E)
    dqs: tuple[BwdTile, ...] = ()
    dkdvs: tuple[BwdTile, ...] = ()
    if arch == "sm_90" and dtype != torch.float32:
        if width <= 64:
            dqs = (
                _T(128, 64, 8, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3, tma=True),
                _T(128, 128, 8, 2, tma=True), _T(64, 128, 4, 2, tma=True),
                _T(128, 64, 8, 3, tma=True, edge_stages=2),
            )  # fmt: skip
            dkdvs = (
                _T(64, 128, 8, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3, tma=True), _T(64, 64, 4, 2, tma=True),
                _T(64, 128, 8, 2, tma=True), _T(64, 128, 8, 3, tma=True, late=True),
            )  # fmt: skip
        elif width <= 128:
            dqs = (
                _T(128, 64, 8, 3), _T(64, 64, 4, 2, tma=True), _T(128, 128, 8, 2, tma=True),
                _T(128, 64, 8, 2, tma=True), _T(128, 64, 8, 3, tma=True, edge_stages=2),
            )  # fmt: skip
            dkdvs = (
                _T(64, 128, 8, 3), _T(64, 128, 8, 3, late=True), _T(64, 64, 4, 2, tma=True),
                _T(64, 128, 8, 2, tma=True, late=True), _T(64, 128, 8, 3, tma=True, late=not causal),
                _T(32, 128, 8, 3), _T(64, 64, 8, 2, tma=True),
            )  # fmt: skip
        else:
            dqs = (_T(64, 32, 4, 2, tma=True), _T(64, 64, 8, 2, tma=True), _T(128, 32, 8, 2))
            dkdvs = (_T(64, 64, 8, 2, tma=True), _T(64, 64, 4, 2, tma=True), _T(64, 128, 8, 1, tma=True))
    elif arch == "sm_80" and dtype != torch.float32:
        dqs = (_T(64, 64, 4, 2), _T(128, 32, 4, 2), _T(128, 64, 8, 2)) if width <= 128 else ()
        dkdvs = (_T(32, 64, 4, 2), _T(32, 128, 8, 2), _T(64, 128, 8, 2)) if width <= 128 else ()
    elif arch == "sm_100" and dtype != torch.float32:
        dqs = (_T(64, 64, 4, 2), _T(128, 64, 8, 2), _T(128, 128, 8, 2)) if width <= 128 else ()
        dkdvs = (_T(64, 64, 4, 2), _T(64, 128, 8, 2)) if width <= 128 else ()
    rows = [base]
    rows += [replace(base, dq=tile) for tile in dqs]
    rows += [replace(base, dkdv=tile) for tile in dkdvs]
    return list(dict.fromkeys(rows))
