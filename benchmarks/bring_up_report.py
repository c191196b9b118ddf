"""`python -m benchmarks.bring_up_report FOLDER`: what a bring-up found and the throughput report,
in one file, FOLDER/report.html.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report, rows
from benchmarks.bring_up_rows import BRING_UP, FILES, RECORD, count_rows, stage_rows
from benchmarks.report import Block, Heading, Table, Text
from fastattn.ops import _env, _verified
from fastattn.testing import lines

_SHOWN = 50  # failures of a stage
_STAGES = tuple(stage for stage in FILES if stage != "report")
# Statuses of `benchmarks.tune`.
_FAILURES = ("FAIL", "failed", "wrong")


def overview(out: Path) -> list[Block]:
    """A line for each stage: how it ended, and its rows by status."""
    runs: dict[str, dict[str, Any]] = {row["stage"]: row for row in lines.read(out / BRING_UP)}
    table = []
    for stage in _STAGES:
        count = count_rows(out, stage)
        run = runs.get(stage, {"status": "not run"})
        failed = sum(count[status] for status in _FAILURES)
        cells = [count["ok"], failed, count["refused"], count["skipped"]]
        seconds = f"{run['seconds']:.0f}" if "seconds" in run else ""
        table.append((stage, run["status"], *map(str, cells), seconds))
    header = ("stage", "status", "ok", "failed", "refused", "not reached", "seconds")
    return [Table(header, tuple(table))]


def failures(out: Path, stage: str) -> list[Block]:
    """What failed and what was refused in a stage."""
    found = stage_rows(out, stage)
    failed = [
        f"- **{_name(stage, row)}** {row.get('message', '')}"
        for row in found
        if row["status"] in _FAILURES
    ]
    refused = {
        f"- refused: {row.get('op', '')} {row.get('backend', '')} {row['message']}"
        for row in found
        if row["status"] == "refused" and stage != "benchmarks"
    }
    if len(failed) > _SHOWN:
        failed = [*failed[:_SHOWN], f"- and {len(failed) - _SHOWN} more in {FILES[stage]}"]
    shown = [" ".join(line.split()) for line in (*failed, *sorted(refused))]
    return [Heading(2, stage), Text("\n".join(shown))] if shown else []


def _name(stage: str, row: dict[str, Any]) -> str:
    if stage == "tune":
        return f"{row['task']} {row['config']}"
    fields = {
        "check": ("op", "backend", "dtype", "sample", "result", "kind"),
        "benchmarks": ("op", "direction", "workload", "dtype", "impl"),
    }.get(stage, (stage.removesuffix("s"),))
    return " ".join(str(row[field]) for field in fields)


def verified(device: torch.device, out: Path) -> list[Block]:
    """The kernels that are chosen automatically since they passed here. The record is copied to
    `out`, from where it can ship with the package.
    """
    if device.type != "cuda":
        return [Text("Nothing is recorded on a CPU: its kernels are chosen without a record.")]
    if (file := _env.record_path()) is not None and file.exists():
        shutil.copyfile(file, out / RECORD)
    passed = sorted(_verified.passed(device))
    text = "\n".join(f"- {op} by {backend} in {dtype}" for op, backend, dtype in passed)
    return [Heading(2, "Chosen automatically from now on"), Text(text or "No kernel.")]


def tuning(out: Path) -> list[Block]:
    """The fastest candidate of every task beside the first, which is what ships."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for row in stage_rows(out, "tune"):
        if row["status"] == "ok":
            tasks.setdefault(" ".join(map(str, row["task"].values())), []).append(row)
    table = []
    for task, found in tasks.items():
        best = min(found, key=lambda row: float(row["ms"]))
        peer = f"{best['peer_rate']:.0f}" if "peer_rate" in best else ""
        first, fastest = (f"{row['rate']:.0f}" for row in (found[0], best))
        table.append((f"{task}, {best['unit']}", first, fastest, peer, str(best["config"])))
    header = ("task", "first", "fastest", "peer", "config of the fastest")
    return [Heading(2, "Tuning"), Table(header, tuple(table))] if table else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bring_up_report")
    parser.add_argument("out", type=Path, help="folder of a bring-up")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(arguments)
    out, device = options.out, _device(options.device)
    versions = ", ".join(f"{name} {version}" for name, version in _env.versions().items())
    blocks = [Heading(1, f"Bringing up {_env.device_name(device)}"), Text(versions), *overview(out)]
    for stage in _STAGES:
        blocks += failures(out, stage)
    blocks += [*verified(device, out), *tuning(out)]
    file = out / FILES["benchmarks"]
    results = list(rows.read([file])) if file.exists() else []
    target = out / FILES["report"]
    with tempfile.TemporaryDirectory() as folder:
        blocks += report.blocks(results, Path(folder)) if results else []
        whole = target.with_suffix(".part")
        whole.write_text(report.to_html(blocks))
    whole.replace(target)
    print(target)
    return 0


def _device(name: str) -> torch.device:
    return torch.device(name if name == "cpu" else _env.default_device().type)


if __name__ == "__main__":
    sys.exit(main())
