"""The record of kernels that passed the equivalence suite and may be chosen automatically.

`fastattn check --device cuda --record` writes it. An entry applies to the GPU architecture on which
it was made, the same kernels (a digest of their sources and libraries), PyTorch, CUDA and Triton.
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
    """What an entry applies to: a digest of the kernels and the versions of what runs them."""
    digest = hashlib.sha256()
    for file in (*sorted(_PACKAGE.glob("ops/**/*.py")), *sorted(_PACKAGE.glob("_C_*"))):
        digest.update(f"{file.relative_to(_PACKAGE).as_posix()}\0".encode())
        digest.update(file.read_bytes())
    versions = _env.versions()
    wanted = {name: versions[name] for name in ("torch", "cuda", "triton")}
    return {"digest": digest.hexdigest()[:16], **wanted}


def entries(file: Path) -> list[dict[str, Any]]:
    """All entries of a record, current or not; raises ValueError if it cannot be read."""
    try:
        return [dict(entry) for entry in json.loads(file.read_text())["passed"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must be a record of `fastattn check --record`: {error}") from None


def name(dtype: torch.dtype) -> str:
    """The name of a dtype in the record, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def passed(device: torch.device) -> frozenset[tuple[str, str, str]]:
    """(op, backend, dtype) of the current kernels that passed on this device's architecture."""
    file = _env.record_path()
    try:
        found = entries(file) if file is not None and device.type == "cuda" else []
    except ValueError as error:
        _log.warning("no kernel is taken as verified: %s", error)
        return frozenset()
    if not found:
        return frozenset()
    wanted = {"architecture": _env.architecture("cuda", device.index or 0), **kernels()}
    return frozenset(
        (str(entry.get("op")), str(entry.get("backend")), str(entry.get("dtype")))
        for entry in found
        if wanted.items() <= entry.items()
    )
