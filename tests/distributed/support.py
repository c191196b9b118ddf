"""Groups of gloo processes on one machine, in which tests of `fastattn.distributed` run."""

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
# A process that waits longer than this for another one fails.
_TIMEOUT = datetime.timedelta(seconds=60)
# Imported once in a test run, by the server that all processes are forked from.
_PRELOADED = ["pytest", "torch", "torch.distributed.tensor", "torch.distributed.fsdp"]


def in_processes(*functions: Callable[[], None], size: int = 4) -> None:
    """Runs the functions one after the other in each process of a group of `size`, with one thread
    and `torch.manual_seed(0)` before each; they assert there. They must be picklable: functions of
    a module, or `functools.partial` of one. An error in a process is raised here with its
    traceback, and ends the others. The environment is that of the first call in a test run.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, os.path.join(folder, "rendezvous"), functions)
        mp.start_processes(_enter, arguments, nprocs=size, start_method="forkserver")  # type: ignore[no-untyped-call]


def _enter(
    rank: int, size: int, rendezvous: str, functions: tuple[Callable[[], None], ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=_TIMEOUT
    )
    try:
        for function in functions:
            torch.manual_seed(0)
            function()
    finally:
        dist.destroy_process_group()


def gradients(outputs: Any, weights: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of the sum of all outputs times their weights."""
    total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)
