"""TransformerEngine's norms and attention: its modules, called with the parameters of the inputs.

Its attention needs [B, S, H, D] contiguous in memory: q, k and v are copied first, and the copies
are timed, too.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from benchmarks.implementations import (
    adapter,
    of_package,
    refusing,
    without_parameters,
)

_MASK_TYPES = {
    False: "no_mask", True: "causal", "top_left": "causal", "bottom_right": "causal_bottom_right",
}  # fmt: skip


@functools.cache
def _norm(kind: str, size: int, eps: float, device: torch.device, dtype: torch.dtype) -> Any:
    import transformer_engine.pytorch as te

    return getattr(te, kind)(size, eps=eps).to(device, dtype)


@functools.cache
def _attention(heads: int, size: int, groups: int, mask_type: str, scale: float | None) -> Any:
    import transformer_engine.pytorch as te

    return te.DotProductAttention(
        heads,
        size,
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type=mask_type,
        softmax_scale=scale,
    )


@refusing(without_parameters)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    module = _norm("LayerNorm", x.shape[-1], eps, x.device, weight.dtype)
    return functional_call(module, {"weight": weight, "bias": bias}, (x,))


@refusing(without_parameters)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    module = _norm("RMSNorm", x.shape[-1], eps, x.device, weight.dtype)
    return functional_call(module, {"weight": weight}, (x,))


def _why(q: Tensor, k: Tensor, v: Tensor, *, causal: Any = False, **_: Any) -> str | None:
    if causal not in _MASK_TYPES:
        return "takes causality by the sizes"
    return "takes equal head dims here" if q.shape[-1] != v.shape[-1] else None


@refusing(_why)
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: Any = False, scale: float | None = None
) -> Tensor:
    (B, H, M, D), groups = q.shape, k.shape[1]
    module = _attention(H, D, groups, _MASK_TYPES[causal], scale)
    # With views it reads the wrong memory, because it relies on the shape.
    try:
        out = module(*(x.transpose(1, 2).contiguous() for x in (q, k, v)))
    except ValueError as error:
        if "No dot product attention" not in str(error):
            raise
        raise NotImplementedError("has no backend for it") from error
    return out.view(B, M, H, D).transpose(1, 2)


PEERS = tuple(
    adapter(
        "transformer-engine",
        function.__name__,
        function,
        device_types=("cuda",),
        **of_package("transformer-engine", "transformer_engine.pytorch"),
        backend="transformer-engine",
    )
    for function in (layer_norm, rms_norm, attention)
)
