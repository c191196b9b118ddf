"""Packed training: the losses and gradients of padded batches, and what cannot be packed."""

import dataclasses

import pytest
import torch
from seq2seq_samples import SMALL, random_examples, small_model

from fastattn.seq2seq import training
from fastattn.seq2seq.data import PAD, collate
from fastattn.seq2seq.model import Seq2SeqTransformer
from fastattn.seq2seq.training import TrainingConfig


@pytest.mark.parametrize(
    ("smoothing", "positions"),
    [(0.0, "sinusoidal"), (0.1, "sinusoidal"), (0.1, "alibi"), (0.1, "t5"), (0.1, "rotary")],
)
def test_packed_losses_and_gradients_are_the_padded_ones(smoothing, positions):
    batch = collate(random_examples(7))
    assert batch.source_padding.any()
    outcomes = []
    for packed in (False, True):
        model = small_model(tied=True, seed=3, positions=positions).train()
        config = TrainingConfig(packed=packed, smoothing=smoothing)
        loss = training.cross_entropy(model, batch, config)
        outcomes.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for padded, packed in zip(*outcomes, strict=True):
        torch.testing.assert_close(packed, padded, atol=2e-6, rtol=1e-4)


def test_a_packed_batch_runs_on_real_tokens_only():
    batch = collate(random_examples(7))
    model, rows = small_model(tied=True, seed=3), []
    layers = (*model.transformer.encoder.layers, *model.transformer.decoder.layers)
    for layer in layers:
        layer.linear1.register_forward_hook(lambda module, args, y: rows.append(y.shape[0]))
    logits, targets = model.forward_packed(batch)
    source, target = sum(batch.source_lengths), sum(batch.target_lengths)
    assert rows == [source] * (len(layers) // 2) + [target] * (len(layers) // 2)
    assert logits.shape[0] == targets.shape[0] == target
    assert not (targets == PAD).any()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"copy": True}, "copies source tokens"),
        ({"norm": "power"}, "has power norms"),
        ({"memory_layers": "same"}, "reads the encoder's layers"),
    ],
)
def test_models_that_cannot_be_packed_raise_the_reason(options, why):
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, **options))
    with pytest.raises(ValueError, match=f"packed must be False for a model that {why}"):
        training.require_trainable(model, TrainingConfig(packed=True))
    with pytest.raises(ValueError, match=f"not supported for a model that {why}"):
        model.forward_packed(collate(random_examples(3)))


def test_pytorchs_transformer_and_guided_attention_are_not_packed():
    model = Seq2SeqTransformer(SMALL, torch.nn.Transformer)
    with pytest.raises(ValueError, match=r"for a model that has a torch\.nn.*Transformer"):
        training.require_trainable(model, TrainingConfig(packed=True))
    with pytest.raises(ValueError, match="packed must be False with guided_attention"):
        TrainingConfig(packed=True, guided_attention=1.0)
