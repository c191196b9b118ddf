"""The backward of attention in Triton: what is launched for which call. triton.py is the forward.

Formulas are in triton_bwd_parts.py, a kernel each in triton_bwd_{dq,dkdv,dmask}_kernel.py, the
lists of tiles in triton_bwd_tiles.py, tilings in config_bwd.py. A call launches dq (with the rows'
statistics, which the others need), then dk and dv, then the gradient of an additive mask, each only
if somebody wants it. What follows from shapes, strides and options is worked out once per
combination and remembered.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.ops import _env
from fastattn.ops.attention import triton_bwd_tiles as tiles
from fastattn.ops.attention.config_bwd import BwdConfig, BwdTile, bwd_config
from fastattn.ops.attention.triton_bwd_dkdv_kernel import attention_bwd_dkdv_kernel
from fastattn.ops.attention.triton_bwd_dmask_kernel import (
    attention_bwd_dmask_kernel,
    sum_splits_kernel,
)
from fastattn.ops.attention.triton_bwd_dq_kernel import attention_bwd_dq_kernel
from fastattn.ops.attention.triton_launch import (
    BoundLaunch,
    LaunchCache,
    signature,
    unsupported,
)
from fastattn.ops.attention.triton_tiles import (
    Band,
    MaskShape,
    band,
    dropout_numbers,
    mask_shape,
)

# Rows of statistics are padded to a multiple of every block_m: full tiles load them aligned.
_STATISTICS_ROWS = 128
# What the heads that run together read again and again should stay in the L2 cache.
_SECTION_BYTES = 32 << 20
# One tile of keys, and a band of few: summing delta over them once more costs next to nothing.
_ONE_TILE, _FEW_KEYS = 64, 16
# Programs that keep a GPU busy; where fewer own the tiles of a mask they share their sums.
_DMASK_PROGRAMS = 512

Spaces = list[tuple[tuple[int, ...], torch.dtype, bool]]


# -- what follows from sizes and options ----------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """How dmask is computed: its sizes, what a program owns, what it adds up, in which shares."""

    sizes: tuple[int, ...]
    owned: tuple[int, ...]
    summed: tuple[int, ...]
    splits: int
    per_split: int


@dataclass(frozen=True)
class _Packed:
    """Sequences one behind the other: how many, the longest, whether bands count from the end."""

    sequences: int
    M: int
    N: int
    from_end: bool


@dataclass(frozen=True)
class _Layout:
    """The tiling of a call and its scratch memory.

    That is: statistics; with lists the kinds, the living keys and the lists of dq and dkdv; with
    shares of dmask those.
    """

    config: BwdConfig
    limits: Band
    padded_m: int
    shape: MaskShape | None
    classes: tiles.Classes | None
    for_dq: tiles.Lists | None
    for_dkdv: tiles.Lists | None
    sums: _Sums | None
    spaces: Spaces


def _dmask_sums(sizes: tuple[int, ...], B: int, H: int, c: tiles.Classes) -> _Sums:
    whole = (B, H, c.tiles_m, c.tiles_n)
    owned = tuple(1 if n == 1 else all_of_it for n, all_of_it in zip(sizes, whole, strict=True))
    summed = tuple(all_of_it // own for own, all_of_it in zip(owned, whole, strict=True))
    items = prod(summed)
    splits = max(1, min(items, _DMASK_PROGRAMS // max(1, prod(owned))))
    per_split = triton.cdiv(items, splits)
    return _Sums(sizes, owned, summed, triton.cdiv(items, per_split), per_split)


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
    need_dmask: bool,
) -> _Layout:
    """tiling: a config, or the architecture to choose one for. length_dims: of key_lengths."""
    (B, H, M, D), N = q_shape, k_shape[2]
    limits = band(causal, window_left, window_right, M, N)
    listed = mask is not None or length_dims == 2
    if isinstance(tiling, str):
        edges = limits.has_low or limits.has_high or length_dims > 0 or has_query_lengths
        edges |= M % _STATISTICS_ROWS != 0 or N % _STATISTICS_ROWS != 0
        config = bwd_config(tiling, dtype, D, E, edges, listed)
    else:
        config = tiling
    padded_m = triton.cdiv(M, _STATISTICS_ROWS) * _STATISTICS_ROWS
    spaces: Spaces = [((B, H, padded_m), torch.int64, False)]
    shape = None if mask is None else mask_shape_of(*mask[1:])
    c = for_dq = for_dkdv = sums = None
    if listed:
        by_batch = length_dims > 0 or has_query_lengths
        base_m = min(config.dq.block_m, config.dkdv.block_m)
        base_n = min(config.dq.block_n, config.dkdv.block_n)
        c = tiles.classes(shape, B, by_batch, M, N, base_m, base_n)
        for_dq = tiles.lists(c, M, N, config.dq.block_m, config.dq.block_n, by_key=False)
        for_dkdv = tiles.lists(c, M, N, config.dkdv.block_m, config.dkdv.block_n, by_key=True)
        spaces += c.spaces() + for_dq.spaces() + for_dkdv.spaces()
        if need_dmask and mask is not None:
            sums = _dmask_sums(mask[1], B, H, c)
            if sums.splits > 1:
                spaces.append(((sums.splits, prod(sums.sizes)), torch.float32, False))
    return _Layout(config, limits, padded_m, shape, c, for_dq, for_dkdv, sums, spaces)


def mask_shape_of(sizes: Sequence[int], strides: Sequence[int]) -> MaskShape:
    return mask_shape(torch.empty_strided(sizes, strides, device="meta"))


def _layout_of(
    tiling: BwdConfig | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    needs: Sequence[bool],
) -> _Layout:
    return _layout(
        tiling or _env.architecture(q.device.type, q.device.index or 0),
        q.dtype,
        q.shape,
        k.shape,
        v.shape[3],
        signature(mask),
        0 if key_lengths is None else key_lengths.dim(),
        query_lengths is not None,
        causal,
        window_left,
        window_right,
        bool(needs[3]),
    )


# -- what is bound to strides and addresses -------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """The launches of one combination of shapes, strides and options."""

    classify: BoundLaunch | None
    list_dq: BoundLaunch | None
    list_dkdv: BoundLaunch | None
    dq: BoundLaunch
    dkdv: tuple[tuple[BoundLaunch, bool, bool], ...]  # with what it computes: dk, dv
    dmask: BoundLaunch | None
    sum_splits: BoundLaunch | None


_plans = LaunchCache()


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of all but the last dimension, 0 where there is nothing to step over."""
    if x is None:
        return (0, 0, 0)
    return tuple(0 if n <= 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))


def _describable(x: Tensor | None) -> bool:
    """Whether descriptors can cover an aligned x: nothing expanded, steps of 16 bytes."""
    if x is None:
        return True
    steps = [s * x.element_size() for s, n in zip(x.stride(), x.shape[:-1], strict=False) if n > 1]
    return all(step > 0 and step % 16 == 0 for step in steps)


def _descriptors(
    x: Tensor | None, rows: int, widths: tuple[int, int]
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Templates over tensors like x: in blocks of its first columns, and of those that follow."""
    if x is None:
        return None, None
    # Torch leaves the strides of size-1 dimensions open, the hardware wants multiples of 16 bytes.
    strides = [16 if n == 1 else s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    templates = []
    for width in widths:
        template = None
        if width:
            template = TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])
            template.base = None  # what is remembered must not keep memory alive
        templates.append(template)
    return templates[0], templates[1]


def _described(
    first: int, x: Tensor, y: Tensor | None, rows: int, widths: Sequence[tuple[int, int]], tma: bool
) -> dict[int, TensorDescriptor | None]:
    """Two descriptors of x and two of y, by the position of the kernel's argument."""
    if not tma:
        return dict.fromkeys(range(first, first + 4))
    found = (*_descriptors(x, rows, widths[0]), *_descriptors(y, rows, widths[1]))
    return {first + n: template for n, template in enumerate(found)}


def _section(x: Tensor, y: Tensor, group: int, most: int) -> int:
    """How many heads run their tiles in one long-to-short order: as many as leave x and y in L2."""
    head_bytes = x.shape[2] * (x.shape[3] + y.shape[3]) * x.element_size()
    return min(most, max(1, _SECTION_BYTES // max(1, head_bytes)) * group)


def _bind(
    layout: _Layout,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    scale: float,
    dropout_p: float,
    needs: Sequence[bool],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor,
    aligned: bool,
    packed: _Packed | None = None,
) -> _Plan:
    (B, H, M, D), (K, N), E = q.shape, k.shape[1:3], v.shape[3]
    rows = M
    if packed is not None:
        B, M, N = packed.sequences, packed.M, packed.N
    need_dq, need_dk, need_dv, need_dmask = needs
    config, limits, c = layout.config, layout.limits, layout.classes
    group = H // K
    widths = config.widths(D), config.widths(E)

    strides = {
        name: _strides(x)
        for name, x in (
            ("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout),
            ("dq", dq if need_dq else None), ("dk", dk if need_dk else None),
            ("dv", dv if need_dv else None),
        )
    }  # fmt: skip
    unit = 8 if all(s % 8 == 0 for x in strides.values() for s in x) else 1
    strides = {name: tuple(s // unit for s in x) for name, x in strides.items()}
    inputs = (*strides["q"], *strides["k"], *strides["v"])
    mask_strides = (0, 0, 0, 0) if layout.shape is None else layout.shape.strides
    length_strides = (
        0 if key_lengths is None else key_lengths.stride(0),
        key_lengths.stride(1) if key_lengths is not None and key_lengths.dim() == 2 else 0,
        0 if query_lengths is None else query_lengths.stride(0),
    )
    of_classes = (0, 0, 0, 0) if c is None else (c.stride_b, c.stride_h, c.tiles_m, c.keys)
    threshold, keep_factor = dropout_numbers(dropout_p)
    numbers = (limits.low, limits.high, scale, threshold, keep_factor)

    has_lengths = key_lengths is not None or packed is not None
    has_query_lengths = query_lengths is not None or packed is not None
    restricted = has_lengths or has_query_lengths or limits.has_low or limits.has_high
    # Rows without a key lie beyond their length, or where the band leaves the keys on either side;
    # keys without a row where the band leaves the rows.
    dead_rows = c is not None or has_query_lengths
    dead_rows |= limits.has_high and limits.high < 0
    dead_rows |= limits.has_low and (has_lengths or limits.low > N - M)
    dead_keys = c is not None or has_lengths
    dead_keys |= limits.has_high and (has_query_lengths or limits.high < N - M)
    dead_keys |= limits.has_low and limits.low > 0
    bias = mask is not None and mask.dtype != torch.bool
    # delta carries out's rounding. That shows where gradients are more precise than out, or vanish
    # in theory: in a mask's column of all keys, and in rows of very few keys.
    few_keys = N <= _ONE_TILE or (
        limits.has_low and limits.has_high and limits.high - limits.low < _FEW_KEYS
    )
    exact_delta = dout is not None and out.dtype.itemsize < 4
    exact_delta &= few_keys or (
        need_dmask and (dmask.dtype.itemsize > out.dtype.itemsize or dmask.shape[3] == 1)
    )
    restrictions = {
        "HAS_LOW": limits.has_low,
        "HAS_HIGH": limits.has_high,
        "KEY_LENGTHS": 0 if key_lengths is None else key_lengths.dim(),
        "QUERY_LENGTHS": query_lengths is not None,
    }
    of_packing = {
        "PACKED": packed is not None,
        "FROM_END": packed is not None and packed.from_end,
    }
    of_mask = {
        "DENSE": mask is not None,
        "BIAS": bias,
        # The lowest value of these makes exp of any score 0, without a comparison.
        "BY_VALUE": mask is not None and mask.dtype in (torch.bfloat16, torch.float32),
        "ROWS_SHARED": layout.shape is not None and layout.shape.sizes[2] == 1,
        "DROPOUT": dropout_p > 0.0,
        "NATURAL": q.dtype == torch.float32 or bias,
    }

    def sizes(tile: BwdTile) -> dict[str, Any]:
        return {
            "PRECISION": config.precision,
            "D": D, "D0": widths[0][0], "D1": widths[0][1],
            "E": E, "E0": widths[1][0], "E1": widths[1][1],
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "STAGES": tile.stages, "EDGE_STAGES": tile.edge_stages,
        }  # fmt: skip

    # -- dq
    t = config.dq
    read_v = None if dout is None else v
    dq_tma = t.tma and aligned and need_dq and _describable(k) and _describable(read_v)
    launch_dq = BoundLaunch(
        attention_bwd_dq_kernel,
        (triton.cdiv(M, t.block_m) * B * H,),
        (
            *inputs, *strides["out"], *strides["dout"], *strides["dq"], *mask_strides, *of_classes,
            *tiles.list_strides(layout.for_dq), *length_strides, H, group, M, N, layout.padded_m,
            rows, B * H, _section(k, v, group, B * H) if limits.has_high else 1, *numbers,
        ),
        {
            "STRIDE_UNIT": unit,
            "NEED_DQ": need_dq,
            "HAS_DOUT": dout is not None,
            "HAS_DLSE": dlse is not None,
            "EXACT_DELTA": exact_delta,
            **restrictions,
            **of_packing,
            "LISTS": c is not None,
            "FACTOR_M": 1 if layout.for_dq is None else layout.for_dq.factor_outer,
            "FACTOR_N": 1 if layout.for_dq is None else layout.for_dq.factor_inner,
            **of_mask,
            "EDGES": restricted or N % t.block_n != 0,
            "DEAD_KEYS": dead_keys,
            "TMA": dq_tma,
            **sizes(t),
        },
        _described(5, k, read_v, t.block_n, widths, dq_tma),
        **t.options(),
    )  # fmt: skip

    # -- dk and dv
    t = config.dkdv
    dkdv_tma = t.tma and aligned and _describable(q) and _describable(dout)
    described = _described(4, q, dout, t.block_m, widths, dkdv_tma)
    passes = [(need_dk, need_dv)]
    if config.separate and need_dk and need_dv:
        passes = [(True, False), (False, True)]
    launches_dkdv = tuple(
        (
            BoundLaunch(
                attention_bwd_dkdv_kernel,
                (triton.cdiv(N, t.block_n) * B * K,),
                (
                    *inputs, *strides["dout"], *strides["dk"], *strides["dv"], *mask_strides,
                    *of_classes, group if c is not None and c.heads > 1 else 1,
                    *tiles.list_strides(layout.for_dkdv), *length_strides, H, K, group, M, N,
                    layout.padded_m, B * K, _section(q, v, 1, B * K) if limits.has_high else 1,
                    *numbers,
                ),
                {
                    "STRIDE_UNIT": unit,
                    "NEED_DK": pass_dk,
                    "NEED_DV": pass_dv,
                    "HAS_DOUT": dout is not None,
                    **restrictions,
                    **of_packing,
                    "LISTS": c is not None,
                    "FACTOR_N": 1 if layout.for_dkdv is None else layout.for_dkdv.factor_outer,
                    **of_mask,
                    "EDGES": restricted or M % t.block_m != 0,
                    "DEAD_ROWS": dead_rows,
                    "LATE": t.late,
                    "TMA": dkdv_tma,
                    **sizes(t),
                },
                described,
                **t.options(),
            ),
            pass_dk,
            pass_dv,
        )
        for pass_dk, pass_dv in passes
        if pass_dk or pass_dv
    )  # fmt: skip

    # -- lists and dmask
    classify = list_dq = list_dkdv = launch_dmask = sum_splits = None
    if c is not None:
        assert layout.for_dq is not None and layout.for_dkdv is not None
        classify = tiles.classifier(
            c, mask, layout.shape, mask_tiles, key_lengths, query_lengths, limits, M, N,
            mask_strides, length_strides,
        )  # fmt: skip
        list_dq = tiles.lister(c, layout.for_dq, False) if need_dq or exact_delta else None
        list_dkdv = tiles.lister(c, layout.for_dkdv, True) if launches_dkdv else None
    if need_dmask:
        sums = layout.sums
        assert c is not None and sums is not None
        _, sh, sm, sn = sums.sizes
        target: tuple[int, ...] = (0, *dmask.stride())
        if sums.splits > 1:
            target = (prod(sums.sizes), sh * sm * sn, sm * sn, sn, 1)
            sum_splits = BoundLaunch(
                sum_splits_kernel,
                (triton.cdiv(prod(sums.sizes), 1024),),
                (*dmask.stride(), sh, sm, sn, prod(sums.sizes), sums.splits),
                {"BLOCK": 1024},
            )
        launch_dmask = BoundLaunch(
            attention_bwd_dmask_kernel,
            (prod(sums.owned) * sums.splits,),
            (
                *inputs, *strides["dout"], *mask_strides, *target, c.stride_b, c.stride_h,
                c.tiles_n,
                *length_strides, H, group, M, N, layout.padded_m, *sums.owned[1:], *sums.summed,
                sums.splits, sums.per_split, *numbers,
            ),
            {
                "STRIDE_UNIT": unit,
                "HAS_DOUT": dout is not None,
                **restrictions,
                "ROWS_SHARED": of_mask["ROWS_SHARED"],
                "DROPOUT": of_mask["DROPOUT"],
                "SUM_ROWS": sm == 1,
                "SUM_COLUMNS": sn == 1,
                "PRECISION": config.precision,
                "D": D, "D0": widths[0][0], "D1": widths[0][1],
                "E": E, "E0": widths[1][0], "E1": widths[1][1],
                "BLOCK_M": c.block_m, "BLOCK_N": c.block_n,
            },
            num_warps=config.dmask_warps,
            num_stages=1,
        )  # fmt: skip

    return _Plan(
        classify,
        list_dq,
        list_dkdv,
        launch_dq,
        launches_dkdv,
        launch_dmask,
        sum_splits,
    )


def _run(
    tiling: BwdConfig | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor,
    spaces: Sequence[Tensor],
    packed: _Packed | None = None,
) -> None:
    need_dq, need_dk, need_dv, need_dmask = needs
    need_dmask = need_dmask and mask is not None
    if dropout_p > 0.0 and dropout_numbers(dropout_p)[1] == 0.0:
        dout, dropout_p = None, 0.0  # everything is dropped: out depends on nothing
    nothing = q.numel() == 0 or k.numel() == 0 or (packed is not None and packed.sequences == 0)
    if nothing or packed is not None or (dout is None and dlse is None):
        # Of packed rows those behind the last sequence belong to no program.
        for result, needed in ((dq, need_dq), (dk, need_dk), (dv, need_dv), (dmask, need_dmask)):
            if needed:
                result.zero_()
        if nothing or (dout is None and dlse is None):
            return
    if dlse is not None:
        dlse = dlse.contiguous()
    if need_dv and dout is None:
        dv.zero_()
        need_dv = False
    needs = (need_dq, need_dk, need_dv, need_dmask)

    device = q.device
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    addresses |= 0 if dout is None else dout.data_ptr()
    key = (
        tiling or _env.architecture(device.type, device.index or 0), device, q.dtype, q.shape,
        q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.stride(),
        None if dout is None else dout.stride(), dlse is None, signature(mask),
        signature(mask_tiles), signature(key_lengths), signature(query_lengths), causal,
        window_left, window_right, scale, dropout_p, needs, dq.stride(), dk.stride(), dv.stride(),
        dmask.stride(), packed, addresses & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if packed is None:
            layout = _layout_of(
                tiling, q, k, v, mask, key_lengths, query_lengths, causal, window_left,
                window_right, needs,
            )  # fmt: skip
        else:
            layout = _packed_layout(q, v, causal, window_left, window_right)
        # Offsets of packed sequences are no lengths to the kernels' constants.
        lengths = (key_lengths, query_lengths) if packed is None else (None, None)
        plan = _bind(
            layout, dout, dlse, q, k, v, mask, mask_tiles, *lengths, out, scale, dropout_p, needs,
            dq, dk, dv, dmask, key[-1], packed,
        )  # fmt: skip
        _plans.remember(key, plan)

    statistics, *rest = spaces
    kinds = alive = lists_dq = lists_dkdv = None
    if plan.classify is not None:
        kinds, alive, lists_dq, lists_dkdv, *rest = rest
        plan.classify(mask, mask_tiles, key_lengths, query_lengths, kinds, alive)
    seed = dropout_seed if dropout_p > 0.0 else None

    if plan.list_dq is not None:
        plan.list_dq(kinds, lists_dq)
    plan.dq(
        q,
        k,
        v,
        out,
        dout,
        k,
        k,
        v,
        v,
        lse,
        dlse,
        statistics,
        dq if need_dq else None,
        mask,
        lists_dq,
        alive,
        key_lengths,
        query_lengths,
        seed,
        dropout_stream,
    )
    if plan.list_dkdv is not None:
        plan.list_dkdv(kinds, lists_dkdv)
    for launch, writes_dk, writes_dv in plan.dkdv:
        launch(
            q,
            k,
            v,
            dout,
            q,
            q,
            dout,
            dout,
            statistics,
            dk if writes_dk else None,
            dv if writes_dv else None,
            mask,
            lists_dkdv,
            alive,
            key_lengths,
            query_lengths,
            seed,
            dropout_stream,
        )
    if plan.dmask is not None:
        target = rest[0] if plan.sum_splits is not None else dmask
        plan.dmask(
            q,
            k,
            v,
            dout,
            statistics,
            mask,
            kinds,
            key_lengths,
            query_lengths,
            seed,
            target,
            dropout_stream,
        )
        if plan.sum_splits is not None:
            plan.sum_splits(target, dmask)


# -- launchers ------------------------------------------------------------------------------------


def attention_bwd_unsupported(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> str | None:
    return unsupported(mask, q, k, v, out=out, dout=dout)


def attention_bwd_workspace(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> Spaces:
    return _layout_of(
        None, q, k, v, mask, key_lengths, query_lengths, causal, window_left, window_right, needs
    ).spaces


def attention_bwd(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dmask: Tensor,
    *spaces: Tensor,
) -> None:
    _run(
        None, dout, dlse, q, k, v, mask, mask_tiles, key_lengths, query_lengths, out, lse, causal,
        window_left, window_right, scale, dropout_p, dropout_seed, dropout_stream, needs, dq, dk,
        dv, dmask, spaces,
    )  # fmt: skip


def attention_bwd_with_config(config: BwdConfig, *args: Any) -> None:
    """attention_bwd in a given tiling, for tuning and tests; allocates its own scratch memory."""
    q, k, v, mask, _, key_lengths, query_lengths = args[2:9]
    causal, window_left, window_right = args[11:14]
    layout = _layout_of(
        config, q, k, v, mask, key_lengths, query_lengths, causal, window_left, window_right,
        args[18],
    )  # fmt: skip
    spaces = [torch.empty(size, dtype=dtype, device=q.device) for size, dtype, _ in layout.spaces]
    everything: tuple[Any, ...] = (config, *args, spaces)
    _run(*everything)


# -- launchers for packed sequences ---------------------------------------------------------------


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D]; a result that nobody wants stays as it is."""
    return x if x.dim() == 1 else x.transpose(0, 1)[None]


@functools.lru_cache(maxsize=2048)
def _packed_layout_for(
    arch: str,
    dtype: torch.dtype,
    H: int,
    T: int,
    D: int,
    E: int,
    causal: int,
    left: int,
    right: int,
) -> _Layout:
    # Sizes differ from sequence to sequence: the diagonal's shift is added on the device.
    right = 0 if causal else right
    limits = Band(-left if left >= 0 else 0, max(right, 0), left >= 0, right >= 0)
    config = bwd_config(arch, dtype, D, E, edges=True)
    padded_m = triton.cdiv(T, _STATISTICS_ROWS) * _STATISTICS_ROWS
    spaces: Spaces = [((H, padded_m), torch.int64, False)]
    return _Layout(config, limits, padded_m, None, None, None, None, None, spaces)


def _packed_layout(
    q: Tensor, v: Tensor, causal: int, window_left: int, window_right: int
) -> _Layout:
    """q [1, H, T, D], v [1, K, S, E]."""
    arch = _env.architecture(q.device.type, q.device.index or 0)
    (_, H, T, D), E = q.shape, v.shape[3]
    return _packed_layout_for(arch, q.dtype, H, T, D, E, causal, window_left, window_right)


def attention_varlen_bwd_unsupported(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> str | None:
    dout = None if dout is None else _heads_first(dout)
    q, k, v, out = (_heads_first(x) for x in (q, k, v, out))
    return unsupported(None, q, k, v, out=out, dout=dout)


def attention_varlen_bwd_workspace(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
) -> Spaces:
    q, v = _heads_first(q), _heads_first(v)
    return _packed_layout(q, v, causal, window_left, window_right).spaces


def attention_varlen_bwd(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor,
    lse: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    needs: Sequence[bool],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    statistics: Tensor,
) -> None:
    """q [T, H, D], k [S, K, D], v [S, K, E], offsets contiguous; lse and dlse [H, T]."""
    packed = _Packed(cu_seqlens_q.numel() - 1, max_seqlen_q, max_seqlen_k, causal == 2)
    if max_seqlen_q == 0 or max_seqlen_k == 0:
        packed = _Packed(0, 0, 0, False)
    _run(
        None, None if dout is None else _heads_first(dout), dlse, _heads_first(q), _heads_first(k),
        _heads_first(v), None, None, cu_seqlens_k, cu_seqlens_q, _heads_first(out), lse, causal,
        window_left, window_right, scale, dropout_p, dropout_seed, dropout_stream, (*needs, False),
        _heads_first(dq), _heads_first(dk), _heads_first(dv), q.new_empty(0), [statistics], packed,
    )  # fmt: skip
