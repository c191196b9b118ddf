"""Records which kernels pass the equivalence suite on a GPU, to be chosen automatically."""

import argparse
import datetime
import hashlib
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fastattn.ops import _env, _select, _verified
from fastattn.testing import lines
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
    folder = _env.record_folder()
    if folder is None:
        raise ValueError(f"{_env.RECORD_VARIABLE} must name a folder to record in, got ''")
    for file in _verified.files(folder):  # raises now if one is invalid
        _verified.read(file)
    for backend in ("sm90", "cuda"):
        if not _verified.identified(backend):
            raise ValueError(
                f"{_verified.library(backend)} must have the digest of its sources: build it again"
            )


def record(rows: Sequence[Row], device: torch.device) -> str:
    """Records the kernels that passed and those that failed, replacing older entries and those of
    other kernels; returns a message. Of what was not reached, nothing is known.
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
    folder = _env.record_folder()
    assert folder is not None  # check_recordable
    date, commit = datetime.date.today().isoformat(), lines.commit()
    about = {"device": _env.device_name(device), "date": date, "commit": commit}
    for backend in sorted({backend for _, backend, _ in (*passed, *failed)}):
        file = folder / _verified.file_name(architecture, backend)
        kernels = [
            {"op": op, "dtype": dtype, "status": status, "results": count} | about
            for status, keys, counted in (("passed", passed, "ok"), ("failed", failed, "FAIL"))
            for op, by, dtype in keys
            if by == backend and (count := statuses[op, by, dtype][counted])
        ]
        digest = _verified.digest(backend)
        built = _verified.built(backend)
        before = _verified.read(file) if file.exists() else {}
        same = before.get("digest") == digest
        if same:
            kernels = [
                entry
                for entry in before["kernels"]
                if (key := (entry["op"], backend, entry["dtype"])) not in statuses or key in unknown
            ] + kernels
        new: dict[str, Any] = {"digest": digest, "kernels": kernels}
        if built:  # disassembling takes half a minute
            code = before.get("code") if same and before.get("compiler") == built[1] else None
            code = code or machine_code(_verified.library(backend))
            new |= {"compiler": built[1], "code": code}
        lines.write_json(file, new)
    _verified.recorded.cache_clear()
    _select.forget_orders()

    def named(keys: Sequence[_verified.Kernel]) -> str:
        return ", ".join(f"{op} by {backend} in {dtype}" for op, backend, dtype in keys)

    message = f"chosen automatically on {architecture} from now on: "
    message += f"{named(passed) or 'nothing'} ({folder})"
    if failed:
        message += f"\nnot chosen, because samples failed: {named(failed)}"
    if unknown:
        message += f"\nnot decided, because samples were not reached: {named(unknown)}"
        message += "\n`--json FILE.jsonl --resume` continues where the time ended"
    return message


def cuobjdump() -> str | None:
    """The program of the CUDA toolkit, or the one in Triton's package."""
    try:
        import triton
    except ImportError:
        return shutil.which("cuobjdump")
    bundled = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(bundled) if bundled.is_file() else shutil.which("cuobjdump")


def machine_code(library: Path) -> dict[str, str]:
    """Digests of the kernels in a library by architecture and mangled name; the names do not count.
    Empty without the library or cuobjdump.
    """
    program = cuobjdump()
    if program is None or not library.is_file():
        return {}
    command = [program, "-sass", str(library)]
    text = subprocess.run(command, capture_output=True, text=True).stdout  # empty if it fails
    bodies: dict[str, list[str]] = {}  # a kernel may be in several objects
    for binary in re.split(r"^arch = ", text, flags=re.MULTILINE)[1:]:
        head, *functions = re.split(r"^\s*Function : (\S+)\n", binary, flags=re.MULTILINE)
        for name, body in zip(functions[::2], functions[1::2], strict=True):
            body = body.partition("Fatbin ")[0].replace(name, "")
            bodies.setdefault(f"{head.split()[0]} {name}", []).append(" ".join(body.split()))
    return {
        name: hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        for name, parts in bodies.items()
    }
