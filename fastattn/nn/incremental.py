"""Decoding token by token with the layers of `TransformerDecoder`: its methods `init_cache`,
`restart` and `step`. The state kept between two tokens is in `decoding`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastattn.functional import Lengths
from fastattn.nn.attention import allowed_mask, projects_alike
from fastattn.nn.blocks import decoder_layer_step, project_memory
from fastattn.nn.decoding import DecoderCache, LayerCache, check_memory_lengths
from fastattn.nn.fusion import is_unmodified
from fastattn.nn.layers import TransformerDecoderLayer
from fastattn.nn.positional_attention import attention_classes


class IncrementalDecoding:
    """The methods that `TransformerDecoder` has beyond those of torch's class."""

    if TYPE_CHECKING:  # at run time TorchScript would compile these annotations as attributes
        layers: Any
        norm: nn.Module | None

    @torch.no_grad()
    def init_cache(
        self,
        memory: Tensor | Sequence[Tensor],
        *,
        memory_key_padding_mask: Tensor | None = None,
        memory_lengths: Lengths | None = None,
        max_length: int,
        beams: int = 1,
        memory_size: int | None = None,
    ) -> DecoderCache:
        """Starts incremental decoding over `memory`, `[B, N, E]` (or `[N, B, E]`: `batch_first`).

        memory: one for all layers, or one for each. memory_key_padding_mask: bool `[B, N]`, True =
        padding. memory_lengths: int32 or int64 `[B]`, or a list of B integers. max_length: the
        largest number of positions to decode, allocated now. beams: continuations of each sequence
        (see `fastattn.nn.decoding`). memory_size: rows to allocate for memories of a later
        `restart`.
        """
        for i, layer in enumerate(self.layers):
            if why := _cannot_decode(layer):
                raise NotImplementedError(f"incremental decoding: layers[{i}] {why}")
        memories = self._memories(memory)
        batch_dim = 0 if self.layers[0].self_attn.batch_first else 1
        B, N = memories[0].shape[batch_dim], memories[0].shape[1 - batch_dim]
        counts: dict[str, Any] = {"max_length": max_length, "beams": beams}
        for name, value in counts.items():
            if not (isinstance(value, int) or hasattr(value, "__index__")):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        padding = memory_key_padding_mask
        if padding is not None and not isinstance(padding, Tensor):
            raise TypeError(f"memory_key_padding_mask must be a tensor or None, got {padding!r}")
        if padding is not None and (padding.dtype is not torch.bool or padding.shape != (B, N)):
            raise ValueError(
                f"memory_key_padding_mask must be bool [{B}, {N}], "
                f"got {padding.dtype} {list(padding.shape)}"
            )
        if memory_lengths is not None:
            lengths = check_memory_lengths(memory_lengths, B, memories[0].device)
            memory_lengths = lengths.clamp(max=N)  # a tensor of its own: `restart` writes here
        if memory_size is not None:
            if memory_size < N or memory_lengths is None:
                raise ValueError(
                    f"memory_size must be at least the memory's {N} and needs memory_lengths, "
                    f"got {memory_size} and memory_lengths={memory_lengths}"
                )

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
        self,
        cache: DecoderCache,
        memory: Tensor | Sequence[Tensor],
        memory_lengths: Lengths,
    ) -> None:
        """Restarts at position 0 in the same tensors, over a memory of the same batch that fits."""
        memories = self._memories(memory)
        batch_dim = 0 if self.layers[0].self_attn.batch_first else 1
        B, N = memories[0].shape[batch_dim], memories[0].shape[1 - batch_dim]
        if cache.batch_size != B or cache.memory_size < N:
            raise ValueError(
                f"memory must have {cache.batch_size} sequences of at most {cache.memory_size} "
                f"rows, got {B} of {N}"
            )
        lengths = check_memory_lengths(memory_lengths, B, memories[0].device).clamp(max=N)
        projected = (project_memory(*each) for each in zip(self.layers, memories, strict=True))
        cache.restart(projected, lengths)

    @torch.no_grad()
    def step(self, x: Tensor, cache: DecoderCache) -> Tensor:
        """The output at the next position, `[B, 1, E]` (or `[1, B, E]`).

        Equal to the last row of `forward` over the whole prefix with a causal mask. Several
        positions in one call, such as a prompt, are causal among themselves. With beams, x holds
        the next position of each, `[B, beams, E]`. No gradients are recorded.
        """
        time_dim = 1 if self.layers[0].self_attn.batch_first else 0
        count = x.shape[time_dim] if x.dim() == 3 else 0
        if (
            x.dim() != 3
            or x.shape[1 - time_dim] != cache.batch_size
            or x.shape[-1] != self.layers[0].self_attn.embed_dim
            or (cache.beams > 1 and count != cache.beams)
        ):
            wanted = f"[B, {cache.beams}, E]" if time_dim else f"[{cache.beams}, B, E]"
            sizes = f"B={cache.batch_size}, E={self.layers[0].self_attn.embed_dim}"
            raise ValueError(f"x must be {wanted} with {sizes}, got {list(x.shape)}")
        positions = 1 if cache.beams > 1 else count
        step = cache.step(positions)
        for layer, layer_cache in zip(self.layers, cache.layers, strict=True):
            x = decoder_layer_step(layer, x, layer_cache, cache, step)
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
            width = self.layers[0].multihead_attn.kdim
            if tensor.dim() != 3 or tensor.shape[-1] != width:
                raise ValueError(
                    f"memory must have 3 dimensions, the last {width}, got {list(tensor.shape)}"
                )
            if tensor.shape != memories[0].shape:
                raise ValueError(
                    f"memory must have one shape for all layers, {list(memories[0].shape)}, "
                    f"got {list(tensor.shape)}"
                )
        return memories


def _cannot_decode(layer: nn.Module) -> str | None:
    """Why `step` cannot replace calls of this layer, phrased to follow its name."""
    if not is_unmodified(layer, nn.TransformerDecoderLayer, TransformerDecoderLayer):
        return "is not exactly a TransformerDecoderLayer without hooks"
    for method in ("_sa_block", "_mha_block"):
        if method in layer.__dict__:
            return f"has its own {method}"
    for name in ("self_attn", "multihead_attn"):
        attention = getattr(layer, name)
        if not is_unmodified(attention, *attention_classes(name)):
            return f"has a {name} that is not exactly a MultiheadAttention without hooks"
        if not projects_alike(attention):
            return f"has a {name} with kdim, vdim, add_bias_kv or add_zero_attn"
    return None
