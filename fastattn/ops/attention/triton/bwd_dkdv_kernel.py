"""The Triton attention backward: dk and dv.

`attention_bwd_dkdv_kernel` owns a tile of keys and loops over the queries of every head of its
group, on transposed scores: pᵀ and dsᵀ then are register operands of the tensor cores. The formulas
are in bwd_parts.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import (
    dropout_column_base,
    kept_bits,
    negate_dropped,
    unit_keys,
    unit_rows,
    zero_dropped,
)
from fastattn.ops.attention.triton.bwd_parts import (
    DEAD_ROW,
    Mask,
    Tiles,
    listed_tiles,
    next_listed,
    packed_lse_delta_start,
    tile_in_range,
    unpack_lse_delta,
    weights,
)
from fastattn.ops.attention.triton.mask_lists import LIST_HEADER, list_counts
from fastattn.ops.attention.triton.row_tiles import (
    Source,
    add_product,
    load_row_tiles,
    load_rows,
    product,
    row_zeros,
    scaled_rows,
    store_row_tiles,
)
from fastattn.ops.attention.triton.tiles import (
    EDGE,
    FULL,
    NOT_SPECIALIZED,
    ONE_COLUMN,
    PARTIAL,
    Dropout,
    Lengths,
    ScoreModifications,
    capped,
    distance_bias,
    key_bounds,
    load_mask,
    load_partial,
    packed_sequence,
    program_tile,
    row_limits,
    rows_of,
    score_changes,
    score_factor,
    sequence_limits,
    tile_range,
)


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
    """Operands of a program in one head. k and v are pairs of column tiles."""

    k: Any
    v: Any
    q: Source
    dout: Source
    mask: Mask
    lengths: Lengths
    rows: Rows
    dropout: Dropout
    b: Any
    j: Any
    n_start: Any
    keys_left: Any
    M: Any
    N: Any
    changes: ScoreModifications
    scale: Any
    shift: Any


@triton.jit
def dkdv_tile(
    dk, dv, tile, lse_delta_ptr, row_keys_ptr, given, KIND: tl.constexpr, CASE: tl.constexpr
):
    """Adds query tile `tile` to the pairs dk and dv. lse_delta_ptr and row_keys_ptr: of the tile if
    it is FULL and not listed, else of the head.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
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

    q = load_rows(given.q, m_start, live, BLOCK_M, CASE.D0, CASE.D1, CASE.D, MASKED, BY_TMA)
    s = product(given.k, q, CASE.D1, CASE.PRECISION)  # [BLOCK_N, BLOCK_M]
    s = capped(s, given.changes, CASE)
    if CASE.HAS_DOUT:
        dout = load_rows(
            given.dout, m_start, live, BLOCK_M, CASE.E0, CASE.E1, CASE.E, MASKED, BY_TMA
        )
        if CASE.LATE and CASE.NEED_DK:
            dp = product(given.v, dout, CASE.E1, CASE.PRECISION)

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
        row = i[None, :]
        row_limit = row_limits(given.lengths, given.b, row, row < given.M, given.N, given.N, CASE)
        row_begin, row_end = key_bounds(
            row, row_limit, given.rows.q_limit, given.rows.low, given.rows.high,
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
    if CASE.DISTANCE:
        bias += distance_bias(
            given.changes, m_start, given.n_start, rows, columns, BLOCK_M, BLOCK_N
        )
    p = weights(
        s, lse[None, :], bias, given.scale, given.shift,
        CASE.DISTANCE or (CASE.BIAS and KIND != FULL), CASE.NATURAL, CASE.KEEP_LOG2,
    )  # fmt: skip
    if KIND == EDGE or (KIND == PARTIAL and not CASE.BY_VALUE):
        p = tl.where(allowed, p, 0.0)
    if CASE.SOFTCAP:
        capped_p = p * (1.0 - s * s)  # times the cap's slope

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
        if CASE.NEED_DV:
            kept = p
            if CASE.DROPOUT == 2:
                kept = zero_dropped(p.to(dout[0].dtype), bits, rows, columns)
            elif CASE.DROPOUT == 1:
                kept = tl.where(p < 0.0, 0.0, p)  # NaN stays
            if not CASE.LATE:
                dv = add_product(dv, kept.to(dout[0].dtype), dout, CASE.E1, CASE.PRECISION)
        if CASE.NEED_DK:
            if not CASE.LATE:
                dp = product(given.v, dout, CASE.E1, CASE.PRECISION)
            if CASE.DROPOUT == 2:
                dp = zero_dropped(dp, bits, rows, columns)
            elif CASE.DROPOUT == 1:
                dp = tl.where(p > 0.0, dp, 0.0)
                p = tl.abs(p)
            ds = (capped_p if CASE.SOFTCAP else p) * (dp - delta[None, :])
        if CASE.NEED_DV and CASE.LATE:
            dv = add_product(dv, kept.to(dout[0].dtype), dout, CASE.E1, CASE.PRECISION)
    elif CASE.NEED_DK:
        ds = -(capped_p if CASE.SOFTCAP else p) * delta[None, :]
    if CASE.NEED_DK:
        dk = add_product(dk, ds.to(q[0].dtype), q, CASE.D1, CASE.PRECISION)
    return dk, dv


@triton.jit
def add_tiles(
    dk, dv, tiles, lse_delta_ptr, row_keys_ptr, given, KIND: tl.constexpr, CASE: tl.constexpr
):
    """Adds the tiles of one kind. lse_delta_ptr and row_keys_ptr: of the head."""
    STAGES: tl.constexpr = CASE.EDGE_STAGES if KIND == EDGE else CASE.STAGES
    # Pointers that the loop moves take fewer registers than an offset for every tile.
    MOVING: tl.constexpr = KIND == FULL and not CASE.LISTS
    PREFETCHED: tl.constexpr = CASE.LISTS and KIND != EDGE
    count, begin = listed_tiles(tiles, KIND)
    if PREFETCHED:
        next_tile = next_listed(tiles, begin, count, 0)
    if MOVING:
        lse_delta_ptr += tiles.full_first * CASE.BLOCK_M
        row_keys_ptr += tiles.full_first * CASE.BLOCK_M
    for index in tl.range(0, count, num_stages=STAGES):
        if PREFETCHED:
            tile = next_tile
            next_tile = next_listed(tiles, begin, count, index + 1)
        elif CASE.LISTS:
            tile = tl.load(tiles.list_ptr + begin + index)
        else:
            tile = tile_in_range(tiles, index, KIND)
        dk, dv = dkdv_tile(dk, dv, tile, lse_delta_ptr, row_keys_ptr, given, KIND, CASE)
        if MOVING:
            lse_delta_ptr += CASE.BLOCK_M
            row_keys_ptr += CASE.BLOCK_M
    return dk, dv


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "H", "K"])
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, q0_desc, q1_desc, do0_desc, do1_desc,
    lse_delta_ptr, dk_ptr, dv_ptr,
    mask_ptr, lists_ptr, alive_ptr, lengths, changes,
    seed, row_keys_ptr, stream,
    stride_q, stride_k, stride_v, stride_do, stride_dk, stride_dv, stride_mask,
    stride_base_b, stride_base_h, base_tiles_m, stride_alive, alive_heads,
    stride_list_b, stride_list_h, stride_list_tile, stride_lengths,
    H, K, GROUP, M, N, padded_m, batch_heads, swizzle_group,
    low, high, scale, threshold, keep_factor, change_numbers,
    CASE: tl.constexpr,
):  # fmt: skip
    """Arguments as in attention_bwd_dq_kernel; batch_heads, swizzle_group: of key/value heads."""
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    UNIT: tl.constexpr = CASE.UNIT
    N = N * CASE.MASK_UNIT
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
    lengths = Lengths(lengths, stride_lengths)
    desc_b = b
    query0 = 0
    if CASE.PACKED:  # batch strides are 0
        query0, M, key0, N = packed_sequence(lengths, b)
        desc_b = None
        n64 += key0
        q_ptr += query0.to(tl.int64) * stride_q.row * UNIT
        if CASE.HAS_DOUT:
            dout_ptr += query0.to(tl.int64) * stride_do.row * UNIT
    k_ptr = rows_of(k_ptr, stride_k, b64, kv64, n64, UNIT)
    v_ptr = rows_of(v_ptr, stride_v, b64, kv64, n64, UNIT)
    shift = tl.log2(keep_factor)
    factor = score_factor(scale, change_numbers, CASE)

    # -- which queries may attend these keys
    q_limit, k_limit, low, high = sequence_limits(lengths, b64, M, N, low, high, CASE)
    n_end = tl.minimum(n_start + BLOCK_N, k_limit)
    limit = tl.where(n_start < k_limit, q_limit, 0)
    first, full_first, full_last, last, live_begin, live_end = tile_range(
        n_start, n_end, limit, limit, -high, -low, CASE.HAS_HIGH, CASE.HAS_LOW, BLOCK_M
    )

    # -- what stays on chip; keys that no query of the group may attend are 0
    alive = j < k_limit
    if CASE.LISTS:
        seen = tl.zeros([BLOCK_N], tl.int32)
        for g in range(0, alive_heads):
            base_tile = b64 * stride_base_b + (kv64 * GROUP + g) * stride_base_h
            tiles_ptr = alive_ptr + base_tile * CASE.BASE_N + j
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
        if CASE.HAS_HIGH:
            alive = alive & (j < q_limit + high)
        if CASE.HAS_LOW:
            alive = alive & (j >= low)
    k = load_row_tiles(k_ptr, stride_k.row * UNIT, alive, BLOCK_N, CASE.D0, CASE.D1, CASE.D)
    v = k
    if CASE.HAS_DOUT and CASE.NEED_DK:
        v = load_row_tiles(v_ptr, stride_v.row * UNIT, alive, BLOCK_N, CASE.E0, CASE.E1, CASE.E)
    dk = row_zeros(BLOCK_N, CASE.D0, CASE.D1)
    dv = row_zeros(BLOCK_N, CASE.E0, CASE.E1)

    # -- every query head of the group in turn
    for g in tl.range(0, GROUP, num_stages=1):
        h = kv_head * GROUP + g
        h64 = h.to(tl.int64)
        q_head = rows_of(q_ptr, stride_q, b64, h64, 0, UNIT)
        dout_head = dout_ptr
        if CASE.HAS_DOUT:
            dout_head = rows_of(dout_ptr, stride_do, b64, h64, 0, UNIT)
        lse_delta_start = (b64 * H + h64) * padded_m
        if CASE.PACKED:
            lse_delta_start = h64 * padded_m + packed_lse_delta_start(query0, b)
        lse_delta = lse_delta_ptr + lse_delta_start
        mask_head = mask_ptr
        if CASE.DENSE:
            mask_head = mask_ptr + (b64 * stride_mask.b + h64 * stride_mask.h) * CASE.MASK_UNIT
            mask_head += n64 * stride_mask.n
        n_full = full_last - full_first
        n_partial = 0
        n_edge = last - first - n_full
        list_ptr = lists_ptr
        if CASE.LISTS:
            list_ptr += (
                b64 * stride_list_b + h64 * stride_list_h + n_tile.to(tl.int64) * stride_list_tile
            )
            n_full, n_partial, n_edge = list_counts(list_ptr)
            list_ptr += LIST_HEADER
        tiles = Tiles(first, full_first, n_full, n_partial, n_edge, list_ptr)
        row_keys = lse_delta
        column_keys = j
        if CASE.HAS_DOUT and CASE.DROPOUT:
            row_keys = row_keys_ptr + lse_delta_start
            column_keys = unit_keys(dropout_column_base(seed, stream), n_start, BLOCK_N // 2)

        given = Operands(
            k, v,
            Source(q_head, stride_q.row * UNIT, q0_desc, q1_desc, desc_b, h, query0, None),
            Source(dout_head, stride_do.row * UNIT, do0_desc, do1_desc, desc_b, h, query0, None),
            Mask(mask_head, stride_mask.m * CASE.MASK_UNIT, stride_mask.n),
            lengths,
            Rows(live_begin, live_end, q_limit, low, high),
            Dropout(row_keys, column_keys, threshold),
            b64, j, n_start, N - n_start, M, N,
            score_changes(changes, change_numbers, scale, b64, h64, q_limit, k_limit, CASE),
            factor, shift,
        )  # fmt: skip
        dk, dv = add_tiles(dk, dv, tiles, lse_delta, row_keys, given, FULL, CASE)
        if CASE.DENSE:
            dk, dv = add_tiles(dk, dv, tiles, lse_delta, row_keys, given, PARTIAL, CASE)
        if CASE.ARITHMETIC or CASE.RAGGED or CASE.LISTS:
            dk, dv = add_tiles(dk, dv, tiles, lse_delta, row_keys, given, EDGE, CASE)

    # -- results; keys beyond their length hold whatever their row became
    stored = j < N
    used = (j < k_limit)[:, None]
    if CASE.NEED_DK:
        dk = scaled_rows(dk, scale, used, CASE.D1)
        dk_ptr = rows_of(dk_ptr, stride_dk, b64, kv64, n64, UNIT)
        store_row_tiles(dk_ptr, stride_dk.row * UNIT, dk, stored, BLOCK_N, CASE.D0, CASE.D1, CASE.D)
    if CASE.NEED_DV:
        dv = scaled_rows(dv, 1.0, used, CASE.E1)
        dv_ptr = rows_of(dv_ptr, stride_dv, b64, kv64, n64, UNIT)
        store_row_tiles(dv_ptr, stride_dv.row * UNIT, dv, stored, BLOCK_N, CASE.E0, CASE.E1, CASE.E)
