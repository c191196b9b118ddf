"""xFormers' memory_efficient_attention, which chooses among its own backends.

It takes queries as [B, S, H, D]; it supports lengths only for packed sequences, so it gets none.
"""

import functools
from typing import Any

from torch import Tensor

from benchmarks.implementations import adapter, of_package, refusing
from fastattn.testing.spec import Inputs


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


@functools.cache
def _causal(causal: Any) -> Any:
    from xformers.ops.fmha import attn_bias

    bottom_right = causal == "bottom_right"
    name = "LowerTriangularFromBottomRightMask" if bottom_right else "LowerTriangularMask"
    return getattr(attn_bias, name)()


def _expanded(inputs: Inputs) -> Inputs:
    if inputs.get("mask") is None:
        return inputs
    return inputs | {"mask": inputs["mask"].expand(*inputs["q"].shape[:3], inputs["k"].shape[2])}


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
    from xformers.ops import memory_efficient_attention

    bias = _causal(causal) if causal else _expanded({"q": q, "k": k, "mask": mask})["mask"]
    rows = (x.transpose(1, 2) for x in (q, k, v))
    out = memory_efficient_attention(*rows, attn_bias=bias, p=dropout_p, scale=scale)
    return out.transpose(1, 2)


PEERS = (
    adapter(
        "xformers",
        "attention",
        attention,
        prepare=_expanded,
        device_types=("cuda",),
        **of_package("xformers", "xformers.ops"),
        backend="xformers",
        draws_dropout=True,
    ),
)
