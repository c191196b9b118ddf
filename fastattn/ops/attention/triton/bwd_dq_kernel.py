"""The Triton attention backward: dq, and the lse and delta of rows that the other kernels read.

`attention_bwd_dq_kernel` owns a tile of queries and loops over the keys; it computes delta on the
way and stores lse and delta of its rows for the kernels that follow. The formulas are in
bwd_parts.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import (
    dropout_kept,
    dropout_row_base,
    kept_bits,
    load_keys,
    unit_keys,
    unit_rows,
    zero_dropped,
)
from fastattn.ops.attention.triton.bwd_parts import (
    Mask,
    Tiles,
    listed_tiles,
    next_listed,
    pack_lse_delta,
    packed_lse_delta_start,
    tile_in_range,
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
    LOG2E,
    NEG_INF,
    NOT_SPECIALIZED,
    ONE_ROW,
    PARTIAL,
    Dropout,
    KeyBounds,
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
    sink_of,
    tile_range,
)


class Alive(NamedTuple):
    """With LISTS: of each base tile of queries (`tiles` in all) and each key, whether any of these
    queries may attend the key.
    """

    ptr: Any
    stride: Any
    tiles: Any


class Operands(NamedTuple):
    """Operands of a program. q and dout are pairs of column tiles."""

    q: Any
    dout: Any
    lse: Any
    delta: Any
    k: Source
    v: Source
    mask: Mask
    alive: Alive
    keys: KeyBounds
    dropout: Dropout
    m_start: Any
    M: Any
    N: Any
    changes: ScoreModifications
    scale: Any
    shift: Any


@triton.jit
def dq_tile(dq, tile, given, KIND: tl.constexpr, SUM: tl.constexpr, CASE: tl.constexpr):
    """Adds key tile `tile` to the pair dq; with SUM the rows of p dp, without a delta, to dq
    [BLOCK_M].
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    n_start = tile * BLOCK_N
    local_i = tl.arange(0, BLOCK_M)
    local_j = tl.arange(0, BLOCK_N)
    j = n_start + local_j
    # Edge tiles read keys that no row here may attend as 0: 0 · NaN would reach every row.
    if KIND == EDGE and CASE.LISTS:
        alive = given.alive
        seen = tl.zeros([BLOCK_N], tl.int32)
        for f in tl.static_range(BLOCK_M // CASE.BASE_M):
            base_row = given.m_start // CASE.BASE_M + f
            keys_ptr = alive.ptr + base_row.to(tl.int64) * alive.stride + j
            flags = tl.load(keys_ptr, mask=(j < given.N) & (base_row < alive.tiles), other=0)
            seen = seen | flags.to(tl.int32)
        touched = seen > 0
    else:
        touched = (j >= given.keys.begin) & (j < given.keys.end)
    MASKED: tl.constexpr = KIND == EDGE
    BY_TMA: tl.constexpr = CASE.TMA and not (MASKED and CASE.DEAD)

    k = load_rows(given.k, n_start, touched, BLOCK_N, CASE.D0, CASE.D1, CASE.D, MASKED, BY_TMA)
    s = product(given.q, k, CASE.D1, CASE.PRECISION)  # [BLOCK_M, BLOCK_N]
    s = capped(s, given.changes, CASE)
    if CASE.HAS_DOUT:
        v = load_rows(given.v, n_start, touched, BLOCK_N, CASE.E0, CASE.E1, CASE.E, MASKED, BY_TMA)
        dp = product(given.dout, v, CASE.E1, CASE.PRECISION)

    bias = 0.0
    rows = local_i[:, None]
    columns = local_j[None, :]
    stride_m = given.mask.stride_m
    stride_n = given.mask.stride_n
    mask_ptr = given.mask.ptr
    if CASE.DENSE:  # of (b, h) and these rows
        mask_ptr += n_start.to(tl.int64) * stride_n
    if KIND == EDGE:
        allowed = j[None, :] < given.keys.row_end[:, None]
        if CASE.HAS_LOW:
            allowed = allowed & (j[None, :] >= given.keys.row_begin[:, None])
        if CASE.DENSE:
            rows_left = given.M - given.m_start
            dense, bias = load_mask(
                mask_ptr, rows, columns, stride_m, stride_n, rows_left, given.N - n_start,
                CASE.SHARED,
            )  # fmt: skip
            allowed = allowed & dense
    elif KIND == PARTIAL:
        inside = None if CASE.SHARED == ONE_ROW else rows < given.M - given.m_start
        allowed, bias = load_partial(
            mask_ptr, rows, columns, inside, stride_m, stride_n, CASE.SHARED
        )
    if CASE.DISTANCE:
        bias += distance_bias(
            given.changes, given.m_start, n_start, rows, columns, BLOCK_M, BLOCK_N
        )
    p = weights(
        s, given.lse[:, None], bias, given.scale, given.shift,
        CASE.DISTANCE or (CASE.BIAS and KIND != FULL), CASE.NATURAL, 0 if SUM else CASE.KEEP_LOG2,
    )  # fmt: skip
    if KIND == EDGE or (KIND == PARTIAL and not CASE.BY_VALUE):
        p = tl.where(allowed, p, 0.0)
    if CASE.SOFTCAP and not SUM:
        p = p * (1.0 - s * s)  # the cap's slope
    if CASE.HAS_DOUT and CASE.DROPOUT:
        row_keys, column_keys_ptr, threshold = given.dropout
        column_keys = load_keys(column_keys_ptr, n_start, BLOCK_N // 2)
        if CASE.DROPOUT == 2:
            bits = kept_bits(row_keys, column_keys, threshold, BLOCK_M, BLOCK_N)
            dp = zero_dropped(dp, bits, rows, columns)
        else:
            keep = dropout_kept(row_keys, column_keys, rows, columns, threshold, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp, 0.0)
    if SUM:
        return dq + tl.sum(p * dp, 1)
    else:
        if CASE.HAS_DOUT:
            ds = p * (dp - given.delta[:, None])
        else:
            ds = -p * given.delta[:, None]
        return add_product(dq, ds.to(k[0].dtype), k, CASE.D1, CASE.PRECISION)


@triton.jit
def add_tiles(dq, tiles, given, KIND: tl.constexpr, CASE: tl.constexpr):
    """Adds the tiles of one kind to dq."""
    STAGES: tl.constexpr = CASE.EDGE_STAGES if KIND == EDGE else CASE.STAGES
    PREFETCHED: tl.constexpr = CASE.LISTS and KIND != EDGE
    count, begin = listed_tiles(tiles, KIND)
    if PREFETCHED:
        next_tile = next_listed(tiles, begin, count, 0)
    for index in tl.range(0, count, num_stages=STAGES):
        if PREFETCHED:
            tile = next_tile
            next_tile = next_listed(tiles, begin, count, index + 1)
        elif CASE.LISTS:
            tile = tl.load(tiles.list_ptr + begin + index)
        else:
            tile = tile_in_range(tiles, index, KIND)
        dq = dq_tile(dq, tile, given, KIND, False, CASE)
    return dq


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "H", "GROUP"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, k0_desc, k1_desc, v0_desc, v1_desc,
    lse_ptr, dlse_ptr, lse_delta_ptr, dq_ptr, sink_sums_ptr,
    mask_ptr, lists_ptr, alive_ptr, lengths, changes,
    seed, column_keys_ptr, row_keys_ptr, stream,
    stride_q, stride_k, stride_v, stride_o, stride_do, stride_dq, stride_mask,
    stride_base_b, stride_base_h, base_tiles_m, stride_alive,
    stride_list_b, stride_list_h, stride_list_tile, stride_lengths,
    H, GROUP, M, N, padded_m, rows, batch_heads, swizzle_group,
    low, high, scale, threshold, keep_factor, change_numbers,
    NEED_DQ: tl.constexpr, HAS_DLSE: tl.constexpr, EXACT_DELTA: tl.constexpr, CASE: tl.constexpr,
):  # fmt: skip
    """EXACT_DELTA: delta is summed over the keys once more, where out was rounded too much. rows:
    of a head, in all sequences. row_keys_ptr: for dkdv, dropout's key of each unit of rows, at the
    position of its first row in lse_delta. sink_sums_ptr: for dsinks, [batch, head, query tile].
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    UNIT: tl.constexpr = CASE.UNIT
    m_tile, batch_head = program_tile(M, batch_heads, swizzle_group, BLOCK_M, True)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    b = batch_head // H
    h = batch_head % H
    kv_head = h // GROUP
    m_start = m_tile * BLOCK_M
    local_i = tl.arange(0, BLOCK_M)
    i = m_start + local_i

    b64 = b.to(tl.int64)
    h64 = h.to(tl.int64)
    kv64 = kv_head.to(tl.int64)
    m64 = m_start.to(tl.int64)
    N = N * CASE.MASK_UNIT
    lengths = Lengths(lengths, stride_lengths)
    desc_b = b
    key0 = 0
    lse_delta_start = batch_head.to(tl.int64) * padded_m
    first_row = batch_head.to(tl.int64) * M  # in lse and dlse
    if CASE.PACKED:  # batch strides are 0
        query0, M, key0, N = packed_sequence(lengths, b)
        desc_b = None
        lse_delta_start = h64 * padded_m + packed_lse_delta_start(query0, b)
        first_row = h64 * rows + query0
        k_ptr += key0.to(tl.int64) * stride_k.row * UNIT
        v_ptr += key0.to(tl.int64) * stride_v.row * UNIT
        m64 += query0
    q_ptr = rows_of(q_ptr, stride_q, b64, h64, m64, UNIT)
    k_ptr = rows_of(k_ptr, stride_k, b64, kv64, 0, UNIT)
    v_ptr = rows_of(v_ptr, stride_v, b64, kv64, 0, UNIT)
    out_ptr = rows_of(out_ptr, stride_o, b64, h64, m64, UNIT)

    q_limit, limit, low, high = sequence_limits(lengths, b64, M, N, low, high, CASE)
    own_changes = score_changes(changes, change_numbers, scale, b64, h64, q_limit, limit, CASE)
    inside = i < q_limit

    # A dead row counts with p = 0 and delta = 0, whatever out and dout hold.
    lse = tl.load(lse_ptr + first_row + i, mask=inside, other=NEG_INF)
    live = inside & (lse != NEG_INF)
    given_lse = lse
    if CASE.SINKS:
        sink = sink_of(changes, change_numbers, h64)
        live = inside & ~(lse <= sink)
    if not CASE.NATURAL:
        lse = lse * LOG2E
    factor = score_factor(scale, change_numbers, CASE)
    lse = tl.where(live, lse, float("inf"))
    delta = tl.zeros([BLOCK_M], tl.float32)
    dout = delta, delta
    if CASE.HAS_DOUT:
        dout_ptr = rows_of(dout_ptr, stride_do, b64, h64, m64, UNIT)
        dout = load_row_tiles(
            dout_ptr, stride_do.row * UNIT, inside, BLOCK_M, CASE.E0, CASE.E1, CASE.E
        )

    row_keys = i
    if CASE.HAS_DOUT and CASE.DROPOUT:
        row_base = dropout_row_base(seed, stream, b, h)
        row_keys = unit_keys(row_base, m_start, BLOCK_M // 2)
        first_rows = unit_rows(m_start, BLOCK_M // 2)
        row_keys_ptr += lse_delta_start
        if CASE.PACKED:
            tl.store(
                row_keys_ptr + first_rows, row_keys.to(tl.int32, bitcast=True), mask=first_rows < M
            )
        else:
            tl.store(row_keys_ptr + first_rows, row_keys.to(tl.int32, bitcast=True))

    # -- which tiles, and what stays on chip
    if NEED_DQ or EXACT_DELTA:
        m_end = tl.minimum(m_start + BLOCK_M, q_limit)
        row_limit = row_limits(lengths, b64, i, inside, limit, N, CASE)
        limit = tl.where(m_start < q_limit, limit, 0)
        first, full_first, full_last, last, touched_begin, touched_end = tile_range(
            m_start, m_end, limit, limit, low, high, CASE.HAS_LOW, CASE.HAS_HIGH, BLOCK_N
        )
        row_begin, row_end = key_bounds(
            i, row_limit, q_limit, low, high, CASE.HAS_LOW, CASE.HAS_HIGH
        )
        n_full = full_last - full_first
        n_partial = 0
        n_edge = last - first - n_full
        if CASE.LISTS:
            lists_ptr += (
                b64 * stride_list_b + h64 * stride_list_h + m_tile.to(tl.int64) * stride_list_tile
            )
            alive_ptr += (b64 * stride_base_b + h64 * stride_base_h) * CASE.BASE_N
            n_full, n_partial, n_edge = list_counts(lists_ptr)
            lists_ptr += LIST_HEADER
        tiles = Tiles(first, full_first, n_full, n_partial, n_edge, lists_ptr)
        mm = stride_mask.m * CASE.MASK_UNIT
        if CASE.DENSE:
            mask_at = b64 * stride_mask.b + h64 * stride_mask.h + m64 * stride_mask.m
            mask_ptr += mask_at * CASE.MASK_UNIT
        q = load_row_tiles(q_ptr, stride_q.row * UNIT, inside, BLOCK_M, CASE.D0, CASE.D1, CASE.D)
        k = Source(k_ptr, stride_k.row * UNIT, k0_desc, k1_desc, desc_b, kv_head, key0, None)
        v = Source(v_ptr, stride_v.row * UNIT, v0_desc, v1_desc, desc_b, kv_head, key0, None)
        mask = Mask(mask_ptr, mm, stride_mask.n)
        alive = Alive(alive_ptr, stride_alive, base_tiles_m)
        keys = KeyBounds(row_begin, row_end, touched_begin, touched_end)
        dropout = Dropout(row_keys, column_keys_ptr, threshold)

    # -- lse and delta
    shift = tl.log2(keep_factor)
    if EXACT_DELTA:
        given = Operands(
            q, dout, lse, delta, k, v, mask, alive, keys, dropout, m_start, M, N,
            own_changes, factor, shift,
        )  # fmt: skip
        for index in tl.range(0, n_full + n_partial + n_edge, num_stages=1):
            tile = first + index
            if CASE.LISTS:
                tile = tl.load(lists_ptr + index)
            delta = dq_tile(delta, tile, given, EDGE, True, CASE)
    elif CASE.HAS_DOUT:
        out = load_row_tiles(
            out_ptr, stride_o.row * UNIT, inside, BLOCK_M, CASE.E0, CASE.E1, CASE.E
        )
        delta = tl.sum(out[0].to(tl.float32) * dout[0].to(tl.float32), 1)
        if CASE.E1 > 0:
            delta += tl.sum(out[1].to(tl.float32) * dout[1].to(tl.float32), 1)
        delta = delta / keep_factor
    if HAS_DLSE:
        dlse = tl.load(dlse_ptr + first_row + i, mask=inside, other=0.0)
        delta -= dlse / keep_factor
    if sink_sums_ptr is not None:
        # Each row's weight of the sink times -delta; of a row without keys delta is -dlse.
        change = tl.where(live, -delta * keep_factor, dlse if HAS_DLSE else 0.0)
        change *= tl.exp2((sink - given_lse) * LOG2E)
        change = tl.where(given_lse == NEG_INF, 0.0, change)
        tl.store(sink_sums_ptr + batch_head * tiles_m + m_tile, tl.sum(change, 0))
    delta = tl.where(live, delta, 0.0)
    if CASE.DROPOUT and not CASE.NATURAL:
        lse -= shift
    word = pack_lse_delta(lse, delta)
    lse_delta_ptr += lse_delta_start
    if CASE.PACKED:
        tl.store(lse_delta_ptr + i, word, mask=inside)
    else:
        tl.store(lse_delta_ptr + i, word)

    # -- dq
    if NEED_DQ:
        dq = row_zeros(BLOCK_M, CASE.D0, CASE.D1)
        given = Operands(
            q, dout, lse, delta, k, v, mask, alive, keys, dropout, m_start, M, N,
            own_changes, factor, shift,
        )  # fmt: skip
        dq = add_tiles(dq, tiles, given, FULL, CASE)
        if CASE.DENSE:
            dq = add_tiles(dq, tiles, given, PARTIAL, CASE)
        if CASE.ARITHMETIC or CASE.RAGGED or CASE.LISTS:
            dq = add_tiles(dq, tiles, given, EDGE, CASE)

        # A dead row's sums may be NaN: its q and dout were read as they are.
        dq = scaled_rows(dq, scale, live[:, None], CASE.D1)
        dq_ptr = rows_of(dq_ptr, stride_dq, b64, h64, m64, UNIT)
        store_row_tiles(dq_ptr, stride_dq.row * UNIT, dq, i < M, BLOCK_M, CASE.D0, CASE.D1, CASE.D)
