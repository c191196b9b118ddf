"""The copying head: a pointer-generator (See, Liu, Manning 2017) over the tokens of the source.

    P(w) = p_gen P_vocabulary(w) + (1 - p_gen) sum over i with source_i = w of a_i     (equation 9)

Source and target share one vocabulary of subwords, so every source token is in it. The attention a
is a separate head over the encoder's output, with scaled dot products in place of the paper's
additive scores (equations 1 and 2); p_gen depends on its context and on the decoder's output, which
includes the decoder's input (equation 8).

Shapes: B batch, T target positions, S source positions, E width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PointerGenerator(nn.Module):
    """Converts the decoder's logits to log-probabilities of generating and copying."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.generate = nn.Linear(2 * width, 1)

    def keys(self, memory: Tensor) -> Tensor:
        """The keys of `forward`, [B, S, E]: computed once for each source."""
        return self.key(memory)

    def forward(
        self,
        hidden: Tensor,
        logits: Tensor,
        memory: Tensor,
        keys: Tensor,
        source: Tensor,
        padding: Tensor,
    ) -> Tensor:
        """hidden [B, T, E], logits [B, T, V], memory and keys [B, S, E], source [B, S] ids, padding
        [B, S] -> log P, fp32 [B, T, V].
        """
        scores = self.query(hidden) @ keys.transpose(1, 2) * hidden.shape[-1] ** -0.5  # [B, T, S]
        weights = scores.float().masked_fill(padding[:, None], float("-inf")).softmax(dim=-1)
        context = weights.to(memory.dtype) @ memory  # [B, T, E]
        p_gen = self.generate(torch.cat([context, hidden], dim=-1)).float().sigmoid()  # [B, T, 1]
        p = p_gen * logits.float().softmax(dim=-1)
        index = source[:, None].expand(-1, hidden.shape[1], -1)  # [B, T, S]
        p = p.scatter_add(2, index, (1.0 - p_gen) * weights)
        # Rounding may make a probability 0, whose logarithm has no finite gradient.
        return p.clamp(min=torch.finfo(torch.float32).tiny).log()
