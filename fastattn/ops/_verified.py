"""What has passed the equivalence suite on this machine's GPUs, so that it may be chosen unasked.

`fastattn check --device cuda --record` writes a file; an entry counts on the architecture it was
made on, for the same kernels (a digest of their sources and libraries), torch and Triton.
"""

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

from fastattn.ops import _env

_PACKAGE = Path(__file__).resolve().parent.parent
_log = logging.getLogger("fastattn")


@functools.cache
def kernels() -> dict[str, str]:
    """What a verdict belongs to: the kernels' digest and the versions of what runs them."""
    digest = hashlib.sha256()
    for file in (*sorted(_PACKAGE.glob("ops/**/*.py")), *sorted(_PACKAGE.glob("_C_*"))):
        digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0".encode())
        digest.update(file.read_bytes())
    versions = _env.versions()
    wanted = {name: versions[name] for name in ("torch", "cuda", "triton")}
    return {"digest": digest.hexdigest()[:16], **wanted}


def entries(file: Path) -> list[dict[str, Any]]:
    """The record's entries of whatever kernels; ValueError where it cannot be read."""
    try:
        return [dict(entry) for entry in json.loads(file.read_text())["passed"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must be a record of `fastattn check --record`: {error}") from None


def name(dtype: torch.dtype) -> str:
    """A dtype in the record: as torch spells it, without the "torch."."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def passed(device: torch.device) -> frozenset[tuple[str, str, str]]:
    """(op, backend, dtype's name) of these very kernels that have passed on a GPU such as this
    one.
    """
    file = _env.record_path()
    try:
        found = entries(file) if file is not None and device.type == "cuda" else []
    except ValueError as error:
        _log.warning("no kernel counts as verified here: %s", error)
        return frozenset()
    if not found:
        return frozenset()
    wanted = {"architecture": _env.architecture("cuda", device.index or 0), **kernels()}
    return frozenset(
        (str(entry.get("op")), str(entry.get("backend")), str(entry.get("dtype")))
        for entry in found
        if wanted.items() <= entry.items()
    )
