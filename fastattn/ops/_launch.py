"""Launches of the GPU libraries, and their launch cache in the extension `_C_autograd`. It repeats
launches for later calls of the same layouts (csrc/autograd/launch_cache.h).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LIBRARIES = {"sm90", "cuda"}  # backends that launch by the functions below


class Launch(NamedTuple):
    """A call of an op of a GPU library, without its workspace of so many bytes."""

    op: Any
    args: tuple[Any, ...]
    workspace_bytes: int


class _Recording(threading.local):
    launches: list[Launch] | None = None


_recording = _Recording()


def launch(op: Any, *args: Any) -> None:
    """Calls an op of a GPU library, which writes into tensors that it is given."""
    op(*args)
    if _recording.launches is not None:
        _recording.launches.append(Launch(op, args, 0))


def launch_with_workspace(op: Any, device: torch.device, *args: Any) -> None:
    """The same for an op whose last argument is its workspace. Without one that it needs, it
    launches nothing and returns the size.
    """
    from fastattn.ops import _native  # here, so that `import fastattn` loads no native library

    if size := op(*args, None):
        op(*args, _native.workspace(size, device))
    if _recording.launches is not None:
        _recording.launches.append(Launch(op, args, size))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What this thread launches inside."""
    before, launches = _recording.launches, list[Launch]()
    _recording.launches = launches
    try:
        yield launches
    finally:
        _recording.launches = before


# -- the launch cache -----------------------------------------------------------------------------
@functools.cache
def _cache() -> Any:
    from fastattn.ops import _native

    return _native.extension()


def enable_cache(ops: Iterable[Any]) -> None:
    """Registers the caches of these ops, if there is the extension. They are the kernels of default
    overloads on CUDA from then on, and pass calls on to `.backend` with an empty name.
    """
    for op in ops if _cache() is not None else ():
        if not _LIBRARIES.isdisjoint(op.backends):
            _cache().cache_launches(op.name, "CUDA")


def run_and_record(
    name: str, args: Sequence[Any], run: Callable[[], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """run(), for a call of the op `name` that its cache passed on. Records the launch if the cache
    asks for it, which it does at the second call of the same layouts.
    """
    if not _cache().should_record_launch():
        return run()
    with recorded() as launches:
        results = run()
    if len(launches) == 1:
        [(op, library_args, size)] = launches
        _cache().record_launch(name, tuple(args), results, op._schema.name, library_args, size)
    return results


def clear_cache() -> None:
    if _cache() is not None:
        _cache().clear_launches()
