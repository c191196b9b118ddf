"""The Triton attention backward: its kernels bound to everything that follows from a call's shapes,
strides and options. backward.py launches them.

`Layout` follows from sizes and options alone: the tiling of the kernels, the lists of tiles they
loop over, and the workspace. `bind` needs strides too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch, DescriptorTemplate, LaunchCache, signature
from fastattn.ops.attention.calls import BackwardCall, Gradients, options_of
from fastattn.ops.attention.triton.base_tiles import BaseTiles, base_tiles, classifier
from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile, bwd_config
from fastattn.ops.attention.triton.bwd_distance_kernel import attention_bwd_distance_kernel
from fastattn.ops.attention.triton.bwd_dkdv_kernel import attention_bwd_dkdv_kernel
from fastattn.ops.attention.triton.bwd_dmask_kernel import (
    attention_bwd_dmask_kernel,
    sum_splits_kernel,
)
from fastattn.ops.attention.triton.bwd_dq_kernel import attention_bwd_dq_kernel
from fastattn.ops.attention.triton.bwd_parts import LSE_DELTA_ALIGNMENT
from fastattn.ops.attention.triton.call_shape import (
    CallShape,
    Workspace,
    architecture,
    call_shape_of,
    descriptor_templates,
    fits_descriptor,
    heads_first,
    length_tensors,
    packed_of,
    row_strides_in_units,
    swizzle_group_size,
)
from fastattn.ops.attention.triton.mask_lists import Lists, base_tile_lists, tile_lister
from fastattn.ops.attention.triton.tiles import (
    KernelConstants,
    MaskStrides,
    RowStrides,
    column_hasher,
    column_keys_workspace,
    dropout_numbers,
)

# Rows of lse and delta are padded to a multiple of every block_m: full tiles load them aligned.
_LSE_DELTA_ROWS = 128
# Programs that keep a GPU busy; where fewer own the tiles of a mask they share their sums.
_DMASK_PROGRAMS = 512
# One tile of keys, or bounds that leave few: summing delta over them again costs next to nothing.
_ONE_TILE, _FEW_KEYS = 64, 16

_Launch = Callable[..., None]


# -- what follows from sizes ----------------------------------------------------------------------


@dataclass(frozen=True)
class DmaskTiling:
    """Tiling of dmask. Number of batches, heads, query tiles and key tiles: of dmask (`owned`), and
    summed into each of these (`summed`), by `splits` programs of per_split tiles. sizes: the
    mask's, 1 where broadcast.
    """

    sizes: tuple[int, ...]
    owned: tuple[int, ...]
    summed: tuple[int, ...]
    splits: int
    per_split: int


@dataclass(frozen=True)
class DistanceTiling:
    """Tiling of ddistance_bias: square tiles of `block`, `diagonals` of them from first_diagonal
    on. Their sums begin `spare` entries before the first. Batches are added in groups, of per_group
    batches.
    """

    block: int
    first_diagonal: int
    diagonals: int
    spare: int
    groups: int
    per_group: int


class TileLists(NamedTuple):
    """Base tiles and lists, used if arithmetic alone cannot say which tiles to visit."""

    base: BaseTiles
    dq: Lists
    dkdv: Lists
    dmask: DmaskTiling | None


@dataclass(frozen=True)
class Layout:
    """The tiling of a call and its workspace: lse and delta; for dsinks a sum of each query tile;
    for ddistance_bias the sums of diagonals; with lists the bits and live keys of
    base tiles and the lists of dq and dkdv; with splits of dmask their sums; with dropout the keys
    of rows and of columns.
    """

    config: BwdConfig
    padded_m: int
    workspace: Workspace
    distance: DistanceTiling | None
    lists: TileLists | None


_layouts = LaunchCache()


def layout_of(tiling: BwdConfig | None, call: BackwardCall) -> Layout:
    q, k = call.q, call.k
    key = (
        tiling or architecture(q), q.dtype, q.shape, k.shape, call.v.shape, signature(call.mask),
        *(None if x is None else x.dim() for x in length_tensors(call)), *options_of(call),
        *call.needs[3:], packed_of(call),
        None if call.distance_bias is None else call.distance_bias.shape[0], call.sinks is None,
    )  # fmt: skip
    layout: Layout | None = _layouts.get(key)
    if layout is None:
        layout = _layouts.remember(key, _layout(tiling, call_shape_of(call), call))
    return layout


def _layout(config: BwdConfig | None, shape: CallShape, call: BackwardCall) -> Layout:
    """call: for what it needs."""
    M, N, mask = shape.M, shape.N, shape.mask
    need_dmask, need_ddistance, need_dsinks = call.needs[3:]
    if config is None:
        edges = shape.arithmetic or M % _LSE_DELTA_ROWS != 0 or N % _LSE_DELTA_ROWS != 0
        wide = shape.mask_dtype is not None and shape.mask_dtype.itemsize >= 4
        config = bwd_config(
            shape.arch,
            shape.dtype,
            shape.D,
            shape.E,
            edges,
            shape.needs_lists,
            wide,
            shape.score_numbers.distance_first is not None,
        )
    heads, rows = shape.B * shape.H, shape.rows
    if shape.packed is not None:
        heads, rows = shape.H, rows + (LSE_DELTA_ALIGNMENT.value - 1) * shape.packed.sequences
    padded_m = triton.cdiv(rows, _LSE_DELTA_ROWS) * _LSE_DELTA_ROWS
    workspace: Workspace = [((heads, padded_m), torch.int64, False)]
    if need_dsinks and call.sinks is not None:
        sums = shape.B, shape.H, triton.cdiv(M, config.dq.block_m)
        workspace.append((sums, torch.float32, False))
    distance = None
    if need_ddistance and call.distance_bias is not None:
        distance = _distance_tiling(config, shape, call.distance_bias.shape[0])
        entries = distance.diagonals * distance.block
        workspace.append(((2, distance.groups, shape.H, entries), torch.float32, False))
    lists = None
    if shape.needs_lists:
        base_m = min(config.dq.block_m, config.dkdv.block_m)
        base_n = min(config.dq.block_n, config.dkdv.block_n)
        base = base_tiles(shape, base_m, base_n)
        dq = base_tile_lists(base, config.dq.block_m, config.dq.block_n, by_key=False)
        dkdv = base_tile_lists(base, config.dkdv.block_m, config.dkdv.block_n, by_key=True)
        workspace += [(base.shape, torch.uint8, False), ((*base.shape, base_n), torch.uint8, False)]
        workspace += [(each.shape, torch.int32, False) for each in (dq, dkdv)]
        dmask = None
        if need_dmask and mask is not None:
            dmask = _dmask_tiling(mask.sizes, shape, base)
            if dmask.splits > 1:
                workspace.append(((dmask.splits, prod(dmask.sizes)), torch.float32, False))
        lists = TileLists(base, dq, dkdv, dmask)
    if shape.dropout_p > 0.0:  # at most one key per row, and those of the columns
        workspace += [((heads * padded_m,), torch.int32, False), column_keys_workspace(N)]
    return Layout(config, padded_m, workspace, distance, lists)


def _distance_tiling(config: BwdConfig, shape: CallShape, batches: int) -> DistanceTiling:
    """batches: of distance_bias, 1 or all."""
    sides = (config.dq, config.dkdv)
    block = min(size for tile in sides for size in (tile.block_m, tile.block_n))
    first = shape.score_numbers.distance_first
    first_diagonal = -first // block
    # The entry after the last belongs to the last diagonal, which only tiles beyond it share.
    diagonals = triton.cdiv(shape.M + shape.N - 1 - first, block) - first_diagonal + 1
    groups = shape.B
    if batches == 1:
        groups = min(shape.B, max(1, _DMASK_PROGRAMS // max(1, shape.H * diagonals)))
    per_group = triton.cdiv(shape.B, groups)
    return DistanceTiling(
        block, first_diagonal, diagonals, -first - first_diagonal * block,
        triton.cdiv(shape.B, per_group), per_group,
    )  # fmt: skip


def _dmask_tiling(sizes: tuple[int, ...], shape: CallShape, base: BaseTiles) -> DmaskTiling:
    whole = (shape.B, shape.H, base.tiles_m, base.tiles_n)
    owned = tuple(1 if n == 1 else all_of_it for n, all_of_it in zip(sizes, whole, strict=True))
    summed = tuple(all_of_it // own for own, all_of_it in zip(owned, whole, strict=True))
    items = prod(summed)
    splits = max(1, min(items, _DMASK_PROGRAMS // max(1, prod(owned))))
    per_split = triton.cdiv(items, splits)
    return DmaskTiling(sizes, owned, summed, triton.cdiv(items, per_split), per_split)


# -- what follows from strides, too ---------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The launches of one combination of shapes, strides and options."""

    classify: _Launch | None
    list_dq: _Launch | None
    list_dkdv: _Launch | None
    hash_columns: _Launch | None
    dq: _Launch
    dkdv: tuple[tuple[_Launch, bool, bool], ...]  # with what it computes: dk, dv
    dmask: _Launch | None
    sum_splits: _Launch | None
    distance: _Launch | None
    distance_spare: int  # entries before the first in its sums


def bind(tiling: BwdConfig | None, call: BackwardCall, gradients: Gradients, aligned: bool) -> Plan:
    """aligned: q, k, v and dout are aligned for descriptors."""
    layout = layout_of(tiling, call)
    if call.cu_seqlens_q is not None:
        q, k, v, out, dout = map(heads_first, (call.q, call.k, call.v, call.out, call.dout))
        call = call._replace(q=q, k=k, v=v, out=out, dout=dout)
        gradients = Gradients(*map(heads_first, gradients))
    binder = _Binder(layout, call_shape_of(call), call, gradients, aligned)
    need_dq, _, _, need_dmask, *_ = call.needs
    dkdv = binder.dkdv()
    classify = list_dq = list_dkdv = dmask = sum_splits = None
    if layout.lists is not None:
        base, for_dq, for_dkdv, _ = layout.lists
        classify = classifier(base, binder.shape, call.mask_tiles)
        if need_dq or binder.exact_delta:
            list_dq = tile_lister(base, for_dq, False)
        if dkdv:
            list_dkdv = tile_lister(base, for_dkdv, True)
    if need_dmask:
        dmask, sum_splits = binder.dmask()
    loops_over_keys = call.dout is not None and (need_dq or binder.exact_delta)
    dropout = call.dropout_p > 0.0 and loops_over_keys
    hash_columns = column_hasher(binder.shape.N) if dropout else None
    tiling_of_distance = layout.distance
    return Plan(
        classify, list_dq, list_dkdv, hash_columns, binder.dq(), dkdv, dmask, sum_splits,
        None if tiling_of_distance is None else binder.distance(tiling_of_distance),
        0 if tiling_of_distance is None else tiling_of_distance.spare,
    )  # fmt: skip


def _exact_delta(shape: CallShape, call: BackwardCall, dmask: Tensor) -> bool:
    """delta carries out's rounding. That shows where gradients are more precise than out, or
    vanish in theory: in a mask's column of all keys, and in rows of very few keys.
    """
    limits = shape.limits
    if call.dout is None or call.out.dtype.itemsize >= 4:
        return False
    bounded = limits.has_low and limits.has_high
    if shape.N <= _ONE_TILE or (bounded and limits.high - limits.low < _FEW_KEYS):
        return True
    finer = dmask.dtype.itemsize > call.out.dtype.itemsize
    return call.needs[3] and (finer or dmask.shape[3] == 1)


class _Strides(NamedTuple):
    q: RowStrides
    k: RowStrides
    v: RowStrides
    out: RowStrides
    dout: RowStrides
    dq: RowStrides
    dk: RowStrides
    dv: RowStrides


class _Binder:
    """The arguments that kernels have in common, and those of each kernel."""

    def __init__(
        self,
        layout: Layout,
        shape: CallShape,
        call: BackwardCall,
        gradients: Gradients,
        aligned: bool,
    ):
        self.layout, self.shape, self.call, self.aligned = layout, shape, call, aligned
        self.dmask_strides = gradients.dmask.stride()
        self.exact_delta = _exact_delta(shape, call, gradients.dmask)
        self.d, self.e = layout.config.widths(shape.D), layout.config.widths(shape.E)
        dq, dk, dv, *_ = (
            x if need else None for x, need in zip(gradients, call.needs, strict=True)
        )
        self.unit, strides = row_strides_in_units(
            call.q, call.k, call.v, call.out, call.dout, dq, dk, dv
        )
        self.strides = _Strides(*strides)

    def swizzle_group(self, x: Tensor, y: Tensor, group: int, heads: int) -> int:
        """x and y are what a head reads again and again."""
        head_bytes = x.shape[2] * (x.shape[3] + y.shape[3]) * x.element_size()
        return swizzle_group_size(self.shape.limits, head_bytes, group, heads)

    def list_numbers(self, by_key: bool) -> tuple[int, ...]:
        """Strides of base tiles and lists by batch, head and tile, and how many are summed."""
        found = self.layout.lists
        if found is None:
            return (0, 0, 0, 0, 1, 0, 0, 0) if by_key else (0, 0, 0, 0, 0, 0, 0)
        base, lists = found.base, found.dkdv if by_key else found.dq
        heads = (self.shape.group if base.heads > 1 else 1,) if by_key else ()
        return (*base.shared_strides, base.tiles_m, base.keys, *heads, *lists.strides)

    def constants(self, block_m: int, block_n: int, **others: Any) -> KernelConstants:
        shape, lists = self.shape, self.layout.lists
        if lists is not None:
            others |= {"LISTS": True, "BASE_M": lists.base.block_m, "BASE_N": lists.base.block_n}
        return shape.constants(
            block_m, block_n, self.d, self.e, UNIT=self.unit,
            PRECISION=self.layout.config.precision, HAS_DOUT=self.call.dout is not None,
            KEEP_LOG2=ceil(log2(dropout_numbers(shape.dropout_p)[1])),
            # The lowest value of these makes exp of any score 0, without a comparison; not beside a
            # bias by distance, which may be infinite or NaN where the mask blocks.
            BY_VALUE=shape.mask_dtype in (torch.bfloat16, torch.float32)
            and shape.score_numbers.distance_first is None,
            **others,
        )  # fmt: skip

    def tile_constants(self, tile: BwdTile, tma: bool, **others: Any) -> KernelConstants:
        return self.constants(
            tile.block_m, tile.block_n, STAGES=tile.stages, EDGE_STAGES=tile.edge_stages, TMA=tma,
            **others,
        )  # fmt: skip

    def descriptors(
        self, first: int, x: Tensor, y: Tensor | None, rows: int, tma: bool
    ) -> Mapping[int, DescriptorTemplate | None]:
        """Two descriptors of x and two of y, by the position of the kernel's argument."""
        if not tma:
            return dict.fromkeys(range(first, first + 4))
        if self.shape.packed is not None:
            x, y = x[0], None if y is None else y[0]
        found = *descriptor_templates(x, rows, self.d), *descriptor_templates(y, rows, self.e)
        return {first + n: template for n, template in enumerate(found)}

    def _by_tma(self, tile: BwdTile) -> bool:
        """Without dout ptxas 12.8 breaks down over descriptors of a single row."""
        return tile.tma and self.aligned and self.call.dout is not None

    def dq(self) -> _Launch:
        shape, call, tile, stride = self.shape, self.call, self.layout.config.dq, self.strides
        heads = shape.B * shape.H
        read_v = None if call.dout is None else call.v
        tma = self._by_tma(tile) and call.needs[0]
        tma = tma and fits_descriptor(call.k) and fits_descriptor(read_v)
        ragged = shape.N % tile.block_n != 0
        case = self.tile_constants(tile, tma, DEAD=shape.dead_keys, RAGGED=ragged)
        launch = BoundLaunch(
            attention_bwd_dq_kernel,
            (
                stride.q, stride.k, stride.v, stride.out, stride.dout, stride.dq,
                shape.mask_strides, *self.list_numbers(False), shape.length_strides, shape.H,
                shape.group, shape.M, shape.N // shape.mask_unit, self.layout.padded_m, shape.rows,
                heads, self.swizzle_group(call.k, call.v, shape.group, heads), *shape.numbers,
            ),
            {
                "NEED_DQ": call.needs[0],
                "HAS_DLSE": call.dlse is not None,
                "EXACT_DELTA": self.exact_delta,
                "CASE": case,
            },
            self.descriptors(5, call.k, read_v, tile.block_n, tma),
            **tile.options(tma),
        )  # fmt: skip
        return launch.over(triton.cdiv(shape.M, tile.block_m) * heads)

    def dkdv(self) -> tuple[tuple[_Launch, bool, bool], ...]:
        _, need_dk, need_dv, *_ = self.call.needs
        passes = [(need_dk, need_dv)]
        if self.layout.config.separate and need_dk and need_dv:
            passes = [(True, False), (False, True)]
        return tuple((self._dkdv(*each), *each) for each in passes if any(each))

    def _dkdv(self, need_dk: bool, need_dv: bool) -> _Launch:
        shape, call, tile, stride = self.shape, self.call, self.layout.config.dkdv, self.strides
        heads = shape.B * shape.K
        tma = self._by_tma(tile) and fits_descriptor(call.q) and fits_descriptor(call.dout)
        case = self.tile_constants(
            tile, tma, DEAD=shape.dead_rows, RAGGED=shape.M % tile.block_m != 0, NEED_DK=need_dk,
            NEED_DV=need_dv, LATE=tile.late,
        )  # fmt: skip
        launch = BoundLaunch(
            attention_bwd_dkdv_kernel,
            (
                stride.q, stride.k, stride.v, stride.dout, stride.dk, stride.dv,
                shape.mask_strides, *self.list_numbers(True), shape.length_strides, shape.H,
                shape.K, shape.group, shape.M, shape.N // shape.mask_unit, self.layout.padded_m,
                heads, self.swizzle_group(call.q, call.v, 1, heads), *shape.numbers,
            ),
            {"CASE": case},
            self.descriptors(4, call.q, call.dout, tile.block_m, tma),
            **tile.options(tma),
        )  # fmt: skip
        return launch.over(triton.cdiv(shape.N, tile.block_n) * heads)

    def dmask(self) -> tuple[_Launch, _Launch | None]:
        """And the sum of its splits, where there are several."""
        shape, lists, stride = self.shape, self.layout.lists, self.strides
        assert lists is not None and lists.dmask is not None and shape.mask is not None
        base, tiling = lists.base, lists.dmask
        _, sh, sm, sn = tiling.sizes
        target = result_strides = MaskStrides(*self.dmask_strides)
        numel, sum_splits = 0, None
        if tiling.splits > 1:
            numel, target = prod(tiling.sizes), MaskStrides(sh * sm * sn, sm * sn, sn, 1)
            add = BoundLaunch(
                sum_splits_kernel,
                (result_strides, sh, sm, sn, numel, tiling.splits),
                {"BLOCK": 1024},
            )
            sum_splits = add.over(triton.cdiv(numel, 1024))
        launch = BoundLaunch(
            attention_bwd_dmask_kernel,
            (
                stride.q, stride.k, stride.v, stride.dout, MaskStrides(*shape.mask.strides),
                numel, target, *base.shared_strides, base.tiles_n, shape.length_strides, shape.H,
                shape.group, shape.M, shape.N, self.layout.padded_m, *tiling.owned[1:],
                *tiling.summed, tiling.splits, tiling.per_split, *shape.numbers,
            ),
            {
                "SUM_ROWS": sm == 1,
                "SUM_COLUMNS": sn == 1,
                "CASE": self.constants(base.block_m, base.block_n, MASK_UNIT=1),
            },
            num_warps=self.layout.config.dmask_warps,
            num_stages=1,
        )  # fmt: skip
        return launch.over(prod(tiling.owned) * tiling.splits), sum_splits

    def distance(self, tiling: DistanceTiling) -> _Launch:
        shape, lists, stride = self.shape, self.layout.lists, self.strides
        base = (0, 0, 0) if lists is None else (*lists.base.shared_strides, lists.base.tiles_n)
        mask = (0, 0, 0, 0) if shape.mask is None else shape.mask.strides
        programs = tiling.groups * shape.H * tiling.diagonals
        launch = BoundLaunch(
            attention_bwd_distance_kernel,
            (
                stride.q, stride.k, stride.v, stride.dout, MaskStrides(*mask), *base,
                shape.length_strides, shape.H, shape.group, shape.M, shape.N, self.layout.padded_m,
                shape.B, tiling.per_group, tiling.diagonals, tiling.first_diagonal,
                programs * tiling.block, *shape.numbers,
            ),
            {"CASE": self.constants(tiling.block, tiling.block, MASK_UNIT=1)},
            num_warps=self.layout.config.dmask_warps,
            num_stages=1,
        )  # fmt: skip
        return launch.over(programs)
