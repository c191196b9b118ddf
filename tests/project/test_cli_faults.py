"""Faults around a run: in its text, its files, its numbers, its plots, its streams, and
signals.
"""

import io
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cli_runs import TINY, TINY_PRESET, call
from subprocesses import environment

from fastattn import cli
from fastattn.cli.signals import StopRequest
from fastattn.seq2seq import checkpoint, demo, runs, training


@pytest.fixture
def copied(run_folder: Path, tmp_path: Path) -> Path:
    """A run to be damaged."""
    return Path(shutil.copytree(run_folder, tmp_path / "copied"))


def _translate(run: Path, *rest: str) -> list[str]:
    return ["translate", "--run", str(run), "--device=cpu", *rest]


# -- the text of a run ----------------------------------------------------------------------------
def test_the_test_part_belongs_to_the_text(capsys, pairs_file, run_folder, tmp_path):
    from fastattn.seq2seq.data import read_pairs, split_pairs

    held_out = split_pairs(read_pairs(pairs_file).pairs, held_out=5).test[0]
    other = tmp_path / "other.tsv"
    line = f"{held_out.source}\t{held_out.target}"
    assert line in pairs_file.read_text()
    other.write_text(pairs_file.read_text().replace(line, f"{held_out.source}\tchanged"))
    code, out, err = call(capsys, "evaluate", str(run_folder), "--data", str(other), "--device=cpu")
    assert (code, out) == (2, "") and "must be the text that" in err
    resumed = ["train", "--resume", "--out", str(run_folder), "--data", str(other)]
    assert call(capsys, *resumed, "--device=cpu")[0] == 2


def test_a_run_records_its_text(capsys, copied, tmp_path):
    """Neither resuming nor evaluating needs it again."""
    again = ["train", "--resume", "--out", str(copied), "--device=cpu"]
    assert call(capsys, *again)[0] == 0
    assert call(capsys, "evaluate", str(copied), "--device=cpu")[0] == 0
    data = json.loads((copied / "data.json").read_text())
    (copied / "data.json").write_text(json.dumps(data | {"text": str(tmp_path / "absent.tsv")}))
    code, _, err = call(capsys, *again)
    assert code == 2 and "--data must be given: the run's own text does not exist, got" in err


def test_runs_are_compared_on_the_same_sentences(capsys, pairs_file, run_folder, tmp_path):
    other = tmp_path / "other"
    made = ["train", "--data", str(pairs_file), "--out", str(other), "--steps=1", *TINY, "--seed=1"]
    assert call(capsys, *made)[0] == 0
    code, out, err = call(capsys, "evaluate", str(run_folder), str(other), "--device=cpu")
    assert (code, out) == (2, "") and f"RUN must have the test part of {run_folder}" in err


def test_an_option_with_resume_is_refused_even_if_it_is_the_default(capsys, run_folder):
    again = ["train", "--resume", "--out", str(run_folder), "--device=cpu"]
    for flag in ("--dropout=0.1", "--clip=1", "--post-norm", "--held-out=5"):
        code, _, err = call(capsys, *again, flag)
        assert code == 2 and f"{flag.partition('=')[0]} cannot be given with --resume" in err


# -- files ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", ["", "{", "{}", "[]"])
@pytest.mark.parametrize(
    "name", ["model.json", "training.json", "tokenizer.json", "data.json", "best.json"]
)
def test_damaged_files_are_named(capsys, copied, name, content):
    (copied / name).write_text(content)
    if (name, content) in (("training.json", "{}"), ("model.json", "{}")):
        pytest.skip("an empty configuration is one of usual values")
    code, out, err = call(capsys, *_translate(copied, "karin six"))
    assert (code, out) == (2, "") and f"{copied / name} must be as training wrote it, got" in err


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json"])
def test_damaged_checkpoints_are_named(capsys, copied, name):
    newest = max((copied / "checkpoints").iterdir())
    (newest / name).write_bytes((newest / name).read_bytes()[:-9])
    code, _, err = call(capsys, "train", "--resume", "--out", str(copied), "--device=cpu")
    assert code == 2 and f"{newest / name} must be as training wrote it, got" in err


def test_files_of_a_run_are_as_readable_as_others(run_folder):
    (ordinary := run_folder / "ordinary").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run_folder.rglob("*") if path.is_file()}
    assert modes == {stat.S_IMODE(ordinary.stat().st_mode)}
    ordinary.unlink()


def test_a_full_disk_prints_no_traceback(capsys, pairs_file, tmp_path, monkeypatch):
    import safetensors.torch

    def full_disk(tensors, path, **options):
        raise safetensors.SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    run = tmp_path / "run"
    code, _, err = call(
        capsys, "train", "--data", str(pairs_file), "--out", str(run), "--steps=1", *TINY
    )
    assert code == 2 and "model.safetensors: I/O error: No space left" in err
    assert list((run / "checkpoints").iterdir()) == []


# -- numbers --------------------------------------------------------------------------------------
def test_nan_weights_after_the_last_update_are_divergence(capsys, pairs_file, tmp_path):
    run = tmp_path / "run"
    code, out, err = call(
        capsys, "train", "--data", str(pairs_file), "--out", str(run), *TINY,
        "--steps=1", "--learning-rate=1e30", "--warmup-steps=0",
    )  # fmt: skip
    assert (code, out) == (1, "") and "the validation loss must stay finite" in err
    assert not (run / "best.json").exists() and "NaN" not in (run / "metrics.jsonl").read_text()


@pytest.mark.parametrize("options, message", [
    (["--sample", "--temperature=1e-45"], "temperature must lie in"),
    (["--beams=4", "--length-penalty=1e300"], "is too large"),
    (["--threads=100000000000000000000"], "must be a positive integer below 2 ** 31"),
    (["--sample", "--seed=" + "9" * 24], "must be an integer of at least 0, below 2 ** 63"),
    (["--device=meta"], "must be a device that torch can use here"),
    (["--attention=a.xyz"], "must be a file .png, .svg, .pdf or .jpg, got 'a.xyz'"),
])  # fmt: skip
def test_options_out_of_range(capsys, run_folder, options, message):
    code, out, err = call(capsys, *_translate(run_folder, "karin six", *options))
    assert (code, out) == (2, "") and message in err


def test_training_in_several_processes_is_refused(capsys, pairs_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = tmp_path / "run"
    code, out, err = call(capsys, "train", "--data", str(pairs_file), "--out", str(run), *TINY)
    assert (code, out) == (2, "") and "must run in one process, got WORLD_SIZE=2" in err
    assert not run.exists()


def test_too_little_memory_has_words(capsys):
    from fastattn.cli.errors import report

    assert report(MemoryError(), "train") == 2
    assert capsys.readouterr().err.endswith("is too large: out of memory\n")


# -- lines and streams ----------------------------------------------------------------------------
def test_one_line_of_output_for_each_line_of_input(capsys, run_folder, monkeypatch):
    wild = _translate(run_folder, "--sample", "--temperature=30", "--scores")
    lines = [f"karin six {i}" for i in range(60)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeff" + "\r\n".join(lines) + "\r\n"))
    code, out, _ = call(capsys, *wild)
    assert code == 0 and out.count("\n") == 60 == len(out.splitlines())
    assert all(line.count("\t") == 1 for line in out.splitlines())
    assert (0, out, "") == call(capsys, *wild, *lines), "neither mark nor return is text"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert call(capsys, *_translate(run_folder)) == (0, "", "")
    monkeypatch.setattr("sys.stdin", None)
    code, _, err = call(capsys, *_translate(run_folder))
    assert code == 2 and "TEXT must be given if there is no standard input" in err


def test_lines_of_a_stream(capsys, run_folder, monkeypatch):
    """Only LF and CRLF end a line, and bytes that are not text are an error that names the line, in
    every locale.
    """

    def translate(text: bytes, lines_read: int = 0) -> tuple[int, str, str]:
        stream = io.TextIOWrapper(io.BytesIO(text), "utf-8", "strict")
        for _ in range(lines_read):
            stream.readline()
        monkeypatch.setattr("sys.stdin", stream)
        return call(capsys, *_translate(run_folder, "--json"))

    text = "\ufeffkarin\rsix\r\nkarin\u2028six\n\ufeffkarin six".encode()
    rows = json.loads(translate(text)[1])
    start = "import sys; from fastattn import cli; sys.exit(cli.main())"
    done = subprocess.run(
        [sys.executable, "-c", start, *_translate(run_folder, "--json")],
        input=text, capture_output=True, timeout=120, check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
    )  # fmt: skip
    assert json.loads(done.stdout) == rows
    assert [row["source"] for row in rows] == ["karin\rsix", "karin\u2028six", "karin six"]
    assert len({row["translation"] for row in rows}) == len({row["score"] for row in rows}) == 1
    for text, problem in (
        (b"karin\na \xff b\n", "text 2 must be UTF-8, got 'a \\udcff b'"),
        (b"k\0a\0\n\0", "text 1 must be UTF-8 text, got byte 0x00, as in UTF-16"),
    ):
        code, _, err = translate(text)
        assert code == 2 and problem in err
    rows = json.loads(translate(b"read before\nkarin six\nkarin one\n", 1)[1])
    assert [row["source"] for row in rows] == ["karin six", "karin one"]
    code, _, err = translate(b"read before\n" + 10**5 * b"a\n" + b"\xff", 1)
    assert code == 2 and "can't decode byte 0xff" in err


def test_a_missing_package_is_not_reported_as_damage(capsys, run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = call(capsys, *_translate(run_folder, "karin six"))
    assert code == 2 and "translate needs the package tokenizers, which is not installed" in err
    assert "pip install --no-build-isolation '.[demo]'" in err


def test_bytes_that_are_not_text(capsys, run_folder):
    code, _, err = call(capsys, *_translate(run_folder, "karin", os.fsdecode(b"a \xff b")))
    assert code == 2 and "text 2 must be UTF-8, got 'a \\udcff b'" in err


def test_ascii_streams(run_folder, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii", write_through=True))
    assert cli.main(_translate(run_folder, "--json", "ka\u00e9 six")) == 0
    assert json.loads(written.getvalue())[0]["source"] == "ka\u00e9 six"


@pytest.mark.slow
def test_closed_pipes(run_folder):
    start = "import sys; from fastattn import cli; sys.exit(cli.main())"
    command = [sys.executable, "-c", start, *_translate(run_folder, "--json")]
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command, "karin six"],
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert closed.returncode == 0 and closed.stderr == b""
    with subprocess.Popen(
        [*command, *["karin six"] * 900], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"rror" not in process.stderr.read() and process.wait(120) == 141


def test_dollar_signs_of_tokens_are_drawn(tmp_path):
    import torch

    from fastattn.seq2seq.plots import save_heat_maps

    tokens = ["$", "$\\frac$", "$x$", "_^"]
    save_heat_maps(tmp_path / "map.png", [torch.rand(2, 4, 4)] * 2, tokens, tokens, "title")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


# -- signals ---------------------------------------------------------------------------------------
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
def test_a_finished_run_is_extended_as_if_it_had_been_planned_so(capsys, pairs_file, tmp_path):
    """The extended run's own configuration gives the same bits in one call of `train`."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    base = ["train", "--data", str(pairs_file), "--out", str(run), *TINY, *USUAL]
    assert call(capsys, *base, "--steps=6", "--valid-every=4")[0] == 0
    before = curve(run)
    more = ["train", "--resume", "--out", str(run), "--device=cpu", "--threads=1"]
    code, out, err = call(capsys, *more, "--steps=12", "--json")
    assert code == 0 and json.loads(out)["updates"] == 12, err
    assert curve(run)[: len(before)] == before
    files = runs.open_run(run)
    assert files.training.steps == 12 and files.training.extensions == ((6, 6),)
    runs.start_run(whole, files)
    prepared = runs.prepare_text(
        runs_pairs(pairs_file), held_out=5, max_length=24, vocabulary=files.tokenizer, show=False
    )
    torch.manual_seed(0)
    model = runs.make_model(files.model)
    training.train(
        model, prepared.train, prepared.valid, files.training, device="cpu", run=whole, show=False
    )
    assert_same_runs(run, whole)
    # Asking for the same number again changes nothing.
    assert call(capsys, *more, "--steps=12")[0] == 0 and len(curve(run)) == 16
    assert runs.open_run(run).training == files.training


def test_a_run_is_extended_again_before_its_next_checkpoint():
    once = training.TrainingConfig(steps=100).extended(100, 200)
    assert once.extensions == ((100, 100),)
    again = once.extended(100, 300)
    assert again.steps == 300 and again.extensions == ((100, 100),)
    assert [again.planned_steps(step) for step in (1, 100, 101)] == [100, 100, 300]
    assert once.extended(150, 300).extensions == ((100, 100), (150, 200))
    # Later checkpoints were deleted.
    assert once.extended(80, 300).extensions == ((80, 100),)
    assert once.extended(0, 300).extensions == ()


def runs_pairs(path: Path):
    from fastattn.seq2seq.data import read_pairs

    return read_pairs(path).pairs


def test_a_run_that_stopped_early_is_not_extended(capsys, pairs_file, tmp_path):
    run = tmp_path / "run"
    base = ["train", "--data", str(pairs_file), "--out", str(run), *TINY, "--valid-every=1"]
    early = ["--patience=1", "--learning-rate=1e-9", "--warmup-steps=0", "--steps=30"]
    assert call(capsys, *base, *early)[0] == 0
    done = checkpoint.checkpoint_steps(run)[-1]
    assert done < 30
    code, _, err = call(capsys, "train", "--resume", "--out", str(run), "--steps=40")
    assert code == 2 and f"cannot be raised for a run that stopped at update {done} after" in err
