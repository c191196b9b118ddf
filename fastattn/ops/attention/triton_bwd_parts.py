"""The Triton attention backward: what its kernels share; triton_bwd.py launches them.

Scores are computed again tile by tile: p = exp(s - lse), dp = dropout(dout vᵀ), and with
delta = Σ out·dout - dlse
    ds = p (dp - delta),  dq = scale ds k,  dk = scale dsᵀ q,  dv = dropout(p)ᵀ dout,  dmask = Σ ds.
Dropout's factor of what is kept is in p, where it costs nothing: then dp has none, and delta is
divided by it. After the products it would come too late: fp16 could not hold so small a ds.
Every result has one owner that adds in a fixed order: no atomics, the same bits from run to run.

Tiles are FULL (every pair allowed: no mask work), PARTIAL (a dense mask blocks some pairs, nothing
else matters) or EDGE (every test; lines that nothing in the tile may attend are read as 0, for they
may hold NaN). Lengths, causality and windows bound the loops by arithmetic; where that cannot say
which tiles to visit, triton_bwd_tiles.py has listed them (LISTS).
"""

import triton
import triton.language as tl

from fastattn.ops.attention.triton_tiles import LOG2E, load_tile

# A row's statistics travel as one 64-bit word: delta above, lse below. A dead row's lse is +inf,
# which makes its p 0; this is its word, with delta 0.
DEAD_ROW = tl.constexpr(0x7F800000)
# Those of a packed sequence begin at a multiple of this, wherever its rows do: full tiles load
# them, and dropout's keys beside them, 16 bytes at a time.
STATISTICS_STEP = tl.constexpr(4)


@triton.jit
def pack_statistics(lse, delta):
    low = lse.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (delta.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low


@triton.jit
def unpack_statistics(word):
    lse = word.to(tl.int32).to(tl.float32, bitcast=True)
    return lse, (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_part(
    ptr,
    stride,
    desc,
    b,
    h,
    line0,
    start,
    keep,
    BLOCK: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """[BLOCK, WIDTH] from line start and column START of what ptr points at: (b, h) from line0 on.

    With TMA by the descriptor, which reads 0 beyond the tensor; else as load_tile.
    """
    if TMA:
        return desc.load([b, h, line0 + start, START]).reshape([BLOCK, WIDTH])
    else:
        return load_tile(
            ptr + start.to(tl.int64) * stride, stride, keep, BLOCK, START, WIDTH, LIMIT, MASKED
        )


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
def packed_statistics(query0, b):
    """Where the statistics of sequence b begin, whose first query is query0: every sequence before
    it may have moved it by a step, less one.
    """
    return (query0 + b * (STATISTICS_STEP - 1)) // STATISTICS_STEP * STATISTICS_STEP


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
