"""Tiles of q, k, v and their like in the Triton attention kernels: loads, products, stores.

A pair is the two column tiles of rows: D0 and D1 columns of q and k, or E0 and E1 of v. If the
second has no columns, it is a placeholder.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pages(NamedTuple):
    """Row r of a sequence is row r % PAGE of page table[r // PAGE]."""

    table: Any  # a pointer to the numbers of the sequence's pages
    table_step: Any
    stride: Any  # between pages


class Source(NamedTuple):
    """Rows of one head that a loop goes over, from ptr on, or in pages from there; or, with TMA,
    through the descriptors of both column tiles: of head `head` in batch b, or with None for b from
    row `start` of it.
    """

    ptr: Any
    stride: Any
    desc0: Any
    desc1: Any
    b: Any
    head: Any
    start: Any
    pages: Any


@triton.jit
def row_zeros(BLOCK: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr):
    """A pair of accumulators."""
    x1 = tl.zeros([BLOCK], tl.float32)
    if WIDTH1 > 0:
        x1 = tl.zeros([BLOCK, WIDTH1], tl.float32)
    return tl.zeros([BLOCK, WIDTH0], tl.float32), x1


@triton.jit
def load_tile(
    ptr, stride, keep,
    BLOCK: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[BLOCK, WIDTH] from column START of the lines (queries or keys) at ptr; the last stride is 1.

    Columns from LIMIT on are 0; with MASKED also the lines where keep [BLOCK] is false.
    """
    offs_l = tl.arange(0, BLOCK)
    offs_c = START + tl.arange(0, WIDTH)
    ptrs = ptr + offs_l[:, None] * stride + offs_c[None, :]
    return load_pointers(ptrs, offs_c, keep, BLOCK, START, WIDTH, LIMIT, MASKED)


@triton.jit
def load_pointers(
    ptrs, offs_c, keep,
    BLOCK: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """load_tile from the pointers of all elements, of columns offs_c."""
    if START + WIDTH > LIMIT:
        mask = tl.broadcast_to(offs_c[None, :] < LIMIT, [BLOCK, WIDTH])
        if MASKED:
            mask = mask & keep[:, None]
        return tl.load(ptrs, mask=mask, other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=tl.broadcast_to(keep[:, None], [BLOCK, WIDTH]), other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_paged_tile(
    x, start, keep,
    BLOCK: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    MASKED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """load_tile from row `start`, a multiple of BLOCK, of a Source in pages. The number of a page
    without a row to keep is not used: it may be any.
    """
    pages = x.pages
    if PAGE >= BLOCK:
        page = tl.load(pages.table + start // PAGE * pages.table_step).to(tl.int64)
        ptr = x.ptr + page * pages.stride + start % PAGE * x.stride
        return load_tile(ptr, x.stride, keep, BLOCK, START, WIDTH, LIMIT, MASKED)
    else:
        row = tl.arange(0, BLOCK)
        numbers = pages.table + (start // PAGE + row // PAGE) * pages.table_step
        if MASKED:
            page = tl.load(numbers, mask=keep, other=0)
        else:
            page = tl.load(numbers)
        offs_l = page.to(tl.int64) * pages.stride + row % PAGE * x.stride
        offs_c = START + tl.arange(0, WIDTH)
        ptrs = x.ptr + offs_l[:, None] + offs_c[None, :]
        return load_pointers(ptrs, offs_c, keep, BLOCK, START, WIDTH, LIMIT, MASKED)


@triton.jit
def load_columns(
    x, desc, start, keep,
    BLOCK: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """[BLOCK, WIDTH] from row `start` and column START of a Source, by pointer or by desc."""
    if PAGE:
        return load_paged_tile(x, start, keep, BLOCK, START, WIDTH, LIMIT, MASKED, PAGE)
    elif TMA and x.b is None:
        return desc.load([x.head, x.start + start, START]).reshape([BLOCK, WIDTH])
    elif TMA:
        return desc.load([x.b, x.head, start, START]).reshape([BLOCK, WIDTH])
    else:
        ptr = x.ptr + start.to(tl.int64) * x.stride
        return load_tile(ptr, x.stride, keep, BLOCK, START, WIDTH, LIMIT, MASKED)


@triton.jit
def load_rows(
    x, start, keep,
    BLOCK: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, LIMIT: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr = 0,
):  # fmt: skip
    """The pair from row `start` of a Source: with TMA by its descriptors, which read 0 beyond the
    tensor; else as load_tile. PAGE: rows of a page, 0 without pages.
    """
    x0 = load_columns(x, x.desc0, start, keep, BLOCK, 0, WIDTH0, LIMIT, MASKED, TMA, PAGE)
    x1 = x0
    if WIDTH1 > 0:
        x1 = load_columns(x, x.desc1, start, keep, BLOCK, WIDTH0, WIDTH1, LIMIT, MASKED, TMA, PAGE)
    return x0, x1


@triton.jit
def product(a, b, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ of two pairs, over the columns of both tiles; SECOND: the columns of the second."""
    c = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if SECOND > 0:
        c = tl.dot(a[1], tl.trans(b[1]), c, input_precision=PRECISION)
    return c


@triton.jit
def add_product(acc, a, b, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, where acc and b are pairs."""
    acc0, acc1 = acc
    acc0 = tl.dot(a, b[0], acc0, input_precision=PRECISION)
    if SECOND > 0:
        acc1 = tl.dot(a, b[1], acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def scaled_rows(x, factor, keep, SECOND: tl.constexpr):
    """A pair times factor; 0 in the rows where keep [BLOCK, 1] is false."""
    x0, x1 = x
    x0 = tl.where(keep, x0 * factor, 0.0)
    if SECOND > 0:
        x1 = tl.where(keep, x1 * factor, 0.0)
    return x0, x1


@triton.jit
def load_row_tiles(
    ptr, stride, keep,
    BLOCK: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The pair at ptr, as load_tile with MASKED."""
    x0 = load_tile(ptr, stride, keep, BLOCK, 0, WIDTH0, LIMIT, True)
    x1 = x0
    if WIDTH1 > 0:
        x1 = load_tile(ptr, stride, keep, BLOCK, WIDTH0, WIDTH1, LIMIT, True)
    return x0, x1


@triton.jit
def store_tile(
    ptr, stride, value, keep,
    BLOCK: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The counterpart of load_tile: lines where keep [BLOCK] is true, rounded to ptr's type."""
    offs_l = tl.arange(0, BLOCK)
    offs_c = START + tl.arange(0, WIDTH)
    mask = keep[:, None] & (offs_c[None, :] < LIMIT)
    ptrs = ptr + offs_l[:, None] * stride + offs_c[None, :]
    tl.store(ptrs, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_row_tiles(
    ptr, stride, value, keep,
    BLOCK: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The counterpart of load_row_tiles."""
    store_tile(ptr, stride, value[0], keep, BLOCK, 0, WIDTH0, LIMIT)
    if WIDTH1 > 0:
        store_tile(ptr, stride, value[1], keep, BLOCK, WIDTH0, WIDTH1, LIMIT)
