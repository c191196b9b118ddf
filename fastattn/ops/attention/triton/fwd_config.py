"""How the Triton attention forward is tiled: frozen rows, chosen by a pure function of
architecture, dtype, head dims, queries and features. Nothing is tuned at run time;
benchmarks/tune.py searches off-line. The backward's rows are in bwd_config.py.
"""

import functools
from dataclasses import dataclass, replace

import torch

from fastattn.ops.attention.triton.tiles import split_width


@dataclass(frozen=True)
class ForwardConfig:
    """One tiling of the forward kernel.

    stages: depth of the load pipeline over full and partial tiles; edge_stages: over edge tiles.
    overlap: of a tile's exponentials with products, within a program: 0 none (other programs on the
    same core must), 1 with the next scores, 2 with the last values.
    tma: K and V through tensor descriptors. maxnreg: a cap on registers a thread. precision: of
    fp32 products, never plain TF32.
    whole: head dims are one tile, padded, even where two would pad less.
    value_columns: V is padded to at least this number.
    """

    BLOCK_M: int
    BLOCK_N: int
    warps: int
    stages: int
    edge_stages: int = 2
    tma: bool = False
    maxnreg: int | None = None
    overlap: int = 0
    precision: str = "ieee"
    whole: bool = False
    value_columns: int = 16

    def widths(self, width: int) -> tuple[int, int]:
        """The two tiles of a head dim; the second may be 0."""
        return (max(16, 1 << (width - 1).bit_length()), 0) if self.whole else split_width(width)

    def value_widths(self, width: int) -> tuple[int, int]:
        """The two tiles of V's head dim."""
        return self.widths(max(width, self.value_columns))

    def options(self, vectors: bool) -> dict[str, int]:
        """Launch options of the kernel. vectors: K and V are read by descriptors or 16 bytes at a
        time, else an address for every element needs registers beyond the cap.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if self.maxnreg is not None and vectors:
            options["maxnreg"] = self.maxnreg
        return options


@dataclass(frozen=True)
class Features:
    """Features of a call that change the best tiling.

    dense: a mask tensor; wide: of 8 bytes an element. pages: of k and v, which descriptors do not
    read.
    """

    dense: bool = False
    dropout: bool = False
    wide: bool = False
    pages: bool = False


# Small blocks of the same code, so that small tensors have several tiles.
_INTERPRETER = ForwardConfig(64, 32, 4, 1)

# (family, width of the larger head dim, dense mask) -> row.
_HALF = {
    # Ampere, Ada, sm_120: 99 KB of shared memory on the smallest; wider key tiles spill. At D = 128
    # sm_120 spills 8 bytes under causality, outside the loops.
    ("ampere", 64, False): ForwardConfig(128, 32, 4, 3, 1),
    ("ampere", 64, True): ForwardConfig(64, 32, 4, 3, 1),
    ("ampere", 128, False): ForwardConfig(128, 32, 8, 2, 1),
    ("ampere", 128, True): ForwardConfig(64, 32, 8, 2, 1),
    ("ampere", 256, False): ForwardConfig(64, 32, 8, 2, 1),
    ("ampere", 256, True): ForwardConfig(64, 32, 8, 2, 1),
    # Hopper: the warpgroups of a program meet at a barrier for every buffer they hand back, so a
    # program must overlap its own exponentials and products. Below 128 registers a thread (two
    # programs of 8 warps) ptxas serialises the products of head dim 128 (C7512).
    ("hopper", 64, False): ForwardConfig(128, 128, 8, 2, 2, tma=True, overlap=1),
    # Under dense masks of D = 64 two programs share a core. Full tiles spill nothing; partial and
    # edge tiles spill where masks are read element by element (12 to 57 instructions).
    ("hopper", 64, True): ForwardConfig(128, 64, 8, 4, 2, tma=True, maxnreg=128, overlap=2),
    ("hopper", 128, False): ForwardConfig(128, 64, 8, 3, 2, tma=True, overlap=1),
    ("hopper", 128, True): ForwardConfig(128, 64, 8, 3, 2, tma=True, overlap=2),
    # 128 x 64 fills shared memory (224 KB) and the registers; dense masks need some of these.
    ("hopper", 256, False): ForwardConfig(128, 64, 8, 2, 1, tma=True, overlap=1),
    ("hopper", 256, True): ForwardConfig(128, 32, 8, 2, 2, tma=True),
    # Blackwell: the accumulators live in tensor memory.
    ("blackwell", 64, False): ForwardConfig(128, 64, 4, 3, 2, tma=True),
    ("blackwell", 64, True): ForwardConfig(128, 64, 8, 3, 2, tma=True),
    ("blackwell", 128, False): ForwardConfig(128, 64, 8, 2, 2, tma=True),
    ("blackwell", 128, True): ForwardConfig(128, 64, 8, 2, 2, tma=True),
    ("blackwell", 256, False): ForwardConfig(128, 64, 8, 2, 1, tma=True),
    ("blackwell", 256, True): ForwardConfig(128, 32, 8, 2, 1, tma=True),
    # AMD: 64 KB of shared memory, no asynchronous copies, 512 registers for a wave that is alone.
    ("amd", 64, False): ForwardConfig(128, 32, 4, 1, 1),
    ("amd", 64, True): ForwardConfig(128, 32, 4, 1, 1),
    ("amd", 128, False): ForwardConfig(128, 32, 4, 1, 1),
    ("amd", 128, True): ForwardConfig(64, 32, 4, 1, 1),
    ("amd", 256, False): ForwardConfig(64, 32, 4, 1, 1),
    ("amd", 256, True): ForwardConfig(64, 32, 4, 1, 1),
}
_SINGLE = {
    # Three TF32 products for one: correct to fp32's last bits and several times faster than FMA.
    ("nvidia", 64): ForwardConfig(64, 32, 4, 2, 1, precision="tf32x3"),
    # D of 72 to 96 as two tiles is 1750 to 2174 instructions a key tile, padded 1169 to 1205.
    ("nvidia", 128): ForwardConfig(32, 32, 4, 2, 1, precision="tf32x3", whole=True),
    # 64 rows go to wgmma, smaller tiles to mma.sync, where two of four warps repeat the others'
    # products: the warps' instructions for a pair of query and key are 2.4 to 3.7, with 32 rows 4.5
    # to 5.7. Elsewhere 64 rows spill (sm_80: 235 instructions).
    ("hopper", 128): ForwardConfig(64, 32, 4, 1, 1, precision="tf32x3", whole=True),
    ("nvidia", 256): ForwardConfig(32, 16, 4, 1, 1, precision="tf32x3"),
    # D = 256 spills in every tiling: here 228 to 408 instructions in loops of 2348 to 3178, 9.2 to
    # 12.4 for a pair; with 16 keys 177 to 567 in loops of 1856 to 2819, 14.5 to 22.0 for a pair.
    # Either way two programs share a core; on sm_80 one of these would be alone. For values of 32
    # columns or fewer, or a second tile of them, ptxas gives up: 32 registers, 3,000 spills. The
    # former keep 16 keys, the latter are padded: D = 200, E = 72 7.3 for a pair, with 16 keys 15.1.
    ("hopper", 256): ForwardConfig(32, 32, 4, 1, 1, precision="tf32x3"),
    ("blackwell", 256): ForwardConfig(32, 32, 4, 1, 1, precision="tf32x3"),
    # The matrix cores multiply fp32 as it is; D of 72 to 96 is 387 to 447 instructions, padded 533.
    ("amd", 64): ForwardConfig(64, 32, 4, 1, 1),
    ("amd", 128): ForwardConfig(64, 32, 4, 1, 1),
    ("amd", 256): ForwardConfig(32, 32, 4, 1, 1),
}


def family(arch: str) -> str:
    """Architectures that share rows."""
    if not arch.startswith("sm_"):
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(int(arch[3:]) // 10, "ampere")


def _stages_with_pages(stages: int, loads: int) -> int:
    """Number of stages of a load pipeline over tiles whose pages are looked up, with as many tiles
    in flight as `stages` give without pages. loads: how many loads of a step depend on each other
    without pages (one of the tile, under a dense mask one of its number before); each gets an equal
    share of all stages but the last.
    """
    share = (stages - 1) // loads
    return share * (loads + 1) + 1 if share else stages


@functools.cache
def forward_config(
    arch: str, dtype: torch.dtype, D: int, E: int, M: int, features: Features
) -> ForwardConfig:
    if arch == "interpreter":
        return _INTERPRETER
    kind = family(arch)
    widest = max(sum(split_width(D)), sum(split_width(E)))
    width = 64 if widest <= 64 else 128 if widest <= 128 else 256
    if dtype is torch.float32:
        row = _SINGLE["amd" if kind == "amd" else "nvidia", width]
        if M > 16 and (kind, width) in _SINGLE and (width < 256 or E > 32):
            row = _SINGLE[kind, width]
            row = replace(row, whole=row.whole or split_width(E)[1] in (16, 32))
    else:
        row = _HALF[kind, width, features.dense]
        least = min(64, split_width(D)[0])
        if kind == "hopper" and M > 16 and sum(split_width(E)) < least:
            # Narrower values than keys: where products read both from one place in shared memory,
            # their descriptors for wgmma differ in the upper half, and ptxas 12.8 takes that of the
            # values from a register that it has not set (12.9 does not).
            row = replace(row, value_columns=least)
        pointers = features.pages or split_width(D)[1] > 0 or row.value_widths(E)[1] > 0
        if row.tma and pointers:
            row = replace(row, overlap=2 if width <= 128 else 0)  # pointers take their registers
        elif row.overlap == 1 and features.dropout:
            # Bits of dropout take more issue slots than products take time. At D = 64 a tile's loop
            # is 709 instructions and 165 registers, with overlap 1 772 and 249: scores are copied.
            row = replace(row, overlap=2)
    if features.pages:
        loads = 2 if features.dense else 1
        row = replace(
            row, stages=_stages_with_pages(row.stages, loads),
            edge_stages=_stages_with_pages(row.edge_stages, loads), maxnreg=None,
        )  # fmt: skip
    if features.wide:
        # Several tiles of such a mask on their way need more shared memory than there is.
        row = replace(row, stages=1, edge_stages=1, maxnreg=None)
    if M <= 16:
        # Four warps cannot share a second tile of 16 columns. Instructions of a key tile, as two
        # tiles and padded to one, on sm_80, sm_90, sm_100 and gfx942:
        #   D = 40    243, 173    590, 335    325, 203    212, 179
        #   D = 80    252, 227    413, 273    409, 294    220, 223
        #   D = 144   353, 329    625, 472    622, 458    268, 316
        # A wider second tile of v is worth more than a narrow one of q and k costs.
        second = split_width(D)[1], split_width(E)[1]
        narrow = second[1] == 16 or (second[0] == 16 and second[1] == 0)
        row = replace(row, whole=row.whole or (narrow and (kind != "amd" or width == 64)))
        # wgmma and descriptors need 64 rows; a few queries need many key tiles in flight.
        return replace(row, BLOCK_M=16, warps=4, tma=False, maxnreg=None, overlap=0)
    if M <= 64 and row.BLOCK_M > 64:
        return replace(row, BLOCK_M=64, warps=row.warps // 2, maxnreg=None)
    return row
