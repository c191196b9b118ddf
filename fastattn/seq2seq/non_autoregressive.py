"""A decoder that predicts all target tokens in parallel (Gu et al. 2018).

Every position reads a copy of a source token (section 3.1, uniform copying) and attends all others:
there is no causal mask and no BEGIN. The target length comes from a classifier over the mean of the
encoder's output, trained together with the tokens ("predictor"), or from the tokens: twice the
source's length plus ten positions are predicted and cut at the first END ("end").

It is faster, because one pass predicts a sentence, and weaker, because the tokens of a sentence are
predicted independently. `make_model` returns the model class that a configuration selects.

Shapes: B batch, S source tokens, T target positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastattn.nn import Transformer

from .data import END, PAD, Batch
from .losses import label_smoothed_cross_entropy
from .model import Memory, ModelConfig, Seq2SeqTransformer
from .search import Hypothesis


class NonAutoregressiveTransformer(Seq2SeqTransformer):
    """The token model with a decoder that reads the source's tokens instead of the target's."""

    def __init__(
        self, config: ModelConfig, transformer_class: type[nn.Transformer] = Transformer
    ) -> None:
        super().__init__(config, transformer_class)
        # Class n means n + 1 tokens.
        self.length_head = (
            nn.Linear(config.width, config.max_length) if config.length == "predictor" else None
        )

    def forward(self, source: Tensor, target_in: Tensor, source_padding: Tensor) -> Tensor:
        """Return logits [B, T, V] at the positions of `target_in`, of which only the lengths are
        read: the number of real tokens after BEGIN, or what the source allows ("end").
        """
        memory = self.encode(source, source_padding)
        return self.parallel_logits(memory, (target_in != PAD).sum(dim=1) - 1, target_in.shape[1])

    def parallel_logits(self, memory: Memory, lengths: Tensor, positions: int) -> Tensor:
        """Return logits [B, positions, V]; `lengths` [B] are ignored if END decides the length."""
        sources = memory.lengths()[:, None]  # [B, 1]
        copied = lengths.clamp(min=1)[:, None]
        width = positions
        if self.length_head is None:
            # The same positions in training and use, so that only END determines the length.
            lengths, copied = self.target_lengths(memory), sources
            width = max(positions, 2 * memory.source.shape[1] + 10)
            width = min(width, self.config.max_length)
        t = torch.arange(width, device=sources.device)[None]
        index = (t * sources // copied).minimum(sources - 1).clamp(min=0)
        tokens = memory.source.gather(1, index)  # [B, width]
        padded = t >= lengths.clamp(min=1)[:, None]
        hidden = self._run_decoder(
            self.embed_target(tokens), memory, ~padded, {"tgt_key_padding_mask": padded}
        )
        return self.logits(hidden[:, :positions], memory)

    def target_lengths(self, memory: Memory) -> Tensor:
        """The number of positions of each sentence if END decides the length, int64 [B]."""
        return (2 * memory.lengths() + 10).clamp(max=self.config.max_length)

    def length_logits(self, memory: Memory) -> Tensor:
        """Return logits [B, max_length] of the number of target tokens, from 1."""
        if self.length_head is None:
            raise ValueError("length must be 'predictor' for a length head, got 'end'")
        real = (~memory.padding)[..., None]
        mean = memory.output.masked_fill(~real, 0.0).sum(dim=1) / real.sum(dim=1).clamp(min=1)
        return self.length_head(mean)


def make_model(
    config: ModelConfig, transformer_class: type[nn.Transformer] = Transformer
) -> Seq2SeqTransformer:
    """Return the model that a configuration describes."""
    if config.decoder == "non-autoregressive":
        return NonAutoregressiveTransformer(config, transformer_class)
    return Seq2SeqTransformer(config, transformer_class)


def non_autoregressive_loss(
    model: NonAutoregressiveTransformer, batch: Batch, *, smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy of the tokens plus, with a predictor, that of the lengths."""
    memory = model.encode(batch.source, batch.source_padding)
    lengths = ((batch.target_out != PAD) & (batch.target_out != END)).sum(dim=1)
    logits = model.parallel_logits(memory, lengths, batch.target_out.shape[1])
    if model.length_head is None:
        positions = torch.arange(batch.target_out.shape[1], device=lengths.device)
        limits = model.target_lengths(memory)[:, None]
        targets = batch.target_out.masked_fill(positions >= limits, PAD)
        return label_smoothed_cross_entropy(logits, targets, smoothing=smoothing, ignore_index=PAD)
    targets = batch.target_out.masked_fill(batch.target_out == END, PAD)
    tokens = label_smoothed_cross_entropy(logits, targets, smoothing=smoothing, ignore_index=PAD)
    classes = (lengths - 1).clamp(0, model.config.max_length - 1)
    return tokens + F.cross_entropy(model.length_logits(memory).float(), classes)


@torch.no_grad()
def parallel_decode(
    model: NonAutoregressiveTransformer,
    source: Tensor,
    source_padding: Tensor,
    max_lengths: Sequence[int],
) -> list[list[Hypothesis]]:
    """Return one hypothesis for each source: the likeliest token at every position."""
    memory = model.encode(source, source_padding)
    limits = torch.tensor(max_lengths, device=source.device)
    if model.length_head is None:
        lengths, length_log_p = model.target_lengths(memory), None
    else:
        log_p, classes = model.length_logits(memory).float().log_softmax(dim=-1).max(dim=-1)
        lengths, length_log_p = classes + 1, log_p
    limits = limits.minimum(lengths)
    positions = max(1, int(limits.max()))
    logits = model.parallel_logits(memory, lengths, positions).float()
    log_z = logits.logsumexp(dim=-1)
    end = END if length_log_p is None else END + 1
    logits[..., :end].fill_(float("-inf"))
    best, tokens = logits.max(dim=-1)  # [B, T]
    inside = torch.arange(positions, device=source.device) < limits[:, None]
    before_end = ((tokens == END).cumsum(dim=1) - (tokens == END).long()) == 0
    counted = inside & before_end
    log_p = ((best - log_z) * counted).sum(dim=1)
    if length_log_p is not None:
        log_p = log_p + length_log_p
    results = []
    for row, kept, total, length, limit in zip(
        tokens.tolist(),
        counted.tolist(),
        log_p.tolist(),
        lengths.tolist(),
        max_lengths,
        strict=True,
    ):
        found = [token for token, real in zip(row, kept, strict=True) if real]
        ended = END in found if length_log_p is None else length <= limit
        found = [token for token in found if token != END]
        results.append([Hypothesis(found, total, total, ended)])
    return results
