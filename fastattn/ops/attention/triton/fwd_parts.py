"""One step of attention's forward in Triton: what a tile of queries does with a tile of keys.

`attend_tile` reads as the step does: scores, restrictions, online softmax, product with the values.
Functions pass on three tuples: the KernelConstants (tiles.py), the Operands, which are only read,
and the Sums of the rows. Softmax is in base 2. Under NATURAL scores and their
maximum are in natural units: an additive mask may come close to the largest finite number, and fp32
keeps its last bits.
"""

# ruff: noqa: E741  (l is the row sum everywhere in this project)

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import dropout_kept, kept_bits, load_keys, zero_dropped
from fastattn.ops.attention.triton.row_tiles import Source, add_product, load_rows, product
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    LOG2E,
    NEG_INF,
    ONE_ROW,
    PARTIAL,
    SMALLEST_NORMAL,
    Dropout,
    KeyBounds,
    ScoreModifications,
    capped,
    distance_bias,
    load_mask,
    load_partial,
)

# -- operands -------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """The dense mask [M, N], from its row m_start on."""

    ptr: Any
    stride_m: Any
    stride_n: Any
    M: Any
    N: Any
    m_start: Any


class Operands(NamedTuple):
    """scale is positive, and times log2(e) unless NATURAL; under a soft cap it is the cap. q is a
    pair of column tiles.
    """

    q: Any
    k: Source
    v: Source
    mask: Mask
    keys: KeyBounds
    dropout: Dropout
    changes: ScoreModifications
    scale: Any


class Sums(NamedTuple):
    """State of the online softmax of each row: the maximum m of its scores, l = Σ p and acc = Σ p v
    (a pair of column tiles), where p are the weights against m.
    """

    m: Any
    l: Any
    acc: Any


# -- the parts of a step --------------------------------------------------------------------------


@triton.jit
def tile_scores(given, n_start, touched, MASKED: tl.constexpr, CASE: tl.constexpr):
    """q kᵀ of the keys from n_start on, neither capped nor scaled: [BLOCK_M, BLOCK_N]."""
    k = load_rows(
        given.k, n_start, touched, CASE.BLOCK_N, CASE.D0, CASE.D1, CASE.D, MASKED, CASE.TMA,
        CASE.PAGE,
    )  # fmt: skip
    return product(given.q, k, CASE.D1, CASE.PRECISION)


@triton.jit
def changed(s, given, n_start, CASE: tl.constexpr):
    """Products with a soft cap; scaled, with the bias, if one depends on the distance."""
    s = capped(s, given.changes, CASE)
    if CASE.DISTANCE:
        i = tl.arange(0, CASE.BLOCK_M)[:, None]
        j = tl.arange(0, CASE.BLOCK_N)[None, :]
        m_start = given.mask.m_start
        bias = distance_bias(given.changes, m_start, n_start, i, j, CASE.BLOCK_M, CASE.BLOCK_N)
        s = s * given.scale + bias
    return s


@triton.jit
def restrict(s, given, n_start, j, touched, KIND: tl.constexpr, CASE: tl.constexpr):
    """(scores, -inf where nothing may be attended; what may be). Scaled if there is a bias, by
    `changed` if it is one by distance.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    allowed = tl.full([BLOCK_M, BLOCK_N], True, tl.int1)
    if CASE.DENSE:
        mask = given.mask
        local_i = tl.arange(0, BLOCK_M)[:, None]
        local_j = tl.arange(0, BLOCK_N)[None, :]
        ptr = mask.ptr + n_start.to(tl.int64) * mask.stride_n
        rows = mask.M - mask.m_start
        columns = mask.N - n_start
        if KIND == PARTIAL and CASE.MASK_UNIT > 1:
            inside = None if CASE.SHARED == ONE_ROW else local_i < rows
            dense, bias = load_partial(
                ptr, local_i, local_j, inside, mask.stride_m, mask.stride_n, CASE.SHARED
            )
        else:
            dense, bias = load_mask(
                ptr, local_i, local_j, mask.stride_m, mask.stride_n, rows, columns, CASE.SHARED
            )
        allowed = allowed & dense
        if CASE.BIAS:
            s = (s if CASE.DISTANCE else s * given.scale) + bias
    if KIND == EDGE:
        if CASE.ARITHMETIC:
            after = j[None, :] >= given.keys.row_begin[:, None]
            allowed = allowed & after & (j[None, :] < given.keys.row_end[:, None])
        elif not CASE.DENSE:
            allowed = allowed & touched[None, :]
    return tl.where(allowed, s, NEG_INF), allowed


@triton.jit
def online_softmax(s, m, l, given, n_start, SCALED: tl.constexpr, CASE: tl.constexpr):
    """(p after dropout, alpha, m, l): weights against the new maximum m, what the old sums shrink
    by, the sum l of the weights before dropout. SCALED: s is scaled already.
    """
    scale = given.scale
    m_new = tl.maximum(m, tl.max(s, 1) if SCALED else tl.max(s, 1) * scale)
    # A row without any key yet keeps -inf, and -inf - (-inf) is NaN.
    m_finite = tl.where(m_new == NEG_INF, 0.0, m_new)
    if not CASE.NATURAL:
        # The rounding error of m, up to 8 for scores of 1e8, is the same in p, alpha and l.
        p = tl.exp2(s * scale - m_finite[:, None])
        alpha = tl.exp2(m - m_finite)
    else:
        if SCALED:
            p = tl.exp2((s - m_finite[:, None]) * LOG2E)
        elif given.q[0].dtype == tl.float32:
            # Large logits would lose their last bits to a rounded m * log2(e).
            p = tl.exp2((s * scale - m_finite[:, None]) * LOG2E)
        else:
            p = tl.exp2(s * (scale * LOG2E) - (m_finite * LOG2E)[:, None])
        alpha = tl.exp2((m - m_finite) * LOG2E)
    l = l * alpha + tl.sum(p, 1)
    if CASE.DROPOUT:
        p = drop(p, given, n_start, CASE)
    return p, alpha, m_new, l


@triton.jit
def drop(p, given, n_start, CASE: tl.constexpr):
    """p with 0 for what is dropped; the outputs are scaled at the end."""
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    row_keys, column_keys_ptr, threshold = given.dropout
    column_keys = load_keys(column_keys_ptr, n_start, BLOCK_N // 2)
    i = tl.arange(0, BLOCK_M)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    if CASE.DROPOUT == 2:
        bits = kept_bits(row_keys, column_keys, threshold, BLOCK_M, BLOCK_N)
        return zero_dropped(p.to(given.q[0].dtype), bits, i, j)
    else:
        keep = dropout_kept(row_keys, column_keys, i, j, threshold, BLOCK_M, BLOCK_N)
        # A zero the compiler cannot see keeps it from selecting on packed 16-bit halves.
        return tl.where(keep, p, given.scale * 0.0)


@triton.jit
def add_values(acc, p, alpha, given, n_start, touched, MASKED: tl.constexpr, CASE: tl.constexpr):
    """alpha acc + p v of the keys from n_start on; MASKED: keys not touched count as zeros."""
    v = load_rows(
        given.v, n_start, touched, CASE.BLOCK_N, CASE.E0, CASE.E1, CASE.E, MASKED, CASE.TMA,
        CASE.PAGE,
    )  # fmt: skip
    if CASE.TMA and MASKED and CASE.DEAD:
        v = tl.where(touched[:, None], v[0], 0.0), v[1]
    p = p.to(v[0].dtype)
    acc0, acc1 = acc
    acc0 = acc0 * alpha[:, None]
    if CASE.E1 > 0:
        # Both accumulators are ready before either product: else ptxas serialises them (C7515).
        acc1 = acc1 * alpha[:, None]
    return add_product((acc0, acc1), p, v, CASE.E1, CASE.PRECISION)


# -- the end --------------------------------------------------------------------------------------


@triton.jit
def add_sink(m, l, sink, CASE: tl.constexpr):
    """(m, l, what acc shrinks by) with a logit, in natural units, in every row's sum."""
    if CASE.NATURAL:
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2((m - m_new) * LOG2E)
        p = tl.exp2((sink - m_new) * LOG2E)
    else:
        m_new = tl.maximum(m, sink * LOG2E)
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(sink * LOG2E - m_new)
    return m_new, l * alpha + p, alpha


@triton.jit
def raised_above(lse, sink):
    """lse where it is above the sink, else the next number after it: in the backward a row without
    keys is one whose lse is not above the sink.
    """
    bits = sink.to(tl.int32, bitcast=True)
    after = (bits + tl.where(bits < 0, -1, 1)).to(tl.float32, bitcast=True)
    # Not the smallest number, which arithmetic may flush to zero.
    after = tl.where(tl.abs(sink) < SMALLEST_NORMAL, SMALLEST_NORMAL, after)
    return tl.where(lse <= sink, after, lse)


# -- the step -------------------------------------------------------------------------------------


@triton.jit
def attend_tile(sums, tile, given, KIND: tl.constexpr, CASE: tl.constexpr):
    """The sums with those over key tile `tile`; edge tiles are read where they are touched."""
    MASKED: tl.constexpr = KIND == EDGE
    SCALED: tl.constexpr = CASE.DISTANCE or (CASE.BIAS and KIND != FULL)
    m, l, acc = sums
    n_start = tile * CASE.BLOCK_N
    j = n_start + tl.arange(0, CASE.BLOCK_N)
    touched = (j >= given.keys.begin) & (j < given.keys.end)
    s = tile_scores(given, n_start, touched, MASKED, CASE)
    s = changed(s, given, n_start, CASE)
    if KIND != FULL:
        s, allowed = restrict(s, given, n_start, j, touched, KIND, CASE)
    p, alpha, m, l = online_softmax(s, m, l, given, n_start, SCALED, CASE)
    # Values of keys that no row of the tile may attend are not read: they may be NaN. Lengths of
    # each query leave such keys between others where bounds cut them, too.
    BOUNDED: tl.constexpr = CASE.HAS_LOW or CASE.HAS_HIGH
    if MASKED and (CASE.DENSE or (CASE.KEY_LENGTHS == 2 and BOUNDED)):
        touched = tl.max(allowed.to(tl.int32), 0) > 0
    acc = add_values(acc, p, alpha, given, n_start, touched, MASKED, CASE)
    return Sums(m, l, acc)
