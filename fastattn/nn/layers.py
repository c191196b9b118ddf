"""Drop-in replacements of torch's encoder and decoder layer on fused ops; `transformer` describes
what they share with the stacks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn import functional
from fastattn.nn.attention import floating_mask, matching_masks
from fastattn.nn.blocks import (
    decoder_layer,
    encoder_layer,
    fused_context,
    packed_decoder_layer,
    packed_encoder_layer,
    streams_of,
)
from fastattn.nn.conversion import DropIn, convert_children
from fastattn.nn.fusion import inherits, savable
from fastattn.nn.packing import Packing
from fastattn.nn.positional_attention import set_positions
from fastattn.nn.relative import AttentionPositions, PositionKind, make_positions


class TransformerEncoderLayer(DropIn, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` on fused ops.

    positions: those of the self-attention, "alibi", "t5" or "rotary" or a module of such positions
    (see `PositionalMultiheadAttention`). The layers of a stack share them.

    packing: how the rows of a packed `src`, `[T, E]`, form sequences; set by the stacks.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        positions: PositionKind | AttentionPositions | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        convert_children(self)
        if positions is not None:
            if not isinstance(positions, AttentionPositions):
                positions = make_positions(positions, d_model, nhead, device=device, dtype=dtype)
            set_positions(self, positions)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        packing: Packing | None = None,
    ) -> Tensor:
        if packing is not None:
            return packed_encoder_layer(self, src, packing, is_causal)
        if src.is_nested or not are_masks(
            src_mask=src_mask, src_key_padding_mask=src_key_padding_mask
        ):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        (src,) = savable(src)
        mask, padding = matching_masks(
            src_mask, src_key_padding_mask, src.dtype, "src_mask", "src_key_padding_mask"
        )
        streams = streams_of(self, src)

        def attend_self(y: Tensor) -> Tensor | None:
            if not inherits(self, nn.TransformerEncoderLayer, "_sa_block"):
                return None
            return fused_context(self.self_attn, y, y, mask, padding, is_causal, streams)

        def self_block(y: Tensor) -> Tensor:
            masks = floating_mask(mask, src.dtype), floating_mask(padding, src.dtype)
            return self._sa_block(y, *masks, is_causal=is_causal)

        return encoder_layer(self, src, (attend_self, self_block), streams)


class TransformerDecoderLayer(DropIn, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` on fused ops.

    positions: as in `TransformerEncoderLayer`; the buckets of "t5" are for earlier positions alone.
    The attention over the memory has none.

    packings: those of a packed `tgt` and `memory`; set by the stacks.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        positions: PositionKind | AttentionPositions | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            dim_feedforward,
            dropout,
            activation,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        convert_children(self)
        if positions is not None:
            if not isinstance(positions, AttentionPositions):
                positions = make_positions(
                    positions, d_model, nhead, causal=True, device=device, dtype=dtype
                )
            set_positions(self, positions)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
        *,
        packings: tuple[Packing, Packing] | None = None,
    ) -> Tensor:
        if packings is not None:
            return packed_decoder_layer(self, tgt, memory, *packings, tgt_is_causal)
        self_masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        memory_masks = memory_mask, memory_key_padding_mask, memory_is_causal
        if tgt.is_nested or memory.is_nested:
            return super().forward(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                tgt_is_causal,
                memory_is_causal,
            )
        tgt, memory = savable(tgt, memory)
        streams = streams_of(self, tgt, memory)

        def attend_self(y: Tensor) -> Tensor | None:
            if not inherits(self, nn.TransformerDecoderLayer, "_sa_block"):
                return None
            return fused_context(self.self_attn, y, y, *self_masks, streams)

        def attend_memory(y: Tensor) -> Tensor | None:
            if not inherits(self, nn.TransformerDecoderLayer, "_mha_block"):
                return None
            return fused_context(self.multihead_attn, y, memory, *memory_masks, streams)

        return decoder_layer(
            self,
            tgt,
            (attend_self, lambda y: self._sa_block(y, *self_masks)),
            (attend_memory, lambda y: self._mha_block(y, memory, *memory_masks)),
            streams,
        )


def are_masks(**masks: Tensor | None) -> bool:
    given = {name: mask for name, mask in masks.items() if mask is not None}
    for name, mask in given.items():
        functional.check_holds_values(name, mask)
    return all(m.dtype is torch.bool or m.is_floating_point() for m in given.values())
