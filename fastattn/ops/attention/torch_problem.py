"""The arguments of aten's attention kernels: the restrictions and biases of a call as one additive
mask and a causal flag, and inputs in which dead positions cannot affect results.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattn.ops.attention.calls import AnyCall, BackwardCall, CausalKind, has_pattern, has_window

# If the norm of a tensor is smaller, products with its dead values stay finite.
_SAFE_NORM = 1e6


class Problem(NamedTuple):
    """The arguments of aten's kernels. scale is positive; `sign` (-1, 0 or 1) is multiplied into q,
    and must be multiplied into dq.
    """

    q: Tensor  # [B, H, M, D]
    k: Tensor  # [B, K, N, D]
    v: Tensor  # [B, K, N, E]
    bias: Tensor | None  # broadcastable to [B, H, M, N], -inf where blocked
    causal: bool  # top left; not in the bias
    live_rows: Tensor | None  # broadcastable to [B, H, M, 1]; None: all
    scale: float
    sign: int


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def prepare(call: AnyCall, fused: bool) -> Problem:
    """fused: whether the kernel has a causal flag; else the bias has the causal restriction."""
    (B, _, M, _), (K, N), lengths = call.q.shape, call.k.shape[1:3], call.query_lengths
    mask = None if call.mask is None else _unexpanded(call.mask)
    causal, windowed = call.causal, has_window(call)
    if causal == CausalKind.BOTTOM_RIGHT and M == N:
        causal = CausalKind.TOP_LEFT
    elif causal >= CausalKind.BOTTOM_RIGHT and M == 1 and not windowed:
        causal = 0
    sign = (call.scale > 0) - (call.scale < 0)
    q, k, v, scale = call.q, call.k, call.v, abs(call.scale) or 1.0
    q = q if sign > 0 else q * sign
    in_kernel = causal == 0 or (fused and causal == CausalKind.TOP_LEFT and N <= M)
    if in_kernel and not (windowed or has_pattern(call) or call.distance_bias is not None):
        return Problem(q, k, v, None, bool(causal), None, scale, sign)
    i = torch.arange(M, device=q.device)[:, None]
    j = torch.arange(N, device=q.device)
    reach = None if lengths is None else lengths.view(B, 1, 1, 1)
    allowed = []  # their intersection is allowed; each is broadcastable to [B, H, M, N]
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        allowed.append(mask if is_bool else ~(mask <= torch.finfo(mask.dtype).min))
    if call.key_lengths is not None:  # [B] or [B, M]
        allowed.append(j < call.key_lengths.view(B, 1, -1, 1))
    by_distance = _bias_of_pairs(call)
    if by_distance is not None:  # rows with -inf alone are dead
        allowed.append(by_distance != -math.inf)
    by_rows = windowed or causal >= CausalKind.BOTTOM_RIGHT or any(x.shape[2] > 1 for x in allowed)
    # Whether all restrictions are in the bias.
    if by_rows or by_distance is not None or (causal and not fused):
        diagonal = i + (0 if causal < CausalKind.BOTTOM_RIGHT else N - M)
        if causal == CausalKind.BOTTOM_RIGHT_LENGTHS:
            diagonal = i + _own_offset(call)
        if causal:
            allowed.append(j <= diagonal)
        if call.window_left >= 0:
            allowed.append(j >= diagonal - call.window_left)
        if call.window_right >= 0:
            allowed.append(j <= diagonal + call.window_right)
        if reach is not None:
            allowed.append(i < reach)
        causal = 0
    else:  # the bias has one row for all queries, in which dead keys are blocked too
        if reach is not None:
            allowed.append(j < (reach if causal else N * (reach > 0)))
        if causal and N > M:
            allowed.append(j < M)
    pairs = allowed[0]
    for other in allowed[1:]:
        pairs = pairs & other
    pairs = pairs[(None,) * (4 - pairs.dim())]
    pairs = pairs.expand(*pairs.shape[:3], N)
    bias = _bias(pairs, mask, by_distance, wide(q.dtype))
    rows, live_keys = pairs.any(-1, keepdim=True), pairs.any(-2)
    if causal:  # row i is live if one of the keys 0 to i is allowed
        rows = (pairs.cumsum(-1) > 0)[:, :, 0, i.clamp(max=N - 1)]
    if reach is not None:
        rows = rows & (i < reach)
    live_rows = None if q.is_cpu and bool(rows.all()) else rows
    if live_keys.shape[1] not in (1, K):
        live_keys = live_keys.unflatten(1, (K, -1)).any(2)
    clean = zero_unsafe if fused else zero_dead
    q = q if live_rows is None else clean(live_rows, q)
    if not (q.is_cpu and bool(live_keys.all())):
        k, v = clean(live_keys[..., None], k), clean(live_keys[..., None], v)
    return Problem(q, k, v, bias, bool(causal), live_rows, scale, sign)


def _own_offset(call: AnyCall) -> Any:
    """The offset of the causal diagonal by each sequence's own lengths: [B, 1, 1, 1], or a number
    without lengths.
    """
    ends = (call.key_lengths, call.k.shape[2]), (call.query_lengths, call.q.shape[2])
    n, m = (most if x is None else x.view(-1, 1, 1, 1).clamp(0, most) for x, most in ends)
    return n - m


def _entries(call: AnyCall) -> Tensor | None:
    """The entry of distance_bias for each j - i from 1 - M to N - 1, [B, 1, M + N - 1], or None if
    it is entry j - i + M - 1. Any entry for a distance that no allowed pair has.
    """
    if call.causal != CausalKind.BOTTOM_RIGHT_LENGTHS:
        return None
    M, N = call.q.shape[2], call.k.shape[2]
    steps = torch.arange(M + N - 1, device=call.q.device) + N - M
    return (steps - _own_offset(call)).clamp(0, M + N - 2).view(-1, 1, M + N - 1)


def _bias_of_pairs(call: AnyCall) -> Tensor | None:
    """distance_bias as a dense mask [B or 1, H, M, N]."""
    bias, entries = call.distance_bias, _entries(call)
    if bias is None:
        return None
    if entries is not None:
        B, H = max(bias.shape[0], entries.shape[0]), bias.shape[1]
        bias = bias.expand(B, H, -1).gather(2, entries.expand(B, H, -1))
    return bias.unfold(2, call.k.shape[2], 1).flip(2)


def sum_by_distance(call: BackwardCall, ds: Tensor) -> Tensor:
    """The gradient of distance_bias, from that of the dense mask, [B, H, M, N]."""
    bias, entries, (B, H, M, N) = call.distance_bias, _entries(call), ds.shape
    assert bias is not None
    # Row i is shifted by M - 1 - i columns: rows of M + N entries become rows of M + N - 1.
    shifted = F.pad(ds.flip(2), (0, M)).flatten(2)[..., : M * (M + N - 1)]
    sums = shifted.view(B, H, M, M + N - 1).sum(2)
    if entries is not None:
        sums = torch.zeros_like(sums).scatter_add_(2, entries.expand(sums.shape), sums)
    return sums.sum_to_size(bias.shape)


def _unexpanded(x: Tensor) -> Tensor:
    """x with expanded dimensions reduced to size 1."""
    for dim in range(x.dim()):
        x = x.narrow(dim, 0, 1) if x.stride(dim) == 0 and x.shape[dim] else x
    return x


def _bias(
    allowed: Tensor, mask: Tensor | None, by_distance: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The additive mask, contiguous as aten needs it."""
    added = by_distance
    if mask is not None and mask.dtype != torch.bool:
        added = mask.to(dtype) if added is None else added + mask.to(dtype)
    if added is None:
        bias = torch.full(allowed.shape, -math.inf, dtype=dtype, device=allowed.device)
        return bias.masked_fill_(allowed, 0.0)
    return torch.where(allowed, added, -math.inf).contiguous()


def zero_dead(live: Tensor, x: Tensor) -> Tensor:
    """x with 0 where it is dead."""
    return torch.where(live, x, 0)


def zero_unsafe(live: Tensor, x: Tensor) -> Tensor:
    """zero_dead, for kernels that multiply dead values by weight 0. On the CPU, x is returned as it
    is if it is finite and small enough for such products to be 0.
    """
    if x.is_cpu and bool(torch.linalg.vector_norm(x) < _SAFE_NORM):
        return x
    return zero_dead(live, x)
