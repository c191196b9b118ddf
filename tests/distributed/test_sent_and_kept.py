"""The bytes that each process sends are those of the formulas in docs/pages/parallelize.md."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peak_bytes import PeakBytes
from sent_bytes import SentBytes
from support import in_processes, needs_distributed

from fastattn.distributed import Plan, loss_sum, parallelize
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer

pytestmark = needs_distributed

P = 4


# -- the counter -----------------------------------------------------------------------------------
def counts_collectives() -> None:
    """One collective each of a tensor of 32 bytes, by c10d and as functional collectives."""
    import torch.distributed._functional_collectives as functional

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
        "all_reduce, functional": (2 * ring // P, lambda: functional.all_reduce(x, "sum", group)),
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
    x = torch.ones(4)
    with SentBytes(), pytest.raises(NotImplementedError, match=r"c10d\.gather_"):
        dist.gather(x, [torch.empty(4) for _ in range(P)] if dist.get_rank() == 0 else None)


# -- one attention ---------------------------------------------------------------------------------
def sharded_attention_sends_the_formula() -> None:
    """The mean over ranks, which send different amounts of the keys of a causal ring."""
    from fastattn.distributed import context_parallel_attention

    B, H, M, N, D = 2, 4, 32, 48, 8
    for method, causal, dtype in itertools.product(
        ("ring", "all_to_all"), (False, True), (torch.float32, torch.bfloat16)
    ):
        keys = M if causal else N
        q, k, v = (
            torch.randn(B, H, tokens // P, D, dtype=dtype, requires_grad=True)
            for tokens in (M, keys, keys)
        )
        column = B * H * D // P  # elements of one position's heads, of the mean rank
        if method == "ring":
            # Balanced and causal: no other rank needs the last of 2 P chunks, and of the other late
            # chunks, half of the passes have no gradient yet.
            forward = (P - 1) * 2 * column * keys * dtype.itemsize
            forward = forward * (1 - 1 / (2 * P)) if causal else forward
            gradients = (P - 1) * 2 * column * keys * 4 * (3 / 4 if causal else 1)
            expected = forward, forward + gradients
        else:
            forward = (P - 1) / P * 2 * column * (M + keys) * dtype.itemsize
            expected = forward, forward
        counters = SentBytes(), SentBytes()
        with counters[0]:
            out: Any = context_parallel_attention(
                q, k, v, method=method, causal=causal, balanced=causal
            )
        with counters[1]:
            out.sum().backward()
        sent = tuple(_mean(counter.total()) for counter in counters)
        assert sent == expected, (method, causal, dtype)


def _mean(x: float) -> float:
    """Over all processes."""
    total = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / P


# -- models ----------------------------------------------------------------------------------------
B, S, T, E, F, V = 8, 64, 48, 64, 256, 256
CONFIG = ModelConfig(
    V, E, 4, encoder_layers=1, decoder_layers=1, ffn_width=F, dropout=0.0, max_length=64
)
# Parameters of each layer that a tensor group divides, and those of norms and biases after sums.
DIVIDED = (4 * E * E + 2 * E * F + 3 * E + F, 8 * E * E + 2 * E * F + 6 * E + F)
REPLICATED = (6 * E, 9 * E)
LAST_NORMS = 4 * E


def _fsdp(ends: int, layers: int) -> float:
    """Two gathers and a reduce-scatter of layers, one gather less of embeddings and head."""
    return (P - 1) / P * 4 * (2 * ends + 3 * layers)


def _tensor(sequence: bool) -> float:
    """Bytes of two sublayers of the encoder and three of the decoder, all in fp32."""
    source, target = B * S, B * T
    rows = 2 * source + 3 * target
    if sequence:
        found = 4 * 4 * rows * E  # before and after each sublayer, in both directions
        found += 2 * 4 * (source + target) * E  # at both ends
        found += 2 * 4 * (sum(REPLICATED) + LAST_NORMS)
    else:
        found = 2 * 2 * 4 * rows * E
    found += 2 * 4 * source * E  # gradient of the memory
    found += 2 * 4 * (source + 2 * target) * E + 2 * 4 * target * 4  # vocabulary, smoothed loss
    return (P - 1) / P * found


CASES: tuple[tuple[dict[str, int], Plan, float], ...] = (
    ({"data": P}, Plan(), _fsdp(V * E + LAST_NORMS, sum(DIVIDED) + sum(REPLICATED))),
    ({"tensor": P}, Plan(), _tensor(sequence=True)),
    ({"tensor": P}, Plan(sequence=False), _tensor(sequence=False)),
)


def models_send_the_formulas() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    for sizes, plan, expected in CASES:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        torch.manual_seed(0)
        model = Seq2SeqTransformer(CONFIG)
        parallelize(model, mesh, plan)
        sentences = B // sizes.get("data", 1)
        source, target = (torch.randint(3, V, (sentences, length)) for length in (S, T))
        padding = torch.zeros(sentences, S, dtype=torch.bool)
        with SentBytes() as counter:
            logits = model(source, target, padding)
            loss_sum(model, logits, target, smoothing=0.1, ignore_index=0).backward()
        assert _mean(counter.total()) == expected, (sizes, plan)


@pytest.mark.slow
def test_four_processes() -> None:
    """All in one test: starting the processes takes most of the time."""
    in_processes(
        counts_collectives, counts_groups_apart, refuses_what_it_does_not_know,
        sharded_attention_sends_the_formula, models_send_the_formulas,
    )  # fmt: skip


def test_peak_bytes() -> None:
    with PeakBytes() as memory:
        x = torch.zeros(1000)
        rows = x.view(10, 100)[2:].add_(1.0)  # the same storage
        assert memory.in_use() == memory.peak == 4000
        other = torch.zeros(500)
        del other
        assert memory.in_use() == 4000
        assert memory.peak == 6000
        memory.reset()
        assert memory.peak == 4000
        x.untyped_storage().resize_(0)
        assert memory.in_use() == 0
        del rows, x
        y = torch.ones(3) + torch.ones(3)
    assert memory.in_use() == y.nbytes
    assert memory.peak == 4000
