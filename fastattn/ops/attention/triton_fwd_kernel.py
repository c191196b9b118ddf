"""The kernel of attention's forward in Triton; its launchers are in triton.py.

One program computes BLOCK_M queries of one head. It walks over the key tiles they may attend in up
to three loops: full tiles without any mask work, partial tiles that read the dense mask, and edge
tiles with every test, which also read as zero what no query of the tile may see. Which tile is
which comes from triton_tiles.py. Softmax is online and in base 2, but the running maximum stays in
natural units, because an additive mask may come close to the largest finite number.
"""

# Kernels are in Triton's language: no Python types. l is the row sum everywhere in this project.
# mypy: allow-untyped-defs, allow-incomplete-defs
# ruff: noqa: E741

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import (
    dropout_kept,
    dropout_row_base,
    kept_bits,
    load_keys,
    unit_keys,
    zero_dropped,
)
from fastattn.ops.attention.triton_tiles import (
    EDGE,
    FULL,
    LIST_HEADER,
    LOG2E,
    NEG_INF,
    PARTIAL,
    clamped_length,
    key_bounds,
    listed_below,
    load_mask,
    load_partial,
    load_tile,
    program_tile,
    store_tile,
    tile_range,
)


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
    column_keys_ptr,
    threshold,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(p after dropout, alpha, m, l): weights against the new maximum m, what the old sums shrink
    by, the sum l of the weights before dropout. SCALED: s is scaled already. DTYPE: of the data.
    """
    if SCALED:
        m_new = tl.maximum(m, tl.max(s, 1))
    else:
        m_new = tl.maximum(m, tl.max(s, 1) * scale)
    # A row without any key yet keeps -inf, and -inf - (-inf) is NaN.
    m_finite = tl.where(m_new == NEG_INF, 0.0, m_new)
    if SCALED:
        p = tl.exp2((s - m_finite[:, None]) * LOG2E)
    elif DTYPE == tl.float32:
        # Large logits would lose their last bits to a rounded m * log2(e).
        p = tl.exp2((s * scale - m_finite[:, None]) * LOG2E)
    else:
        p = tl.exp2(s * (scale * LOG2E) - (m_finite * LOG2E)[:, None])
    alpha = tl.exp2((m - m_finite) * LOG2E)
    l = l * alpha + tl.sum(p, 1)
    if DROPOUT:
        column_keys = load_keys(column_keys_ptr, n_start, BLOCK_N // 2)
        rows = tl.arange(0, BLOCK_M)[:, None]
        columns = tl.arange(0, BLOCK_N)[None, :]
        if DROPOUT == 2:
            bits = kept_bits(row_keys, column_keys, threshold, BLOCK_M, BLOCK_N)
            p = zero_dropped(p.to(DTYPE), bits, rows, columns)
        else:
            keep = dropout_kept(row_keys, column_keys, rows, columns, threshold, BLOCK_M, BLOCK_N)
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
    column_keys_ptr,
    threshold,
    scale,
    KIND: tl.constexpr,
    VARLEN: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    MASK_UNIT: tl.constexpr,
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
            if KIND == PARTIAL and MASK_UNIT > 1:
                inside = local_j < N - n_start if ROWS_SHARED else local_i < rows
                dense, bias = load_partial(
                    mask_tile, local_i, local_j, inside, stride_mm, stride_mn, ROWS_SHARED
                )
            else:
                dense, bias = load_mask(
                    mask_tile, local_i, local_j, stride_mm, stride_mn, rows, N - n_start,
                    ROWS_SHARED,
                )  # fmt: skip
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
        s, m, l, scale, n_start, row_keys, column_keys_ptr, threshold,
        BIAS and KIND != FULL, q0.dtype, DROPOUT, BLOCK_M, BLOCK_N,
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


# Not specialised: what changes from batch to batch and buys no wider load.
@triton.jit(
    do_not_specialize=[
        "dropout_stream", "stride_tb", "stride_th", "stride_tm", "inner", "stride_lb", "stride_ub",
        "M", "batch_heads", "section", "low", "high", "threshold",
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
    section,
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
    multiple of BLOCK_N. DEAD_KEYS: there may be keys that no query attends. DROPOUT: 0 none, 1 on
    any GPU, 2 with an instruction of NVIDIA's. scale is positive; the sign, or a zero, is in
    Q_FACTOR. Strides of q, k, v and out come divided by STRIDE_UNIT, N and those of
    the mask but the last by MASK_UNIT, so that the compiler sees alignment.

    Packed sequences: key_lengths_ptr and query_lengths_ptr are offsets, M and N upper bounds,
    stride_ub is the number of rows; FROM_END: low and high count from each one's bottom right. A
    batch entry behind the last sequence clears the rows behind the last offset.
    """
    ROW_LENGTHS: tl.constexpr = KEY_LENGTHS == 2
    VARLEN: tl.constexpr = KEY_LENGTHS == 3
    BAND: tl.constexpr = HAS_LOW or HAS_HIGH
    ARITHMETIC: tl.constexpr = BAND or KEY_LENGTHS > 0 or QUERY_LENGTHS
    HOLES: tl.constexpr = DENSE or (ROW_LENGTHS and BAND)

    tile_m, batch_head = program_tile(M, batch_heads, section, BLOCK_M, True)
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
    mm = stride_mm * MASK_UNIT
    N = N * MASK_UNIT
    k_start = 0
    lse_start = batch_head.to(tl.int64) * M
    if VARLEN:
        total = stride_ub + 0 * b64
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
    # Of rows beyond their length a band would still call some tiles full.
    limit_all = tl.where(m_start < q_limit, limit_all, 0)
    first, full_first, full_last, last, touched_begin, touched_end = tile_range(
        m_start, m_end, limit, limit_all, low, high, HAS_LOW, HAS_HIGH, BLOCK_N
    )

    n_edge = last - first - (full_last - full_first)
    full_begin = full_first
    full_end = full_last
    partial_begin = 0
    partial_end = 0
    if DENSE:
        mask_ptr += (b64 * stride_mb + h64 * stride_mh + m64 * stride_mm) * MASK_UNIT
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
    if DROPOUT:
        row_base = dropout_row_base(seed_ptr, dropout_stream, b, h)
        row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)

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
                    mask_ptr, mm, stride_mn, M - m_start, N, row_begin, row_end,
                    touched_begin, touched_end, row_keys, column_keys_ptr, threshold, scale,
                    EDGE, VARLEN, DENSE, BIAS, ROWS_SHARED, MASK_UNIT, ARITHMETIC, DEAD_KEYS,
                    HOLES, DROPOUT, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip

    if DENSE:
        if partial_begin < partial_end:
            for index in tl.range(partial_begin, partial_end, num_stages=STAGES):
                tile = tl.load(partial_list + index)
                acc0, acc1, m, l = attend_tile(
                    acc0, acc1, m, l, q0, q1, tile, k_ptr, v_ptr, k_desc, v_desc, b, k_start,
                    kv_head, kn, vn,
                    mask_ptr, mm, stride_mn, M - m_start, N, row_begin, row_end,
                    touched_begin, touched_end, row_keys, column_keys_ptr, threshold, scale,
                    PARTIAL, VARLEN, DENSE, BIAS, ROWS_SHARED, MASK_UNIT, ARITHMETIC, DEAD_KEYS,
                    HOLES, DROPOUT, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
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
                    mask_ptr, mm, stride_mn, M - m_start, N, row_begin, row_end,
                    touched_begin, touched_end, row_keys, column_keys_ptr, threshold, scale,
                    FULL, VARLEN, DENSE, BIAS, ROWS_SHARED, MASK_UNIT, ARITHMETIC, DEAD_KEYS,
                    HOLES, DROPOUT, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip
    elif full_begin < full_end:
        # The product of the next scores is under way while the tensor cores would else wait for
        # the exponentials: 1 starts it before them, 2 leaves them the last product with values.
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
                    s, m, l, scale, n_start, row_keys, column_keys_ptr, threshold,
                    False, q0.dtype, DROPOUT, BLOCK_M, BLOCK_N,
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
            s, m, l, scale, n_start, row_keys, column_keys_ptr, threshold,
            False, q0.dtype, DROPOUT, BLOCK_M, BLOCK_N,
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
