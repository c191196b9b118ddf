"""Options of training: accumulation, patience, scores, repeated and resumed runs, errors."""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import CPU, random_examples, small_model, toy_training

from fastattn.seq2seq import checkpoint, training
from fastattn.seq2seq.data import collate
from fastattn.seq2seq.generation import greedy_decode
from fastattn.seq2seq.training import train


def test_accumulated_batches_are_one_batch():
    examples = random_examples(12)
    config = toy_training(clip=1e9)
    results = []
    for groups in ([examples], [examples[:3], examples[3:4], examples[4:]]):
        model = small_model()
        optimizer = training.make_optimizer(model, config, CPU)
        batches = [collate(group) for group in groups]
        loss, norm = training.update(model, optimizer, batches, 1e-3, config)
        results.append((loss.item(), norm.item(), [p.grad.clone() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    for whole, accumulated in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(whole, accumulated, rtol=1e-3, atol=1e-6)


def test_an_update_uses_its_batches_in_order(tmp_path):
    examples = random_examples(40)
    config = toy_training(steps=4, accumulate=3)
    result = train(small_model(), examples, [], config, device=CPU, run=tmp_path, show=False)
    stream = training.training_batches(examples, token_budget=config.batch_tokens, seed=0)
    tokens = [next(stream)[0].tokens for _ in range(12)]
    rows = training.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["tokens"] for row in rows] == [sum(tokens[i : i + 3]) for i in (0, 3, 6, 9)]
    assert len(result.losses) == 4


def test_patience_stops_training_also_of_a_resumed_run(tmp_path, monkeypatch):
    losses = [3.0, 2.0, 2.5, 2.1, 2.0, 1.0]
    calls = []

    def validation_loss(*_, **__):
        calls.append(losses[len(calls)])
        return calls[-1]

    monkeypatch.setattr(training, "validation_loss", validation_loss)
    examples = random_examples(40)
    config = toy_training(steps=12, valid_every=2, checkpoint_every=100, patience=3)
    arguments = {"device": CPU, "run": tmp_path, "show": False}
    result = train(small_model(), examples, examples[:3], config, **arguments)
    assert result.stopped_early and len(result.losses) == 10 and len(calls) == 5
    assert checkpoint.read_best(tmp_path) == checkpoint.Best(4, 2.0)
    assert checkpoint.checkpoint_steps(tmp_path) == [4, 10]
    again = train(small_model(), examples, examples[:3], config, resume=True, **arguments)
    assert again.stopped_early and again.losses == [] and len(calls) == 5
    without_patience = train(
        small_model(), examples, examples[:3], dataclasses.replace(config, patience=0),
        resume=True, **arguments,
    )  # fmt: skip
    assert not without_patience.stopped_early and len(without_patience.losses) == 2


def test_a_score_is_called_at_every_validation_and_does_not_change_training(tmp_path):
    examples = random_examples(40)
    config = toy_training(steps=6, valid_every=2)

    def score(model) -> float:
        batch = collate(examples[:4])
        model.eval()
        found = greedy_decode(model, batch.source, batch.source_padding, max_lengths=[9] * 4)
        model.train()
        return float(sum(map(len, found)))

    results = [
        train(
            small_model(dropout=0.2), examples, examples[:3], config,
            device=CPU, run=tmp_path / name, score=wanted, show=False,
        )
        for name, wanted in (("with", score), ("without", None))
    ]  # fmt: skip
    assert results[0].losses == results[1].losses
    assert [step for step, _ in results[0].bleus] == [2, 4, 6] and results[1].bleus == ()
    rows = training.read_metrics(tmp_path / "with" / "metrics.jsonl")
    kept = tuple((row["step"], row["valid_bleu"]) for row in rows if "valid_loss" in row)
    assert kept == results[0].bleus


OPTIONS = {
    "scheduled sampling, sequential": {"scheduled_sampling": "sequential"},
    "scheduled sampling, parallel": {"scheduled_sampling": "parallel", "accumulate": 2},
    "guided attention": {"guided_attention": 1.0},
    "sequences": {"sequence_steps": 6, "sequence_weight": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_repeat_and_resume_bit_for_bit(tmp_path, name):
    examples, valid = random_examples(30), random_examples(6, seed=5)
    config = toy_training(steps=8, **OPTIONS[name])

    def curve(run, stops) -> list[float]:
        losses = []
        for stop in stops:
            torch.manual_seed(99)  # training does not depend on what was drawn before it
            model = small_model(dropout=0.2)
            result = train(
                model, examples, valid, config,
                device=CPU, run=tmp_path / run, resume=True, stop_after=stop, show=False,
            )  # fmt: skip
            losses += result.losses
        return [*losses, *model.state_dict()["embedding.weight"].flatten().tolist()]

    first = curve("first", (8,))
    assert first == curve("second", (8,))
    assert first == curve("parts", (3, 5, 8))
    assert len(set(first[:8])) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, got 0"),
        ({"patience": -1}, "patience must be at least 0, got -1"),
        ({"sequence_steps": -1}, "sequence_steps must be at least 0, got -1"),
        ({"guided_attention": -0.5}, "guided_attention must be at least 0, got -0.5"),
        ({"guided_attention": math.nan}, "guided_attention must be at least 0, got nan"),
        ({"guided_width": 0.0}, "guided_width must be above 0, got 0.0"),
        ({"scheduled_sampling": "yes"}, "scheduled_sampling must be one of .* got 'yes'"),
        ({"sampling_decay": "slow"}, "sampling_decay must be one of .* got 'slow'"),
        ({"truth_floor": 1.1}, r"truth_floor must lie in \[0, 1\], got 1.1"),
        ({"sequence_weight": -0.1}, r"sequence_weight must lie in \[0, 1\], got -0.1"),
    ],
)
def test_errors_of_training_options(changes, message):
    with pytest.raises(ValueError, match=message):
        toy_training(**changes)
