"""The stages of `make gpu`: limits, crashes, interrupts, and which rows of theirs count."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from subprocesses import environment

from benchmarks import bring_up, bring_up_report, rows, run, tune
from benchmarks.bring_up import Settings, Stage
from benchmarks.bring_up_rows import BRING_UP, FILES, count_rows, stage_rows
from benchmarks.report import Heading, Text
from fastattn import cli
from fastattn.ops import _env, _verified
from fastattn.testing import instances, lines

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


def _stage(name: str, behaviour: str, seconds: float = 60.0) -> Stage:
    def command(settings: Settings, seconds: float) -> list[str]:
        return ["-c", SCRIPTS[behaviour].replace("{out}", str(settings.out))]

    needs_gpu = name in ("primitives", "check")
    return Stage(name, f"A stage that {behaviour}", seconds, seconds, command, needs_gpu)


def _rows(out: Path) -> list[dict[str, Any]]:
    return list(lines.read(out / BRING_UP))


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


def test_a_stage_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Settings("cpu", tmp_path, False)
    behaviours = ("crashes", "fails", "refuses", "hangs", "passes")
    stages = [
        _stage(name, behaviour, 0.5 if behaviour == "hangs" else 60.0)
        for name, behaviour in zip(FILES, behaviours, strict=False)
    ]
    monkeypatch.setattr(bring_up, "STAGES", stages)
    monkeypatch.setattr(bring_up, "_GRACE_S", 0.5)
    assert bring_up.main(["--device=cpu", "--out", str(tmp_path)]) == 1
    assert bring_up.run_stage(_stage("tune", "refuses"), here, 9.0)["status"] == "FAIL"
    wrong = bring_up.run_stage(_stage("check", "has_wrong_options"), here, 9.0)
    assert (wrong["status"], wrong["message"]) == ("FAIL", "ended with exit code 2")
    *found, refused, _ = _rows(tmp_path)
    assert refused["message"] == "ended with exit code 3"
    assert [(row["stage"], row["status"]) for row in found] == [
        ("primitives", "FAIL"), ("instances", "FAIL"), ("check", "refused"),
        ("tune", "unfinished"), ("benchmarks", "ok"),
    ]  # fmt: skip
    assert found[0]["message"] == "ended with SIGSEGV"
    assert "was still running" in found[3]["message"]
    assert _wait_for(lambda: not _is_running(int((tmp_path / "started").read_text())))
    printed = capsys.readouterr().out
    assert "The same command continues what is unfinished." in printed

    only = ["--stage", "check", "--stage", "benchmarks"]
    assert bring_up.main(["--device=cpu", "--out", str(tmp_path), *only]) == 0
    assert len(_rows(tmp_path)) == 9


def test_the_total_time_leaves_out_stages_but_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [_stage(name, "passes") for name in ("primitives", "check", "report")]
    monkeypatch.setattr(bring_up, "STAGES", stages)
    assert bring_up.main(["--device=cpu", "--out", str(tmp_path), "--seconds=10"]) == 1
    found = [(row["stage"], row["status"]) for row in _rows(tmp_path)]
    assert found == [("primitives", "unfinished"), ("check", "unfinished"), ("report", "ok")]
    arguments = ["--device=cpu", "--out", str(tmp_path), "--seconds=50", "--budget=check=30"]
    assert bring_up.main(arguments) == 0
    limits = {row["stage"]: row["limit_s"] for row in _rows(tmp_path)[3:]}
    assert limits["check"] == 30.0 and limits["report"] == 60.0 and limits["primitives"] <= 50.0


def test_a_stage_that_left_cases_out_is_unfinished(tmp_path: Path) -> None:
    """Until a run reaches them. A run that reaches none exits with 1, as one that raises an error
    does. Benchmarks never reach all of them.
    """
    here, file = Settings("cpu", tmp_path, False), tmp_path / FILES["instances"]
    stage = replace(_stage("instances", "passes"), reaches_all=True)
    row = {"instance": "a", "backend": "cpu", "status": "skipped", "message": ""}
    lines.append(file, [row])
    fails = replace(_stage("instances", "fails"), reaches_all=True)
    assert bring_up.run_stage(fails, here, 9.0)["status"] == "unfinished"
    lines.append(file, [row | {"instance": "b", "status": "ok"}])
    assert bring_up.run_stage(fails, here, 9.0)["status"] == "FAIL"
    found = bring_up.run_stage(stage, here, 9.0)
    assert (found["status"], found["message"]) == ("unfinished", "1 skipped, 1 ok")
    lines.append(file, [row | {"status": "ok"}])
    found = bring_up.run_stage(stage, here, 9.0)
    assert (found["status"], found["message"]) == ("ok", "2 ok")
    lines.append(file, [row | {"status": "FAIL"}, row | {"instance": "c"}])
    assert bring_up.run_stage(fails, here, 9.0)["status"] == "FAIL"
    skipped = {"op": "ffn", "impl": "eager", "status": "skipped"}
    lines.append(tmp_path / FILES["benchmarks"], [skipped])
    assert bring_up.run_stage(_stage("benchmarks", "passes"), here, 9.0)["status"] == "ok"


INTERRUPTED = """
import sys
sys.path[:0] = {folders!r}
import test_bring_up
from benchmarks import bring_up
bring_up.STAGES = [test_bring_up._stage("check", "hangs"), test_bring_up._stage("tune", "passes")]
sys.exit(bring_up.main(["--device=cpu", "--out", {out!r}]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_stage_and_says_how_to_continue(
    tmp_path: Path, number: signal.Signals
) -> None:
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
    assert process.returncode == 128 + number
    assert f"interrupted by {number.name}; the same command continues" in said
    (row,) = _rows(tmp_path)
    assert (row["stage"], row["status"]) == ("check", "unfinished")
    assert row["message"] == f"was interrupted by {number.name}"
    assert _wait_for(lambda: not _is_running(int((tmp_path / "started").read_text())))


def test_the_stages_are_commands_that_exist(tmp_path: Path) -> None:
    """Each with its rows in its file; the whole suite is recorded on a GPU only."""
    commands = {
        (stage.name, device, quick): stage.command(Settings(device, tmp_path, quick), 77.0)
        for stage in bring_up.STAGES
        for device in ("cpu", "cuda")
        for quick in (False, True)
    }
    assert tuple(stage.name for stage in bring_up.STAGES) == tuple(FILES)
    for (name, device, _), command in commands.items():
        assert str(tmp_path) in " ".join(command)
        assert name == "report" or {"--resume", "--seconds=77"} <= set(command)
        arguments = command[2:]
        if device == "cuda":  # each command knows the options
            if name == "check":
                cli.make_parser(arguments).parse_args(["check", "--device=cpu", *arguments[3:]])
            elif name in ("instances", "tune", "benchmarks"):
                main = {"instances": instances, "tune": tune, "benchmarks": run}[name].main
                of_gpu = ["--arch=sm_90"] if name == "tune" else []
                assert main([*arguments, *of_gpu, "--list"]) == 0
    recorded = [key for key, command in commands.items() if "--record" in command]
    assert recorded == [("check", "cuda", False)]


def _row(**fields: Any) -> dict[str, Any]:
    return {"applies_to": "new", "message": "", **fields}


def test_rows_that_count(tmp_path: Path) -> None:
    """Those of the newest kernels; of a case that was skipped, what a later run found."""
    file = tmp_path / FILES["instances"]
    for applies_to, instance, status in (
        ("old", "a", "FAIL"), ("old", "b", "FAIL"), ("new", "b", "skipped"),
        ("new", "c", "skipped"), ("new", "d", "FAIL"), ("new", "b", "ok"),
    ):  # fmt: skip
        row = _row(backend="sm90", applies_to=applies_to, instance=instance, status=status)
        lines.append(file, [row])
    for why in ("no GPU", "no GPU", "other"):
        lines.append(file, [_row(backend="triton", instance="all", status="refused", message=why)])
    with file.open("a") as torn:
        torn.write('{"instance": "d", "stat')
    found = {(row["instance"], row["status"]) for row in stage_rows(tmp_path, "instances")}
    assert found == {("b", "ok"), ("c", "skipped"), ("d", "FAIL"), ("all", "refused")}
    assert count_rows(tmp_path, "instances")["refused"] == 2

    sample = dict(op="ffn", backend="cpu", dtype="fp32", sample="relu")
    for result, status in (("all", "skipped"), ("y", "ok"), ("dx", "FAIL")):
        lines.append(tmp_path / FILES["check"], [_row(**sample, result=result, status=status)])
    assert count_rows(tmp_path, "check") == {"ok": 1, "FAIL": 1}
    assert count_rows(tmp_path, "tune") == {}


def test_the_report_names_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = _row(backend="sm90", instance="attention_fwd_sm90_bf16_d64_full", status="FAIL")
    lines.append(tmp_path / FILES["instances"], [failed | {"message": "was still running"}])
    refused = _row(primitive="all", status="refused", message="there is no CUDA GPU")
    lines.append(tmp_path / FILES["primitives"], [refused])
    task = {"op": "layer_norm", "rows": 8, "N": 64}
    for ms, config in ((2.0, "ships"), (1.0, "fastest")):
        row = _row(task=task, config=config, status="ok", ms=ms, rate=8 / ms, unit="GB/s")
        lines.append(tmp_path / FILES["tune"], [row])
    stage = {"stage": "instances", "status": "FAIL", "seconds": 12.3}
    lines.append(tmp_path / BRING_UP, [stage])
    assert bring_up_report.main([str(tmp_path), "--device=cpu"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "<b>attention_fwd_sm90_bf16_d64_full</b> was still running" in page
    assert "there is no CUDA GPU" in page
    assert "<td>instances</td><td>FAIL</td><td>0</td><td>1</td><td>0</td><td>0</td><td>12" in page
    assert "<td>layer_norm 8 64, GB/s</td><td>4</td><td>8</td><td></td><td>fastest</td>" in page
    assert not list(tmp_path.glob("*.part"))


def test_the_report_tells_what_is_chosen_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "cache.json"
    record.write_text('{"passed": []}')
    (out := tmp_path / "out").mkdir()
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(record))
    kernels = {("ffn", "triton", "bfloat16"), ("attention", "sm90", "float16")}
    monkeypatch.setattr(_verified, "passed", lambda device: frozenset(kernels))
    heading, text = bring_up_report.verified(torch.device("cuda"), out)
    assert heading == Heading(2, "Chosen automatically from now on")
    assert text == Text("- attention by sm90 in float16\n- ffn by triton in bfloat16")
    assert (out / "verified.json").read_text() == record.read_text()


@pytest.mark.slow
def test_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    """All stages, in a few seconds each, and again: nothing finished is repeated."""
    command = [sys.executable, "-m", "benchmarks.bring_up", "--device=cpu", "--quick"]
    command += ["--out", str(tmp_path), "--seconds=300"]
    for name in FILES:
        command.append(f"--budget={name}={60 if name == 'report' else 15}")
    counts = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=rows.ROOT, env=environment(), capture_output=True, text=True
        )
        found = {row["stage"]: row["status"] for row in _rows(tmp_path)}
        assert found["primitives"] == found["tune"] == "refused", done.stdout + done.stderr
        assert found["report"] == "ok" and "FAIL" not in found.values(), done.stdout + done.stderr
        counts.append({name: count_rows(tmp_path, name)["ok"] for name in FILES})
        assert counts[-1]["instances"] and counts[-1]["check"] and counts[-1]["benchmarks"]
    assert all(counts[1][name] >= counts[0][name] for name in FILES)
    ran = [json.loads(line) for line in (tmp_path / FILES["instances"]).read_text().splitlines()]
    names = [row["instance"] for row in ran if row["status"] == "ok"]
    assert len(names) == len(set(names))
    assert os.path.getsize(tmp_path / "report.html") > 1000
