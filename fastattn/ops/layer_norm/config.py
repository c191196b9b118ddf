"""How the Triton norms are tiled: frozen rows, chosen by a pure function of architecture, row
length and what a call asks for. Nothing is tuned at run time; `forward_candidates` and
`backward_candidates` list what an off-line search tries.

Nothing here depends on the number of rows, so a row gives the same bits in every batch. Reasons are
GB/s of a plainer kernel of the same tiling: bf16, 32768 rows (8192 of 16384 columns), H200, where
copying reaches 3791 to 4184.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

# Weight and bias are loaded once, for all tiles of a program; behind a tile's own loads, which then
# do not wait for them; or when they are needed, which keeps registers free.
BEFORE, WITH_ROWS, AFTER_STATISTICS = range(3)


@dataclass(frozen=True)
class ForwardConfig:
    """A tile of ROWS rows and BLOCK columns. BLOCK below the row length: one row at a time, in a
    loop over blocks of columns.

    programs: how many a core gets, which then loop over the tiles; 0: one for each tile.
    parameters: when weight and bias are loaded, one of the three above.
    stages: depth of the load pipeline over tiles or blocks.
    """

    ROWS: int
    BLOCK: int
    warps: int
    programs: int = 0
    parameters: int = WITH_ROWS
    stages: int = 1

    def options(self) -> dict[str, Any]:
        """Launch options of the kernel."""
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class BackwardConfig:
    """A tile of ROWS rows and BLOCK columns. PARTS * BLOCK columns hold a row, except where PARTS
    is 0: then one kernel makes the sums along the rows, and another reads the data again.

    programs: how many a core gets. maxnreg: so that they all fit: one that waited for another to
    end would double the time.
    """

    ROWS: int
    BLOCK: int
    warps: int
    programs: int
    stages: int
    PARTS: int = 1
    keep_weight: bool = True
    maxnreg: int | None = None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


@dataclass(frozen=True)
class SumConfig:
    """Of the sum over partial sums, LINES x BLOCK at a time, and of the sums along long rows."""

    LINES: int
    BLOCK: int
    warps: int

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": 1}


# Of the largest product of each architecture; a smaller one runs some programs later.
_CORES = {
    **{"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 160},
    **{"sm_120": 188, "gfx90a": 110, "gfx942": 304, "gfx950": 256, "interpreter": 2},
}
# Bytes of shared memory a core has for its programs. Ampere: of the consumer products.
_SHARED = {"hopper": 227 << 10, "blackwell": 227 << 10, "nvidia": 99 << 10, "amd": 64 << 10}
# Rows that lie so many elements apart, or a multiple of it, are read in vectors.
ALIGNED = 4
# Elements that are loaded one by one have an address each: so many times fewer rows at once.
_UNALIGNED = 4
_LONGEST_WHOLE_FORWARD = 8192
_LONGEST_WHOLE_ADD = 16384
_LONGEST_UNALIGNED_ADD = 4096

# Rows without a figure keep the elements a thread of their neighbours.
# Width of the block that holds a row -> (ROWS, warps).
_FORWARD = {
    512: (8, 4),  # 3303
    1024: (2, 4),  # 3694 (fp32 parameters 3455)
    2048: (2, 8),
    4096: (2, 8),  # 3862 (fp32 parameters 3608)
    8192: (1, 8),
}
_ADD = {
    512: (1, 1),  # 3654
    1024: (2, 4),  # 3911
    2048: (1, 4),
    4096: (1, 8),  # 3914
    8192: (1, 16),
    16384: (1, 16),  # 3883 (fp32 parameters 3447)
}
# -> (ROWS, warps, programs a core).
_BACKWARD = {
    # 2690, with the sum of 528 lines of partial sums; add + norm 2970. 128 registers, none spilled;
    # with fewer elements a thread there would be more lines, with more fewer warps to hide loads.
    512: (4, 4, 4),
    1024: (2, 4, 4),  # 3578; 3707
    2048: (1, 4, 4),
    4096: (1, 8, 2),  # 3919; 4038
    8192: (1, 16, 1),
    # Two programs a row, as the sums of one would fill every register of a core. Both read all of
    # it, the later one from L2. Not timed yet; 115 registers, add + norm 128 and 16 bytes of spill.
    # One program that read rows twice from memory reached 2696.
    16384: (1, 16, 1),
}


def family(arch: str) -> str:
    """Architectures that share rows."""
    if arch == "interpreter":
        return arch
    if not arch.startswith("sm_"):
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(int(arch[3:]) // 10, "nvidia")


def cores(arch: str) -> int:
    return _CORES.get(arch, 132)


def width_of(N: int) -> int:
    """The block of columns that holds a row of N."""
    return 1 << max(0, N - 1).bit_length()


def _short(width: int, elements: int) -> int:
    """How many rows make a tile of so many elements."""
    return min(128, max(1, elements // width))


@functools.cache
def forward_config(arch: str, N: int, add: bool, aligned: bool = True) -> ForwardConfig:
    """add: of add_layer_norm. aligned: row length and strides are multiples of ALIGNED."""
    kind, width = family(arch), width_of(N)
    if kind == "interpreter":
        # Several tiles and both kernels on small tensors.
        return ForwardConfig(min(8, 4096 // width), width, 4) if width <= 512 else _long(256, 4)
    longest = _LONGEST_WHOLE_ADD if add else _LONGEST_WHOLE_FORWARD
    if width > (longest if aligned or not add else _LONGEST_UNALIGNED_ADD):
        # Few registers, many warps, the row read again from L2: torch.compile's loop of this kind
        # reaches 3966 at 16384, where a row in registers with its parameters reached 2849.
        return _long(4096, 8 if kind == "amd" else 16)
    rows, warps = (_ADD if add else _FORWARD).get(width, (0, 0))
    if not rows:
        # As at 512, in elements a program.
        rows, warps = (_short(width, 512), 1) if add else (_short(width, 4096), 4)
    if kind == "amd":
        warps = max(1, warps // 2)  # of 64 lanes
    if not aligned:
        rows = max(1, rows // _UNALIGNED)
    # At 8192 parameters in registers would halve the programs on a core.
    return ForwardConfig(rows, width, warps, 0, AFTER_STATISTICS if width == 8192 else WITH_ROWS)


def _long(block: int, warps: int) -> ForwardConfig:
    return ForwardConfig(1, block, warps)


@functools.cache
def backward_config(
    arch: str, N: int, itemsize: int, tensors: int, sums: int, aligned: bool = True
) -> BackwardConfig:
    """itemsize: bytes of an element. tensors: how many are read. sums: parameter gradients.
    aligned: row length and strides are multiples of ALIGNED.
    """
    kind, width = family(arch), width_of(N)
    if kind == "interpreter":
        parts = {512: 2, 1024: 0}.get(width, 1 if width < 512 else 0)
        block = width // parts if parts else 256
        return BackwardConfig(8, block, 4, 2, 1, parts)
    # What needs most registers: rows of 16384 in fp32, or addresses of each element, would not fit.
    crowded = sums > 2 or (itemsize > 2 and tensors > 2)
    if aligned:
        longest = 8192 if crowded and itemsize > 2 else 16384
    else:
        longest = 2048 if crowded else 8192
    if width > longest or (width == 16384 and 2 * width * itemsize > _SHARED[kind]):
        row = BackwardConfig(*_rows_of(_BACKWARD[1024], 1024), stages=3, PARTS=0)
    elif width == 16384:
        # Of three tensors one tile ahead is 80 KB, and two ahead would spill (24 bytes, not 16).
        row = BackwardConfig(
            *_rows_of(_BACKWARD[width], 8192), 3 if tensors < 3 else 2, PARTS=2, keep_weight=False
        )
    else:
        tile = _BACKWARD.get(width, (_short(width, 2048), 4, 4))
        row = BackwardConfig(*_rows_of(tile, width), stages=3)
    if not aligned:  # nor can elements be copied asynchronously one by one
        row = replace(row, ROWS=max(1, row.ROWS // _UNALIGNED), stages=1)
    if kind == "amd":
        return replace(row, warps=max(1, row.warps // 2), stages=1)  # no asynchronous copies
    # One buffer less than stages: the tile that is computed has left its buffer.
    read = tensors + 2 * (row.PARTS == 2)
    buffers = _SHARED[kind] // (row.programs * row.ROWS * row.BLOCK * itemsize * read)
    if crowded and row.programs == 4:
        row = replace(row, programs=3)
    return _resident(replace(row, stages=max(1, min(row.stages, buffers + 1))))


def _resident(row: BackwardConfig) -> BackwardConfig:
    """With so few registers a thread that all programs of a core run at once (NVIDIA)."""
    registers = (64 << 10) // (row.programs * row.warps * 32) // 8 * 8
    return replace(row, maxnreg=registers if registers < 255 else None)


def _rows_of(row: tuple[int, int, int], block: int) -> tuple[int, int, int, int]:
    """(ROWS, BLOCK, warps, programs)."""
    return row[0], block, row[1], row[2]


def sum_config(arch: str, N: int) -> SumConfig:
    """Of the second stage. It is short: all lines at once, in as many programs as read whole
    sectors of 32 bytes; longer rows have fewer lines.
    """
    if arch == "interpreter":
        return SumConfig(4, 128, 4)
    warps = 4 if family(arch) == "amd" else 8
    if N <= 2048:
        return SumConfig(1024, 8, warps)
    return SumConfig(512, 16, warps) if N <= 8192 else SumConfig(128, 64, warps)


def row_sums_config(arch: str) -> SumConfig:
    """Of the first backward kernel of long rows."""
    return SumConfig(1, 256 if arch == "interpreter" else 4096, 8 if family(arch) == "amd" else 16)


# -- candidates of an off-line search -------------------------------------------------------------


def forward_candidates(arch: str, N: int, add: bool) -> list[ForwardConfig]:
    """The shipped one first."""
    width, shipped = width_of(N), forward_config(arch, N, add)
    found = [shipped]

    def whole(rows: int, warps: int, programs: int, parameters: int, stages: int = 1) -> None:
        if 1 <= rows <= 128 and rows * width <= 64 * 32 * warps:
            found.append(ForwardConfig(rows, width, warps, programs, parameters, stages))

    # Looping over tiles with the next rows on their way, the parameters in registers. One warp a
    # program spares every barrier.
    for rows, warps, programs in (
        *((1, 1, 24), (2, 1, 16), (4, 1, 12), (1, 2, 12), (2, 2, 8), (4, 4, 8), (8, 8, 4)),
        *((2, 4, 8), (1, 4, 8), (1, 8, 4), (1, 16, 2), (1, 16, 1), (1, 32, 1)),
    ):
        for stages in (1, 3, 4):
            whole(rows, warps, programs, BEFORE, stages)
    for elements, warps, when in itertools.product(
        (16, 32, 8, 64), (1, 4, 2, 8, 16, 32), (WITH_ROWS, AFTER_STATISTICS)
    ):
        whole(elements * warps * 32 // width, warps, 0, when)
    for block, warps in ((2048, 16), (4096, 16), (4096, 8), (2048, 8), (8192, 32)):
        if block < width:
            found += [ForwardConfig(1, block, warps, stages=stages) for stages in (1, 2, 3)]
    return list(dict.fromkeys(found))


def backward_candidates(
    arch: str, N: int, itemsize: int, tensors: int, sums: int
) -> list[BackwardConfig]:
    """The shipped one first."""
    kind, width = family(arch), width_of(N)
    found = [backward_config(arch, N, itemsize, tensors, sums)]

    def add(row: BackwardConfig) -> None:
        read = tensors + 2 * (row.PARTS == 2)
        staged = (row.stages - 1) * row.ROWS * row.BLOCK * itemsize * read
        if row.programs * staged <= _SHARED[kind]:
            found.append(row if kind == "amd" else _resident(row))

    stages = (1,) if kind == "amd" else (1, 2, 3, 4)
    if width <= 8192:
        for elements, warps in itertools.product((8, 16, 32), (1, 2, 4, 8, 16)):
            rows = elements * warps * 32 // width
            if 1 <= rows <= 128:
                # 16 elements a thread need some 128 registers: 512 threads a core.
                most = max(1, 256 // (warps * elements))
                for programs, depth in itertools.product((most, 2 * most, most // 2), stages):
                    if programs:
                        add(BackwardConfig(rows, width, warps, programs, depth))
    if 4096 <= width <= 16384:
        for (warps, programs), depth in itertools.product(
            ((8, 1), (16, 1), (8, 2), (32, 1)), stages
        ):
            add(BackwardConfig(1, width // 2, warps, programs, depth, 2, keep_weight=False))
    if width >= 8192:
        for (rows, block), programs, depth in itertools.product(
            ((2, 1024), (4, 512), (1, 2048), (4, 1024)), (4, 8), stages
        ):
            add(BackwardConfig(rows, block, 4, programs, depth, 0))
    return list(dict.fromkeys(found))
