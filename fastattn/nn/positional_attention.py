"""Self-attention with positions: a `MultiheadAttention` whose scores depend on distances.

`set_positions` gives the self-attentions of a layer or of a stack positions, in place; the
keyword `positions` of the layers and of `Transformer` calls it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fastattn.nn.attention import (
    MultiheadAttention,
    UnpackedMultiheadAttention,
    allowed_mask,
    attention_context,
    check_causal_hint,
    check_padded_inputs,
    heads_with_weights,
    matching_masks,
    merge_heads,
    project,
    projects_alike,
    rotated_heads,
)
from fastattn.nn.fusion import DropoutStreams, savable
from fastattn.nn.relative import AttentionPositions, PositionKind, make_positions


class PositionalMultiheadAttention(UnpackedMultiheadAttention):
    """Multi-head self-attention with positions in its scores.

    positions: "alibi", "t5" or "rotary", or a module of such positions with other options. Its
    learned parameters are in the `state_dict` under `positions.`; the other parameters are those of
    `torch.nn.MultiheadAttention`. Calls are those of torch for batched inputs, where query and key
    have one length: position i of the query is position i of the key.
    """

    positions: AttentionPositions

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        positions: PositionKind | AttentionPositions,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype
        )
        if not isinstance(positions, AttentionPositions):
            positions = make_positions(positions, embed_dim, num_heads, device=device, dtype=dtype)
        self.positions = positions

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch's; `is_causal=True` is trusted. The weights are computed unfused."""
        query, key, value = savable(query, key, value)
        check_padded_inputs(self, query, key, value, key_padding_mask, attn_mask)
        if query.shape != key.shape:
            raise ValueError(
                f"key must have query's shape {list(query.shape)}, because positions are counted "
                f"from the start of both, got {list(key.shape)}"
            )
        if not need_weights:
            context = attention_context(
                self,
                query,
                key,
                value,
                key_padding_mask,
                attn_mask,
                is_causal,
                DropoutStreams(query.device),
                self.positions,
            )
            return self.out_proj(context), None
        check_causal_hint(is_causal, attn_mask)
        masks = matching_masks(attn_mask, key_padding_mask, query.dtype)
        q, k, v = project(self, query, key, value)
        q, k = rotated_heads(self.positions, q, k)
        mask = allowed_mask(*masks, q.shape[0], self.num_heads)
        heads, weights = heads_with_weights(
            self,
            q,
            k,
            v,
            mask,
            bool(average_attn_weights),
            **self.positions.score_options(q.device),
        )
        return self.out_proj(merge_heads(self, heads, 3)), weights


def attention_classes(name: str) -> tuple[type[nn.Module], ...]:
    """The classes of a layer's `self_attn` or `multihead_attn` that are computed by ops."""
    plain = (nn.MultiheadAttention, MultiheadAttention)
    return (*plain, PositionalMultiheadAttention) if name == "self_attn" else plain


def positions_of(attention: nn.Module) -> AttentionPositions | None:
    """The positions of a self-attention, None if it has none."""
    return attention.positions if isinstance(attention, PositionalMultiheadAttention) else None


def set_positions(module: Any, positions: AttentionPositions) -> None:
    """Gives the self-attention of a layer, or those of a stack's layers, these positions, in place.

    The layers of a stack share the module, as in T5, where one table serves all layers of a stack:
    the `state_dict` has its parameters under the name of every layer. Weights stay the same
    objects.
    """
    for layer in getattr(module, "layers", [module]):
        _convert(layer.self_attn, positions)


def share_positions(stack: Any) -> None:
    """Makes the layers of a stack, copies of one layer, share the positions of the first."""
    for layer in stack.layers[:1]:
        if (positions := positions_of(getattr(layer, "self_attn", layer))) is not None:
            set_positions(stack, positions)


def _convert(attention: Any, positions: AttentionPositions) -> None:
    if type(attention) not in attention_classes("self_attn"):
        raise TypeError(
            "positions need a MultiheadAttention of torch or fastattn, got "
            f"{type(attention).__name__}"
        )
    if not projects_alike(attention):
        raise ValueError(
            "positions need attention without kdim, vdim, add_bias_kv and add_zero_attn, got "
            f"{attention}"
        )
    attention.__class__ = PositionalMultiheadAttention
    attention._qkv_same_embed_dim = False  # see UnpackedMultiheadAttention
    attention.positions = positions
