"""The elementwise work of the Triton feed-forward network: activations, their derivatives, dropout
and sums over rows. The kernels here run before and after PyTorch's products; the epilogue of
triton_up.py uses their functions.

Tiles are in fp32. Without EXACT, results are accurate enough only for 16-bit data. Sums over rows
are deterministic: groups of rows have partial sums, which are added in order. Matrices are
row-major with `width` columns and rows `width` apart, unless a stride is given.
"""

# Kernels are in Triton's language: no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import column_keys, drop, row_kept, row_keys

# -- activations ----------------------------------------------------------------------------------


@triton.jit
def normal_cdf(x, EXACT: tl.constexpr):
    """The standard normal distribution function."""
    if EXACT:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # log2 of the lower tail by a fitted polynomial; the absolute error is at most 7e-7.
        a = tl.minimum(tl.abs(x), 16.0)
        p = a * -0.0005002515390515327 + 0.007282324600964785
        p = p * a - 0.05234311521053314
        p = p * a - 0.45941418409347534
        p = p * a - 1.1510519981384277
        tail = tl.exp2(p * a - 1.0000019073486328)
        return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def twice_tanh_argument(x):
    """2 u, where u is the argument of gelu_tanh's tanh; gelu_tanh is x sigmoid(2 u)."""
    return x * (1.5957691216057308 + 0.07135481627159471 * x * x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # propagates NaN
    elif ACTIVATION == "gelu":
        return x * normal_cdf(x, EXACT)
    elif ACTIVATION == "gelu_tanh":
        return x * sigmoid(twice_tanh_argument(x))
    else:
        tl.static_assert(ACTIVATION == "silu")
        return x * sigmoid(x)


@triton.jit
def activate_and_derive(x, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """(act(x), act'(x))."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        cdf = normal_cdf(x, EXACT)
        density = 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)
        return x * cdf, cdf + x * density
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid(twice_tanh_argument(x))
        slope = 1.5957691216057308 + 0.21406444881478413 * x * x
        return x * s, s + x * s * (1.0 - s) * slope
    else:
        tl.static_assert(ACTIVATION == "silu")
        s = sigmoid(x)
        return x * s, s + x * s * (1.0 - s)


# -- dropout --------------------------------------------------------------------------------------


@triton.jit
def keep_tile(seed_ptr, stream, rows, column_start, local, threshold, SECOND: tl.constexpr):
    """Which elements are kept. rows: int64. The columns are column_start (a multiple of 4) + local,
    which is from arange. SECOND: for the dropout of the output.
    """
    row_key = row_keys(seed_ptr, stream, rows, SECOND)[:, None]
    column_key = column_keys(seed_ptr, stream, column_start, local, SECOND)[None, :]
    return row_kept(row_key, column_key, local[None, :], threshold)


# -- derivatives ----------------------------------------------------------------------------------


@triton.jit
def hidden_gradient(
    da,
    hidden,
    up,
    keep,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """(dpre or, if gated, dgate; dup; a) from da, the gradient of a, and the saved tensor. For relu
    that is a itself, which is 0 where it was dropped.
    """
    if ACTIVATION == "relu" and not GATED:
        dpre = tl.where(hidden > 0, da * scale, 0.0)
        return dpre, dpre, hidden
    else:
        a, slope = activate_and_derive(hidden, ACTIVATION, EXACT)
        dup = da * a
        if GATED:
            a = a * up
            slope = slope * up
        dpre = da * slope
        if DROPOUT:
            a = drop(a, keep, scale)
            dpre = drop(dpre, keep, scale)
            dup = drop(dup, keep, scale)
        return dpre, dup, a


@triton.jit
def gradient_from(
    da,
    hidden_ptr,
    wide,
    width,
    mask,
    offs_m,
    start,
    local,
    seed_ptr,
    stream,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """`hidden_gradient` of a tile of the saved tensor at offsets `wide` (gated: up is at wide +
    width), whose columns are start + local.
    """
    hidden = tl.load(hidden_ptr + wide, mask=mask, other=0.0).to(tl.float32)
    up = hidden
    if GATED:
        up = tl.load(hidden_ptr + wide + width, mask=mask, other=0.0).to(tl.float32)
    keep = mask
    if DROPOUT and (GATED or ACTIVATION != "relu"):
        keep = keep_tile(seed_ptr, stream, offs_m, start, local, threshold, False)
    return hidden_gradient(da, hidden, up, keep, scale, ACTIVATION, GATED, DROPOUT, EXACT)


# -- kernels --------------------------------------------------------------------------------------


@triton.jit
def tile_of(index, rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, first column, columns relative to it, columns, mask) of a tile in row-major order."""
    tiles_n = tl.cdiv(width, BLOCK_N)
    offs_m = (index // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    local = tl.arange(0, BLOCK_N)
    start = index % tiles_n * BLOCK_N
    offs_n = start + local
    mask = (offs_m < rows)[:, None] & (offs_n < width)[None, :]
    return offs_m, start, local, offs_n, mask


@triton.jit(do_not_specialize=["stream", "rows", "threshold"])
def activate_kernel(
    pre_ptr,
    a_ptr,
    seed_ptr,
    stream,
    rows,
    width,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """a [rows, width] = dropout(act(pre)); gated: pre [rows, 2 width] is (gate, up). a may alias
    pre.
    """
    offs_m, start, local, offs_n, mask = tile_of(tl.program_id(0), rows, width, BLOCK_M, BLOCK_N)
    offs = offs_m[:, None] * width + offs_n[None, :]
    if GATED:
        wide = 2 * offs_m[:, None] * width + offs_n[None, :]
        gate = tl.load(pre_ptr + wide, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(pre_ptr + wide + width, mask=mask, other=0.0).to(tl.float32)
        a = activate(gate, ACTIVATION, EXACT) * up
    else:
        pre = tl.load(pre_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        a = activate(pre, ACTIVATION, EXACT)
    if DROPOUT:
        a = drop(a, keep_tile(seed_ptr, stream, offs_m, start, local, threshold, False), scale)
    tl.store(a_ptr + offs, a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stream", "rows", "threshold"])
def finish_kernel(
    product_ptr,
    residual_ptr,
    y_ptr,
    seed_ptr,
    stream,
    rows,
    width,
    residual_stride,
    threshold,
    scale,
    DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = dropout(product) + residual. y may alias product; residual_ptr may be None."""
    offs_m, start, local, offs_n, mask = tile_of(tl.program_id(0), rows, width, BLOCK_M, BLOCK_N)
    offs = offs_m[:, None] * width + offs_n[None, :]
    y = tl.load(product_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if DROPOUT:
        y = drop(y, keep_tile(seed_ptr, stream, offs_m, start, local, threshold, True), scale)
    if residual_ptr is not None:
        residual_offs = offs_m[:, None] * residual_stride + offs_n[None, :]
        y += tl.load(residual_ptr + residual_offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stream", "rows", "rows_per_group", "threshold"])
def drop_gradient_kernel(
    dy_ptr,
    dropped_ptr,
    sums_ptr,
    seed_ptr,
    stream,
    rows,
    rows_per_group,
    width,
    dy_stride,
    threshold,
    scale,
    DROPOUT: tl.constexpr,
    ROUND_TO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dropped = dropout(dy), rounded to ROUND_TO, and its sums over groups of rows, [groups, width]
    in fp32. Either may be None.
    """
    tiles_n = tl.cdiv(width, BLOCK_N)
    group = tl.program_id(0) // tiles_n
    local = tl.arange(0, BLOCK_N)
    start = tl.program_id(0) % tiles_n * BLOCK_N
    offs_n = start + local
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = group.to(tl.int64) * rows_per_group
    for m in range(0, rows_per_group, BLOCK_M):
        offs_m = first + m + tl.arange(0, BLOCK_M)
        mask = (offs_m < rows)[:, None] & (offs_n < width)[None, :]
        dy_offs = offs_m[:, None] * dy_stride + offs_n[None, :]
        dy = tl.load(dy_ptr + dy_offs, mask=mask, other=0.0)
        if DROPOUT:
            keep = keep_tile(seed_ptr, stream, offs_m, start, local, threshold, True)
            dy = drop(dy.to(tl.float32), keep, scale)
        dy = dy.to(ROUND_TO)
        if dropped_ptr is not None:
            tl.store(dropped_ptr + offs_m[:, None] * width + offs_n[None, :], dy, mask=mask)
        sums += dy.to(tl.float32)
    if sums_ptr is not None:
        sums_ptrs = sums_ptr + group.to(tl.int64) * width + offs_n
        tl.store(sums_ptrs, tl.sum(sums, 0), mask=offs_n < width)


@triton.jit(do_not_specialize=["stream", "rows", "rows_per_group", "threshold"])
def differentiate_kernel(
    da_ptr,
    hidden_ptr,
    dpre_ptr,
    a_ptr,
    sums_ptr,
    seed_ptr,
    stream,
    rows,
    rows_per_group,
    width,
    threshold,
    scale,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dpre = da act'(hidden) with dropout, a = dropout(act(hidden)), and the sums of dpre over
    groups of rows (fp32, before rounding). a and sums may be None.

    hidden is the saved tensor. da may alias dpre or, if gated (dpre has 2 width columns), a.
    """
    tiles_n = tl.cdiv(width, BLOCK_N)
    group = tl.program_id(0) // tiles_n
    local = tl.arange(0, BLOCK_N)
    start = tl.program_id(0) % tiles_n * BLOCK_N
    offs_n = start + local
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = group.to(tl.int64) * rows_per_group
    for m in range(0, rows_per_group, BLOCK_M):
        offs_m = first + m + tl.arange(0, BLOCK_M)
        mask = (offs_m < rows)[:, None] & (offs_n < width)[None, :]
        offs = offs_m[:, None] * width + offs_n[None, :]
        wide = offs + offs_m[:, None] * width if GATED else offs
        da = tl.load(da_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        dpre, dup, a = gradient_from(
            da, hidden_ptr, wide, width, mask, offs_m, start, local, seed_ptr, stream, threshold,
            scale, ACTIVATION, GATED, DROPOUT, EXACT,
        )  # fmt: skip
        if a_ptr is not None:
            tl.store(a_ptr + offs, a.to(a_ptr.dtype.element_ty), mask=mask)
        tl.store(dpre_ptr + wide, dpre.to(dpre_ptr.dtype.element_ty), mask=mask)
        sums += dpre
        if GATED:
            tl.store(dpre_ptr + wide + width, dup.to(dpre_ptr.dtype.element_ty), mask=mask)
            up_sums += dup
    if sums_ptr is not None:
        wide_width = 2 * width if GATED else width
        sums_ptrs = sums_ptr + group.to(tl.int64) * wide_width + offs_n
        tl.store(sums_ptrs, tl.sum(sums, 0), mask=offs_n < width)
        if GATED:
            tl.store(sums_ptrs + width, tl.sum(up_sums, 0), mask=offs_n < width)


@triton.jit(do_not_specialize=["groups"])
def sum_groups_kernel(
    sums_ptr, out_ptr, groups, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out [width] = the sum of `sums` [groups, width] over groups."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in range(0, groups, BLOCK_M):
        offs_m = m + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (offs_m < groups)[:, None] & (offs_n < width)[None, :]
        offs = offs_m[:, None] * width + offs_n[None, :]
        sums += tl.load(sums_ptr + offs, mask=mask, other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(sums, 0).to(out_ptr.dtype.element_ty), mask=offs_n < width)
