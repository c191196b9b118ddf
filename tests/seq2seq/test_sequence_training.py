"""Self-critical training: the reward and the loss compared with their formulas, and its effect."""

import dataclasses

import pytest
import torch
from seq2seq_samples import SMALL, random_examples, small_model, toy_training

from fastattn.seq2seq import sequence_training, training
from fastattn.seq2seq.data import END, Example, collate
from fastattn.seq2seq.generation import generate
from fastattn.seq2seq.model import Seq2SeqTransformer
from fastattn.seq2seq.sequence_training import self_critical_loss, token_bleu


def test_the_reward_is_sentence_bleu():
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(smooth_method="add-k", smooth_value=1, effective_order=True)
    hypothesis, reference = [5, 6, 7, 8, 9, 5], [5, 6, 7, 9, 8, 5, 4]
    words = [" ".join(f"w{i}" for i in ids) for ids in (hypothesis, reference)]
    expected = metric.sentence_score(words[0], [words[1]]).score / 100
    assert token_bleu(hypothesis, reference) == pytest.approx(expected)
    assert 0.2 < expected < 0.8
    assert token_bleu(reference, reference) == pytest.approx(1.0)
    assert token_bleu([], [4]) == token_bleu([4], []) == 0.0
    assert token_bleu([], []) == 1.0


def test_the_self_critical_loss_equals_its_formula(monkeypatch):
    model = small_model(tied=False, seed=7, dropout=0.3)
    batch = collate(random_examples(8, seed=3))
    found = []
    real = sequence_training.generate

    def recording(*args, **kwargs):
        found.append(real(*args, **kwargs))
        return found[-1]

    def reward(hypothesis, reference):
        return float(len(hypothesis)) - 0.5 * len(reference)

    monkeypatch.setattr(sequence_training, "generate", recording)
    state = torch.get_rng_state()
    loss = self_critical_loss(model, batch, reward=reward)
    assert model.training
    sampled, greedy = found
    # Probabilities in training mode: the same dropout is drawn again.
    torch.set_rng_state(state)
    torch.randint(2**31, ())
    targets = [h.tokens + [END] * h.ended for (h,) in sampled]
    again = collate([Example(s, t) for s, t in zip(batch.source.tolist(), targets, strict=True)])
    logits = model(batch.source, again.target_in, batch.source_padding)
    # The distribution of samples: PAD and BEGIN, the tokens before END, have probability 0.
    log_p = logits[..., END:].log_softmax(-1)
    total = 0.0
    for b, ((one,), (base,)) in enumerate(zip(sampled, greedy, strict=True)):
        advantage = len(one.tokens) - len(base.tokens)
        for t, token in enumerate(targets[b]):
            total -= advantage * log_p[b, t, token - END].item()
    assert len({len(h.tokens) for (h,) in sampled}) > 2
    assert loss.item() == pytest.approx(total / sum(map(len, targets)), rel=1e-4)
    # If all samples have the reward of the greedy result, the gradient is 0.
    equal = self_critical_loss(model, batch, reward=lambda *_: 0.3)
    (gradient,) = torch.autograd.grad(equal, model.head.weight)
    assert gradient.abs().max() == 0


def test_the_last_updates_reward_sequences(monkeypatch):
    model, batch = small_model(), collate(random_examples(5))
    config = toy_training(steps=10, sequence_steps=3, sequence_weight=0.75)
    monkeypatch.setattr(training, "self_critical_loss", lambda model, batch: torch.tensor(100.0))
    plain = training.batch_loss(model, batch, config, step=7)
    rewarded = training.batch_loss(model, batch, config, step=8)
    assert rewarded.item() == pytest.approx(75.0 + 0.25 * plain.item())


@pytest.mark.slow
def test_sequence_training_raises_the_sampled_bleu():
    """60 updates with only BLEU improve on 25 with cross-entropy."""
    examples = [Example(e.source, e.source) for e in random_examples(60, vocabulary=12)]
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, vocabulary=12, width=32))
    batch = collate(examples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    references = [e.target[:-1] for e in examples]

    def expected_reward() -> float:
        torch.manual_seed(0)
        model.eval()
        limits = [len(r) + 5 for r in references]
        total = 0.0
        for seed in range(4):
            found = generate(
                model, batch.source, batch.source_padding, max_lengths=limits,
                strategy=sequence_training.Sampling(seed=seed),
            )  # fmt: skip
            total += sum(token_bleu(h.tokens, r) for (h,), r in zip(found, references, strict=True))
        model.train()
        return total / len(references) / 4

    config = toy_training(smoothing=0.0)
    for _ in range(25):
        optimizer.zero_grad()
        training.cross_entropy(model, batch, config).backward()
        optimizer.step()
    before = expected_reward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        self_critical_loss(model, batch).backward()
        optimizer.step()
    after = expected_reward()
    assert 0.1 < before < 0.9
    assert after > before + 0.04, (before, after)
