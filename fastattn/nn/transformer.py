"""The encoder and decoder stacks of `torch.nn` on fused ops, in place of torch's.

Constructors, parameters, `state_dict` and masks are torch's; `forward` is ours, the same in
training and evaluation, made of the blocks in `blocks`. Nested tensors and masks that torch rejects
go to torch. `src_lengths` and `tgt_lengths` ask for packed execution (see `packing`).

Causality: `is_causal=None` compares the mask with the causal one, which waits for the device as in
torch; while compiling, in a CUDA graph and without data the mask is used as it is, with the same
result. A hint is believed.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fastattn.nn.attention import (
    MultiheadAttention,
    allowed_mask,
    check_causal_hint,
    floating_mask,
    matching_masks,
)
from fastattn.nn.blocks import (
    context_of,
    decoder_layer,
    decoder_layer_step,
    encoder_layer,
    packed_decoder_layer,
    packed_encoder_layer,
    project_memory,
)
from fastattn.nn.decoding import DecoderCache, LayerCache, check_memory_lengths
from fastattn.nn.fusion import (
    DropoutStreams,
    TorchScriptable,
    inherits,
    is_plain,
)
from fastattn.nn.norm import LayerNorm, RMSNorm
from fastattn.nn.packing import (
    Lengths,
    Packing,
    packs,
    packs_norm,
    refuse_padding_masks,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class TransformerEncoderLayer(TorchScriptable, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` on fused ops."""

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.TransformerEncoderLayer.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _adopt_children(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if src.is_nested or not _are_masks(src_mask, src_key_padding_mask):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        mask, padding = matching_masks(
            src_mask, src_key_padding_mask, src.dtype, "src_mask", "src_key_padding_mask"
        )
        streams = DropoutStreams(src.device)

        def attend_self(y: Tensor) -> Tensor | None:
            if not inherits(self, nn.TransformerEncoderLayer, "_sa_block"):
                return None
            return context_of(self.self_attn, y, y, mask, padding, is_causal, streams)

        def self_block(y: Tensor) -> Tensor:
            masks = floating_mask(mask, src.dtype), floating_mask(padding, src.dtype)
            return self._sa_block(y, *masks, is_causal=is_causal)

        return encoder_layer(self, src, (attend_self, self_block), streams)


class TransformerDecoderLayer(TorchScriptable, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` on fused ops."""

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.TransformerDecoderLayer.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _adopt_children(self)

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
    ) -> Tensor:
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
        streams = DropoutStreams(tgt.device)

        def attend_self(y: Tensor) -> Tensor | None:
            if not inherits(self, nn.TransformerDecoderLayer, "_sa_block"):
                return None
            return context_of(self.self_attn, y, y, *self_masks, streams)

        def attend_memory(y: Tensor) -> Tensor | None:
            if not inherits(self, nn.TransformerDecoderLayer, "_mha_block"):
                return None
            return context_of(self.multihead_attn, y, memory, *memory_masks, streams)

        return decoder_layer(
            self,
            tgt,
            (attend_self, lambda y: self._sa_block(y, *self_masks)),
            (attend_memory, lambda y: self._mha_block(y, memory, *memory_masks)),
            streams,
        )


class TransformerEncoder(TorchScriptable, nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` on fused ops. Nested tensors are never made of padded ones.

    src_lengths: integers, a list or a CPU tensor `[B]`: only the first tokens of each sequence are
    real. The stack runs on these alone, and the result is 0 at the others; with masks or layers
    that packed rows do not allow, it runs on all of them with a key padding mask instead.
    """

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.TransformerEncoder.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.use_nested_tensor = False
            _adopt_children(self)

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
        if src.is_nested or not _are_masks(mask, src_key_padding_mask):
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        mask, padding = matching_masks(
            mask, src_key_padding_mask, src.dtype, "mask", "src_key_padding_mask"
        )
        is_causal = detect_causal(mask, is_causal, src, self.layers[0].self_attn.batch_first)
        output = src
        for layer in self.layers:
            masks = mask, padding
            if not (
                isinstance(layer, TransformerEncoderLayer)
                and inherits(layer, TransformerEncoderLayer, "forward")
            ):
                # Layers that others wrote expect what torch's encoder hands on.
                masks = floating_mask(mask, src.dtype), floating_mask(padding, src.dtype)
            output = layer(
                output, src_mask=masks[0], is_causal=is_causal, src_key_padding_mask=masks[1]
            )
        return output if self.norm is None else self.norm(output)

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
        real = Packing.of(src, src_lengths, batch_first, "src", "src_lengths")
        causal = detect_causal(mask, is_causal, src, batch_first)
        if self._packs(mask, causal):
            return real.unpack(self._forward_packed(real.pack(src), real, causal))
        padding = _padding_beside(mask, real, src)
        return real.zero_padding(self.forward(src, mask, padding, is_causal))

    def _packs(self, mask: Tensor | None, causal: bool) -> bool:
        check_causal_hint(causal, mask)
        classes = nn.TransformerEncoderLayer, TransformerEncoderLayer
        return (
            (mask is None or causal)
            and packs_norm(self.norm)
            and all(packs(layer, classes) for layer in self.layers)
        )

    def _forward_packed(self, rows: Tensor, real: Packing, causal: bool) -> Tensor:
        for layer in self.layers:
            rows = packed_encoder_layer(layer, rows, real, causal)
        return rows if self.norm is None else self.norm(rows)


class TransformerDecoder(TorchScriptable, nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` on fused ops; `init_cache` and `step` decode incrementally.

    tgt_lengths, src_lengths: of `tgt` and of `memory`, as in `TransformerEncoder`.
    """

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.TransformerDecoder.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _adopt_children(self)

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
            real = Packing.of(tgt, tgt_lengths, batch_first, "tgt", "tgt_lengths")
            source = Packing.of(memory, src_lengths, batch_first, "memory", "src_lengths")
            if source.batch != real.batch:
                raise ValueError(
                    f"memory must have the {real.batch} sequences of tgt, got {source.batch}"
                )
            causal = detect_causal(tgt_mask, tgt_is_causal, tgt, batch_first)
            if self._packs(tgt_mask, causal, memory_mask, memory_is_causal):
                memory = source.pack(memory)
                return real.unpack(
                    self._forward_packed(real.pack(tgt), memory, real, source, causal)
                )
            output = self.forward(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                _padding_beside(tgt_mask, real, tgt),
                _padding_beside(memory_mask, source, tgt),
                tgt_is_causal,
                memory_is_causal,
            )
            return real.zero_padding(output)
        output = tgt
        tgt_is_causal = detect_causal(
            tgt_mask, tgt_is_causal, tgt, self.layers[0].self_attn.batch_first
        )
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
        return output if self.norm is None else self.norm(output)

    def _packs(
        self, mask: Tensor | None, causal: bool, memory_mask: Tensor | None, memory_causal: bool
    ) -> bool:
        check_causal_hint(causal, mask)
        check_causal_hint(memory_causal, memory_mask)
        classes = nn.TransformerDecoderLayer, TransformerDecoderLayer
        return (
            (mask is None or causal)
            and memory_mask is None
            and packs_norm(self.norm)
            and all(packs(layer, classes) for layer in self.layers)
        )

    def _forward_packed(
        self, rows: Tensor, memory: Tensor, real: Packing, source: Packing, causal: bool
    ) -> Tensor:
        for layer in self.layers:
            rows = packed_decoder_layer(layer, rows, memory, real, source, causal)
        return rows if self.norm is None else self.norm(rows)

    @torch.no_grad()
    def init_cache(
        self,
        memory: Tensor | Sequence[Tensor],
        *,
        memory_key_padding_mask: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        max_length: int,
        beams: int = 1,
        memory_size: int | None = None,
    ) -> DecoderCache:
        """Starts incremental decoding over `memory`, `[B, N, E]` (or `[N, B, E]`: `batch_first`).

        memory: one for all layers, or one for each. memory_key_padding_mask: bool `[B, N]`, True =
        padding. memory_lengths: int32 or int64 `[B]`. max_length: the most positions that will be
        decoded, allocated now. beams: continuations of each sequence side by side (see
        `fastattn.nn.decoding`). memory_size: rows to allocate for memories of a later `restart`.
        """
        for i, layer in enumerate(self.layers):
            if why := _cannot_decode(layer):
                raise NotImplementedError(f"incremental decoding: layers[{i}] {why}")
        memories = self._memories(memory)
        batch_dim = 0 if self.layers[0].self_attn.batch_first else 1
        B, N = memories[0].shape[batch_dim], memories[0].shape[1 - batch_dim]
        for name, value in (("max_length", max_length), ("beams", beams)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        padding = memory_key_padding_mask
        if padding is not None and (padding.dtype is not torch.bool or padding.shape != (B, N)):
            raise ValueError(
                f"memory_key_padding_mask must be bool [{B}, {N}], "
                f"got {padding.dtype} {list(padding.shape)}"
            )
        check_memory_lengths(memory_lengths, B)
        if memory_size is not None:
            if memory_size < N or memory_lengths is None:
                raise ValueError(
                    f"memory_size must be at least the memory's {N} and needs memory_lengths, "
                    f"got {memory_size} and memory_lengths={memory_lengths}"
                )
            memory_lengths = memory_lengths.clone()  # `restart` writes here

        layers = []
        for layer, layer_memory in zip(self.layers, memories, strict=True):
            projected = project_memory(layer, layer_memory)  # [B, N, 2, H, D]
            heads = projected.shape[2:]
            if memory_size is not None:
                rows = projected.new_zeros(B, memory_size, *heads)
                rows[:, :N] = projected
                projected = rows
            layers.append(LayerCache(projected.new_zeros(B, max_length * beams, *heads), projected))
        return DecoderCache(
            layers, max_length, beams, allowed_mask(None, padding, B, 1), memory_lengths
        )

    @torch.no_grad()
    def restart(
        self, cache: DecoderCache, memory: Tensor | Sequence[Tensor], memory_lengths: Tensor
    ) -> None:
        """Starts again in the same tensors over a memory of the same batch that is not longer."""
        memories = self._memories(memory)
        batch_dim = 0 if self.layers[0].self_attn.batch_first else 1
        B, N = memories[0].shape[batch_dim], memories[0].shape[1 - batch_dim]
        size = cache.layers[0].memory.shape[1]
        if cache.batch_size != B or size < N:
            raise ValueError(
                f"memory must have {cache.batch_size} sequences of at most {size} rows, "
                f"got {B} of {N}"
            )
        if cache.memory_lengths is None or cache.memory_mask is not None:
            raise ValueError("cache must be one with memory_lengths and no mask of the memory")
        check_memory_lengths(memory_lengths, B)
        cache.memory_lengths.copy_(memory_lengths)
        for layer, rows, layer_memory in zip(self.layers, cache.layers, memories, strict=True):
            rows.memory[:, :N] = project_memory(layer, layer_memory)
        cache.rewind()

    @torch.no_grad()
    def step(self, x: Tensor, cache: DecoderCache) -> Tensor:
        """The next position, `[B, 1, E]` (or `[1, B, E]`), after all that `cache` has seen.

        Equal to the last row of `forward` over the whole prefix with a causal mask. Several
        positions at once, as a prompt, are causal among themselves. With beams x holds the next
        position of each, `[B, beams, E]`. No gradients are recorded.
        """
        time_dim = 1 if self.layers[0].self_attn.batch_first else 0
        count = x.shape[time_dim] if x.dim() == 3 else 0
        if (
            x.dim() != 3
            or x.shape[1 - time_dim] != cache.batch_size
            or (cache.beams > 1 and count != cache.beams)
        ):
            wanted = f"[B, {cache.beams}, E]" if time_dim else f"[{cache.beams}, B, E]"
            raise ValueError(f"x must be {wanted} with B={cache.batch_size}, got {list(x.shape)}")
        positions = 1 if cache.beams > 1 else count
        end = cache.length + positions
        if end > cache.max_length:
            raise ValueError(
                f"the cache holds max_length={cache.max_length} positions, got position {end - 1}"
            )
        slots = cache.slots(positions)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x = decoder_layer_step(layer, x, layer_cache, cache, slots)
        cache.advance(positions)
        return x if self.norm is None else self.norm(x)

    def _memories(self, memory: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """One memory for each layer, all of one shape."""
        memories = [memory] * len(self.layers) if isinstance(memory, Tensor) else memory
        if len(memories) != len(self.layers):
            raise ValueError(
                f"memory must be one tensor or one for each of {len(self.layers)} layers, "
                f"got {len(memories)}"
            )
        for tensor in memories:
            if tensor.dim() != 3:
                raise ValueError(f"memory must have 3 dimensions, got {list(tensor.shape)}")
            if tensor.shape != memories[0].shape:
                raise ValueError(
                    f"memory must have one shape for all layers, {list(memories[0].shape)}, "
                    f"got {list(tensor.shape)}"
                )
        return memories


class Transformer(TorchScriptable, nn.Transformer):
    """`torch.nn.Transformer` on fused ops; custom parts that are not torch's classes stay so.

    src_lengths, tgt_lengths: as in `TransformerEncoder`; the encoder hands packed rows on to the
    decoder. Both stacks must be ours then.
    """

    if not TYPE_CHECKING:  # type checkers read torch's constructor

        @functools.wraps(nn.Transformer.__init__)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _adopt_children(self)

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
        real = Packing.of(tgt, tgt_lengths, self.batch_first, "tgt", "tgt_lengths")
        src_causal = detect_causal(src_mask, src_is_causal, src, self.batch_first)
        tgt_causal = detect_causal(tgt_mask, tgt_is_causal, tgt, self.batch_first)
        if encoder._packs(src_mask, src_causal) and decoder._packs(
            tgt_mask, tgt_causal, memory_mask, memory_is_causal
        ):
            memory = encoder._forward_packed(source.pack(src), source, src_causal)
            rows = decoder._forward_packed(real.pack(tgt), memory, real, source, tgt_causal)
            return real.unpack(rows)
        output = super().forward(
            src,
            tgt,
            src_mask,
            tgt_mask,
            memory_mask,
            _padding_beside(src_mask, source, src),
            _padding_beside(tgt_mask, real, tgt),
            _padding_beside(memory_mask, source, tgt),
            src_is_causal,
            tgt_is_causal,
            memory_is_causal,
        )
        return real.zero_padding(output)


DROP_INS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
    nn.Transformer: Transformer,
}


def adopt(module: AnyModule) -> AnyModule:
    """Turns `module` and the modules in it, where exactly of torch's classes, into ours, in place.

    Parameters, buffers, hooks and names stay the same objects; subclasses are left alone.
    """
    for child in module.modules():
        drop_in = DROP_INS.get(type(child))
        if drop_in is not None:
            child.__class__ = drop_in  # type: ignore[assignment]
        if isinstance(child, TransformerEncoder):
            child.use_nested_tensor = False
    return module


def detect_causal(mask: Tensor | None, hint: bool | None, x: Tensor, batch_first: bool) -> bool:
    """The hint, or without one whether `mask` is the causal mask for x, where that can be known."""
    if hint is not None or mask is None or x.is_nested:
        return hint is True
    size = x.shape[1 if batch_first and x.dim() == 3 else 0]
    if mask.shape != (size, size) or torch.compiler.is_compiling() or mask.is_meta:
        return False
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype is not torch.bool:
        causal = torch.zeros_like(mask).masked_fill_(causal, float("-inf"))
    return bool(torch.eq(mask, causal).all())


def _adopt_children(module: nn.Module) -> None:
    for child in module.children():
        adopt(child)


def _padding_beside(mask: Tensor | None, real: Packing, x: Tensor) -> Tensor:
    """The key padding mask of a packing, in the kind of the mask it stands beside."""
    padding = real.padding()
    if mask is None or mask.dtype is torch.bool:
        return padding
    return floating_mask(padding, x.dtype)  # type: ignore[return-value]


def _are_masks(*masks: Tensor | None) -> bool:
    return all(m is None or m.dtype is torch.bool or m.is_floating_point() for m in masks)


def _cannot_decode(layer: nn.Module) -> str | None:
    """Why `step` cannot stand for calls of this layer, phrased to follow its name."""
    if not is_plain(layer, nn.TransformerDecoderLayer, TransformerDecoderLayer):
        return "is not exactly a TransformerDecoderLayer without hooks"
    for method in ("_sa_block", "_mha_block"):
        if method in layer.__dict__:
            return f"has its own {method}"
    for name in ("self_attn", "multihead_attn"):
        attention = getattr(layer, name)
        if not is_plain(attention, nn.MultiheadAttention, MultiheadAttention):
            return f"has a {name} that is not exactly a MultiheadAttention without hooks"
        if attention.in_proj_weight is None or attention.bias_k is not None:
            return f"has a {name} with kdim, vdim or add_bias_kv"
        if attention.add_zero_attn:
            return f"has a {name} with add_zero_attn"
    return None
