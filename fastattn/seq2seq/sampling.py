"""Sampling the next token: temperature, top-k, top-p (nucleus).

Each sentence has its own stream of uniform numbers, drawn in advance from its seed; a step converts
one of them to a token by the inverse distribution function. So a sample depends only on the
sentence, the options and the seed, not on the batch or the device's generator.

Top-k: Fan, Lewis, Dauphin 2018, section 5. Top-p: Holtzman et al. 2020, equations 2 and 3;
temperature, equation 4.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .continuations import Continuations
from .data import NEVER_CHOSEN
from .search import Request, SingleSearch

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6  # logits divided by them stay finite in fp32


@dataclass(frozen=True)
class Sampling:
    """Draw each token at random; `top_k` None and `top_p` 1 allow the whole vocabulary.

    temperature: divides the logits, from 1e-6 to 1e6. top_k: only the k likeliest tokens. top_p: of
    those, only the likeliest that together reach this probability. seed: together with a sentence's
    number it determines its random numbers.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not _MIN_TEMPERATURE <= self.temperature <= _MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must lie in [{_MIN_TEMPERATURE}, {_MAX_TEMPERATURE}], "
                f"got {self.temperature}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def uniform_numbers(seed: int, sentences: Sequence[int], steps: int) -> Tensor:
    """Return numbers in [0, 1) for every step and sentence, fp32 [T, B]; row t does not depend on
    the number of steps, nor a column on the other sentences.
    """
    rows = []
    for sentence in sentences:
        draw = random.Random(f"{seed} {sentence}")
        rows.append([draw.random() for _ in range(steps)])
    return torch.tensor(rows, dtype=torch.float64).T.float().contiguous()


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Return a token for each row of logits [B, V] from its number in [0, 1), [B]."""
    x, tokens = logits / sampling.temperature, None
    if sampling.top_k is not None:
        x, tokens = x.topk(min(sampling.top_k, x.shape[-1]), dim=-1)
    elif sampling.top_p < 1.0:
        x, tokens = x.sort(dim=-1, descending=True)
    p = x.softmax(dim=-1)
    reached = p.cumsum(dim=-1)
    if sampling.top_p < 1.0:
        # A token is kept while the sum before it is less than top_p: the first one always is.
        last = ((reached - p) < sampling.top_p).sum(dim=-1, keepdim=True) - 1
        last = last.clamp(min=0)  # if top_p is 0 in fp32
    else:
        last = torch.full_like(uniforms, x.shape[-1] - 1, dtype=torch.long)[:, None]
    threshold = uniforms[:, None] * reached.gather(-1, last)
    # The first token whose cumulated probability exceeds the threshold; rounding may miss the last.
    index = (reached <= threshold).sum(dim=-1, keepdim=True).minimum(last)
    return (index if tokens is None else tokens.gather(-1, index))[:, 0]


class SamplingSearch(SingleSearch):
    """A single search that samples; its random numbers are copied to the device in advance."""

    def __init__(
        self, continuations: Continuations, sampling: Sampling, request: Request, *, steps: int
    ) -> None:
        self.seed = sampling.seed
        size = steps, len(request.max_lengths)
        self._uniforms = torch.zeros(size, device=continuations.device)

        def choose(logits: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            log_z = logits.logsumexp(dim=-1)
            logits[:, NEVER_CHOSEN].fill_(float("-inf"))
            return draw(logits, self._uniforms.index_select(0, step)[0], sampling), log_z

        super().__init__(continuations, choose, request, steps=steps)

    def draw_numbers(self, sentences: Sequence[int]) -> None:
        """Numbers for the sentences of the batch."""
        steps, B = self._uniforms.shape
        if len(sentences) != B:
            raise ValueError(
                f"numbers must hold one number for each of {B} sources, got {len(sentences)}"
            )
        self._uniforms.copy_(uniform_numbers(self.seed, sentences, steps))
