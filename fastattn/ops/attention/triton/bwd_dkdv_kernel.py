"""The Triton attention backward: dk and dv.

`attention_bwd_dkdv_kernel` owns a tile of keys and loops over the queries of every head of its
group, on transposed scores: pᵀ and dsᵀ then are what the tensor cores want from registers. The
formulas are in bwd_parts.py.
"""

from typing import Any, NamedTuple

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
from fastattn.ops.attention.triton.bwd_parts import (
    DEAD_ROW,
    Case,
    Mask,
    load_rows,
    packed_lse_delta_start,
    packed_sequence,
    product,
    unpack_lse_delta,
    weights,
)
from fastattn.ops.attention.triton.mask_lists import LIST_HEADER, list_counts
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    LOG2E,
    ONE_COLUMN,
    PARTIAL,
    Dropout,
    Source,
    clamped_length,
    key_bounds,
    load_mask,
    load_partial,
    load_tile,
    program_tile,
    store_tile,
    tile_range,
)


class Lengths(NamedTuple):
    """Key lengths of one sequence, one for each query where KEY_LENGTHS is 2."""

    ptr: Any
    stride_m: Any


class Rows(NamedTuple):
    """Rows by arithmetic: none outside [begin, end), none from q_limit on, and of those between
    row i attends keys from i + low to i + high.
    """

    begin: Any
    end: Any
    q_limit: Any
    low: Any
    high: Any


class Operands(NamedTuple):
    """What a program reads in one head. k1 and v1 are used where there is D1 and E1."""

    k0: Any
    k1: Any
    v0: Any
    v1: Any
    q: Source
    dout: Source
    mask: Mask
    lengths: Lengths
    rows: Rows
    dropout: Dropout
    j: Any
    keys_left: Any
    M: Any
    N: Any
    scale: Any
    shift: Any


class Sums(NamedTuple):
    """Of every key: dk and dv; dk1 and dv1 are used where there is D1 and E1."""

    dk0: Any
    dk1: Any
    dv0: Any
    dv1: Any


@triton.jit
def dkdv_tile(
    sums,
    tile,
    lse_delta_ptr,
    row_keys_ptr,
    given,
    KIND: tl.constexpr,
    NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr,
    LATE: tl.constexpr,
    CASE: tl.constexpr,
):
    """Adds query tile `tile` to dk and dv. lse_delta_ptr and row_keys_ptr: of the tile if it is
    FULL and not listed, else of the head. LATE: dp is computed before p.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    dk0, dk1, dv0, dv1 = sums
    m_start = tile * BLOCK_M
    local_i = tl.arange(0, BLOCK_M)
    i = m_start + local_i
    stored_start = m_start
    if KIND == FULL and not CASE.LISTS:
        stored_start = 0
    # Edge tiles read rows that attend no key here as 0: 0 · NaN would reach every key.
    live = (i >= given.rows.begin) & (i < given.rows.end)
    if KIND == EDGE:
        read = (i < given.M) if CASE.LISTS else live
        word = tl.load(lse_delta_ptr + i, mask=read, other=DEAD_ROW)
    else:
        word = tl.load(lse_delta_ptr + (stored_start + local_i))
    lse, delta = unpack_lse_delta(word)
    if KIND == EDGE and CASE.LISTS:
        live = lse != float("inf")
    MASKED: tl.constexpr = KIND == EDGE
    BY_TMA: tl.constexpr = CASE.TMA and not (MASKED and CASE.DEAD)

    q0, q1 = load_rows(given.q, m_start, live, BLOCK_M, CASE.D0, CASE.D1, CASE.D, MASKED, BY_TMA)
    s = product(given.k0, given.k1, q0, q1, CASE.D1, CASE.PRECISION)  # [BLOCK_N, BLOCK_M]
    if CASE.HAS_DOUT:
        do0, do1 = load_rows(
            given.dout, m_start, live, BLOCK_M, CASE.E0, CASE.E1, CASE.E, MASKED, BY_TMA
        )
        if LATE and NEED_DK:
            dp = product(given.v0, given.v1, do0, do1, CASE.E1, CASE.PRECISION)

    bias = 0.0
    rows = local_i[None, :]
    columns = tl.arange(0, BLOCK_N)[:, None]
    stride_m = given.mask.stride_m
    stride_n = given.mask.stride_n
    mask_ptr = given.mask.ptr
    if CASE.DENSE:  # of (b, h) and these keys
        mask_ptr += m_start.to(tl.int64) * stride_m
    if KIND == EDGE:
        # Keys beyond their length may get any gradient here: each has its own row, never stored.
        row_limit = given.N
        if CASE.KEY_LENGTHS == 2:
            lengths_ptr = given.lengths.ptr + i[None, :].to(tl.int64) * given.lengths.stride_m
            lengths = tl.load(lengths_ptr, mask=i[None, :] < given.M, other=0)
            row_limit = clamped_length(lengths, given.N)
        row_begin, row_end = key_bounds(
            i[None, :], row_limit, given.rows.q_limit, given.rows.low, given.rows.high,
            CASE.HAS_LOW, CASE.HAS_HIGH,
        )  # fmt: skip
        allowed = given.j[:, None] < row_end
        if CASE.HAS_LOW:
            allowed = allowed & (given.j[:, None] >= row_begin)
        if CASE.DENSE:
            dense, bias = load_mask(
                mask_ptr, rows, columns, stride_m, stride_n, given.M - m_start, given.keys_left,
                CASE.SHARED,
            )  # fmt: skip
            allowed = allowed & dense
    elif KIND == PARTIAL:
        inside = None if CASE.SHARED == ONE_COLUMN else columns < given.keys_left
        allowed, bias = load_partial(
            mask_ptr, rows, columns, inside, stride_m, stride_n, CASE.SHARED
        )
    p = weights(
        s, lse[None, :], bias, given.scale, given.shift, CASE.BIAS and KIND != FULL, CASE.NATURAL,
        CASE.DROPOUT > 0,
    )  # fmt: skip
    if KIND == EDGE or (KIND == PARTIAL and not CASE.BY_VALUE):
        p = tl.where(allowed, p, 0.0)

    if CASE.HAS_DOUT:
        if CASE.DROPOUT:
            # From dq: every thread would hash those of its rows again, as much work as the words.
            first_rows = unit_rows(stored_start, BLOCK_M // 2)
            if KIND == EDGE:
                row_keys = tl.load(row_keys_ptr + first_rows, mask=first_rows < given.M, other=0)
            else:
                row_keys = tl.load(row_keys_ptr + first_rows)
            row_keys = row_keys.to(tl.uint32, bitcast=True)
            column_keys = given.dropout.column_keys
            threshold = given.dropout.threshold
            bits = kept_bits(column_keys, row_keys, threshold, BLOCK_N, BLOCK_M)
            if CASE.DROPOUT == 1:
                # The decision waits for dp in p's sign: 32 predicates would not.
                p = negate_dropped(p, bits, rows, columns)
        if NEED_DV:
            kept = p
            if CASE.DROPOUT == 2:
                kept = zero_dropped(p.to(do0.dtype), bits, rows, columns)
            elif CASE.DROPOUT == 1:
                kept = tl.maximum(p, 0.0)
            if not LATE:
                dv0 = tl.dot(kept.to(do0.dtype), do0, dv0, input_precision=CASE.PRECISION)
                if CASE.E1 > 0:
                    dv1 = tl.dot(kept.to(do0.dtype), do1, dv1, input_precision=CASE.PRECISION)
        if NEED_DK:
            if not LATE:
                dp = product(given.v0, given.v1, do0, do1, CASE.E1, CASE.PRECISION)
            if CASE.DROPOUT == 2:
                dp = zero_dropped(dp, bits, rows, columns)
            elif CASE.DROPOUT == 1:
                dp = tl.where(p > 0.0, dp, 0.0)
                p = tl.abs(p)
            ds = p * (dp - delta[None, :])
        if NEED_DV and LATE:
            dv0 = tl.dot(kept.to(do0.dtype), do0, dv0, input_precision=CASE.PRECISION)
            if CASE.E1 > 0:
                dv1 = tl.dot(kept.to(do0.dtype), do1, dv1, input_precision=CASE.PRECISION)
    elif NEED_DK:
        ds = -p * delta[None, :]
    if NEED_DK:
        ds = ds.to(q0.dtype)
        dk0 = tl.dot(ds, q0, dk0, input_precision=CASE.PRECISION)
        if CASE.D1 > 0:
            dk1 = tl.dot(ds, q1, dk1, input_precision=CASE.PRECISION)
    return Sums(dk0, dk1, dv0, dv1)


# Not specialised: what changes from batch to batch and buys no wider load.
@triton.jit(
    do_not_specialize=[
        "stream", "stride_cb", "stride_ch", "base_tiles_m", "alive_heads", "stride_tb", "stride_th",
        "stride_tm", "stride_lb", "stride_ub", "H", "K", "batch_heads", "swizzle_group",
        "low", "high", "threshold",
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
    lse_delta_ptr,
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
    stride_tm,
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
    swizzle_group,
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
    """Arguments as in attention_bwd_dq_kernel; batch_heads, swizzle_group: of key/value heads."""
    CASE: tl.constexpr = Case(
        LISTS, FACTOR_N, DENSE, BIAS, BY_VALUE, SHARED, HAS_LOW, HAS_HIGH, KEY_LENGTHS, DROPOUT,
        HAS_DOUT, NATURAL, DEAD_ROWS, TMA, PRECISION, D, D0, D1, E, E0, E1, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    mm = stride_mm * MASK_UNIT
    N = N * MASK_UNIT
    # Causality makes the first keys' loops the longest.
    n_tile, batch_head = program_tile(N, batch_heads, swizzle_group, BLOCK_N, False)
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

    sums = Sums(dk0, dk1, dv0, dv1)

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
        lse_delta_start = (b64 * H + h64) * padded_m
        if PACKED:
            lse_delta_start = h64 * padded_m + packed_lse_delta_start(query0, b)
        lse_delta = lse_delta_ptr + lse_delta_start
        mask_head = mask_ptr
        if DENSE:
            mask_head = mask_ptr + (b64 * stride_mb + h64 * stride_mh) * MASK_UNIT
            mask_head += n64 * stride_mn
        n_full = full_last - full_first
        n_partial = 0
        n_edge = last - first - n_full
        list_ptr = lists_ptr
        if LISTS:
            list_ptr += b64 * stride_tb + h64 * stride_th
            list_ptr += n_tile.to(tl.int64) * stride_tm
            n_full, n_partial, n_edge = list_counts(list_ptr)
            list_ptr += LIST_HEADER
        row_keys = lse_delta
        column_keys = j
        if HAS_DOUT and DROPOUT:
            row_keys = row_keys_ptr + lse_delta_start
            column_base = stream_key(COLUMN_TAG, seed_ptr, stream, False)
            column_keys = unit_keys(column_base, n_start, BLOCK_N // 2)

        given = Operands(
            k0, k1, v0, v1,
            Source(q_head, stride_qm * STRIDE_UNIT, q0_desc, q1_desc, desc_b, h, query0),
            Source(dout_head, stride_dom * STRIDE_UNIT, do0_desc, do1_desc, desc_b, h, query0),
            Mask(mask_head, mm, stride_mn),
            Lengths(key_lengths_ptr, stride_lm),
            Rows(live_begin, live_end, q_limit, low, high),
            Dropout(row_keys, column_keys, threshold),
            j, N - n_start, M, N, score_scale, shift,
        )  # fmt: skip
        next_tile = full_first
        if LISTS:
            next_tile = tl.load(list_ptr, mask=n_full > 0, other=0)
        tile_lse_delta = lse_delta
        tile_row_keys = row_keys
        if MOVING:
            tile_lse_delta += full_first * BLOCK_M
            tile_row_keys += full_first * BLOCK_M
        for index in tl.range(0, n_full, num_stages=STAGES):
            tile = next_tile
            if LISTS:
                next_tile = tl.load(list_ptr + index + 1, mask=index + 1 < n_full, other=0)
            else:
                tile = full_first + index
            sums = dkdv_tile(
                sums,
                tile,
                tile_lse_delta,
                tile_row_keys,
                given,
                FULL,
                NEED_DK,
                NEED_DV,
                LATE,
                CASE,
            )
            if MOVING:
                tile_lse_delta += BLOCK_M
                tile_row_keys += BLOCK_M
        if DENSE:
            partial_ptr = list_ptr + n_full
            next_tile = tl.load(partial_ptr, mask=n_partial > 0, other=0)
            for index in tl.range(0, n_partial, num_stages=STAGES):
                tile = next_tile
                next_tile = tl.load(partial_ptr + index + 1, mask=index + 1 < n_partial, other=0)
                sums = dkdv_tile(
                    sums, tile, lse_delta, row_keys, given, PARTIAL, NEED_DK, NEED_DV, LATE, CASE
                )
        if EDGES or LISTS:
            for index in tl.range(0, n_edge, num_stages=EDGE_STAGES):
                if LISTS:
                    tile = tl.load(list_ptr + n_full + n_partial + index)
                else:
                    tile = first + index
                    tile = tl.where(tile < full_first, tile, tile + n_full)
                sums = dkdv_tile(
                    sums, tile, lse_delta, row_keys, given, EDGE, NEED_DK, NEED_DV, LATE, CASE
                )

    # -- results; keys beyond their length hold whatever their row became
    dk0, dk1, dv0, dv1 = sums
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
