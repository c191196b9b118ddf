"""Files of results. JSON lines files are appended to while a run goes on, and a run that is killed
leaves a file that can be read and continued.
"""

import functools
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fastattn.ops import _env, _verified

# Exit code of a command that can run nothing here and has written a row with the reason. Wrong
# options end with 2.
CANNOT_RUN = 3
T = TypeVar("T")
_PACKAGE = Path(__file__).resolve().parent.parent
_CASE = (
    "primitive", "instance", "op", "backend", "direction", "workload", "dtype", "impl", "sample",
    "task", "config",
)  # fmt: skip


def applies_to(device: torch.device, backend: str, isa: str | None = None) -> str:
    """A digest of the kernels, versions and architecture that rows of a backend apply to, and of
    the instruction set, if given. A run continues a file's rows of the same digest.
    """
    architecture, versions = _env.architecture(device.type, device.index or 0), _env.versions()
    fields = [architecture, kernels(backend), isa, *map(versions.get, ("torch", "cuda", "triton"))]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]


@functools.cache
def kernels(backend: str) -> str:
    """A digest of the code that rows of a backend depend on: the ops and the backend's library."""
    digest = hashlib.sha256()
    files = {file.relative_to(_PACKAGE).as_posix(): file for file in _PACKAGE.glob("ops/**/*.py")}
    for name, file in sorted((files | {"library": _verified.library(backend)}).items()):
        if file.is_file():
            digest.update(f"{name}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def commit() -> str | None:
    """The commit, with "+" if the working tree differs; None outside the project's repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_PACKAGE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "py.typed")
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends the rows in one write, behind a new line if a killed run left an incomplete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
            text = "\n" + text
        file.write(text.encode())


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, none if there is no file. Incomplete lines are left out."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_as(kind: Callable[..., T], path: Path) -> Iterator[T]:
    """The rows of a file as objects of a dataclass; raises ValueError if they have other fields."""
    for fields in read(path):
        try:
            row = kind(**fields)
        except TypeError:
            raise ValueError(
                f"{path} must have rows of the same command to be continued, got a row with "
                f"{', '.join(fields)}"
            ) from None
        yield row


def current(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that count: of the newest kernels, the last of each result, and that a
    case was skipped only if no later run reached it.
    """
    found = list(read(path))
    newest = {row.get("backend"): row.get("applies_to") for row in found}
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in found:
        if row.get("applies_to") == newest[row.get("backend")]:
            results = cases.setdefault(case(row), {})
            results.pop("skipped", None)
            skipped = row["status"] == "skipped"
            results["skipped" if skipped else f"{row.get('result')} {row.get('kind')}"] = row
    return [row for results in cases.values() for row in results.values()]


def case(row: Mapping[str, Any]) -> str:
    """The fields of a row that name what was run."""
    return " ".join(str(row[field]) for field in _CASE if row.get(field))


def write_json(path: Path, value: Any) -> None:
    """Writes the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        whole = Path(folder, path.name)
        whole.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(whole, path)
