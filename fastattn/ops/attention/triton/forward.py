"""The launchers of attention's forward in Triton. The kernel is in fwd_kernel.py.

Its arguments but the pointers are bound once per combination of shapes, strides and options.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch, LaunchCache, signature
from fastattn.ops.attention.calls import ForwardCall, options_of
from fastattn.ops.attention.triton.call_shape import (
    CallShape,
    Workspace,
    architecture,
    attention_seed,
    call_shape_of,
    descriptor_templates,
    fits_descriptor,
    has_origin,
    heads_first,
    length_tensors,
    packed_of,
    row_strides_in_units,
    score_tensors,
    swizzle_group_size,
    unsupported,
)
from fastattn.ops.attention.triton.fwd_config import Features, ForwardConfig, forward_config
from fastattn.ops.attention.triton.fwd_kernel import attention_fwd_kernel
from fastattn.ops.attention.triton.mask_lists import Lists, mask_lister, mask_lists, prepared_lister
from fastattn.ops.attention.triton.tiles import TableStrides, column_hasher, column_keys_workspace


class _Plan(NamedTuple):
    """The launches of one combination of shapes, strides and options."""

    attend: Callable[..., None]
    list_tiles: Callable[..., None] | None  # of dense masks
    hash_columns: Callable[..., None] | None  # for dropout


_plans, _list_shapes = LaunchCache(), LaunchCache()
_PAGE_SIZES = (16, 32, 64, 128, 256)


def _config(shape: CallShape) -> ForwardConfig:
    wide = shape.mask_dtype is not None and shape.mask_dtype.itemsize == 8
    features = Features(shape.mask is not None, shape.dropout_p > 0.0, wide, shape.page > 0)
    return forward_config(shape.arch, shape.dtype, shape.D, shape.E, shape.M, features)


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    if call.block_table is not None and call.k.shape[2] not in _PAGE_SIZES:
        return f"handles pages of {', '.join(map(str, _PAGE_SIZES))} keys, got {call.k.shape[2]}"
    return unsupported(call)


def attention_fwd_workspace(call: ForwardCall) -> Workspace:
    return _workspace(None, call)


def _workspace(config: ForwardConfig | None, call: ForwardCall) -> Workspace:
    """The lists of tiles of a dense mask; the keys of columns for dropout."""
    workspace: Workspace = []
    if call.mask is not None:
        q, sizes = call.q, (call.q.shape, call.k.shape, call.v.shape, signature(call.block_table))
        tiling = config or architecture(q)
        key = tiling, q.dtype, *sizes, signature(call.mask), call.dropout_p > 0.0
        shape = _list_shapes.get(key)
        if shape is None:
            shape = call_shape_of(call)
            shape = _list_shapes.remember(key, _lists(config or _config(shape), shape).shape)
        workspace.append((shape, torch.int32, False))
    if call.dropout_p > 0.0:
        packed = call.cu_seqlens_k is not None
        workspace.append(column_keys_workspace(call.max_seqlen_k if packed else call.k.shape[2]))
    return workspace


def _lists(c: ForwardConfig, shape: CallShape) -> Lists:
    assert shape.mask is not None
    return mask_lists(shape.mask, shape.M, shape.N, c.BLOCK_M, c.BLOCK_N)


def attention_fwd(call: ForwardCall, out: Tensor, lse: Tensor, *workspace: Tensor) -> None:
    _run(None, call, out, lse, workspace)


def attention_fwd_with_config(
    config: ForwardConfig, call: ForwardCall, out: Tensor, lse: Tensor
) -> None:
    """attention_fwd in a given tiling, to tune and test; allocates its workspace."""
    workspace = [
        call.q.new_empty(shape, dtype=dtype) for shape, dtype, _ in _workspace(config, call)
    ]
    _run(config, call, out, lse, workspace)


def _run(
    config: ForwardConfig | None,
    call: ForwardCall,
    out: Tensor,
    lse: Tensor,
    workspace: Sequence[Tensor],
) -> None:
    if lse.numel() == 0:
        return
    q, k, v, mask, mask_tiles = call[:5]
    table, packed = call.block_table, packed_of(call)
    lengths, changes = length_tensors(call), score_tensors(call)
    seed, stream = attention_seed(call.dropout_seed), call.dropout_stream
    key = (
        config or architecture(q), q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(),
        v.shape, v.stride(), out.stride(), signature(mask), signature(mask_tiles),
        *map(signature, (*lengths, table, *changes)), packed, *options_of(call), has_origin(seed),
        (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.remember(key, _bind(config, call, out, key[-1]))
    lists = keys = None
    if plan.list_tiles is not None:
        lists = workspace[0]
        plan.list_tiles(mask if mask_tiles is None else mask_tiles, lists)
    if plan.hash_columns is not None:
        keys = workspace[-1]
        plan.hash_columns(seed, keys, stream)
    plan.attend(
        q, k, v, k, v, mask, lists, lengths, table, changes,
        None if keys is None else seed, keys, out, lse, stream,
    )  # fmt: skip


def _bind(config: ForwardConfig | None, call: ForwardCall, out: Tensor, aligned: bool) -> _Plan:
    """aligned: whether k and v are, for descriptors."""
    q, k, v, table, shape = call.q, call.k, call.v, call.block_table, call_shape_of(call)
    packed = shape.packed
    if packed is not None:
        q, k, v, out = map(heads_first, (q, k, v, out))
    c = config or _config(shape)
    list_tiles, list_numbers = None, (0, 0, 0, 0)
    if shape.mask is not None:
        lists = _lists(c, shape)
        list_numbers = (*lists.strides, lists.inner)
        if call.mask_tiles is None:
            list_tiles = mask_lister(shape.mask, lists, shape.M, shape.N, c.BLOCK_M, c.BLOCK_N)
        else:
            list_tiles = prepared_lister(lists, call.mask_tiles, shape.M, shape.N)
    # A batch entry behind the last sequence clears the rows behind it.
    heads = (shape.B if packed is None else shape.B + 1) * shape.H
    unit, strides = row_strides_in_units(q, k, v, out)
    d, e = c.widths(shape.D), c.value_widths(shape.E)
    tma = (
        c.tma
        and aligned
        and table is None
        and d[1] == e[1] == 0
        and fits_descriptor(k)
        and fits_descriptor(v)
    )
    read_k, read_v = (k, v) if packed is None else (k[0], v[0])
    head_bytes = shape.N * (shape.D + shape.E) * k.element_size()
    scale = shape.scale
    attend = BoundLaunch(
        attention_fwd_kernel,
        (
            *strides, shape.mask_strides, *list_numbers, shape.length_strides,
            None if table is None else TableStrides(*table.stride()), shape.H, shape.group,
            shape.M, shape.N // shape.mask_unit, shape.rows, heads,
            swizzle_group_size(shape.limits, head_bytes, shape.group, heads),
            *shape._replace(scale=abs(scale) or 1.0).numbers,
        ),
        {
            "Q_FACTOR": (scale > 0) - (scale < 0),
            "OVERLAP": c.overlap,
            "CASE": shape.constants(
                c.BLOCK_M, c.BLOCK_N, d, e, UNIT=unit, PRECISION=c.precision, STAGES=c.stages,
                EDGE_STAGES=c.edge_stages, DEAD=shape.dead_keys, TMA=tma,
                RAGGED=packed is not None or shape.N % c.BLOCK_N != 0,
            ),
        },
        {
            3: descriptor_templates(read_k, c.BLOCK_N, d)[0] if tma else None,
            4: descriptor_templates(read_v, c.BLOCK_N, e)[0] if tma else None,
        },
        # In vectors: through descriptors, or 16 bytes at a time.
        **c.options(tma or (aligned and unit > 1 and shape.D % 8 == shape.E % 8 == 0)),
    )  # fmt: skip
    return _Plan(
        attend.over(triton.cdiv(shape.M, c.BLOCK_M) * heads), list_tiles,
        column_hasher(shape.N) if shape.dropout_p > 0.0 else None,
    )  # fmt: skip
