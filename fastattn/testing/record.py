"""Records which kernels pass the equivalence suite on a GPU, to be chosen automatically."""

import argparse
import datetime
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fastattn.ops import _env, _select, _verified
from fastattn.testing.lines import write_json
from fastattn.testing.rows import DTYPES, Row


def check_recordable(options: argparse.Namespace, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"--record must go with a cuda device, got {device}")
    for option in ("sample", "quick", "fuzz"):
        if getattr(options, option):
            raise ValueError(f"--record must go with every sample, got --{option}")
    for op in _select.OPS.values():
        given = [name for name in op.names if name in (options.op or op.names)]
        if 0 < len(given) < len(op.names):
            raise ValueError(
                f"--record must go with all of {', '.join(op.names)}, which are one op, got --op "
                f"{', '.join(given)}"
            )
    file = _env.record_path()
    if file is None:
        raise ValueError(f"{_env.RECORD_VARIABLE} must name a file to record in, got ''")
    _verified.entries(file)  # raises now if the file is invalid


def record(rows: Sequence[Row], device: torch.device) -> str:
    """Records the kernels that passed and those that failed, replacing older entries; returns a
    message. Of what was not reached, nothing is known.
    """
    architecture = _env.architecture(device.type, device.index or 0)
    statuses: dict[_verified.Kernel, Counter[str]] = {}
    for row in rows:
        if row.backend != "reference":
            op = _select.op_of(row.op).public_name
            key = op, row.backend, _verified.name(DTYPES[row.dtype])
            statuses.setdefault(key, Counter())[row.status] += 1
    failed = [key for key, count in statuses.items() if count["FAIL"]]
    unknown = [key for key, count in statuses.items() if count["skipped"] and not count["FAIL"]]
    passed = [key for key, c in statuses.items() if c["ok"] and not c["FAIL"] and not c["skipped"]]
    file = _env.record_path()
    assert file is not None  # check_recordable
    about = {"date": datetime.date.today().isoformat(), "device": _env.device_name(device)}

    def entries(what: str, keys: Sequence[_verified.Kernel]) -> list[dict[str, Any]]:
        assert file is not None
        kept = [
            entry
            for entry in _verified.entries(file, what)
            if "dtype" in entry  # entries of the first version have none
            and (
                entry.get("architecture") != architecture
                or (entry.get("op"), entry.get("backend"), entry["dtype"]) not in statuses
                or (entry.get("op"), entry.get("backend"), entry["dtype"]) in unknown
            )
        ]
        new = [
            dict(zip(("op", "backend", "dtype"), key, strict=True))
            | _verified.applies_to(device, key[1])
            | about
            | {"results": statuses[key]["ok" if what == "passed" else "FAIL"]}
            for key in keys
        ]
        return kept + new

    write_json(file, {"passed": entries("passed", passed), "failed": entries("failed", failed)})
    _verified.recorded.cache_clear()
    _select.forget_orders()

    def named(keys: Sequence[_verified.Kernel]) -> str:
        return ", ".join(f"{op} by {backend} in {dtype}" for op, backend, dtype in keys)

    message = f"chosen automatically on {architecture} from now on: "
    message += f"{named(passed) or 'nothing'} ({file})"
    if failed:
        message += f"\nnot chosen, because samples failed: {named(failed)}"
    if unknown:
        message += f"\nnot decided, because samples were not reached: {named(unknown)}"
        message += "\n`--json FILE.jsonl --resume` continues where the time ended"
    return message
