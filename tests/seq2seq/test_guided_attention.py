"""Guided attention: the loss compared with its formula, and its effect in training."""

import math

import pytest
import torch
from seq2seq_samples import CPU, random_examples, small_model, toy_training

from fastattn.seq2seq import training
from fastattn.seq2seq.data import END, PAD, Example, collate
from fastattn.seq2seq.losses import guided_attention_loss
from fastattn.seq2seq.model import record_attention
from fastattn.seq2seq.training import train


def test_guided_attention_equals_its_formula():
    weights = torch.rand(2, 3, 5, 4)  # [B, H, T, N]
    target_lengths, source_lengths = torch.tensor([5, 2]), torch.tensor([3, 4])
    total = count = 0.0
    for b in range(2):
        T, N = int(target_lengths[b]), int(source_lengths[b])
        for t in range(T):
            for n in range(N):
                w = 1 - math.exp(-((n / N - t / T) ** 2) / (2 * 0.3**2))
                total += w * weights[b, :, t, n].sum().item()
                count += 3
    loss = guided_attention_loss(weights, target_lengths, source_lengths, width=0.3)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    diagonal = torch.eye(6).expand(1, 2, 6, 6)
    whole = torch.tensor([6])
    assert guided_attention_loss(diagonal, whole, whole) == 0
    assert guided_attention_loss(diagonal.flip(-1), whole, whole) > 0.1


def test_guided_attention_moves_the_weights_to_the_diagonal():
    examples = [Example([*e.source[:-1], END], e.source) for e in random_examples(40)]
    losses_after = {}
    for weight in (0.0, 50.0):
        model = small_model()
        config = toy_training(steps=50, guided_attention=weight, learning_rate=1e-2)
        train(model, examples, [], config, device=CPU, show=False)
        batch = collate(examples)
        with torch.no_grad(), record_attention(model, only="multihead_attn") as weights:
            model.eval()(batch.source, batch.target_in, batch.source_padding)
        assert set(weights) == {f"decoder.layers.{i}.multihead_attn" for i in range(2)}
        lengths = (batch.target_out != PAD).sum(1), (~batch.source_padding).sum(1)
        losses_after[weight] = sum(
            float(guided_attention_loss(w, *lengths)) for w in weights.values()
        )
    assert losses_after[50.0] < 0.7 * losses_after[0.0]
    # Added to cross-entropy only in training: validation compares models by their tokens.
    batch, model = collate(examples[:5]), small_model()
    plain, guided = toy_training(), toy_training(guided_attention=2.0)
    losses = [training.cross_entropy(model, batch, config).item() for config in (plain, guided)]
    assert losses[1] > losses[0]
    model.eval()
    losses = [training.cross_entropy(model, batch, config).item() for config in (plain, guided)]
    assert losses[1] == losses[0]
