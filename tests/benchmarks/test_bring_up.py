"""The stages of `make gpu`: limits, crashes, interrupts, and which of their rows count."""

import argparse
import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import environment

from benchmarks import bring_up, rows
from fastattn import cli
from fastattn.ops import _env, _verified
from fastattn.testing import lines

# Stages that behave as named.
SCRIPTS = {
    "passes": "",
    "fails": "raise SystemExit(1)",
    "refuses": "raise SystemExit(3)",
    "has_wrong_options": "raise SystemExit(2)",
    "crashes": "import os; os.kill(os.getpid(), 11)",
    # With a process that would go on alone.
    "hangs": (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '300']);"
        "open('{out}/started', 'w').write(str(p.pid)); time.sleep(300)"
    ),
}


def replace_stages(**behaviours: str) -> None:
    """Gives the stages these commands, and passing ones to the others."""

    def command(stage: str, o: argparse.Namespace, seconds: float) -> list[str]:
        return ["-c", SCRIPTS[behaviours.get(stage, "passes")].replace("{out}", str(o.out))]

    bring_up.command = command


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """replace_stages, until the end of the test."""
    monkeypatch.setattr(bring_up, "command", bring_up.command)
    monkeypatch.setattr(bring_up, "GRACE_S", 1.0)
    return replace_stages


def _main(out: Path, *arguments: str) -> int:
    return bring_up.main(["--device=cpu", "--out", str(out), *arguments])


def _ended(out: Path) -> dict[str, tuple[str, str]]:
    """Status and message of the last run of each stage."""
    found = lines.read(out / "bring_up.jsonl")
    return {row["stage"]: (row["status"], row["message"]) for row in found}


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_stage_that_fails_does_not_stop_the_others(tmp_path, stages):
    behaviours = ("refuses", "crashes", "fails", "hangs", "has_wrong_options")
    stages(**dict(zip(bring_up.STAGES, behaviours, strict=False)))
    assert _main(tmp_path, "--budget=tune=1") == 1
    late = "was still running 1 s after its limit; the same command continues"
    assert _ended(tmp_path) == {
        "primitives": ("refused", ""), "instances": ("FAIL", "ended with SIGSEGV"),
        "check": ("FAIL", ""), "tune": ("unfinished", late),
        "record": ("FAIL", "ended with code 2"), "report": ("ok", ""),
    }  # fmt: skip
    assert _wait_for(lambda: not _is_running(int((tmp_path / "started").read_text())))
    stages()
    assert _main(tmp_path, "--stage=tune", "--stage=check") == 0
    assert [row["stage"] for row in lines.read(tmp_path / "bring_up.jsonl")][6:] == [
        "check",
        "tune",
    ]


def test_limits(tmp_path: Path, stages: Callable[..., None]) -> None:
    stages()
    assert _main(tmp_path, "--quick", "--budget=check=30") == 0
    limits = {row["stage"]: row["limit_s"] for row in lines.read(tmp_path / "bring_up.jsonl")}
    assert limits == {stage: quick for stage, (_, quick) in bring_up.STAGES.items()} | {"check": 30}
    for wrong in ("chek=3", "check", "check=3m"):
        with pytest.raises(SystemExit):
            _main(tmp_path, f"--budget={wrong}")


def test_a_stage_that_left_cases_out_is_unfinished(tmp_path: Path) -> None:
    file = tmp_path / "instances.jsonl"

    def outcome(code: int, *found: tuple[str, str]) -> tuple[str, str]:
        row = {"backend": "cpu", "message": ""}
        lines.append(file, [row | {"instance": name, "status": status} for name, status in found])
        return bring_up.outcome("instances", tmp_path, code)

    # A run that reaches no case exits with 1.
    assert outcome(1, ("a", "skipped")) == ("unfinished", "1 skipped; the same command continues")
    assert outcome(0, ("b", "ok"))[0] == "unfinished"
    assert outcome(1)[0] == "FAIL"  # an error
    assert outcome(0, ("a", "ok")) == ("ok", "2 ok")
    assert outcome(1)[0] == "FAIL"
    assert outcome(1, ("a", "FAIL"), ("c", "skipped")) == ("FAIL", "1 FAIL, 1 ok, 1 skipped")
    assert outcome(3) == ("FAIL", "ended with code 3")  # some backend runs on every device
    lines.append(tmp_path / "results.jsonl", [{"op": "ffn", "status": "skipped"}])
    assert bring_up.outcome("record", tmp_path, 0)[0] == "ok"


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
sys.path[:0] = {folders!r}
import test_bring_up
test_bring_up.replace_stages(check="hangs")
sys.exit(test_bring_up.bring_up.main(["--device=cpu", "--out", {out!r}, "--stage=check"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_stage_and_says_how_to_continue(tmp_path, number):
    folders = [str(Path(__file__).parent), str(rows.ROOT / "tests" / "support")]
    code = INTERRUPTED.format(folders=folders, out=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=rows.ROOT, env=environment(), stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert _wait_for(lambda: (tmp_path / "started").exists())
    assert _wait_for(lambda: (tmp_path / "started").read_text() != "")
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "was interrupted; the same command continues" in said
    assert _ended(tmp_path)["check"][0] == "unfinished"
    assert _wait_for(lambda: not _is_running(int((tmp_path / "started").read_text())))


def test_the_stages_are_commands_that_exist(tmp_path: Path) -> None:
    """Each with its rows in its file; the whole suite is recorded on a GPU only."""
    recorded = []
    for stage, device, quick in product(bring_up.STAGES, ("cpu", "cuda"), (False, True)):
        options = argparse.Namespace(device=device, out=tmp_path, quick=quick, peers=None, build=[])
        _, module, *arguments = bring_up.command(stage, options, 77.0)
        assert str(tmp_path) in " ".join(arguments)
        assert stage == "report" or {"--resume", "--seconds=77"} <= set(arguments)
        recorded += [(stage, device, quick)] * ("--record" in arguments)
        if stage == "check":
            cli.make_parser(arguments).parse_args(["check", "--device=cpu", *arguments[2:]])
        elif stage in ("instances", "tune", "record"):
            of_gpu = ["--arch=sm_90"] if stage == "tune" else []
            assert importlib.import_module(module).main([*arguments, *of_gpu, "--list"]) == 0
    assert recorded == [("check", "cuda", False)]


def _row(**fields: Any) -> dict[str, Any]:
    return {"applies_to": "new", "message": "", **fields}


def test_rows_that_count(tmp_path: Path) -> None:
    """Rows of the newest kernels; for a case that was skipped, the row of a later run."""
    file = tmp_path / "instances.jsonl"
    for applies_to, instance, status in (
        ("old", "a", "FAIL"), ("old", "b", "FAIL"), ("new", "b", "skipped"),
        ("new", "c", "skipped"), ("new", "d", "FAIL"), ("new", "b", "ok"),
    ):  # fmt: skip
        row = _row(backend="sm90", applies_to=applies_to, instance=instance, status=status)
        lines.append(file, [row])
    for _ in range(2):
        lines.append(file, [_row(backend="triton", instance="all", status="refused")])
    with file.open("a") as torn:
        torn.write('{"instance": "d", "stat')
    found = [(row["instance"], row["status"]) for row in lines.current(file)]
    assert found == [("b", "ok"), ("c", "skipped"), ("d", "FAIL"), ("all", "refused")]

    sample = dict(op="ffn", backend="cpu", dtype="fp32", sample="relu")
    file = tmp_path / "check.jsonl"
    for result, status in (("all", "skipped"), ("y", "ok"), ("dx", "FAIL")):
        lines.append(file, [_row(**sample, result=result, status=status)])
    assert [row["status"] for row in lines.current(file)] == ["ok", "FAIL"]
    assert lines.current(tmp_path / "tune.jsonl") == []


def test_the_report(tmp_path, monkeypatch, capsys):
    failed = _row(backend="sm90", instance="attention_fwd_sm90_bf16_d64_full", status="FAIL")
    lines.append(tmp_path / "instances.jsonl", [failed | {"message": "was still\nrunning"}])
    task = _row(task={"op": "layer_norm", "rows": 8}, config={"ROWS": 4}, status="wrong")
    lines.append(tmp_path / "tune.jsonl", [task, task | {"config": {"ROWS": 2}, "status": "ok"}])
    stage = {"stage": "instances", "status": "FAIL", "message": "1 FAIL", "seconds": 12.3}
    lines.append(tmp_path / "bring_up.jsonl", [stage])
    (cache := tmp_path / "cache").mkdir()
    (cache / "sm_90-sm90.json").write_text("a record")
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(cache))
    assert _main(tmp_path, "--stage=report") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<b>attention_fwd_sm90_bf16_d64_full sm90</b> was still running" in page
    assert page.count("layer_norm") == 1 and "ROWS&#x27;: 4" in page
    assert "<td>instances</td><td>FAIL</td><td>1 FAIL</td><td>12.3</td>" in page
    assert "Chosen" not in page and not (tmp_path / "verified").exists()

    monkeypatch.setattr(_env, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(_env, "device_name", lambda device: f"a {device}")
    kernels = {("ffn", "triton", "bfloat16"), ("attention", "sm90", "float16")}
    monkeypatch.setattr(_verified, "recorded", lambda device: (frozenset(kernels), frozenset()))
    assert bring_up.main(["--out", str(tmp_path), "--stage=report"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Bringing up a cuda" in page
    assert "<li>attention sm90 float16</li><li>ffn triton bfloat16</li>" in page
    assert (tmp_path / "verified" / "sm_90-sm90.json").read_text() == "a record"


@pytest.mark.slow
def test_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    """All stages, in a few seconds each, and one of them again: nothing finished is repeated."""
    command = [sys.executable, "-m", "benchmarks.bring_up", "--device=cpu", "--quick"]
    command += ["--out", str(tmp_path), "--budget=report=60"]
    command += [f"--budget={stage}=15" for stage in ("instances", "check", "record")]
    passed = {stage: 0 for stage in ("instances", "check", "record")}
    for more in ([], ["--stage=instances"]):
        done = subprocess.run(
            [*command, *more], cwd=rows.ROOT, env=environment(), capture_output=True, text=True
        )
        found = {stage: status for stage, (status, _) in _ended(tmp_path).items()}
        assert found["primitives"] == found["tune"] == "refused", done.stdout + done.stderr
        assert found["report"] == "ok" and "FAIL" not in found.values(), done.stdout + done.stderr
        for stage, before in passed.items():
            rows_now = lines.current(bring_up.rows_file(stage, tmp_path))
            passed[stage] = sum(row["status"] == "ok" for row in rows_now)
            assert passed[stage] >= max(before, 1), done.stdout + done.stderr
    ran = list(lines.read(tmp_path / "instances.jsonl"))
    names = [row["instance"] for row in ran if row["status"] == "ok"]
    assert len(names) == len(set(names))
    assert (tmp_path / "report.html").stat().st_size > 1000
