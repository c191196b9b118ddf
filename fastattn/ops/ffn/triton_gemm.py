"""The matrix products of the Triton feed-forward network, with fused epilogues.

Programs loop over tiles of the result, grouped so that neighbours share operands in the L2 cache.
`multiply` computes a tile in fp32. The epilogues are: bias, activation and dropout (`up_kernel`);
bias, dropout and residual (`down_kernel`); the activation's derivative, the recomputed activation
and sums over rows (`dhidden_kernel`); none (`product_kernel`, which may split the summed
dimension).

Operands are [rows, K] and [columns, K] with any strides. With tensor descriptors (TMA) one of their
dimensions must be contiguous; A_LAST, B_LAST: that dimension is K.

The activation is stored and not recomputed when the second product loads it: each column of tiles
would recompute it, and the operand would pass through registers, without asynchronous loads. For
the same reasons one kernel, and no product, computes the sums of dy for db2 and dy's dropout.
"""

# Kernels are in Triton's language: no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import drop
from fastattn.ops.ffn.triton_elementwise import activate, gradient_from, keep_tile

# -- tiles and the main loop ----------------------------------------------------------------------


@triton.jit
def tile_at(index, M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column) of a tile, in tiles. Order: groups of rows; in a group, column by column."""
    tiles_n = tl.cdiv(N, COLUMNS)
    first_m = index // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP)
    inside = index % (GROUP * tiles_n)
    return first_m + inside % height, inside // height


@triton.jit
def load_operand(
    operand,
    tile,
    k,
    N,
    K,
    stride_row,
    stride_k,
    TMA: tl.constexpr,
    LAST: tl.constexpr,
    RIGHT: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of an operand [N, K], 0 outside it: [BLOCK, BLOCK_K], or [BLOCK_K, BLOCK] if RIGHT.

    RIGHT: it is the right operand of tl.dot. LAST: K is the contiguous dimension (for TMA). PAIRED:
    the operand is [2 N, K]; the tile has rows n and N + n, one half each.
    """
    # Rows are computed here from a scalar: in a flattened loop, the compiler keeps the alignment of
    # scalars only.
    ROWS: tl.constexpr = BLOCK // 2 if PAIRED else BLOCK
    start = tile * ROWS
    k_start = k * BLOCK_K
    if TMA:
        if PAIRED:
            x = operand.load([0, start, k_start]).reshape([BLOCK, BLOCK_K])
        elif LAST:
            x = operand.load([start, k_start])
        else:
            x = operand.load([k_start, start])
        if LAST == RIGHT:
            x = x.T
    else:
        local = tl.arange(0, BLOCK)
        rows = start + local % ROWS
        inside_n = rows < N
        if PAIRED:
            rows += local // ROWS * N
        offs_k = k_start + tl.arange(0, BLOCK_K)
        inside_k = offs_k < K
        row_offs = rows.to(tl.int64) * stride_row
        k_offs = offs_k.to(tl.int64) * stride_k
        if RIGHT:
            mask = inside_k[:, None] & inside_n[None, :]
            x = tl.load(operand + k_offs[:, None] + row_offs[None, :], mask=mask, other=0.0)
        else:
            mask = inside_n[:, None] & inside_k[None, :]
            x = tl.load(operand + row_offs[:, None] + k_offs[None, :], mask=mask, other=0.0)
    return x


@triton.jit
def multiply(
    a,
    b,
    tile_m,
    tile_n,
    k_first,
    k_last,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    TMA: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    PAIRED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a bᵀ of one tile, [BLOCK_M, BLOCK_N], over steps [k_first, k_last). PAIRED: b is paired."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(k_first, k_last):
        a_tile = load_operand(
            a, tile_m, k, M, K, stride_am, stride_ak, TMA, A_LAST, False, False, BLOCK_M, BLOCK_K
        )
        b_tile = load_operand(
            b, tile_n, k, N, K, stride_bn, stride_bk, TMA, B_LAST, True, PAIRED, BLOCK_N, BLOCK_K
        )
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def halves(x):
    """[M, 2 N] -> its left and right half; free of cost if a thread holds whole rows."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [M, 2, N]), [0, 2, 1]))


@triton.jit
def tile_from(m_start, n_start, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, columns relative to n_start, columns, mask) of the tile at (m_start, n_start)."""
    local = tl.arange(0, BLOCK_N)
    offs_m = m_start.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = n_start + local
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    return offs_m, local, offs_n, mask


@triton.jit
def add_bias(x, bias_ptr, offs_n, N):
    if bias_ptr is None:
        return x
    else:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        return x + bias.to(tl.float32)[None, :]


# -- up: hidden and activation --------------------------------------------------------------------


@triton.jit
def finish_up(
    acc,
    up,
    m_start,
    n_start,
    bias_ptr,
    hidden_ptr,
    a_ptr,
    seed_ptr,
    stream,
    M,
    N,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """acc: the products of the columns from n_start on; if gated, acc has the gate's."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if SUBTILES > 1:
        left, right = halves(acc)
        up_left, up_right = left, right
        if GATED:
            up_left, up_right = halves(up)
        finish_up(
            left, up_left, m_start, n_start, bias_ptr, hidden_ptr, a_ptr, seed_ptr, stream, M, N,
            threshold, scale, ACTIVATION, GATED, DROPOUT, EXACT, SUBTILES // 2,
        )  # fmt: skip
        finish_up(
            right, up_right, m_start, n_start + BLOCK_N // 2, bias_ptr, hidden_ptr, a_ptr, seed_ptr,
            stream, M, N, threshold, scale, ACTIVATION, GATED, DROPOUT, EXACT, SUBTILES // 2,
        )  # fmt: skip
    else:
        dtype: tl.constexpr = hidden_ptr.dtype.element_ty
        offs_m, local, offs_n, mask = tile_from(m_start, n_start, M, N, BLOCK_M, BLOCK_N)
        offs = offs_m[:, None] * N + offs_n[None, :]
        # The activation is computed from the rounded pre-activation, as in the backward.
        pre = add_bias(acc, bias_ptr, offs_n, N).to(dtype)
        a = activate(pre.to(tl.float32), ACTIVATION, EXACT)
        if GATED:
            wide = offs + offs_m[:, None] * N
            tl.store(hidden_ptr + wide, pre, mask=mask)
            if bias_ptr is not None:
                bias_ptr += N
            pre = add_bias(up, bias_ptr, offs_n, N).to(dtype)
            tl.store(hidden_ptr + wide + N, pre, mask=mask)
            a *= pre.to(tl.float32)
        elif ACTIVATION != "relu":
            tl.store(hidden_ptr + offs, pre, mask=mask)
        if DROPOUT:
            a = drop(
                a, keep_tile(seed_ptr, stream, offs_m, n_start, local, threshold, False), scale
            )
        tl.store(a_ptr + offs, a.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["stream", "M", "threshold"])
def up_kernel(
    x,
    w1,
    bias_ptr,
    hidden_ptr,
    a_ptr,
    seed_ptr,
    stream,
    M,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    TMA: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """hidden and a from x [M, K] and w1 [N, K], gated [2 N, K]; for relu, a is hidden."""
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, M, N, GROUP, BLOCK_M, COLUMNS)
        acc = multiply(
            x, w1, tile_m, tile_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_xm, stride_xk,
            stride_wn, stride_wk, TMA, A_LAST, B_LAST, GATED, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = acc
        if GATED:
            acc, up = halves(acc)
        finish_up(
            acc, up, tile_m * BLOCK_M, tile_n * COLUMNS, bias_ptr, hidden_ptr, a_ptr, seed_ptr,
            stream, M, N, threshold, scale, ACTIVATION, GATED, DROPOUT, EXACT, SUBTILES,
        )  # fmt: skip


# -- down: the output -----------------------------------------------------------------------------


@triton.jit
def finish_down(
    acc,
    m_start,
    n_start,
    bias_ptr,
    residual_ptr,
    y_ptr,
    seed_ptr,
    stream,
    M,
    N,
    residual_stride,
    threshold,
    scale,
    DROPOUT: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    if SUBTILES > 1:
        left, right = halves(acc)
        finish_down(
            left, m_start, n_start, bias_ptr, residual_ptr, y_ptr, seed_ptr, stream, M, N,
            residual_stride, threshold, scale, DROPOUT, SUBTILES // 2,
        )  # fmt: skip
        finish_down(
            right, m_start, n_start + BLOCK_N // 2, bias_ptr, residual_ptr, y_ptr, seed_ptr, stream,
            M, N, residual_stride, threshold, scale, DROPOUT, SUBTILES // 2,
        )  # fmt: skip
    else:
        offs_m, local, offs_n, mask = tile_from(m_start, n_start, M, N, BLOCK_M, BLOCK_N)
        y = add_bias(acc, bias_ptr, offs_n, N)
        if DROPOUT:
            y = drop(y, keep_tile(seed_ptr, stream, offs_m, n_start, local, threshold, True), scale)
        if residual_ptr is not None:
            offs = offs_m[:, None] * residual_stride + offs_n[None, :]
            y += tl.load(residual_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        offs = offs_m[:, None] * N + offs_n[None, :]
        tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stream", "M", "threshold"])
def down_kernel(
    a,
    w2,
    bias_ptr,
    residual_ptr,
    y_ptr,
    seed_ptr,
    stream,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_wn,
    stride_wk,
    residual_stride,
    threshold,
    scale,
    DROPOUT: tl.constexpr,
    TMA: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = dropout(a w2ᵀ + bias) + residual from a [M, K], w2 [N, K]."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, M, N, GROUP, BLOCK_M, BLOCK_N)
        acc = multiply(
            a, w2, tile_m, tile_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_am, stride_ak,
            stride_wn, stride_wk, TMA, A_LAST, B_LAST, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        finish_down(
            acc, tile_m * BLOCK_M, tile_n * BLOCK_N, bias_ptr, residual_ptr, y_ptr, seed_ptr,
            stream, M, N, residual_stride, threshold, scale, DROPOUT, SUBTILES,
        )  # fmt: skip


# -- dhidden: the gradient of the pre-activation --------------------------------------------------


@triton.jit
def finish_dhidden(
    da,
    m_start,
    n_start,
    hidden_ptr,
    dpre_ptr,
    a_ptr,
    sums_ptr,
    seed_ptr,
    stream,
    M,
    N,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    TILE_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    BLOCK_M: tl.constexpr = da.shape[0]
    BLOCK_N: tl.constexpr = da.shape[1]
    if SUBTILES > 1:
        left, right = halves(da)
        finish_dhidden(
            left, m_start, n_start, hidden_ptr, dpre_ptr, a_ptr, sums_ptr, seed_ptr, stream, M, N,
            threshold, scale, ACTIVATION, GATED, DROPOUT, EXACT, TILE_M, SUBTILES // 2,
        )  # fmt: skip
        finish_dhidden(
            right, m_start, n_start + BLOCK_N // 2, hidden_ptr, dpre_ptr, a_ptr, sums_ptr, seed_ptr,
            stream, M, N, threshold, scale, ACTIVATION, GATED, DROPOUT, EXACT, TILE_M,
            SUBTILES // 2,
        )  # fmt: skip
    else:
        WIDTHS: tl.constexpr = 2 if GATED else 1
        dtype: tl.constexpr = dpre_ptr.dtype.element_ty
        offs_m, local, offs_n, mask = tile_from(m_start, n_start, M, N, BLOCK_M, BLOCK_N)
        offs = offs_m[:, None] * N + offs_n[None, :]
        wide = offs_m[:, None] * (WIDTHS * N) + offs_n[None, :]
        dpre, dup, a = gradient_from(
            da, hidden_ptr, wide, N, mask, offs_m, n_start, local, seed_ptr, stream, threshold,
            scale, ACTIVATION, GATED, DROPOUT, EXACT,
        )  # fmt: skip
        tl.store(dpre_ptr + wide, dpre.to(dtype), mask=mask)
        if GATED:
            tl.store(dpre_ptr + wide + N, dup.to(dtype), mask=mask)
        if a_ptr is not None:
            tl.store(a_ptr + offs, a.to(dtype), mask=mask)
        if sums_ptr is not None:
            # dpre is 0 in rows >= M.
            sums_ptrs = sums_ptr + (m_start // TILE_M).to(tl.int64) * (WIDTHS * N) + offs_n
            tl.store(sums_ptrs, tl.sum(dpre, 0), mask=offs_n < N)
            if GATED:
                tl.store(sums_ptrs + N, tl.sum(dup, 0), mask=offs_n < N)


@triton.jit(do_not_specialize=["stream", "M", "threshold"])
def dhidden_kernel(
    dy,
    w2,
    hidden_ptr,
    dpre_ptr,
    a_ptr,
    sums_ptr,
    seed_ptr,
    stream,
    M,
    N,
    K,
    stride_ym,
    stride_yk,
    stride_wn,
    stride_wk,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    TMA: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dpre, a and the sums of dpre over the rows of a tile ([tiles, N], fp32), from dy [M, K] and
    w2ᵀ [N, K]. a and sums may be None.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, M, N, GROUP, BLOCK_M, BLOCK_N)
        da = multiply(
            dy, w2, tile_m, tile_n, 0, tl.cdiv(K, BLOCK_K), M, N, K, stride_ym, stride_yk,
            stride_wn, stride_wk, TMA, A_LAST, B_LAST, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        finish_dhidden(
            da, tile_m * BLOCK_M, tile_n * BLOCK_N, hidden_ptr, dpre_ptr, a_ptr, sums_ptr, seed_ptr,
            stream, M, N, threshold, scale, ACTIVATION, GATED, DROPOUT, EXACT, BLOCK_M, SUBTILES,
        )  # fmt: skip


# -- plain products -------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    a,
    b,
    out_ptr,
    rows,
    N,
    features,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    OVER_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    TMA: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = a bᵀ or, with SPLITS > 1, the partial products of splits of K: [SPLITS, *out].

    a [rows, features], b [N, features]; OVER_ROWS: a [features, rows], b [N, rows].
    """
    M = features if OVER_ROWS else rows
    K = rows if OVER_ROWS else features
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    steps_per_split = tl.cdiv(steps, SPLITS)
    for tile in tl.range(tl.program_id(0), tiles * SPLITS, tl.num_programs(0), flatten=True):
        split = tile // tiles
        tile_m, tile_n = tile_at(tile % tiles, M, N, GROUP, BLOCK_M, BLOCK_N)
        k_first = 0
        k_last = steps
        if SPLITS > 1:
            k_first = tl.minimum(split * steps_per_split, steps)
            k_last = tl.minimum(k_first + steps_per_split, steps)
        acc = multiply(
            a, b, tile_m, tile_n, k_first, k_last, M, N, K, stride_am, stride_ak, stride_bn,
            stride_bk, TMA, A_LAST, B_LAST, False, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        offs_m = (tile_m * BLOCK_M).to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        offs = (split.to(tl.int64) * M + offs_m[:, None]) * N + offs_n[None, :]
        tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
