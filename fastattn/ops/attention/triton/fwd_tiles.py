"""Which key tiles the Triton attention forward visits under a dense mask.

The mask is read once per call by `mask_classifier`, which lists for every query tile the key tiles
that are FULL, PARTIAL or EDGE; from a prepared mask `prepared_lister` makes the same lists.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fastattn.ops._triton_launch import BoundLaunch
from fastattn.ops.attention import prepared
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    KEYS,
    LINES,
    LIST_HEADER,
    OUTSIDE,
    PARTIAL,
    TILE,
    WHOLE,
    MaskShape,
    bitmask_strides,
    load_mask,
)


class TileLists(NamedTuple):
    """Shape and strides (0 where the mask is broadcast) of the int32 lists of key tiles.

    One row per mask batch, mask head and query tile: LIST_HEADER integers (how many FULL, PARTIAL,
    EDGE), then for each of these kinds a list of up to `inner` key tiles, ascending.
    """

    shape: tuple[int, int, int, int]
    inner: int
    stride_b: int
    stride_h: int
    stride_outer: int


def tile_lists(mask: MaskShape, M: int, N: int, BLOCK_M: int, BLOCK_N: int) -> TileLists:
    outer, inner = triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N)
    batches, heads, rows, _ = mask.sizes
    if rows == 1:
        outer = min(outer, 1)  # all query tiles look alike
    row = LIST_HEADER.value + 3 * inner
    return TileLists(
        (batches, heads, outer, row),
        inner,
        heads * outer * row if batches > 1 else 0,
        outer * row if heads > 1 else 0,
        row if outer > 1 else 0,
    )


@triton.jit(do_not_specialize=["heads", "M", "outers", "inner"])
def classify_mask_kernel(
    mask_ptr,
    lists_ptr,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    heads,
    M,
    N,
    outers,
    inner,
    ROWS_SHARED: tl.constexpr,
    COLUMNS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0)
    outer = pid % outers
    batch_head = (pid // outers).to(tl.int64)
    mask_ptr += batch_head // heads * stride_mb + batch_head % heads * stride_mh
    lists_ptr += pid.to(tl.int64) * (LIST_HEADER + 3 * inner)
    # A broadcast dimension is read as one line that stands for all.
    i = tl.arange(0, 1 if ROWS_SHARED else BLOCK_M)[:, None]
    j = tl.arange(0, 1 if COLUMNS_SHARED else BLOCK_N)[None, :]
    n_full = 0
    n_partial = 0
    n_edge = 0
    m_start = outer * BLOCK_M
    rows = 1 if ROWS_SHARED else M - m_start
    for t in range(0, inner):
        n_start = t * BLOCK_N
        columns = 1 if COLUMNS_SHARED else N - n_start
        tile_ptr = mask_ptr + (m_start.to(tl.int64) * stride_mm + n_start.to(tl.int64) * stride_mn)
        allowed, bias = load_mask(tile_ptr, i, j, stride_mm, stride_mn, rows, columns, 0)
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
        tl.store(lists_ptr + LIST_HEADER + kind * inner + count, t, mask=some)
        n_full += (some & (kind == FULL)).to(tl.int32)
        n_partial += (some & (kind == PARTIAL)).to(tl.int32)
        n_edge += (some & (kind == EDGE)).to(tl.int32)
    tl.store(lists_ptr + FULL, n_full)
    tl.store(lists_ptr + PARTIAL, n_partial)
    tl.store(lists_ptr + EDGE, n_edge)


def mask_classifier(
    mask: MaskShape, M: int, N: int, BLOCK_M: int, BLOCK_N: int
) -> Callable[..., None]:
    """Called with (mask, lists of the shape that `tile_lists` gives): lists the tiles.

    FULL: every pair is allowed, an additive mask is exactly 0. Not listed: no pair is allowed.
    EDGE: some keys have no allowed pair in the tile or lie beyond the tensor; they may hold NaN, so
    a product over them must see zeros. PARTIAL: the rest.
    """
    (batches, heads, outer, _), inner, *_ = tile_lists(mask, M, N, BLOCK_M, BLOCK_N)
    constants = {
        "ROWS_SHARED": mask.sizes[2] == 1,
        "COLUMNS_SHARED": mask.sizes[3] == 1,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
    }
    scalars = (*mask.strides, heads, M, N, outer, inner)
    # One dimension: a grid's others end at 65535.
    launch = BoundLaunch(classify_mask_kernel, scalars, constants)
    return launch.over(outer * batches * heads)


@triton.jit(do_not_specialize=["heads", "bitmasks_m", "bitmasks_n", "N", "outers", "inner"])
def list_prepared_kernel(
    bitmasks_ptr,
    lists_ptr,
    stride_wb,
    stride_wh,
    stride_wm,
    stride_wn,
    heads,
    bitmasks_m,
    bitmasks_n,
    N,
    outers,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    FACTOR_M: tl.constexpr = BLOCK_M // TILE
    FACTOR_N: tl.constexpr = BLOCK_N // TILE
    pid = tl.program_id(0)
    outer = pid % outers
    batch_head = (pid // outers).to(tl.int64)
    bitmasks_ptr += batch_head // heads * stride_wb + batch_head % heads * stride_wh
    lists_ptr += pid.to(tl.int64) * (LIST_HEADER + 3 * inner)
    n_full = 0
    n_partial = 0
    n_edge = 0
    for start in range(0, inner, CHUNK):
        t = start + tl.arange(0, CHUNK)
        some = tl.zeros([CHUNK], tl.int64)
        alive = tl.full([CHUNK], LINES, tl.int64)
        whole = tl.full([CHUNK], 1, tl.int64)
        for n in tl.static_range(FACTOR_N):
            column = t * FACTOR_N + n
            keys = tl.zeros([CHUNK], tl.int64)
            for m in tl.static_range(FACTOR_M):
                row = outer * FACTOR_M + m
                bitmask = tl.load(
                    bitmasks_ptr + row.to(tl.int64) * stride_wm + column * stride_wn,
                    mask=(row < bitmasks_m) & (column < bitmasks_n),
                    other=OUTSIDE,
                )
                keys = keys | (bitmask >> KEYS & LINES)
                whole = whole & (bitmask >> WHOLE)
            some = some | keys
            alive = alive & keys
        ragged = t * BLOCK_N + BLOCK_N > N
        full = (some > 0) & (whole > 0) & ~ragged
        edge = (some > 0) & ~full & ((alive != LINES) | ragged)
        partial = (some > 0) & ~full & ~edge
        list_ptr = lists_ptr + LIST_HEADER
        full_at = n_full + tl.cumsum(full.to(tl.int32), 0) - 1
        tl.store(list_ptr + FULL * inner + full_at, t, mask=full)
        partial_at = n_partial + tl.cumsum(partial.to(tl.int32), 0) - 1
        tl.store(list_ptr + PARTIAL * inner + partial_at, t, mask=partial)
        edge_at = n_edge + tl.cumsum(edge.to(tl.int32), 0) - 1
        tl.store(list_ptr + EDGE * inner + edge_at, t, mask=edge)
        n_full += tl.sum(full.to(tl.int32), 0)
        n_partial += tl.sum(partial.to(tl.int32), 0)
        n_edge += tl.sum(edge.to(tl.int32), 0)
    tl.store(lists_ptr + FULL, n_full)
    tl.store(lists_ptr + PARTIAL, n_partial)
    tl.store(lists_ptr + EDGE, n_edge)


def prepared_lister(
    mask: MaskShape, bitmasks: torch.Tensor, M: int, N: int, BLOCK_M: int, BLOCK_N: int
) -> Callable[..., None]:
    """Called with (tile bitmasks of a prepared mask, lists): the same lists."""
    (batches, heads, outer, _), inner, *_ = tile_lists(mask, M, N, BLOCK_M, BLOCK_N)
    sizes = (heads, triton.cdiv(M, prepared.TILE), triton.cdiv(N, prepared.TILE), N, outer, inner)
    chunk = min(256, max(16, triton.next_power_of_2(inner)))
    constants = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "CHUNK": chunk}
    options: dict[str, Any] = {"num_warps": 4 if chunk > 64 else 1}
    launch = BoundLaunch(
        list_prepared_kernel, (*bitmask_strides(bitmasks), *sizes), constants, **options
    )
    return launch.over(outer * batches * heads)


@triton.jit
def listed_below(list_ptr, count, tile):
    """How many entries of an ascending list are below `tile`."""
    below = 0
    for start in range(0, count, 128):
        offs = start + tl.arange(0, 128)
        entries = tl.load(list_ptr + offs, mask=offs < count, other=2147483647)
        below += tl.sum((entries < tile).to(tl.int32), axis=0)
    return below
