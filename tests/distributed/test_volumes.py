"""The bytes that each process sends and keeps are those of the formulas."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import in_processes, needs_distributed

pytestmark = needs_distributed

P = 4


# -- the counter -----------------------------------------------------------------------------------
def counts_collectives() -> None:
    """One collective each of a tensor of 32 bytes, by c10d and as functional collectives."""
    import torch.distributed._functional_collectives as functional

    from fastattn.testing import SentBytes

    x, whole, rank = torch.ones(8), torch.empty(32), dist.get_rank()
    group: Any = dist.group.WORLD
    ring = (P - 1) * 32
    cases = {
        "all_gather": (ring, lambda: dist.all_gather_into_tensor(whole, x)),
        "all_gather of a list": (ring, lambda: dist.all_gather([*whole.chunk(P)], x)),
        "all_gather, functional": (ring, lambda: functional.all_gather_tensor(x, 0, group)),
        "reduce_scatter": (ring, lambda: dist.reduce_scatter_tensor(x, whole)),
        "reduce_scatter, functional": (
            ring // P,
            lambda: functional.reduce_scatter_tensor(x, "sum", 0, group),
        ),
        "all_reduce": (2 * ring // P, lambda: dist.all_reduce(x)),
        "all_reduce, functional": (
            2 * ring // P,
            lambda: functional.all_reduce(x, "sum", group),
        ),
        "all_to_all": (ring // P, lambda: dist.all_to_all_single(whole[:8], x)),
        "all_to_all, functional": (
            ring // P,
            lambda: functional.all_to_all_single(x, None, None, group),
        ),
        # Rank r keeps r rows of its 6 and sends the others.
        "all_to_all of unequal shares": (
            4 * (6 - rank),
            lambda: dist.all_to_all_single(torch.empty(P * rank), x[:6], [rank] * P, [0, 1, 2, 3]),
        ),
        "broadcast": (ring // P, lambda: dist.broadcast(x, 0)),
        "send": (32, lambda: _pass_on(x)),
    }
    for name, (expected, call) in cases.items():
        with SentBytes() as counter, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of functional collectives' names
            call()
        operation = name.split()[0].rstrip(",")
        everyone = tuple(range(P))
        assert counter.sent == {(operation, everyone): expected}, name
        assert counter.total() == counter.total(operation, everyone) == expected
        assert counter.total("gather") == counter.total(ranks=[0]) == 0
    with SentBytes() as counter:
        dist.barrier()
    assert not counter.sent


def _pass_on(x: torch.Tensor) -> None:
    rank = dist.get_rank()
    received = torch.empty_like(x)
    transfers = [
        dist.P2POp(dist.isend, x, (rank + 1) % P),
        dist.P2POp(dist.irecv, received, (rank - 1) % P),
    ]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()


def counts_groups_apart() -> None:
    """Collectives of DTensors on two mesh dimensions, forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    from fastattn.testing import SentBytes

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    a, b = (dist.get_process_group_ranks(mesh.get_group(name)) for name in ("a", "b"))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Replicate()]).requires_grad_()
    with SentBytes() as counter:
        y = x.redistribute(mesh, [Replicate(), Replicate()])
        y = y.redistribute(mesh, [Replicate(), Shard(1)])
        y.square().sum().to_local().backward()
    half = 8 * 4 * 4 // 2
    # Forward the rows are gathered, backward the gradient of the columns.
    assert counter.sent == {("all_gather", tuple(a)): half, ("all_gather", tuple(b)): half}
    part = DTensor.from_local(torch.ones(6), mesh, [Partial(), Replicate()])
    with SentBytes() as counter:
        part.full_tensor()
    assert counter.sent == {("all_reduce", tuple(a)): 6 * 4}


def refuses_what_it_does_not_know() -> None:
    from fastattn.testing import SentBytes

    x = torch.ones(4)
    with SentBytes(), pytest.raises(NotImplementedError, match=r"c10d\.gather_"):
        dist.gather(x, [torch.empty(4) for _ in range(P)] if dist.get_rank() == 0 else None)


def test_four_processes() -> None:
    """All in one test: starting the processes takes most of the time."""
    in_processes(counts_collectives, counts_groups_apart, refuses_what_it_does_not_know)
