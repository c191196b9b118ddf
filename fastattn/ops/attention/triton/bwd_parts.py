"""The Triton attention backward: what its kernels share; backward.py launches them.

Scores are computed again tile by tile: p = exp(s - lse), dp = dropout(dout vᵀ), and with
delta = Σ out·dout - dlse
    ds = p (dp - delta),  dq = scale ds k,  dk = scale dsᵀ q,  dv = dropout(p)ᵀ dout,  dmask = Σ ds.
Dropout's factor of what is kept is in p, where it costs nothing: then dp has none, and delta is
divided by it. After the products it would come too late: fp16 could not hold so small a ds.
Every result has one owner that adds in a fixed order: no atomics, the same bits from run to run.

Tiles are FULL (every pair allowed: no mask work), PARTIAL (a dense mask blocks some pairs, nothing
else matters) or EDGE (every test; lines that nothing in the tile may attend are read as 0, for they
may hold NaN). Lengths, causality and windows bound the loops by arithmetic; where that cannot say
which tiles to visit, mask_lists.py has listed them (LISTS).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops.attention.triton.tiles import LOG2E, load_tile

# lse and delta of a row are packed into one 64-bit word: delta above, lse below. A dead row's lse
# is +inf, which makes its p 0; this is its word, with delta 0.
DEAD_ROW = tl.constexpr(0x7F800000)
# Those of a packed sequence begin at a multiple of this, wherever its rows do: full tiles load
# them, and dropout's keys beside them, 16 bytes at a time.
LSE_DELTA_ALIGNMENT = tl.constexpr(4)


# -- rows' lse and delta --------------------------------------------------------------------------


@triton.jit
def pack_lse_delta(lse, delta):
    low = lse.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (delta.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def unpack_lse_delta(word):
    lse = word.to(tl.int32).to(tl.float32, bitcast=True)
    return lse, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


# -- what a program has in hand -------------------------------------------------------------------


class Case(NamedTuple):
    """What is known to the compiler, beside what fwd_parts.py says of the same names. LISTS:
    tiles are listed in memory, the program's own block has FACTOR base tiles of the lists.
    BY_VALUE: blocked pairs of a partial tile get weight 0 by the mask's value. DEAD: rows of what
    the loop reads may attend no pair. NATURAL: scores stay in natural units.
    """

    LISTS: Any
    FACTOR: Any
    DENSE: Any
    BIAS: Any
    BY_VALUE: Any
    SHARED: Any
    HAS_LOW: Any
    HAS_HIGH: Any
    KEY_LENGTHS: Any
    DROPOUT: Any
    HAS_DOUT: Any
    NATURAL: Any
    DEAD: Any
    TMA: Any
    PRECISION: Any
    D: Any
    D0: Any
    D1: Any
    E: Any
    E0: Any
    E1: Any
    BLOCK_M: Any
    BLOCK_N: Any


class Mask(NamedTuple):
    """The dense mask of one head, from the program's own rows or keys on."""

    ptr: Any
    stride_m: Any
    stride_n: Any


@triton.jit
def load_rows(
    x,
    start,
    keep,
    BLOCK: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK, WIDTH0] and [BLOCK, WIDTH1] (if it is not 0) from row `start` of a Source.

    With TMA by its descriptors, which read 0 beyond the tensor; else as load_tile.
    """
    x0 = _load_columns(x, x.desc0, start, keep, BLOCK, 0, WIDTH0, LIMIT, MASKED, TMA)
    x1 = x0
    if WIDTH1 > 0:
        x1 = _load_columns(x, x.desc1, start, keep, BLOCK, WIDTH0, WIDTH1, LIMIT, MASKED, TMA)
    return x0, x1


@triton.jit
def _load_columns(
    x,
    desc,
    start,
    keep,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    if TMA:
        return desc.load([x.b, x.head, x.start + start, START]).reshape([BLOCK, WIDTH])
    else:
        ptr = x.ptr + start.to(tl.int64) * x.stride
        return load_tile(ptr, x.stride, keep, BLOCK, START, WIDTH, LIMIT, MASKED)


# -- the parts of a step --------------------------------------------------------------------------


@triton.jit
def weights(
    s, lse, bias, scale, shift, BIAS: tl.constexpr, NATURAL: tl.constexpr, SHIFTED: tl.constexpr
):
    """p from the products s. lse and scale are in base 2, unless NATURAL: for fp32's last bits, and
    for a bias, which may be of any size. SHIFTED: times 2 ** shift, which lse, unless NATURAL, has
    in it.
    """
    if NATURAL:
        s = s * scale
        if BIAS:
            s = s + bias
        if SHIFTED:
            return tl.exp2((s - lse) * LOG2E + shift)
        else:
            return tl.exp2((s - lse) * LOG2E)
    else:
        return tl.exp2(s * scale - lse)


@triton.jit
def product(a0, a1, b0, b1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ, the shared dimension in one or two tiles."""
    c = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if SECOND > 0:
        c = tl.dot(a1, tl.trans(b1), c, input_precision=PRECISION)
    return c


@triton.jit
def packed_lse_delta_start(query0, b):
    """Where lse and delta of sequence b begin, whose first query is query0: every sequence before
    it may have moved it by a step, less one.
    """
    return (query0 + b * (LSE_DELTA_ALIGNMENT - 1)) // LSE_DELTA_ALIGNMENT * LSE_DELTA_ALIGNMENT


@triton.jit
def packed_sequence(query_offset_ptr, key_offset_ptr, low, high, FROM_END: tl.constexpr):
    """(first query, queries, first key, keys, low, high) of the sequence whose offsets these are;
    with FROM_END low and high counted from its end.
    """
    query0 = tl.load(query_offset_ptr)
    key0 = tl.load(key_offset_ptr)
    M = tl.load(query_offset_ptr + 1) - query0
    N = tl.load(key_offset_ptr + 1) - key0
    if FROM_END:
        low += N - M
        high += N - M
    return query0, M, key0, N, low, high
