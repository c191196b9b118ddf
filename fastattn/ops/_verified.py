"""The records of kernels that passed the equivalence suite and may be chosen automatically.

`fastattn check --device cuda --record` writes the record of this user. Records of measured GPUs
ship in the folder `verified` beside this file. An entry applies to the GPU architecture on which it
was made, the same kernels (a digest of their sources and library), PyTorch, CUDA and Triton. What
failed for this user is not chosen, whatever a shipped record says.
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
_SHIPPED = Path(__file__).resolve().parent / "verified"
_log = logging.getLogger("fastattn")
# (op, backend, dtype)
Kernel = tuple[str, str, str]


@functools.cache
def kernels(backend: str) -> dict[str, str]:
    """Identity of the kernels that an entry of a backend applies to: a digest of its kernels and
    the versions of what runs them. A library counts as it was built: another compiler may make
    other kernels.
    """
    digest = hashlib.sha256()
    library = _env.library_file(f"_C_{backend}.abi3.so", _PACKAGE)
    for file in (*sorted(_PACKAGE.glob("ops/**/*.py")), *([library] if library.is_file() else [])):
        place = file.name if file == library else file.relative_to(_PACKAGE).as_posix()
        digest.update(f"{place}\0".encode())
        digest.update(file.read_bytes())
    versions = _env.versions()
    wanted = {name: versions[name] for name in ("torch", "cuda", "triton")}
    return {"digest": digest.hexdigest()[:16], **wanted}


def applies_to(device: torch.device, backend: str) -> dict[str, str]:
    """The fields by which an entry says to which kernels on which GPUs it applies."""
    return {"architecture": _env.architecture(device.type, device.index or 0), **kernels(backend)}


def entries(file: Path, what: str = "passed") -> list[dict[str, Any]]:
    """All entries of a record, current or not, of kernels that "passed" or "failed"; raises
    ValueError if it cannot be read.
    """
    try:
        record = json.loads(file.read_text())
        # Records of the first versions have no list of failures.
        found = record["passed"] if what == "passed" else record.get(what, [])
        return [dict(entry) for entry in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} must be a record of `fastattn check --record`: {error}") from None


def name(dtype: torch.dtype) -> str:
    """The name of a dtype in the record, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def passed(device: torch.device) -> frozenset[Kernel]:
    """The current kernels that passed on this device's architecture, by a record."""
    return recorded(device)[0]


def failed(device: torch.device) -> frozenset[Kernel]:
    """The current kernels that failed on this device's architecture, by this user's record."""
    return recorded(device)[1]


@functools.cache
def recorded(device: torch.device) -> tuple[frozenset[Kernel], frozenset[Kernel]]:
    """The kernels that passed, and the kernels that failed."""
    nothing: frozenset[Kernel] = frozenset()
    file = _env.record_path()
    if file is None or device.type != "cuda":
        return nothing, nothing
    try:
        good, bad = (_current(entries(file, what), device) for what in ("passed", "failed"))
        for shipped in sorted(_SHIPPED.glob("*.json")):
            good |= _current(entries(shipped), device)
    except ValueError as error:
        _log.warning("no kernel is taken as verified by a record: %s", error)
        return nothing, nothing
    return good - bad, bad


def _current(found: list[dict[str, Any]], device: torch.device) -> frozenset[Kernel]:
    """The kernels of the entries that apply to the installed kernels and this device."""
    return frozenset(
        (str(entry.get("op")), str(entry.get("backend")), str(entry.get("dtype")))
        for entry in found
        if applies_to(device, str(entry.get("backend"))).items() <= entry.items()
    )
