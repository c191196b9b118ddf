"""The first product of the Triton feed-forward network with bias, activation and dropout in its
epilogue.

Programs loop over tiles of the result, grouped so that neighbours share operands in the L2 cache.
`multiply` computes a tile in fp32, `finish` is the epilogue. Operands are [rows, K] and [columns,
K] in 16 bits with any strides; with tensor descriptors (TMA), K is contiguous.

The activation is stored and not recomputed when the second product loads it: each column of tiles
would recompute it, and the operand would pass through registers, without asynchronous loads.
"""

# Kernels are in Triton's language: no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from fastattn.ops._triton_dropout import drop
from fastattn.ops.ffn.triton_elementwise import activate, keep_tile

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
    RIGHT: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of an operand [N, K], 0 outside it: [BLOCK, BLOCK_K], or [BLOCK_K, BLOCK] if RIGHT.

    RIGHT: it is the right operand of tl.dot. PAIRED: the operand is [2 N, K]; the tile has rows n
    and N + n, one half each.
    """
    # Rows are computed here from a scalar: in a flattened loop, the compiler keeps the alignment of
    # scalars only.
    ROWS: tl.constexpr = BLOCK // 2 if PAIRED else BLOCK
    start = tile * ROWS
    k_start = k * BLOCK_K
    if TMA:
        if PAIRED:
            x = operand.load([0, start, k_start]).reshape([BLOCK, BLOCK_K])
        else:
            x = operand.load([start, k_start])
        if RIGHT:
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
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    TMA: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a bᵀ of one tile, [BLOCK_M, BLOCK_N]. PAIRED: b is paired."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a_tile = load_operand(
            a, tile_m, k, M, K, stride_am, stride_ak, TMA, False, False, BLOCK_M, BLOCK_K
        )
        b_tile = load_operand(
            b, tile_n, k, N, K, stride_bn, stride_bk, TMA, True, PAIRED, BLOCK_N, BLOCK_K
        )
        tl.static_assert(a_tile.dtype.primitive_bitwidth == 16, "fp32 would be rounded to TF32")
        acc = tl.dot(a_tile, b_tile, acc)
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


# -- the epilogue and the kernel -------------------------------------------------------------------


@triton.jit
def finish(
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
        finish(
            left, up_left, m_start, n_start, bias_ptr, hidden_ptr, a_ptr, seed_ptr, stream, M, N,
            threshold, scale, ACTIVATION, GATED, DROPOUT, SUBTILES // 2,
        )  # fmt: skip
        finish(
            right, up_right, m_start, n_start + BLOCK_N // 2, bias_ptr, hidden_ptr, a_ptr, seed_ptr,
            stream, M, N, threshold, scale, ACTIVATION, GATED, DROPOUT, SUBTILES // 2,
        )  # fmt: skip
    else:
        dtype: tl.constexpr = hidden_ptr.dtype.element_ty
        offs_m, local, offs_n, mask = tile_from(m_start, n_start, M, N, BLOCK_M, BLOCK_N)
        offs = offs_m[:, None] * N + offs_n[None, :]
        # The activation is computed from the rounded pre-activation, as in the backward.
        pre = add_bias(acc, bias_ptr, offs_n, N).to(dtype)
        a = activate(pre.to(tl.float32), ACTIVATION, False)
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
    TMA: tl.constexpr,
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
            x, w1, tile_m, tile_n, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, TMA, GATED,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        up = acc
        if GATED:
            acc, up = halves(acc)
        finish(
            acc, up, tile_m * BLOCK_M, tile_n * COLUMNS, bias_ptr, hidden_ptr, a_ptr, seed_ptr,
            stream, M, N, threshold, scale, ACTIVATION, GATED, DROPOUT, SUBTILES,
        )  # fmt: skip
