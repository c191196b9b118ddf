"""Decoding written out: one source at a time, the whole model again for every token.

Also the models and sources that generation is tested with.
"""

import pytest
import torch
from seq2seq_samples import random_examples, small_model
from torch import Tensor

from fastattn.seq2seq.beam_search import BeamSearch
from fastattn.seq2seq.data import BEGIN, END, Example, collate
from fastattn.seq2seq.generation import Greedy, Hypothesis
from fastattn.seq2seq.model import Seq2SeqTransformer
from fastattn.seq2seq.sampling import Sampling

LIMITS = [3, 20, 12, 1, 20, 7, 20, 15]
STRATEGIES = [
    pytest.param(Greedy(), id="greedy"),
    pytest.param(Sampling(0.8, top_k=20, top_p=0.9, seed=2), id="sampling"),
    pytest.param(BeamSearch(3), id="beams"),
]
# Changes of a model's configuration.
KINDS = [
    {"copy": True}, {"memory_layers": "same"}, {"norm": "power"},
    {"norm": "batch", "copy": True, "memory_layers": "same"}, {"scoring": "additive"},
    {"scoring": "cosine"}, {"positions": "learned"}, {"positions": "alibi"}, {"positions": "t5"},
    {"positions": "rotary"},
    {"positions": "alibi", "memory_layers": "same", "copy": True, "norm_first": False},
]  # fmt: skip


def sharp_model(*, norm_first: bool = True) -> Seq2SeqTransformer:
    """A model with different continuations, some of which end, so that searches differ."""
    seed = 7 if norm_first else 6
    model = small_model(tied=False, seed=seed, norm_first=norm_first).eval()
    with torch.no_grad():
        model.head.weight.mul_(3.0)
        model.head.weight[END].mul_(4.0)
    return model


def sources(count: int = len(LIMITS), *, seed: int = 1) -> list[list[int]]:
    return [example.source for example in random_examples(count, seed=seed)]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    batch = collate([Example(row, [END]) for row in rows])
    return batch.source, batch.source_padding


@torch.no_grad()
def next_log_p(model: Seq2SeqTransformer, source: list[int], target: list[int]) -> Tensor:
    whole = torch.zeros(1, len(source), dtype=torch.bool)
    logits = model(torch.tensor([source]), torch.tensor([[BEGIN, *target]]), whole)
    return logits[0, -1].log_softmax(dim=-1)


def search_naively(model, source, limit, prefix=()) -> Hypothesis:
    target, total = [], 0.0
    while len(target) < limit:
        log_p = next_log_p(model, source, target)
        # PAD and BEGIN, the two tokens before END, may not be chosen.
        token = END + int(log_p[END:].argmax())
        if len(target) < len(prefix):
            token = prefix[len(target)]
        total += float(log_p[token])
        if token == END:
            return Hypothesis(target, total, total, True)
        target.append(token)
    return Hypothesis(target, total, total, False)


def search_beams_naively(model, source, limit, options, prefix=()) -> list[Hypothesis]:
    K = options.beams
    alive: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[Hypothesis] = []

    def factor(length: int) -> float:
        return ((5 + length) / 6) ** options.length_penalty

    for step in range(limit):
        candidates = []
        for score, target in alive:
            log_p = next_log_p(model, source, target).tolist()
            tokens = [prefix[step]] if step < len(prefix) else range(END, len(log_p))
            candidates += [(score + log_p[token], target, token) for token in tokens]
        candidates.sort(key=lambda candidate: -candidate[0])
        for score, target, token in candidates[:K]:
            if token == END:
                finished.append(Hypothesis(target, score, score / factor(step + 1), True))
        unfinished = [candidate for candidate in candidates[: 2 * K] if candidate[2] != END]
        alive = [(score, [*target, token]) for score, target, token in unfinished[:K]]
        if step + 1 == limit:
            finished += [Hypothesis(t, score, score / factor(limit), False) for score, t in alive]
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:K]
        if len(finished) == K and (
            options.early_stopping or alive[0][0] / factor(limit) <= finished[-1].score
        ):
            break
    return finished


def assert_same_hypotheses(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    """Tokens and ends exactly; scores as far as fp32 sums of logarithms agree."""
    assert [(h.tokens, h.ended) for h in found] == [(h.tokens, h.ended) for h in expected]
    for h, wanted in zip(found, expected, strict=True):
        assert h.score == pytest.approx(wanted.score, rel=1e-4, abs=1e-5)
        assert h.log_probability == pytest.approx(wanted.log_probability, rel=1e-4, abs=1e-5)
