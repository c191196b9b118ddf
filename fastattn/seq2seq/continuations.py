"""The logits of the next token, for every beam of every sentence.

`CachedContinuations` feeds one token per beam through a decoder with a key/value cache and is
static: the same tensors and operations at every step. `PrefixContinuations` recomputes the whole
prefix, for decoders without a cache: the same logits, more slowly. They have one interface.

Shapes: B sentences, K beams, S source tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .model import Memory, Seq2SeqTransformer


class Continuations(Protocol):
    beams: int
    device: torch.device

    def logits(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [B, K] to the beams and return the next logits, fp32 [B, K, V]."""

    def follow(self, parents: Tensor) -> None:
        """Beam j of sentence b continues from beam `parents[b, j]`."""

    def rewind(self) -> None:
        """Remove all tokens."""


class CachedContinuations:
    """One decoder step; `memory_size`: tokens of the longest source for a later `restart`."""

    def __init__(
        self,
        model: Seq2SeqTransformer,
        memory: Memory,
        *,
        beams: int,
        max_length: int,
        memory_size: int,
    ) -> None:
        self.beams, self.device = beams, memory.source.device
        self._model = model
        # Only a copying head reads the memory again, from tensors of fixed address.
        self._memory = memory.padded(memory_size) if memory.copy_keys is not None else None
        self.cache = model.transformer.decoder.init_cache(
            memory.layers,
            memory_lengths=memory.lengths(),
            max_length=max_length,
            beams=beams,
            memory_size=memory_size,
        )

    def restart(self, memory: Memory) -> None:
        """Replace the sentences by others, no more and no longer than the capacity."""
        self._model.transformer.decoder.restart(self.cache, memory.layers, memory.lengths())
        if self._memory is not None:
            self._memory.copy_from(memory.padded(self._memory.source.shape[1]))

    def logits(self, tokens: Tensor) -> Tensor:
        # Beams are the sequence dimension but share one position, so each is embedded by itself.
        x = self._model.embed_target(tokens.view(-1, 1), start=self.cache.position)
        x = x.view(*tokens.shape, -1)  # [B, K, width]
        hidden = self._model.transformer.decoder.step(x, self.cache)
        return self._model.logits(hidden, self._memory).float()

    def follow(self, parents: Tensor) -> None:
        self.cache.follow(parents)

    def rewind(self) -> None:
        self.cache.rewind()


class PrefixContinuations:
    """Runs the whole decoder over the whole prefix at every step."""

    def __init__(self, model: Seq2SeqTransformer, memory: Memory, *, beams: int) -> None:
        self.beams, self.device = beams, memory.source.device
        self._model = model
        self._memory = memory.repeat(beams)
        self._prefix: Tensor
        self.rewind()

    def logits(self, tokens: Tensor) -> Tensor:
        self._prefix = torch.cat([self._prefix, tokens.view(-1, 1)], dim=1)  # [B * K, t]
        hidden = self._model.decode(self._prefix, self._memory)[:, -1:]
        return self._model.logits(hidden, self._memory).float().view(*tokens.shape, -1)

    def follow(self, parents: Tensor) -> None:
        first = torch.arange(len(parents), device=parents.device)[:, None] * self.beams
        self._prefix = self._prefix[(first + parents).flatten()]

    def rewind(self) -> None:
        source = self._memory.source
        self._prefix = source.new_empty(len(source), 0)


def make_continuations(
    model: Seq2SeqTransformer,
    memory: Memory,
    *,
    beams: int,
    max_length: int,
    memory_size: int | None = None,
    use_cache: bool | None = None,
) -> Continuations:
    """Return cached continuations if the decoder has a cache that supports them, else the others.

    use_cache: True requires the cache, False disables it.
    """
    decoder = model.transformer.decoder
    if use_cache is False:
        return PrefixContinuations(model, memory, beams=beams)
    if not hasattr(decoder, "init_cache"):
        if use_cache:
            raise ValueError(
                f"use_cache=True needs a fastattn.nn decoder, got {type(decoder).__module__}."
                f"{type(decoder).__name__}"
            )
        return PrefixContinuations(model, memory, beams=beams)
    try:
        return CachedContinuations(
            model,
            memory,
            beams=beams,
            max_length=max_length,
            memory_size=memory.source.shape[1] if memory_size is None else memory_size,
        )
    except NotImplementedError:
        if use_cache:
            raise
        return PrefixContinuations(model, memory, beams=beams)
