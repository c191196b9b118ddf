"""Training on whole sequences with BLEU as the reward: self-critical (Rennie et al. 2017).

A translation is sampled, and its reward is compared with that of the greedy translation as a
baseline: the gradient is -(r(sample) - r(greedy)) grad log p(sample) (equations 6 and 7). It is 0
for sentences on which both have the same reward.

BLEU is sacrebleu's sentence BLEU over token ids, with add-one counts for n > 1 (Lin and Och 2004)
and the effective order of short sentences, from 0 to 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .data import BEGIN, END, NEVER_CHOSEN, PAD, Batch, pad
from .generation import GREEDY, generate
from .model import Seq2SeqTransformer
from .sampling import Sampling

Reward = Callable[[Sequence[int], Sequence[int]], float]

# A translation is cut when it is this much longer than its reference.
EXTRA_TOKENS = 5


def token_bleu(hypothesis: Sequence[int], reference: Sequence[int]) -> float:
    """Return the sentence BLEU of token ids, 0 to 1."""
    if not hypothesis or not reference:
        return float(list(hypothesis) == list(reference))
    words = [" ".join(map(str, ids)) for ids in (hypothesis, reference)]
    return _metric().sentence_score(words[0], [words[1]]).score / 100.0


@functools.cache
def _metric() -> Any:
    from sacrebleu.metrics.bleu import BLEU

    # Ids are words, so nothing is tokenized.
    return BLEU(
        tokenize="none", smooth_method="add-k", smooth_value=1, effective_order=True, force=True
    )


def self_critical_loss(
    model: Seq2SeqTransformer, batch: Batch, *, reward: Reward = token_bleu
) -> Tensor:
    """Return a loss whose gradient is the negated gradient of the expected reward per token.

    Samples and greedy translations come from the model in eval mode; the sample's probability is
    computed, with gradient, in the model's own mode.
    """
    references = [
        [token for token in row if token not in (PAD, END)] for row in batch.target_out.tolist()
    ]
    limits = [min(len(r) + EXTRA_TOKENS, model.config.max_length) for r in references]
    was_training = model.training
    model.eval()
    seed = int(torch.randint(2**31, ()))
    sampled, greedy = (
        [
            found[0]
            for found in generate(
                model, batch.source, batch.source_padding, max_lengths=limits, strategy=strategy
            )
        ]
        for strategy in (Sampling(seed=seed), GREEDY)
    )
    model.train(was_training)
    advantages = [
        reward(sample.tokens, reference) - reward(base.tokens, reference)
        for sample, base, reference in zip(sampled, greedy, references, strict=True)
    ]
    targets = [sample.tokens + [END] * sample.ended for sample in sampled]
    device = batch.source.device
    target_in = pad([[BEGIN, *target[:-1]] for target in targets]).to(device)
    target_out = pad(targets).to(device)
    logits = model(batch.source, target_in, batch.source_padding).float()
    # PAD and BEGIN are never drawn. In the softmax they would gain the probability that samples
    # worse than the greedy translation lose, and no sample would ever reduce it.
    logits[..., NEVER_CHOSEN] = float("-inf")
    real = target_out != PAD
    index = target_out.where(real, END)[..., None]
    log_p = logits.log_softmax(dim=-1).gather(-1, index)[..., 0]
    weight = torch.tensor(advantages, device=device)[:, None]
    return -(weight * log_p).where(real, 0.0).sum() / real.sum()
