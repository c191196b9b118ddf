"""The Triton attention backward: the gradient of an additive mask.

`attention_bwd_dmask_kernel` owns a tile of the mask and loops over what the mask is broadcast over;
where few programs would own a tile they share its sum, and `sum_splits_kernel` adds the shares. The
formulas are in bwd_parts.py.
"""

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import dropout_bases, dropout_kept, unit_keys
from fastattn.ops.attention.triton.base_tiles import SOME
from fastattn.ops.attention.triton.bwd_parts import unpack_lse_delta, weights
from fastattn.ops.attention.triton.row_tiles import load_row_tiles, product
from fastattn.ops.attention.triton.tiles import (
    NOT_SPECIALIZED,
    ONE_ROW,
    Lengths,
    capped,
    distance_bias,
    key_bounds,
    load_mask,
    row_limits,
    rows_of,
    score_changes,
    score_factor,
    sequence_limits,
)


@triton.jit(
    do_not_specialize=[
        *NOT_SPECIALIZED, "H", "GROUP", "M", "owned_h", "owned_m", "owned_n", "summed_b",
        "summed_h", "summed_m", "summed_n", "splits", "per_split",
    ]
)  # fmt: skip
def attention_bwd_dmask_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_delta_ptr,
    mask_ptr, base_bits_ptr, lengths, changes, seed, dmask_ptr, stream,
    stride_q, stride_k, stride_v, stride_do, stride_mask, stride_split, stride_dmask,
    stride_base_b, stride_base_h, base_tiles_n, stride_lengths,
    H, GROUP, M, N, padded_m,
    owned_h, owned_m, owned_n, summed_b, summed_h, summed_m, summed_n, splits, per_split,
    low, high, scale, threshold, keep_factor, change_numbers,
    SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr, CASE: tl.constexpr,
):  # fmt: skip
    """One tile of the mask, or a share of what is summed into it.

    In each of batch, head, query tile and key tile, a program owns one of owned_* or adds up all
    summed_*; one of the two numbers is 1. Blocks are base tiles.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    UNIT: tl.constexpr = CASE.UNIT
    lengths = Lengths(lengths, stride_lengths)
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
    shift = tl.log2(keep_factor)
    factor = score_factor(scale, change_numbers, CASE)
    summed = summed_b * summed_h * summed_m * summed_n
    last = tl.minimum((split + 1) * per_split, summed)
    for item in tl.range(split * per_split, last, num_stages=1):
        n_tile = (own_n + item % summed_n).to(tl.int32)
        m_tile = (own_m + item // summed_n % summed_m).to(tl.int32)
        h = own_h + item // summed_n // summed_m % summed_h
        b = own_b + item // summed_n // summed_m // summed_h
        base_tile = m_tile.to(tl.int64) * base_tiles_n + n_tile
        bits_ptr = base_bits_ptr + b * stride_base_b + h * stride_base_h + base_tile
        if (tl.load(bits_ptr).to(tl.int32) >> SOME & 1) != 0:
            m_start = m_tile * BLOCK_M
            n_start = n_tile * BLOCK_N
            i = m_start + local_i
            j = n_start + local_j
            kv_head = h // GROUP
            m64 = m_start.to(tl.int64)
            n64 = n_start.to(tl.int64)
            q = load_row_tiles(
                rows_of(q_ptr, stride_q, b, h, m64, UNIT), stride_q.row * UNIT, i < M, BLOCK_M,
                CASE.D0, CASE.D1, CASE.D,
            )  # fmt: skip
            k = load_row_tiles(
                rows_of(k_ptr, stride_k, b, kv_head, n64, UNIT), stride_k.row * UNIT, j < N,
                BLOCK_N, CASE.D0, CASE.D1, CASE.D,
            )  # fmt: skip
            s = product(q, k, CASE.D1, CASE.PRECISION)

            q_limit, limit, b_low, b_high = sequence_limits(lengths, b, M, N, low, high, CASE)
            own = score_changes(changes, change_numbers, scale, b, h, q_limit, limit, CASE)
            s = capped(s, own, CASE)
            row = i[:, None]
            row_limit = row_limits(lengths, b, row, row < M, limit, N, CASE)
            row_begin, row_end = key_bounds(
                row, row_limit, q_limit, b_low, b_high, CASE.HAS_LOW, CASE.HAS_HIGH
            )
            mask_at = b * stride_mask.b + h * stride_mask.h + m64 * stride_mask.m
            allowed, bias = load_mask(
                mask_ptr + mask_at + n64 * stride_mask.n, local_i[:, None], local_j[None, :],
                stride_mask.m, stride_mask.n, M - m_start, N - n_start,
                ONE_ROW if CASE.SHARED == ONE_ROW else 0,
            )  # fmt: skip
            allowed = allowed & (j[None, :] >= row_begin) & (j[None, :] < row_end)
            if CASE.DISTANCE:
                bias += distance_bias(
                    own, m_start, n_start, local_i[:, None], local_j[None, :], BLOCK_M, BLOCK_N
                )
            word = tl.load(lse_delta_ptr + (b * H + h) * padded_m + i)
            lse, delta = unpack_lse_delta(word)
            p = weights(s, lse[:, None], bias, factor, shift, True, True, CASE.KEEP_LOG2)
            if CASE.HAS_DOUT:
                dout = load_row_tiles(
                    rows_of(dout_ptr, stride_do, b, h, m64, UNIT), stride_do.row * UNIT, i < M,
                    BLOCK_M, CASE.E0, CASE.E1, CASE.E,
                )  # fmt: skip
                v = load_row_tiles(
                    rows_of(v_ptr, stride_v, b, kv_head, n64, UNIT), stride_v.row * UNIT, j < N,
                    BLOCK_N, CASE.E0, CASE.E1, CASE.E,
                )  # fmt: skip
                dp = product(dout, v, CASE.E1, CASE.PRECISION)
                if CASE.DROPOUT:
                    row_base, column_base = dropout_bases(seed, stream, b, h)
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
    dmask_ptr += split * stride_split + own_b * stride_dmask.b + own_h * stride_dmask.h
    tl.store(
        dmask_ptr + rows * stride_dmask.m + columns * stride_dmask.n,
        total.to(dmask_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["size_h", "size_m", "size_n", "splits"])
def sum_splits_kernel(
    partials_ptr,
    dmask_ptr,
    stride_dmask,
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
    ptrs = (
        dmask_ptr
        + b * stride_dmask.b
        + h * stride_dmask.h
        + m * stride_dmask.m
        + n * stride_dmask.n
    )
    tl.store(ptrs, total.to(dmask_ptr.dtype.element_ty), mask=inside)
