"""`fastattn train --mesh` under torchrun: the mesh of processes, and how they end.

Rank 0 alone prints, except that a rank that fails prints its error, once for all; torchrun then
ends the others. An error of communication may be the consequence of another process's end, which
torchrun reports with its rank: a rank with such an error first gives torchrun time to end it.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from fastattn.cli.arguments import UsageError, log
from fastattn.cli.errors import report

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from fastattn.cli.signals import StopRequest
    from fastattn.seq2seq.ranks import Ranks

DIMENSIONS = ("data", "tensor", "context")
# torchrun looks for processes that have ended every 0.1 s, and then ends the others.
SECONDS_FOR_TORCHRUN = 10.0


def mesh_shape(text: str) -> dict[str, int]:
    """The type of --mesh: "data=2,tensor=2"."""
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in DIMENSIONS or name in shape or not size.isdecimal() or not int(size):
            raise argparse.ArgumentTypeError(
                f"must be sizes of some of the dimensions {', '.join(DIMENSIONS)}, such as "
                f"data=2,tensor=2, got {text!r}"
            )
        shape[name] = int(size)
    return shape


def add_mesh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", type=mesh_shape, metavar="SIZES",
        help="train in several processes, started by torchrun: data=2,tensor=2 splits batches in "
        "two and weights in two (default: one process)",
    )  # fmt: skip


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_other_rank() -> bool:
    """Whether torchrun started this process as another rank than 0."""
    return started_by_torchrun() and os.environ["RANK"] != "0"


def silence_other_ranks() -> None:
    if is_other_rank():
        sys.stdout = sys.stderr = open(os.devnull, "w")


def show_error_of_machine() -> None:
    """Let one process of each machine print an error that may be of this machine alone."""
    if is_other_rank() and os.environ.get("LOCAL_RANK") == "0":
        sys.stderr = sys.__stderr__


def torchrun_command(shape: dict[str, int] | None) -> list[str]:
    """The words before "train" in a command that trains on a mesh."""
    if shape is None:
        return ["fastattn"]
    size = math.prod(shape.values())
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    nodes = ["--nnodes", str(size // here)] if size > here else []
    return ["torchrun", *nodes, "--nproc-per-node", str(here), "-m", "fastattn"]


def mesh_words(shape: dict[str, int]) -> list[str]:
    return ["--mesh", ",".join(f"{name}={size}" for name, size in shape.items())]


@contextmanager
def ranks_of_mesh(
    options: argparse.Namespace, device: torch.device, stop: StopRequest
) -> Iterator[Ranks]:
    """The ranks of --mesh within the `with` block; an error there ends the process."""
    from fastattn.seq2seq.ranks import ONE_PROCESS, Ranks

    shape = options.mesh
    if shape is None:
        if started_by_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
            size = os.environ["WORLD_SIZE"]
            raise UsageError(f"--mesh must be given under torchrun, such as --mesh data={size}")
        yield ONE_PROCESS
        return
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    _require_processes(shape, options.arguments)
    store, rank, size = next(dist.rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        names = tuple(shape)
        yield Ranks(init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=names))
    except BaseException as error:
        _end(error, rank, store, stop)
    dist.destroy_process_group()


def local_device(device: torch.device, given: bool) -> torch.device:
    """The GPU of this process among those of its machine, or the CPU."""
    import torch

    from fastattn.ops import gpu_count

    if device.type != "cuda":
        return device
    if given and device.index is not None:
        raise UsageError(f"--device must be cuda or cpu with --mesh, got {device}")
    # Asked of all processes of a machine, so that the one that prints is one that raises.
    started, count = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), gpu_count()
    if started > count:
        raise UsageError(
            f"--mesh needs a GPU for each of the {started} processes that torchrun started on this "
            f"machine, which has {count}: start {count} of them, or give --device cpu"
        )
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(own)
    return own


def _require_processes(shape: dict[str, int], arguments: Sequence[str]) -> None:
    size = math.prod(shape.values())
    if not started_by_torchrun():
        words = [*torchrun_command(shape), *arguments]
        raise UsageError(f"--mesh needs {size} processes: start it with {shlex.join(words)}")
    started = int(os.environ["WORLD_SIZE"])
    if size != started:
        sizes = mesh_words(shape)[1]
        raise UsageError(
            f"--mesh must have as many ranks as torchrun started, {started}, got {sizes}, which "
            f"has {size}"
        )


def _end(error: BaseException, rank: int, store: dist.Store, stop: StopRequest) -> NoReturn:
    """Print the error, if it is the first and no consequence of another, and end the process.

    Not by returning: threads of an unfinished checkpoint would wait for other ranks.
    """
    if isinstance(error, RuntimeError):  # as errors of communication are
        if stop():
            os._exit(stop.exit_code)
        time.sleep(SECONDS_FOR_TORCHRUN)
    if store.add("fastattn/errors", 1) > 1:
        time.sleep(SECONDS_FOR_TORCHRUN)
        os._exit(1)
    sys.stderr = sys.__stderr__
    if not isinstance(error, KeyboardInterrupt):
        log(f"fastattn: rank {rank} ends with an error")
    code = report(error, "train")
    if code is None:
        traceback.print_exception(error)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
