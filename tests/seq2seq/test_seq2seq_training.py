"""Training: schedules, losses, options, runs that repeat and resume, checkpoints."""

import dataclasses
import math
import os
import stat
from pathlib import Path

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples, small_model, toy_pairs, toy_training
from torch.nn import functional as F

from fastattn.seq2seq import checkpoint, losses, runs, training
from fastattn.seq2seq import model as model_module
from fastattn.seq2seq.data import PAD, Position, SubwordTokenizer, collate, training_batches
from fastattn.seq2seq.generation import Translator, greedy_decode
from fastattn.seq2seq.losses import label_smoothed_cross_entropy
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.schedules import warmup_cosine
from fastattn.seq2seq.training import TrainingConfig, train
from fastattn.testing.timing import peak_memory


# -- schedule and loss -----------------------------------------------------------------------------
@pytest.mark.parametrize("cycles", [0.5, 1.0, 0.75])
def test_schedule_rises_linearly_then_follows_the_cosine(cycles):
    def factor(step: int) -> float:
        return warmup_cosine(step, warmup_steps=10, total_steps=110, cycles=cycles)

    assert [factor(step) for step in (0, 1, 5, 10)] == [0.0, 0.1, 0.5, 1.0]
    for step in (10, 35, 60, 110):
        expected = 0.5 * (1 + math.cos(2 * math.pi * cycles * (step - 10) / 100))
        assert factor(step) == pytest.approx(expected, abs=1e-12)
    end = {0.5: 0.0, 1.0: 1.0, 0.75: 0.5}[cycles]
    assert factor(110) == pytest.approx(end, abs=1e-12)
    assert min(factor(step) for step in range(111)) >= 0.0


def test_schedule_without_warm_up_starts_at_the_peak():
    assert warmup_cosine(0, warmup_steps=0, total_steps=10) == 1.0


def test_training_uses_the_schedule(tmp_path):
    config = TrainingConfig(
        steps=8, batch_tokens=80, learning_rate=0.01, warmup_steps=3, valid_every=100
    )
    train(small_model(), random_examples(30), [], config, device=CPU, run=tmp_path, show=False)
    rates = [row["lr"] for row in training.read_metrics(tmp_path / "metrics.jsonl")]
    expected = [0.01 * warmup_cosine(step, warmup_steps=3, total_steps=8) for step in range(8)]
    assert rates == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_label_smoothing_equals_torchs(smoothing, dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 7, 50)).to(dtype).requires_grad_()
    targets = torch.randint(1, 50, (4, 7))
    targets[0, 3:] = PAD
    targets[2] = PAD
    loss = label_smoothed_cross_entropy(logits, targets, smoothing=smoothing, ignore_index=PAD)
    (actual,) = torch.autograd.grad(loss, logits)
    reference = F.cross_entropy(
        logits.double().flatten(0, 1), targets.flatten(), ignore_index=PAD,
        label_smoothing=smoothing,
    )  # fmt: skip
    (expected,) = torch.autograd.grad(reference, logits)
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    torch.testing.assert_close(
        actual, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-8
    )
    assert actual[2].abs().max() == 0


needs_torchs_loss = pytest.mark.skipif(
    not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="needs torch >= 2.13"
)


@needs_torchs_loss
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_head_is_that_of_its_logits(smoothing, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", 5 * 50)  # 28 rows: five parts of 5, one of 3
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 7, 16), torch.randn(50, 16)
    targets = torch.randint(1, 50, (4, 7))
    targets[0, 3:] = PAD
    targets[2] = PAD
    given = [x.requires_grad_() for x in (hidden, weight)]
    options = {"smoothing": smoothing, "ignore_index": PAD}
    loss = losses.linear_cross_entropy(hidden, weight, targets, **options)
    wide = [x.detach().double().requires_grad_() for x in given]
    reference = F.cross_entropy(
        F.linear(*wide).flatten(0, 1), targets.flatten(), ignore_index=PAD,
        label_smoothing=smoothing,
    )  # fmt: skip
    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    expected = torch.autograd.grad(reference, wide)
    for x, y in zip(torch.autograd.grad(loss, given), expected, strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-6)


@needs_torchs_loss
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", [{}, {"tied": False}])
def test_large_logits_are_never_in_memory_together(packed, options, monkeypatch):
    batch = collate(random_examples(40))
    config = TrainingConfig(packed=packed, smoothing=0.1)
    monkeypatch.setattr(model_module, "linear_runs_torch", lambda x: True)
    outcomes, peaks = [], []
    for chunk in (losses.CHUNK, 1 << 17):
        monkeypatch.setattr(losses, "CHUNK", chunk)
        model = Seq2SeqTransformer(dataclasses.replace(SMALL, vocabulary=3000, **options)).train()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(number))

        def loss_and_gradients(model=model):
            loss = training.cross_entropy(model, batch, config)
            return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

        outcomes.append(loss_and_gradients())
        peaks.append(peak_memory(loss_and_gradients, CPU))
    for whole, parts in zip(*outcomes, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-4)
    logits = sum(batch.target_lengths) * 3000 * 4  # bytes
    assert peaks[1] < peaks[0] - 2 * logits


@needs_torchs_loss
@pytest.mark.parametrize("change", ["compile", "hook"])
def test_models_that_are_compiled_or_have_hooks_are_called(change, monkeypatch):
    monkeypatch.setattr(model_module, "linear_runs_torch", lambda x: True)
    monkeypatch.setattr(losses, "CHUNK", 1)
    model = Seq2SeqTransformer(SMALL)
    assert model.has_head_loss(10)
    if change == "compile":
        model.compile(backend="eager")
    else:
        model.register_forward_hook(lambda *_: None)
    assert not model.has_head_loss(10)


# -- training --------------------------------------------------------------------------------------
def test_rows_after_the_last_checkpoint_are_dropped(tmp_path):
    """A crash may leave one more row than the checkpoint has updates, and half a line."""
    examples, options = random_examples(40), {"device": CPU, "run": tmp_path, "show": False}
    train(small_model(), examples, examples[:3], toy_training(), stop_after=6, **options)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 7, "loss": 99.0}\n{"step": 8, "lo')
    second = train(small_model(), examples, examples[:3], toy_training(), resume=True, **options)
    rows = training.read_metrics(metrics)
    assert second.first_step == 7 and len(rows) == 12 + 3
    assert [row["loss"] for row in rows if "loss" in row][6:] == second.losses
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines[:4], "{'step': 5}\n", *lines[4:]]))
    with pytest.raises(checkpoint.DamagedFile, match=r"line 5 is not JSON: b\"{'step': 5}\""):
        training.read_metrics(metrics)


# -- options of training ---------------------------------------------------------------------------
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
    "plain": {},
    "scheduled sampling, sequential": {"scheduled_sampling": "sequential"},
    "scheduled sampling, parallel": {"scheduled_sampling": "parallel", "accumulate": 2},
    "guided attention": {"guided_attention": 1.0},
    "sequences": {"sequence_steps": 6, "sequence_weight": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_repeat_and_resume_bit_for_bit(tmp_path, name):
    examples, valid = random_examples(30), random_examples(6, seed=5)
    config = toy_training(steps=8, **OPTIONS[name])

    def curve(run, stops) -> list:
        losses, validations = [], []  # dropout is on: they depend on the generators' state
        for stop in stops:
            torch.manual_seed(99)  # training does not depend on what was drawn before it
            model = small_model(dropout=0.2)
            result = train(
                model, examples, valid, config,
                device=CPU, run=tmp_path / run, resume=True, stop_after=stop, show=False,
            )  # fmt: skip
            losses += result.losses
            validations += result.validations
        return [*losses, *validations, *model.state_dict()["embedding.weight"].flatten().tolist()]

    first = curve("first", (8,))
    assert first == curve("second", (8,))
    assert first == curve("parts", (3, 5, 8))
    assert len(set(first[:8])) == 8


def test_training_learns_the_toy_language():
    prepared = runs.prepare_text(
        toy_pairs(900, longest=3), held_out=40, max_length=16, vocabulary=400
    )
    config = ModelConfig(
        vocabulary=prepared.tokenizer.vocabulary, width=64, heads=4, encoder_layers=1,
        decoder_layers=1, ffn_width=128, dropout=0.0, max_length=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Seq2SeqTransformer(config)
    schedule = TrainingConfig(
        steps=250, batch_tokens=1000, learning_rate=5e-3, warmup_steps=30, valid_every=50
    )
    result = train(model, prepared.train, prepared.valid, schedule, device=CPU, show=False)
    translator = Translator(model, prepared.tokenizer)
    sources, references = zip(*prepared.splits.test, strict=True)
    translations = translator.translate(sources)
    right = sum(a == b for a, b in zip(translations, references, strict=True))
    # The untranslated source has no correct word: every word changes its first letter.
    assert right >= 30, (right, result.validations)
    assert result.validations[-1][1] < 0.5 * result.losses[0]


def test_bf16_autocast_stays_near_fp32():
    losses = {}
    for precision in ("fp32", "bf16"):
        config = toy_training(steps=6, precision=precision)
        losses[precision] = train(
            small_model(), random_examples(40), [], config, device=CPU, show=False
        ).losses
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"]


def test_the_rate_leaves_out_start_up_validation_and_checkpoints(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(training.time, "perf_counter", lambda: now)
    real = training.update

    def update(*arguments):
        nonlocal now
        now += 100.0 if now == 0 else 2.0  # the first one compiles
        return real(*arguments)

    def validation_loss(*_, **__):
        nonlocal now
        now += 1000.0
        return 1.0

    monkeypatch.setattr(training, "update", update)
    monkeypatch.setattr(training, "validation_loss", validation_loss)
    examples = random_examples(40)
    config = toy_training(steps=9, log_every=3, valid_every=4, checkpoint_every=4)
    result = train(
        small_model(), examples, examples[:3], config, device=CPU, run=tmp_path, show=False
    )
    tokens = [row["tokens"] for row in training.read_metrics(tmp_path / "metrics.jsonl")
              if "tokens" in row]  # fmt: skip
    assert result.tokens == sum(tokens) and result.seconds == 100.0 + 8 * 2.0
    assert result.tokens_per_second == pytest.approx(sum(tokens[3:]) / (6 * 2.0))


@pytest.mark.gpu
def test_training_resuming_and_decoding_on_a_gpu(tmp_path):
    cuda = torch.device("cuda")
    examples, config = random_examples(40), toy_training(steps=8)
    on_cpu = train(small_model(), examples, [], config, device=CPU, show=False)
    model = small_model()
    whole = train(model, examples, [], config, device=cuda, show=False)
    assert whole.losses == pytest.approx(on_cpu.losses, rel=1e-3)

    dropped = dataclasses.replace(SMALL, dropout=0.3)
    straight = train(Seq2SeqTransformer(dropped), examples, [], config, device=cuda, show=False)
    assert straight.losses != pytest.approx(whole.losses, rel=1e-3)
    torch.manual_seed(0)
    start = Seq2SeqTransformer(dropped).state_dict()
    curves = []
    for stops in ((8,), (4, 8)):
        run, curve = tmp_path / str(len(stops)), []
        for stop in stops:
            resumed = Seq2SeqTransformer(dropped)
            resumed.load_state_dict(start)
            curve += train(
                resumed, examples, [], config,
                device=cuda, run=run, resume=True, stop_after=stop, show=False,
            ).losses  # fmt: skip
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)

    model.eval()
    batch = collate(examples[:9])
    moved = batch.to(cuda)
    with torch.no_grad():
        reference = greedy_decode(
            model.cpu(), batch.source, batch.source_padding, max_lengths=[12] * 9, use_cache=False
        )
        decoded = greedy_decode(
            model.to(cuda), moved.source, moved.source_padding, max_lengths=[12] * 9
        )
    assert decoded == reference


def test_validation_loss_is_the_mean_over_tokens():
    model, examples = small_model(dropout=0.5), random_examples(30)
    config = toy_training(batch_tokens=60, smoothing=0.1)
    batched = training.validation_loss(model, examples, config, device=CPU)
    assert model.training
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for example in examples:
            batch = collate([example])
            logits = model(batch.source, batch.target_in, batch.source_padding)[0]
            total += F.cross_entropy(
                logits, batch.target_out[0], label_smoothing=0.1, reduction="sum"
            ).item()
            count += len(example.target)
    assert batched == pytest.approx(total / count, rel=1e-5)


def test_gradients_are_clipped_and_only_matrices_decay():
    model = small_model()
    config = toy_training(clip=0.01, weight_decay=0.3, learning_rate=1.0)
    optimizer = training.make_optimizer(model, config, CPU)
    decays = {
        parameter: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[parameter] == (0.3 if parameter.ndim >= 2 else 0.0), name
    batch = collate(random_examples(5))
    _, norm = training.update(model, optimizer, [batch], 0.0, config)
    assert norm > 0.01
    clipped = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path, monkeypatch):
    prepared = runs.prepare_text(
        toy_pairs(200), held_out=20, max_length=20, vocabulary=300, show=False
    )
    config = dataclasses.replace(SMALL, vocabulary=prepared.tokenizer.vocabulary)
    schedule = toy_training(steps=8, valid_every=2, checkpoint_every=2, keep=1)
    run = tmp_path / "run"
    files = runs.RunFiles(config, schedule, prepared.tokenizer, prepared.digest, 20)
    runs.start_run(run, files)
    validations = iter([3.0, 2.0, 5.0, 4.0])
    monkeypatch.setattr(training, "validation_loss", lambda *_, **__: next(validations))
    model = Seq2SeqTransformer(config)
    result = train(model, prepared.train, prepared.valid, schedule, device=CPU, run=run, show=False)
    assert result.validations == [(2, 3.0), (4, 2.0), (6, 5.0), (8, 4.0)]
    assert checkpoint.read_best(run) == checkpoint.Best(4, 2.0)
    assert checkpoint.checkpoint_steps(run) == [4, 8]
    loaded = runs.load_translator(run).model
    fourth, last = Seq2SeqTransformer(config), Seq2SeqTransformer(config)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(run, 4), fourth)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(run, 8), last)
    assert torch.equal(loaded.embedding.weight, fourth.embedding.weight)
    assert torch.equal(model.embedding.weight, last.embedding.weight)
    assert not torch.equal(fourth.embedding.weight, last.embedding.weight)

    opened = runs.open_run(run)
    assert (opened.model, opened.training) == (config, schedule)
    assert (opened.data_digest, opened.held_out) == (prepared.digest, 20)
    assert opened.tokenizer.to_json() == prepared.tokenizer.to_json()
    with pytest.raises(FileExistsError, match=r"must be new or empty, got .*, which holds a run"):
        runs.start_run(run, files)
    (run / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"which has no tokenizer\.json"):
        runs.open_run(run)


def test_a_run_without_checkpoint_is_named(tmp_path):
    tokenizer = SubwordTokenizer.train(["ka"], vocabulary=260)
    config = dataclasses.replace(SMALL, vocabulary=260)
    runs.start_run(tmp_path, runs.RunFiles(config, toy_training(), tokenizer, "", 1))
    with pytest.raises(FileNotFoundError, match="must hold a checkpoint, got"):
        runs.load_translator(tmp_path)


# -- checkpoints -----------------------------------------------------------------------------------
def a_checkpoint(run: Path, step: int, *, seed: int = 0) -> Seq2SeqTransformer:
    model = small_model(seed=seed)
    optimizer = training.make_optimizer(model, toy_training(), CPU)
    state = checkpoint.TrainingState(step, Position(1, 2), 300)
    checkpoint.save_checkpoint(run, state, model, optimizer, CPU)
    return model


def test_a_failed_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    import safetensors.torch

    saved = a_checkpoint(tmp_path, 5)
    real = safetensors.torch.save_file

    def full_disk(tensors, path, **options):
        real(tensors, path, **options)
        if Path(path).name == "state.safetensors":
            raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    for step in (5, 6):
        with pytest.raises(OSError, match="no space left"):
            a_checkpoint(tmp_path, step, seed=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    loaded = small_model(seed=2)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(tmp_path, 5), loaded)
    assert torch.equal(loaded.embedding.weight, saved.embedding.weight)


def test_a_checkpoint_replaces_the_one_of_its_step(tmp_path):
    a_checkpoint(tmp_path, 5)
    saved, loaded = a_checkpoint(tmp_path, 5, seed=1), small_model(seed=2)
    checkpoint.load_parameters(checkpoint.checkpoint_folder(tmp_path, 5), loaded)
    assert torch.equal(loaded.embedding.weight, saved.embedding.weight)


def test_unfinished_folders_are_not_checkpoints(tmp_path):
    for step in (5, 30, 200):
        a_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / ".step-00000300-abc").mkdir()
    assert checkpoint.checkpoint_steps(tmp_path) == [5, 30, 200]
    checkpoint.write_best(tmp_path, checkpoint.Best(5, 1.5))
    checkpoint.prune_checkpoints(tmp_path, keep=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000005",
        "step-00000200",
    ]
    assert checkpoint.checkpoint_steps(tmp_path / "nowhere") == []


def test_checkpoints_hold_the_whole_state(tmp_path):
    model = small_model(dropout=0.3)
    optimizer = training.make_optimizer(model, toy_training(), CPU)
    batches = training_batches(random_examples(30), token_budget=100, seed=0)
    for _ in range(3):
        training.update(model, optimizer, [next(batches)[0]], 1e-3, toy_training())
    state = checkpoint.TrainingState(3, Position(0, 3), 111, checkpoint.Best(2, 1.25))
    folder = checkpoint.save_checkpoint(tmp_path, state, model, optimizer, CPU)
    expected_noise = torch.rand(4)
    torch.manual_seed(9)

    other = small_model(dropout=0.3, seed=5)
    other_optimizer = training.make_optimizer(other, toy_training(), CPU)
    found = checkpoint.read_checkpoint(folder, other)
    found.restore(other, other_optimizer, CPU)
    assert found.state == state
    assert torch.equal(torch.rand(4), expected_noise)
    saved, loaded = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert saved.keys() == loaded.keys() and len(saved) == len(list(model.parameters()))
    for index, values in saved.items():
        for key, value in values.items():
            assert torch.equal(value, loaded[index][key]), (index, key)


def test_files_are_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "best.json"
    checkpoint.write_atomically(path, "old")

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_as_readable_as_others_and_stay_so(tmp_path):
    before = os.umask(0o027)
    try:
        for name in ("first", "second"):
            checkpoint.write_atomically(tmp_path / name, "text")
    finally:
        kept = os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("first", "second")]
    assert kept == 0o027 and modes == [0o640, 0o640]


def test_stopping_after_some_updates():
    examples = random_examples(30)
    schedule = toy_training(steps=2)
    result = train(
        small_model(), examples, examples, schedule, device="cpu", stop_after=0, show=False
    )
    assert result.losses == []
    with pytest.raises(ValueError, match="stop_after must be at least 0, got -1"):
        train(small_model(), examples, [], schedule, device=CPU, stop_after=-1, show=False)


@pytest.mark.parametrize(("changes", "message"), [
    ({"keep": 0}, "keep must be an integer of at least 1, got 0"),
    ({"precision": "fp8"}, r"precision must be one of .* got 'fp8'"),
    ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
    ({"steps": 2.5}, r"steps must be an integer of at least 1, got 2\.5"),
    ({"clip": -1.0}, r"clip must be above 0, got -1\.0"),
    ({"clip": math.nan}, "clip must be above 0, got nan"),
    ({"learning_rate": math.inf}, "learning_rate must be above 0, got inf"),
    ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
    ({"betas": (2.0, 3.0)}, r"betas must lie in \[0, 1\), got \(2\.0, 3\.0\)"),
    ({"cycles": math.nan}, "cycles must be finite, got nan"),
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
])  # fmt: skip
def test_errors_of_training_options(changes, message):
    with pytest.raises(ValueError, match=message):
        toy_training(**changes)


def test_a_single_string_is_not_a_list_of_texts():
    translator = Translator(small_model(), SubwordTokenizer.train(["ka"], vocabulary=260))
    with pytest.raises(TypeError, match="texts must be a sequence of sentences, got one: 'ka lo'"):
        translator.translate("ka lo")
    for name in ("batch_size", "max_length"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            translator.translate(["ka"], **{name: 0})
