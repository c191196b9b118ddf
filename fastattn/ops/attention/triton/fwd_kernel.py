"""The kernel of attention's forward in Triton; its launchers are in forward.py.

One program computes BLOCK_M queries of one head: it finds out which key tiles they may attend, then
loops over the edge, the partial and the full ones (fwd_loops.py), with one step of online
softmax for each (fwd_parts.py).
"""

# ruff: noqa: E741  (l is the row sum everywhere in this project)

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
from fastattn.ops.attention.triton.fwd_parts import Mask, Operands, Sums, add_sink, raised_above
from fastattn.ops.attention.triton.mask_lists import list_of
from fastattn.ops.attention.triton.row_tiles import (
    Pages,
    Source,
    load_row_tiles,
    row_zeros,
    store_row_tiles,
)
from fastattn.ops.attention.triton.tiles import (
    FULL,
    LOG2E,
    NEG_INF,
    NOT_SPECIALIZED,
    PARTIAL,
    Dropout,
    KeyBounds,
    Lengths,
    key_bounds,
    packed_sequence,
    program_tile,
    row_limits,
    rows_of,
    score_changes,
    score_factor,
    sequence_limits,
    sink_of,
    tile_range,
)


@triton.jit
def clear_rows(out_ptr, stride_om, lse_ptr, begin, end, step, CASE: tl.constexpr):
    """Output 0 and lse -inf for blocks of rows from `begin`, every step-th block, up to `end`."""
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    for start in range(begin, end, step * BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        tl.store(lse_ptr + row, tl.full([BLOCK_M], NEG_INF, tl.float32), mask=row < end)
        zeros = row_zeros(BLOCK_M, CASE.E0, CASE.E1)
        store_row_tiles(
            out_ptr + start * stride_om, stride_om, zeros, row < end, BLOCK_M, CASE.E0,
            CASE.E1, CASE.E,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "M"])
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc,
    mask_ptr, lists_ptr, lengths, block_table_ptr, changes,
    seed, column_keys_ptr, out_ptr, lse_ptr, stream,
    stride_q, stride_k, stride_v, stride_o, stride_mask,
    stride_list_b, stride_list_h, stride_list_tile, inner, stride_lengths, stride_table,
    H, GROUP, M, N, rows, batch_heads, swizzle_group,
    low, high, scale, threshold, keep_factor, change_numbers,
    Q_FACTOR: tl.constexpr, OVERLAP: tl.constexpr, CASE: tl.constexpr,
):  # fmt: skip
    """scale is positive; the sign, or a zero, is in Q_FACTOR. rows: of a head, in all sequences. Of
    packed sequences a batch entry behind the last clears the rows behind the last offset. With a
    block table the batches of k and v are pages.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    UNIT: tl.constexpr = CASE.UNIT
    tile_m, batch_head = program_tile(M, batch_heads, swizzle_group, BLOCK_M, True)
    b = batch_head // H
    h = batch_head % H
    kv_head = h // GROUP
    m_start = tile_m * BLOCK_M
    i = m_start + tl.arange(0, BLOCK_M)

    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = kv_head.to(tl.int64)
    m64 = m_start.to(tl.int64)
    om = stride_o.row * UNIT
    N = N * CASE.MASK_UNIT
    lengths = Lengths(lengths, stride_lengths)
    desc_b = b
    query0 = 0
    key0 = 0
    lse_start = batch_head.to(tl.int64) * M
    if CASE.PACKED:
        if b == batch_heads // H - 1:
            end = tl.load(lengths.ptr.query + b).to(tl.int64)
            head_ptr = rows_of(out_ptr, stride_o, 0, h64, 0, UNIT)
            clear_rows(
                head_ptr, om, lse_ptr + h64 * rows, end + m64, rows.to(tl.int64),
                (M + BLOCK_M - 1) // BLOCK_M, CASE,
            )  # fmt: skip
            return
        query0, M, key0, N = packed_sequence(lengths, b)
        desc_b = None
        lse_start = h64 * rows + query0
        m64 += query0
        k_ptr += key0.to(tl.int64) * stride_k.row * UNIT
        v_ptr += key0.to(tl.int64) * stride_v.row * UNIT
    q_ptr = rows_of(q_ptr, stride_q, b64, h64, m64, UNIT)
    k_pages = None
    v_pages = None
    kv_batch = b64
    if CASE.PAGE:
        table_ptr = block_table_ptr + b64 * stride_table.b
        k_pages = Pages(table_ptr, stride_table.page, stride_k.b * UNIT)
        v_pages = Pages(table_ptr, stride_table.page, stride_v.b * UNIT)
        kv_batch = 0
    k_ptr = rows_of(k_ptr, stride_k, kv_batch, kv64, 0, UNIT)
    v_ptr = rows_of(v_ptr, stride_v, kv_batch, kv64, 0, UNIT)
    out_ptr = rows_of(out_ptr, stride_o, b64, h64, m64, UNIT)

    # -- what its rows may attend
    q_limit, limit, low, high = sequence_limits(lengths, b64, M, N, low, high, CASE)
    own_changes = score_changes(changes, change_numbers, scale, b64, h64, q_limit, limit, CASE)
    m_end = tl.minimum(m_start + BLOCK_M, q_limit)
    row_limit = row_limits(lengths, b64, i, i < q_limit, limit, N, CASE)
    limit_all = limit
    if CASE.KEY_LENGTHS == 2:
        limit = tl.max(row_limit, 0)
        limit_all = tl.min(tl.where(i < q_limit, row_limit, N), 0)
    limit = tl.where(m_start < q_limit, limit, 0)
    # Bounds of rows beyond the query length would still classify some tiles as full.
    limit_all = tl.where(m_start < q_limit, limit_all, 0)
    first, full_first, full_last, last, touched_begin, touched_end = tile_range(
        m_start, m_end, limit, limit_all, low, high, CASE.HAS_LOW, CASE.HAS_HIGH, BLOCK_N
    )

    if CASE.DENSE and CASE.QUERY_LENGTHS:
        # A key that only rows beyond the query length may attend is dead.
        full_last = tl.where(m_end < tl.minimum(m_start + BLOCK_M, M), full_first, full_last)
    bounds = TileBounds(first, full_first, full_last, last)
    spans = Spans(full_first, full_last, 0, 0, last - first - (full_last - full_first))
    runs = None
    partial_ptr = lists_ptr
    if CASE.DENSE:
        mask_at = b64 * stride_mask.b + h64 * stride_mask.h + m64 * stride_mask.m
        mask_ptr += mask_at * CASE.MASK_UNIT
        lists_ptr += (
            b64 * stride_list_b + h64 * stride_list_h + tile_m.to(tl.int64) * stride_list_tile
        )
        partial_ptr = list_of(lists_ptr, inner, PARTIAL)
        if CASE.ARITHMETIC:
            spans, runs = bounded_lists(lists_ptr, inner, bounds)
        else:
            spans = whole_lists(lists_ptr)
        lists_ptr = list_of(lists_ptr, inner, FULL)
    tiles = Tiles(bounds, spans, runs, lists_ptr, partial_ptr, inner)

    # -- what stays on chip
    q = load_row_tiles(q_ptr, stride_q.row * UNIT, i < M, BLOCK_M, CASE.D0, CASE.D1, CASE.D)
    if Q_FACTOR != 1:
        dtype = q[0].dtype
        q = (q[0].to(tl.float32) * Q_FACTOR).to(dtype), (q[1].to(tl.float32) * Q_FACTOR).to(dtype)
    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = row_zeros(BLOCK_M, CASE.E0, CASE.E1)
    row_keys = i
    if CASE.DROPOUT:
        row_base = dropout_row_base(seed, stream, b, h)
        row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)

    row_begin = i
    row_end = i
    if CASE.ARITHMETIC:
        row_begin, row_end = key_bounds(
            i, row_limit, q_limit, low, high, CASE.HAS_LOW, CASE.HAS_HIGH
        )
    mm = stride_mask.m * CASE.MASK_UNIT
    given = Operands(
        q,
        Source(k_ptr, stride_k.row * UNIT, k_desc, None, desc_b, kv_head, key0, k_pages),
        Source(v_ptr, stride_v.row * UNIT, v_desc, None, desc_b, kv_head, key0, v_pages),
        Mask(mask_ptr, mm, stride_mask.n, M, N, m_start),
        KeyBounds(row_begin, row_end, touched_begin, touched_end),
        Dropout(row_keys, column_keys_ptr, threshold),
        own_changes,
        score_factor(scale, change_numbers, CASE),
    )  # fmt: skip
    sums = Sums(m, l, acc)
    if CASE.ARITHMETIC or CASE.DENSE or CASE.RAGGED:
        sums = attend_edge_tiles(sums, tiles, given, CASE)
    if CASE.DENSE:
        sums = attend_partial_tiles(sums, tiles, given, CASE)
    if OVERLAP == 0:
        sums = attend_full_tiles(sums, tiles, given, CASE)
    else:
        sums = attend_full_tiles_ahead(sums, tiles, given, OVERLAP == 1, CASE)

    # -- results; a row without keys has l = 0, a row beyond the query length is as good as one
    m, l, acc = sums
    empty = (l == 0.0) | (i >= q_limit)
    if CASE.SINKS:
        sink = sink_of(changes, change_numbers, h64)
        m, l, alpha = add_sink(m, l, sink, CASE)
    if CASE.NATURAL:
        lse = m + tl.log(l)
    else:
        lse = (m + tl.log2(l)) / LOG2E
    if CASE.SINKS:
        lse = tl.where(empty, sink, raised_above(lse, sink))
        lse = tl.where(i < q_limit, lse, NEG_INF)
    else:
        lse = tl.where(empty, NEG_INF, lse)
    tl.store(lse_ptr + lse_start + i, lse, mask=i < M)
    factor = tl.where(empty, 0.0, 1.0 / l)
    if CASE.SINKS:
        factor = factor * alpha
    if CASE.DROPOUT:
        factor = factor * keep_factor
    out0, out1 = acc
    out0 = tl.where(empty[:, None], 0.0, out0 * factor[:, None])
    if CASE.E1 > 0:
        out1 = tl.where(empty[:, None], 0.0, out1 * factor[:, None])
    store_row_tiles(out_ptr, om, (out0, out1), i < M, BLOCK_M, CASE.E0, CASE.E1, CASE.E)
