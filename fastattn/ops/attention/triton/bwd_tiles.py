"""Which tiles the Triton attention backward visits where arithmetic alone cannot say it: under a
dense mask, or with a key length for every query.

The first kernel looks at every base tile once, with all restrictions intersected, and records what
it found: five bits a tile, and which of its keys are alive. The second turns the bits into lists:
for every outer tile of a kernel (query tiles for dq, key tiles for dk and dv) the inner tiles that
are FULL, PARTIAL or EDGE, without those that are empty. Both run on the device without
synchronisation.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    KEYS,
    LIST_HEADER,
    ONE_ROW,
    PARTIAL,
    QUERIES,
    TILE,
    DiagonalBounds,
    MaskShape,
    bitmask_strides,
    clamped_length,
    key_bounds,
    load_mask,
)
from fastattn.ops.attention.triton.tiles import OUTSIDE as MASK_OUTSIDE
from fastattn.ops.attention.triton.tiles import WHOLE as MASK_WHOLE

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


class Classes(NamedTuple):
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
    def stride_b(self) -> int:
        """Base tiles from one batch to the next, 0 if all batches share them."""
        return self.heads * self.stride_h_dense if self.batches > 1 else 0

    @property
    def stride_h(self) -> int:
        return self.stride_h_dense if self.heads > 1 else 0

    @property
    def stride_h_dense(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def keys(self) -> int:
        """Keys of whole base tiles."""
        return self.tiles_n * self.block_n

    def workspace(self) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
        shape = (self.batches, self.heads, self.tiles_m, self.tiles_n)
        return [(shape, torch.uint8, False), ((*shape, self.block_n), torch.uint8, False)]


class Lists(NamedTuple):
    """int32 [batches, heads, outer, LIST_HEADER + inner]: counts of FULL, PARTIAL, EDGE and a spare
    entry, then the three lists one after the other, each ascending.

    factor_outer, factor_inner: base tiles along a side of an outer and of an inner tile.
    """

    batches: int
    heads: int
    outer: int
    inner: int
    factor_outer: int
    factor_inner: int

    @property
    def row(self) -> int:
        return LIST_HEADER.value + self.inner

    @property
    def stride_b(self) -> int:
        return self.heads * self.outer * self.row if self.batches > 1 else 0

    @property
    def stride_h(self) -> int:
        return self.outer * self.row if self.heads > 1 else 0

    def workspace(self) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
        return [((self.batches, self.heads, self.outer, self.row), torch.int32, False)]


def classes(
    mask: MaskShape | None, B: int, by_batch: bool, M: int, N: int, block_m: int, block_n: int
) -> Classes:
    """by_batch: lengths make every batch differ, whatever the mask's own batch dimension is."""
    batches = B if by_batch or (mask is not None and mask.sizes[0] > 1) else 1
    heads = 1 if mask is None else mask.sizes[1]
    return Classes(
        batches, heads, triton.cdiv(M, block_m), triton.cdiv(N, block_n), block_m, block_n
    )


def lists(c: Classes, M: int, N: int, block_m: int, block_n: int, by_key: bool) -> Lists:
    """by_key: outer tiles are key tiles (dk, dv), else query tiles (dq)."""
    tiles_m, tiles_n = triton.cdiv(M, block_m), triton.cdiv(N, block_n)
    factor_m, factor_n = block_m // c.block_m, block_n // c.block_n
    if by_key:
        return Lists(c.batches, c.heads, tiles_n, tiles_m, factor_n, factor_m)
    return Lists(c.batches, c.heads, tiles_m, tiles_n, factor_m, factor_n)


@triton.jit
def classify_prepared(
    bitmasks_ptr,
    kind_ptr,
    alive_ptr,
    stride_wm,
    stride_wn,
    m_start,
    n_start,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What the tile bitmasks of a prepared mask say of a base tile that nothing else restricts."""
    row = (m_start // TILE + tl.arange(0, BLOCK_M // TILE))[:, None]
    column = (n_start // TILE + tl.arange(0, BLOCK_N // TILE))[None, :]
    bitmasks = tl.load(
        bitmasks_ptr + row.to(tl.int64) * stride_wm + column * stride_wn,
        mask=(row * TILE < M) & (column * TILE < N),
        other=MASK_OUTSIDE,
    )
    # A bitmask's bits go on beyond the tensor where one line of the mask serves all.
    line = tl.arange(0, TILE)
    keys = (tl.reduce_or(bitmasks, 0) >> KEYS)[:, None] >> line[None, :] & 1
    j = n_start + tl.arange(0, BLOCK_N // TILE)[:, None] * TILE + line[None, :]
    keys = tl.where(j < N, keys, 0)
    queries = (tl.reduce_or(bitmasks, 1) >> QUERIES)[:, None] >> line[None, :] & 1
    i = m_start + tl.arange(0, BLOCK_M // TILE)[:, None] * TILE + line[None, :]
    queries = tl.where(i < M, queries, 0)
    some = tl.max(tl.max(keys, 1), 0)
    whole = tl.min(tl.min(bitmasks >> MASK_WHOLE, 1), 0)
    keys_alive = tl.min(tl.min(keys, 1), 0)
    queries_alive = tl.min(tl.min(queries, 1), 0)
    unbound = tl.full([], 1, tl.int64)
    kind = (some << SOME) | (whole << WHOLE) | (unbound << UNBOUND)
    kind = kind | (keys_alive << KEYS_ALIVE) | (queries_alive << QUERIES_ALIVE)
    tl.store(kind_ptr, kind.to(tl.uint8))
    tl.store(alive_ptr + j - n_start, keys.to(tl.uint8))


@triton.jit(do_not_specialize=["heads", "tiles_m", "tiles_n", "M", "low", "high"])
def classify_tiles_kernel(
    mask_ptr,
    bitmasks_ptr,
    key_lengths_ptr,
    query_lengths_ptr,
    kinds_ptr,
    alive_ptr,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_wb,
    stride_wh,
    stride_wm,
    stride_wn,
    stride_lb,
    stride_lm,
    stride_ub,
    heads,
    tiles_m,
    tiles_n,
    M,
    N,
    low,
    high,
    DENSE: tl.constexpr,
    PREPARED: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One base tile a program. PREPARED: only where lengths, causality or window cut through the
    tile is the mask itself read.
    """
    tile = tl.program_id(0).to(tl.int64)
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

    q_limit = M
    if QUERY_LENGTHS:
        q_limit = clamped_length(tl.load(query_lengths_ptr + b * stride_ub), M)
    row_limit = N
    if KEY_LENGTHS == 1:
        row_limit = clamped_length(tl.load(key_lengths_ptr + b * stride_lb), N)
    if KEY_LENGTHS == 2:
        lengths_ptr = key_lengths_ptr + b * stride_lb + i.to(tl.int64) * stride_lm
        row_limit = clamped_length(tl.load(lengths_ptr, mask=i < M, other=0), N)
    begin, end = key_bounds(i, row_limit, q_limit, low, high, HAS_LOW, HAS_HIGH)
    if PREPARED:
        cut = (i < M) & ((begin > n_start) | (end < tl.minimum(n_start + BLOCK_N, N)))
        if tl.max(tl.max(cut.to(tl.int32), 1), 0) == 0:
            bitmasks_ptr += b * stride_wb + h * stride_wh
            classify_prepared(
                bitmasks_ptr, kinds_ptr + tile, alive_ptr + tile * BLOCK_N, stride_wm, stride_wn,
                m_start, n_start, M, N, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            return
    bounded = (j >= begin) & (j < end)
    allowed = bounded
    plain = allowed
    if DENSE:
        mask_ptr += b * stride_mb + h * stride_mh
        mask_ptr += m_start.to(tl.int64) * stride_mm + n_start.to(tl.int64) * stride_mn
        dense, bias = load_mask(
            mask_ptr, rows, columns, stride_mm, stride_mn, M - m_start, N - n_start,
            ONE_ROW if ROWS_SHARED else 0,
        )  # fmt: skip
        allowed = allowed & dense
        plain = allowed
        if BIAS:
            plain = allowed & (bias == 0.0)

    outside = (i >= M) | (j >= N)
    unbound = tl.min(tl.min((bounded | outside).to(tl.int32), 1), 0)
    keys = tl.max(allowed.to(tl.int32), 0)
    some = tl.max(keys, 0)
    whole = tl.min(tl.min((plain | outside).to(tl.int32), 1), 0)
    keys_alive = tl.min(keys, 0)
    queries_alive = tl.min(tl.max(allowed.to(tl.int32), 1), 0)
    kind = (some << SOME) | (whole << WHOLE) | (unbound << UNBOUND)
    kind = kind | (keys_alive << KEYS_ALIVE) | (queries_alive << QUERIES_ALIVE)
    tl.store(kinds_ptr + tile, kind.to(tl.uint8))
    tl.store(alive_ptr + tile * BLOCK_N + tl.arange(0, BLOCK_N), keys.to(tl.uint8))


@triton.jit
def kinds_of_tiles(
    kinds_ptr,
    outer,
    inner,
    base_outer,
    base_inner,
    stride_outer,
    stride_inner,
    ALIVE: tl.constexpr,
    FACTOR_OUTER: tl.constexpr,
    FACTOR_INNER: tl.constexpr,
):
    """(full, partial, edge) of the tiles (outer, inner): 0 or 1, at most one of the three is 1."""
    some = tl.zeros_like(inner)
    whole = tl.zeros_like(inner) + 1
    unbound = tl.zeros_like(inner) + 1
    all_alive = tl.zeros_like(inner) + 1
    for n in tl.static_range(FACTOR_INNER):
        alive = tl.zeros_like(inner)
        for m in tl.static_range(FACTOR_OUTER):
            o = outer * FACTOR_OUTER + m
            t = inner * FACTOR_INNER + n
            inside = (o < base_outer) & (t < base_inner)
            kind = tl.load(
                kinds_ptr + o * stride_outer + t * stride_inner, mask=inside, other=OUTSIDE
            ).to(tl.int32)
            some = some | (kind >> SOME)
            whole = whole & (kind >> WHOLE)
            unbound = unbound & (kind >> UNBOUND)
            # Lines of the inner tile are alive if one of the base tiles along them keeps all alive.
            alive = alive | (kind >> ALIVE)
        all_alive = all_alive & alive
    some = some & 1
    easy = all_alive & unbound & 1
    full = some & whole & easy
    return full, some & easy & (1 - full), some & (1 - easy)


@triton.jit(do_not_specialize=["outers", "inners", "base_outer", "base_inner"])
def list_tiles_kernel(
    kinds_ptr,
    lists_ptr,
    outers,
    inners,
    base_outer,
    base_inner,
    stride_outer,
    stride_inner,
    ALIVE: tl.constexpr,
    FACTOR_OUTER: tl.constexpr,
    FACTOR_INNER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The three lists of one outer tile."""
    pid = tl.program_id(0).to(tl.int64)
    outer = pid % outers
    kinds_ptr += pid // outers * base_outer * base_inner
    lists_ptr += pid * (LIST_HEADER + inners)
    n_full = 0
    n_partial = 0
    n_edge = 0
    for start in range(0, inners, CHUNK):
        full, partial, edge = kinds_of_tiles(
            kinds_ptr, outer, start + tl.arange(0, CHUNK), base_outer, base_inner,
            stride_outer, stride_inner, ALIVE, FACTOR_OUTER, FACTOR_INNER,
        )  # fmt: skip
        n_full += tl.sum(full, 0)
        n_partial += tl.sum(partial, 0)
        n_edge += tl.sum(edge, 0)
    tl.store(lists_ptr + FULL, n_full)
    tl.store(lists_ptr + PARTIAL, n_partial)
    tl.store(lists_ptr + EDGE, n_edge)
    at_full = LIST_HEADER
    at_partial = LIST_HEADER + n_full
    at_edge = LIST_HEADER + n_full + n_partial
    for start in range(0, inners, CHUNK):
        tiles = start + tl.arange(0, CHUNK)
        full, partial, edge = kinds_of_tiles(
            kinds_ptr, outer, tiles, base_outer, base_inner,
            stride_outer, stride_inner, ALIVE, FACTOR_OUTER, FACTOR_INNER,
        )  # fmt: skip
        tl.store(lists_ptr + at_full + tl.cumsum(full, 0) - 1, tiles, mask=full > 0)
        tl.store(lists_ptr + at_partial + tl.cumsum(partial, 0) - 1, tiles, mask=partial > 0)
        tl.store(lists_ptr + at_edge + tl.cumsum(edge, 0) - 1, tiles, mask=edge > 0)
        at_full += tl.sum(full, 0)
        at_partial += tl.sum(partial, 0)
        at_edge += tl.sum(edge, 0)


def classifier(
    c: Classes,
    mask: Tensor | None,
    shape: MaskShape | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    limits: DiagonalBounds,
    M: int,
    N: int,
    mask_strides: tuple[int, ...],
    length_strides: tuple[int, ...],
) -> Callable[..., None]:
    """The launch (mask, mask_tiles, key_lengths, query_lengths, kinds, alive) that looks at every
    base tile.
    """
    bitmasks = (0, 0, 0, 0) if mask_tiles is None else bitmask_strides(mask_tiles)
    launch = BoundLaunch(
        classify_tiles_kernel,
        (
            *mask_strides, *bitmasks, *length_strides, c.heads, c.tiles_m, c.tiles_n, M, N,
            limits.low, limits.high,
        ),
        {
            "DENSE": mask is not None,
            "PREPARED": mask_tiles is not None,
            "BIAS": mask is not None and mask.dtype != torch.bool,
            "ROWS_SHARED": shape is not None and shape.sizes[2] == 1,
            "HAS_LOW": limits.has_low,
            "HAS_HIGH": limits.has_high,
            "KEY_LENGTHS": 0 if key_lengths is None else key_lengths.dim(),
            "QUERY_LENGTHS": query_lengths is not None,
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
        },
        num_warps=4,
    )  # fmt: skip
    return launch.over(c.batches * c.heads * c.tiles_m * c.tiles_n)


def lister(c: Classes, to: Lists, by_key: bool) -> Callable[..., None]:
    """The launch (kinds, lists) that sorts the inner tiles of every outer tile into lists."""
    chunk = min(1024, max(16, triton.next_power_of_2(to.inner)))
    base_outer, base_inner = (c.tiles_n, c.tiles_m) if by_key else (c.tiles_m, c.tiles_n)
    launch = BoundLaunch(
        list_tiles_kernel,
        (
            to.outer, to.inner, base_outer, base_inner, 1 if by_key else c.tiles_n,
            c.tiles_n if by_key else 1,
        ),
        {
            "ALIVE": QUERIES_ALIVE.value if by_key else KEYS_ALIVE.value,
            "FACTOR_OUTER": to.factor_outer,
            "FACTOR_INNER": to.factor_inner,
            "CHUNK": chunk,
        },
        num_warps=4 if chunk > 256 else 1,
    )  # fmt: skip
    return launch.over(to.batches * to.heads * to.outer)


def list_strides(to: Lists | None) -> tuple[int, int, int]:
    """What a kernel needs to find its lists: strides of batch and head, and the inner tiles."""
    return (0, 0, 0) if to is None else (to.stride_b, to.stride_h, to.inner)
