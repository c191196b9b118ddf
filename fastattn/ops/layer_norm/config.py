"""Configs of the Triton norms: frozen dataclasses, chosen by a pure function of architecture, row
length and the options of a call. Nothing is tuned at run time; `forward_candidates` and
`backward_candidates` list what an off-line search tries.

Configs do not depend on the number of rows, so a row gives the same bits in every batch. Figures in
comments are GB/s of a simpler kernel with the same tiling: bf16, 32768 rows (8192 for 16384
columns), H200, where a copy reaches 3791 to 4184.
"""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

from fastattn.ops import _env

# When weight and bias are loaded: once, for all tiles of a program; after the loads of each tile,
# which then do not wait for them; or when they are needed, which keeps registers free.
BEFORE, WITH_ROWS, AFTER_STATISTICS = range(3)


@dataclass(frozen=True)
class ForwardConfig:
    """A tile of ROWS rows and BLOCK columns. If BLOCK is smaller than a row, ROWS is 1 and programs
    loop over blocks of columns.

    programs: per multiprocessor, each looping over tiles; 0: one program for each tile.
    parameters: when weight and bias are loaded, one of the three above.
    stages: pipeline stages of the loop over tiles or blocks.
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
    """A tile of ROWS rows and BLOCK columns. A row has ROW_BLOCKS blocks, one program each. If
    ROW_BLOCKS is 0, a row has any number of blocks and another kernel computes its sums before.

    programs: per multiprocessor. maxnreg: registers per thread with which all of them are resident
    at once; a program that waited for another to end would double the time.
    """

    ROWS: int
    BLOCK: int
    warps: int
    programs: int
    stages: int
    ROW_BLOCKS: int = 1
    keep_weight: bool = True
    maxnreg: int | None = None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}


@dataclass(frozen=True)
class SumConfig:
    """A tile of LINES x BLOCK, to add partial sums or to compute the sums of long rows."""

    LINES: int
    BLOCK: int
    warps: int

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": 1}


# Multiprocessors of the largest GPU of each architecture. A smaller one runs some programs later.
_MULTIPROCESSORS = {
    **{"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 160},
    **{"sm_120": 188, "gfx90a": 110, "gfx942": 304, "gfx950": 256, "interpreter": 2},
}
# Bytes of shared memory that the sums of a backward program take beside its rows, at most.
_SHARED_SUMS = 512
# Rows are read in vectors if their length and strides are multiples of this number of elements.
ALIGNED = 4
# Elements that are loaded one by one need an address each: tiles have this factor fewer rows.
_UNALIGNED = 4
_LONGEST_WHOLE_FORWARD = 8192
_LONGEST_WHOLE_ADD = 16384
_LONGEST_UNALIGNED_ADD = 4096

# Block width that holds a row -> (ROWS, warps). Lines without a figure have as many elements per
# thread as their neighbours.
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
# -> (ROWS, warps, programs per multiprocessor).
_BACKWARD = {
    # 2690, with the sum of 528 lines of partial sums; add + norm 2970. 128 registers, no spills.
    # Fewer elements per thread mean more lines; more mean fewer warps to hide loads.
    512: (4, 4, 4),
    1024: (2, 4, 4),  # 3578; 3707
    2048: (1, 4, 4),
    4096: (1, 8, 2),  # 3919; 4038
    8192: (1, 16, 1),
    # Two programs per row, as the sums of one would fill all registers of a multiprocessor. Both
    # read the whole row, the later one from L2. Not timed yet; 115 registers, add + norm 128 and 16
    # bytes of spills. One program that read rows twice from memory reached 2696.
    16384: (1, 16, 1),
}


def family(arch: str) -> str:
    """The GPU family; its architectures share configs."""
    if arch == "interpreter":
        return arch
    if not arch.startswith("sm_"):
        return "amd"
    return {9: "hopper", 10: "blackwell"}.get(int(arch[3:]) // 10, "nvidia")


def multiprocessors(arch: str) -> int:
    return _MULTIPROCESSORS.get(arch, 132)


def shared_for_rows(arch: str, programs: int) -> int:
    """The bytes of shared memory for the rows of a backward program, such that all programs of a
    multiprocessor are resident at once (NVIDIA).
    """
    reserved = _env.RESERVED_SHARED_MEMORY
    return (_env.shared_memory(arch) + reserved) // programs - reserved - _SHARED_SUMS


def width_of(N: int) -> int:
    """The width of the block that holds a row of N columns."""
    return 1 << max(0, N - 1).bit_length()


def _short(width: int, elements: int) -> int:
    """The number of rows of a tile of `elements`."""
    return min(128, max(1, elements // width))


@functools.cache
def forward_config(arch: str, N: int, add: bool, aligned: bool = True) -> ForwardConfig:
    """add: for add_layer_norm. aligned: row length and strides are multiples of ALIGNED."""
    kind, width = family(arch), width_of(N)
    if kind == "interpreter":
        # Small tensors have several tiles and use both kernels.
        return ForwardConfig(min(8, 4096 // width), width, 4) if width <= 512 else _long(256, 4)
    longest = _LONGEST_WHOLE_ADD if add else _LONGEST_WHOLE_FORWARD
    if width > (longest if aligned or not add else _LONGEST_UNALIGNED_ADD):
        # Few registers, many warps, and the row is read again from L2. torch.compile's loop of this
        # kind reaches 3966 at 16384; a row and its parameters in registers reached 2849.
        return _long(4096, 8 if kind == "amd" else 16)
    rows, warps = (_ADD if add else _FORWARD).get(width, (0, 0))
    if not rows:
        # As many elements per program as at 512.
        rows, warps = (_short(width, 512), 1) if add else (_short(width, 4096), 4)
    if kind == "amd":
        warps = max(1, warps // 2)  # of 64 lanes
    if not aligned:
        rows = max(1, rows // _UNALIGNED)
    # At 8192, parameters in registers would halve the programs per multiprocessor.
    return ForwardConfig(rows, width, warps, 0, AFTER_STATISTICS if width == 8192 else WITH_ROWS)


def _long(block: int, warps: int) -> ForwardConfig:
    return ForwardConfig(1, block, warps)


@functools.cache
def backward_config(
    arch: str, N: int, itemsize: int, tensors: int, sums: int, aligned: bool = True
) -> BackwardConfig:
    """itemsize: bytes of an element. tensors: the number of tensors read. sums: the number of
    parameter gradients. aligned: row length and strides are multiples of ALIGNED.
    """
    kind, width = family(arch), width_of(N)
    if kind == "interpreter":
        blocks = {512: 2, 1024: 0}.get(width, 1 if width < 512 else 0)
        block = width // blocks if blocks else 256
        return BackwardConfig(8, block, 4, 2, 1, blocks)
    # These need most registers: fp32 rows of 16384, or an address for each element, would spill.
    crowded = sums > 2 or (itemsize > 2 and tensors > 2)
    if aligned:
        longest = 8192 if crowded and itemsize > 2 else 16384
    else:
        longest = 2048 if crowded else 8192
    if width > longest or (width == 16384 and 2 * width * itemsize > _env.shared_memory(arch)):
        c = BackwardConfig(*_insert_block(_BACKWARD[1024], 1024), stages=3, ROW_BLOCKS=0)
    elif width == 16384:
        # With three tensors, one prefetched tile is 80 KB; two would spill 24 bytes instead of 16.
        c = BackwardConfig(
            *_insert_block(_BACKWARD[width], 8192), 3 if tensors < 3 else 2, ROW_BLOCKS=2,
            keep_weight=False,
        )  # fmt: skip
    else:
        tile = _BACKWARD.get(width, (_short(width, 2048), 4, 4))
        c = BackwardConfig(*_insert_block(tile, width), stages=3)
    if not aligned:  # single elements cannot be copied asynchronously either
        c = replace(c, ROWS=max(1, c.ROWS // _UNALIGNED), stages=1)
    if kind == "amd":
        return replace(c, warps=max(1, c.warps // 2), stages=1)  # no asynchronous copies
    # One buffer fewer than stages: the tile in use is in registers.
    read = tensors + 2 * (c.ROW_BLOCKS == 2)
    if crowded and c.programs == 4:
        c = replace(c, programs=3)
    buffers = shared_for_rows(arch, c.programs) // (c.ROWS * c.BLOCK * itemsize * read)
    return _resident(replace(c, stages=max(1, min(c.stages, buffers + 1))))


def _resident(c: BackwardConfig) -> BackwardConfig:
    """The config with `maxnreg` such that all programs are resident at once (NVIDIA)."""
    registers = (64 << 10) // (c.programs * c.warps * 32) // 8 * 8
    return replace(c, maxnreg=registers if registers < 255 else None)


def _insert_block(tile: tuple[int, int, int], block: int) -> tuple[int, int, int, int]:
    """(ROWS, warps, programs) -> (ROWS, BLOCK, warps, programs)."""
    return tile[0], block, tile[1], tile[2]


def sum_config(arch: str, N: int) -> SumConfig:
    """For the kernel that adds partial sums. It is short, so a program adds all lines of as few
    columns as make whole sectors of 32 bytes. Longer rows have fewer lines.
    """
    if arch == "interpreter":
        return SumConfig(4, 128, 4)
    warps = 4 if family(arch) == "amd" else 8
    if N <= 2048:
        return SumConfig(1024, 8, warps)
    return SumConfig(512, 16, warps) if N <= 8192 else SumConfig(128, 64, warps)


def row_sums_config(arch: str) -> SumConfig:
    """For the kernel that computes the sums of long rows, before the backward kernel."""
    return SumConfig(1, 256 if arch == "interpreter" else 4096, 8 if family(arch) == "amd" else 16)


# -- candidates of an off-line search -------------------------------------------------------------


def forward_candidates(arch: str, N: int, add: bool) -> list[ForwardConfig]:
    """The default config first."""
    width = width_of(N)
    found = [forward_config(arch, N, add)]

    def whole(rows: int, warps: int, programs: int, parameters: int, stages: int = 1) -> None:
        if 1 <= rows <= 128 and rows * width <= 64 * 32 * warps:
            found.append(ForwardConfig(rows, width, warps, programs, parameters, stages))

    # Loops over tiles that prefetch rows and keep the parameters in registers. A program of one
    # warp needs no barriers.
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
    """The default config first."""
    kind, width = family(arch), width_of(N)
    found = [backward_config(arch, N, itemsize, tensors, sums)]

    def add(c: BackwardConfig) -> None:
        read = tensors + 2 * (c.ROW_BLOCKS == 2)
        staged = (c.stages - 1) * c.ROWS * c.BLOCK * itemsize * read
        if kind == "amd":
            found.append(c)
        elif staged <= shared_for_rows(arch, c.programs):
            found.append(_resident(c))

    stages = (1,) if kind == "amd" else (1, 2, 3, 4)
    if width <= 8192:
        for elements, warps in itertools.product((8, 16, 32), (1, 2, 4, 8, 16)):
            rows = elements * warps * 32 // width
            if 1 <= rows <= 128:
                # 16 elements per thread need some 128 registers: 512 threads per multiprocessor.
                full = max(1, 256 // (warps * elements))
                for programs, depth in itertools.product((full, 2 * full, full // 2), stages):
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
