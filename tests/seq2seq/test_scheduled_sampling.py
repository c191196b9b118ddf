"""Scheduled sampling: the share of true inputs, and the inputs that the model draws."""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import random_examples, small_model, toy_training

from fastattn.seq2seq import scheduled_sampling, training
from fastattn.seq2seq.data import BEGIN, END, PAD, collate
from fastattn.seq2seq.schedules import DECAYS, truth_share


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_the_share_of_true_inputs_is_that_of_bengio_et_al(floor):
    def shares(decay: str) -> list[float]:
        return [
            (truth_share(step, total_steps=1000, decay=decay, floor=floor) - floor) / (1 - floor)
            for step in (0, 250, 500, 1000, 2000)
        ]

    assert shares("linear") == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0])
    k = 0.01 ** (1 / 1000)
    assert shares("exponential") == pytest.approx([1.0, k**250, k**500, 0.01, 0.01])
    (k,) = (k / 1000 for k in range(1000, 200_000) if k / 1000 * math.log(k / 1000) <= 500 <
            (k + 1) / 1000 * math.log((k + 1) / 1000))  # fmt: skip
    sigmoid = [k / (k + math.exp(step / k)) for step in (0, 250, 500, 1000, 1000)]
    assert shares("inverse-sigmoid") == pytest.approx(sigmoid, abs=1e-4)
    for decay in DECAYS:
        assert shares(decay) == sorted(shares(decay), reverse=True)
    with pytest.raises(ValueError, match=r"decay must be one of .* got 'cubic'"):
        shares("cubic")


@torch.no_grad()
def test_inputs_are_drawn_from_the_models_distribution(monkeypatch):
    """If draws are replaced by the likeliest token, drawing all inputs is greedy decoding."""
    model = small_model(tied=False, seed=7).train()
    batch = collate(random_examples(6))
    monkeypatch.setattr(
        scheduled_sampling, "_draw", lambda logits, _: logits[..., END:].argmax(-1) + END
    )
    drawn = scheduled_sampling.sequential_inputs(model, batch, 0.0)
    assert model.training
    model.eval()
    logits = model(batch.source, drawn, batch.source_padding)
    best = logits[..., END:].argmax(-1) + END
    real = (batch.target_in != PAD) & (batch.target_in != BEGIN)
    assert torch.equal(drawn[:, 1:][real[:, 1:]], best[:, :-1][real[:, 1:]])
    assert torch.equal(drawn[~real], batch.target_in[~real])
    assert not torch.equal(drawn, batch.target_in)
    # One parallel pass draws from the pass over the truth; with as many passes as tokens, the
    # result is that of sequential drawing.
    logits = model(batch.source, batch.target_in, batch.source_padding)
    best = logits[..., END:].argmax(-1) + END
    one_pass = scheduled_sampling.parallel_inputs(model.train(), batch, 0.0)
    assert model.training
    assert torch.equal(one_pass[:, 1:][real[:, 1:]], best[:, :-1][real[:, 1:]])
    assert not torch.equal(one_pass, drawn)
    many_passes = scheduled_sampling.parallel_inputs(
        model, batch, 0.0, passes=batch.target_in.shape[1]
    )
    assert torch.equal(many_passes, drawn)


@pytest.mark.parametrize("form", ["sequential", "parallel"])
def test_inputs_are_true_with_their_share(form):
    mix = getattr(scheduled_sampling, f"{form}_inputs")
    model = small_model(tied=False)
    batch = collate(random_examples(400))
    real = (batch.target_in != PAD) & (batch.target_in != BEGIN)
    assert torch.equal(mix(model, batch, 1.0), batch.target_in)
    same = (mix(model, batch, 0.6) == batch.target_in)[real].float().mean().item()
    # A drawn token is the true one by chance, about once in 28 times.
    expected = 0.6 + 0.4 / 28
    assert same == pytest.approx(expected, abs=4 * (0.25 / int(real.sum())) ** 0.5)
    assert not torch.equal(mix(model, batch, 0.6), mix(model, batch, 0.6))
    torch.manual_seed(3)
    first = mix(model, batch, 0.6)
    torch.manual_seed(3)
    assert torch.equal(mix(model, batch, 0.6), first)
    assert first[real].min() >= END
    with pytest.raises(ValueError, match=r"truth_share must lie in \[0, 1\], got 1.5"):
        mix(model, batch, 1.5)


def test_scheduled_sampling_changes_the_inputs_of_the_loss(monkeypatch):
    model = small_model()
    batch = collate(random_examples(5))
    config = toy_training(scheduled_sampling="parallel", truth_floor=0.25, steps=11)
    shares = []

    def mix(model, batch, share):
        shares.append(share)
        return torch.full_like(batch.target_in, 9)

    monkeypatch.setattr(training, "parallel_inputs", mix)
    loss = training.batch_loss(model, batch, config, step=6)
    nines = dataclasses.replace(batch, target_in=torch.full_like(batch.target_in, 9))
    torch.testing.assert_close(loss, training.cross_entropy(model, nines, config))
    assert shares == [pytest.approx(1 - 0.75 * 5 / 11)]
