"""Signals during training and longer runs: what is saved, what is printed, what continues."""

import json
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cli_runs import TINY, TINY_PRESET, call
from subprocesses import environment

from fastattn.cli.signals import StopRequest
from fastattn.seq2seq import checkpoint, demo, runs, training
from fastattn.seq2seq.schedules import warmup_cosine

# Runs the command; the fifth update sends signals to its own process.
SIGNALLED = """
import os, signal, sys
from fastattn import cli
from fastattn.seq2seq import training
for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have switched SIGINT off
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
update, count = training.update, 0
def signalled(*arguments):
    global count
    count += 1
    if count == 5:
        for number in NUMBERS:
            os.kill(os.getpid(), number)
    return update(*arguments)
training.update = signalled
sys.exit(cli.main())
"""
USUAL = ["--steps=12", "--checkpoint-every=100", "--valid-every=3", "--dropout=0.2", "--threads=1"]


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def train_and_signal(pairs: Path, run: Path, *signals: int) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    script = SIGNALLED.replace("NUMBERS", repr([int(number) for number in signals]))
    command = ["train", "--data", str(pairs), "--out", str(run), *TINY, *USUAL]
    done = subprocess.run(
        [sys.executable, "-c", script, *command], env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def curve(run: Path) -> list[tuple]:
    rows = training.read_metrics(run / "metrics.jsonl")
    return [tuple(row.get(k) for k in ("step", "loss", "lr", "valid_loss")) for row in rows]


def final_state(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    folder = checkpoint.checkpoint_folder(run, checkpoint.checkpoint_steps(run)[-1])
    return {
        name: value
        for file in ("model", "state")
        for name, value in load_file(folder / f"{file}.safetensors").items()
    }


def assert_same_runs(actual: Path, expected: Path) -> None:
    assert curve(actual) == curve(expected) and len(curve(expected)) == 12 + 4
    states = final_state(actual), final_state(expected)
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_signal_saves_and_the_printed_command_continues(
    capsys, pairs_file, tmp_path, number, code
):
    run, whole = tmp_path / "a run", tmp_path / "whole"
    returned, err = train_and_signal(pairs_file, run, number)
    assert returned == code, err
    assert f"interrupted after update 5 of 12, saved in {run}\n" in err
    assert checkpoint.checkpoint_steps(run)[-1] == 5 and len(curve(run)) == 5 + 1
    command = shlex.split(err.rpartition("continue with: ")[2])
    assert command[0] == "fastattn" and "--threads" in command
    assert call(capsys, *command[1:])[0] == 0
    base = ["train", "--data", str(pairs_file), *TINY, *USUAL]
    assert call(capsys, *base, "--out", str(whole))[0] == 0
    assert_same_runs(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_second_signal_ends_at_once(pairs_file, tmp_path, number, code):
    returned, err = train_and_signal(pairs_file, tmp_path, number, number)
    assert returned == code and "a second signal ends without saving" in err
    assert checkpoint.checkpoint_steps(tmp_path)[-1] == 3
    assert ("continue with: fastattn train --resume" in err) == (number == signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop() and stop.exit_code == 143
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_training_in_another_thread_leaves_signals_alone():
    def enter() -> bool:
        with StopRequest() as stop:
            return stop()

    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() is False
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_demo_is_a_run_to_resume(capsys, pairs_file, tmp_path, monkeypatch):
    real, updates = training.update, []

    def signalled(*arguments):
        updates.append(1)
        if len(updates) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(demo, "CPU_PRESET", TINY_PRESET)
    monkeypatch.setattr(training, "update", signalled)
    out = tmp_path / "demo"
    arguments = ["--data", str(pairs_file), "--steps=8", "--device=cpu", "--out", str(out)]
    code, _, err = call(capsys, "demo", *arguments)
    assert code == 143 and "interrupted: fastattn.nn after update 5" in err
    assert len(updates) == 5 and checkpoint.checkpoint_steps(out)[-1] == 5
    command = shlex.split(err.rpartition("continue with: ")[2])
    assert call(capsys, *command[1:])[0] == 0
    assert checkpoint.checkpoint_steps(out)[-1] == 8


# -- longer runs ----------------------------------------------------------------------------------
def test_a_finished_run_is_extended(capsys, pairs_file, tmp_path):
    """The schedule of the new updates is that of a run of all of them."""
    run = tmp_path / "run"
    base = ["train", "--data", str(pairs_file), "--out", str(run), *TINY, *USUAL]
    assert call(capsys, *base, "--steps=6", "--valid-every=4")[0] == 0
    before = curve(run)
    more = ["train", "--resume", "--out", str(run), "--device=cpu", "--threads=1"]
    code, out, err = call(capsys, *more, "--steps=12", "--json")
    assert code == 0 and json.loads(out)["updates"] == 12, err
    assert curve(run)[: len(before)] == before
    config = runs.open_run(run).training
    assert config.steps == 12
    rates = {step: rate for step, _, rate, _ in curve(run) if rate is not None}
    for step in range(7, 13):
        share = warmup_cosine(step - 1, warmup_steps=config.warmup_steps, total_steps=12)
        assert rates[step] == pytest.approx(config.learning_rate * share)
    # Asking for the same number again changes nothing.
    assert call(capsys, *more, "--steps=12")[0] == 0 and len(curve(run)) == 16
    assert runs.open_run(run).training == config


def test_a_run_that_stopped_early_is_not_extended(capsys, pairs_file, tmp_path):
    run = tmp_path / "run"
    base = ["train", "--data", str(pairs_file), "--out", str(run), *TINY, "--valid-every=1"]
    early = ["--patience=1", "--learning-rate=1e-9", "--warmup-steps=0", "--steps=30"]
    assert call(capsys, *base, *early)[0] == 0
    done = checkpoint.checkpoint_steps(run)[-1]
    assert done < 30
    code, _, err = call(capsys, "train", "--resume", "--out", str(run), "--steps=40")
    assert code == 2 and f"cannot be raised for a run that stopped at update {done} after" in err
