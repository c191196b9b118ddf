"""Greedy decoding from BEGIN to END, translation of text with a trained run, and BLEU.

With a fastattn decoder each step feeds one token through a key/value cache; any other decoder
runs the whole prefix again at every step, which gives the same tokens more slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .data import BEGIN, END, PAD, SubwordTokenizer, pad
from .model import Seq2SeqTransformer

# Asking whether all sentences have ended makes a GPU wait, so it is asked every few steps.
STEPS_BETWEEN_END_CHECKS = 8


@torch.no_grad()
def greedy_decode(
    model: Seq2SeqTransformer,
    source: Tensor,
    source_padding: Tensor,
    *,
    max_lengths: Sequence[int],
    use_cache: bool | None = None,
) -> list[list[int]]:
    """Return the most likely next token, over and over, for a batch of sources [B, S].

    A sentence stops at END, which is not returned, or at its own entry of `max_lengths`, so its
    result does not depend on its neighbours. `use_cache` None means: where the decoder has one.
    The model must be in eval mode.
    """
    if model.training:
        raise ValueError("greedy_decode wants a model in eval mode, got one in training mode")
    if len(max_lengths) != len(source):
        raise ValueError(
            f"max_lengths must hold one length for each of {len(source)} sources, "
            f"got {len(max_lengths)}"
        )
    limit = max(max_lengths)
    if limit > model.config.max_length:
        raise ValueError(
            f"max_lengths must not exceed the model's max_length {model.config.max_length}, "
            f"got {limit}"
        )
    decoder = model.transformer.decoder
    has_cache = hasattr(decoder, "init_cache")
    if use_cache and not has_cache:
        raise ValueError(
            f"use_cache=True wants a fastattn.nn decoder, got {type(decoder).__module__}."
            f"{type(decoder).__name__}"
        )
    use_cache = has_cache if use_cache is None else use_cache
    memory = model.encode(source, source_padding)
    next_hidden = (_cached_steps if use_cache else _prefix_steps)(
        model, memory, source_padding, limit
    )
    B = len(source)
    tokens = torch.full((B, limit + 1), PAD, dtype=torch.long, device=source.device)
    tokens[:, 0] = BEGIN
    limits = torch.tensor(max_lengths, device=source.device)
    ended = limits <= 0
    for t in range(limit):
        choice = model.logits(next_hidden(tokens[:, : t + 1])).argmax(dim=-1)  # [B]
        tokens[:, t + 1] = choice.where(~ended, PAD)
        ended = ended | (choice == END) | (limits <= t + 1)
        if (t + 1) % STEPS_BETWEEN_END_CHECKS == 0 and bool(ended.all()):
            break
    return [_cut(row) for row in tokens[:, 1:].tolist()]


NextHidden = Callable[[Tensor], Tensor]


def _cached_steps(
    model: Seq2SeqTransformer, memory: Tensor, source_padding: Tensor, limit: int
) -> NextHidden:
    decoder = model.transformer.decoder
    cache = decoder.init_cache(memory, memory_key_padding_mask=source_padding, max_length=limit)

    def next_hidden(prefix: Tensor) -> Tensor:
        x = model.embed_target(prefix[:, -1:], start=prefix.shape[1] - 1)
        return decoder.step(x, cache)[:, -1]  # [B, width]

    return next_hidden


def _prefix_steps(
    model: Seq2SeqTransformer, memory: Tensor, source_padding: Tensor, limit: int
) -> NextHidden:
    return lambda prefix: model.decode(prefix, memory, source_padding)[:, -1]


def _cut(row: list[int]) -> list[int]:
    """Return the tokens before END, or before the padding of a sentence cut at its limit."""
    for index, token in enumerate(row):
        if token in (END, PAD):
            return row[:index]
    return row


@dataclass(frozen=True)
class Translator:
    """A model with its tokenizer: text in, text out."""

    model: Seq2SeqTransformer
    tokenizer: SubwordTokenizer

    def translate(
        self,
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        batch_size: int = 64,
        use_cache: bool | None = None,
        notify: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """Translate sentences, in batches of similar length; `notify` gets the count so far.

        A translation has at most `max_length` tokens, by default twice those of its source and
        ten more. A source longer than the model allows raises ValueError; an empty one stays so.
        """
        allowed = self.model.config.max_length
        sources = self.tokenizer.encode_all(texts)
        for number, ids in enumerate(sources, start=1):
            if len(ids) + 1 > allowed:
                raise ValueError(
                    f"text {number} must have at most {allowed - 1} tokens, got {len(ids)}: "
                    f"{texts[number - 1][:60]!r}"
                )
        device = self.model.embedding.weight.device
        results = [""] * len(texts)
        order = sorted((i for i in range(len(texts)) if sources[i]), key=lambda i: len(sources[i]))
        was_training = self.model.training
        self.model.eval()
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            source = pad([[*sources[i], END] for i in chosen]).to(device)
            limits = [min(allowed, max_length or 2 * len(sources[i]) + 10) for i in chosen]
            decoded = greedy_decode(
                self.model, source, source == PAD, max_lengths=limits, use_cache=use_cache
            )
            for i, ids in zip(chosen, decoded, strict=True):
                results[i] = self.tokenizer.decode(ids)
            notify(start + len(chosen))
        self.model.train(was_training)
        return results


@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU, 0 to 100; `signature` names the settings, for comparison with other work."""

    score: float
    details: str
    signature: str


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """Return sacrebleu's corpus BLEU (13a tokens, letter case kept) with one reference each."""
    from sacrebleu.metrics.bleu import BLEU

    if len(hypotheses) != len(references):
        raise ValueError(
            f"references must be as many as the {len(hypotheses)} hypotheses, got {len(references)}"
        )
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(score.score, str(score), str(metric.get_signature()))
