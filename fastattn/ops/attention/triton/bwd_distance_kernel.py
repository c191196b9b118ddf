"""The Triton attention backward: the gradient of distance_bias.

All pairs of a diagonal of [M, N] add one entry. `attention_bwd_distance_kernel` owns a diagonal of
square tiles and loops over these: it adds their ds element by element, and sums the one tile along
its diagonals at the end. So every entry is the sum of the results of two programs. The formulas are
in bwd_parts.py.
"""

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import dropout_bases, kept_pairs, line_keys
from fastattn.ops.attention.triton.base_tiles import SOME
from fastattn.ops.attention.triton.bwd_parts import (
    packed_lse_delta_start,
    unpack_lse_delta,
    weights,
)
from fastattn.ops.attention.triton.row_tiles import load_row_tiles, product
from fastattn.ops.attention.triton.tiles import (
    NOT_SPECIALIZED,
    Lengths,
    capped,
    distance_bias,
    key_bounds,
    load_mask,
    packed_sequence,
    row_limits,
    rows_of,
    score_changes,
    score_factor,
    sequence_limits,
)


@triton.jit(
    do_not_specialize=[
        *NOT_SPECIALIZED, "H", "GROUP", "M", "batches", "per_group", "diagonals", "first_diagonal",
        "second",
    ]
)  # fmt: skip
def attention_bwd_distance_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_delta_ptr,
    mask_ptr, base_bits_ptr, lengths, changes, seed, sums_ptr, stream,
    stride_q, stride_k, stride_v, stride_do, stride_mask,
    stride_base_b, stride_base_h, base_tiles_n, stride_lengths,
    H, GROUP, M, N, padded_m, batches, per_group, diagonals, first_diagonal, second,
    low, high, scale, threshold, keep_factor, change_numbers,
    CASE: tl.constexpr,
):  # fmt: skip
    """sums_ptr: [2, groups, H, diagonals * BLOCK], `second` elements each: of an entry those of the
    tiles whose diagonal it is or is right of, then those of the next tiles, whose it is left of. A
    group is per_group of the batches.
    """
    BLOCK: tl.constexpr = CASE.BLOCK_M
    UNIT: tl.constexpr = CASE.UNIT
    lengths = Lengths(lengths, stride_lengths)
    pid = tl.program_id(0)
    diagonal = pid % diagonals
    h = pid // diagonals % H
    group = pid // diagonals // H
    h64 = h.to(tl.int64)
    kv64 = (h // GROUP).to(tl.int64)
    # A tile's first key is so far right of the causal diagonal at its first query.
    ahead = (first_diagonal + diagonal) * BLOCK
    local = tl.arange(0, BLOCK)
    rows = local[:, None]
    columns = local[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    shift = tl.log2(keep_factor)
    factor = score_factor(scale, change_numbers, CASE)
    first_b = group * per_group
    last_b = tl.minimum(first_b + per_group, batches)
    for entry in tl.range(0, last_b - first_b, num_stages=1):
        b = first_b + entry
        b64 = b.to(tl.int64)
        m = M
        n = N
        query0 = 0
        key0 = 0
        lse_delta_start = (b64 * H + h) * padded_m
        if CASE.PACKED:  # batch strides are 0
            query0, m, key0, n = packed_sequence(lengths, b)
            lse_delta_start = h64 * padded_m + packed_lse_delta_start(query0, b)
        q_limit, limit, b_low, b_high = sequence_limits(lengths, b64, m, n, low, high, CASE)
        own = score_changes(changes, change_numbers, scale, b64, h64, q_limit, limit, CASE)
        step = ahead  # from a tile's first query to its first key
        if CASE.FROM_END:
            step += limit - q_limit
        # Queries with a key in these tiles; none if bounds allow none of them.
        begin = tl.maximum(-(step + BLOCK - 1), 0) // BLOCK
        end = (tl.minimum(q_limit, limit - step) + BLOCK - 1) // BLOCK
        if CASE.HAS_LOW:
            end = tl.where(step + BLOCK - 1 < b_low, begin, end)
        if CASE.HAS_HIGH:
            end = tl.where(step - (BLOCK - 1) > b_high, begin, end)
        for index in tl.range(0, end - begin, num_stages=1):
            m_start = (begin + index) * BLOCK
            n_start = m_start + step
            some = True
            if CASE.LISTS:
                line = m_start // CASE.BASE_M
                bits_ptr = base_bits_ptr + b64 * stride_base_b + h64 * stride_base_h
                bits_ptr += line.to(tl.int64) * base_tiles_n
                bits = tl.load(bits_ptr + tl.maximum(n_start, 0) // CASE.BASE_N)
                bits |= tl.load(bits_ptr + tl.minimum(n_start + BLOCK - 1, n - 1) // CASE.BASE_N)
                some = (bits.to(tl.int32) >> SOME & 1) != 0
            if some:
                i = m_start + local
                j = n_start + local
                m64 = m_start.to(tl.int64) + query0
                n64 = n_start.to(tl.int64) + key0
                read = i < q_limit
                seen = (j >= 0) & (j < limit)
                q = load_row_tiles(
                    rows_of(q_ptr, stride_q, b64, h64, m64, UNIT), stride_q.row * UNIT, read, BLOCK,
                    CASE.D0, CASE.D1, CASE.D,
                )  # fmt: skip
                k = load_row_tiles(
                    rows_of(k_ptr, stride_k, b64, kv64, n64, UNIT), stride_k.row * UNIT, seen,
                    BLOCK, CASE.D0, CASE.D1, CASE.D,
                )  # fmt: skip
                s = capped(product(q, k, CASE.D1, CASE.PRECISION), own, CASE)

                row_limit = row_limits(lengths, b64, i[:, None], read[:, None], limit, n, CASE)
                row_begin, row_end = key_bounds(
                    i[:, None], row_limit, q_limit, b_low, b_high, CASE.HAS_LOW, CASE.HAS_HIGH
                )
                allowed = (j[None, :] >= row_begin) & (j[None, :] < row_end) & seen[None, :]
                bias = 0.0
                if CASE.DENSE:
                    n_first = tl.maximum(n_start, 0)
                    mask_at = b64 * stride_mask.b + h64 * stride_mask.h + m64 * stride_mask.m
                    mask_at += n_first.to(tl.int64) * stride_mask.n
                    dense, bias = load_mask(
                        mask_ptr + mask_at, rows, tl.maximum(j - n_first, 0)[None, :],
                        stride_mask.m, stride_mask.n, m - m_start, n - n_first, CASE.SHARED,
                    )  # fmt: skip
                    allowed = allowed & dense
                bias += distance_bias(own, m_start, n_start, rows, columns, BLOCK, BLOCK)
                word = tl.load(lse_delta_ptr + lse_delta_start + i, mask=read, other=0)
                lse, delta = unpack_lse_delta(word)
                p = weights(s, lse[:, None], bias, factor, shift, True, True, CASE.KEEP_LOG2)
                if CASE.HAS_DOUT:
                    dout = load_row_tiles(
                        rows_of(dout_ptr, stride_do, b64, h64, m64, UNIT), stride_do.row * UNIT,
                        read, BLOCK, CASE.E0, CASE.E1, CASE.E,
                    )  # fmt: skip
                    v = load_row_tiles(
                        rows_of(v_ptr, stride_v, b64, kv64, n64, UNIT), stride_v.row * UNIT, seen,
                        BLOCK, CASE.E0, CASE.E1, CASE.E,
                    )  # fmt: skip
                    dp = product(dout, v, CASE.E1, CASE.PRECISION)
                    if CASE.DROPOUT:
                        # Tiles need not begin where units of columns do.
                        row_base, column_base = dropout_bases(seed, stream, b, h)
                        row_keys, column_keys = line_keys(row_base, i), line_keys(column_base, j)
                        keep = kept_pairs(
                            row_keys[:, None], column_keys[None, :], i[:, None], j[None, :],
                            threshold,
                        )  # fmt: skip
                        dp = tl.where(keep, dp, 0.0)
                    ds = p * (dp - delta[:, None])
                else:
                    ds = -p * delta[:, None]
                total += tl.where(allowed, ds, 0.0)

    # -- along diagonals: column c holds those that leave the tile's first row at c
    end_column = rows + columns
    turned = tl.gather(total, end_column % BLOCK, 1)
    right = tl.sum(tl.where(end_column < BLOCK, turned, 0.0), 0)
    left = tl.sum(tl.where(end_column < BLOCK, 0.0, turned), 0)
    sums_ptr += pid.to(tl.int64) * BLOCK
    tl.store(sums_ptr + local, right)
    tl.store(sums_ptr + second - BLOCK + local, left, mask=diagonal > 0)
