"""`python -m benchmarks.bring_up`, which `make gpu` runs: what to try on a new GPU, in stages.

Every stage is a command with a time limit that appends rows to a file. If one fails, crashes or
hangs, the next one runs; the same command continues an interrupted run (docs/pages/bring-up.md).
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, rows
from benchmarks.report import Block, Heading, Table, Text
from fastattn.ops import _env, _verified
from fastattn.testing import lines

# Seconds that a stage may take longer than its limit, and that it may take to be ended.
GRACE_S, END_S = 120.0, 15.0
_CONTINUES = "the same command continues"
# Limits in seconds, without and with --quick.
STAGES = {
    "primitives": (120.0, 60.0), "instances": (240.0, 75.0), "check": (300.0, 60.0),
    "tune": (300.0, 45.0), "record": (240.0, 75.0), "report": (120.0, 60.0),
}  # fmt: skip


def rows_file(stage: str, out: Path) -> Path:
    return out / ("results.jsonl" if stage == "record" else f"{stage}.jsonl")


def command(stage: str, o: argparse.Namespace, seconds: float) -> list[str]:
    """Arguments of Python. What passes `check` is recorded if the whole suite runs on a GPU."""
    device, out, file = f"--device={o.device}", f"--out={o.out}", str(rows_file(stage, o.out))
    quick, record = ["--quick"] * o.quick, ["--record"] * (o.device == "cuda" and not o.quick)
    others = [f"--peers={o.peers.resolve()}"] if o.peers else []
    others += [f"--build={build}" for build in o.build]
    tuned = ["--most=3"] if o.quick else ["layer_norm", "add_layer_norm", "ffn", "--most=10"]
    arguments = {
        "primitives": ["fastattn.testing.primitives", "--json", file],
        "instances": ["fastattn.testing.instances", device, "--json", file],
        "check": ["fastattn", "check", device, "--json", file, *quick, *record],
        "tune": ["benchmarks.tune", out, "--direction", "fwd", "bwd", "--op", "attention", *tuned],
        "record": ["benchmarks.record", device, out, *quick, *others],
        "report": ["benchmarks.bring_up", device, out, "--stage=report"],
    }[stage]
    return ["-m", *arguments, *["--resume", f"--seconds={seconds:.0f}"] * (stage != "report")]


def run_stage(stage: str, o: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs a stage and returns its row, which is also appended to the output folder."""
    arguments = [sys.executable, "-u", *command(stage, o, seconds)]
    print(f"\n== {stage}, at most {seconds:.0f} s\n{shlex.join(arguments)}", flush=True)
    interpreted = stage == "instances" and o.device == "cpu"
    env = os.environ | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    row = {"stage": stage, "limit_s": seconds, "commit": lines.commit()}
    row |= {"status": "unfinished", "message": f"was interrupted; {_CONTINUES}"}
    started = time.monotonic()
    # A session of its own: an interrupt from the keyboard reaches this process alone.
    process = subprocess.Popen(arguments, cwd=rows.ROOT, env=env, start_new_session=True)
    try:
        row["status"], row["message"] = outcome(stage, o.out, process.wait(seconds + GRACE_S))
    except subprocess.TimeoutExpired:
        row["message"] = f"was still running {GRACE_S:.0f} s after its limit; {_CONTINUES}"
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # while the stage is ended
        raise SystemExit(130) from None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # also to what a dead process has left
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(END_S)
        row["seconds"] = round(time.monotonic() - started, 1)
        lines.append(o.out / "bring_up.jsonl", [row])
        print(f"== {stage}: {row['status']}, {row['seconds']} s; {row['message']}")
    return row


def outcome(stage: str, out: Path, code: int) -> tuple[str, str]:
    """Status and message of a stage that ended."""
    count = Counter(row["status"] for row in lines.current(rows_file(stage, out)))
    message = ", ".join(f"{number} {status}" for status, number in count.items())
    if code == lines.CANNOT_RUN and stage in ("primitives", "tune"):
        return "refused", message
    if code not in (0, 1):
        return "FAIL", "ended with " + (signal.Signals(-code).name if code < 0 else f"code {code}")
    skipped = stage in ("primitives", "instances", "check") and count["skipped"]
    if skipped and not (code and count["ok"] + count["FAIL"]):  # 1: an error, or nothing reached
        return "unfinished", f"{message}; {_CONTINUES}"
    return ("FAIL" if code else "ok"), message


def write_report(o: argparse.Namespace) -> int:
    """How the stages ended, what failed, what is chosen from now on, throughput."""
    device = torch.device("cpu") if o.device == "cpu" else _env.default_device()
    versions = ", ".join(f"{name} {version}" for name, version in _env.versions().items())
    blocks: list[Block] = [Heading(1, f"Bringing up {_env.device_name(device)}"), Text(versions)]
    ended = {row["stage"]: row for row in lines.read(o.out / "bring_up.jsonl")}
    fields = ("stage", "status", "message", "seconds")
    table = tuple(tuple(str(row.get(field, "")) for field in fields) for row in ended.values())
    blocks.append(Table(fields, table))
    for stage in STAGES:
        failed = [
            f"- **{lines.case(row)}** {' '.join(row['message'].split())}"
            for row in lines.current(rows_file(stage, o.out))
            if row["status"] not in ("ok", "refused", "skipped", "absent")
        ]
        blocks += [Heading(2, f"{stage} failed"), Text("\n".join(failed))] if failed else []
    if device.type == "cuda":
        if (records := _env.record_folder()) is not None and records.exists():
            shutil.copytree(records, o.out / "verified", dirs_exist_ok=True)
        passed, _ = _verified.recorded(device)
        chosen = [f"- {' '.join(each)}" for each in sorted(passed)] or ["none"]
        blocks += [Heading(2, "Chosen automatically from now on"), Text("\n".join(chosen))]
    measured = list(rows.read(o.out.glob("results.jsonl")))
    print(report.write_html(measured, o.out / "report.html", blocks))
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bring_up")
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal")
    add("--out", type=Path, default=Path("gpu-results"), help="folder of rows and report")
    add("--quick", action="store_true", help="short stages; nothing is recorded")
    add("--stage", action="append", choices=STAGES, help="only this stage (may be repeated)")
    add("--budget", action="append", default=[], metavar="STAGE=SECONDS", help="of one stage")
    add("--peers", type=Path, metavar="DIR", help="wheels of peers, for record")
    add("--build", action="append", default=[], metavar="NAME=FILE", help="another, for record")
    o = parser.parse_args(arguments)
    o.out = o.out.resolve()
    if o.stage == ["report"]:
        return write_report(o)
    limits = {stage: limit[o.quick] for stage, limit in STAGES.items()}
    for stage, _, seconds in (text.partition("=") for text in o.budget):
        if stage not in STAGES or not seconds.isdigit():
            parser.error(f"--budget must be a stage and seconds, got {stage}={seconds}")
        limits[stage] = float(seconds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = [run_stage(s, o, limits[s]) for s in STAGES if not o.stage or s in o.stage]
    print("\n" + "\n".join(f"{r['stage']:12}{r['status']:12}{r['message']}" for r in found))
    return 0 if all(row["status"] in ("ok", "refused") for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
