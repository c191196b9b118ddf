"""The key/value cache that a decoder of `transformers` gets from `foreign_generation`: that of
`fastattn.nn.decoding`, in the form that such a decoder calls.

The prompt runs on one row for each sentence, since its beams are equal, and fills the cache. Each
later step runs on one token of every beam. Keys and values keep their addresses. The attention
function of `huggingface` finds in an attribute of the keys how they are read: as rows of all beams
of a sentence, or as the rows of its memory, which are the same for all beams.

Shapes: B sentences, K beams, T positions, N rows of the memory, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from fastattn import functional
from fastattn.integrations.foreign_modules import POSITION_LIMIT
from fastattn.integrations.huggingface import CACHED
from fastattn.integrations.relative_bias import RelativeBias
from fastattn.nn.decoding import DecoderCache, LayerCache


class BeamCache(EncoderDecoderCache):
    """beams, max_length, memory_size: as for `TransformerDecoder.init_cache`. is_padded: whether
    `memory_mask` `[B, 1, 1, N]` says which rows of the memory are allowed; else `memory_lengths`
    `[B]` does.
    """

    def __init__(
        self,
        batch: int,
        beams: int,
        max_length: int,
        memory_size: int,
        is_padded: bool,
        device: torch.device,
    ) -> None:
        super().__init__(_SelfAttention(self), _CrossAttention(self))
        self.batch, self.beams = batch, beams
        self.max_length, self.memory_size = max_length, memory_size
        self.memory_mask: Tensor | None = None
        self.memory_lengths: Tensor | None = None
        if is_padded:
            shape = (batch, 1, 1, memory_size)
            self.memory_mask = torch.zeros(shape, dtype=torch.bool, device=device)
        else:
            self.memory_lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.is_filling = False
        self._state: DecoderCache | None = None
        self._bias: tuple[Any, Tensor] | None = None

    @property
    def state(self) -> DecoderCache:
        assert self._state is not None  # made by the first prompt
        return self._state

    # -- the prompt -------------------------------------------------------------------------------
    def start(self, allowed: Tensor) -> None:
        """The next call of the model is that of a prompt. allowed: rows of the memory, bool
        `[B, N]`.
        """
        N = allowed.shape[1]
        if self.memory_mask is not None:
            self.memory_mask.zero_()
            self.memory_mask[:, 0, 0, :N] = allowed
        else:
            assert self.memory_lengths is not None
            torch.sum(allowed, 1, out=self.memory_lengths)
        self.is_updated.clear()
        self.is_filling = True

    def end_of_prompt(self, length: int) -> None:
        self.is_filling = False
        self.state.rewind()
        if self.state.ancestry is not None:  # all beams continue the rows of the first
            rows = self.state.ancestry[..., : length * self.beams]
            rows.fill_(False)
            rows[..., :: self.beams] = True
        self.state.advance(length)

    def fill(self, layer: int, rows: str, k: Tensor, v: Tensor) -> None:
        """k, v: [B, H, rows, D] of the prompt (rows "target") or of the memory ("memory")."""
        if self._state is None or layer == len(self._state.layers):
            self._add_layer(k)
        if rows == "target":
            target = self.state.layers[layer].target[:, : k.shape[2] * self.beams : self.beams]
        else:
            target = self.state.layers[layer].memory[:, : k.shape[2]]
        target[:, :, 0] = k.transpose(1, 2)
        target[:, :, 1] = v.transpose(1, 2)

    def _add_layer(self, k: Tensor) -> None:
        B, H, _, D = k.shape
        layer = LayerCache(
            k.new_zeros(B, self.max_length * self.beams, 2, H, D),
            k.new_zeros(B, self.memory_size, 2, H, D),
        )
        if self._state is None:
            self._state = DecoderCache([layer], self.max_length, self.beams)
            setattr(self._state.position, POSITION_LIMIT, self.max_length)
        else:
            self._state.layers.append(layer)
        layers: list[Any] = self.cross_attention_cache.layers
        layers.append(_CrossLayer(self, layer))

    # -- the step ---------------------------------------------------------------------------------
    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The next position of each beam, k and v [B * K, H, 1, D], to all positions."""
        state = self.state
        for rows, new in zip(state.layers[layer].target.unbind(2), (k, v), strict=True):
            new = new.squeeze(2).unflatten(0, (self.batch, self.beams))
            rows.index_copy_(1, state.rows, new)
        keys, values = self.state.layers[layer].target_heads()
        setattr(keys, CACHED, self._attend_self)
        return keys, values

    def _attend_self(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: Any) -> Tensor:
        options: dict[str, Any] = {"key_lengths": self.state.key_lengths}
        if bias is None:
            options["mask"] = self.state.ancestry
        elif self.beams > 1:
            options["mask"] = self._biased(bias)
        elif isinstance(bias, RelativeBias):
            options |= bias.table_options(q.device) | {"causal": "bottom_right_lengths"}
        else:
            options["mask"] = bias
        return self._attend(q, k, v, scale, options)

    def attend_memory(self, q: Tensor, k: Tensor, v: Tensor, bias: Any, scale: Any) -> Tensor:
        assert bias is None
        options = {"mask": self.memory_mask, "key_lengths": self.memory_lengths}
        return self._attend(q, k, v, scale, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: Any, options: Any) -> Tensor:
        beams = q.squeeze(2).unflatten(0, (self.batch, self.beams)).transpose(1, 2)  # [B, H, K, D]
        out = functional.attention(beams, k, v, scale=scale, **options)
        return out.transpose(1, 2).reshape(q.shape[0], 1, q.shape[1], -1)  # [B * K, 1, H, D]

    def _biased(self, bias: Any) -> Tensor:
        """The ancestry with the bias of the next position, which the layers of T5 share."""
        if self._bias is None or self._bias[0] is not bias:
            dense = bias.dense() if isinstance(bias, RelativeBias) else bias
            self._bias = bias, self.state.biased(dense)
        return self._bias[1]

    def end_of_step(self) -> None:
        self.state.advance(1)
        self._bias = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """beam_idx: for each row [B * K] the row that it continues, of the same sentence."""
        if self.beams > 1:
            self.state.follow(beam_idx.view(self.batch, self.beams).long() % self.beams)

    # -- between calls ----------------------------------------------------------------------------
    def release(self) -> None:
        """Frees the memory of keys and values until `allocate`."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            tensor.zero_()  # rows that are never written must be finite

    def _tensors(self) -> list[Tensor]:
        layers = self.state.layers
        return [tensor for layer in layers for tensor in (layer.target, layer.memory)]

    # -- the result -------------------------------------------------------------------------------
    def copy_to(self, other: "BeamCache") -> None:
        """Continues in `other`, which differs only in its larger max_length."""
        state, n = self.state, self.state.length * self.beams
        for i, layer in enumerate(state.layers):
            if other._state is None or i == len(other._state.layers):
                other._add_layer(layer.target_heads()[0])
            other.state.layers[i].target[:, :n] = layer.target[:, :n]
            other.state.layers[i].memory.copy_(layer.memory)
        for mine, its in (
            (self.memory_mask, other.memory_mask),
            (self.memory_lengths, other.memory_lengths),
        ):
            if mine is not None and its is not None:
                its.copy_(mine)
        other.is_updated.update(self.is_updated)
        other.is_filling = False
        other.state.rewind()
        other.state.advance(state.length)
        if state.ancestry is not None and other.state.ancestry is not None:
            other.state.ancestry[..., :n] = state.ancestry[..., :n]

    def as_dynamic(self, memory_rows: int) -> EncoderDecoderCache:
        """The cache that `transformers` would have made: each beam has rows of its own."""
        K, L = self.beams, self.state.length
        mine, memories = DynamicCache(), DynamicCache()
        rows = torch.arange(L, device=self.state.position.device) * K
        if self.state.ancestry is not None:
            past = self.state.ancestry[:, 0, :, : L * K].unflatten(-1, (L, K))
            rows = rows + past.int().argmax(-1)  # [B, K, L]
        rows = rows.expand(self.batch, K, L)
        sentences = torch.arange(self.batch, device=rows.device)[:, None, None]
        for i, layer in enumerate(self.state.layers):
            k, v = layer.target[sentences, rows].flatten(0, 1).transpose(1, 3).unbind(2)
            mine.update(k, v, i)
            k, v = (heads[:, :, :memory_rows] for heads in layer.memory_heads())
            memories.update(k.repeat_interleave(K, 0), v.repeat_interleave(K, 0), i)
        return EncoderDecoderCache(mine, memories)


class _SelfAttention(Cache):
    def __init__(self, owner: BeamCache) -> None:
        super().__init__(layers=[])
        self._owner = owner

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not self._owner.is_filling:
            return self._owner.write(layer_idx, key_states, value_states)
        self._owner.fill(layer_idx, "target", key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """While the prompt runs 0, then a tensor `[1]`."""
        return 0 if self._owner.is_filling else self._owner.state.position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0  # of a prompt: steps get no mask from transformers


class _CrossAttention(Cache):
    def __init__(self, owner: BeamCache) -> None:
        super().__init__(layers=[])
        self._owner = owner

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
        self._owner.fill(layer_idx, "memory", key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class _CrossLayer:
    """The interface of a filled layer that a model reads."""

    def __init__(self, owner: BeamCache, layer: LayerCache) -> None:
        self.keys, self.values = layer.memory_heads()
        setattr(self.keys, CACHED, owner.attend_memory)
