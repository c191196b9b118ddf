"""Who can compute a case: fastattn's backends, and the peers found in `benchmarks/peers`.

A peer is one small file with a tuple `PEERS`: how it is found, what it supports and why not, and a
function that builds its forward. Its backward is torch's autograd over that forward.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastattn
from fastattn.testing.spec import Inputs, OpSpec, Workload

Forward = Callable[[Inputs], Any]
# As `Implementation.workloads`: runs only when asked for by name.
ON_REQUEST = "(?!)"
_DEVICE_OF_BACKEND = {"triton": "cuda", "sm90": "cuda", "cpu": "cpu"}
# Ops that leave some calls to torch's own where no backend is named: measured so, too.
_LEAVES_CALLS_TO_TORCH = ("linear",)
_AUTOMATIC = "automatic"


@dataclass(frozen=True)
class Task:
    """What a peer is asked for. inputs: one copy; masks and lengths are the same in every copy."""

    op: str
    workload: Workload
    device: torch.device
    dtype: torch.dtype
    inputs: Inputs


@dataclass(frozen=True)
class Implementation:
    """One way to compute a case.

    build: task -> forward(inputs) -> result. Work that a user does once per model, not per call,
    belongs into `build`.
    unavailable: why this machine cannot have it. unsupported: why it cannot do a task; both None if
        nothing is in the way, else phrased to follow the name.
    compiles: takes seconds to minutes before its first result (torch.compile).
    workloads: a regular expression of workload names to which it is limited unless all are asked
    for.
    directions: those that it has.
    draws_dropout: drops by bits of its own, so it is compared with dropout off.
    ignores_query_lengths: rows beyond query_lengths hold anything, so they are not compared.
    """

    name: str
    ops: tuple[str, ...]
    build: Callable[[Task], Forward]
    device_types: tuple[str, ...] = ("cuda", "cpu")
    unavailable: Callable[[], str | None] = lambda: None
    unsupported: Callable[[Task], str | None] = lambda task: None
    version: Callable[[], str] = lambda: str(torch.__version__)
    backend: str = ""
    ours: bool = False
    compiles: bool = False
    workloads: str = ""
    directions: tuple[str, ...] = ("fwd", "bwd", "step", "decode")
    draws_dropout: bool = False
    ignores_query_lengths: bool = False


def ours(spec: OpSpec, device_type: str) -> list[Implementation]:
    """fastattn's backends that serve a kind of device, each forced, and None, its own choice, where
    that may be none of them.
    """

    def of(backend: str | None) -> Implementation:
        def build(task: Task) -> Forward:
            return lambda inputs: spec.function(**inputs, backend=backend)

        return Implementation(
            f"fastattn-{backend or _AUTOMATIC}",
            (spec.name,),
            build,
            version=lambda: fastattn.__version__,
            unsupported=_reference_is_too_large if backend == "reference" else lambda task: None,
            backend=backend or _AUTOMATIC,
            ours=True,
            workloads=ON_REQUEST if (backend, device_type) == ("reference", "cuda") else "",
        )

    chosen: list[str | None] = [None] if spec.name in _LEAVES_CALLS_TO_TORCH else []
    chosen += [b for b in spec.backends if _DEVICE_OF_BACKEND.get(b, device_type) == device_type]
    return [of(b) for b in chosen]


def _reference_is_too_large(task: Task) -> str | None:
    if task.op != "attention":
        return None
    return weights_are_too_large(task, copies=8)


def weights_are_too_large(task: Task, copies: int) -> str | None:
    """Why not what writes out all B x H x M x N weights, `copies` times in fp32."""
    (B, H, M, _), N = task.inputs["q"].shape, task.inputs["k"].shape[2]
    size = copies * 4 * B * H * M * N / 2**30
    limit = 16.0
    if task.device.type == "cuda":
        limit = torch.cuda.mem_get_info(task.device)[0] / 2**30 / 2
    return f"writes out {size:.0f} GiB of weights here" if size > limit else None


def can_import(module: str) -> bool:
    """Whether a module's file is there. Nothing is imported: some packages take seconds, or fail
    where their GPU is absent.
    """
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for name in inner[:-1]:
        folders = [folder / name for folder in folders if (folder / name).is_dir()]
    return not inner or any(
        (folder / inner[-1]).is_dir() or any(folder.glob(f"{inner[-1]}.*")) for folder in folders
    )


def needs_package(package: str, module: str) -> Callable[[], str | None]:
    """For `Implementation.unavailable`: the module that serves, and the package that brings it."""

    def unavailable() -> str | None:
        return None if can_import(module) else f"is not installed: no package {package}"

    return unavailable


def package_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def peers(files: tuple[Path, ...] = ()) -> list[Implementation]:
    """Every peer of `benchmarks/peers` and of further files."""
    import benchmarks.peers as package

    found: list[Implementation] = []
    for module in pkgutil.iter_modules(package.__path__):
        found += importlib.import_module(f"{package.__name__}.{module.name}").PEERS
    for path in files:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"a peer must be a Python file, got {path}")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        found += loaded.PEERS
    return found


def implementations(
    spec: OpSpec, device_type: str, files: Sequence[Path] = ()
) -> list[Implementation]:
    """All of one op on one kind of device, ours first."""
    theirs = [
        p for p in peers(tuple(files)) if spec.name in p.ops and device_type in p.device_types
    ]
    return ours(spec, device_type) + theirs
