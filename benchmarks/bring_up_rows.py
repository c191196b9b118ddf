"""The files of a bring-up's output folder, and which of their rows count."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastattn.testing import lines

# One row per run of a stage.
BRING_UP = "bring_up.jsonl"
# The record of verified kernels, copied at the end.
RECORD = "verified.json"
FILES = {
    "primitives": "primitives.jsonl",
    "instances": "instances.jsonl",
    "check": "check.jsonl",
    "tune": "tune.jsonl",
    "benchmarks": "results.jsonl",
    "report": "report.html",
}
# The fields that name what a row is a result of. The rows of a case of `check` have the same.
_CASES = {
    "primitives": ("primitive",),
    "instances": ("instance", "backend", "message"),
    "check": ("op", "backend", "dtype", "sample"),
    "tune": ("task", "config"),
    "benchmarks": ("op", "direction", "workload", "dtype", "impl"),
}


def stage_rows(out: Path, stage: str) -> list[dict[str, Any]]:
    """The rows of a stage that count: of the newest kernels, and not those of cases that were
    skipped if a later run reached them.
    """
    found = list(lines.read(out / FILES[stage])) if stage in _CASES else []
    newest = {row.get("backend"): row.get("applies_to") for row in found}
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        if row.get("applies_to") == newest[row.get("backend")]:
            key = repr([row.get(field) for field in _key_of(stage, row)])
            cases.setdefault(key, []).append(row)
    return [row for of_case in cases.values() for row in _last(stage, of_case)]


def _key_of(stage: str, row: dict[str, Any]) -> Iterable[str]:
    # Why a whole backend is refused is told once for each reason.
    if stage == "instances" and row["instance"] != "all":
        return ("instance",)
    return _CASES[stage]


def _last(stage: str, of_case: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reached = [row for row in of_case if row["status"] != "skipped"] or of_case[-1:]
    return reached if stage == "check" else reached[-1:]


def count_rows(out: Path, stage: str) -> Counter[str]:
    """The number of rows by status."""
    return Counter(str(row["status"]) for row in stage_rows(out, stage))
