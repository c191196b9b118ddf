"""Runs cases in worker processes, so that a crash, a hang or a GPU error affects only one case.

Workers run many cases, because importing PyTorch and opening a GPU takes seconds. A worker whose
GPU does not work after a case is replaced.
"""

import contextlib
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

C = TypeVar("C")
R = TypeVar("R")
# How long a running case may continue when the time is up.
GRACE_S = 30.0
# How long a process may take to start.
_START_S = 120.0


@dataclass(frozen=True)
class Lost:
    """A case without a result. reached: whether it crashed or hung. left_out: whether it was not to
    be started; otherwise there was no time for it.
    """

    reached: bool
    why: str
    left_out: bool = False


@dataclass
class _Worker(Generic[C, R]):
    """A process and the case that it runs."""

    process: Any
    pipe: Connection
    index: int = -1
    until: float = 0.0


def run_isolated(
    function: Callable[[C], R],
    cases: Sequence[C],
    *,
    jobs: int,
    seconds: float | None = None,
    limit_s: float,
    left_out: Callable[[C], str | None] = lambda case: None,
) -> Iterator[tuple[int, R | Lost]]:
    """Yields (index, result) of each case as it finishes.

    function: importable by name; cases and results must be picklable. seconds: no case starts after
    this time. limit_s: a case that takes longer, without the start of its process, counts as
    hanging. left_out: called before a case starts; if it returns a reason, the case does not.
    """
    context = multiprocessing.get_context("spawn")
    end = None if seconds is None else time.monotonic() + seconds
    waiting = list(range(len(cases)))[::-1]
    idle: list[_Worker[C, R]] = []
    busy: dict[Connection, _Worker[C, R]] = {}

    def until(limit: float) -> float:
        latest = time.monotonic() + limit
        return latest if end is None else min(latest, end + GRACE_S)

    def start() -> _Worker[C, R]:
        pipe, worker_pipe = context.Pipe()
        process = context.Process(target=_work, args=(worker_pipe, function), daemon=True)
        with _without_main(function):
            process.start()
        worker_pipe.close()
        return _Worker(process, pipe)

    try:
        while waiting or busy:
            if end is not None and time.monotonic() >= end:
                for index in waiting[::-1]:
                    yield index, Lost(False, f"was not reached in {seconds:.3g} s")
                waiting.clear()
            while waiting and len(busy) < jobs:
                if (why := left_out(cases[waiting[-1]])) is not None:
                    yield waiting.pop(), Lost(False, why, left_out=True)
                    continue
                worker, limit = (idle.pop(), limit_s) if idle else (start(), limit_s + _START_S)
                worker.index, worker.until = waiting.pop(), until(limit)
                busy[worker.pipe] = worker
                try:
                    worker.pipe.send(cases[worker.index])
                except OSError:
                    pass  # the process has ended; reading from the pipe reports it
            if not busy:
                continue
            soonest = min(worker.until for worker in busy.values())
            if waiting and end is not None:
                soonest = min(soonest, end)
            for pipe in wait(list(busy), max(0.0, soonest - time.monotonic())):
                assert isinstance(pipe, Connection)
                worker = busy.pop(pipe)
                try:
                    if (message := pipe.recv()) is None:  # the process has started
                        worker.until = until(limit_s)
                        busy[pipe] = worker
                        continue
                    result, healthy = message
                except (EOFError, OSError):
                    worker.process.join()
                    yield worker.index, Lost(True, _end_of(worker.process.exitcode))
                    continue
                if healthy:
                    idle.append(worker)
                else:
                    _stop(worker)
                yield worker.index, result
            for pipe, worker in list(busy.items()):
                if time.monotonic() >= worker.until:
                    del busy[pipe]
                    _stop(worker)
                    if end is not None and worker.until >= end + GRACE_S:
                        yield worker.index, Lost(False, f"was not finished in {seconds:.3g} s")
                    else:
                        yield worker.index, Lost(True, f"was still running after {limit_s:g} s")
    finally:
        for worker in [*busy.values(), *idle]:
            _stop(worker)


@contextlib.contextmanager
def _without_main(function: Callable[..., Any]) -> Iterator[None]:
    """A process that starts inside does not import the main module, which runs the checks again if
    it is a script without `if __name__ == "__main__"`.
    """
    main = sys.modules["__main__"]
    if function.__module__ != "__main__":
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends its workers
    torch.set_num_threads(1)
    pipe.send(None)
    while True:
        try:
            case = pipe.recv()
        except EOFError:
            return
        try:
            result = function(case)
        except Exception as error:
            result = Lost(True, f"{type(error).__name__}: {error}"[:500])
        pipe.send((result, _gpu_works()))


def _gpu_works() -> bool:
    """False after an illegal memory access or a trap: all later CUDA calls of the process fail."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _stop(worker: _Worker[Any, Any]) -> None:
    worker.process.kill()
    worker.process.join(10)  # a process that hangs in the driver is abandoned
    worker.pipe.close()


def _end_of(code: int | None) -> str:
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = signal.Signals(-code).name
    return f"its process died: {how}"
