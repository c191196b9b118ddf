"""Changes of attention's scores besides masks: soft cap, attention sinks, and biases that depend on
the distance between query and key alone (ALiBi and tables of relative positions). Ops take such a
bias as one number for each distance, so memory is linear in M + N.

The distance of query i and key j is d = j - i - offset, where i + offset is the key on the causal
diagonal (on the top-left one if causal is off).
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from fastattn._arguments import check_device, check_float, check_number, sizes
from fastattn.ops.attention.op import CAUSAL

RelativeBuckets = Literal["t5", "t5_causal", "clipped"]


def distances(causal: int, M: int, N: int, device: torch.device) -> Tensor:
    """The distance of each entry of the op's distance_bias, int64 [M + N - 1]."""
    last = (N if causal >= CAUSAL["bottom_right"] else M) - 1
    return torch.arange(max(M + N - 1, 0), device=device) - last


def t5_buckets(d: Tensor, buckets: int, max_distance: int, causal: bool) -> Tensor:
    """Buckets of T5 (Raffel et al. 2020, section 2.1): one for each small distance, then buckets
    whose width grows logarithmically up to max_distance. Half of them are for keys after the query,
    unless `causal`, where these share the bucket of distance 0.
    """
    if causal:
        first, size = torch.zeros_like(d), -d.clamp(max=0)
    else:
        buckets //= 2
        first, size = (d > 0) * buckets, d.abs()
    exact = buckets // 2
    # In fp32, in the order of the published code, whose rounding decides the last buckets.
    growth = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = exact + (growth * (buckets - exact)).long()
    return first + torch.where(size < exact, size, wide.clamp(max=buckets - 1))


def clipped_buckets(d: Tensor, buckets: int) -> Tensor:
    """One bucket for each distance from -c to c, buckets = 2 c + 1; larger ones share the last
    (Shaw et al. 2018, equation 4).
    """
    c = buckets // 2
    return d.clamp(-c, c) + c


def score_arguments(
    alibi_slopes: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    relative_bias: Tensor | None,
    relative_buckets: RelativeBuckets | None,
    relative_max_distance: int,
    *,
    causal: int,
    B: int,
    M: int,
    N: int,
    q: Tensor,
) -> tuple[Tensor | None, Tensor | None, float]:
    """The op's distance_bias, sinks and softcap. causal: the op's code; q: its query, for the
    number of heads (dimension 1), dtype and device.
    """
    H = q.shape[1]
    if relative_buckets is not None and relative_bias is None:
        raise ValueError(
            f"relative_bias must be given with relative_buckets={relative_buckets!r}, got None"
        )
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias = None
    d = None
    if alibi_slopes is not None:  # Press et al. 2022, section 3
        _check_alibi_slopes(alibi_slopes, B, H, q.device)
        d = distances(causal, M, N, q.device)
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        bias = -slopes.to(dtype)[..., None] * d.abs().to(dtype)
    if relative_bias is not None:
        _check_relative_bias(relative_bias, relative_buckets, relative_max_distance, H, q.device)
        d = distances(causal, M, N, q.device) if d is None else d
        index = buckets_of(d, relative_bias.shape[1], relative_buckets, relative_max_distance)
        table = relative_bias.to(dtype).index_select(1, index)[None]
        bias = table if bias is None else bias + table
    if sinks is not None:
        check_float("sinks", sinks)
        if sinks.shape != (H,):
            raise ValueError(f"sinks must be [{H}], one for each query head, got {sizes(sinks)}")
        check_device("sinks", sinks, q.device)
        sinks = sinks.to(dtype).contiguous()
    return bias, sinks, _checked_softcap(softcap)


def buckets_of(d: Tensor, buckets: int, kind: str | None, max_distance: int) -> Tensor:
    if kind == "clipped":
        return clipped_buckets(d, buckets)
    return t5_buckets(d, buckets, max_distance, kind == "t5_causal")


def _checked_softcap(softcap: float | None) -> float:
    """The op's argument: 0.0 for none."""
    if softcap is None:
        return 0.0
    softcap = check_number("softcap", softcap)
    if not 1e-30 <= softcap <= 1e30:  # so that kernels can multiply by it and by its inverse
        raise ValueError(f"softcap must be a number from 1e-30 to 1e30, or None, got {softcap}")
    return softcap


def _check_alibi_slopes(slopes: Any, B: int, H: int, device: torch.device) -> None:
    check_float("alibi_slopes", slopes)
    if slopes.shape != ((H,) if slopes.dim() == 1 else (B, H)):
        raise ValueError(f"alibi_slopes must be [{H}] or [{B}, {H}], got {sizes(slopes)}")
    check_device("alibi_slopes", slopes, device)


def _check_relative_bias(
    table: Any, kind: Any, max_distance: Any, H: int, device: torch.device
) -> None:
    least = {"t5": 4, "t5_causal": 2, "clipped": 1}.get(kind) if isinstance(kind, str) else None
    if least is None:
        raise ValueError(
            f'relative_buckets must be "t5", "t5_causal" or "clipped" with relative_bias, '
            f"got {kind!r}"
        )
    check_float("relative_bias", table)
    if table.dim() != 2 or table.shape[0] != H or table.shape[1] < least:
        raise ValueError(
            f"relative_bias must be [{H}, buckets] with at least {least} buckets, "
            f"got {sizes(table)}"
        )
    count = table.shape[1]
    odd = int(kind == "clipped")  # no bool: no SymInt is equal to one
    if kind != "t5_causal" and count % 2 != odd:
        wanted = "odd" if odd else "even"
        raise ValueError(
            f"relative_bias must have an {wanted} number of buckets for {kind!r}, got {count}"
        )
    check_device("relative_bias", table, device)
    if isinstance(max_distance, bool) or not isinstance(max_distance, (int, torch.SymInt)):
        raise TypeError(f"relative_max_distance must be an integer, got {max_distance!r}")
    exact = count // 4 if kind == "t5" else count // 2
    if kind != "clipped" and max_distance <= exact:
        raise ValueError(
            f"relative_max_distance must be greater than {exact}, the number of distances with a "
            f"bucket of their own, got {max_distance}"
        )
