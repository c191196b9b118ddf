"""Attention in Triton, the portable GPU path. Here is the forward; triton_bwd.py is the backward.

One program computes BLOCK_M queries of one head. It walks over the key tiles they may attend in up
to three loops: full tiles without any mask work, partial tiles that read the dense mask, and edge
tiles with every test, which also read as zero what no query of the tile may see. Which tile is
which comes from triton_tiles.py. Softmax is online and in base 2, but the running maximum stays in
natural units, because an additive mask may come close to the largest finite number.
"""

# ruff: noqa: E741  (l is the row sum everywhere in this project)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.ops import _env
from fastattn.ops.attention.config import Features, ForwardConfig, forward_config
from fastattn.ops.attention.triton_bwd import (  # noqa: F401  (the other half of this backend)
    attention_bwd,
    attention_bwd_unsupported,
    attention_bwd_workspace,
)
from fastattn.ops.attention.triton_launch import BoundLaunch, LaunchCache, signature, with_base
from fastattn.ops.attention.triton_tiles import (
    EDGE,
    FULL,
    LIST_HEADER,
    LOG2E,
    NEG_INF,
    PARTIAL,
    Band,
    band,
    clamped_length,
    dropout_bases,
    dropout_keep,
    dropout_numbers,
    key_bounds,
    lattice_keys,
    listed_below,
    load_mask,
    load_tile,
    mask_classifier,
    mask_shape,
    split_width,
    store_tile,
    tile_lists,
    tile_range,
)

# -- kernel ---------------------------------------------------------------------------------------


@triton.jit
def tile_scores(
    q0,
    q1,
    n_start,
    k_ptr,
    k_desc,
    b,
    k_start,
    kv_head,
    stride_kn,
    touched,
    MASKED: tl.constexpr,
    VARLEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """q kᵀ of the keys from n_start on, unscaled: [BLOCK_M, BLOCK_N]."""
    k_tile = k_ptr + n_start.to(tl.int64) * stride_kn
    if TMA and VARLEN:
        k0 = k_desc.load([k_start + n_start, kv_head, 0]).reshape([BLOCK_N, D0])
    elif TMA:
        k0 = k_desc.load([b, kv_head, n_start, 0]).reshape([BLOCK_N, D0])
    else:
        k0 = load_tile(k_tile, stride_kn, touched, BLOCK_N, 0, D0, D, MASKED)
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D1 > 0:
        k1 = load_tile(k_tile, stride_kn, touched, BLOCK_N, D0, D1, D, MASKED)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
    return s


@triton.jit
def online_softmax(
    s,
    m,
    l,
    scale,
    n_start,
    row_keys,
    column_base,
    threshold,
    SCALED: tl.constexpr,
    EXACT: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(p after dropout, alpha, m, l): weights against the new maximum m, what the old sums shrink
    by, the sum l of the weights before dropout. SCALED: s is scaled already. EXACT: for fp32 data.
    """
    if SCALED:
        m_new = tl.maximum(m, tl.max(s, 1))
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
    # A row without any key yet keeps -inf, and -inf - (-inf) is NaN.
    m_finite = tl.where(m_new == NEG_INF, 0.0, m_new)
    if SCALED:
        p = tl.exp2((s - m_finite[:, None]) * LOG2E)
    elif EXACT:
        # Large logits would lose their last bits to a rounded m * log2(e).
        p = tl.exp2((s * scale - m_finite[:, None]) * LOG2E)
    else:
        p = tl.exp2(s * (scale * LOG2E) - (m_finite * LOG2E)[:, None])
    alpha = tl.exp2((m - m_finite) * LOG2E)
    l = l * alpha + tl.sum(p, 1)
    if DROPOUT:
        local_i = tl.arange(0, BLOCK_M)[:, None]
        local_j = tl.arange(0, BLOCK_N)
        column_keys = lattice_keys(column_base, n_start, local_j)
        keep = dropout_keep(
            row_keys[:, None], column_keys[None, :], local_i, local_j[None, :], threshold
        )
        # A zero the compiler cannot see keeps it from selecting on packed 16-bit halves.
        p = tl.where(keep, p, scale * 0.0)
    return p, alpha, m_new, l


@triton.jit
def add_values(
    acc0,
    acc1,
    p,
    alpha,
    n_start,
    v_ptr,
    v_desc,
    b,
    k_start,
    kv_head,
    stride_vn,
    touched,
    MASKED: tl.constexpr,
    DEAD_KEYS: tl.constexpr,
    VARLEN: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    E: tl.constexpr,
    E0: tl.constexpr,
    E1: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """alpha acc + p v of the keys from n_start on; MASKED: keys not touched count as zeros."""
    v_tile = v_ptr + n_start.to(tl.int64) * stride_vn
    if TMA:
        if VARLEN:
            v0 = v_desc.load([k_start + n_start, kv_head, 0]).reshape([BLOCK_N, E0])
        else:
            v0 = v_desc.load([b, kv_head, n_start, 0]).reshape([BLOCK_N, E0])
        if MASKED and DEAD_KEYS:
            v0 = tl.where(touched[:, None], v0, 0.0)
    else:
        v0 = load_tile(v_tile, stride_vn, touched, BLOCK_N, 0, E0, E, MASKED)
    p = p.to(v0.dtype)
    acc0 = acc0 * alpha[:, None]
    if E1 > 0:
        v1 = load_tile(v_tile, stride_vn, touched, BLOCK_N, E0, E1, E, MASKED)
        # Both accumulators are ready before either product: else ptxas serialises them (C7515).
        acc1 = acc1 * alpha[:, None]
        acc0 = tl.dot(p, v0, acc0, input_precision=PRECISION)
        acc1 = tl.dot(p, v1, acc1, input_precision=PRECISION)
    else:
        acc0 = tl.dot(p, v0, acc0, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def attend_tile(
    acc0,
    acc1,
    m,
    l,
    q0,
    q1,
    tile,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    b,
    k_start,
    kv_head,
    stride_kn,
    stride_vn,
    mask_ptr,
    stride_mm,
    stride_mn,
    rows,
    N,
    row_begin,
    row_end,
    touched_begin,
    touched_end,
    row_keys,
    column_base,
    threshold,
    scale,
    KIND: tl.constexpr,
    VARLEN: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    ARITHMETIC: tl.constexpr,
    DEAD_KEYS: tl.constexpr,
    HOLES: tl.constexpr,
    DROPOUT: tl.constexpr,
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
):
    """One step of online softmax over key tile `tile`; returns the new accumulators, m and l."""
    MASKED: tl.constexpr = KIND == EDGE
    n_start = tile * BLOCK_N
    offs_n = n_start + tl.arange(0, BLOCK_N)
    touched = (offs_n >= touched_begin) & (offs_n < touched_end)
    s = tile_scores(
        q0, q1, n_start, k_ptr, k_desc, b, k_start, kv_head, stride_kn, touched,
        MASKED, VARLEN, TMA, PRECISION, D, D0, D1, BLOCK_N,
    )  # fmt: skip

    # -- scores that may be attended, the others -inf
    if KIND != FULL:
        allowed = tl.full([BLOCK_M, BLOCK_N], True, tl.int1)
        if DENSE:
            local_i = tl.arange(0, BLOCK_M)[:, None]
            local_j = tl.arange(0, BLOCK_N)[None, :]
            mask_tile = mask_ptr + n_start.to(tl.int64) * stride_mn
            dense, bias = load_mask(
                mask_tile, local_i, local_j, stride_mm, stride_mn, rows, N - n_start, ROWS_SHARED
            )
            allowed = allowed & dense
            if BIAS:
                s = s * scale + bias
        if KIND == EDGE:
            if ARITHMETIC:
                j = offs_n[None, :]
                allowed = allowed & (j >= row_begin[:, None]) & (j < row_end[:, None])
            elif not DENSE:
                allowed = allowed & touched[None, :]
        s = tl.where(allowed, s, NEG_INF)

    p, alpha, m, l = online_softmax(
        s, m, l, scale, n_start, row_keys, column_base, threshold,
        BIAS and KIND != FULL, q0.dtype == tl.float32, DROPOUT, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # Where no row of the tile may look, values are not read: they may be NaN.
    if MASKED and HOLES:
        touched = tl.max(allowed.to(tl.int32), 0) > 0
    acc0, acc1 = add_values(
        acc0, acc1, p, alpha, n_start, v_ptr, v_desc, b, k_start, kv_head, stride_vn, touched,
        MASKED, DEAD_KEYS, VARLEN, TMA, PRECISION, E, E0, E1, BLOCK_N,
    )  # fmt: skip
    return acc0, acc1, m, l


@triton.jit
def edge_tile(index, first, full_first, full_last):
    """The index-th tile of [first, full_first) followed by those from full_last on."""
    tile = first + index
    return tl.where(tile < full_first, tile, tile + full_last - full_first)


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


@triton.jit
def listed_spans(list_ptr, count, first, full_first, full_last, last):
    """Where an ascending list of tiles crosses the bounds of tile_range."""
    return (
        listed_below(list_ptr, count, first),
        listed_below(list_ptr, count, full_first),
        listed_below(list_ptr, count, full_last),
        listed_below(list_ptr, count, last),
    )


@triton.jit(
    do_not_specialize=["low", "high", "batch_heads", "section", "threshold", "dropout_stream"]
)
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
    section,
    low,
    high,
    scale,
    threshold,
    keep_factor,
    STRIDE_UNIT: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
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
    multiple of BLOCK_N. DEAD_KEYS: there may be keys that no query attends. scale is positive; the
    sign, or a zero, is in Q_FACTOR. Strides of q, k, v and out come divided by STRIDE_UNIT, so that
    the compiler sees alignment.

    Packed sequences: key_lengths_ptr and query_lengths_ptr are offsets, M and N upper bounds,
    stride_ub is the number of rows; FROM_END: low and high count from each one's bottom right. A
    batch entry behind the last sequence clears the rows behind the last offset.
    """
    ROW_LENGTHS: tl.constexpr = KEY_LENGTHS == 2
    VARLEN: tl.constexpr = KEY_LENGTHS == 3
    BAND: tl.constexpr = HAS_LOW or HAS_HIGH
    ARITHMETIC: tl.constexpr = BAND or KEY_LENGTHS > 0 or QUERY_LENGTHS
    HOLES: tl.constexpr = DENSE or (ROW_LENGTHS and BAND)

    # -- which tile: sections of heads that share the L2 cache, in each the last rows first, because
    #    they are the longest where causality makes a difference
    pid = tl.program_id(0)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    section_index = pid // (section * tiles_m)
    heads_here = tl.minimum(section, batch_heads - section_index * section)
    in_section = pid - section_index * section * tiles_m
    tile_m = tiles_m - 1 - in_section // heads_here
    batch_head = section_index * section + in_section % heads_here
    b = batch_head // H
    h = batch_head % H
    kv_head = h // GROUP
    m_start = tile_m * BLOCK_M
    local_i = tl.arange(0, BLOCK_M)
    i = m_start + local_i

    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    m64 = m_start.to(tl.int64)
    qm = stride_qm * STRIDE_UNIT
    kn = stride_kn * STRIDE_UNIT
    vn = stride_vn * STRIDE_UNIT
    om = stride_om * STRIDE_UNIT
    k_start = 0
    lse_start = batch_head.to(tl.int64) * M
    if VARLEN:
        total = stride_ub + 0 * b64
        q_start = tl.load(query_lengths_ptr + b).to(tl.int64)
        if b == batch_heads // H - 1:
            clear_rows(
                out_ptr + h64 * stride_oh * STRIDE_UNIT, om, lse_ptr + h64 * total, q_start + m64,
                total, tiles_m, BLOCK_M, E0, E1, E,
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
    first, full_first, full_last, last, touched_begin, touched_end = tile_range(
        m_start, m_end, limit, limit_all, low, high, HAS_LOW, HAS_HIGH, BLOCK_N
    )

    n_edge = last - first - (full_last - full_first)
    full_begin = full_first
    full_end = full_last
    partial_begin = 0
    partial_end = 0
    if DENSE:
        mask_ptr += b64 * stride_mb + h64 * stride_mh + m64 * stride_mm
        lists_ptr += b64 * stride_tb + h64 * stride_th + tile_m.to(tl.int64) * stride_tm
        full_list = lists_ptr + LIST_HEADER + FULL * inner
        partial_list = lists_ptr + LIST_HEADER + PARTIAL * inner
        edge_list = lists_ptr + LIST_HEADER + EDGE * inner
        full_count = tl.load(lists_ptr + FULL)
        partial_count = tl.load(lists_ptr + PARTIAL)
        edge_count = tl.load(lists_ptr + EDGE)
        if ARITHMETIC:
            if QUERY_LENGTHS:
                # A key that only rows beyond the query length may attend is dead.
                full_last = tl.where(
                    m_end < tl.minimum(m_start + BLOCK_M, M), full_first, full_last
                )
            full_0, full_1, full_2, full_3 = listed_spans(
                full_list, full_count, first, full_first, full_last, last
            )
            partial_0, partial_1, partial_2, partial_3 = listed_spans(
                partial_list, partial_count, first, full_first, full_last, last
            )
            edge_0 = listed_below(edge_list, edge_count, first)
            edge_3 = listed_below(edge_list, edge_count, last)
            full_begin = full_1
            full_end = full_2
            partial_begin = partial_1
            partial_end = partial_2
            # The edge loop walks the EDGE list and then the other lists' tiles near a boundary.
            until_edge = edge_3 - edge_0
            until_full_left = until_edge + full_1 - full_0
            until_full_right = until_full_left + full_3 - full_2
            until_partial_left = until_full_right + partial_1 - partial_0
            n_edge = until_partial_left + partial_3 - partial_2
        else:
            full_begin = 0
            full_end = full_count
            partial_end = partial_count
            n_edge = edge_count

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
    column_base = b
    if DROPOUT:
        row_base, column_base = dropout_bases(seed_ptr, dropout_stream, b, h)
        row_keys = lattice_keys(row_base, m_start, local_i)

    # -- the three loops; each in an if, because where a loop of no trips joins accumulators with
    #    products in flight, ptxas gives up overlapping any products (C7515)
    row_begin = i
    row_end = i
    if ARITHMETIC:
        row_begin, row_end = key_bounds(i, row_limit, q_limit, low, high, HAS_LOW, HAS_HIGH)
    if ARITHMETIC or DENSE or RAGGED:
        if n_edge > 0:
            for index in tl.range(0, n_edge, num_stages=EDGE_STAGES):
                if DENSE:
                    position = EDGE * inner + index
                    if ARITHMETIC:
                        position += edge_0
                        past = index - until_edge
                        position = tl.where(past >= 0, FULL * inner + full_0 + past, position)
                        past = index - until_full_left
                        position = tl.where(past >= 0, FULL * inner + full_2 + past, position)
                        past = index - until_full_right
                        position = tl.where(past >= 0, PARTIAL * inner + partial_0 + past, position)
                        past = index - until_partial_left
                        position = tl.where(past >= 0, PARTIAL * inner + partial_2 + past, position)
                    tile = tl.load(lists_ptr + LIST_HEADER + position)
                else:
                    tile = edge_tile(index, first, full_first, full_last)
                acc0, acc1, m, l = attend_tile(
                    acc0, acc1, m, l, q0, q1, tile, k_ptr, v_ptr, k_desc, v_desc, b, k_start,
                    kv_head, kn, vn,
                    mask_ptr, stride_mm, stride_mn, M - m_start, N, row_begin, row_end,
                    touched_begin, touched_end, row_keys, column_base, threshold, scale,
                    EDGE, VARLEN, DENSE, BIAS, ROWS_SHARED, ARITHMETIC, DEAD_KEYS, HOLES,
                    DROPOUT, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip

    if DENSE:
        if partial_begin < partial_end:
            for index in tl.range(partial_begin, partial_end, num_stages=STAGES):
                tile = tl.load(partial_list + index)
                acc0, acc1, m, l = attend_tile(
                    acc0, acc1, m, l, q0, q1, tile, k_ptr, v_ptr, k_desc, v_desc, b, k_start,
                    kv_head, kn, vn,
                    mask_ptr, stride_mm, stride_mn, M - m_start, N, row_begin, row_end,
                    touched_begin, touched_end, row_keys, column_base, threshold, scale,
                    PARTIAL, VARLEN, DENSE, BIAS, ROWS_SHARED, ARITHMETIC, DEAD_KEYS, HOLES,
                    DROPOUT, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip
    if OVERLAP == 0:
        if full_begin < full_end:
            for index in tl.range(full_begin, full_end, num_stages=STAGES):
                tile = index
                if DENSE:
                    tile = tl.load(full_list + index)
                acc0, acc1, m, l = attend_tile(
                    acc0, acc1, m, l, q0, q1, tile, k_ptr, v_ptr, k_desc, v_desc, b, k_start,
                    kv_head, kn, vn,
                    mask_ptr, stride_mm, stride_mn, M - m_start, N, row_begin, row_end,
                    touched_begin, touched_end, row_keys, column_base, threshold, scale,
                    FULL, VARLEN, DENSE, BIAS, ROWS_SHARED, ARITHMETIC, DEAD_KEYS, HOLES, DROPOUT,
                    TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip
    elif full_begin < full_end:
        # The product of the next scores is under way while the tensor cores would else wait for
        # the exponentials: 1 starts it before them, 2 leaves them the last product with values.
        EXACT: tl.constexpr = q0.dtype == tl.float32
        touched = i >= 0
        tile = full_begin
        if DENSE:
            tile = tl.load(full_list + full_begin)
        n_start = tile * BLOCK_N
        s = tile_scores(
            q0, q1, n_start, k_ptr, k_desc, b, k_start, kv_head, kn, touched,
            False, VARLEN, TMA, PRECISION, D, D0, D1, BLOCK_N,
        )  # fmt: skip
        if full_begin + 1 < full_end:
            for index in tl.range(full_begin, full_end - 1, num_stages=STAGES):
                tile = index
                next_tile = index + 1
                if DENSE:
                    tile = tl.load(full_list + index)
                    next_tile = tl.load(full_list + index + 1)
                n_start = tile * BLOCK_N
                n_next = next_tile * BLOCK_N
                if OVERLAP == 1:
                    s_next = tile_scores(
                        q0, q1, n_next, k_ptr, k_desc, b, k_start, kv_head, kn, touched,
                        False, VARLEN, TMA, PRECISION, D, D0, D1, BLOCK_N,
                    )  # fmt: skip
                p, alpha, m, l = online_softmax(
                    s, m, l, scale, n_start, row_keys, column_base, threshold,
                    False, EXACT, DROPOUT, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                p = p.to(q0.dtype)
                if OVERLAP == 2:
                    s_next = tile_scores(
                        q0, q1, n_next, k_ptr, k_desc, b, k_start, kv_head, kn, touched,
                        False, VARLEN, TMA, PRECISION, D, D0, D1, BLOCK_N,
                    )  # fmt: skip
                acc0, acc1 = add_values(
                    acc0, acc1, p, alpha, n_start, v_ptr, v_desc, b, k_start, kv_head, vn, touched,
                    False, DEAD_KEYS, VARLEN, TMA, PRECISION, E, E0, E1, BLOCK_N,
                )  # fmt: skip
                s = s_next
        tile = full_end - 1
        if DENSE:
            tile = tl.load(full_list + tile)
        n_start = tile * BLOCK_N
        p, alpha, m, l = online_softmax(
            s, m, l, scale, n_start, row_keys, column_base, threshold,
            False, EXACT, DROPOUT, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        acc0, acc1 = add_values(
            acc0, acc1, p, alpha, n_start, v_ptr, v_desc, b, k_start, kv_head, vn, touched,
            False, DEAD_KEYS, VARLEN, TMA, PRECISION, E, E0, E1, BLOCK_N,
        )  # fmt: skip
    # -- results; a row without keys has l = 0, a row beyond the query length is as good as one
    empty = (l == 0.0) | (i >= q_limit)
    lse = tl.where(empty, NEG_INF, m + tl.log(l))
    tl.store(lse_ptr + lse_start + i, lse, mask=i < M)
    factor = tl.where(empty, 0.0, 1.0 / l)
    if DROPOUT:
        factor = factor * keep_factor
    out0 = tl.where(empty[:, None], 0.0, acc0 * factor[:, None])
    store_tile(out_ptr, om, out0, i < M, BLOCK_M, 0, E0, E)
    if E1 > 0:
        out1 = tl.where(empty[:, None], 0.0, acc1 * factor[:, None])
        store_tile(out_ptr, om, out1, i < M, BLOCK_M, E0, E1, E)


# -- launcher -------------------------------------------------------------------------------------

# Keys and values of the heads that run at the same time should stay in the L2 cache.
_SECTION_BYTES = 32 << 20
# Offsets inside a tile are 32-bit: 256 rows of this stride stay below 2^31.
_LARGEST_ROW_STRIDE = 1 << 22


def _config(
    q: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    limits: Band,
    dropout_p: float,
) -> ForwardConfig:
    arch = _env.architecture(q.device.type, q.device.index or 0)
    lengths = key_lengths is not None or query_lengths is not None
    banded = limits.has_low or limits.has_high
    features = Features(banded, lengths, mask is not None, dropout_p > 0.0)
    return forward_config(arch, q.dtype, q.shape[3], v.shape[3], q.shape[2], features)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all but the last dimension, 0 where there is nothing to step over."""
    sizes, strides = x.shape, x.stride()
    return tuple(0 if sizes[d] <= 1 else strides[d] for d in range(x.dim() - 1))


def _stride_unit(strides: tuple[int, ...]) -> int:
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def _describable(c: ForwardConfig, x: Tensor) -> bool:
    """Whether tensor descriptors are wanted and can cover x: one tile a row, steps of 16 bytes,
    nothing expanded.
    """
    if not c.tma or x.numel() == 0 or split_width(x.shape[-1])[1] > 0:
        return False
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    steps = [stride * x.element_size() for size, stride in pairs if size > 1]
    return all(step > 0 and step % 16 == 0 for step in steps)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """[B, K, N, D], or packed [S, K, D], in blocks of one head's rows; 0 in columns beyond D."""
    width = split_width(x.shape[-1])[0]
    block = [1, 1, rows, width] if x.dim() == 4 else [rows, 1, width]
    # Torch leaves strides of size-1 dimensions undefined, the hardware wants multiples of 16 bytes.
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    steps = [16 if size == 1 else stride for size, stride in pairs]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], block)


def _dead_keys(
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    limits: Band,
    M: int,
    N: int,
) -> bool:
    """Whether there may be keys that no query attends: their values may be NaN."""
    if mask is not None or key_lengths is not None or query_lengths is not None:
        return True
    return limits.low > 0 or (limits.has_high and M - 1 + limits.high < N - 1)


def _section(group: int, head_bytes: int, limits: Band) -> int:
    """How many query heads run their tiles in one long-to-short order. head_bytes: one k and v."""
    return group * max(1, _SECTION_BYTES // max(1, head_bytes)) if limits.has_high else 1


def attention_fwd_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    return unsupported(q, k, v, mask)


def unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """What neither the forward nor the backward kernels can do."""
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"has kernels for float16, bfloat16 and float32, got {q.dtype}"
    D, E = q.shape[3], v.shape[3]
    if not (1 <= D <= 256 and 1 <= E <= 256):
        return f"handles head dims up to 256, got {D} and {E}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            return f"needs a contiguous last dimension, got {name} with strides {x.stride()}"
        if x.shape[2] > 1 and x.stride(2) > _LARGEST_ROW_STRIDE:
            return f"handles row strides up to {_LARGEST_ROW_STRIDE}, got {x.stride(2)} in {name}"
    if mask is not None and max(mask.stride()[2:]) > _LARGEST_ROW_STRIDE:
        return f"handles mask strides up to {_LARGEST_ROW_STRIDE}, got {mask.stride()}"
    arch = _env.architecture(q.device.type, q.device.index or 0)
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"needs compute capability 8.0 or newer, got {arch}"
    return None


def attention_fwd_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """The lists of tiles of a dense mask."""
    if mask is None:
        return []
    M, N = q.shape[2], k.shape[2]
    limits = band(causal, window_left, window_right, M, N)
    c = _config(q, v, mask, key_lengths, query_lengths, limits, dropout_p)
    lists = tile_lists(mask_shape(mask), M, N, c.BLOCK_M, c.BLOCK_N, by_key=False)
    return [(lists.shape, torch.int32, False)]


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
    lists: Tensor | None = None,
) -> None:
    _run(
        None, q, k, v, mask, key_lengths, query_lengths, causal, window_left, window_right, scale,
        dropout_p, dropout_seed, dropout_stream, out, lse, lists,
    )  # fmt: skip


def attention_fwd_with_config(config: ForwardConfig, *args: Any) -> None:
    """attention_fwd (arguments and results, no workspace) in a given tiling: to tune and test."""
    q, k, mask = args[0], args[1], args[3]
    lists = None
    if mask is not None:
        M, N = q.shape[2], k.shape[2]
        layout = tile_lists(mask_shape(mask), M, N, config.BLOCK_M, config.BLOCK_N, by_key=False)
        lists = q.new_empty(layout.shape, dtype=torch.int32)
    _run(config, *args, lists)


class _Plan(NamedTuple):
    """All that follows from shapes, strides and options. classify: for dense masks. k, v: templates
    of descriptors, or None.
    """

    attend: BoundLaunch
    classify: BoundLaunch | None
    k: TensorDescriptor | None
    v: TensorDescriptor | None


_plans = LaunchCache()


def _run(
    config: ForwardConfig | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
    lists: Tensor | None,
) -> None:
    if lse.numel() == 0:
        return
    device = q.device
    key = (
        config or _env.architecture(device.type, device.index or 0), device, q.dtype, q.shape,
        q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.stride(), signature(mask),
        signature(key_lengths), signature(query_lengths), causal, window_left, window_right, scale,
        dropout_p, (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        limits = band(causal, window_left, window_right, q.shape[2], k.shape[2])
        if config is None:
            config = _config(q, v, mask, key_lengths, query_lengths, limits, dropout_p)
        plan = _bind(
            config, limits, q, k, v, mask, key_lengths, query_lengths, scale, dropout_p, out,
            key[-1],
        )  # fmt: skip
        _plans.remember(key, plan)
    if plan.classify is not None:
        plan.classify(mask, lists)
    plan.attend(
        q,
        k,
        v,
        None if plan.k is None else with_base(plan.k, k),
        None if plan.v is None else with_base(plan.v, v),
        mask,
        lists,
        key_lengths,
        query_lengths,
        dropout_seed if dropout_p > 0.0 else None,
        out,
        lse,
        dropout_stream,
    )


def _bind(
    c: ForwardConfig,
    limits: Band,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    scale: float,
    dropout_p: float,
    out: Tensor,
    aligned: bool,
) -> _Plan:
    (B, H, M, D), (K, N), E = q.shape, k.shape[1:3], v.shape[3]
    shape, classify, lists_strides = None, None, (0, 0, 0, 0)
    if mask is not None:
        shape = mask_shape(mask)
        layout = tile_lists(shape, M, N, c.BLOCK_M, c.BLOCK_N, by_key=False)
        lists_strides = (layout.stride_b, layout.stride_h, layout.stride_outer, layout.inner)
        classify = mask_classifier(shape, M, N, c.BLOCK_M, c.BLOCK_N, by_key=False)
    per_query = key_lengths is not None and key_lengths.dim() == 2
    strides = _strides(q) + _strides(k) + _strides(v) + _strides(out)
    tma = aligned and _describable(c, k) and _describable(c, v)
    scalars = _scalars(
        strides, (*(shape.strides if shape else (0, 0, 0, 0)), *lists_strides),
        (
            0 if key_lengths is None else key_lengths.stride(0),
            key_lengths.stride(1) if per_query and key_lengths is not None else 0,
            0 if query_lengths is None else query_lengths.stride(0),
        ),
        (H, H // K, M, N, B * H), _section(H // K, N * (D + E) * k.element_size(), limits), limits,
        scale, dropout_p,
    )  # fmt: skip
    constants = _constants(
        c, strides, limits, D, E, scale, dropout_p, tma,
        KEY_LENGTHS=0 if key_lengths is None else key_lengths.dim(),
        QUERY_LENGTHS=query_lengths is not None,
        DENSE=mask is not None,
        BIAS=mask is not None and mask.dtype != torch.bool,
        ROWS_SHARED=shape is not None and shape.sizes[2] == 1,
        DEAD_KEYS=_dead_keys(mask, key_lengths, query_lengths, limits, M, N),
        RAGGED=N % c.BLOCK_N != 0,
    )  # fmt: skip
    grid = (triton.cdiv(M, c.BLOCK_M) * B * H,)
    return _Plan(
        BoundLaunch(attention_fwd_kernel, grid, scalars, constants, **c.options()),
        classify,
        _descriptor(k, c.BLOCK_N) if tma else None,
        _descriptor(v, c.BLOCK_N) if tma else None,
    )


def _scalars(
    strides: tuple[int, ...],
    mask_strides: tuple[int, ...],
    length_strides: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    section: int,
    limits: Band,
    scale: float,
    dropout_p: float,
) -> tuple[float, ...]:
    """The kernel's numbers in order. sizes: H, heads a group, M, N, heads of the whole grid."""
    unit = _stride_unit(strides)
    threshold, keep_factor = dropout_numbers(dropout_p)
    return (
        *(stride // unit for stride in strides), *mask_strides, *length_strides, *sizes,
        min(sizes[4], section), limits.low, limits.high, abs(scale) or 1.0, threshold, keep_factor,
    )  # fmt: skip


def _constants(
    c: ForwardConfig,
    strides: tuple[int, ...],
    limits: Band,
    D: int,
    E: int,
    scale: float,
    dropout_p: float,
    tma: bool,
    *,
    KEY_LENGTHS: int,
    QUERY_LENGTHS: bool = False,
    DENSE: bool = False,
    BIAS: bool = False,
    ROWS_SHARED: bool = False,
    DEAD_KEYS: bool = True,
    FROM_END: bool = False,
    RAGGED: bool = True,
) -> dict[str, Any]:
    """The kernel's compile-time parameters in order."""
    (D0, D1), (E0, E1) = split_width(D), split_width(E)
    return {
        "STRIDE_UNIT": _stride_unit(strides),
        "HAS_LOW": limits.has_low,
        "HAS_HIGH": limits.has_high,
        "KEY_LENGTHS": KEY_LENGTHS,
        "QUERY_LENGTHS": QUERY_LENGTHS,
        "DENSE": DENSE,
        "BIAS": BIAS,
        "ROWS_SHARED": ROWS_SHARED,
        "DEAD_KEYS": DEAD_KEYS,
        "FROM_END": FROM_END,
        "DROPOUT": dropout_p > 0.0,
        "RAGGED": RAGGED,
        "Q_FACTOR": (scale > 0) - (scale < 0),
        "TMA": tma,
        "PRECISION": c.precision,
        "D": D,
        "D0": D0,
        "D1": D1,
        "E": E,
        "E0": E0,
        "E1": E1,
        "BLOCK_M": c.BLOCK_M,
        "BLOCK_N": c.BLOCK_N,
        "STAGES": c.stages,
        "EDGE_STAGES": c.edge_stages,
        "OVERLAP": c.overlap,
    }


# -- packed sequences -----------------------------------------------------------------------------


def attention_varlen_fwd_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    return unsupported(*(x.transpose(0, 1)[None] for x in (q, k, v)), None)


def attention_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """q [T, H, D], k [S, K, D], v [S, K, E], offsets contiguous; lse [H, T]."""
    if lse.numel() == 0:
        return
    device = q.device
    key = (
        _env.architecture(device.type, device.index or 0), device, q.dtype, q.shape, q.stride(),
        k.shape, k.stride(), v.shape, v.stride(), out.stride(), signature(cu_seqlens_q),
        signature(cu_seqlens_k), max_seqlen_q, max_seqlen_k, causal, window_left, window_right,
        scale, dropout_p, (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        # Sizes differ from sequence to sequence: the diagonal's shift is added on the device.
        right = 0 if causal else window_right
        limits = Band(
            -window_left if window_left >= 0 else 0, max(right, 0), window_left >= 0, right >= 0
        )
        plan = _bind_varlen(
            limits, q, k, v, cu_seqlens_q.numel(), max_seqlen_q, max_seqlen_k, causal, scale,
            dropout_p, out, key[-1],
        )  # fmt: skip
        _plans.remember(key, plan)
    plan.attend(
        q,
        k,
        v,
        None if plan.k is None else with_base(plan.k, k),
        None if plan.v is None else with_base(plan.v, v),
        None,
        None,
        cu_seqlens_k,
        cu_seqlens_q,
        dropout_seed if dropout_p > 0.0 else None,
        out,
        lse,
        dropout_stream,
    )


def _bind_varlen(
    limits: Band,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    scale: float,
    dropout_p: float,
    out: Tensor,
    aligned: bool,
) -> _Plan:
    """entries: the sequences, and one more for the rows behind them."""
    (T, H, D), K, E = q.shape, k.shape[1], v.shape[2]
    arch = _env.architecture(q.device.type, q.device.index or 0)
    features = Features(limits.has_low or limits.has_high, True, False, dropout_p > 0.0)
    M = max(1, max_seqlen_q)
    c = forward_config(arch, q.dtype, D, E, M, features)
    strides = tuple(
        stride for x in (q, k, v, out) for stride in (0, *reversed(_strides(x)))
    )  # batch, head, row
    tma = aligned and _describable(c, k) and _describable(c, v)
    section = _section(H // K, max_seqlen_k * (D + E) * k.element_size(), limits)
    scalars = _scalars(
        strides, (0,) * 8, (0, 0, T), (H, H // K, M, max_seqlen_k, entries * H), section, limits,
        scale, dropout_p,
    )  # fmt: skip
    constants = _constants(
        c, strides, limits, D, E, scale, dropout_p, tma, KEY_LENGTHS=3, FROM_END=causal == 2
    )
    grid = (triton.cdiv(M, c.BLOCK_M) * entries * H,)
    return _Plan(
        BoundLaunch(attention_fwd_kernel, grid, scalars, constants, **c.options()),
        None,
        _descriptor(k, c.BLOCK_N) if tma else None,
        _descriptor(v, c.BLOCK_N) if tma else None,
    )
