"""The pointer-generator compared with its formula, and copying of unseen words."""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples

from fastattn.seq2seq.data import END, PAD, Example, collate
from fastattn.seq2seq.generation import greedy_decode
from fastattn.seq2seq.model import Seq2SeqTransformer
from fastattn.seq2seq.pointer_generator import PointerGenerator
from fastattn.seq2seq.training import TrainingConfig, train


def test_the_pointer_generator_equals_its_formula():
    torch.manual_seed(0)
    head = PointerGenerator(8)
    hidden, memory, logits = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 3, 11)
    source = torch.tensor([[4, 7, 4, 9, 2], [3, 3, 2, 0, 0]])
    padding = source == PAD
    log_p = head(hidden, logits, memory, head.keys(memory), source, padding)
    for b in range(2):
        S = int((~padding[b]).sum())
        for t in range(3):
            scores = head.key(memory[b, :S]) @ head.query(hidden[b, t]) / math.sqrt(8)
            a = scores.softmax(0)
            context = a @ memory[b, :S]
            p_gen = head.generate(torch.cat([context, hidden[b, t]])).sigmoid()
            p = p_gen * logits[b, t].softmax(0)
            for i in range(S):
                p[source[b, i]] += (1 - p_gen[0]) * a[i]
            torch.testing.assert_close(log_p[b, t].exp(), p)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 3))
    # A word that the source lacks and whose probability is 0 in fp32.
    logits = torch.where(torch.arange(11) == 10, -1e4, logits).requires_grad_()
    log_p = head(hidden, logits, memory, head.keys(memory), source, padding)
    log_p[..., 10].sum().backward()
    assert log_p.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.slow
def test_copying_learns_unseen_words():
    """Targets repeat the source; half of the vocabulary is never seen in training."""
    rare = random_examples(30, vocabulary=60, seed=9)
    rare = [Example([30 + t // 2 if t != END else t for t in e.source], []) for e in rare]
    seen = [Example(e.source, e.source) for e in random_examples(150, vocabulary=30)]
    right = {}
    for copy in (False, True):
        torch.manual_seed(0)
        config = dataclasses.replace(SMALL, vocabulary=60, width=32, copy=copy)
        model = Seq2SeqTransformer(config)
        schedule = TrainingConfig(
            steps=120, batch_tokens=500, learning_rate=5e-3, warmup_steps=10, valid_every=1000
        )
        train(model, seen, [], schedule, device=CPU, show=False)
        batch = collate([Example(e.source, [END]) for e in rare])
        limits = [len(e.source) for e in rare]
        decoded = greedy_decode(
            model.eval(), batch.source, batch.source_padding, max_lengths=limits
        )
        tokens = [
            a == b
            for found, e in zip(decoded, rare, strict=True)
            for a, b in zip(found, e.source[:-1], strict=False)
        ]
        right[copy] = sum(tokens) / sum(len(e.source) - 1 for e in rare)
    assert right[False] < 0.1 and right[True] > 0.3, right
