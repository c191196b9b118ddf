"""The Triton attention backward: dk and dv.

`attention_bwd_dkdv_kernel` owns a tile of keys and walks over the queries of every head of its
group, on transposed scores: pᵀ and dsᵀ then are what the tensor cores want from registers. The
formulas are in triton_bwd_parts.py.
"""

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import (
    COLUMN_TAG,
    kept_bits,
    negate_dropped,
    stream_key,
    unit_keys,
    unit_rows,
    zero_dropped,
)
from fastattn.ops.attention.triton_bwd_parts import (
    DEAD_ROW,
    load_part,
    packed_sequence,
    packed_statistics,
    product,
    unpack_statistics,
    weights,
)
from fastattn.ops.attention.triton_tiles import (
    EDGE,
    FULL,
    LIST_HEADER,
    LOG2E,
    ONE_COLUMN,
    PARTIAL,
    clamped_length,
    key_bounds,
    load_mask,
    load_partial,
    load_tile,
    program_tile,
    store_tile,
    tile_range,
)


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
    row_keys_ptr,
    column_keys,
    threshold,
    scale,
    shift,
    KIND: tl.constexpr,
    LISTS: tl.constexpr,
    MOVING: tl.constexpr,
    DENSE: tl.constexpr,
    BIAS: tl.constexpr,
    BY_VALUE: tl.constexpr,
    SHARED: tl.constexpr,
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
    """Adds query tile `tile` of head (b, h) to dk and dv. statistics_ptr and row_keys_ptr: of the
    tile with MOVING and KIND FULL, else of the head.
    """
    m_start = tile * BLOCK_M
    local_i = tl.arange(0, BLOCK_M)
    i = m_start + local_i
    stored_start = m_start
    if MOVING and KIND == FULL:
        stored_start = 0
    # Edge tiles read rows that attend no key here as 0: 0 · NaN would reach every key.
    live = (i >= live_begin) & (i < live_end)
    if KIND == EDGE:
        word = tl.load(statistics_ptr + i, mask=(i < M) if LISTS else live, other=DEAD_ROW)
    else:
        word = tl.load(statistics_ptr + (stored_start + local_i))
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
                mask_ptr, rows, columns, stride_mm, stride_mn, M - m_start, keys_left, SHARED
            )
            allowed = allowed & dense
    elif KIND == PARTIAL:
        inside = None if SHARED == ONE_COLUMN else columns < keys_left
        allowed, bias = load_partial(mask_ptr, rows, columns, inside, stride_mm, stride_mn, SHARED)
    p = weights(s, lse[None, :], bias, scale, shift, BIAS and KIND != FULL, NATURAL, DROPOUT > 0)
    if KIND == EDGE or (KIND == PARTIAL and not BY_VALUE):
        p = tl.where(allowed, p, 0.0)

    if HAS_DOUT:
        if DROPOUT:
            # From dq: every thread would hash those of its rows again, as much work as the words.
            first_rows = unit_rows(stored_start, BLOCK_M // 2)
            if KIND == EDGE:
                row_keys = tl.load(row_keys_ptr + first_rows, mask=first_rows < M, other=0)
            else:
                row_keys = tl.load(row_keys_ptr + first_rows)
            row_keys = row_keys.to(tl.uint32, bitcast=True)
            bits = kept_bits(column_keys, row_keys, threshold, BLOCK_N, BLOCK_M)
            if DROPOUT == 1:
                # The decision waits for dp in p's sign: 32 predicates would not.
                p = negate_dropped(p, bits, rows, columns)
        if NEED_DV:
            kept = p
            if DROPOUT == 2:
                kept = zero_dropped(p.to(do0.dtype), bits, rows, columns)
            elif DROPOUT == 1:
                kept = tl.maximum(p, 0.0)
            if not LATE:
                dv0 = tl.dot(kept.to(do0.dtype), do0, dv0, input_precision=PRECISION)
                if E1 > 0:
                    dv1 = tl.dot(kept.to(do0.dtype), do1, dv1, input_precision=PRECISION)
        if NEED_DK:
            if not LATE:
                dp = product(v0, v1, do0, do1, E1, PRECISION)
            if DROPOUT == 2:
                dp = zero_dropped(dp, bits, rows, columns)
            elif DROPOUT == 1:
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


# Not specialised: what changes from batch to batch and buys no wider load.
@triton.jit(
    do_not_specialize=[
        "stream", "stride_cb", "stride_ch", "base_tiles_m", "alive_heads", "stride_tb", "stride_th",
        "inner", "stride_lb", "stride_ub", "H", "K", "batch_heads", "section", "low", "high",
        "threshold",
    ]
)  # fmt: skip
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
    row_keys_ptr,
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
    MASK_UNIT: tl.constexpr,
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
    SHARED: tl.constexpr,
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
    """Arguments as in attention_bwd_dq_kernel; batch_heads and section count key/value heads. LATE:
    dp is computed before p.
    """
    mm = stride_mm * MASK_UNIT
    N = N * MASK_UNIT
    # Causality makes the first keys' loops the longest.
    n_tile, batch_head = program_tile(N, batch_heads, section, BLOCK_N, False)
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
        query0, M, key0, N, low, high = packed_sequence(
            query_lengths_ptr + b, key_lengths_ptr + b, low, high, FROM_END
        )
        desc_b = 0
        n64 += key0
        q_ptr += query0.to(tl.int64) * stride_qm * STRIDE_UNIT
        if HAS_DOUT:
            dout_ptr += query0.to(tl.int64) * stride_dom * STRIDE_UNIT
    k_ptr += (b64 * stride_kb + kv64 * stride_kh + n64 * stride_kn) * STRIDE_UNIT
    v_ptr += (b64 * stride_vb + kv64 * stride_vh + n64 * stride_vn) * STRIDE_UNIT
    shift = tl.log2(keep_factor)
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
    # A pointer that the loop over full tiles moves on takes fewer registers than an offset for
    # every tile.
    MOVING: tl.constexpr = not LISTS
    for g in tl.range(0, GROUP, num_stages=1):
        h = kv_head * GROUP + g
        h64 = h.to(tl.int64)
        q_head = q_ptr + (b64 * stride_qb + h64 * stride_qh) * STRIDE_UNIT
        dout_head = dout_ptr
        if HAS_DOUT:
            dout_head = dout_ptr + (b64 * stride_dob + h64 * stride_doh) * STRIDE_UNIT
        first_statistic = (b64 * H + h64) * padded_m
        if PACKED:
            first_statistic = h64 * padded_m + packed_statistics(query0, b)
        statistics = statistics_ptr + first_statistic
        mask_head = mask_ptr
        if DENSE:
            mask_head = mask_ptr + (b64 * stride_mb + h64 * stride_mh) * MASK_UNIT
            mask_head += n64 * stride_mn
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
        row_keys = statistics
        column_keys = j
        if HAS_DOUT and DROPOUT:
            row_keys = row_keys_ptr + first_statistic
            column_base = stream_key(COLUMN_TAG, seed_ptr, stream, False)
            column_keys = unit_keys(column_base, n_start, BLOCK_N // 2)

        next_tile = full_first
        if LISTS:
            next_tile = tl.load(list_ptr, mask=n_full > 0, other=0)
        tile_statistics = statistics
        tile_row_keys = row_keys
        if MOVING:
            tile_statistics += full_first * BLOCK_M
            tile_row_keys += full_first * BLOCK_M
        for index in tl.range(0, n_full, num_stages=STAGES):
            tile = next_tile
            if LISTS:
                next_tile = tl.load(list_ptr + index + 1, mask=index + 1 < n_full, other=0)
            else:
                tile = full_first + index
            dk0, dk1, dv0, dv1 = dkdv_tile(
                dk0, dk1, dv0, dv1, k0, k1, v0, v1, tile, q_head, dout_head, q0_desc, q1_desc,
                do0_desc, do1_desc, tile_statistics, desc_b, h, query0, stride_qm * STRIDE_UNIT,
                stride_dom * STRIDE_UNIT, mask_head, mm, stride_mn, key_lengths_ptr,
                stride_lm, j, N - n_start, q_limit, M, N, live_begin, live_end, low, high,
                tile_row_keys, column_keys, threshold, score_scale, shift, FULL, LISTS, MOVING,
                DENSE, BIAS, BY_VALUE, SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT,
                HAS_DOUT, NEED_DK, NEED_DV, NATURAL, DEAD_ROWS, LATE, TMA, PRECISION, D, D0, D1, E,
                E0, E1, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            if MOVING:
                tile_statistics += BLOCK_M
                tile_row_keys += BLOCK_M
        if DENSE:
            partial = list_ptr + n_full
            next_tile = tl.load(partial, mask=n_partial > 0, other=0)
            for index in tl.range(0, n_partial, num_stages=STAGES):
                tile = next_tile
                next_tile = tl.load(partial + index + 1, mask=index + 1 < n_partial, other=0)
                dk0, dk1, dv0, dv1 = dkdv_tile(
                    dk0, dk1, dv0, dv1, k0, k1, v0, v1, tile, q_head, dout_head, q0_desc, q1_desc,
                    do0_desc, do1_desc, statistics, desc_b, h, query0, stride_qm * STRIDE_UNIT,
                    stride_dom * STRIDE_UNIT, mask_head, mm, stride_mn, key_lengths_ptr,
                    stride_lm, j, N - n_start, q_limit, M, N, live_begin, live_end, low, high,
                    row_keys, column_keys, threshold, score_scale, shift, PARTIAL, LISTS, MOVING,
                    DENSE, BIAS, BY_VALUE, SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT,
                    HAS_DOUT, NEED_DK, NEED_DV, NATURAL, DEAD_ROWS, LATE, TMA, PRECISION, D, D0, D1,
                    E, E0, E1, BLOCK_M, BLOCK_N,
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
                    stride_dom * STRIDE_UNIT, mask_head, mm, stride_mn, key_lengths_ptr,
                    stride_lm, j, N - n_start, q_limit, M, N, live_begin, live_end, low, high,
                    row_keys, column_keys, threshold, score_scale, shift, EDGE, LISTS, MOVING,
                    DENSE, BIAS, BY_VALUE, SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT,
                    HAS_DOUT, NEED_DK, NEED_DV, NATURAL, DEAD_ROWS, LATE, TMA, PRECISION, D, D0, D1,
                    E, E0, E1, BLOCK_M, BLOCK_N,
                )  # fmt: skip

    # -- results; keys beyond their length hold whatever their row became
    stored = j < N
    used = (j < key_limit)[:, None]
    if NEED_DK:
        dk_ptr += (b64 * stride_dkb + kv64 * stride_dkh + n64 * stride_dkn) * STRIDE_UNIT
        dk0 = tl.where(used, dk0 * scale, 0.0)
        store_tile(dk_ptr, stride_dkn * STRIDE_UNIT, dk0, stored, BLOCK_N, 0, D0, D)
        if D1 > 0:
            dk1 = tl.where(used, dk1 * scale, 0.0)
            store_tile(dk_ptr, stride_dkn * STRIDE_UNIT, dk1, stored, BLOCK_N, D0, D1, D)
    if NEED_DV:
        dv_ptr += (b64 * stride_dvb + kv64 * stride_dvh + n64 * stride_dvn) * STRIDE_UNIT
        dv0 = tl.where(used, dv0, 0.0)
        store_tile(dv_ptr, stride_dvn * STRIDE_UNIT, dv0, stored, BLOCK_N, 0, E0, E)
        if E1 > 0:
            dv1 = tl.where(used, dv1, 0.0)
            store_tile(dv_ptr, stride_dvn * STRIDE_UNIT, dv1, stored, BLOCK_N, E0, E1, E)
