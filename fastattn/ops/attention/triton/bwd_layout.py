"""The Triton attention backward: what follows from a call's sizes and options alone, which is the
tiling of its kernels, the lists of tiles they loop over, and scratch memory.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import triton
from torch import Tensor

from fastattn.ops._triton_launch import signature
from fastattn.ops.attention.calls import BackwardCall
from fastattn.ops.attention.triton.bwd_config import BwdConfig, bwd_config
from fastattn.ops.attention.triton.bwd_parts import LSE_DELTA_ALIGNMENT
from fastattn.ops.attention.triton.mask_lists import BaseTiles, Lists, base_tiles
from fastattn.ops.attention.triton.operands import architecture
from fastattn.ops.attention.triton.tiles import (
    DiagonalBounds,
    MaskShape,
    column_keys_workspace,
    diagonal_bounds,
    mask_shape,
    packed_diagonal_bounds,
)

# Rows of lse and delta are padded to a multiple of every block_m: full tiles load them aligned.
_LSE_DELTA_ROWS = 128
# Programs that keep a GPU busy; where fewer own the tiles of a mask they share their sums.
_DMASK_PROGRAMS = 512

Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]


@dataclass(frozen=True)
class Sums:
    """How dmask is computed: its sizes, what a program owns, what it adds up, in which shares."""

    sizes: tuple[int, ...]
    owned: tuple[int, ...]
    summed: tuple[int, ...]
    splits: int
    per_split: int


@dataclass(frozen=True)
class Packed:
    """Sequences one behind the other: how many, the longest, whether bounds count from the end."""

    sequences: int
    M: int
    N: int
    from_end: bool


@dataclass(frozen=True)
class Layout:
    """The tiling of a call and its scratch memory.

    That is: lse and delta; with lists the kinds, the living keys and the lists of dq and dkdv; with
    shares of dmask those; with dropout the keys of rows and of columns.
    """

    config: BwdConfig
    limits: DiagonalBounds
    padded_m: int
    workspace: Workspace
    shape: MaskShape | None = None
    classes: BaseTiles | None = None
    for_dq: Lists | None = None
    for_dkdv: Lists | None = None
    sums: Sums | None = None


def layout_of(tiling: BwdConfig | None, call: BackwardCall) -> Layout:
    q, k, key_lengths = call.q, call.k, call.key_lengths
    return _layout(
        tiling or architecture(q),
        q.dtype,
        q.shape,
        k.shape,
        call.v.shape[3],
        signature(call.mask),
        0 if key_lengths is None else key_lengths.dim(),
        call.query_lengths is not None,
        call.causal,
        call.window_left,
        call.window_right,
        call.dropout_p > 0.0,
        bool(call.needs[3]),
    )


@functools.lru_cache(maxsize=2048)
def _layout(
    tiling: BwdConfig | str,
    dtype: torch.dtype,
    q_shape: torch.Size,
    k_shape: torch.Size,
    E: int,
    mask: tuple[torch.dtype, torch.Size, tuple[int, ...]] | None,
    length_dims: int,
    has_query_lengths: bool,
    causal: int,
    window_left: int,
    window_right: int,
    dropout: bool,
    need_dmask: bool,
) -> Layout:
    """tiling: a config, or the architecture to choose one for. length_dims: of key_lengths."""
    (B, H, M, D), N = q_shape, k_shape[2]
    limits = diagonal_bounds(causal, window_left, window_right, M, N)
    listed = mask is not None or length_dims == 2
    if isinstance(tiling, str):
        edges = limits.has_low or limits.has_high or length_dims > 0 or has_query_lengths
        edges |= M % _LSE_DELTA_ROWS != 0 or N % _LSE_DELTA_ROWS != 0
        wide = mask is not None and mask[0].itemsize >= 4
        config = bwd_config(tiling, dtype, D, E, edges, listed, wide)
    else:
        config = tiling
    padded_m = _padded(M)
    workspace: Workspace = [((B, H, padded_m), torch.int64, False)]
    keys = _dropout_keys(B * H * padded_m, N) if dropout else []
    if not listed:
        return Layout(config, limits, padded_m, workspace + keys)
    shape = None if mask is None else _mask_shape(*mask[1:])
    by_batch = length_dims > 0 or has_query_lengths
    base_m = min(config.dq.block_m, config.dkdv.block_m)
    base_n = min(config.dq.block_n, config.dkdv.block_n)
    c = base_tiles(shape, B, by_batch, M, N, base_m, base_n)
    for_dq = c.lists(config.dq.block_m, config.dq.block_n, by_key=False)
    for_dkdv = c.lists(config.dkdv.block_m, config.dkdv.block_n, by_key=True)
    workspace += [(c.shape, torch.uint8, False), ((*c.shape, base_n), torch.uint8, False)]
    workspace += [(lists.shape, torch.int32, False) for lists in (for_dq, for_dkdv)]
    sums = None
    if need_dmask and mask is not None:
        sums = _dmask_sums(mask[1], B, H, c)
        if sums.splits > 1:
            workspace.append(((sums.splits, prod(sums.sizes)), torch.float32, False))
    return Layout(config, limits, padded_m, workspace + keys, shape, c, for_dq, for_dkdv, sums)


def _dropout_keys(rows: int, columns: int) -> Workspace:
    """For at most one key per row, and those of the columns."""
    return [((rows,), torch.int32, False), column_keys_workspace(columns)]


def _padded(rows: int) -> int:
    return triton.cdiv(rows, _LSE_DELTA_ROWS) * _LSE_DELTA_ROWS


def _mask_shape(sizes: Sequence[int], strides: Sequence[int]) -> MaskShape:
    return mask_shape(torch.empty_strided(sizes, strides, device="meta"))


def _dmask_sums(sizes: tuple[int, ...], B: int, H: int, c: BaseTiles) -> Sums:
    whole = (B, H, c.tiles_m, c.tiles_n)
    owned = tuple(1 if n == 1 else all_of_it for n, all_of_it in zip(sizes, whole, strict=True))
    summed = tuple(all_of_it // own for own, all_of_it in zip(owned, whole, strict=True))
    items = prod(summed)
    splits = max(1, min(items, _DMASK_PROGRAMS // max(1, prod(owned))))
    per_split = triton.cdiv(items, splits)
    return Sums(sizes, owned, summed, triton.cdiv(items, per_split), per_split)


def packed_layout(
    q: Tensor,
    v: Tensor,
    sequences: int,
    longest: int,
    causal: int,
    window_left: int,
    window_right: int,
    dropout_p: float,
) -> Layout:
    """q [1, H, T, D], v [1, K, S, E]. longest: sequence of keys."""
    limits = packed_diagonal_bounds(causal, window_left, window_right)
    hashed = longest if dropout_p > 0.0 else None
    rows = _padded(q.shape[2] + (LSE_DELTA_ALIGNMENT.value - 1) * sequences)
    return _packed_layout(architecture(q), q.dtype, q.shape, v.shape[3], limits, rows, hashed)


@functools.lru_cache(maxsize=2048)
def _packed_layout(
    arch: str,
    dtype: torch.dtype,
    q_shape: torch.Size,
    E: int,
    limits: DiagonalBounds,
    rows: int,
    hashed: int | None,
) -> Layout:
    """rows: of lse and delta. hashed: columns whose keys dropout wants."""
    _, H, _, D = q_shape
    config = bwd_config(arch, dtype, D, E, edges=True)
    workspace: Workspace = [((H, rows), torch.int64, False)]
    keys = [] if hashed is None else _dropout_keys(H * rows, hashed)
    return Layout(config, limits, rows, workspace + keys)
