"""The short road of plain CPU calls: a public function's arguments -> the native op, no more.

Where a kernel takes microseconds, Python's checks before it take as long again. A road reads the
arguments itself, lets the native op refuse what the checks would (they then say what is wrong), and
leaves a node in autograd's graph: made in C++ by the extension `fastattn._C_autograd`, if it was
built for the torch that runs; otherwise by an autograd.Function.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _env

ShortRoad = Callable[..., tuple[Tensor, ...] | None]

# The words of csrc/autograd/road.h, in their order.
_KINDS = ("Tensor", "Optional[Tensor]", "float", "int", "None", "number")


@dataclass(frozen=True)
class Road:
    """Which native ops stand in for an op and its backward.

    forward, backward: names in torch.ops.fastattn_cpu. Their arguments are found by name among
    those of the public ops; the backward's needs_<x> is whether d<x> is wanted.
    without: forward arguments that the native op does not have -> the None or number that they must
    be.
    casts: whether the public function casts under autocast, so that this is no road there.
    """

    forward: str
    backward: str
    without: Mapping[str, float | None] = field(default_factory=dict)
    casts: bool = False


@dataclass(frozen=True)
class Wires:
    """The public ops by name: their arguments, results, and what is kept for the backward."""

    name: str
    types: Mapping[str, str]  # of the forward's arguments, in order
    saved: Sequence[str]
    constants: Sequence[str]
    typed: Sequence[str]
    results: Sequence[str]
    differentiable: int
    gradients: Sequence[str]  # the forward arguments whose gradients the backward returns
    passed: Sequence[tuple[str, str]]
    equal: Sequence[tuple[str, str, str]]


def in_cpp(road: Road, wires: Wires, in_python: Callable[..., Any]) -> ShortRoad | None:
    """The road with a node in C++, or None without the extension.

    in_python: (backend, needed, saved, constants, gradients) -> the gradients of the forward's
    tensors, for backward passes that are not plain.
    """
    extension = _extension()
    if extension is None or not _watch_environment(extension):
        return None
    names = list(wires.types)
    tensors = [name for name, kind in wires.types.items() if "Tensor" in kind]
    produced = [*names, *wires.results]
    native = [argument.name for argument in _schema(road.forward).arguments]

    def argument(name: str) -> tuple[int, float, int]:
        if name not in road.without:
            return _KINDS.index(wires.types[name]), 0.0, native.index(name)
        value = road.without[name]
        kind = "None" if value is None else "number"
        return _KINDS.index(kind), float(value or 0), -1

    def source(name: str) -> tuple[int, int]:
        for kind, known in enumerate(sources):
            if name in known:
                return kind, known.index(name)
        raise LookupError(f"{road.backward} has an argument {name} that nothing is known about")

    sources = (
        wires.saved,
        wires.constants,
        [f"{name}_dtype" for name in wires.typed],
        [f"needs_{name}" for name in wires.gradients],
        [f"d{name}" for name in wires.results],
    )
    return extension.road(
        wires.name,
        f"fastattn_cpu::{road.forward}",
        f"fastattn_cpu::{road.backward}",
        [argument(name) for name in names],
        [produced.index(name) for name in wires.saved],
        [names.index(name) for name in wires.constants],
        [names.index(name) for name in wires.typed],
        wires.differentiable,
        [source(argument.name) for argument in _schema(road.backward).arguments],
        [tensors.index(name) for name in wires.gradients],
        [(tensors.index(x), wires.results.index(y)) for x, y in wires.passed],
        [
            (wires.gradients.index(x), wires.gradients.index(y), *map(names.index, (x, y, zero)))
            for x, y, zero in wires.equal
        ],
        road.casts,
        in_python,
    )


@contextlib.contextmanager
def closed(*, everywhere: bool = False) -> Iterator[None]:
    """Inside, the extension serves no call of this thread, or of any."""
    extension = _extension()
    close = extension and (extension.close_everywhere if everywhere else extension.close_here)
    if close:
        close(1)
    try:
        yield
    finally:
        if close:
            close(-1)


def _extension() -> Any:
    from fastattn.ops import _native  # not with the package: it looks for native libraries

    return _native.extension()


def _schema(name: str) -> Any:
    return getattr(torch.ops.fastattn_cpu, name).default._schema


def _watch_environment(extension: Any) -> bool:
    """Closes the roads while a variable chooses backends; False where that cannot be seen."""
    watched = _env.watched_variables()
    if watched is not None:
        extension.watch_environment(*watched)
    return watched is not None
