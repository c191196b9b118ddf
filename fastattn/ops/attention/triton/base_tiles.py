"""Base tiles: what restrictions leave of each tile of [M, N], for the lists of the Triton backward.

`classifier` intersects lengths, causality, window and dense mask, and stores five bits for every
base tile (`base_bits`) and which of its keys are alive. mask_lists.py makes lists from these bits.
"""

from collections.abc import Callable
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch
from fastattn.ops.attention import prepared
from fastattn.ops.attention.triton.call_shape import CallShape
from fastattn.ops.attention.triton.tiles import (
    NOT_SPECIALIZED,
    ONE_ROW,
    Lengths,
    MaskStrides,
    key_bounds,
    load_mask,
    row_limits,
    sequence_limits,
)

# Tile bitmasks of a prepared mask (prepared.py). A tile outside it has no lines and misses none.
TILE = tl.constexpr(prepared.TILE)
BITMASK_KEYS = tl.constexpr(prepared.KEYS)
BITMASK_QUERIES = tl.constexpr(prepared.QUERIES)
BITMASK_WHOLE = tl.constexpr(prepared.WHOLE)
BITMASK_OUTSIDE = tl.constexpr(1 << prepared.WHOLE)

# Bits of a base tile: some pair is allowed; every pair inside the tensor is (and its bias 0);
# lengths, causality and window restrict none of them; every key has a query in the tile; every
# query has a key in it. Keys and queries beyond the tensor have none.
SOME = tl.constexpr(0)
WHOLE = tl.constexpr(1)
UNBOUND = tl.constexpr(2)
KEYS_ALIVE = tl.constexpr(3)
QUERIES_ALIVE = tl.constexpr(4)
# Bits of a base tile outside the tensor: nothing in it is allowed, nothing in it is missing.
OUTSIDE = tl.constexpr(6)


class BaseTiles(NamedTuple):
    """Base tiles of [M, N], once per batch and head that differ.

    They fill base_bits [batches, heads, tiles_m, tiles_n] and alive [.., tiles_n * block_n], which
    keys some query of the base tile may attend, both uint8.
    """

    batches: int
    heads: int
    tiles_m: int
    tiles_n: int
    block_m: int
    block_n: int

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """From one base tile to the next along each dimension of base_bits."""
        head = self.tiles_m * self.tiles_n
        return self.heads * head, head, self.tiles_n, 1

    @property
    def shared_strides(self) -> tuple[int, int]:
        """Strides of batch and head, 0 if all batches or heads share the tiles."""
        stride_b, stride_h, _, _ = self.strides
        return stride_b if self.batches > 1 else 0, stride_h if self.heads > 1 else 0

    @property
    def keys(self) -> int:
        """Keys of whole base tiles."""
        return self.tiles_n * self.block_n

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batches, self.heads, self.tiles_m, self.tiles_n


def base_tiles(shape: CallShape, block_m: int, block_n: int) -> BaseTiles:
    """Lengths make every batch differ, whatever the mask's own batch dimension is."""
    mask = shape.mask
    by_batch = (
        shape.shorter_keys or shape.shorter_queries or (mask is not None and mask.sizes[0] > 1)
    )
    heads = 1 if mask is None else mask.sizes[1]
    tiles = triton.cdiv(shape.M, block_m), triton.cdiv(shape.N, block_n)
    return BaseTiles(shape.B if by_batch else 1, heads, *tiles, block_m, block_n)


def bitmask_strides(bitmasks: Tensor) -> tuple[int, ...]:
    """Strides of a prepared mask's tiles; 0 in broadcast dimensions."""
    return tuple(
        0 if n == 1 else stride for n, stride in zip(bitmasks.shape, bitmasks.stride(), strict=True)
    )


@triton.jit
def store_bits(
    bits_ptr, alive_ptr, some, whole, unbound, keys_alive, queries_alive, local_j, keys
):  # fmt: skip
    """keys: which of the keys local_j of the tile are alive."""
    bits = (some << SOME) | (whole << WHOLE) | (unbound << UNBOUND)
    bits = bits | (keys_alive << KEYS_ALIVE) | (queries_alive << QUERIES_ALIVE)
    tl.store(bits_ptr, bits.to(tl.uint8))
    tl.store(alive_ptr + local_j, keys.to(tl.uint8))


@triton.jit
def classify_prepared(
    bitmasks_ptr, bits_ptr, alive_ptr, stride_bitmasks, m_start, n_start, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Class of a base tile by the tile bitmasks of a prepared mask, without other bounds."""
    row = (m_start // TILE + tl.arange(0, BLOCK_M // TILE))[:, None]
    column = (n_start // TILE + tl.arange(0, BLOCK_N // TILE))[None, :]
    bitmasks = tl.load(
        bitmasks_ptr + row.to(tl.int64) * stride_bitmasks.m + column * stride_bitmasks.n,
        mask=(row * TILE < M) & (column * TILE < N),
        other=BITMASK_OUTSIDE,
    )
    # A bitmask's bits go on beyond the tensor where one line of the mask serves all.
    line = tl.arange(0, TILE)
    keys = (tl.reduce_or(bitmasks, 0) >> BITMASK_KEYS)[:, None] >> line[None, :] & 1
    j = n_start + tl.arange(0, BLOCK_N // TILE)[:, None] * TILE + line[None, :]
    keys = tl.where(j < N, keys, 0)
    queries = (tl.reduce_or(bitmasks, 1) >> BITMASK_QUERIES)[:, None] >> line[None, :] & 1
    i = m_start + tl.arange(0, BLOCK_M // TILE)[:, None] * TILE + line[None, :]
    queries = tl.where(i < M, queries, 0)
    some = tl.max(tl.max(keys, 1), 0)
    whole = tl.min(tl.min(bitmasks >> BITMASK_WHOLE, 1), 0)
    keys_alive = tl.min(tl.min(keys, 1), 0)
    queries_alive = tl.min(tl.min(queries, 1), 0)
    unbound = tl.full([], 1, tl.int64)
    store_bits(
        bits_ptr, alive_ptr, some, whole, unbound, keys_alive, queries_alive, j - n_start, keys
    )


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "heads", "tiles_m", "tiles_n", "M"])
def classify_tiles_kernel(
    mask_ptr, bitmasks_ptr, lengths, base_bits_ptr, alive_ptr,
    stride_mask, stride_bitmasks, stride_lengths,
    heads, tiles_m, tiles_n, M, N, low, high,
    PREPARED: tl.constexpr, CASE: tl.constexpr,
):  # fmt: skip
    """One base tile a program. PREPARED: only where lengths, causality or window cut through the
    tile is the mask itself read.
    """
    BLOCK_M: tl.constexpr = CASE.BLOCK_M
    BLOCK_N: tl.constexpr = CASE.BLOCK_N
    tile = tl.program_id(0).to(tl.int64)
    base_bits_ptr += tile
    alive_ptr += tile * BLOCK_N
    n_tile = (tile % tiles_n).to(tl.int32)
    m_tile = (tile // tiles_n % tiles_m).to(tl.int32)
    batch_head = tile // tiles_n // tiles_m
    b = batch_head // heads
    h = batch_head % heads
    rows = tl.arange(0, BLOCK_M)[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    m_start = m_tile * BLOCK_M
    n_start = n_tile * BLOCK_N
    i = m_start + rows
    j = n_start + columns

    lengths = Lengths(lengths, stride_lengths)
    q_limit, limit, low, high = sequence_limits(lengths, b, M, N, low, high, CASE)
    row_limit = row_limits(lengths, b, i, i < M, limit, N, CASE)
    begin, end = key_bounds(i, row_limit, q_limit, low, high, CASE.HAS_LOW, CASE.HAS_HIGH)
    if PREPARED:
        cut = (i < M) & ((begin > n_start) | (end < tl.minimum(n_start + BLOCK_N, N)))
        if tl.max(tl.max(cut.to(tl.int32), 1), 0) == 0:
            bitmasks_ptr += b * stride_bitmasks.b + h * stride_bitmasks.h
            classify_prepared(
                bitmasks_ptr, base_bits_ptr, alive_ptr, stride_bitmasks, m_start, n_start, M, N,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            return
    bounded = (j >= begin) & (j < end)
    allowed = bounded
    plain = allowed
    if CASE.DENSE:
        mask_ptr += b * stride_mask.b + h * stride_mask.h
        mask_ptr += m_start.to(tl.int64) * stride_mask.m + n_start.to(tl.int64) * stride_mask.n
        dense, bias = load_mask(
            mask_ptr, rows, columns, stride_mask.m, stride_mask.n, M - m_start, N - n_start,
            ONE_ROW if CASE.SHARED == ONE_ROW else 0,
        )  # fmt: skip
        allowed = allowed & dense
        plain = allowed
        if CASE.BIAS:
            plain = allowed & (bias == 0.0)

    outside = (i >= M) | (j >= N)
    unbound = tl.min(tl.min((bounded | outside).to(tl.int32), 1), 0)
    keys = tl.max(allowed.to(tl.int32), 0)
    some = tl.max(keys, 0)
    whole = tl.min(tl.min((plain | outside).to(tl.int32), 1), 0)
    keys_alive = tl.min(keys, 0)
    queries_alive = tl.min(tl.max(allowed.to(tl.int32), 1), 0)
    store_bits(
        base_bits_ptr, alive_ptr, some, whole, unbound, keys_alive, queries_alive,
        tl.arange(0, BLOCK_N), keys,
    )  # fmt: skip


def classifier(base: BaseTiles, shape: CallShape, mask_tiles: Tensor | None) -> Callable[..., None]:
    """The launch (mask, mask_tiles, lengths, base_bits, alive) that classifies every base tile."""
    launch = BoundLaunch(
        classify_tiles_kernel,
        (
            MaskStrides(*(shape.mask.strides if shape.mask is not None else (0, 0, 0, 0))),
            MaskStrides(*(bitmask_strides(mask_tiles) if mask_tiles is not None else (0, 0, 0, 0))),
            shape.length_strides, base.heads, base.tiles_m, base.tiles_n, shape.M, shape.N,
            shape.limits.low, shape.limits.high,
        ),
        {
            "PREPARED": mask_tiles is not None,
            "CASE": shape.constants(
                base.block_m, base.block_n, MASK_UNIT=1, DROPOUT=0, D=0, E=0
            ),
        },
        num_warps=4,
    )  # fmt: skip
    return launch.over(base.batches * base.heads * base.tiles_m * base.tiles_n)
