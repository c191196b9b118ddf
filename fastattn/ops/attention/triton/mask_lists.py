"""Which tiles attention's kernels in Triton visit where arithmetic alone cannot say it: lists of
tiles, one format for the forward and the backward.

An outer tile (queries in the forward and for dq, keys for dk and dv) has a header of counts, then
the lists of its inner tiles that are FULL, PARTIAL or EDGE; those that are empty are not listed:

    FULL     every pair is allowed, an additive mask is exactly 0
    PARTIAL  the mask blocks some pairs or adds to them, nothing else matters
    EDGE     lengths, causality or a window block some pairs, or some line of the inner tile lies
             beyond the tensor or has no pair in the tile: it may hold NaN, so a product over it
             must see zeros

The forward lists the tiles of the mask alone and bounds the lists by arithmetic: `mask_lister`
reads the mask, once. The backward's kernels cut the pairs in two ways and ask for more, so
`classifier` looks at base tiles with all restrictions intersected and stores five bits of each, and
which of its keys are alive. `tile_lister` makes the lists from these bits, or from the bitmasks of
a prepared mask. All run on the device without synchronisation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch
from fastattn.ops.attention import prepared
from fastattn.ops.attention.triton.launch import Facts
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    NOT_SPECIALIZED,
    ONE_ROW,
    PARTIAL,
    Lengths,
    MaskShape,
    MaskStrides,
    key_bounds,
    load_mask,
    row_limits,
    sequence_limits,
)

LIST_HEADER = tl.constexpr(4)

# Tile bitmasks of a prepared mask (prepared.py). A tile outside it has no lines and misses none.
TILE = tl.constexpr(prepared.TILE)
BITMASK_KEYS = tl.constexpr(prepared.KEYS)
BITMASK_QUERIES = tl.constexpr(prepared.QUERIES)
BITMASK_WHOLE = tl.constexpr(prepared.WHOLE)
BITMASK_OUTSIDE = tl.constexpr(1 << prepared.WHOLE)
LINES = tl.constexpr((1 << prepared.TILE) - 1)

# Bits of a base tile: some pair is allowed; every pair inside the tensor is (and its bias 0);
# lengths, causality and window restrict none of them; every key has a query in the tile; every
# query has a key in it. Keys and queries beyond the tensor have none.
SOME = tl.constexpr(0)
WHOLE = tl.constexpr(1)
UNBOUND = tl.constexpr(2)
KEYS_ALIVE = tl.constexpr(3)
QUERIES_ALIVE = tl.constexpr(4)
# What a base tile outside the tensor counts as: nothing in it is allowed, nothing in it is missing.
OUTSIDE = tl.constexpr(6)


# -- layout ---------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """int32 [batches, heads, outer, LIST_HEADER + places]: how many FULL, PARTIAL and EDGE, a spare
    entry, then for each of these kinds a list of tiles, ascending.

    factor_outer, factor_inner: base tiles along a side of an outer and of an inner tile. apart:
    each list has `inner` places, for what reads the mask learns the counts last; else one begins
    where the other ends, which saves up to 15 instructions in the loops of dkdv (sm_90, D = 128).
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
        """Of batch, head and outer tile, 0 where one serves all."""
        batches, heads, outer, row = self.shape
        return (
            heads * outer * row if batches > 1 else 0, outer * row if heads > 1 else 0,
            row if outer > 1 else 0,
        )  # fmt: skip


def mask_lists(mask: MaskShape, M: int, N: int, block_m: int, block_n: int) -> Lists:
    """Of query tiles, by the mask alone. Base tiles are those of a prepared mask."""
    batches, heads, rows, _ = mask.sizes
    outer = triton.cdiv(M, block_m)
    if rows == 1:
        outer = min(outer, 1)  # all query tiles look alike
    factors = block_m // TILE.value, block_n // TILE.value
    return Lists(batches, heads, outer, triton.cdiv(N, block_n), *factors, True)


class BaseTiles(NamedTuple):
    """Base tiles of [M, N], once per batch and head that differ.

    They fill kinds [batches, heads, tiles_m, tiles_n] and alive [.., tiles_n * block_n], which keys
    some query of the base tile may attend, both uint8.
    """

    batches: int
    heads: int
    tiles_m: int
    tiles_n: int
    block_m: int
    block_n: int

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """From one base tile to the next along each dimension of kinds."""
        head = self.tiles_m * self.tiles_n
        return self.heads * head, head, self.tiles_n, 1

    @property
    def shared_strides(self) -> tuple[int, int]:
        """Those of batch and head, 0 if all batches or heads share them."""
        stride_b, stride_h, _, _ = self.strides
        return stride_b if self.batches > 1 else 0, stride_h if self.heads > 1 else 0

    @property
    def keys(self) -> int:
        """Keys of whole base tiles."""
        return self.tiles_n * self.block_n

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batches, self.heads, self.tiles_m, self.tiles_n

    def lists(self, block_m: int, block_n: int, by_key: bool) -> Lists:
        """by_key: outer tiles are key tiles (dk, dv), else query tiles (dq)."""
        m, n = block_m // self.block_m, block_n // self.block_n
        tiles_m, tiles_n = triton.cdiv(self.tiles_m, m), triton.cdiv(self.tiles_n, n)
        if by_key:
            return Lists(self.batches, self.heads, tiles_n, tiles_m, n, m, False)
        return Lists(self.batches, self.heads, tiles_m, tiles_n, m, n, False)


def base_tiles(facts: Facts, block_m: int, block_n: int) -> BaseTiles:
    """Lengths make every batch differ, whatever the mask's own batch dimension is."""
    mask = facts.mask
    by_batch = any(facts.ends) or (mask is not None and mask.sizes[0] > 1)
    heads = 1 if mask is None else mask.sizes[1]
    tiles = triton.cdiv(facts.M, block_m), triton.cdiv(facts.N, block_n)
    return BaseTiles(facts.B if by_batch else 1, heads, *tiles, block_m, block_n)


# -- reading lists --------------------------------------------------------------------------------


@triton.jit
def list_counts(lists_ptr):
    """(FULL, PARTIAL, EDGE tiles) in the lists of an outer tile."""
    return tl.load(lists_ptr + FULL), tl.load(lists_ptr + PARTIAL), tl.load(lists_ptr + EDGE)


@triton.jit
def list_of(lists_ptr, inner, kind):
    """Where lists are apart."""
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


# -- what base tiles are, all restrictions intersected --------------------------------------------


@triton.jit
def store_bits(
    kind_ptr, alive_ptr, some, whole, unbound, keys_alive, queries_alive, local_j, keys
):  # fmt: skip
    """keys: which of the keys local_j of the tile are alive."""
    kind = (some << SOME) | (whole << WHOLE) | (unbound << UNBOUND)
    kind = kind | (keys_alive << KEYS_ALIVE) | (queries_alive << QUERIES_ALIVE)
    tl.store(kind_ptr, kind.to(tl.uint8))
    tl.store(alive_ptr + local_j, keys.to(tl.uint8))


@triton.jit
def classify_prepared(
    bitmasks_ptr, kind_ptr, alive_ptr, stride_bitmasks, m_start, n_start, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What the tile bitmasks of a prepared mask say of a base tile that nothing else restricts."""
    row = (m_start // TILE + tl.arange(0, BLOCK_M // TILE))[:, None]
    column = (n_start // TILE + tl.arange(0, BLOCK_N // TILE))[None, :]
    bitmasks = tl.load(
        bitmasks_ptr + row.to(tl.int64) * stride_bitmasks.m + column * stride_bitmasks.n,
        mask=(row * TILE < M) & (column * TILE < N),
        other=BITMASK_OUTSIDE,
    )
    # A bitmask's bits go on beyond the tensor where one line of the mask serves all.
    line = tl.arange(0, TILE)
    keys = (tl.reduce_or(bitmasks, 0) >> BITMASK_KEYS)[:, None] >> line[None, :] & 1
    j = n_start + tl.arange(0, BLOCK_N // TILE)[:, None] * TILE + line[None, :]
    keys = tl.where(j < N, keys, 0)
    queries = (tl.reduce_or(bitmasks, 1) >> BITMASK_QUERIES)[:, None] >> line[None, :] & 1
    i = m_start + tl.arange(0, BLOCK_M // TILE)[:, None] * TILE + line[None, :]
    queries = tl.where(i < M, queries, 0)
    some = tl.max(tl.max(keys, 1), 0)
    whole = tl.min(tl.min(bitmasks >> BITMASK_WHOLE, 1), 0)
    keys_alive = tl.min(tl.min(keys, 1), 0)
    queries_alive = tl.min(tl.min(queries, 1), 0)
    unbound = tl.full([], 1, tl.int64)
    store_bits(
        kind_ptr, alive_ptr, some, whole, unbound, keys_alive, queries_alive, j - n_start, keys
    )


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "heads", "tiles_m", "tiles_n", "M"])
def classify_tiles_kernel(
    mask_ptr, bitmasks_ptr, key_lengths_ptr, query_lengths_ptr, kinds_ptr, alive_ptr,
    stride_mask, stride_bitmasks, stride_kl_b, stride_kl_m, stride_ql_b,
    heads, tiles_m, tiles_n, M, N, low, high,
    PREPARED: tl.constexpr, CASE: tl.constexpr,
):  # fmt: skip
    """One base tile a program. PREPARED: only where lengths, causality or window cut through the
    tile is the mask itself read.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    tile = tl.program_id(0).to(tl.int64)
    kinds_ptr += tile
    alive_ptr += tile * BLOCK_N
    n_tile = (tile % tiles_n).to(tl.int32)
    m_tile = (tile // tiles_n % tiles_m).to(tl.int32)
    batch_head = tile // tiles_n // tiles_m
    b = batch_head // heads
    h = batch_head % heads
    rows = tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    m_start = m_tile * BLOCK_M
    n_start = n_tile * BLOCK_N
    i = m_start + rows
    j = n_start + columns

    lengths = Lengths(key_lengths_ptr, query_lengths_ptr, stride_kl_b, stride_kl_m, stride_ql_b)
    q_limit, limit, low, high = sequence_limits(lengths, b, M, N, low, high, CASE)
    row_limit = row_limits(lengths, b, i, i < M, limit, N, CASE)
    begin, end = key_bounds(i, row_limit, q_limit, low, high, CASE.HAS_LOW, CASE.HAS_HIGH)
    if PREPARED:
        cut = (i < M) & ((begin > n_start) | (end < tl.minimum(n_start + BLOCK_N, N)))
        if tl.max(tl.max(cut.to(tl.int32), 1), 0) == 0:
            bitmasks_ptr += b * stride_bitmasks.b + h * stride_bitmasks.h
            classify_prepared(
                bitmasks_ptr, kinds_ptr, alive_ptr, stride_bitmasks, m_start, n_start, M, N,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            return
    bounded = (j >= begin) & (j < end)
    allowed = bounded
    plain = allowed
    if CASE.DENSE:
        mask_ptr += b * stride_mask.b + h * stride_mask.h
        mask_ptr += m_start.to(tl.int64) * stride_mask.m + n_start.to(tl.int64) * stride_mask.n
        dense, bias = load_mask(
            mask_ptr, rows, columns, stride_mask.m, stride_mask.n, M - m_start, N - n_start,
            ONE_ROW if CASE.SHARED == ONE_ROW else 0,
        )  # fmt: skip
        allowed = allowed & dense
        plain = allowed
        if CASE.BIAS:
            plain = allowed & (bias == 0.0)

    outside = (i >= M) | (j >= N)
    unbound = tl.min(tl.min((bounded | outside).to(tl.int32), 1), 0)
    keys = tl.max(allowed.to(tl.int32), 0)
    some = tl.max(keys, 0)
    whole = tl.min(tl.min((plain | outside).to(tl.int32), 1), 0)
    keys_alive = tl.min(keys, 0)
    queries_alive = tl.min(tl.max(allowed.to(tl.int32), 1), 0)
    store_bits(
        kinds_ptr, alive_ptr, some, whole, unbound, keys_alive, queries_alive,
        tl.arange(0, BLOCK_N), keys,
    )  # fmt: skip


def classifier(base: BaseTiles, facts: Facts, mask_tiles: Tensor | None) -> Callable[..., None]:
    """The launch (mask, mask_tiles, key_lengths, query_lengths, kinds, alive) that looks at every
    base tile.
    """
    launch = BoundLaunch(
        classify_tiles_kernel,
        (
            MaskStrides(*(facts.mask.strides if facts.mask is not None else (0, 0, 0, 0))),
            MaskStrides(*(bitmask_strides(mask_tiles) if mask_tiles is not None else (0, 0, 0, 0))),
            *facts.length_strides, base.heads, base.tiles_m, base.tiles_n, facts.M, facts.N,
            facts.limits.low, facts.limits.high,
        ),
        {
            "PREPARED": mask_tiles is not None,
            "CASE": facts.case(
                base.block_m, base.block_n, MASK_UNIT=1, DROPOUT=0, D=0, E=0
            ),
        },
        num_warps=4,
    )  # fmt: skip
    return launch.over(base.batches * base.heads * base.tiles_m * base.tiles_n)


# -- lists from base tiles ------------------------------------------------------------------------


class Bases(NamedTuple):
    """Kinds or bitmasks of the base tiles of one head, n_outer by n_inner; lines of the latter."""

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
    ALL: tl.constexpr = LINES if BITMASKS else 1
    some = tl.zeros_like(inner)
    whole = tl.zeros_like(inner) + 1
    easy = tl.zeros_like(inner) + ALL
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
                easy = easy & (base >> UNBOUND)
            # Lines of the inner tile are alive if one of the base tiles along them keeps all alive;
            # bitmasks say it of each.
            alive = alive | (base >> ALIVE).to(tl.int32)
        easy = easy & alive
    some = (some > 0).to(tl.int32)
    easy = ((easy & ALL) == ALL).to(tl.int32)
    if BITMASKS:  # where one line of the mask serves all, their bits go on beyond the tensor
        easy = easy & ((inner + 1) * (FACTOR_INNER * TILE) <= bases.lines).to(tl.int32)
    full = some & whole & easy
    return full, some & easy & (1 - full), some & (1 - easy)


@triton.jit
def append(list_ptr, count, tiles, chosen):
    """Appends the tiles that are chosen (1, else 0) to a list of so many; how many it has then."""
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
    """The launch (kinds, lists) that sorts the inner tiles of every outer tile into lists."""
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


def bitmask_strides(bitmasks: Tensor) -> tuple[int, ...]:
    """Of a prepared mask's tiles; 0 where one serves all."""
    return tuple(
        0 if n == 1 else stride for n, stride in zip(bitmasks.shape, bitmasks.stride(), strict=True)
    )
