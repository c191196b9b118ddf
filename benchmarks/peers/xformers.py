"""xFormers' memory_efficient_attention, which chooses among its own backends.

It takes queries as [B, S, H, D]; it supports lengths only for packed sequences, so it gets none.
"""

from typing import Any

from torch import Tensor

from benchmarks.implementations import adapter, needs_package, package_version, refusing


def _why(q: Tensor, k: Tensor, *, mask: Any = None, causal: Any = False, **_: Any) -> str | None:
    if q.shape[1] != k.shape[1]:
        return "takes equal numbers of heads here"
    if causal and (mask is not None or causal == "bottom_right_lengths"):
        return "takes a mask, or causality by the sizes"
    if mask is not None and (
        mask.dtype != q.dtype or mask.shape[-1] != k.shape[2] or k.shape[2] % 8
    ):
        return "takes additive masks of q's dtype, of rows of a multiple of 8"
    return None


@refusing(_why)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any = None,
    causal: Any = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    bias = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    if causal:
        kind = (
            LowerTriangularFromBottomRightMask if causal == "bottom_right" else LowerTriangularMask
        )
        bias = kind()
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = memory_efficient_attention(*rows, attn_bias=bias, p=dropout_p, scale=scale)
    return out.transpose(1, 2)


PEERS = (
    adapter(
        "xformers",
        "attention",
        attention,
        device_types=("cuda",),
        unavailable=needs_package("xformers", "xformers.ops"),
        version=lambda: package_version("xformers"),
        backend="xformers",
        draws_dropout=True,
    ),
)
