"""The Triton attention forward: its launchers. The kernel is in fwd_kernel.py.

What follows from shapes, strides and options is worked out once per combination and remembered as a
bound launch; a call then only passes pointers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastattn.ops._triton_launch import BoundLaunch, DescriptorTemplate, LaunchCache, signature
from fastattn.ops.attention.calls import ForwardCall, PackedForwardCall
from fastattn.ops.attention.triton.fwd_config import Features, ForwardConfig, forward_config
from fastattn.ops.attention.triton.fwd_kernel import attention_fwd_kernel
from fastattn.ops.attention.triton.mask_lists import mask_lister, mask_lists, prepared_lister
from fastattn.ops.attention.triton.operands import (
    architecture,
    describable,
    descriptor_templates,
    dropout_kind,
    mask_steps,
    row_strides,
    stride_unit,
    swizzle_group_size,
    unsupported,
)
from fastattn.ops.attention.triton.tiles import (
    DiagonalBounds,
    column_hasher,
    column_keys_workspace,
    diagonal_bounds,
    dropout_numbers,
    mask_shape,
    packed_diagonal_bounds,
    shared_lines,
)


class _Plan(NamedTuple):
    """All that follows from shapes, strides and options. classify: for dense masks. hash_columns:
    for dropout.
    """

    attend: Callable[..., None]
    classify: Callable[..., None] | None
    hash_columns: Callable[..., None] | None


_Workspace = list[tuple[tuple[int, ...], torch.dtype, bool]]

_plans = LaunchCache()


def _config(call: ForwardCall, limits: DiagonalBounds) -> ForwardConfig:
    q = call.q
    lengths = call.key_lengths is not None or call.query_lengths is not None
    bounded = limits.has_low or limits.has_high
    wide = call.mask is not None and call.mask.dtype.itemsize == 8
    features = Features(bounded, lengths, call.mask is not None, call.dropout_p > 0.0, wide)
    D, E = q.shape[3], call.v.shape[3]
    return forward_config(architecture(q), q.dtype, D, E, q.shape[2], features)


def _diagonal_bounds(call: ForwardCall) -> DiagonalBounds:
    M, N = call.q.shape[2], call.k.shape[2]
    return diagonal_bounds(call.causal, call.window_left, call.window_right, M, N)


def attention_fwd_unsupported(call: ForwardCall) -> str | None:
    return unsupported(call.mask, call.q, call.k, call.v)


def attention_fwd_workspace(call: ForwardCall) -> _Workspace:
    return _workspace(None, call)


def _workspace(config: ForwardConfig | None, call: ForwardCall) -> _Workspace:
    """The lists of tiles of a dense mask; the keys of columns for dropout."""
    workspace: _Workspace = []
    if call.mask is not None:
        tiling = config or _config(call, _diagonal_bounds(call))
        workspace.append((_list_shape(tiling, call), torch.int32, False))
    if call.dropout_p > 0.0:
        workspace.append(column_keys_workspace(call.k.shape[2]))
    return workspace


def _list_shape(c: ForwardConfig, call: ForwardCall) -> tuple[int, ...]:
    assert call.mask is not None
    M, N = call.q.shape[2], call.k.shape[2]
    return mask_lists(mask_shape(call.mask), M, N, c.BLOCK_M, c.BLOCK_N).shape


def attention_fwd(call: ForwardCall, out: Tensor, lse: Tensor, *workspace: Tensor) -> None:
    _run(None, call, out, lse, workspace)


def attention_fwd_with_config(
    config: ForwardConfig, call: ForwardCall, out: Tensor, lse: Tensor
) -> None:
    """attention_fwd in a given tiling, to tune and test; allocates its own scratch memory."""
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
    (
        q, k, v, mask, mask_tiles, key_lengths, query_lengths, *options, dropout_p, dropout_seed,
        dropout_stream,
    ) = call  # fmt: skip
    key = (
        config or architecture(q), q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(),
        v.shape, v.stride(), out.stride(), signature(mask), signature(mask_tiles),
        signature(key_lengths), signature(query_lengths), *options, dropout_p,
        (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        limits = _diagonal_bounds(call)
        plan = _bind(config or _config(call, limits), limits, call, out, key[-1])
        _plans.remember(key, plan)
    lists = keys = None
    if plan.classify is not None:
        lists = workspace[0]
        plan.classify(mask if mask_tiles is None else mask_tiles, lists)
    if plan.hash_columns is not None:
        keys = workspace[-1]
        plan.hash_columns(dropout_seed, keys, dropout_stream)
    plan.attend(
        q, k, v, k, v, mask, lists, key_lengths, query_lengths,
        None if keys is None else dropout_seed, keys, out, lse, dropout_stream,
    )  # fmt: skip


def _dead_keys(call: ForwardCall, limits: DiagonalBounds) -> bool:
    """Whether there may be keys that no query attends: their values may be NaN."""
    restricted = (call.mask, call.key_lengths, call.query_lengths)
    if any(x is not None for x in restricted):
        return True
    M, N = call.q.shape[2], call.k.shape[2]
    return limits.low > 0 or (limits.has_high and M - 1 + limits.high < N - 1)


def _bind(
    c: ForwardConfig, limits: DiagonalBounds, call: ForwardCall, out: Tensor, aligned: bool
) -> _Plan:
    q, k, v, mask, mask_tiles, key_lengths, query_lengths, *_ = call
    (B, H, M, D), (K, N), E = q.shape, k.shape[1:3], v.shape[3]
    shape, classify, lists_strides = None, None, (0, 0, 0, 0)
    mask_unit, dense_strides = mask_steps((0, 0, 0, 0), 1)
    if mask is not None:
        shape = mask_shape(mask)
        mask_unit, dense_strides = mask_steps(shape.strides, N)
        lists = mask_lists(shape, M, N, c.BLOCK_M, c.BLOCK_N)
        lists_strides = (*lists.strides, lists.inner)
        if mask_tiles is None:
            classify = mask_lister(shape, lists, M, N, c.BLOCK_M, c.BLOCK_N)
        else:
            classify = prepared_lister(lists, mask_tiles, M, N)
    per_query = key_lengths is not None and key_lengths.dim() == 2
    strides = row_strides(q) + row_strides(k) + row_strides(v) + row_strides(out)
    descriptors = _descriptors(c, k, v, aligned)
    scalars = _scalars(
        strides, (*dense_strides, *lists_strides),
        (
            0 if key_lengths is None else key_lengths.stride(0),
            key_lengths.stride(1) if per_query and key_lengths is not None else 0,
            0 if query_lengths is None else query_lengths.stride(0),
        ),
        (H, H // K, M, N // mask_unit, B * H),
        swizzle_group_size(limits, N * (D + E) * k.element_size(), H // K, B * H), limits,
        call.scale, call.dropout_p,
    )  # fmt: skip
    constants = _constants(
        c, strides, limits, q, E, call.scale, call.dropout_p, descriptors[3] is not None,
        KEY_LENGTHS=0 if key_lengths is None else key_lengths.dim(),
        QUERY_LENGTHS=query_lengths is not None,
        MASK_UNIT=mask_unit,
        DENSE=mask is not None,
        BIAS=mask is not None and mask.dtype != torch.bool,
        SHARED=0 if shape is None else shared_lines(shape),
        DEAD_KEYS=_dead_keys(call, limits),
        RAGGED=N % c.BLOCK_N != 0,
    )  # fmt: skip
    options = c.options(_in_vectors(constants, aligned))
    attend = BoundLaunch(attention_fwd_kernel, scalars, constants, descriptors, **options)
    programs = triton.cdiv(M, c.BLOCK_M) * B * H
    return _Plan(attend.over(programs), classify, _hash_columns(call.dropout_p, N))


def _hash_columns(dropout_p: float, N: int) -> Callable[..., None] | None:
    return column_hasher(N) if dropout_p > 0.0 else None


def _descriptors(
    c: ForwardConfig, k: Tensor, v: Tensor, aligned: bool
) -> Mapping[int, DescriptorTemplate | None]:
    """By the position of the kernel's argument; none where descriptors are not wanted or cannot
    cover what is read.
    """
    widths = c.widths(k.shape[-1]), c.widths(v.shape[-1])
    one_tile_each = widths[0][1] == 0 and widths[1][1] == 0
    if not (c.tma and aligned and one_tile_each and describable(k) and describable(v)):
        return {3: None, 4: None}
    return {
        3: descriptor_templates(k, c.BLOCK_N, widths[0])[0],
        4: descriptor_templates(v, c.BLOCK_N, widths[1])[0],
    }


def _in_vectors(constants: Mapping[str, Any], aligned: bool) -> bool:
    """Whether K and V are read through descriptors, or else 16 bytes at a time."""
    whole_rows = constants["D"] % 8 == constants["E"] % 8 == 0
    return constants["TMA"] or (aligned and constants["STRIDE_UNIT"] > 1 and whole_rows)


def _scalars(
    strides: tuple[int, ...],
    mask_strides: tuple[int, ...],
    length_strides: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    swizzle_group: int,
    limits: DiagonalBounds,
    scale: float,
    dropout_p: float,
) -> tuple[float, ...]:
    """The kernel's numbers in order. sizes: H, heads a group, M, N, heads of the whole grid."""
    unit = stride_unit(strides)
    threshold, keep_factor = dropout_numbers(dropout_p)
    return (
        *(stride // unit for stride in strides), *mask_strides, *length_strides, *sizes,
        swizzle_group, limits.low, limits.high, abs(scale) or 1.0, threshold, keep_factor,
    )  # fmt: skip


def _constants(
    c: ForwardConfig,
    strides: tuple[int, ...],
    limits: DiagonalBounds,
    q: Tensor,
    E: int,
    scale: float,
    dropout_p: float,
    tma: bool,
    *,
    KEY_LENGTHS: int,
    QUERY_LENGTHS: bool = False,
    MASK_UNIT: int = 1,
    DENSE: bool = False,
    BIAS: bool = False,
    SHARED: int = 0,
    DEAD_KEYS: bool = True,
    FROM_END: bool = False,
    RAGGED: bool = True,
) -> dict[str, Any]:
    """The kernel's compile-time parameters in order."""
    D = q.shape[-1]
    (D0, D1), (E0, E1) = c.widths(D), c.widths(E)
    return {
        "STRIDE_UNIT": stride_unit(strides),
        "MASK_UNIT": MASK_UNIT,
        "HAS_LOW": limits.has_low,
        "HAS_HIGH": limits.has_high,
        "KEY_LENGTHS": KEY_LENGTHS,
        "QUERY_LENGTHS": QUERY_LENGTHS,
        "DENSE": DENSE,
        "BIAS": BIAS,
        "SHARED": SHARED,
        "DEAD_KEYS": DEAD_KEYS,
        "FROM_END": FROM_END,
        "DROPOUT": dropout_kind(q, dropout_p),
        "RAGGED": RAGGED,
        "Q_FACTOR": (scale > 0) - (scale < 0),
        "TMA": tma,
        "PRECISION": c.precision,
        "D": D,
        "D0": D0,
        "D1": D1,
        "E": E,
        "E0": E0,
        "E1": E1,
        "BLOCK_M": c.BLOCK_M,
        "BLOCK_N": c.BLOCK_N,
        "STAGES": c.stages,
        "EDGE_STAGES": c.edge_stages,
        "OVERLAP": c.overlap,
    }


# -- packed sequences -----------------------------------------------------------------------------


def attention_varlen_fwd_unsupported(call: PackedForwardCall) -> str | None:
    # As [1, heads, tokens, dim].
    return unsupported(None, *(x.transpose(0, 1)[None] for x in (call.q, call.k, call.v)))


def attention_varlen_fwd_workspace(call: PackedForwardCall) -> _Workspace:
    return [column_keys_workspace(call.max_seqlen_k)] if call.dropout_p > 0.0 else []


def attention_varlen_fwd(
    call: PackedForwardCall, out: Tensor, lse: Tensor, *workspace: Tensor
) -> None:
    """lse [H, T]; the offsets are contiguous."""
    if lse.numel() == 0:
        return
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options, dropout_p, dropout_seed, dropout_stream = call
    key = (
        architecture(q), q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape,
        v.stride(), out.stride(), signature(cu_seqlens_q), signature(cu_seqlens_k), *options,
        dropout_p, (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans.remember(key, _bind_packed(call, out, key[-1]))
    keys = None
    if plan.hash_columns is not None:
        keys = workspace[-1]
        plan.hash_columns(dropout_seed, keys, dropout_stream)
    plan.attend(
        q, k, v, k, v, None, None, cu_seqlens_k, cu_seqlens_q,
        None if keys is None else dropout_seed, keys, out, lse, dropout_stream,
    )  # fmt: skip


def _bind_packed(call: PackedForwardCall, out: Tensor, aligned: bool) -> _Plan:
    q, k, v = call.q, call.k, call.v
    (T, H, D), K, E = q.shape, k.shape[1], v.shape[2]
    entries = call.cu_seqlens_q.numel()  # the sequences, and one more for the rows behind them
    limits = packed_diagonal_bounds(call.causal, call.window_left, call.window_right)
    features = Features(limits.has_low or limits.has_high, True, False, call.dropout_p > 0.0)
    M, N = max(1, call.max_seqlen_q), call.max_seqlen_k
    c = forward_config(architecture(q), q.dtype, D, E, M, features)
    strides = tuple(
        stride for x in (q, k, v, out) for stride in (0, *reversed(row_strides(x)))
    )  # batch, head, row
    descriptors = _descriptors(c, k, v, aligned)
    scalars = _scalars(
        strides, (0,) * 8, (0, 0, T), (H, H // K, M, N, entries * H),
        swizzle_group_size(limits, N * (D + E) * k.element_size(), H // K, entries * H), limits,
        call.scale, call.dropout_p,
    )  # fmt: skip
    constants = _constants(
        c, strides, limits, q, E, call.scale, call.dropout_p, descriptors[3] is not None,
        KEY_LENGTHS=3, FROM_END=call.causal == 2,
    )  # fmt: skip
    options = c.options(_in_vectors(constants, aligned))
    attend = BoundLaunch(attention_fwd_kernel, scalars, constants, descriptors, **options)
    programs = triton.cdiv(M, c.BLOCK_M) * entries * H
    return _Plan(attend.over(programs), None, _hash_columns(call.dropout_p, N))
