"""The Triton attention backward: the gradient of an additive mask.

`attention_bwd_dmask_kernel` owns a tile of the mask and loops over what the mask is broadcast over;
where few programs would own a tile they share its sum, and `sum_splits_kernel` adds the shares. The
formulas are in bwd_parts.py.
"""

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import dropout_bases, dropout_kept, unit_keys
from fastattn.ops.attention.triton.bwd_parts import (
    unpack_lse_delta,
    weights,
)
from fastattn.ops.attention.triton.tiles import (
    ONE_ROW,
    clamped_length,
    key_bounds,
    load_mask,
    load_tile,
)


@triton.jit(
    do_not_specialize=[
        "stream", "stride_cb", "stride_ch", "base_tiles_n", "stride_lb", "stride_ub", "H", "GROUP",
        "M", "owned_h", "owned_m", "owned_n", "summed_b", "summed_h", "summed_m", "summed_n",
        "splits", "per_split", "low", "high", "threshold",
    ]
)  # fmt: skip
def attention_bwd_dmask_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_delta_ptr,
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
    shift = tl.log2(keep_factor)
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
                M - m_start, N - n_start, ONE_ROW if ROWS_SHARED else 0,
            )  # fmt: skip
            allowed = allowed & (j[None, :] >= row_begin) & (j[None, :] < row_end)
            word = tl.load(lse_delta_ptr + (b * H + h) * padded_m + i)
            lse, delta = unpack_lse_delta(word)
            p = weights(s, lse[:, None], bias, scale, shift, True, True, DROPOUT > 0)
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
        total.to(dmask_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["size_h", "size_m", "size_n", "splits"])
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
