"""The kernel of attention's forward in Triton; its launchers are in forward.py.

One program computes BLOCK_M queries of one head: it finds out which key tiles they may attend, then
loops over the edge, the partial and the full ones (fwd_loops.py), with one step of online
softmax for each (fwd_parts.py).
"""

# Kernels are in Triton's language: no Python types. l is the row sum everywhere in this project.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: E741

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import dropout_row_base, unit_keys
from fastattn.ops.attention.triton.fwd_loops import (
    Spans,
    TileBounds,
    Tiles,
    attend_edge_tiles,
    attend_full_tiles,
    attend_full_tiles_ahead,
    attend_partial_tiles,
    bounded_lists,
    whole_lists,
)
from fastattn.ops.attention.triton.fwd_parts import Case, Mask, Operands, Sums
from fastattn.ops.attention.triton.mask_lists import list_of
from fastattn.ops.attention.triton.tiles import (
    FULL,
    NEG_INF,
    PARTIAL,
    Dropout,
    Reach,
    Source,
    clamped_length,
    key_bounds,
    load_tile,
    program_tile,
    store_tile,
    tile_range,
)


@triton.jit
def clear_rows(
    out_ptr,
    stride_om,
    lse_ptr,
    begin,
    end,
    step,
    BLOCK_M: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    E: tl.constexpr,
):
    """Output 0 and lse -inf for blocks of rows from `begin`, every step-th block, up to `end`."""
    for start in range(begin, end, step * BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        tl.store(lse_ptr + row, tl.full([BLOCK_M], NEG_INF, tl.float32), mask=row < end)
        rows_ptr = out_ptr + start * stride_om
        store_tile(
            rows_ptr, stride_om, tl.zeros([BLOCK_M, E0], tl.float32), row < end, BLOCK_M, 0, E0, E
        )
        if E1 > 0:
            store_tile(
                rows_ptr, stride_om, tl.zeros([BLOCK_M, E1], tl.float32), row < end, BLOCK_M, E0,
                E1, E,
            )  # fmt: skip


# Not specialised: what changes from batch to batch and buys no wider load.
@triton.jit(
    do_not_specialize=[
        "dropout_stream", "stride_tb", "stride_th", "stride_tm", "inner", "stride_lb", "stride_ub",
        "M", "batch_heads", "swizzle_group", "low", "high", "threshold",
    ]
)  # fmt: skip
def attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    mask_ptr,
    lists_ptr,
    key_lengths_ptr,
    query_lengths_ptr,
    seed_ptr,
    column_keys_ptr,
    out_ptr,
    lse_ptr,
    dropout_stream,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_ob,
    stride_oh,
    stride_om,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_tb,
    stride_th,
    stride_tm,
    inner,
    stride_lb,
    stride_lm,
    stride_ub,
    H,
    GROUP,
    M,
    N,
    batch_heads,
    swizzle_group,
    low,
    high,
    scale,
    threshold,
    keep_factor,
    STRIDE_UNIT: tl.constexpr,
    MASK_UNIT: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    DEAD_KEYS: tl.constexpr,
    FROM_END: tl.constexpr,
    DROPOUT: tl.constexpr,
    RAGGED: tl.constexpr,
    Q_FACTOR: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    E: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """KEY_LENGTHS: 0 none, 1 per sequence, 2 per query, 3 packed sequences. RAGGED: N is not a
    multiple of BLOCK_N. DEAD_KEYS: there may be keys that no query attends. DROPOUT: 0 none, 1 on
    any GPU, 2 with an instruction of NVIDIA's. scale is positive; the sign, or a zero, is in
    Q_FACTOR. Strides of q, k, v and out come divided by STRIDE_UNIT, N and those of the mask but
    the last by MASK_UNIT, so that the compiler sees alignment.

    Packed sequences: key_lengths_ptr and query_lengths_ptr are offsets, M and N upper bounds,
    stride_ub is the number of rows; FROM_END: low and high count from each one's bottom right. A
    batch entry behind the last sequence clears the rows behind the last offset.
    """
    ROW_LENGTHS: tl.constexpr = KEY_LENGTHS == 2
    PACKED: tl.constexpr = KEY_LENGTHS == 3
    BOUNDED: tl.constexpr = HAS_LOW or HAS_HIGH
    ARITHMETIC: tl.constexpr = BOUNDED or KEY_LENGTHS > 0 or QUERY_LENGTHS
    HOLES: tl.constexpr = DENSE or (ROW_LENGTHS and BOUNDED)
    CASE: tl.constexpr = Case(
        PACKED, DENSE, BIAS, SHARED, MASK_UNIT, ARITHMETIC, HOLES, DEAD_KEYS, DROPOUT, TMA,
        PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    tile_m, batch_head = program_tile(M, batch_heads, swizzle_group, BLOCK_M, True)
    b = batch_head // H
    h = batch_head % H
    kv_head = h // GROUP
    m_start = tile_m * BLOCK_M
    i = m_start + tl.arange(0, BLOCK_M)

    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    m64 = m_start.to(tl.int64)
    qm = stride_qm * STRIDE_UNIT
    kn = stride_kn * STRIDE_UNIT
    vn = stride_vn * STRIDE_UNIT
    om = stride_om * STRIDE_UNIT
    mm = stride_mm * MASK_UNIT
    N = N * MASK_UNIT
    k_start = 0
    lse_start = batch_head.to(tl.int64) * M
    if PACKED:
        total = stride_ub.to(tl.int64)
        q_start = tl.load(query_lengths_ptr + b).to(tl.int64)
        if b == batch_heads // H - 1:
            clear_rows(
                out_ptr + h64 * stride_oh * STRIDE_UNIT, om, lse_ptr + h64 * total, q_start + m64,
                total, (M + BLOCK_M - 1) // BLOCK_M, BLOCK_M, E0, E1, E,
            )  # fmt: skip
            return
        M = (tl.load(query_lengths_ptr + b + 1).to(tl.int64) - q_start).to(tl.int32)
        k_first = tl.load(key_lengths_ptr + b).to(tl.int64)
        N = (tl.load(key_lengths_ptr + b + 1).to(tl.int64) - k_first).to(tl.int32)
        if FROM_END:
            low += N - M
            high += N - M
        k_start = k_first.to(tl.int32)
        lse_start = h64 * total + q_start
        q_ptr += q_start * stride_qm * STRIDE_UNIT
        k_ptr += k_first * stride_kn * STRIDE_UNIT
        v_ptr += k_first * stride_vn * STRIDE_UNIT
        out_ptr += q_start * stride_om * STRIDE_UNIT
    q_ptr += (b64 * stride_qb + h64 * stride_qh + m64 * stride_qm) * STRIDE_UNIT
    k_ptr += (b64 * stride_kb + kv_head.to(tl.int64) * stride_kh) * STRIDE_UNIT
    v_ptr += (b64 * stride_vb + kv_head.to(tl.int64) * stride_vh) * STRIDE_UNIT
    out_ptr += (b64 * stride_ob + h64 * stride_oh + m64 * stride_om) * STRIDE_UNIT

    # -- what its rows may attend
    q_limit = M
    if QUERY_LENGTHS:
        q_limit = clamped_length(tl.load(query_lengths_ptr + b64 * stride_ub), M)
    m_end = tl.minimum(m_start + BLOCK_M, q_limit)
    row_limit = N
    limit = N
    limit_all = N
    if KEY_LENGTHS == 1:
        limit = clamped_length(tl.load(key_lengths_ptr + b64 * stride_lb), N)
        limit_all = limit
        row_limit = limit
    if ROW_LENGTHS:
        lengths_ptr = key_lengths_ptr + b64 * stride_lb + i.to(tl.int64) * stride_lm
        row_limit = clamped_length(tl.load(lengths_ptr, mask=i < q_limit, other=0), N)
        limit = tl.max(row_limit, 0)
        limit_all = tl.min(tl.where(i < q_limit, row_limit, N), 0)
    limit = tl.where(m_start < q_limit, limit, 0)
    # Of rows beyond their length bounds would still call some tiles full.
    limit_all = tl.where(m_start < q_limit, limit_all, 0)
    first, full_first, full_last, last, touched_begin, touched_end = tile_range(
        m_start, m_end, limit, limit_all, low, high, HAS_LOW, HAS_HIGH, BLOCK_N
    )

    if DENSE and QUERY_LENGTHS:
        # A key that only rows beyond the query length may attend is dead.
        full_last = tl.where(m_end < tl.minimum(m_start + BLOCK_M, M), full_first, full_last)
    bounds = TileBounds(first, full_first, full_last, last)
    spans = Spans(full_first, full_last, 0, 0, last - first - (full_last - full_first))
    runs = None
    partial_ptr = lists_ptr
    if DENSE:
        mask_ptr += (b64 * stride_mb + h64 * stride_mh + m64 * stride_mm) * MASK_UNIT
        lists_ptr += b64 * stride_tb + h64 * stride_th + tile_m.to(tl.int64) * stride_tm
        partial_ptr = list_of(lists_ptr, inner, PARTIAL)
        if ARITHMETIC:
            spans, runs = bounded_lists(lists_ptr, inner, bounds)
        else:
            spans = whole_lists(lists_ptr)
        lists_ptr = list_of(lists_ptr, inner, FULL)
    tiles = Tiles(bounds, spans, runs, lists_ptr, partial_ptr, inner)

    # -- what stays on chip
    q0 = load_tile(q_ptr, qm, i < M, BLOCK_M, 0, D0, D, True)
    q1 = q0
    if D1 > 0:
        q1 = load_tile(q_ptr, qm, i < M, BLOCK_M, D0, D1, D, True)
    if Q_FACTOR != 1:
        q0 = (q0.to(tl.float32) * Q_FACTOR).to(q0.dtype)
        q1 = (q1.to(tl.float32) * Q_FACTOR).to(q1.dtype)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, E0], tl.float32)
    acc1 = l
    if E1 > 0:
        acc1 = tl.zeros([BLOCK_M, E1], tl.float32)
    row_keys = i
    if DROPOUT:
        row_base = dropout_row_base(seed_ptr, dropout_stream, b, h)
        row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)

    row_begin = i
    row_end = i
    if ARITHMETIC:
        row_begin, row_end = key_bounds(i, row_limit, q_limit, low, high, HAS_LOW, HAS_HIGH)
    given = Operands(
        q0, q1,
        Source(k_ptr, kn, k_desc, None, b, kv_head, k_start),
        Source(v_ptr, vn, v_desc, None, b, kv_head, k_start),
        Mask(mask_ptr, mm, stride_mn, M, N, m_start),
        Reach(row_begin, row_end, touched_begin, touched_end),
        Dropout(row_keys, column_keys_ptr, threshold),
        scale,
    )  # fmt: skip
    sums = Sums(m, l, acc0, acc1)
    if ARITHMETIC or DENSE or RAGGED:
        sums = attend_edge_tiles(sums, tiles, given, EDGE_STAGES, CASE)
    if DENSE:
        sums = attend_partial_tiles(sums, tiles, given, STAGES, CASE)
    if OVERLAP == 0:
        sums = attend_full_tiles(sums, tiles, given, STAGES, CASE)
    else:
        sums = attend_full_tiles_ahead(sums, tiles, given, OVERLAP == 1, STAGES, CASE)

    # -- results; a row without keys has l = 0, a row beyond the query length is as good as one
    empty = (sums.l == 0.0) | (i >= q_limit)
    lse = tl.where(empty, NEG_INF, sums.m + tl.log(sums.l))
    tl.store(lse_ptr + lse_start + i, lse, mask=i < M)
    factor = tl.where(empty, 0.0, 1.0 / sums.l)
    if DROPOUT:
        factor = factor * keep_factor
    out0 = tl.where(empty[:, None], 0.0, sums.acc0 * factor[:, None])
    store_tile(out_ptr, om, out0, i < M, BLOCK_M, 0, E0, E)
    if E1 > 0:
        out1 = tl.where(empty[:, None], 0.0, sums.acc1 * factor[:, None])
        store_tile(out_ptr, om, out1, i < M, BLOCK_M, E0, E1, E)
