"""Drop-in replacements of torch's Transformer and its encoder and decoder stacks, on fused ops.

Constructors, parameters, `state_dict` and masks are torch's. `forward` is fastattn's, the same in
training and evaluation, and composed of `blocks`. Nested tensors and masks that torch rejects are
passed to torch. `src_lengths` and `tgt_lengths` request packed execution (see `packing`).

Causality: `is_causal=None` compares the mask with the causal mask, which synchronises with the
device as in torch. While compiling, in a CUDA graph and on the meta device the mask is used as it
is, with the same result. A hint is trusted.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastattn.functional import Lengths, autocast
from fastattn.nn.attention import check_causal_hint, floating_mask, matching_masks
from fastattn.nn.blocks import has_low_residual, packed_decoder_layer, packed_encoder_layer
from fastattn.nn.conversion import DropIn, convert_children
from fastattn.nn.fusion import inherits, is_unmodified
from fastattn.nn.incremental import IncrementalDecoding
from fastattn.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer, are_masks
from fastattn.nn.packing import Packing, can_pack, can_pack_norm, refuse_padding_masks, row_multiple
from fastattn.nn.positional_attention import attention_classes, set_positions, share_positions
from fastattn.nn.relative import PositionKind, make_positions
from fastattn.nn.sharding import SINGLE, sharding_of


class TransformerEncoder(DropIn, nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` on fused ops. Padded tensors are not converted to nested ones.

    src_lengths: integers, a list or a CPU tensor `[B]`, the number of real tokens at the start of
    each sequence. The stack runs only on these, and the result is 0 elsewhere. Masks or layers
    that do not support packed rows make it run on all tokens with a key padding mask.
    """

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.TransformerEncoder.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.use_nested_tensor = False
            convert_children(self)
            share_positions(self)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        src_lengths: Lengths | None = None,
    ) -> Tensor:
        if src_lengths is not None:
            return self._forward_lengths(src, mask, src_key_padding_mask, is_causal, src_lengths)
        if src.is_nested or not are_masks(mask=mask, src_key_padding_mask=src_key_padding_mask):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        mask, padding = matching_masks(
            mask, src_key_padding_mask, src.dtype, "mask", "src_key_padding_mask"
        )
        is_causal = detect_causal(mask, is_causal, src, self.layers[0].self_attn.batch_first)
        sharding = sharding_of(self)
        output = sharding.split(src)
        for layer in self.layers:
            masks = mask, padding
            if not (
                isinstance(layer, TransformerEncoderLayer)
                and inherits(layer, TransformerEncoderLayer, "forward")
            ):
                # Other layers expect the masks that torch's encoder passes.
                masks = floating_mask(mask, src.dtype), floating_mask(padding, src.dtype)
            output = layer(
                output, src_mask=masks[0], is_causal=is_causal, src_key_padding_mask=masks[1]
            )
        return _result(self, output, src.dtype)

    def _forward_lengths(
        self,
        src: Tensor,
        mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool | None,
        src_lengths: Lengths,
    ) -> Tensor:
        refuse_padding_masks("src_lengths", src_key_padding_mask=src_key_padding_mask)
        batch_first = self.layers[0].self_attn.batch_first
        packing = Packing.of(src, src_lengths, batch_first, "src", "src_lengths")
        causal = detect_causal(mask, is_causal, src, batch_first)
        if self._can_pack(mask, causal):
            return packing.unpack(self._forward_packed(packing.pack(src), packing, causal))
        padding = _padding_mask_like(mask, packing, src)
        return packing.zero_padding(self.forward(src, mask, padding, is_causal))

    def _can_pack(self, mask: Tensor | None, causal: bool) -> bool:
        check_causal_hint(causal, mask)
        classes = nn.TransformerEncoderLayer, TransformerEncoderLayer
        return (
            (mask is None or causal)
            and can_pack_norm(self.norm)
            and all(can_pack(layer, classes) for layer in self.layers)
        )

    def _forward_packed(self, rows: Tensor, packing: Packing, causal: bool) -> Tensor:
        sharding, total, dtype = sharding_of(self), len(rows), rows.dtype
        multiple = row_multiple(sharding, rows.device)
        packing, rows = packing.extended(rows, multiple)
        rows = sharding.split(rows)
        for layer in self.layers:
            if sharding is SINGLE:
                rows = packed_encoder_layer(layer, rows, packing, causal)
            else:  # its weights are gathered around its forward
                rows = layer(rows, is_causal=causal, packing=packing)
        rows = _result(self, rows, dtype)
        return rows if multiple == 1 else rows[:total]


class TransformerDecoder(IncrementalDecoding, DropIn, nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` on fused ops; `init_cache` and `step` decode incrementally.

    tgt_lengths, src_lengths: those of `tgt` and `memory`, as in `TransformerEncoder`.
    """

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.TransformerDecoder.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            convert_children(self)
            share_positions(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        tgt_lengths: Lengths | None = None,
        src_lengths: Lengths | None = None,
    ) -> Tensor:
        if tgt_lengths is not None or src_lengths is not None:
            refuse_padding_masks(
                "tgt_lengths or src_lengths",
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
            )
            batch_first = self.layers[0].self_attn.batch_first
            target = Packing.of(tgt, tgt_lengths, batch_first, "tgt", "tgt_lengths")
            source = Packing.of(memory, src_lengths, batch_first, "memory", "src_lengths")
            if source.batch != target.batch:
                raise ValueError(
                    f"memory must have the {target.batch} sequences of tgt, got {source.batch}"
                )
            causal = detect_causal(tgt_mask, tgt_is_causal, tgt, batch_first)
            if self._can_pack(tgt_mask, causal, memory_mask, memory_is_causal):
                memory = source.pack(memory)
                return target.unpack(
                    self._forward_packed(target.pack(tgt), memory, target, source, causal)
                )
            output = self.forward(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                _padding_mask_like(tgt_mask, target, tgt),
                _padding_mask_like(memory_mask, source, tgt),
                tgt_is_causal,
                memory_is_causal,
            )
            return target.zero_padding(output)
        tgt_is_causal = detect_causal(
            tgt_mask, tgt_is_causal, tgt, self.layers[0].self_attn.batch_first
        )
        sharding = sharding_of(self)
        output, memory = sharding.split(tgt), self._autocast_memory(sharding.shared(memory))
        for layer in self.layers:
            output = layer(
                output,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_is_causal,
                memory_is_causal=memory_is_causal,
            )
        return _result(self, output, tgt.dtype)

    def _autocast_memory(self, memory: Tensor) -> Tensor:
        """The memory as the layers' products read it under autocast, cast once for all layers;
        unchanged if a modified module would get it.
        """
        low = memory if memory.is_nested else autocast(memory)[0]
        classes = attention_classes("multihead_attn")
        unmodified = low is memory or all(
            is_unmodified(layer, TransformerDecoderLayer)
            and is_unmodified(layer.multihead_attn, *classes)
            for layer in self.layers
        )
        return low if unmodified else memory

    def _can_pack(
        self, mask: Tensor | None, causal: bool, memory_mask: Tensor | None, memory_causal: bool
    ) -> bool:
        check_causal_hint(causal, mask)
        check_causal_hint(memory_causal, memory_mask)
        classes = nn.TransformerDecoderLayer, TransformerDecoderLayer
        return (
            (mask is None or causal)
            and memory_mask is None
            and can_pack_norm(self.norm)
            and all(can_pack(layer, classes) for layer in self.layers)
        )

    def _forward_packed(
        self, rows: Tensor, memory: Tensor, target: Packing, source: Packing, causal: bool
    ) -> Tensor:
        sharding, total, dtype = sharding_of(self), len(rows), rows.dtype
        multiple = row_multiple(sharding, rows.device)
        target, rows = target.extended(rows, multiple)
        source, memory = source.extended(memory, multiple)
        rows, memory = sharding.split(rows), self._autocast_memory(sharding.shared(memory))
        for layer in self.layers:
            if sharding is SINGLE:
                rows = packed_decoder_layer(layer, rows, memory, target, source, causal)
            else:  # its weights are gathered around its forward
                rows = layer(rows, memory, tgt_is_causal=causal, packings=(target, source))
        rows = _result(self, rows, dtype)
        return rows if multiple == 1 else rows[:total]


class Transformer(DropIn, nn.Transformer):
    """`torch.nn.Transformer` on fused ops; a custom encoder or decoder is kept.

    positions: those of the self-attentions, "alibi", "t5" or "rotary" (see
    `PositionalMultiheadAttention`). The layers of a stack share them; with "t5" each stack learns a
    table, the decoder's for earlier positions alone.

    src_lengths, tgt_lengths: as in `TransformerEncoder`; the encoder passes packed rows to the
    decoder. Both stacks must then be those of `fastattn.nn`.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        positions: PositionKind | None = None,
    ) -> None:
        super().__init__(
            d_model,
            nhead,
            num_encoder_layers,
            num_decoder_layers,
            dim_feedforward,
            dropout,
            activation,
            custom_encoder,
            custom_decoder,
            layer_norm_eps,
            batch_first,
            norm_first,
            bias,
            device,
            dtype,
        )
        convert_children(self)
        if positions is None:
            return
        if custom_encoder is not None or custom_decoder is not None:
            raise ValueError(
                "positions must be None with custom_encoder or custom_decoder, whose layers have "
                f"their own, got {positions!r}"
            )
        for stack, causal in ((self.encoder, False), (self.decoder, True)):
            made = make_positions(
                positions, d_model, nhead, causal=causal, device=device, dtype=dtype
            )
            set_positions(stack, made)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
        *,
        src_lengths: Lengths | None = None,
        tgt_lengths: Lengths | None = None,
    ) -> Tensor:
        if src_lengths is None and tgt_lengths is None:
            return super().forward(
                src,
                tgt,
                src_mask,
                tgt_mask,
                memory_mask,
                src_key_padding_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                src_is_causal,
                tgt_is_causal,
                memory_is_causal,
            )
        refuse_padding_masks(
            "src_lengths or tgt_lengths",
            src_key_padding_mask=src_key_padding_mask,
            tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
        )
        encoder, decoder = self.encoder, self.decoder
        for name, stack, kind in (
            ("encoder", encoder, TransformerEncoder),
            ("decoder", decoder, TransformerDecoder),
        ):
            if not isinstance(stack, kind):
                raise TypeError(
                    f"src_lengths and tgt_lengths need {name} to be a fastattn.nn.{kind.__name__}, "
                    f"got {type(stack).__name__}"
                )
        source = Packing.of(src, src_lengths, self.batch_first, "src", "src_lengths")
        target = Packing.of(tgt, tgt_lengths, self.batch_first, "tgt", "tgt_lengths")
        src_causal = detect_causal(src_mask, src_is_causal, src, self.batch_first)
        tgt_causal = detect_causal(tgt_mask, tgt_is_causal, tgt, self.batch_first)
        if encoder._can_pack(src_mask, src_causal) and decoder._can_pack(
            tgt_mask, tgt_causal, memory_mask, memory_is_causal
        ):
            memory = encoder._forward_packed(source.pack(src), source, src_causal)
            rows = decoder._forward_packed(target.pack(tgt), memory, target, source, tgt_causal)
            return target.unpack(rows)
        output = super().forward(
            src,
            tgt,
            src_mask,
            tgt_mask,
            memory_mask,
            _padding_mask_like(src_mask, source, src),
            _padding_mask_like(tgt_mask, target, tgt),
            _padding_mask_like(memory_mask, source, tgt),
            src_is_causal,
            tgt_is_causal,
            memory_is_causal,
        )
        return target.zero_padding(output)


def set_autocast_residual(model: nn.Module, enabled: bool = True) -> None:
    """Sets whether the Transformer stacks within `model` keep their residual stream in autocast's
    dtype under `torch.autocast`, instead of the dtype that PyTorch's layers give it, mostly fp32.

    This halves the memory traffic of the residual stream and of its gradient, and rounds both to
    half precision after each block: results are less accurate than PyTorch's. A stack's result has
    the dtype of its input, a layer's result autocast's. Nothing changes without autocast.

    model: contains encoders, decoders or layers of `fastattn.nn`; ValueError if there is none.
    """
    kinds = (
        *(TransformerEncoder, TransformerDecoder),
        *(TransformerEncoderLayer, TransformerDecoderLayer),
    )
    found = [module for module in model.modules() if isinstance(module, kinds)]
    if not found:
        raise ValueError(
            f"model must contain Transformer layers of fastattn.nn, got {type(model).__name__}"
        )
    for module in found:
        module.autocast_residual = enabled  # type: ignore[assignment]


def _result(stack: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The result of a stack of layers whose input had `dtype`, from the last layer's."""
    x = sharding_of(stack).gather(x if stack.norm is None else stack.norm(x))
    return x.to(dtype) if has_low_residual(stack) else x


def detect_causal(mask: Tensor | None, hint: bool | None, x: Tensor, batch_first: bool) -> bool:
    """The hint, or without one whether `mask` is the causal mask for x, where values are known."""
    if hint is not None or mask is None or x.is_nested:
        return hint is True
    size = x.shape[1 if batch_first and x.dim() == 3 else 0]
    if torch.compiler.is_compiling() or mask.is_meta or mask.shape != (size, size):
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype is not torch.bool:
        causal = torch.zeros_like(mask).masked_fill_(causal, float("-inf"))
    return bool(torch.eq(mask, causal).all())


def _padding_mask_like(mask: Tensor | None, packing: Packing, x: Tensor) -> Tensor:
    """The key padding mask of a packing, boolean or floating like `mask`."""
    padding = packing.padding()
    if mask is None or mask.dtype is torch.bool:
        return padding
    return floating_mask(padding, x.dtype)  # type: ignore[return-value]
