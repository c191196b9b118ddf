"""The Triton kernels of the norms, shared by layer norm, residual add + layer norm and RMS norm.

If `mean_ptr` is None, the norm is RMS norm; if `z_ptr` is not None, the forward first adds x to the
residual. `norm_fwd_kernel` and `norm_bwd_kernel` hold whole rows in registers and read them once.
Long rows are read in blocks, by `norm_fwd_long_kernel`, and by `norm_row_sums_kernel` before
`norm_bwd_kernel`. Gradients of parameters are written as fp32 partial sums, one line for each
program, which `sum_partials_kernel` adds in a fixed order. All arithmetic is in fp32, and results
are rounded once.

Row length and strides are passed divided by UNIT. Otherwise the compiler would know only whether
they are multiples of 16, and would load other rows element by element.
"""

# Kernels are in Triton's language: no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import column_keys, drop, row_kept, row_keys
from fastattn.ops.layer_norm import config

# Arguments on which kernels must not be specialised: those that differ between calls, and strides,
# so that the bits of a row do not depend on where the next one begins (what alignment they have in
# common with the row length is in UNIT).
_PER_CALL = ["M", "stream", "threshold", "keep_factor", "eps", "lines"]
_PER_CALL += ["stride_x", "stride_residual", "stride_dy", "stride_dz", "stride_z"]

BEFORE = tl.constexpr(config.BEFORE)
WITH_ROWS = tl.constexpr(config.WITH_ROWS)
AFTER_STATISTICS = tl.constexpr(config.AFTER_STATISTICS)


# -- tiles ----------------------------------------------------------------------------------------


@triton.jit
def load_tile(ptrs, mask, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """A tile in fp32, 0 where the mask is false."""
    if MASKED:
        return tl.load(ptrs, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    else:
        return tl.load(ptrs, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def store_tile(ptrs, value, mask, MASKED: tl.constexpr):
    """Stores a tile, rounded to the pointer's dtype."""
    value = value.to(ptrs.dtype.element_ty)
    if MASKED:
        tl.store(ptrs, value, mask=mask)
    else:
        tl.store(ptrs, value)


@triton.jit
def load_columns(ptr, cols, mask_n, default, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """A parameter as [1, BLOCK], or `default` where it is None."""
    if ptr is None:
        return default
    elif ROWS == 1:
        # With the tile's shape, a parameter of another dtype gets the tile's layout.
        return load_tile(ptr + cols[None, :], mask_n[None, :], not EXACT, "evict_last")
    else:
        return load_tile(ptr + cols, mask_n, not EXACT, "evict_last")[None, :]


# -- forward --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_PER_CALL)
def norm_fwd_kernel(
    x_ptr,  # [M, N], rows contiguous
    residual_ptr,  # [M, N], rows contiguous
    x_bias_ptr,  # [N], as are weight and bias
    weight_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,  # [M, N] contiguous
    z_ptr,
    mean_ptr,  # [M]
    rstd_ptr,
    M,
    stream,
    threshold,
    keep_factor,
    eps,
    N,
    stride_x,
    stride_residual,
    UNIT: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARAMETERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of ROWS whole rows, BLOCK >= N columns (EXACT: BLOCK == N)."""
    N = N * UNIT
    MASKED: tl.constexpr = ROWS > 1 or not EXACT
    cols = tl.arange(0, BLOCK)
    mask_n = cols < N
    if PARAMETERS == BEFORE:
        weight = load_columns(weight_ptr, cols, mask_n, 1.0, ROWS, EXACT)
        bias = load_columns(bias_ptr, cols, mask_n, 0.0, ROWS, EXACT)
    tiles = (M - 1) // ROWS + 1
    first = tl.program_id(0).to(tl.int64)
    for tile in tl.range(first, tiles, tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask_m = rows < M
        mask = mask_m[:, None] & mask_n[None, :]
        if EXACT:
            mask = tl.broadcast_to(mask_m[:, None], [ROWS, BLOCK])
        z = load_tile(x_ptr + rows[:, None] * stride_x * UNIT + cols, mask, MASKED, "evict_first")
        offs = rows[:, None] * N + cols[None, :]
        if z_ptr is not None:
            residual_ptrs = residual_ptr + rows[:, None] * stride_residual * UNIT + cols
            residual = load_tile(residual_ptrs, mask, MASKED, "evict_first")
        if PARAMETERS == WITH_ROWS:
            weight = load_columns(weight_ptr, cols, mask_n, 1.0, ROWS, EXACT)
            bias = load_columns(bias_ptr, cols, mask_n, 0.0, ROWS, EXACT)
        if z_ptr is not None:
            z += load_columns(x_bias_ptr, cols, mask_n, 0.0, ROWS, EXACT)
            if DROPOUT:
                r = row_keys(seed_ptr, stream, rows)[:, None]
                c = column_keys(seed_ptr, stream, 0, cols)[None, :]
                z = drop(z, row_kept(r, c, cols[None, :], threshold), keep_factor)
            # The norm is computed from the rounded sum.
            z = (z + residual).to(z_ptr.dtype.element_ty)
            store_tile(z_ptr + offs, z, mask, MASKED)
            z = z.to(tl.float32)
        if mean_ptr is not None:
            mean = tl.sum(z, axis=1) / N
            z -= mean[:, None]
            if not EXACT:
                z = tl.where(mask_n[None, :], z, 0.0)
        rstd = tl.rsqrt(tl.sum(z * z, axis=1) / N + eps)
        if PARAMETERS == AFTER_STATISTICS:
            weight = load_columns(weight_ptr, cols, mask_n, 1.0, ROWS, EXACT)
            bias = load_columns(bias_ptr, cols, mask_n, 0.0, ROWS, EXACT)
        store_tile(y_ptr + offs, z * rstd[:, None] * weight + bias, mask, MASKED)
        # Stored last: with several rows, they pass through shared memory.
        tl.store(rstd_ptr + rows, rstd, mask=mask_m)
        if mean_ptr is not None:
            tl.store(mean_ptr + rows, mean, mask=mask_m)


@triton.jit(do_not_specialize=_PER_CALL)
def norm_fwd_long_kernel(
    x_ptr,
    residual_ptr,
    x_bias_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    z_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    stream,
    threshold,
    keep_factor,
    eps,
    N,
    stride_x,
    stride_residual,
    UNIT: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,  # N is a multiple of BLOCK
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program reads a row twice, BLOCK <= N columns at a time: for the statistics and for y.

    Each lane updates the mean and the squared deviations of its columns (Welford's algorithm); the
    lanes are combined at the end of the row.
    """
    N = N * UNIT
    MASKED: tl.constexpr = not EXACT
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x * UNIT
    y_ptr += row * N
    local = tl.arange(0, BLOCK)
    lane_mean = tl.zeros([BLOCK], tl.float32)
    lane_squares = tl.zeros([BLOCK], tl.float32)
    if z_ptr is not None:
        residual_ptr += row * stride_residual * UNIT
        z_ptr += row * N
    if DROPOUT:
        r = row_keys(seed_ptr, stream, row)
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        cols = start + local
        mask = cols < N
        z = load_tile(x_ptr + cols, mask, MASKED, "evict_last")
        if z_ptr is not None:
            residual = load_tile(residual_ptr + cols, mask, MASKED, "evict_first")
            if x_bias_ptr is not None:
                z += load_tile(x_bias_ptr + cols, mask, MASKED, "evict_last")
            if DROPOUT:
                c = column_keys(seed_ptr, stream, start, local)
                z = drop(z, row_kept(r, c, local, threshold), keep_factor)
            z = (z + residual).to(z_ptr.dtype.element_ty)
            store_tile(z_ptr + cols, z, mask, MASKED)
            z = z.to(tl.float32)
        if mean_ptr is not None:
            delta = z - lane_mean
            step = delta * (1.0 / (start // BLOCK + 1))
            square = delta * (delta - step)
            if MASKED:
                step = tl.where(mask, step, 0.0)
                square = tl.where(mask, square, 0.0)
            lane_mean += step
            lane_squares += square
        else:
            lane_squares += z * z
    mean = 0.0
    if mean_ptr is not None:
        count = ((N - local + BLOCK - 1) // BLOCK).to(tl.float32)
        mean = tl.sum(lane_mean * count, axis=0) / N
        lane_squares += count * (lane_mean - mean) * (lane_mean - mean)
        tl.store(mean_ptr + row, mean)
    rstd = tl.rsqrt(tl.sum(lane_squares, axis=0) / N + eps)
    tl.store(rstd_ptr + row, rstd)
    stored_ptr = x_ptr
    if z_ptr is not None:
        stored_ptr = z_ptr
        tl.debug_barrier()  # the loop below reads what other threads of this program have written
    for start in tl.range(0, N, BLOCK, num_stages=STAGES):
        cols = start + local
        mask = cols < N
        y = (load_tile(stored_ptr + cols, mask, MASKED, "evict_first") - mean) * rstd
        if weight_ptr is not None:
            y *= load_tile(weight_ptr + cols, mask, MASKED, "evict_last")
        if bias_ptr is not None:
            y += load_tile(bias_ptr + cols, mask, MASKED, "evict_last")
        store_tile(y_ptr + cols, y, mask, MASKED)


# -- backward -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_PER_CALL)
def norm_row_sums_kernel(
    dy_ptr,
    z_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    M,
    N,
    stride_dy,
    stride_z,
    UNIT: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[2, M]: the sums of g and of g * xhat along rows, where g = dy * weight. Each program reads a
    row, BLOCK columns at a time.
    """
    N = N * UNIT
    MASKED: tl.constexpr = not EXACT
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
    along = tl.zeros([BLOCK], tl.float32)
    across = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < N
        g = load_tile(dy_ptr + row * stride_dy * UNIT + cols, mask, MASKED, "")
        if weight_ptr is not None:
            g *= load_tile(weight_ptr + cols, mask, MASKED, "evict_last")
        z = load_tile(z_ptr + row * stride_z * UNIT + cols, mask, MASKED, "")
        along += g
        across += g * ((z - mean) * rstd)
    tl.store(sums_ptr + row, tl.sum(along, axis=0))
    tl.store(sums_ptr + M + row, tl.sum(across, axis=0))


@triton.jit
def store_partials(
    partials_ptr,
    dweight,
    dbias,
    dx_bias,
    index,
    lines,
    cols,
    mask_n,
    N,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    DX_BIAS: tl.constexpr,
):
    """Sums dweight, dbias and dx_bias, each [ROWS, BLOCK] if needed, over rows, and stores them to
    line `index` of the tensors [lines, N], which are consecutive in `partials_ptr`.
    """
    ptrs = partials_ptr + index * N + cols
    step = lines.to(tl.int64) * N
    if DWEIGHT:
        tl.store(ptrs, tl.sum(dweight, axis=0), mask=mask_n)
        ptrs += step
    if DBIAS:
        tl.store(ptrs, tl.sum(dbias, axis=0), mask=mask_n)
        ptrs += step
    if DX_BIAS:
        tl.store(ptrs, tl.sum(dx_bias, axis=0), mask=mask_n)


@triton.jit
def loop_columns(ptr, cols, mask_n, default, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """load_columns inside a loop over rows. The branch, which is always taken, keeps the compiler
    from pipelining this load through shared memory, as it does for the rows.
    """
    if ptr is None:
        return default
    else:
        value = tl.zeros([1, cols.shape[0]], tl.float32)
        if tl.num_programs(0) > 0:
            value = load_columns(ptr, cols, mask_n, default, ROWS, EXACT)
        return value


@triton.jit(do_not_specialize=_PER_CALL)
def norm_bwd_kernel(
    dy_ptr,  # gradient of the norm's result; dy or dz may be None
    dz_ptr,  # gradient of the sum
    z_ptr,  # input of the norm
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,  # [2, M] from norm_row_sums_kernel, or None
    seed_ptr,
    dx_ptr,  # with dropout applied
    dresidual_ptr,
    partials_ptr,
    M,
    stream,
    threshold,
    keep_factor,
    N,
    stride_dy,
    stride_dz,
    stride_z,
    UNIT: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    DX_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    KEEP_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of ROWS rows; sums of the parameter gradients stay in registers between tiles.

    A row has ROW_BLOCKS blocks of BLOCK columns (EXACT: all full), one program each. With 2 blocks,
    both programs read the whole row for the sums along it. With ROW_BLOCKS = 0 a row may have any
    number of blocks, and these sums are in `sums_ptr`.
    """
    N = N * UNIT
    MASKED: tl.constexpr = ROWS > 1 or not EXACT
    blocks = ROW_BLOCKS
    if ROW_BLOCKS == 0:
        blocks = tl.cdiv(N, BLOCK)
    block = tl.program_id(0) % blocks
    first = (tl.program_id(0) // blocks).to(tl.int64)
    lines = tl.num_programs(0) // blocks
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask_n = cols < N
    if KEEP_WEIGHT and dy_ptr is not None:
        weight = load_columns(weight_ptr, cols, mask_n, 1.0, ROWS, EXACT)
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    dbias = tl.zeros([ROWS, BLOCK], tl.float32)
    dx_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in tl.range(first, (M - 1) // ROWS + 1, lines, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask_m = rows < M
        mask = mask_m[:, None] & mask_n[None, :]
        if EXACT:
            mask = tl.broadcast_to(mask_m[:, None], [ROWS, BLOCK])
        if dy_ptr is not None:
            dy = load_tile(dy_ptr + rows[:, None] * stride_dy * UNIT + cols, mask, MASKED, "")
            xhat = load_tile(z_ptr + rows[:, None] * stride_z * UNIT + cols, mask, MASKED, "")
            rstd = tl.load(rstd_ptr + rows, mask=mask_m, other=0.0)[:, None]
            mean = 0.0
            if mean_ptr is not None:
                mean = tl.load(mean_ptr + rows, mask=mask_m, other=0.0)[:, None]
            xhat = (xhat - mean) * rstd
            if not KEEP_WEIGHT:
                weight = loop_columns(weight_ptr, cols, mask_n, 1.0, ROWS, EXACT)
            g = dy * weight
            if ROW_BLOCKS == 0:
                along = tl.load(sums_ptr + rows, mask=mask_m, other=0.0)
                across = tl.load(sums_ptr + M + rows, mask=mask_m, other=0.0)
            else:
                along = g
                across = g * xhat
                if ROW_BLOCKS == 2:
                    others = (1 - block) * BLOCK + tl.arange(0, BLOCK)
                    mask_n_o = others < N
                    mask_o = mask_m[:, None] & mask_n_o[None, :]
                    dy_ptrs = dy_ptr + rows[:, None] * stride_dy * UNIT + others
                    z_ptrs = z_ptr + rows[:, None] * stride_z * UNIT + others
                    g_o = load_tile(dy_ptrs, mask_o, MASKED, "")
                    g_o *= loop_columns(weight_ptr, others, mask_n_o, 1.0, ROWS, EXACT)
                    along += g_o
                    across += g_o * ((load_tile(z_ptrs, mask_o, MASKED, "") - mean) * rstd)
                if mean_ptr is not None:
                    # One joint reduction has three barriers fewer than two reductions.
                    along, across = tl.split(tl.sum(tl.join(along, across), axis=1))
                else:
                    across = tl.sum(across, axis=1)
            dsum = g - xhat * (across / N)[:, None]
            if mean_ptr is not None:
                dsum -= (along / N)[:, None]
            dsum *= rstd
            if DWEIGHT:
                dweight += dy * xhat
            if DBIAS:
                dbias += dy
        else:
            dsum = tl.zeros([ROWS, BLOCK], tl.float32)
        if dz_ptr is not None:
            dz_ptrs = dz_ptr + rows[:, None] * stride_dz * UNIT + cols
            dsum += load_tile(dz_ptrs, mask, MASKED, "")
        offs = rows[:, None] * N + cols[None, :]
        if dresidual_ptr is not None:
            store_tile(dresidual_ptr + offs, dsum, mask, MASKED)
        if DROPOUT:
            r = row_keys(seed_ptr, stream, rows)[:, None]
            c = column_keys(seed_ptr, stream, block * BLOCK, tl.arange(0, BLOCK))[None, :]
            keep = row_kept(r, c, tl.arange(0, BLOCK)[None, :], threshold)
            dsum = drop(dsum, keep, keep_factor)
        if DX_BIAS:
            dx_bias += tl.where(mask_m[:, None], dsum, 0.0)
        if dx_ptr is not None:
            store_tile(dx_ptr + offs, dsum, mask, MASKED)
    if DWEIGHT or DBIAS or DX_BIAS:
        store_partials(
            partials_ptr, dweight, dbias, dx_bias, first, lines, cols, mask_n, N, DWEIGHT, DBIAS,
            DX_BIAS,
        )  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL)
def sum_partials_kernel(
    partials_ptr,  # what store_partials wrote
    dweight_ptr,
    dbias_ptr,
    dx_bias_ptr,
    lines,
    N,
    UNIT: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the lines of partial sums in a fixed order. Each program adds one block of columns of
    one gradient.
    """
    N = N * UNIT
    which = tl.program_id(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_n = cols < N
    partials_ptr += which.to(tl.int64) * lines * N
    total = tl.zeros([LINES, BLOCK], tl.float32)
    for start in tl.range(0, lines, LINES):
        line = start + tl.arange(0, LINES)
        mask = (line < lines)[:, None] & mask_n[None, :]
        ptrs = partials_ptr + line.to(tl.int64)[:, None] * N + cols
        total += load_tile(ptrs, mask, True, "evict_first")
    total = tl.sum(total, axis=0)
    index = 0
    if dweight_ptr is not None:
        store_tile(dweight_ptr + cols, total, mask_n & (which == index), True)
        index += 1
    if dbias_ptr is not None:
        store_tile(dbias_ptr + cols, total, mask_n & (which == index), True)
        index += 1
    if dx_bias_ptr is not None:
        store_tile(dx_bias_ptr + cols, total, mask_n & (which == index), True)
