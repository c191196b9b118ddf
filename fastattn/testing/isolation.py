"""Runs cases in processes of their own: one that crashes, hangs or breaks its GPU costs itself.

Workers live on from case to case, because importing torch and opening a GPU cost seconds. One whose
GPU no longer works after a case is replaced: whatever it computed next could not be believed.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

C = TypeVar("C")
R = TypeVar("R")
# A case under way when the time is up may go on for so long.
GRACE_S = 30.0
# A process may take so long until it can begin.
_START_S = 120.0


@dataclass(frozen=True)
class Lost:
    """A case without a result. reached: whether it had begun."""

    reached: bool
    why: str


@dataclass
class _Worker(Generic[C, R]):
    """A process and what it is busy with."""

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
) -> Iterator[tuple[int, R | Lost]]:
    """(index, result) of each case as it comes.

    function: importable by its name; cases and results can be pickled. seconds: after this time no
    case begins. limit_s: a case that takes longer is taken for a hang; its process's start does not
    count.
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
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, function), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    try:
        while waiting or busy:
            if end is not None and time.monotonic() >= end:
                for index in waiting[::-1]:
                    yield index, Lost(False, f"was not reached in {seconds:g} s")
                waiting.clear()
            while waiting and len(busy) < jobs:
                worker, limit = (idle.pop(), limit_s) if idle else (start(), limit_s + _START_S)
                worker.index, worker.until = waiting.pop(), until(limit)
                busy[worker.pipe] = worker
                try:
                    worker.pipe.send(cases[worker.index])
                except OSError:
                    pass  # it has ended: the next read says how
            if not busy:
                continue
            soonest = min(worker.until for worker in busy.values())
            if waiting and end is not None:
                soonest = min(soonest, end)
            for pipe in wait(list(busy), max(0.0, soonest - time.monotonic())):
                assert isinstance(pipe, Connection)
                worker = busy.pop(pipe)
                try:
                    if (message := pipe.recv()) is None:  # it can begin
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
                    out_of_time = end is not None and time.monotonic() >= end
                    shown = f"{seconds:g}" if out_of_time else f"{limit_s:g}"
                    yield worker.index, Lost(True, f"was still running after {shown} s")
    finally:
        for worker in [*busy.values(), *idle]:
            _stop(worker)


def _work(pipe: Connection, function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is asked to stop ends this process, too
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
    """After an illegal access or a trap every further call in the process fails."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _stop(worker: _Worker[Any, Any]) -> None:
    worker.process.kill()
    worker.process.join(10)  # one that is stuck in the driver is left behind
    worker.pipe.close()


def _end_of(code: int | None) -> str:
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = signal.Signals(-code).name
    return f"its process died: {how}"
