"""`set_heads`: other numbers, sizes and scales of attention heads than torch's constructors make.

Padded, packed and incremental execution read them where they read the weights, see
`attention.scale_of`.
"""

from typing import Any

import torch
from torch import nn

from fastattn.nn.attention import MultiheadAttention, has_own_heads, projects_alike
from fastattn.nn.positional_attention import PositionalMultiheadAttention


def set_heads(
    module: nn.Module,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    scale: float | None = None,
) -> None:
    """Sets the heads of every attention within `module`, in place; None leaves a value as it is.

    num_heads, head_dim: their product may differ from embed_dim, as in T5; the projections of
    query, key and value then have that many rows and `out_proj` that many columns, newly
    initialised. scale: of the scores, default head_dim ** -0.5. Raises ValueError for attention
    with kdim, vdim, add_bias_kv or add_zero_attn, and TypeError for attention that is neither a
    `MultiheadAttention` nor a `PositionalMultiheadAttention`.
    """
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    attentions = [child for child in module.modules() if isinstance(child, nn.MultiheadAttention)]
    for attention in attentions:
        if type(attention) not in (MultiheadAttention, PositionalMultiheadAttention):
            raise TypeError(
                "heads can be set for fastattn's MultiheadAttention and "
                f"PositionalMultiheadAttention, got {type(attention).__module__}."
                f"{type(attention).__name__}"
            )
        if not projects_alike(attention):
            raise ValueError(
                "heads can be set for attention without kdim, vdim, add_bias_kv and "
                f"add_zero_attn, got {attention}"
            )
        _resize_heads(attention, num_heads or attention.num_heads, head_dim or attention.head_dim)
        if scale is not None:
            attention.scale = float(scale)  # type: ignore[assignment]
        if type(attention) is MultiheadAttention:  # see UnpackedMultiheadAttention
            attention._qkv_same_embed_dim = not has_own_heads(attention)


def _resize_heads(attention: nn.MultiheadAttention, num_heads: int, head_dim: int) -> None:
    weight, out = attention.in_proj_weight, attention.out_proj
    attention.num_heads, attention.head_dim = num_heads, head_dim
    width = num_heads * head_dim
    if len(weight) == 3 * width:
        return
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    attention.in_proj_weight = nn.Parameter(torch.empty(3 * width, attention.embed_dim, **like))
    nn.init.xavier_uniform_(attention.in_proj_weight)
    if attention.in_proj_bias is not None:
        attention.in_proj_bias = nn.Parameter(torch.zeros(3 * width, **like))
    bias = out.bias is not None
    attention.out_proj = type(out)(width, attention.embed_dim, bias=bias, **like)
    if bias:
        nn.init.zeros_(attention.out_proj.bias)
