"""A decoder in a process of its own: two OpenMP runtimes in one process slow each other down.

The process builds the model of the workload itself, from the same seed. Sentences go in and tokens
come out as lists, through a pipe.
"""

import multiprocessing
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.generation import Decoded, DecodeSize, DecodeWorkload
from benchmarks.implementations import Task
from fastattn.testing.spec import Inputs

Tokens = list[list[int]]
# source [B, S] -> tokens [B, new], and the log-probabilities [B] if it computes them.
Decode = Callable[[Tokens], tuple[Tokens, list[float] | None]]


@dataclass(frozen=True)
class DecoderTask:
    """The decoding that a peer must compute: a `Task` that can be sent to another process."""

    size: DecodeSize
    dtype: torch.dtype
    threads: int


class OwnProcess:
    """A peer's forward; `pid` is the process that computes it. It ends with this object."""

    def __init__(self, build: Callable[[DecoderTask], Decode], task: Task) -> None:
        assert isinstance(task.workload, DecodeWorkload)
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        wanted = DecoderTask(task.workload.size, task.dtype, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=(other, build, wanted), daemon=True)
        self._process.start()
        other.close()
        weakref.finalize(self, self._pipe.close)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._receive()

    def __call__(self, inputs: Inputs) -> Decoded:
        tokens, log_probabilities = self._receive(inputs["source"].tolist())
        scores = None
        if log_probabilities is not None:
            scores = torch.tensor(log_probabilities, dtype=torch.float64)
        return Decoded(torch.tensor(tokens), scores)

    def _receive(self, request: Tokens | None = None) -> Any:
        try:
            if request is not None:
                self._pipe.send(request)
            error, value = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process of the decoder ended with exit code {code}") from None
        if error is not None:
            raise RuntimeError(error)
        return value


def _serve(pipe: Connection, build: Callable[[DecoderTask], Decode], task: DecoderTask) -> None:
    torch.set_num_threads(1)  # its model is only converted, and threads that wait take time
    try:
        decode = build(task)
    except Exception as error:
        pipe.send((_described(error), None))
        return
    pipe.send((None, None))
    while True:
        try:
            source = pipe.recv()
        except EOFError:
            return
        try:
            answer = None, decode(source)
        except Exception as error:
            answer = _described(error), None
        pipe.send(answer)


def _described(error: Exception) -> str:
    """Type and message, for the result; the traceback is printed here."""
    traceback.print_exception(error)
    return "".join(traceback.format_exception_only(error)).strip()
