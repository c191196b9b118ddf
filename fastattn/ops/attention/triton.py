"""Attention in Triton, the portable GPU path: the launchers of the forward, whose kernel is in
triton_fwd_kernel.py, and those of the backward from triton_bwd.py.

What follows from shapes, strides and options is worked out once per combination and remembered as a
bound launch; a call then only passes pointers.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastattn.ops import _env
from fastattn.ops.attention.config import Features, ForwardConfig, forward_config
from fastattn.ops.attention.triton_bwd import (  # noqa: F401  (the other half of this backend)
    attention_bwd,
    attention_bwd_unsupported,
    attention_bwd_workspace,
    attention_varlen_bwd,
    attention_varlen_bwd_unsupported,
    attention_varlen_bwd_workspace,
)
from fastattn.ops.attention.triton_fwd_kernel import attention_fwd_kernel
from fastattn.ops.attention.triton_launch import BoundLaunch, LaunchCache, signature, unsupported
from fastattn.ops.attention.triton_tiles import (
    Band,
    band,
    dropout_numbers,
    mask_classifier,
    mask_shape,
    prepared_lister,
    tile_lists,
)

# Keys and values of the heads that run at the same time should stay in the L2 cache.
_SECTION_BYTES = 32 << 20


def _config(
    q: Tensor,
    v: Tensor,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    limits: Band,
    dropout_p: float,
) -> ForwardConfig:
    arch = _env.architecture(q.device.type, q.device.index or 0)
    lengths = key_lengths is not None or query_lengths is not None
    banded = limits.has_low or limits.has_high
    features = Features(banded, lengths, mask is not None, dropout_p > 0.0)
    return forward_config(arch, q.dtype, q.shape[3], v.shape[3], q.shape[2], features)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all but the last dimension, 0 where there is nothing to step over."""
    sizes, strides = x.shape, x.stride()
    return tuple(0 if sizes[d] <= 1 else strides[d] for d in range(x.dim() - 1))


def _stride_unit(strides: tuple[int, ...]) -> int:
    return 8 if all(stride % 8 == 0 for stride in strides) else 1


def _describable(c: ForwardConfig, x: Tensor) -> bool:
    """Whether tensor descriptors are wanted and can cover x: one tile a row, steps of 16 bytes,
    nothing expanded.
    """
    if not c.tma or x.numel() == 0 or c.widths(x.shape[-1])[1] > 0:
        return False
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    steps = [stride * x.element_size() for size, stride in pairs if size > 1]
    return all(step > 0 and step % 16 == 0 for step in steps)


def _descriptor(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A template over tensors like x, [B, K, N, D] or packed [S, K, D]: blocks of one head's rows,
    0 in columns beyond D.
    """
    block = [1, 1, rows, width] if x.dim() == 4 else [rows, 1, width]
    # Torch leaves strides of size-1 dimensions undefined, the hardware wants multiples of 16 bytes.
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    steps = [16 if size == 1 else stride for size, stride in pairs]
    template = TensorDescriptor(x, list(x.shape), [*steps, 1], block)
    template.base = None  # what is remembered must not keep memory alive
    return template


def _descriptors(
    c: ForwardConfig, k: Tensor, v: Tensor, tma: bool
) -> dict[int, TensorDescriptor | None]:
    """By the position of the kernel's argument."""
    return {
        n: _descriptor(x, c.BLOCK_N, c.widths(x.shape[-1])[0]) if tma else None
        for n, x in ((3, k), (4, v))
    }


def _dead_keys(
    mask: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    limits: Band,
    M: int,
    N: int,
) -> bool:
    """Whether there may be keys that no query attends: their values may be NaN."""
    if mask is not None or key_lengths is not None or query_lengths is not None:
        return True
    return limits.low > 0 or (limits.has_high and M - 1 + limits.high < N - 1)


def _section(group: int, head_bytes: int, limits: Band) -> int:
    """How many query heads run their tiles in one long-to-short order. head_bytes: one k and v."""
    return group * max(1, _SECTION_BYTES // max(1, head_bytes)) if limits.has_high else 1


def attention_fwd_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    return unsupported(mask, q, k, v)


def attention_fwd_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> list[tuple[tuple[int, ...], torch.dtype, bool]]:
    """The lists of tiles of a dense mask."""
    if mask is None:
        return []
    M, N = q.shape[2], k.shape[2]
    limits = band(causal, window_left, window_right, M, N)
    c = _config(q, v, mask, key_lengths, query_lengths, limits, dropout_p)
    lists = tile_lists(mask_shape(mask), M, N, c.BLOCK_M, c.BLOCK_N, by_key=False)
    return [(lists.shape, torch.int32, False)]


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
    lists: Tensor | None = None,
) -> None:
    _run(
        None, q, k, v, mask, mask_tiles, key_lengths, query_lengths, causal, window_left,
        window_right, scale, dropout_p, dropout_seed, dropout_stream, out, lse, lists,
    )  # fmt: skip


def attention_fwd_with_config(config: ForwardConfig, *args: Any) -> None:
    """attention_fwd (arguments and results, no workspace) in a given tiling: to tune and test."""
    q, k, _, mask, *_ = args
    lists: Tensor | None = None
    if mask is not None:
        M, N = q.shape[2], k.shape[2]
        layout = tile_lists(mask_shape(mask), M, N, config.BLOCK_M, config.BLOCK_N, by_key=False)
        lists = q.new_empty(layout.shape, dtype=torch.int32)
    _run(config, *args, lists)  # type: ignore[call-arg]


class _Plan(NamedTuple):
    """All that follows from shapes, strides and options. classify: for dense masks."""

    attend: BoundLaunch
    classify: BoundLaunch | None


_plans = LaunchCache()


def _run(
    config: ForwardConfig | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
    lists: Tensor | None,
) -> None:
    if lse.numel() == 0:
        return
    device = q.device
    key = (
        config or _env.architecture(device.type, device.index or 0), device, q.dtype, q.shape,
        q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.stride(), signature(mask),
        signature(mask_tiles), signature(key_lengths), signature(query_lengths), causal,
        window_left, window_right, scale, dropout_p, (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        limits = band(causal, window_left, window_right, q.shape[2], k.shape[2])
        if config is None:
            config = _config(q, v, mask, key_lengths, query_lengths, limits, dropout_p)
        plan = _bind(
            config, limits, q, k, v, mask, mask_tiles, key_lengths, query_lengths, scale, dropout_p,
            out, key[-1],
        )  # fmt: skip
        _plans.remember(key, plan)
    if plan.classify is not None:
        plan.classify(mask if mask_tiles is None else mask_tiles, lists)
    plan.attend(
        q,
        k,
        v,
        k,
        v,
        mask,
        lists,
        key_lengths,
        query_lengths,
        dropout_seed if dropout_p > 0.0 else None,
        out,
        lse,
        dropout_stream,
    )


def _bind(
    c: ForwardConfig,
    limits: Band,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    mask_tiles: Tensor | None,
    key_lengths: Tensor | None,
    query_lengths: Tensor | None,
    scale: float,
    dropout_p: float,
    out: Tensor,
    aligned: bool,
) -> _Plan:
    (B, H, M, D), (K, N), E = q.shape, k.shape[1:3], v.shape[3]
    shape, classify, lists_strides = None, None, (0, 0, 0, 0)
    if mask is not None:
        shape = mask_shape(mask)
        layout = tile_lists(shape, M, N, c.BLOCK_M, c.BLOCK_N, by_key=False)
        lists_strides = (layout.stride_b, layout.stride_h, layout.stride_outer, layout.inner)
        if mask_tiles is None:
            classify = mask_classifier(shape, M, N, c.BLOCK_M, c.BLOCK_N, by_key=False)
        else:
            classify = prepared_lister(shape, mask_tiles, M, N, c.BLOCK_M, c.BLOCK_N)
    per_query = key_lengths is not None and key_lengths.dim() == 2
    strides = _strides(q) + _strides(k) + _strides(v) + _strides(out)
    tma = aligned and _describable(c, k) and _describable(c, v)
    scalars = _scalars(
        strides, (*(shape.strides if shape else (0, 0, 0, 0)), *lists_strides),
        (
            0 if key_lengths is None else key_lengths.stride(0),
            key_lengths.stride(1) if per_query and key_lengths is not None else 0,
            0 if query_lengths is None else query_lengths.stride(0),
        ),
        (H, H // K, M, N, B * H), _section(H // K, N * (D + E) * k.element_size(), limits), limits,
        scale, dropout_p,
    )  # fmt: skip
    constants = _constants(
        c, strides, limits, D, E, scale, dropout_p, tma,
        KEY_LENGTHS=0 if key_lengths is None else key_lengths.dim(),
        QUERY_LENGTHS=query_lengths is not None,
        DENSE=mask is not None,
        BIAS=mask is not None and mask.dtype != torch.bool,
        ROWS_SHARED=shape is not None and shape.sizes[2] == 1,
        DEAD_KEYS=_dead_keys(mask, key_lengths, query_lengths, limits, M, N),
        RAGGED=N % c.BLOCK_N != 0,
    )  # fmt: skip
    grid = (triton.cdiv(M, c.BLOCK_M) * B * H,)
    described = _descriptors(c, k, v, tma)
    attend = BoundLaunch(attention_fwd_kernel, grid, scalars, constants, described, **c.options())
    return _Plan(attend, classify)


def _scalars(
    strides: tuple[int, ...],
    mask_strides: tuple[int, ...],
    length_strides: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    section: int,
    limits: Band,
    scale: float,
    dropout_p: float,
) -> tuple[float, ...]:
    """The kernel's numbers in order. sizes: H, heads a group, M, N, heads of the whole grid."""
    unit = _stride_unit(strides)
    threshold, keep_factor = dropout_numbers(dropout_p)
    return (
        *(stride // unit for stride in strides), *mask_strides, *length_strides, *sizes,
        min(sizes[4], section), limits.low, limits.high, abs(scale) or 1.0, threshold, keep_factor,
    )  # fmt: skip


def _constants(
    c: ForwardConfig,
    strides: tuple[int, ...],
    limits: Band,
    D: int,
    E: int,
    scale: float,
    dropout_p: float,
    tma: bool,
    *,
    KEY_LENGTHS: int,
    QUERY_LENGTHS: bool = False,
    DENSE: bool = False,
    BIAS: bool = False,
    ROWS_SHARED: bool = False,
    DEAD_KEYS: bool = True,
    FROM_END: bool = False,
    RAGGED: bool = True,
) -> dict[str, Any]:
    """The kernel's compile-time parameters in order."""
    (D0, D1), (E0, E1) = c.widths(D), c.widths(E)
    return {
        "STRIDE_UNIT": _stride_unit(strides),
        "HAS_LOW": limits.has_low,
        "HAS_HIGH": limits.has_high,
        "KEY_LENGTHS": KEY_LENGTHS,
        "QUERY_LENGTHS": QUERY_LENGTHS,
        "DENSE": DENSE,
        "BIAS": BIAS,
        "ROWS_SHARED": ROWS_SHARED,
        "DEAD_KEYS": DEAD_KEYS,
        "FROM_END": FROM_END,
        "DROPOUT": dropout_p > 0.0,
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


def attention_varlen_fwd_unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
) -> str | None:
    # As [1, heads, tokens, dim].
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return unsupported(None, q, k, v)


def attention_varlen_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    window_left: int,
    window_right: int,
    scale: float,
    dropout_p: float,
    dropout_seed: Tensor | None,
    dropout_stream: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """q [T, H, D], k [S, K, D], v [S, K, E], offsets contiguous; lse [H, T]."""
    if lse.numel() == 0:
        return
    device = q.device
    key = (
        _env.architecture(device.type, device.index or 0), device, q.dtype, q.shape, q.stride(),
        k.shape, k.stride(), v.shape, v.stride(), out.stride(), signature(cu_seqlens_q),
        signature(cu_seqlens_k), max_seqlen_q, max_seqlen_k, causal, window_left, window_right,
        scale, dropout_p, (k.data_ptr() | v.data_ptr()) & 15 == 0,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        # Sizes differ from sequence to sequence: the diagonal's shift is added on the device.
        right = 0 if causal else window_right
        limits = Band(
            -window_left if window_left >= 0 else 0, max(right, 0), window_left >= 0, right >= 0
        )
        plan = _bind_varlen(
            limits, q, k, v, cu_seqlens_q.numel(), max_seqlen_q, max_seqlen_k, causal, scale,
            dropout_p, out, key[-1],
        )  # fmt: skip
        _plans.remember(key, plan)
    plan.attend(
        q,
        k,
        v,
        k,
        v,
        None,
        None,
        cu_seqlens_k,
        cu_seqlens_q,
        dropout_seed if dropout_p > 0.0 else None,
        out,
        lse,
        dropout_stream,
    )


def _bind_varlen(
    limits: Band,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    entries: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: int,
    scale: float,
    dropout_p: float,
    out: Tensor,
    aligned: bool,
) -> _Plan:
    """entries: the sequences, and one more for the rows behind them."""
    (T, H, D), K, E = q.shape, k.shape[1], v.shape[2]
    arch = _env.architecture(q.device.type, q.device.index or 0)
    features = Features(limits.has_low or limits.has_high, True, False, dropout_p > 0.0)
    M = max(1, max_seqlen_q)
    c = forward_config(arch, q.dtype, D, E, M, features)
    strides = tuple(
        stride for x in (q, k, v, out) for stride in (0, *reversed(_strides(x)))
    )  # batch, head, row
    tma = aligned and _describable(c, k) and _describable(c, v)
    section = _section(H // K, max_seqlen_k * (D + E) * k.element_size(), limits)
    scalars = _scalars(
        strides, (0,) * 8, (0, 0, T), (H, H // K, M, max_seqlen_k, entries * H), section, limits,
        scale, dropout_p,
    )  # fmt: skip
    constants = _constants(
        c, strides, limits, D, E, scale, dropout_p, tma, KEY_LENGTHS=3, FROM_END=causal == 2
    )
    grid = (triton.cdiv(M, c.BLOCK_M) * entries * H,)
    described = _descriptors(c, k, v, tma)
    attend = BoundLaunch(attention_fwd_kernel, grid, scalars, constants, described, **c.options())
    return _Plan(attend, None)
