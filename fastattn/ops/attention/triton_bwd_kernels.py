"""Kernels of the Triton attention backward; triton_bwd.py launches them.

Scores are computed again tile by tile: p = exp(s - lse), dp = dropout(dout vᵀ), and with
delta = Σ out·dout - dlse
    ds = p (dp - delta),  dq = scale ds k,  dk = scale dsᵀ q,  dv = dropout(p)ᵀ dout,  dmask = Σ ds.
Every result has one owner that adds in a fixed order: no atomics, the same bits from run to run.

`attention_bwd_dq_kernel` owns a tile of queries and walks over the keys; it computes delta on the
way and leaves its rows' statistics for the kernels that follow. `attention_bwd_dkdv_kernel` owns a
tile of keys and walks over the queries of every head of its group, on transposed scores: pᵀ and dsᵀ
then are what the tensor cores want from registers. `attention_bwd_dmask_kernel` owns a tile of the
mask and walks over what the mask is broadcast over.

Tiles are FULL (every pair allowed: no mask work), PARTIAL (a dense mask blocks some pairs, nothing
else matters) or EDGE (every test; lines that nothing in the tile may attend are read as 0, for they
may hold NaN). Lengths, causality and windows bound the loops by arithmetic; where that cannot say
which tiles to visit, triton_bwd_tiles.py has listed them (LISTS).
"""

import triton
import triton.language as tl

from fastattn.ops.attention.triton_tiles import (
    EDGE,
    FULL,
    LIST_HEADER,
    LOG2E,
    NEG_INF,
    PARTIAL,
    absorb,
    blocked_value,
    clamped_length,
    dropout_bases,
    finalise,
    key_bounds,
    load_mask,
    load_tile,
    store_tile,
    tile_range,
)

# A row's statistics travel as one 64-bit word: delta above, lse below. A dead row's lse is +inf,
# which makes its p 0; this is its word, with delta 0.
DEAD_ROW = tl.constexpr(0x7F800000)


# -- pieces of the kernels -------------------------------------------------------------------------


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
    row0,
    start,
    keep,
    ROWS: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    LIMIT: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """[ROWS, WIDTH] from row start and column START of what ptr points at: (b, h) from row0 on.

    With TMA by the descriptor, which reads 0 beyond the tensor; else as load_tile.
    """
    if TMA:
        return desc.load([b, h, row0 + start, START]).reshape([ROWS, WIDTH])
    else:
        return load_tile(
            ptr + start.to(tl.int64) * stride, stride, keep, ROWS, START, WIDTH, LIMIT, MASKED
        )


@triton.jit
def weights(s, lse, bias, scale, BIAS: tl.constexpr, NATURAL: tl.constexpr):
    """p from the products s. lse and scale are in base 2, unless NATURAL: for fp32's last bits, and
    for a bias, which may be of any size."""
    if NATURAL:
        s = s * scale
        if BIAS:
            s = s + bias
        return tl.exp2((s - lse) * LOG2E)
    else:
        return tl.exp2(s * scale - lse)


@triton.jit
def load_partial(tile_ptr, i, j, inside, stride_mm, stride_mn, ROWS_SHARED: tl.constexpr):
    """(allowed, bias) as load_mask, of a partial tile: only lines that nothing is summed over may
    lie outside `inside`."""
    if ROWS_SHARED:
        ptrs = tile_ptr + j * stride_mn
    else:
        ptrs = tile_ptr + i * stride_mm + j * stride_mn
    value = tl.load(ptrs, mask=inside, other=0)
    if tile_ptr.dtype.element_ty == tl.int1:
        return value != 0, 0.0
    elif tile_ptr.dtype.element_ty == tl.float64:
        bias = tl.maximum(value, blocked_value(tl.float32)).to(tl.float32)
        return ~(value <= blocked_value(tl.float64)), bias
    else:
        bias = value.to(tl.float32)
        return ~(bias <= blocked_value(tile_ptr.dtype.element_ty)), bias


@triton.jit
def unit_keys(base, start, UNITS: tl.constexpr):
    """Keys of the lattice units of 2 UNITS lines from start, a multiple of 16, on."""
    return absorb(base, (start // 2 + tl.arange(0, UNITS)).to(tl.uint32))


@triton.jit
def dropout_kept(keys0, keys1, rows, columns, threshold, SIZE0: tl.constexpr, SIZE1: tl.constexpr):
    """Which weights of a tile [SIZE0, SIZE1] are kept, from the keys of the units of both sides.

    rows and columns are local indices, expanded to two dimensions. One word decides 2 x 2 weights.
    """
    word = finalise(keys0[:, None] ^ keys1[None, :])  # [SIZE0 / 2, SIZE1 / 2]
    word = word.reshape([SIZE0 // 16, 1, 8, SIZE1 // 16, 1, 8])
    word = tl.broadcast_to(word, [SIZE0 // 16, 2, 8, SIZE1 // 16, 2, 8]).reshape([SIZE0, SIZE1])
    byte = ((rows >> 3) & 1) * 2 + ((columns >> 3) & 1)
    # The byte moves to the top; what lies below it cannot change the comparison.
    return (word << (24 - 8 * byte).to(tl.uint32)) >= (threshold.to(tl.uint32) << 24)


@triton.jit
def product(a0, a1, b0, b1, SECOND: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ, the shared dimension in one or two tiles."""
    c = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if SECOND > 0:
        c = tl.dot(a1, tl.trans(b1), c, input_precision=PRECISION)
    return c


# -- dq and the statistics -------------------------------------------------------------------------


@triton.jit
def dq_tile(
    dq0,
    dq1,
    q0,
    q1,
    do0,
    do1,
    lse,
    delta,
    tile,
    k_ptr,
    v_ptr,
    k0_desc,
    k1_desc,
    v0_desc,
    v1_desc,
    desc_b,
    kv_head,
    key0,
    stride_kn,
    stride_vn,
    mask_ptr,
    stride_mm,
    stride_mn,
    alive_ptr,
    stride_alive,
    base_tiles_m,
    m_start,
    M,
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
    LISTS: tl.constexpr,
    FACTOR_M: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    BY_VALUE: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    NATURAL: tl.constexpr,
    DEAD_KEYS: tl.constexpr,
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
    SUM: tl.constexpr,
):
    """Adds key tile `tile` to dq; with SUM the rows of p dp to dq0 [BLOCK_M], without a delta."""
    n_start = tile * BLOCK_N
    local_i = tl.arange(0, BLOCK_M)
    local_j = tl.arange(0, BLOCK_N)
    j = n_start + local_j
    # Edge tiles read keys that no row here may attend as 0: 0 · NaN would reach every row.
    if KIND == EDGE and LISTS:
        seen = tl.zeros([BLOCK_N], tl.int32)
        for f in tl.static_range(FACTOR_M):
            base_row = m_start // (BLOCK_M // FACTOR_M) + f
            keys_ptr = alive_ptr + base_row.to(tl.int64) * stride_alive + j
            flags = tl.load(keys_ptr, mask=(j < N) & (base_row < base_tiles_m), other=0)
            seen = seen | flags.to(tl.int32)
        touched = seen > 0
    else:
        touched = (j >= touched_begin) & (j < touched_end)
    MASKED: tl.constexpr = KIND == EDGE
    BY_TMA: tl.constexpr = TMA and not (MASKED and DEAD_KEYS)

    k0 = load_part(k_ptr, stride_kn, k0_desc, desc_b, kv_head, key0, n_start, touched,
                   BLOCK_N, 0, D0, D, MASKED, BY_TMA)  # fmt: skip
    k1 = k0
    if D1 > 0:
        k1 = load_part(k_ptr, stride_kn, k1_desc, desc_b, kv_head, key0, n_start, touched,
                       BLOCK_N, D0, D1, D, MASKED, BY_TMA)  # fmt: skip
    s = product(q0, q1, k0, k1, D1, PRECISION)  # [BLOCK_M, BLOCK_N]
    if HAS_DOUT:
        v0 = load_part(v_ptr, stride_vn, v0_desc, desc_b, kv_head, key0, n_start, touched,
                       BLOCK_N, 0, E0, E, MASKED, BY_TMA)  # fmt: skip
        v1 = v0
        if E1 > 0:
            v1 = load_part(v_ptr, stride_vn, v1_desc, desc_b, kv_head, key0, n_start, touched,
                           BLOCK_N, E0, E1, E, MASKED, BY_TMA)  # fmt: skip
        dp = product(do0, do1, v0, v1, E1, PRECISION)

    bias = 0.0
    rows = local_i[:, None]
    columns = local_j[None, :]
    if DENSE:  # of (b, h) and these rows
        mask_ptr += n_start.to(tl.int64) * stride_mn
    if KIND == EDGE:
        allowed = j[None, :] < row_end[:, None]
        if HAS_LOW:
            allowed = allowed & (j[None, :] >= row_begin[:, None])
        if DENSE:
            dense, bias = load_mask(
                mask_ptr, rows, columns, stride_mm, stride_mn, M - m_start, N - n_start, ROWS_SHARED
            )
            allowed = allowed & dense
    elif KIND == PARTIAL:
        inside = columns < N - n_start if ROWS_SHARED else rows < M - m_start
        allowed, bias = load_partial(
            mask_ptr, rows, columns, inside, stride_mm, stride_mn, ROWS_SHARED
        )
    p = weights(s, lse[:, None], bias, scale, BIAS and KIND != FULL, NATURAL)
    if KIND == EDGE or (KIND == PARTIAL and not BY_VALUE):
        p = tl.where(allowed, p, 0.0)
    if HAS_DOUT and DROPOUT:
        column_keys = unit_keys(column_base, n_start, BLOCK_N // 2)
        keep = dropout_kept(row_keys, column_keys, rows, columns, threshold, BLOCK_M, BLOCK_N)
        dp = tl.where(keep, dp, 0.0)
    if SUM:
        dq0 += tl.sum(p * dp, 1)
    else:
        if HAS_DOUT:
            ds = p * (dp - delta[:, None])
        else:
            ds = -p * delta[:, None]
        ds = ds.to(k0.dtype)
        dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
        if D1 > 0:
            dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return dq0, dq1


@triton.jit(
    do_not_specialize=["low", "high", "batch_heads", "section", "threshold", "stream", "H", "GROUP"]
)
def attention_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    k0_desc,
    k1_desc,
    v0_desc,
    v1_desc,
    lse_ptr,
    dlse_ptr,
    statistics_ptr,
    dq_ptr,
    mask_ptr,
    lists_ptr,
    alive_ptr,
    key_lengths_ptr,
    query_lengths_ptr,
    seed_ptr,
    stream,
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
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dqb,
    stride_dqh,
    stride_dqm,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_cb,
    stride_ch,
    base_tiles_m,
    stride_alive,
    stride_tb,
    stride_th,
    inner,
    stride_lb,
    stride_lm,
    stride_ub,
    H,
    GROUP,
    M,
    N,
    padded_m,
    rows,
    batch_heads,
    section,
    low,
    high,
    scale,
    threshold,
    keep_factor,
    STRIDE_UNIT: tl.constexpr,
    NEED_DQ: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    EXACT_DELTA: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr,
    PACKED: tl.constexpr,
    FROM_END: tl.constexpr,
    LISTS: tl.constexpr,
    FACTOR_M: tl.constexpr,
    FACTOR_N: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    BY_VALUE: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NATURAL: tl.constexpr,
    EDGES: tl.constexpr,
    DEAD_KEYS: tl.constexpr,
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
):
    """KEY_LENGTHS: 0 none, 1 per sequence, 2 per query. EDGES: edge tiles may occur without LISTS.

    EXACT_DELTA: delta is summed over the keys once more, where out was rounded too much.
    PACKED: batches are sequences, one behind the other in a head's rows; lengths are their offsets,
    M and N the longest, rows all there are; with FROM_END the band counts from each one's end.
    Strides of the tensors come divided by STRIDE_UNIT, so that the compiler sees their alignment.
    """
    # Sections of heads that share the L2 cache; in each the last rows first, because they are the
    # longest where causality makes a difference.
    pid = tl.program_id(0)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    section_index = pid // (section * tiles_m)
    heads_here = tl.minimum(section, batch_heads - section_index * section)
    in_section = pid - section_index * section * tiles_m
    m_tile = tiles_m - 1 - in_section // heads_here
    batch_head = section_index * section + in_section % heads_here
    b = batch_head // H
    h = batch_head % H
    kv_head = h // GROUP
    m_start = m_tile * BLOCK_M
    local_i = tl.arange(0, BLOCK_M)
    i = m_start + local_i

    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    m64 = m_start.to(tl.int64)
    desc_b = b
    key0 = 0
    first_statistic = batch_head.to(tl.int64) * padded_m
    first_row = batch_head.to(tl.int64) * M  # in lse and dlse
    if PACKED:  # the lengths are offsets; batch strides are 0
        query0 = tl.load(query_lengths_ptr + b)
        key0 = tl.load(key_lengths_ptr + b)
        M = tl.load(query_lengths_ptr + b + 1) - query0
        N = tl.load(key_lengths_ptr + b + 1) - key0
        if FROM_END:
            low += N - M
            high += N - M
        desc_b = 0
        first_statistic = h64 * padded_m + query0
        first_row = h64 * rows + query0
        k_ptr += key0.to(tl.int64) * stride_kn * STRIDE_UNIT
        v_ptr += key0.to(tl.int64) * stride_vn * STRIDE_UNIT
        m64 += query0
    q_ptr += (b64 * stride_qb + h64 * stride_qh + m64 * stride_qm) * STRIDE_UNIT
    k_ptr += (b64 * stride_kb + kv_head.to(tl.int64) * stride_kh) * STRIDE_UNIT
    v_ptr += (b64 * stride_vb + kv_head.to(tl.int64) * stride_vh) * STRIDE_UNIT
    out_ptr += (b64 * stride_ob + h64 * stride_oh + m64 * stride_om) * STRIDE_UNIT

    q_limit = M
    if QUERY_LENGTHS:
        q_limit = clamped_length(tl.load(query_lengths_ptr + b64 * stride_ub), M)
    inside = i < q_limit

    # A dead row counts with p = 0 and delta = 0, whatever out and dout hold.
    lse = tl.load(lse_ptr + first_row + i, mask=inside, other=NEG_INF)
    live = inside & (lse != NEG_INF)
    score_scale = scale
    if not NATURAL:
        lse = lse * LOG2E
        score_scale = scale * LOG2E
    lse = tl.where(live, lse, float("inf"))
    delta = tl.zeros([BLOCK_M], tl.float32)
    do0 = delta
    do1 = delta
    if HAS_DOUT:
        dout_ptr += (b64 * stride_dob + h64 * stride_doh + m64 * stride_dom) * STRIDE_UNIT
        do0 = load_tile(dout_ptr, stride_dom * STRIDE_UNIT, inside, BLOCK_M, 0, E0, E, True)
        if E1 > 0:
            do1 = load_tile(dout_ptr, stride_dom * STRIDE_UNIT, inside, BLOCK_M, E0, E1, E, True)

    # -- which tiles, and what stays on chip
    if NEED_DQ or EXACT_DELTA:
        m_end = tl.minimum(m_start + BLOCK_M, q_limit)
        row_limit = N
        limit = N
        if KEY_LENGTHS == 1:
            limit = clamped_length(tl.load(key_lengths_ptr + b64 * stride_lb), N)
            row_limit = limit
        if KEY_LENGTHS == 2:
            lengths_ptr = key_lengths_ptr + b64 * stride_lb + i.to(tl.int64) * stride_lm
            row_limit = clamped_length(tl.load(lengths_ptr, mask=inside, other=0), N)
        limit = tl.where(m_start < q_limit, limit, 0)
        first, full_first, full_last, last, touched_begin, touched_end = tile_range(
            m_start, m_end, limit, limit, low, high, HAS_LOW, HAS_HIGH, BLOCK_N
        )
        row_begin, row_end = key_bounds(i, row_limit, q_limit, low, high, HAS_LOW, HAS_HIGH)
        n_full = full_last - full_first
        n_partial = 0
        n_edge = last - first - n_full
        if LISTS:
            lists_ptr += b64 * stride_tb + h64 * stride_th
            lists_ptr += m_tile.to(tl.int64) * (LIST_HEADER + inner)
            alive_ptr += (b64 * stride_cb + h64 * stride_ch) * (BLOCK_N // FACTOR_N)
            n_full = tl.load(lists_ptr + FULL)
            n_partial = tl.load(lists_ptr + PARTIAL)
            n_edge = tl.load(lists_ptr + EDGE)
            lists_ptr += LIST_HEADER
        if DENSE:
            mask_ptr += b64 * stride_mb + h64 * stride_mh + m64 * stride_mm
        q0 = load_tile(q_ptr, stride_qm * STRIDE_UNIT, inside, BLOCK_M, 0, D0, D, True)
        q1 = q0
        if D1 > 0:
            q1 = load_tile(q_ptr, stride_qm * STRIDE_UNIT, inside, BLOCK_M, D0, D1, D, True)
        row_keys = i
        column_base = b
        if DROPOUT:
            row_base, column_base = dropout_bases(seed_ptr, stream, b, h)
            row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)

    # -- statistics; dropout's factor of dp goes out of ds = p (dp - delta), into its sums' scale
    if EXACT_DELTA:
        for index in tl.range(0, n_full + n_partial + n_edge, num_stages=1):
            tile = first + index
            if LISTS:
                tile = tl.load(lists_ptr + index)
            delta, _ = dq_tile(
                delta, delta, q0, q1, do0, do1, lse, delta, tile, k_ptr, v_ptr, k0_desc, k1_desc,
                v0_desc, v1_desc, desc_b, kv_head, key0, stride_kn * STRIDE_UNIT,
                stride_vn * STRIDE_UNIT, mask_ptr, stride_mm, stride_mn, alive_ptr, stride_alive,
                base_tiles_m, m_start, M, N, row_begin, row_end, touched_begin, touched_end,
                row_keys, column_base, threshold, score_scale, EDGE, LISTS, FACTOR_M, DENSE, BIAS,
                BY_VALUE, ROWS_SHARED, HAS_LOW, DROPOUT, HAS_DOUT, NATURAL, DEAD_KEYS, TMA,
                PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N, True,
            )  # fmt: skip
    elif HAS_DOUT:
        out0 = load_tile(out_ptr, stride_om * STRIDE_UNIT, inside, BLOCK_M, 0, E0, E, True)
        delta = tl.sum(out0.to(tl.float32) * do0.to(tl.float32), 1)
        if E1 > 0:
            out1 = load_tile(out_ptr, stride_om * STRIDE_UNIT, inside, BLOCK_M, E0, E1, E, True)
            delta += tl.sum(out1.to(tl.float32) * do1.to(tl.float32), 1)
        delta = delta / keep_factor
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + first_row + i, mask=inside, other=0.0)
        delta -= dlse / keep_factor
    delta = tl.where(live, delta, 0.0)
    word = pack_statistics(lse, delta)
    statistics_ptr += first_statistic
    if PACKED:
        tl.store(statistics_ptr + i, word, mask=inside)
    else:
        tl.store(statistics_ptr + i, word)

    # -- dq
    if NEED_DQ:
        dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
        dq1 = delta
        if D1 > 0:
            dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
        next_tile = full_first
        if LISTS:
            next_tile = tl.load(lists_ptr, mask=n_full > 0, other=0)
        for index in tl.range(0, n_full, num_stages=STAGES):
            tile = next_tile
            if LISTS:
                next_tile = tl.load(lists_ptr + index + 1, mask=index + 1 < n_full, other=0)
            else:
                tile = full_first + index
            dq0, dq1 = dq_tile(
                dq0, dq1, q0, q1, do0, do1, lse, delta, tile, k_ptr, v_ptr, k0_desc, k1_desc,
                v0_desc, v1_desc, desc_b, kv_head, key0, stride_kn * STRIDE_UNIT,
                stride_vn * STRIDE_UNIT, mask_ptr, stride_mm, stride_mn, alive_ptr, stride_alive,
                base_tiles_m, m_start, M, N, row_begin, row_end, touched_begin, touched_end,
                row_keys, column_base, threshold, score_scale, FULL, LISTS, FACTOR_M, DENSE, BIAS,
                BY_VALUE, ROWS_SHARED, HAS_LOW, DROPOUT, HAS_DOUT, NATURAL, DEAD_KEYS, TMA,
                PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N, False,
            )  # fmt: skip
        if DENSE:
            partial = lists_ptr + n_full
            next_tile = tl.load(partial, mask=n_partial > 0, other=0)
            for index in tl.range(0, n_partial, num_stages=STAGES):
                tile = next_tile
                next_tile = tl.load(partial + index + 1, mask=index + 1 < n_partial, other=0)
                dq0, dq1 = dq_tile(
                    dq0, dq1, q0, q1, do0, do1, lse, delta, tile, k_ptr, v_ptr, k0_desc, k1_desc,
                    v0_desc, v1_desc, desc_b, kv_head, key0, stride_kn * STRIDE_UNIT,
                    stride_vn * STRIDE_UNIT, mask_ptr, stride_mm, stride_mn, alive_ptr,
                    stride_alive, base_tiles_m, m_start, M, N, row_begin, row_end, touched_begin,
                    touched_end, row_keys, column_base, threshold, score_scale, PARTIAL, LISTS,
                    FACTOR_M, DENSE, BIAS, BY_VALUE, ROWS_SHARED, HAS_LOW, DROPOUT, HAS_DOUT,
                    NATURAL, DEAD_KEYS, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                    False,
                )  # fmt: skip
        if EDGES or LISTS:
            for index in tl.range(0, n_edge, num_stages=EDGE_STAGES):
                if LISTS:
                    tile = tl.load(lists_ptr + n_full + n_partial + index)
                else:
                    tile = first + index
                    tile = tl.where(tile < full_first, tile, tile + n_full)
                dq0, dq1 = dq_tile(
                    dq0, dq1, q0, q1, do0, do1, lse, delta, tile, k_ptr, v_ptr, k0_desc, k1_desc,
                    v0_desc, v1_desc, desc_b, kv_head, key0, stride_kn * STRIDE_UNIT,
                    stride_vn * STRIDE_UNIT, mask_ptr, stride_mm, stride_mn, alive_ptr,
                    stride_alive, base_tiles_m, m_start, M, N, row_begin, row_end, touched_begin,
                    touched_end, row_keys, column_base, threshold, score_scale, EDGE, LISTS,
                    FACTOR_M, DENSE, BIAS, BY_VALUE, ROWS_SHARED, HAS_LOW, DROPOUT, HAS_DOUT,
                    NATURAL, DEAD_KEYS, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
                    False,
                )  # fmt: skip

        dq_ptr += (b64 * stride_dqb + h64 * stride_dqh + m64 * stride_dqm) * STRIDE_UNIT
        # A dead row's sums may be NaN: its q and dout were read as they are.
        dq0 = tl.where(live[:, None], dq0 * (scale * keep_factor), 0.0)
        store_tile(dq_ptr, stride_dqm * STRIDE_UNIT, dq0, i < M, BLOCK_M, 0, D0, D)
        if D1 > 0:
            dq1 = tl.where(live[:, None], dq1 * (scale * keep_factor), 0.0)
            store_tile(dq_ptr, stride_dqm * STRIDE_UNIT, dq1, i < M, BLOCK_M, D0, D1, D)


# -- dk and dv -------------------------------------------------------------------------------------


@triton.jit
def dkdv_tile(
    dk0,
    dk1,
    dv0,
    dv1,
    k0,
    k1,
    v0,
    v1,
    tile,
    q_ptr,
    dout_ptr,
    q0_desc,
    q1_desc,
    do0_desc,
    do1_desc,
    statistics_ptr,
    desc_b,
    h,
    query0,
    stride_qm,
    stride_dom,
    mask_ptr,
    stride_mm,
    stride_mn,
    lengths_ptr,
    stride_lm,
    j,
    keys_left,
    q_limit,
    M,
    N,
    live_begin,
    live_end,
    low,
    high,
    row_base,
    column_keys,
    threshold,
    scale,
    KIND: tl.constexpr,
    LISTS: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    BY_VALUE: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    DROPOUT: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    NATURAL: tl.constexpr,
    DEAD_ROWS: tl.constexpr,
    LATE: tl.constexpr,
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
    """Adds query tile `tile` of head (b, h) to dk and dv."""
    m_start = tile * BLOCK_M
    local_i = tl.arange(0, BLOCK_M)
    i = m_start + local_i
    # Edge tiles read rows that attend no key here as 0: 0 · NaN would reach every key.
    live = (i >= live_begin) & (i < live_end)
    if KIND == EDGE:
        word = tl.load(statistics_ptr + i, mask=(i < M) if LISTS else live, other=DEAD_ROW)
    else:
        word = tl.load(statistics_ptr + i)
    lse, delta = unpack_statistics(word)
    if KIND == EDGE and LISTS:
        live = lse != float("inf")
    MASKED: tl.constexpr = KIND == EDGE
    BY_TMA: tl.constexpr = TMA and not (MASKED and DEAD_ROWS)

    q0 = load_part(q_ptr, stride_qm, q0_desc, desc_b, h, query0, m_start, live,
                   BLOCK_M, 0, D0, D, MASKED, BY_TMA)  # fmt: skip
    q1 = q0
    if D1 > 0:
        q1 = load_part(q_ptr, stride_qm, q1_desc, desc_b, h, query0, m_start, live,
                       BLOCK_M, D0, D1, D, MASKED, BY_TMA)  # fmt: skip
    s = product(k0, k1, q0, q1, D1, PRECISION)  # [BLOCK_N, BLOCK_M]
    if HAS_DOUT:
        do0 = load_part(dout_ptr, stride_dom, do0_desc, desc_b, h, query0, m_start, live,
                        BLOCK_M, 0, E0, E, MASKED, BY_TMA)  # fmt: skip
        do1 = do0
        if E1 > 0:
            do1 = load_part(dout_ptr, stride_dom, do1_desc, desc_b, h, query0, m_start, live,
                            BLOCK_M, E0, E1, E, MASKED, BY_TMA)  # fmt: skip
        if LATE and NEED_DK:
            dp = product(v0, v1, do0, do1, E1, PRECISION)

    bias = 0.0
    rows = local_i[None, :]
    columns = tl.arange(0, BLOCK_N)[:, None]
    if DENSE:  # of (b, h) and these keys
        mask_ptr += m_start.to(tl.int64) * stride_mm
    if KIND == EDGE:
        # Keys beyond their length may get any gradient here: each has its own row, never stored.
        row_limit = N
        if KEY_LENGTHS == 2:
            lengths_ptr += i[None, :].to(tl.int64) * stride_lm
            row_limit = clamped_length(tl.load(lengths_ptr, mask=i[None, :] < M, other=0), N)
        row_begin, row_end = key_bounds(
            i[None, :], row_limit, q_limit, low, high, HAS_LOW, HAS_HIGH
        )
        allowed = j[:, None] < row_end
        if HAS_LOW:
            allowed = allowed & (j[:, None] >= row_begin)
        if DENSE:
            dense, bias = load_mask(
                mask_ptr, rows, columns, stride_mm, stride_mn, M - m_start, keys_left, ROWS_SHARED
            )
            allowed = allowed & dense
    elif KIND == PARTIAL:
        allowed, bias = load_partial(
            mask_ptr, rows, columns, columns < keys_left, stride_mm, stride_mn, ROWS_SHARED
        )
    p = weights(s, lse[None, :], bias, scale, BIAS and KIND != FULL, NATURAL)
    if KIND == EDGE or (KIND == PARTIAL and not BY_VALUE):
        p = tl.where(allowed, p, 0.0)

    if HAS_DOUT:
        if DROPOUT:
            row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)
            keep = dropout_kept(column_keys, row_keys, rows, columns, threshold, BLOCK_N, BLOCK_M)
            # The decision waits for dp in p's sign: 32 predicates would not.
            p = tl.where(keep, p, -p)
        if NEED_DV:
            kept = p
            if DROPOUT:
                kept = tl.maximum(p, 0.0)
            if not LATE:
                dv0 = tl.dot(kept.to(do0.dtype), do0, dv0, input_precision=PRECISION)
                if E1 > 0:
                    dv1 = tl.dot(kept.to(do0.dtype), do1, dv1, input_precision=PRECISION)
        if NEED_DK:
            if not LATE:
                dp = product(v0, v1, do0, do1, E1, PRECISION)
            if DROPOUT:
                dp = tl.where(p > 0.0, dp, 0.0)
                p = tl.abs(p)
            ds = p * (dp - delta[None, :])
        if NEED_DV and LATE:
            dv0 = tl.dot(kept.to(do0.dtype), do0, dv0, input_precision=PRECISION)
            if E1 > 0:
                dv1 = tl.dot(kept.to(do0.dtype), do1, dv1, input_precision=PRECISION)
    elif NEED_DK:
        ds = -p * delta[None, :]
    if NEED_DK:
        ds = ds.to(q0.dtype)
        dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
        if D1 > 0:
            dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit(
    do_not_specialize=["low", "high", "batch_heads", "section", "threshold", "stream", "H", "K"]
)
def attention_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    q0_desc,
    q1_desc,
    do0_desc,
    do1_desc,
    statistics_ptr,
    dk_ptr,
    dv_ptr,
    mask_ptr,
    lists_ptr,
    alive_ptr,
    key_lengths_ptr,
    query_lengths_ptr,
    seed_ptr,
    stream,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_dkb,
    stride_dkh,
    stride_dkn,
    stride_dvb,
    stride_dvh,
    stride_dvn,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_cb,
    stride_ch,
    base_tiles_m,
    stride_alive,
    alive_heads,
    stride_tb,
    stride_th,
    inner,
    stride_lb,
    stride_lm,
    stride_ub,
    H,
    K,
    GROUP,
    M,
    N,
    padded_m,
    batch_heads,
    section,
    low,
    high,
    scale,
    threshold,
    keep_factor,
    STRIDE_UNIT: tl.constexpr,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr,
    PACKED: tl.constexpr,
    FROM_END: tl.constexpr,
    LISTS: tl.constexpr,
    FACTOR_N: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    BY_VALUE: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    DROPOUT: tl.constexpr,
    NATURAL: tl.constexpr,
    EDGES: tl.constexpr,
    DEAD_ROWS: tl.constexpr,
    LATE: tl.constexpr,
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
):
    """As above; batch_heads and section count key/value heads. LATE: dp is computed before p."""
    # Here causality makes the first keys' loops the longest.
    pid = tl.program_id(0)
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    section_index = pid // (section * tiles_n)
    heads_here = tl.minimum(section, batch_heads - section_index * section)
    in_section = pid - section_index * section * tiles_n
    n_tile = in_section // heads_here
    batch_head = section_index * section + in_section % heads_here
    b = batch_head // K
    kv_head = batch_head % K
    n_start = n_tile * BLOCK_N
    local_j = tl.arange(0, BLOCK_N)
    j = n_start + local_j

    b64 = b.to(tl.int64)
    kv64 = kv_head.to(tl.int64)
    n64 = n_start.to(tl.int64)
    desc_b = b
    query0 = 0
    if PACKED:  # the lengths are offsets; batch strides are 0
        query0 = tl.load(query_lengths_ptr + b)
        key0 = tl.load(key_lengths_ptr + b)
        M = tl.load(query_lengths_ptr + b + 1) - query0
        N = tl.load(key_lengths_ptr + b + 1) - key0
        if FROM_END:
            low += N - M
            high += N - M
        desc_b = 0
        n64 += key0
        q_ptr += query0.to(tl.int64) * stride_qm * STRIDE_UNIT
        if HAS_DOUT:
            dout_ptr += query0.to(tl.int64) * stride_dom * STRIDE_UNIT
    k_ptr += (b64 * stride_kb + kv64 * stride_kh + n64 * stride_kn) * STRIDE_UNIT
    v_ptr += (b64 * stride_vb + kv64 * stride_vh + n64 * stride_vn) * STRIDE_UNIT
    score_scale = scale
    if not NATURAL:
        score_scale = scale * LOG2E

    # -- which queries may attend these keys
    q_limit = M
    if QUERY_LENGTHS:
        q_limit = clamped_length(tl.load(query_lengths_ptr + b64 * stride_ub), M)
    key_limit = N
    if KEY_LENGTHS == 1:
        key_limit = clamped_length(tl.load(key_lengths_ptr + b64 * stride_lb), N)
    n_end = tl.minimum(n_start + BLOCK_N, key_limit)
    limit = tl.where(n_start < key_limit, q_limit, 0)
    first, full_first, full_last, last, live_begin, live_end = tile_range(
        n_start, n_end, limit, limit, -high, -low, HAS_HIGH, HAS_LOW, BLOCK_M
    )
    if KEY_LENGTHS == 2:
        key_lengths_ptr += b64 * stride_lb

    # -- what stays on chip; keys that no query of the group may attend are 0
    alive = j < key_limit
    if LISTS:
        seen = tl.zeros([BLOCK_N], tl.int32)
        for g in range(0, alive_heads):
            base_tile = b64 * stride_cb + (kv64 * GROUP + g) * stride_ch
            tiles_ptr = alive_ptr + base_tile * (BLOCK_N // FACTOR_N) + j
            for start in range(0, base_tiles_m, 32):
                base_row = start + tl.arange(0, 32)[:, None]
                flags = tl.load(
                    tiles_ptr[None, :] + base_row.to(tl.int64) * stride_alive,
                    mask=(base_row < base_tiles_m) & alive[None, :],
                    other=0,
                )
                seen = seen | tl.max(flags.to(tl.int32), 0)
        alive = seen > 0
    else:
        if HAS_HIGH:
            alive = alive & (j < q_limit + high)
        if HAS_LOW:
            alive = alive & (j >= low)
    k0 = load_tile(k_ptr, stride_kn * STRIDE_UNIT, alive, BLOCK_N, 0, D0, D, True)
    k1 = k0
    dk0 = tl.zeros([BLOCK_N, D0], tl.float32)
    dk1 = tl.zeros([BLOCK_N], tl.float32)
    if D1 > 0:
        k1 = load_tile(k_ptr, stride_kn * STRIDE_UNIT, alive, BLOCK_N, D0, D1, D, True)
        dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    v0 = k0
    v1 = k0
    if HAS_DOUT and NEED_DK:
        v0 = load_tile(v_ptr, stride_vn * STRIDE_UNIT, alive, BLOCK_N, 0, E0, E, True)
        if E1 > 0:
            v1 = load_tile(v_ptr, stride_vn * STRIDE_UNIT, alive, BLOCK_N, E0, E1, E, True)
    dv0 = tl.zeros([BLOCK_N, E0], tl.float32)
    dv1 = tl.zeros([BLOCK_N], tl.float32)
    if E1 > 0:
        dv1 = tl.zeros([BLOCK_N, E1], tl.float32)

    # -- every query head of the group in turn
    for g in tl.range(0, GROUP, num_stages=1):
        h = kv_head * GROUP + g
        h64 = h.to(tl.int64)
        q_head = q_ptr + (b64 * stride_qb + h64 * stride_qh) * STRIDE_UNIT
        dout_head = dout_ptr
        if HAS_DOUT:
            dout_head = dout_ptr + (b64 * stride_dob + h64 * stride_doh) * STRIDE_UNIT
        statistics = statistics_ptr + (b64 * H + h64) * padded_m
        if PACKED:
            statistics = statistics_ptr + h64 * padded_m + query0
        mask_head = mask_ptr
        if DENSE:
            mask_head = mask_ptr + b64 * stride_mb + h64 * stride_mh + n64 * stride_mn
        n_full = full_last - full_first
        n_partial = 0
        n_edge = last - first - n_full
        list_ptr = lists_ptr
        if LISTS:
            list_ptr = lists_ptr + (
                b64 * stride_tb + h64 * stride_th + n_tile.to(tl.int64) * (LIST_HEADER + inner)
            )
            n_full = tl.load(list_ptr + FULL)
            n_partial = tl.load(list_ptr + PARTIAL)
            n_edge = tl.load(list_ptr + EDGE)
            list_ptr += LIST_HEADER
        row_base = b
        column_keys = j
        if DROPOUT:
            row_base, column_base = dropout_bases(seed_ptr, stream, b, h)
            column_keys = unit_keys(column_base, n_start, BLOCK_N // 2)

        next_tile = full_first
        if LISTS:
            next_tile = tl.load(list_ptr, mask=n_full > 0, other=0)
        for index in tl.range(0, n_full, num_stages=STAGES):
            tile = next_tile
            if LISTS:
                next_tile = tl.load(list_ptr + index + 1, mask=index + 1 < n_full, other=0)
            else:
                tile = full_first + index
            dk0, dk1, dv0, dv1 = dkdv_tile(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, tile, q_head, dout_head, q0_desc, q1_desc,
                do0_desc, do1_desc, statistics, desc_b, h, query0, stride_qm * STRIDE_UNIT,
                stride_dom * STRIDE_UNIT, mask_head, stride_mm, stride_mn, key_lengths_ptr,
                stride_lm, j, N - n_start, q_limit, M, N, live_begin, live_end, low, high, row_base,
                column_keys, threshold, score_scale, FULL, LISTS, DENSE, BIAS, BY_VALUE,
                ROWS_SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT, HAS_DOUT, NEED_DK, NEED_DV,
                NATURAL, DEAD_ROWS, LATE, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if DENSE:
            partial = list_ptr + n_full
            next_tile = tl.load(partial, mask=n_partial > 0, other=0)
            for index in tl.range(0, n_partial, num_stages=STAGES):
                tile = next_tile
                next_tile = tl.load(partial + index + 1, mask=index + 1 < n_partial, other=0)
                dk0, dk1, dv0, dv1 = dkdv_tile(
                    dk0, dk1, dv0, dv1, k0, k1, v0, v1, tile, q_head, dout_head, q0_desc, q1_desc,
                    do0_desc, do1_desc, statistics, desc_b, h, query0, stride_qm * STRIDE_UNIT,
                    stride_dom * STRIDE_UNIT, mask_head, stride_mm, stride_mn, key_lengths_ptr,
                    stride_lm, j, N - n_start, q_limit, M, N, live_begin, live_end, low, high,
                    row_base, column_keys, threshold, score_scale, PARTIAL, LISTS, DENSE, BIAS,
                    BY_VALUE, ROWS_SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT, HAS_DOUT,
                    NEED_DK, NEED_DV, NATURAL, DEAD_ROWS, LATE, TMA, PRECISION, D, D0, D1, E, E0,
                    E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip
        if EDGES or LISTS:
            for index in tl.range(0, n_edge, num_stages=EDGE_STAGES):
                if LISTS:
                    tile = tl.load(list_ptr + n_full + n_partial + index)
                else:
                    tile = first + index
                    tile = tl.where(tile < full_first, tile, tile + n_full)
                dk0, dk1, dv0, dv1 = dkdv_tile(
                    dk0, dk1, dv0, dv1, k0, k1, v0, v1, tile, q_head, dout_head, q0_desc, q1_desc,
                    do0_desc, do1_desc, statistics, desc_b, h, query0, stride_qm * STRIDE_UNIT,
                    stride_dom * STRIDE_UNIT, mask_head, stride_mm, stride_mn, key_lengths_ptr,
                    stride_lm, j, N - n_start, q_limit, M, N, live_begin, live_end, low, high,
                    row_base, column_keys, threshold, score_scale, EDGE, LISTS, DENSE, BIAS,
                    BY_VALUE, ROWS_SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT, HAS_DOUT,
                    NEED_DK, NEED_DV, NATURAL, DEAD_ROWS, LATE, TMA, PRECISION, D, D0, D1, E, E0,
                    E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip

    # -- results; keys beyond their length hold whatever their row became
    stored = j < N
    used = (j < key_limit)[:, None]
    if NEED_DK:
        dk_ptr += (b64 * stride_dkb + kv64 * stride_dkh + n64 * stride_dkn) * STRIDE_UNIT
        dk0 = tl.where(used, dk0 * (scale * keep_factor), 0.0)
        store_tile(dk_ptr, stride_dkn * STRIDE_UNIT, dk0, stored, BLOCK_N, 0, D0, D)
        if D1 > 0:
            dk1 = tl.where(used, dk1 * (scale * keep_factor), 0.0)
            store_tile(dk_ptr, stride_dkn * STRIDE_UNIT, dk1, stored, BLOCK_N, D0, D1, D)
    if NEED_DV:
        dv_ptr += (b64 * stride_dvb + kv64 * stride_dvh + n64 * stride_dvn) * STRIDE_UNIT
        if DROPOUT:
            dv0 = dv0 * keep_factor
        dv0 = tl.where(used, dv0, 0.0)
        store_tile(dv_ptr, stride_dvn * STRIDE_UNIT, dv0, stored, BLOCK_N, 0, E0, E)
        if E1 > 0:
            if DROPOUT:
                dv1 = dv1 * keep_factor
            dv1 = tl.where(used, dv1, 0.0)
            store_tile(dv_ptr, stride_dvn * STRIDE_UNIT, dv1, stored, BLOCK_N, E0, E1, E)


# -- the gradient of an additive mask --------------------------------------------------------------


@triton.jit(do_not_specialize=["low", "high", "threshold", "stream", "H", "GROUP", "per_split"])
def attention_bwd_dmask_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    statistics_ptr,
    mask_ptr,
    kinds_ptr,
    key_lengths_ptr,
    query_lengths_ptr,
    seed_ptr,
    dmask_ptr,
    stream,
    stride_qb,
    stride_qh,
    stride_qm,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_dob,
    stride_doh,
    stride_dom,
    stride_mb,
    stride_mh,
    stride_mm,
    stride_mn,
    stride_rs,
    stride_rb,
    stride_rh,
    stride_rm,
    stride_rn,
    stride_cb,
    stride_ch,
    base_tiles_n,
    stride_lb,
    stride_lm,
    stride_ub,
    H,
    GROUP,
    M,
    N,
    padded_m,
    owned_h,
    owned_m,
    owned_n,
    summed_b,
    summed_h,
    summed_m,
    summed_n,
    splits,
    per_split,
    low,
    high,
    scale,
    threshold,
    keep_factor,
    STRIDE_UNIT: tl.constexpr,
    HAS_DOUT: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_HIGH: tl.constexpr,
    KEY_LENGTHS: tl.constexpr,
    QUERY_LENGTHS: tl.constexpr,
    ROWS_SHARED: tl.constexpr,
    DROPOUT: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
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
    """One tile of the mask, or a share of what is summed into it.

    Of batch, head, query tile and key tile, each, a program owns one of owned_* or adds up all
    summed_*; one of the two numbers is 1. Blocks are the base tiles that kinds_ptr describes.
    """
    pid = tl.program_id(0).to(tl.int64)
    split = pid % splits
    owner = pid // splits
    own_n = owner % owned_n
    own_m = owner // owned_n % owned_m
    own_h = owner // owned_n // owned_m % owned_h
    own_b = owner // owned_n // owned_m // owned_h
    local_i = tl.arange(0, BLOCK_M)
    local_j = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    summed = summed_b * summed_h * summed_m * summed_n
    last = tl.minimum((split + 1) * per_split, summed)
    for item in tl.range(split * per_split, last, num_stages=1):
        n_tile = (own_n + item % summed_n).to(tl.int32)
        m_tile = (own_m + item // summed_n % summed_m).to(tl.int32)
        h = own_h + item // summed_n // summed_m % summed_h
        b = own_b + item // summed_n // summed_m // summed_h
        kind = tl.load(
            kinds_ptr + b * stride_cb + h * stride_ch + m_tile.to(tl.int64) * base_tiles_n + n_tile
        ).to(tl.int32)
        if (kind & 1) != 0:
            m_start = m_tile * BLOCK_M
            n_start = n_tile * BLOCK_N
            i = m_start + local_i
            j = n_start + local_j
            kv_head = h // GROUP
            m64 = m_start.to(tl.int64)
            n64 = n_start.to(tl.int64)
            q_tile = q_ptr + (b * stride_qb + h * stride_qh + m64 * stride_qm) * STRIDE_UNIT
            k_tile = k_ptr + (b * stride_kb + kv_head * stride_kh + n64 * stride_kn) * STRIDE_UNIT
            q0 = load_tile(q_tile, stride_qm * STRIDE_UNIT, i < M, BLOCK_M, 0, D0, D, True)
            k0 = load_tile(k_tile, stride_kn * STRIDE_UNIT, j < N, BLOCK_N, 0, D0, D, True)
            s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
            if D1 > 0:
                q1 = load_tile(q_tile, stride_qm * STRIDE_UNIT, i < M, BLOCK_M, D0, D1, D, True)
                k1 = load_tile(k_tile, stride_kn * STRIDE_UNIT, j < N, BLOCK_N, D0, D1, D, True)
                s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)

            q_limit = M
            if QUERY_LENGTHS:
                q_limit = clamped_length(tl.load(query_lengths_ptr + b * stride_ub), M)
            row_limit = N
            if KEY_LENGTHS == 1:
                row_limit = clamped_length(tl.load(key_lengths_ptr + b * stride_lb), N)
            if KEY_LENGTHS == 2:
                lengths_ptr = key_lengths_ptr + b * stride_lb + i.to(tl.int64)[:, None] * stride_lm
                row_limit = clamped_length(tl.load(lengths_ptr, mask=i[:, None] < M, other=0), N)
            row_begin, row_end = key_bounds(
                i[:, None], row_limit, q_limit, low, high, HAS_LOW, HAS_HIGH
            )
            mask_tile = mask_ptr + b * stride_mb + h * stride_mh + m64 * stride_mm + n64 * stride_mn
            allowed, bias = load_mask(
                mask_tile, local_i[:, None], local_j[None, :], stride_mm, stride_mn,
                M - m_start, N - n_start, ROWS_SHARED,
            )  # fmt: skip
            allowed = allowed & (j[None, :] >= row_begin) & (j[None, :] < row_end)
            word = tl.load(statistics_ptr + (b * H + h) * padded_m + i)
            lse, delta = unpack_statistics(word)
            p = weights(s, lse[:, None], bias, scale, True, True)
            if HAS_DOUT:
                do_at = (b * stride_dob + h * stride_doh + m64 * stride_dom) * STRIDE_UNIT
                v_at = (b * stride_vb + kv_head * stride_vh + n64 * stride_vn) * STRIDE_UNIT
                dom = stride_dom * STRIDE_UNIT
                vn = stride_vn * STRIDE_UNIT
                do0 = load_tile(dout_ptr + do_at, dom, i < M, BLOCK_M, 0, E0, E, True)
                v0 = load_tile(v_ptr + v_at, vn, j < N, BLOCK_N, 0, E0, E, True)
                dp = tl.dot(do0, tl.trans(v0), input_precision=PRECISION)
                if E1 > 0:
                    do1 = load_tile(dout_ptr + do_at, dom, i < M, BLOCK_M, E0, E1, E, True)
                    v1 = load_tile(v_ptr + v_at, vn, j < N, BLOCK_N, E0, E1, E, True)
                    dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PRECISION)
                if DROPOUT:
                    row_base, column_base = dropout_bases(seed_ptr, stream, b, h)
                    row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)
                    column_keys = unit_keys(column_base, n_start, BLOCK_N // 2)
                    keep = dropout_kept(
                        row_keys, column_keys, local_i[:, None], local_j[None, :], threshold,
                        BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    dp = tl.where(keep, dp, 0.0)
                ds = p * (dp - delta[:, None])
            else:
                ds = -p * delta[:, None]
            total += tl.where(allowed, ds, 0.0)

    if SUM_ROWS:
        total = tl.sum(total, 0, keep_dims=True)
    if SUM_COLUMNS:
        total = tl.sum(total, 1, keep_dims=True)
    ROWS: tl.constexpr = 1 if SUM_ROWS else BLOCK_M
    COLUMNS: tl.constexpr = 1 if SUM_COLUMNS else BLOCK_N
    rows = own_m * ROWS + tl.arange(0, ROWS)[:, None]
    columns = own_n * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < (1 if SUM_ROWS else M)) & (columns < (1 if SUM_COLUMNS else N))
    dmask_ptr += split * stride_rs + own_b * stride_rb + own_h * stride_rh
    tl.store(
        dmask_ptr + rows * stride_rm + columns * stride_rn,
        (total * keep_factor).to(dmask_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def sum_splits_kernel(
    partials_ptr,
    dmask_ptr,
    stride_rb,
    stride_rh,
    stride_rm,
    stride_rn,
    size_h,
    size_m,
    size_n,
    numel,
    splits,
    BLOCK: tl.constexpr,
):
    """The shares of every element of dmask, added in order."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < numel
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(0, splits):
        total += tl.load(partials_ptr + split * numel + offs, mask=inside, other=0.0)
    n = offs % size_n
    m = offs // size_n % size_m
    h = offs // size_n // size_m % size_h
    b = offs // size_n // size_m // size_h
    ptrs = dmask_ptr + b * stride_rb + h * stride_rh + m * stride_rm + n * stride_rn
    tl.store(ptrs, total.to(dmask_ptr.dtype.element_ty), mask=inside)
