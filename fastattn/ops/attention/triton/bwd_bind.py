"""The Triton attention backward: its kernels bound to everything that follows from a call's shapes,
strides and options. backward.py launches them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch, DescriptorTemplate
from fastattn.ops.attention.calls import BackwardCall, Gradients
from fastattn.ops.attention.triton import mask_lists
from fastattn.ops.attention.triton.bwd_config import BwdTile
from fastattn.ops.attention.triton.bwd_dkdv_kernel import attention_bwd_dkdv_kernel
from fastattn.ops.attention.triton.bwd_dmask_kernel import (
    attention_bwd_dmask_kernel,
    sum_splits_kernel,
)
from fastattn.ops.attention.triton.bwd_dq_kernel import attention_bwd_dq_kernel
from fastattn.ops.attention.triton.bwd_layout import Layout, Packed
from fastattn.ops.attention.triton.operands import (
    describable,
    descriptor_templates,
    dropout_kind,
    mask_steps,
    row_strides,
    stride_unit,
    swizzle_group_size,
)
from fastattn.ops.attention.triton.tiles import (
    ONE_ROW,
    column_hasher,
    dropout_numbers,
    shared_lines,
)

# One tile of keys, or bounds that leave few: summing delta over them again costs next to nothing.
_ONE_TILE, _FEW_KEYS = 64, 16

_Launch = Callable[..., None]


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


def bind(
    layout: Layout, call: BackwardCall, gradients: Gradients, aligned: bool, packed: Packed | None
) -> Plan:
    """aligned: q, k, v and dout, as descriptors want it."""
    binder = _Binder(layout, call, gradients, aligned, packed)
    need_dq, _, _, need_dmask = call.needs
    dkdv = binder.dkdv()
    classify = list_dq = list_dkdv = dmask = sum_splits = None
    if layout.classes is not None:
        assert layout.for_dq is not None and layout.for_dkdv is not None
        classify = mask_lists.classifier(
            layout.classes, call.mask, layout.shape, call.mask_tiles, call.key_lengths,
            call.query_lengths, layout.limits, binder.M, binder.N, binder.mask_strides,
            binder.length_strides,
        )  # fmt: skip
        if need_dq or binder.exact_delta:
            list_dq = mask_lists.tile_lister(layout.classes, layout.for_dq, False)
        if dkdv:
            list_dkdv = mask_lists.tile_lister(layout.classes, layout.for_dkdv, True)
    if need_dmask:
        dmask, sum_splits = binder.dmask()
    loops_over_keys = call.dout is not None and (need_dq or binder.exact_delta)
    hash_columns = column_hasher(binder.N) if call.dropout_p > 0.0 and loops_over_keys else None
    return Plan(classify, list_dq, list_dkdv, hash_columns, binder.dq(), dkdv, dmask, sum_splits)


class _Binder:
    """What the kernels' arguments have in common, and each kernel's own."""

    def __init__(
        self,
        layout: Layout,
        call: BackwardCall,
        gradients: Gradients,
        aligned: bool,
        packed: Packed | None,
    ):
        self.layout, self.call, self.gradients = layout, call, gradients
        self.aligned, self.packed = aligned, packed
        (self.B, self.H, self.M, D), (self.K, self.N) = call.q.shape, call.k.shape[1:3]
        E = call.v.shape[3]
        self.rows = self.M
        # Offsets of packed sequences are no lengths to the kernels' constants.
        self.key_lengths, self.query_lengths = call.key_lengths, call.query_lengths
        if packed is not None:
            self.B, self.M, self.N = packed.sequences, packed.M, packed.N
            self.key_lengths = self.query_lengths = None
        self.group = self.H // self.K
        self.D, self.E = D, E
        self.widths = layout.config.widths(D), layout.config.widths(E)
        self.mask_strides = (0, 0, 0, 0) if layout.shape is None else layout.shape.strides
        self.mask_unit, self.mask_steps = 1, self.mask_strides
        if layout.shape is not None:
            self.mask_unit, self.mask_steps = mask_steps(self.mask_strides, self.N)
        self.length_strides = self._length_strides()

    # -- numbers -----------------------------------------------------------------------------------

    def _length_strides(self) -> tuple[int, int, int]:
        keys, queries = self.key_lengths, self.query_lengths
        return (
            0 if keys is None else keys.stride(0),
            keys.stride(1) if keys is not None and keys.dim() == 2 else 0,
            0 if queries is None else queries.stride(0),
        )

    @cached_property
    def unit(self) -> int:
        return stride_unit([stride for x in self._operands for stride in row_strides(x)])

    @property
    def _operands(self) -> Sequence[Tensor | None]:
        call, (dq, dk, dv, _), (need_dq, need_dk, need_dv, _) = (
            self.call, self.gradients, self.call.needs,
        )  # fmt: skip
        return (
            call.q, call.k, call.v, call.out, call.dout, dq if need_dq else None,
            dk if need_dk else None, dv if need_dv else None,
        )  # fmt: skip

    def strides(self, *operands: int) -> tuple[int, ...]:
        """Of those of `_operands`, as the kernels get them."""
        found = (self._operands[n] for n in operands)
        return tuple(stride // self.unit for x in found for stride in row_strides(x))

    @property
    def numbers(self) -> tuple[float, ...]:
        limits, call = self.layout.limits, self.call
        return limits.low, limits.high, call.scale, *dropout_numbers(call.dropout_p)

    @property
    def class_strides(self) -> tuple[int, int, int, int]:
        c = self.layout.classes
        return (0, 0, 0, 0) if c is None else (*c.shared_strides, c.tiles_m, c.keys)

    @staticmethod
    def list_strides(lists: mask_lists.Lists | None) -> tuple[int, int, int]:
        return (0, 0, 0) if lists is None else lists.strides

    def swizzle_group(self, x: Tensor, y: Tensor, group: int, heads: int) -> int:
        """x and y are what a head reads again and again."""
        head_bytes = x.shape[2] * (x.shape[3] + y.shape[3]) * x.element_size()
        return swizzle_group_size(self.layout.limits, head_bytes, group, heads)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def has_lengths(self) -> bool:
        return self.key_lengths is not None or self.packed is not None

    @property
    def has_query_lengths(self) -> bool:
        return self.query_lengths is not None or self.packed is not None

    @property
    def restricted(self) -> bool:
        limits = self.layout.limits
        return self.has_lengths or self.has_query_lengths or limits.has_low or limits.has_high

    @property
    def dead_rows(self) -> bool:
        """Rows without a key lie beyond their length, or where the bounds hold none."""
        limits = self.layout.limits
        dead = self.layout.classes is not None or self.has_query_lengths
        dead |= limits.has_high and limits.high < 0
        return dead or (limits.has_low and (self.has_lengths or limits.low > self.N - self.M))

    @property
    def dead_keys(self) -> bool:
        """Keys without a row lie beyond their length, or where the bounds hold none."""
        limits = self.layout.limits
        dead = self.layout.classes is not None or self.has_lengths
        dead |= limits.has_high and (self.has_query_lengths or limits.high < self.N - self.M)
        return dead or (limits.has_low and limits.low > 0)

    @cached_property
    def exact_delta(self) -> bool:
        """delta carries out's rounding. That shows where gradients are more precise than out, or
        vanish in theory: in a mask's column of all keys, and in rows of very few keys.
        """
        call, limits, dmask = self.call, self.layout.limits, self.gradients.dmask
        if call.dout is None or call.out.dtype.itemsize >= 4:
            return False
        bounded = limits.has_low and limits.has_high
        if self.N <= _ONE_TILE or (bounded and limits.high - limits.low < _FEW_KEYS):
            return True
        finer = dmask.dtype.itemsize > call.out.dtype.itemsize
        return call.needs[3] and (finer or dmask.shape[3] == 1)

    # -- constants ---------------------------------------------------------------------------------

    @property
    def restrictions(self) -> dict[str, Any]:
        limits, keys = self.layout.limits, self.key_lengths
        return {
            "HAS_LOW": limits.has_low,
            "HAS_HIGH": limits.has_high,
            "KEY_LENGTHS": 0 if keys is None else keys.dim(),
            "QUERY_LENGTHS": self.query_lengths is not None,
        }

    @property
    def of_packing(self) -> dict[str, Any]:
        return {
            "PACKED": self.packed is not None,
            "FROM_END": self.packed is not None and self.packed.from_end,
        }

    @property
    def of_mask(self) -> dict[str, Any]:
        mask, shape = self.call.mask, self.layout.shape
        bias = mask is not None and mask.dtype != torch.bool
        return {
            "DENSE": mask is not None,
            "BIAS": bias,
            # The lowest value of these makes exp of any score 0, without a comparison.
            "BY_VALUE": mask is not None and mask.dtype in (torch.bfloat16, torch.float32),
            "SHARED": 0 if shape is None else shared_lines(shape),
            "DROPOUT": dropout_kind(self.call.q, self.call.dropout_p),
            "NATURAL": self.call.q.dtype == torch.float32 or bias,
        }

    @property
    def of_widths(self) -> dict[str, Any]:
        (D0, D1), (E0, E1) = self.widths
        return {
            "PRECISION": self.layout.config.precision,
            "D": self.D, "D0": D0, "D1": D1, "E": self.E, "E0": E0, "E1": E1,
        }  # fmt: skip

    def sizes(self, tile: BwdTile) -> dict[str, Any]:
        return {
            **self.of_widths,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.stages,
            "EDGE_STAGES": tile.edge_stages,
        }

    def descriptors(
        self, first: int, x: Tensor, y: Tensor | None, rows: int, tma: bool
    ) -> Mapping[int, DescriptorTemplate | None]:
        """Two descriptors of x and two of y, by the position of the kernel's argument."""
        if not tma:
            return dict.fromkeys(range(first, first + 4))
        found = (
            *descriptor_templates(x, rows, self.widths[0]),
            *descriptor_templates(y, rows, self.widths[1]),
        )
        return {first + n: template for n, template in enumerate(found)}

    # -- the kernels -------------------------------------------------------------------------------

    def _by_tma(self, tile: BwdTile) -> bool:
        """Without dout ptxas 12.8 breaks down over descriptors of a single row."""
        return tile.tma and self.aligned and self.call.dout is not None

    def dq(self) -> _Launch:
        call, layout, tile = self.call, self.layout, self.layout.config.dq
        lists, heads = layout.for_dq, self.B * self.H
        read_v = None if call.dout is None else call.v
        tma = self._by_tma(tile) and call.needs[0]
        tma = tma and describable(call.k) and describable(read_v)
        launch = BoundLaunch(
            attention_bwd_dq_kernel,
            (
                *self.strides(0, 1, 2, 3, 4, 5), *self.mask_steps, *self.class_strides,
                *self.list_strides(lists), *self.length_strides, self.H, self.group, self.M,
                self.N // self.mask_unit, layout.padded_m, self.rows, heads,
                self.swizzle_group(call.k, call.v, self.group, heads), *self.numbers,
            ),
            {
                "STRIDE_UNIT": self.unit,
                "MASK_UNIT": self.mask_unit,
                "NEED_DQ": call.needs[0],
                "HAS_DOUT": call.dout is not None,
                "HAS_DLSE": call.dlse is not None,
                "EXACT_DELTA": self.exact_delta,
                **self.restrictions,
                **self.of_packing,
                "LISTS": layout.classes is not None,
                "FACTOR_M": 1 if lists is None else lists.factor_outer,
                "FACTOR_N": 1 if lists is None else lists.factor_inner,
                **self.of_mask,
                "EDGES": self.restricted or self.N % tile.block_n != 0,
                "DEAD_KEYS": self.dead_keys,
                "TMA": tma,
                **self.sizes(tile),
            },
            self.descriptors(5, call.k, read_v, tile.block_n, tma),
            **tile.options(tma),
        )  # fmt: skip
        return launch.over(triton.cdiv(self.M, tile.block_m) * heads)

    def dkdv(self) -> tuple[tuple[_Launch, bool, bool], ...]:
        _, need_dk, need_dv, _ = self.call.needs
        passes = [(need_dk, need_dv)]
        if self.layout.config.separate and need_dk and need_dv:
            passes = [(True, False), (False, True)]
        return tuple((self._dkdv(*each), *each) for each in passes if any(each))

    def _dkdv(self, need_dk: bool, need_dv: bool) -> _Launch:
        call, layout, tile = self.call, self.layout, self.layout.config.dkdv
        lists, c, heads = layout.for_dkdv, layout.classes, self.B * self.K
        tma = self._by_tma(tile) and describable(call.q) and describable(call.dout)
        launch = BoundLaunch(
            attention_bwd_dkdv_kernel,
            (
                *self.strides(0, 1, 2, 4, 6, 7), *self.mask_steps, *self.class_strides,
                self.group if c is not None and c.heads > 1 else 1, *self.list_strides(lists),
                *self.length_strides, self.H, self.K, self.group, self.M, self.N // self.mask_unit,
                layout.padded_m, heads, self.swizzle_group(call.q, call.v, 1, heads), *self.numbers,
            ),
            {
                "STRIDE_UNIT": self.unit,
                "MASK_UNIT": self.mask_unit,
                "NEED_DK": need_dk,
                "NEED_DV": need_dv,
                "HAS_DOUT": call.dout is not None,
                **self.restrictions,
                **self.of_packing,
                "LISTS": c is not None,
                "FACTOR_N": 1 if lists is None else lists.factor_outer,
                **self.of_mask,
                "EDGES": self.restricted or self.M % tile.block_m != 0,
                "DEAD_ROWS": self.dead_rows,
                "LATE": tile.late,
                "TMA": tma,
                **self.sizes(tile),
            },
            self.descriptors(4, call.q, call.dout, tile.block_m, tma),
            **tile.options(tma),
        )  # fmt: skip
        return launch.over(triton.cdiv(self.N, tile.block_n) * heads)

    def dmask(self) -> tuple[_Launch, _Launch | None]:
        """And the sum of its shares, where there are several."""
        layout, c, sums = self.layout, self.layout.classes, self.layout.sums
        assert c is not None and sums is not None
        result_strides = self.gradients.dmask.stride()
        _, sh, sm, sn = sums.sizes
        target: tuple[int, ...] = (0, *result_strides)
        sum_splits = None
        if sums.splits > 1:
            elements = prod(sums.sizes)
            target = (elements, sh * sm * sn, sm * sn, sn, 1)
            add = BoundLaunch(
                sum_splits_kernel,
                (*result_strides, sh, sm, sn, elements, sums.splits),
                {"BLOCK": 1024},
            )
            sum_splits = add.over(triton.cdiv(elements, 1024))
        of_mask = self.of_mask
        launch = BoundLaunch(
            attention_bwd_dmask_kernel,
            (
                *self.strides(0, 1, 2, 4), *self.mask_strides, *target, *c.shared_strides,
                c.tiles_n, *self.length_strides, self.H, self.group, self.M, self.N,
                layout.padded_m, *sums.owned[1:], *sums.summed, sums.splits, sums.per_split,
                *self.numbers,
            ),
            {
                "STRIDE_UNIT": self.unit,
                "HAS_DOUT": self.call.dout is not None,
                **self.restrictions,
                "ROWS_SHARED": of_mask["SHARED"] == ONE_ROW.value,
                "DROPOUT": of_mask["DROPOUT"],
                "SUM_ROWS": sm == 1,
                "SUM_COLUMNS": sn == 1,
                **self.of_widths,
                "BLOCK_M": c.block_m,
                "BLOCK_N": c.block_n,
            },
            num_warps=layout.config.dmask_warps,
            num_stages=1,
        )  # fmt: skip
        return launch.over(prod(sums.owned) * sums.splits), sum_splits
