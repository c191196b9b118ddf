"""`fastattn train --mesh` under torchrun: what it trains, how it is interrupted, how ranks fail."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_runs import TINY, call
from subprocesses import environment
from support import needs_distributed

import fastattn
from fastattn.seq2seq import checkpoint, training

pytestmark = needs_distributed
PACKAGE = str(Path(fastattn.__file__).parents[1])  # a script's path begins with its own folder
# Runs the command; rank RANK does something at the fifth update.
SCRIPT = """
import os, signal, sys, time
from fastattn import cli
from fastattn.seq2seq import training
update, count = training.update, 0
def faulty(*arguments):
    global count
    count += 1
    if count == 5 and os.environ["RANK"] == "RANK_OF_FAULT":
        FAULT
    return update(*arguments)
training.update = faulty
code = cli.main()
print("exit code", code, file=sys.__stderr__)
sys.exit(code)
"""
USUAL = [*TINY, "--dropout=0", "--threads=1", "--steps=8", "--valid-every=4", "--json"]


def torchrun(*arguments: str, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = ["-m", "fastattn"] if script is None else [str(script)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, *program, *arguments], env=environment(PYTHONPATH=PACKAGE), capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip


def with_fault(tmp_path: Path, fault: str, rank: int = 1) -> Path:
    script = tmp_path / "faulty.py"
    script.write_text(SCRIPT.replace("RANK_OF_FAULT", str(rank)).replace("FAULT", fault))
    return script


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in training.read_metrics(run / "metrics.jsonl") if "loss" in row]


def listing(run: Path) -> list[str]:
    return sorted(path.name for path in (run / checkpoint.CHECKPOINTS).iterdir())


@pytest.fixture(scope="session")
def expected(pairs_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    from fastattn import cli

    run = tmp_path_factory.mktemp("runs") / "one"
    assert cli.main(["train", "--data", str(pairs_file), "--out", str(run), *USUAL]) == 0
    return run


def assert_same_losses(run: Path, expected: Path) -> None:
    assert losses(run) == pytest.approx(losses(expected), abs=1e-5) and len(losses(run)) == 8


@pytest.mark.slow
def test_a_run_on_a_mesh_is_that_of_one_process(capsys, pairs_file, expected, tmp_path):
    run = tmp_path / "run"
    mesh = ["--mesh", "data=1,tensor=2", "--bleu-sentences=3"]
    done = torchrun("train", "--data", str(pairs_file), "--out", str(run), *USUAL, *mesh)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["updates"] == 8  # printed once
    assert done.stderr.count("training: 8/8 steps") == 1
    assert_same_losses(run, expected)
    assert listing(run) == listing(expected) == ["step-00000004", "step-00000008"]
    assert (run / "curves.png").exists()
    code, out, err = call(capsys, "translate", "--run", str(run), "--device=cpu", "karin six")
    assert code == 0 and len(out.splitlines()) == 1, err
    code, out, err = call(capsys, "evaluate", str(run), "--json", "--device=cpu")
    assert code == 0 and json.loads(out), err


@pytest.mark.slow
def test_a_signal_saves_and_the_printed_command_continues(pairs_file, expected, tmp_path):
    run, base = tmp_path / "a run", ["train", "--data", str(pairs_file)]
    script = with_fault(tmp_path, "os.kill(os.getppid(), signal.SIGTERM)")
    done = torchrun(*base, "--out", str(run), *USUAL, "--mesh", "data=2", script=script)
    assert done.stderr.count("fastattn: stopping after this update") == 1, done.stderr
    assert done.stderr.count("exit code 143") == 2
    interrupted = re.findall(r"interrupted after update (\d) of 8, saved in", done.stderr)
    assert len(interrupted) == 1 and listing(run)[-1] == f"step-0000000{interrupted[0]}"
    assert len(losses(run)) == int(interrupted[0])
    (command,) = re.findall("continue with: (.*)", done.stderr)
    words = shlex.split(command)
    assert words[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "fastattn"]
    assert words[words.index("--mesh") + 1] == "data=2"
    done = torchrun(*words[5:])
    assert done.returncode == 0, done.stderr
    assert_same_losses(run, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("raise RuntimeError('broken update')", "RuntimeError: broken update"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Signal 9 (SIGKILL) received by PID"),
    ],
)
def test_a_rank_that_fails_is_named_once(capsys, pairs_file, expected, tmp_path, fault, shown):
    run, base = tmp_path / "run", ["train", "--data", str(pairs_file)]
    often = [*USUAL, "--checkpoint-every=2", "--mesh", "data=2"]
    started = time.monotonic()
    done = torchrun(*base, "--out", str(run), *often, script=with_fault(tmp_path, fault))
    assert time.monotonic() - started < 60
    assert done.returncode == 1 and done.stderr.count(shown) == 1, done.stderr
    raised = "raise" in fault
    assert done.stderr.count("fastattn: rank 1 ends with an error") == raised
    assert "rank 0 ends" not in done.stderr and "onnection" not in done.stderr
    assert re.search(r"Root Cause.*\n.*\n.*\n.*\n  rank      : 1 ", done.stderr)
    # The checkpoint of update 4 waited for that of update 2.
    assert checkpoint.checkpoint_steps(run)[0] == 2
    code, _, err = call(capsys, "train", "--resume", "--out", str(run), "--device=cpu")
    assert code == 0, err
    assert_same_losses(run, expected)
    assert not any(name.startswith(".") for name in listing(run))


# -- input ----------------------------------------------------------------------------------------
def test_a_mesh_needs_torchrun(capsys, pairs_file, tmp_path, monkeypatch):
    words = ["train", "--data", str(pairs_file), "--out", str(tmp_path / "run"), "--mesh=data=2"]
    code, _, err = call(capsys, *words)
    assert code == 2
    command = shlex.join(["torchrun", "--nproc-per-node", "2", "-m", "fastattn", *words])
    assert f"--mesh needs 2 processes: start it with {command}\n" in err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = call(capsys, *words)
    assert code == 2 and "torchrun started, 4, got data=2, which has 2" in err
    code, _, err = call(capsys, *words[:-1])
    assert code == 2 and "--mesh must be given under torchrun, such as --mesh data=4" in err
    assert not (tmp_path / "run").exists()


def test_what_a_machine_lacks_is_said_once_there(capfd, pairs_file, tmp_path, monkeypatch):
    """Also by a machine without rank 0."""
    for name in ("stdout", "stderr"):  # which the command replaces
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank, shown in ((4, 1), (5, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank - 4))
        words = ["train", "--data", str(pairs_file), "--out", str(tmp_path / "run")]
        code, _, err = call(capfd, *words, "--mesh=data=4")
        assert code == 2 and err.count("must have as many ranks as") == shown


@pytest.mark.parametrize("mesh", ["2", "data", "data=0", "data=2,data=2", "pipe=2", "data=2,"])
def test_a_mesh_is_sizes_of_known_dimensions(capsys, tmp_path, mesh):
    code, _, err = call(capsys, "train", "--out", str(tmp_path / "run"), "--mesh", mesh)
    assert code == 2 and "argument --mesh: must be sizes of some of the dimensions data" in err


def test_a_rank_chooses_its_own_gpu(monkeypatch):
    import torch

    from fastattn.cli.arguments import UsageError
    from fastattn.cli.torchrun import local_device

    assert local_device(torch.device("cpu"), True) == torch.device("cpu")
    with pytest.raises(UsageError, match="--device must be cuda or cpu with --mesh, got cuda:1"):
        local_device(torch.device("cuda:1"), True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match=r"--mesh needs a GPU for each of the 2 .* has 1"):
        local_device(torch.device("cuda"), False)
