"""Which tiles attention's kernels in Triton visit where arithmetic alone cannot say it: lists of
tiles, one format for the forward and the backward.

An outer tile (queries in the forward and for dq, keys for dk and dv) has a header of counts, then
the lists of its inner tiles that are FULL, PARTIAL or EDGE; those that are empty are not listed:

    FULL     every pair is allowed, an additive mask is exactly 0
    PARTIAL  the mask blocks some pairs or adds to them, nothing else matters
    EDGE     lengths, causality or a window block some pairs, or some line of the inner tile lies
             beyond the tensor or has no pair in the tile: it may hold NaN, so a product over it
             must see zeros

The forward lists the tiles of the mask alone, and bounds the lists by arithmetic: `mask_lister`
reads the mask once, `prepared_lister` the tile bitmasks of a prepared mask. The backward's kernels
cut the pairs in two ways, with all restrictions intersected: `tile_lister` reads the base bits that
base_tiles.py stores. All run on the device without synchronisation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch
from fastattn.ops.attention.triton.base_tiles import (
    BITMASK_KEYS,
    BITMASK_OUTSIDE,
    BITMASK_WHOLE,
    KEYS_ALIVE,
    OUTSIDE,
    QUERIES_ALIVE,
    SOME,
    TILE,
    UNBOUND,
    WHOLE,
    BaseTiles,
    bitmask_strides,
)
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    PARTIAL,
    MaskShape,
    MaskStrides,
    load_mask,
)

LIST_HEADER = tl.constexpr(4)
# A line of a base tile has a bit in a bitmask.
ALL_LINES = tl.constexpr((1 << TILE.value) - 1)

# -- layout ---------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """int32 [batches, heads, outer, LIST_HEADER + places]: how many FULL, PARTIAL and EDGE, a spare
    entry, then for each of these kinds a list of tiles, ascending.

    factor_outer, factor_inner: base tiles along a side of an outer and of an inner tile. apart, in
    the forward: each list has `inner` places, because `mask_lister` learns the counts last. Else
    a list begins where the one before it ends: exact delta loops over all three at once, and the
    loops of dkdv are up to 15 instructions shorter (sm_90, D = 128).
    """

    batches: int
    heads: int
    outer: int
    inner: int
    factor_outer: int
    factor_inner: int
    apart: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        places = 3 * self.inner if self.apart else self.inner
        return self.batches, self.heads, self.outer, LIST_HEADER.value + places

    @property
    def programs(self) -> int:
        return self.batches * self.heads * self.outer

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides of batch, head and outer tile, 0 in broadcast dimensions."""
        batches, heads, outer, row = self.shape
        return (
            heads * outer * row if batches > 1 else 0, outer * row if heads > 1 else 0,
            row if outer > 1 else 0,
        )  # fmt: skip


def mask_lists(mask: MaskShape, M: int, N: int, block_m: int, block_n: int) -> Lists:
    """Lists of query tiles, by the mask alone. Base tiles are those of a prepared mask."""
    batches, heads, rows, _ = mask.sizes
    outer = triton.cdiv(M, block_m)
    if rows == 1:
        outer = min(outer, 1)  # all query tiles look alike
    factors = block_m // TILE.value, block_n // TILE.value
    return Lists(batches, heads, outer, triton.cdiv(N, block_n), *factors, True)


def base_tile_lists(base: BaseTiles, block_m: int, block_n: int, by_key: bool) -> Lists:
    """by_key: outer tiles are key tiles (dk, dv), else query tiles (dq)."""
    m, n = block_m // base.block_m, block_n // base.block_n
    tiles_m, tiles_n = triton.cdiv(base.tiles_m, m), triton.cdiv(base.tiles_n, n)
    sizes = (tiles_n, tiles_m, n, m) if by_key else (tiles_m, tiles_n, m, n)
    return Lists(base.batches, base.heads, *sizes, False)


# -- reading lists --------------------------------------------------------------------------------


@triton.jit
def list_counts(lists_ptr):
    """(FULL, PARTIAL, EDGE tiles) in the lists of an outer tile."""
    return tl.load(lists_ptr + FULL), tl.load(lists_ptr + PARTIAL), tl.load(lists_ptr + EDGE)


@triton.jit
def list_of(lists_ptr, inner, kind):
    """Pointer to the list of `kind`, if lists are `inner` entries apart."""
    return lists_ptr + LIST_HEADER + kind * inner


@triton.jit
def listed_below(list_ptr, count, tile):
    """How many entries of an ascending list are below `tile`."""
    below = 0
    for start in range(0, count, 128):
        offs = start + tl.arange(0, 128)
        entries = tl.load(list_ptr + offs, mask=offs < count, other=2147483647)
        below += tl.sum((entries < tile).to(tl.int32), axis=0)
    return below


# -- the lists of a mask alone --------------------------------------------------------------------


@triton.jit
def store_counts(lists_ptr, n_full, n_partial, n_edge):
    tl.store(lists_ptr + FULL, n_full)
    tl.store(lists_ptr + PARTIAL, n_partial)
    tl.store(lists_ptr + EDGE, n_edge)


@triton.jit(do_not_specialize=["heads", "M", "outers", "inner"])
def list_mask_kernel(
    mask_ptr, lists_ptr, stride_mask, heads, M, N, outers, inner,
    ROWS_SHARED: tl.constexpr, COLUMNS_SHARED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The lists of one query tile, straight from the mask."""
    pid = tl.program_id(0)
    outer = pid % outers
    batch_head = (pid // outers).to(tl.int64)
    mask_ptr += batch_head // heads * stride_mask.b + batch_head % heads * stride_mask.h
    lists_ptr += pid.to(tl.int64) * (LIST_HEADER + 3 * inner)
    # A broadcast dimension is read as one line that stands for all.
    i = tl.arange(0, 1 if ROWS_SHARED else BLOCK_M)[:, None]
    j = tl.arange(0, 1 if COLUMNS_SHARED else BLOCK_N)[None, :]
    n_full = 0
    n_partial = 0
    n_edge = 0
    m_start = outer * BLOCK_M
    mask_ptr += m_start.to(tl.int64) * stride_mask.m
    rows = 1 if ROWS_SHARED else M - m_start
    for t in range(0, inner):
        n_start = t * BLOCK_N
        columns = 1 if COLUMNS_SHARED else N - n_start
        tile_ptr = mask_ptr + n_start.to(tl.int64) * stride_mask.n
        allowed, bias = load_mask(tile_ptr, i, j, stride_mask.m, stride_mask.n, rows, columns, 0)
        plain = allowed
        if mask_ptr.dtype.element_ty != tl.int1:
            plain = plain & (bias == 0.0)
        # Queries beyond the tensor do not count, keys beyond it are dead.
        keys = tl.min((plain | (i >= rows)).to(tl.int32), axis=0)
        alive = tl.max(allowed.to(tl.int32), axis=0)
        ragged = n_start + BLOCK_N > N
        some = tl.max(alive, axis=0) > 0
        full = (tl.min(keys, axis=0) > 0) & (ragged == 0)
        edge = (tl.min(alive, axis=0) == 0) | ragged
        kind = tl.where(full, FULL, tl.where(edge, EDGE, PARTIAL))
        count = tl.where(full, n_full, tl.where(edge, n_edge, n_partial))
        tl.store(list_of(lists_ptr, inner, kind) + count, t, mask=some)
        n_full += (some & (kind == FULL)).to(tl.int32)
        n_partial += (some & (kind == PARTIAL)).to(tl.int32)
        n_edge += (some & (kind == EDGE)).to(tl.int32)
    store_counts(lists_ptr, n_full, n_partial, n_edge)


def mask_lister(
    mask: MaskShape, lists: Lists, M: int, N: int, block_m: int, block_n: int
) -> Callable[..., None]:
    """The launch (mask, lists) that reads the mask."""
    launch = BoundLaunch(
        list_mask_kernel,
        (MaskStrides(*mask.strides), lists.heads, M, N, lists.outer, lists.inner),
        {
            "ROWS_SHARED": mask.sizes[2] == 1,
            "COLUMNS_SHARED": mask.sizes[3] == 1,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
        },
    )
    # One dimension: a grid's others end at 65535.
    return launch.over(lists.programs)


# -- lists from base tiles ------------------------------------------------------------------------


class Bases(NamedTuple):
    """Bits or bitmasks of the base tiles of one head, n_outer by n_inner; lines of the latter."""

    ptr: Any
    stride_outer: Any
    stride_inner: Any
    n_outer: Any
    n_inner: Any
    lines: Any


@triton.jit
def kinds_of_tiles(
    bases, outer, inner,
    BITMASKS: tl.constexpr, ALIVE: tl.constexpr, FACTOR_OUTER: tl.constexpr,
    FACTOR_INNER: tl.constexpr,
):  # fmt: skip
    """(full, partial, edge) of the tiles (outer, inner): 0 or 1, at most one of the three is 1."""
    ALL: tl.constexpr = ALL_LINES if BITMASKS else 1
    some = tl.zeros_like(inner)
    whole = tl.zeros_like(inner) + 1
    no_edge = tl.zeros_like(inner) + ALL
    # no_edge: of each line, or of all lines together, whether it needs no edge loop.
    for n in tl.static_range(FACTOR_INNER):
        alive = tl.zeros_like(inner)
        for m in tl.static_range(FACTOR_OUTER):
            o = outer * FACTOR_OUTER + m
            t = inner * FACTOR_INNER + n
            base = tl.load(
                bases.ptr + o.to(tl.int64) * bases.stride_outer + t * bases.stride_inner,
                mask=(o < bases.n_outer) & (t < bases.n_inner),
                other=BITMASK_OUTSIDE if BITMASKS else OUTSIDE,
            )
            if BITMASKS:
                whole = whole & (base >> BITMASK_WHOLE).to(tl.int32)
                some = some | (base >> ALIVE).to(tl.int32) & ALL
            else:
                base = base.to(tl.int32)
                whole = whole & (base >> WHOLE)
                some = some | (base >> SOME) & 1
                no_edge = no_edge & (base >> UNBOUND)
            # Lines of the inner tile are alive if one of the base tiles along them keeps all alive;
            # bitmasks say it of each.
            alive = alive | (base >> ALIVE).to(tl.int32)
        no_edge = no_edge & alive
    some = (some > 0).to(tl.int32)
    no_edge = ((no_edge & ALL) == ALL).to(tl.int32)
    if BITMASKS:  # where one line of the mask serves all, their bits go on beyond the tensor
        no_edge = no_edge & ((inner + 1) * (FACTOR_INNER * TILE) <= bases.lines).to(tl.int32)
    full = some & whole & no_edge
    return full, some & no_edge & (1 - full), some & (1 - no_edge)


@triton.jit
def append(list_ptr, count, tiles, chosen):
    """Appends the chosen tiles (1, else 0) to a list of `count` tiles; returns its new length."""
    tl.store(list_ptr + count + tl.cumsum(chosen, 0) - 1, tiles, mask=chosen > 0)
    return count + tl.sum(chosen, 0)


@triton.jit(do_not_specialize=["heads", "outers", "inners", "n_outer", "n_inner", "lines"])
def list_tiles_kernel(
    bases_ptr, lists_ptr, stride_b, stride_h, stride_outer, stride_inner, heads, outers, inners,
    n_outer, n_inner, lines,
    BITMASKS: tl.constexpr, ALIVE: tl.constexpr, FACTOR_OUTER: tl.constexpr,
    FACTOR_INNER: tl.constexpr, APART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The lists of one outer tile, apart if APART."""
    pid = tl.program_id(0)
    outer = pid % outers
    batch_head = (pid // outers).to(tl.int64)
    bases_ptr += batch_head // heads * stride_b + batch_head % heads * stride_h
    bases = Bases(bases_ptr, stride_outer, stride_inner, n_outer, n_inner, lines)
    places = 3 * inners if APART else inners
    lists_ptr += pid.to(tl.int64) * (LIST_HEADER + places)
    full_ptr = list_of(lists_ptr, inners, FULL)
    partial_ptr = list_of(lists_ptr, inners, PARTIAL)
    edge_ptr = list_of(lists_ptr, inners, EDGE)
    n_full = 0
    n_partial = 0
    n_edge = 0
    if not APART:
        for start in range(0, inners, CHUNK):
            tiles = start + tl.arange(0, CHUNK)
            full, partial, _ = kinds_of_tiles(
                bases, outer, tiles, BITMASKS, ALIVE, FACTOR_OUTER, FACTOR_INNER
            )
            n_full += tl.sum(full, 0)
            n_partial += tl.sum(partial, 0)
        partial_ptr = full_ptr + n_full
        edge_ptr = partial_ptr + n_partial
        n_full = 0
        n_partial = 0
    for start in range(0, inners, CHUNK):
        tiles = start + tl.arange(0, CHUNK)
        full, partial, edge = kinds_of_tiles(
            bases, outer, tiles, BITMASKS, ALIVE, FACTOR_OUTER, FACTOR_INNER
        )
        n_full = append(full_ptr, n_full, tiles, full)
        n_partial = append(partial_ptr, n_partial, tiles, partial)
        n_edge = append(edge_ptr, n_edge, tiles, edge)
    store_counts(lists_ptr, n_full, n_partial, n_edge)


def prepared_lister(lists: Lists, bitmasks: Tensor, M: int, N: int) -> Callable[..., None]:
    """The launch (tile bitmasks of a prepared mask, lists): the lists of `mask_lister`."""
    bases = triton.cdiv(M, TILE.value), triton.cdiv(N, TILE.value)
    return _lister(lists, bitmask_strides(bitmasks), bases, N, True, BITMASK_KEYS.value)


def tile_lister(base: BaseTiles, lists: Lists, by_key: bool) -> Callable[..., None]:
    """The launch (base_bits, lists) that sorts the inner tiles of every outer tile into lists."""
    stride_b, stride_h, *strides = base.strides
    bases = [base.tiles_m, base.tiles_n]
    if by_key:
        strides.reverse()
        bases.reverse()
    alive = QUERIES_ALIVE if by_key else KEYS_ALIVE
    return _lister(lists, (stride_b, stride_h, *strides), bases, 0, False, alive.value)


def _lister(
    lists: Lists,
    strides: Sequence[int],
    bases: Sequence[int],
    lines: int,
    bitmasks: bool,
    alive: int,
) -> Callable[..., None]:
    """strides: of batch, head, outer and inner base tile. bases: of the latter two, how many."""
    chunk = min(256 if bitmasks else 1024, max(16, triton.next_power_of_2(lists.inner)))
    launch = BoundLaunch(
        list_tiles_kernel,
        (*strides, lists.heads, lists.outer, lists.inner, *bases, lines),
        {
            "BITMASKS": bitmasks,
            "ALIVE": alive,
            "FACTOR_OUTER": lists.factor_outer,
            "FACTOR_INNER": lists.factor_inner,
            "APART": lists.apart,
            "CHUNK": chunk,
        },
        num_warps=4 if chunk > 64 else 1,
    )
    return launch.over(lists.programs)
