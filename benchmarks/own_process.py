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
    """What a decoder must compute: `Task` without what cannot be sent to another process."""

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
        process = context.Process(target=_serve, args=(other, build, wanted), daemon=True)
        process.start()
        other.close()
        weakref.finalize(self, self._pipe.close)
        assert process.pid is not None
        self.pid = process.pid
        self._receive()

    def __call__(self, inputs: Inputs) -> Decoded:
        self._pipe.send(inputs["source"].tolist())
        tokens, log_probabilities = self._receive()
        scores = None
        if log_probabilities is not None:
            scores = torch.tensor(log_probabilities, dtype=torch.float64)
        return Decoded(torch.tensor(tokens), scores)

    def _receive(self) -> Any:
        error, value = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return value


def _serve(pipe: Connection, build: Callable[[DecoderTask], Decode], task: DecoderTask) -> None:
    torch.set_num_threads(1)  # its model is only converted, and threads that wait take time
    decode = None
    while True:
        try:
            answer = None if decode is None else decode(pipe.recv())
            decode = decode or build(task)
            pipe.send((None, answer))
        except EOFError:
            return
        except Exception:
            pipe.send((traceback.format_exc(limit=-3), None))
