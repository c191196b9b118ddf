"""The Triton attention backward: what its kernels share; backward.py launches them.

Scores are computed again tile by tile: p = exp(s - lse), dp = dropout(dout vᵀ), and with
delta = Σ out·dout - dlse
    ds = p (dp - delta),  dq = scale ds k,  dk = scale dsᵀ q,  dv = dropout(p)ᵀ dout,  dmask = Σ ds.
Dropout's factor of what is kept is in p, where it costs nothing: then dp has none, and delta is
divided by it. After the products it would come too late: fp16 could not hold so small a ds.
A soft cap's slope 1 - tanh² is a factor of ds in dq and dk, not in dmask.
Every result has one owner that adds in a fixed order: no atomics, the same bits from run to run.

Tiles are FULL (every pair allowed: no mask work), PARTIAL (a dense mask blocks some pairs, nothing
else matters) or EDGE (every test; lines that nothing in the tile may attend are read as 0, for they
may hold NaN). Lengths, causality and windows bound the loops by arithmetic; where that cannot say
which tiles to visit, mask_lists.py has listed them (LISTS).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops.attention.triton.tiles import FULL, LOG2E, PARTIAL

# lse and delta of a row are packed into one 64-bit word: delta above, lse below. A dead row's lse
# is +inf, which makes its p 0; this is its word, with delta 0.
DEAD_ROW = tl.constexpr(0x7F800000)
# lse and delta of a packed sequence begin at a multiple of this, wherever its rows do: full tiles
# load them, and dropout's keys beside them, 16 bytes at a time.
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


# -- operands -------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """The dense mask of one head, from the program's own rows or keys on."""

    ptr: Any
    stride_m: Any
    stride_n: Any


class Tiles(NamedTuple):
    """The tiles that a program loops over. With LISTS, full, partial and edge tiles are listed from
    list_ptr on, in this order. Else the full ones begin at full_first, in the middle of the edge
    ones, which begin at `first`.
    """

    first: Any
    full_first: Any
    n_full: Any
    n_partial: Any
    n_edge: Any
    list_ptr: Any


@triton.jit
def listed_tiles(tiles, KIND: tl.constexpr):
    """(number of tiles of a kind, number of those that are listed before them)."""
    if KIND == FULL:
        return tiles.n_full, 0
    elif KIND == PARTIAL:
        return tiles.n_partial, tiles.n_full
    else:
        return tiles.n_edge, tiles.n_full + tiles.n_partial


@triton.jit
def next_listed(tiles, begin, count, index):
    """The index-th tile of a kind; 0 beyond the last."""
    return tl.load(tiles.list_ptr + begin + index, mask=index < count, other=0)


@triton.jit
def tile_in_range(tiles, index, KIND: tl.constexpr):
    """The index-th tile of a kind without LISTS."""
    if KIND == FULL:
        return tiles.full_first + index
    else:
        tile = tiles.first + index
        return tl.where(tile < tiles.full_first, tile, tile + tiles.n_full)


# -- the parts of a step --------------------------------------------------------------------------


@triton.jit
def weights(
    s, lse, bias, scale, shift, BIAS: tl.constexpr, NATURAL: tl.constexpr, KEEP_LOG2: tl.constexpr
):
    """p from the products s. lse and scale are in base 2, unless NATURAL: for fp32's last bits, and
    for a bias, which may be of any size. With KEEP_LOG2 (of KernelConstants) times dropout's factor
    2 ** shift, which lse, unless NATURAL, includes. The rounding error of a huge score may exceed
    every exponent, so p is bounded: by 1 times the factor, or unless NATURAL by the next power of
    2. NaN stays NaN.
    """
    if NATURAL:
        s = s * scale
        if BIAS:
            s = s + bias
        s = tl.minimum(s - lse, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if KEEP_LOG2 > 0:
            return tl.exp2(s * LOG2E + shift)
        else:
            return tl.exp2(s * LOG2E)
    else:
        # A constant: shift, in a register, would spill at D = 40.
        s = tl.minimum(s * scale - lse, KEEP_LOG2 * 1.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.exp2(s)


@triton.jit
def packed_lse_delta_start(query0, b):
    """Where lse and delta of sequence b begin, whose first query is query0: every sequence before
    it may have moved it by a step, less one.
    """
    return (query0 + b * (LSE_DELTA_ALIGNMENT - 1)) // LSE_DELTA_ALIGNMENT * LSE_DELTA_ALIGNMENT
