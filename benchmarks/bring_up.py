"""`python -m benchmarks.bring_up`, which `make gpu` runs: what to try on a new GPU, in stages.

Every stage is a command in processes of its own, with a time limit, that appends rows to a file of
the output folder while it runs. A stage that fails, crashes or hangs does not stop the others. The
same command continues an interrupted run: a stage does not repeat rows of the same kernels. On a
CPU the same stages are a rehearsal. docs/pages/bring-up.md says what each stage means.
"""

import argparse
import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import rows
from benchmarks.bring_up_rows import BRING_UP, FILES, count_rows
from fastattn.testing import lines

# How much longer than its limit a stage may take to end, and to be ended.
_GRACE_S, _END_S = 120.0, 15.0
# What is left of the total time must allow a stage to start.
_SHORTEST_S = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Settings:
    device: str
    out: Path
    quick: bool

    def file(self, stage: str) -> str:
        return str(self.out / FILES[stage])


@dataclass(frozen=True)
class Stage:
    """command: (settings, seconds) -> arguments of Python; its exit code is 0, or 1 if something
    failed. seconds, quick_seconds: the limit. needs_gpu: exit code CANNOT_RUN says that nothing can
    run here. reaches_all: it is unfinished while a case was not reached. environment: variables on
    a CPU.
    """

    name: str
    title: str
    seconds: float
    quick_seconds: float
    command: Callable[[Settings, float], list[str]]
    needs_gpu: bool = False
    reaches_all: bool = False
    environment: tuple[tuple[str, str], ...] = ()


def _primitives(s: Settings, seconds: float) -> list[str]:
    return [
        "-m", "fastattn.testing.primitives", "--resume", "--json", s.file("primitives"),
        f"--seconds={seconds:.0f}",
    ]  # fmt: skip


def _instances(s: Settings, seconds: float) -> list[str]:
    return [
        "-m", "fastattn.testing.instances", "--device", s.device, "--resume",
        "--json", s.file("instances"), f"--seconds={seconds:.0f}",
    ]  # fmt: skip


def _check(s: Settings, seconds: float) -> list[str]:
    """What passes is recorded if the whole suite runs on a GPU."""
    kind = ["--quick"] if s.quick else ["--record"] if s.device == "cuda" else []
    return [
        "-m", "fastattn", "check", "--device", s.device, "--resume", "--json", s.file("check"),
        f"--seconds={seconds:.0f}", *kind,
    ]  # fmt: skip


def _tune(s: Settings, seconds: float) -> list[str]:
    more = ["--most=3"] if s.quick else ["layer_norm", "add_layer_norm", "ffn", "--most=10"]
    return [
        "-m", "benchmarks.tune", "--resume", "--out", str(s.out), f"--seconds={seconds:.0f}",
        "--direction", "fwd", "bwd", "--op", "attention", *more,
    ]  # fmt: skip


def _benchmarks(s: Settings, seconds: float) -> list[str]:
    return [
        "-m", "benchmarks.run", "--device", s.device, "--resume", "--out", str(s.out),
        f"--seconds={seconds:.0f}", *(["--quick"] if s.quick else []),
    ]  # fmt: skip


def _report(s: Settings, seconds: float) -> list[str]:
    return ["-m", "benchmarks.bring_up_report", str(s.out), "--device", s.device]


STAGES = (
    Stage(
        "primitives", "Hardware primitives of the Hopper kernels", 120, 60, _primitives,
        needs_gpu=True, reaches_all=True,
    ),
    Stage(
        "instances", "The smallest case of every kernel instance", 240, 75, _instances,
        reaches_all=True, environment=(("TRITON_INTERPRET", "1"),),
    ),
    Stage("check", "The equivalence suite", 300, 60, _check, reaches_all=True),
    Stage("tune", "Tilings of the Triton kernels", 300, 45, _tune, needs_gpu=True),
    Stage("benchmarks", "Throughput beside PyTorch and installed peers", 480, 75, _benchmarks),
    Stage("report", "The report", 120, 60, _report),
)  # fmt: skip


class Interrupted(BaseException):
    """SIGINT or SIGTERM."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:  # the stage is ended, and its row written, once
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


# -- one stage ------------------------------------------------------------------------------------
def run_stage(stage: Stage, settings: Settings, seconds: float) -> dict[str, Any]:
    """Runs a stage and returns its row, which is also appended to the output folder."""
    command = [sys.executable, *stage.command(settings, seconds)]
    print(f"\n== {stage.name}: {stage.title}, at most {seconds:.0f} s\n{shlex.join(command)}")
    sys.stdout.flush()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()}
    if settings.device == "cpu":
        environment |= dict(stage.environment)
    row: dict[str, Any] = {
        "stage": stage.name,
        "status": "unfinished",
        "message": "",
        "seconds": 0.0,
        "limit_s": seconds,
        "exit_code": None,
        "device": settings.device,
        "quick": settings.quick,
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": rows.commit(),
        "command": shlex.join(command),
    }
    started = time.monotonic()
    # A session of its own: an interrupt from the keyboard reaches this process alone.
    process = subprocess.Popen(command, cwd=rows.ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds + _GRACE_S)
        refused = stage.needs_gpu and code == lines.CANNOT_RUN
        row |= {
            "exit_code": code,
            "status": "ok" if code == 0 else "refused" if refused else "FAIL",
        }
        if code not in (0, 1) and not refused:
            row["message"] = _how_it_ended(code)
    except subprocess.TimeoutExpired:
        row["message"] = f"was still running {_GRACE_S:.0f} s after its limit, and was ended"
    except Interrupted as interrupt:
        row["message"] = f"was interrupted by {interrupt}"
        raise
    finally:
        _end(process)
        row["seconds"] = round(time.monotonic() - started, 1)
        count = count_rows(settings.out, stage.name)
        code = row["exit_code"]
        reached_nothing = code == 1 and not (count["ok"] or count["FAIL"])
        if stage.reaches_all and count["skipped"] and (row["status"] == "ok" or reached_nothing):
            row["status"] = "unfinished"
        row["message"] = row["message"] or ", ".join(f"{n} {s}" for s, n in count.items())
        lines.append(settings.out / BRING_UP, [row])
        print(f"== {stage.name}: {row['status']}, {row['seconds']:.0f} s; {row['message']}")
    return row


def _how_it_ended(code: int) -> str:
    return f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the stage's processes, also those that a process that died has left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            continue  # a process that hangs in the driver is abandoned after SIGKILL


def _python_path() -> str:
    before = os.environ.get("PYTHONPATH")
    return f"{rows.ROOT}{os.pathsep}{before}" if before else str(rows.ROOT)


# -- the run --------------------------------------------------------------------------------------
def run(stages: Sequence[Stage], settings: Settings, seconds: float | None) -> int:
    """Runs the stages, in `seconds` altogether; returns the exit code."""
    started = time.monotonic()
    found = []
    for stage in stages:
        limit = stage.quick_seconds if settings.quick else stage.seconds
        if seconds is not None and stage.name != "report":  # which tells what was reached
            left = seconds - (time.monotonic() - started)
            limit = min(limit, left)
            if left < _SHORTEST_S:
                print(f"\n== {stage.name}: was not reached in {seconds:.0f} s")
                row = {"stage": stage.name, "status": "unfinished", "message": "was not reached"}
                lines.append(settings.out / BRING_UP, [row])
                found.append(row)
                continue
        found.append(run_stage(stage, settings, limit))
    print()
    for row in found:
        print(f"{row['stage']:12}{row['status']:12}{row['message']}")
    if any(row["status"] == "unfinished" for row in found):
        print("The same command continues what is unfinished.")
    return 0 if all(row["status"] in ("ok", "refused") for row in found) else 1


def _budget(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in FILES or not seconds.isdigit() or not int(seconds):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(FILES)} and seconds, such as check=300, got {text!r}"
        )
    return name, float(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bring_up", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal")
    add("--out", type=Path, default=Path("gpu-results"), help="folder of rows and report.html")
    add("--quick", action="store_true", help="short stages; nothing is recorded")
    add("--seconds", type=float, help="of all stages but the report; what is left out can follow")
    add("--stage", action="append", choices=tuple(FILES), help="only this stage (may be repeated)")
    add("--budget", action="append", type=_budget, metavar="STAGE=SECONDS", help="of one stage")
    options = parser.parse_args(arguments)
    budgets = dict(options.budget or ())
    stages = [
        replace(stage, seconds=budget, quick_seconds=budget)
        if (budget := budgets.get(stage.name))
        else stage
        for stage in STAGES
        if not options.stage or stage.name in options.stage
    ]
    settings = Settings(options.device, options.out.resolve(), options.quick)
    settings.out.mkdir(parents=True, exist_ok=True)
    before = {s: signal.signal(s, _interrupt) for s in _SIGNALS}
    try:
        return run(stages, settings, options.seconds)
    except Interrupted as interrupt:
        print(f"\ninterrupted by {interrupt}; the same command continues: its rows are kept")
        return 128 + interrupt.number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
