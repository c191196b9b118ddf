"""The records of kernels that passed the equivalence suite and may be chosen automatically.

A record is a file `<architecture>-<backend>.json`: a digest of the kernels that ran and a verdict
for each op and dtype. Records of measured GPUs ship in the folder `verified` beside this file;
`fastattn check --device cuda --record` writes those of this user. A record applies to installed
kernels of the same digest. What failed for this user is not chosen, whatever a shipped record says.
"""

import ast
import functools
import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch

from fastattn.ops import _env

_PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED = Path(__file__).resolve().parent / "verified"
# In the file of a library, by csrc/common/digest_sm90_cuda.cu.
_BUILT = re.compile(rb"fastattn sources (\w+), nvcc ([\d.]+)\0")
_log = logging.getLogger("fastattn")
# (op, backend, dtype)
Kernel = tuple[str, str, str]


# -- the installed kernels ------------------------------------------------------------------------
@functools.cache
def digest(backend: str) -> str:
    """Identity of a backend's kernels: a digest of its library's sources and nvcc's version, or the
    version of the package that the backend is named after, and a digest of the syntax trees of its
    modules.
    """
    code = " nvcc ".join(built(backend) or [_env.versions().get(backend, "absent")])
    return f"{code}-{_digest_of_modules(backend)}"


def identified(backend: str) -> bool:
    """Whether `digest` tells a backend's kernels from others: its library has the digest of its
    sources, or there is none.
    """
    return built(backend) is not None or not library(backend).is_file()


def library(backend: str) -> Path:
    return _env.library_file(f"_C_{backend}.abi3.so", _PACKAGE)


def built(backend: str) -> tuple[str, str] | None:
    """The digest of the sources of a backend's library and the version of nvcc that compiled it, as
    setup.py puts them into the file; None without them. Loads nothing.
    """
    file = library(backend)
    found = _BUILT.search(file.read_bytes()) if file.is_file() else None
    return (found[1].decode(), found[2].decode()) if found else None


def _digest_of_modules(backend: str) -> str:
    """A digest of a backend's modules and of the modules of ops that they import, but for those
    that ask for the environment and load libraries.
    """
    patterns = (f"ops/*/{backend}*.py", f"ops/*/{backend}/*.py")
    left = [file for pattern in patterns for file in _PACKAGE.glob(pattern)]
    trees: dict[str, str] = {}
    while left:
        file = left.pop()
        name = file.relative_to(_PACKAGE).as_posix()
        if name in trees or file.stem in ("_env", "_native"):
            continue
        tree = ast.parse(file.read_bytes())
        trees[name] = _text(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("fastattn.ops."):
                base = _PACKAGE.joinpath(*str(node.module).split(".")[1:])
                named = (base, *(base / each.name for each in node.names))
                left += [path for each in named if (path := each.with_suffix(".py")).is_file()]
    return hashlib.sha256(json.dumps(sorted(trees.items())).encode()).hexdigest()[:16]


def _text(node: Any) -> str:
    """A syntax tree without docstrings and without the empty fields that versions of Python add."""
    if isinstance(node, list):
        kept = (each for each in node if not (isinstance(each, ast.Expr) and _is_text(each.value)))
        return f"[{','.join(map(_text, kept))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# -- records --------------------------------------------------------------------------------------
def file_name(architecture: str, backend: str) -> str:
    return f"{architecture}-{backend}.json"


def files(folder: Path, architecture: str = "*") -> list[Path]:
    """The records in a folder; raises ValueError if it is a file or cannot be read."""
    try:
        if folder.is_file():
            raise ValueError(f"{_env.RECORD_VARIABLE} must name a folder, got the file {folder}")
        return sorted(folder.glob(file_name(architecture, "*")))
    except OSError as error:
        raise ValueError(f"{_env.RECORD_VARIABLE} must name a readable folder: {error}") from None


def read(file: Path) -> dict[str, Any]:
    """A record, current or not; raises ValueError if it cannot be read."""
    try:
        record = dict(json.loads(file.read_text()))
        found = [(entry["op"], entry["dtype"], entry["status"]) for entry in record["kernels"]]
        words = all(isinstance(x, str) for entry in found for x in entry)
        if "digest" not in record or not words or {x[2] for x in found} - {"passed", "failed"}:
            raise ValueError("it needs a digest, and entries whose status is passed or failed")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must be a record of `fastattn check --record`: {error}") from None
    return record


def name(dtype: torch.dtype) -> str:
    """The name of a dtype in the record, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def recorded(device: torch.device) -> tuple[frozenset[Kernel], frozenset[Kernel]]:
    """The installed kernels that passed on this device's architecture, by a record, and those that
    failed, by this user's.
    """
    found: dict[str, set[Kernel]] = {"passed": set(), "failed": set()}
    if device.type != "cuda":
        return frozenset(), frozenset()
    try:
        architecture = _env.architecture(device.type, device.index or 0)
        for folder in filter(None, (SHIPPED, _env.record_folder())):
            for file in files(folder, architecture):
                backend = file.stem.removeprefix(f"{architecture}-")
                record = read(file)
                if record["digest"] is None:  # README.md beside the shipped records says why
                    applies = not (built(backend) or ("",))[0].startswith("trial_")
                else:
                    applies = record["digest"] == digest(backend) and identified(backend)
                if applies:
                    for entry in record["kernels"]:
                        if entry["status"] == "passed" or folder != SHIPPED:
                            found[entry["status"]].add((entry["op"], backend, entry["dtype"]))
    except (AssertionError, RuntimeError):  # torch finds no GPU
        pass
    except ValueError as error:
        _log.warning("no kernel is taken as verified by a record: %s", error)
        return frozenset(), frozenset()
    return frozenset(found["passed"] - found["failed"]), frozenset(found["failed"])
