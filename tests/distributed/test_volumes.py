"""The bytes that each process sends and keeps are those of the formulas."""

import itertools
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import in_processes, needs_distributed
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import volumes
from fastattn.distributed import Plan, loss_sum, parallelize
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.testing import PeakBytes, SentBytes

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
    """Of the keys of a causal ring, ranks send different amounts: their mean is compared."""
    from fastattn.distributed import context_parallel_attention

    B, H, M, N, D = 2, 4, 32, 48, 8
    for method, causal, dtype in itertools.product(
        ("ring", "all_to_all"), (False, True), (torch.float32, torch.bfloat16)
    ):
        keys = M if causal else N
        element = dtype.itemsize
        formula = volumes.Attention(M, keys, causal, H * D, B, P, method, element)
        q, k, v = (
            torch.randn(B, H, tokens // P, D, dtype=dtype, requires_grad=True)
            for tokens in (M, keys, keys)
        )
        counters = SentBytes(), SentBytes()
        with counters[0]:
            out: Any = context_parallel_attention(
                q, k, v, method=method, causal=causal, balanced=causal
            )
        with counters[1]:
            out.sum().backward()
        for backward, counter in enumerate(counters):
            expected = sum(t.sent for t in formula.transfers(bool(backward)))
            assert _mean(counter.total()) == expected, (method, causal, dtype, backward)


def _mean(x: float) -> float:
    """Over all processes."""
    total = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / P


# -- models ----------------------------------------------------------------------------------------
CONFIG = ModelConfig(
    256, 64, 4, encoder_layers=1, decoder_layers=1, ffn_width=256, dropout=0.0, max_length=64
)
CASES: tuple[tuple[dict[str, int], dict[str, Any], str], ...] = (
    ({"data": 4}, {}, "fp32"),
    ({"data": 4}, {}, "bf16"),
    ({"tensor": 4}, {}, "fp32"),
    ({"tensor": 4}, {"sequence": False}, "fp32"),
    ({"tensor": 4}, {"vocabulary": False}, "fp32"),
    ({"data": 2, "tensor": 2}, {}, "fp32"),
    ({"data": 2, "tensor": 2}, {"sequence": False, "vocabulary": False}, "bf16"),
    ({"context": 4}, {}, "fp32"),
    ({"context": 4}, {"context": "all_to_all"}, "fp32"),
    ({"data": 2, "context": 2}, {}, "fp32"),
    ({"context": 2, "tensor": 2}, {}, "fp32"),
    ({"context": 2, "tensor": 2}, {"context": "all_to_all", "sequence": False}, "fp32"),
)


def models_send_and_keep_the_formulas() -> None:
    """What each process sends in a forward and backward, by group and operation, equals the
    formula, as do the all-reduces of a backward; its bytes at the peak of an update are within 1.15
    of theirs.
    """
    for sizes, plan, dtype in CASES:
        layout = volumes.Layout(**sizes, plan=Plan(**plan))
        step = volumes.Step(CONFIG, 8, 64, 48, dtype)
        memory = PeakBytes()
        with memory:
            update = _Update(step, layout)
            update()
        memory.reset()
        with memory, SentBytes() as counter:
            update()
        found = {
            (update.groups[ranks], operation): _mean(sent)
            for (operation, ranks), sent in counter.sent.items()
        }
        expected: defaultdict[tuple[str, str], float] = defaultdict(float)
        for (group, operation), sent in volumes.sent(step, layout).items():
            expected[update.groups[update.ranks[group]], operation] += sent
        assert found == expected, (sizes, plan, dtype)
        loss = update.loss()
        with _Reductions() as reductions:
            loss.backward()
        assert reductions.count == sum(
            transfer.count
            for block in volumes.blocks(step, layout)
            for transfer in block.backward
            if transfer.operation == "all_reduce"
        ), (sizes, plan, dtype)
        ratio = memory.peak / volumes.memory(step, layout).total
        assert 1 / 1.15 < ratio < 1.15, (sizes, plan, dtype, ratio)


class _Reductions(TorchDispatchMode):
    """The number of all-reduces that start."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls the ops of its local tensors
        self.count += func._schema.name in ("c10d::allreduce_", "_c10d_functional::all_reduce")
        return func(*args, **(kwargs or {}))


class _Update:
    """An update of a parallel model on one batch."""

    def __init__(self, step: volumes.Step, layout: volumes.Layout) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = {"data": layout.data, "context": layout.context, "tensor": layout.tensor}
        sizes = {name: size for name, size in sizes.items() if size > 1}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        torch.manual_seed(0)
        self.model = Seq2SeqTransformer(step.config)
        parallelize(self.model, mesh, layout.plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.dtype = torch.bfloat16 if step.dtype == "bf16" else None
        self.pairs = step.batch * step.target
        shape = step.batch // layout.data
        self.batch = [
            torch.randint(3, step.config.vocabulary, (shape, length))
            for length in (step.source, step.target, step.target)
        ]
        self.padding = torch.zeros(shape, step.source, dtype=torch.bool)
        # The name of each group in the formulas -> its ranks; several names may be one group.
        rank, T = dist.get_rank(), layout.tensor
        self.ranks = {volumes.SHARDS: tuple(range(rank % T, P, T))}
        for name, group in (("tensor", volumes.TENSOR), ("context", volumes.CONTEXT)):
            if name in sizes:
                self.ranks[group] = tuple(dist.get_process_group_ranks(mesh.get_group(name)))
        self.groups = {
            ranks: " and ".join(g for g, members in self.ranks.items() if members == ranks)
            for ranks in self.ranks.values()
        }

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()

    def loss(self) -> torch.Tensor:
        source, target_in, target_out = self.batch
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            logits = self.model(source, target_in, self.padding)
            total = loss_sum(self.model, logits, target_out, smoothing=0.1, ignore_index=CONFIG.pad)
        return total / self.pairs


@pytest.mark.slow
def test_four_processes() -> None:
    """All in one test: starting the processes takes most of the time."""
    in_processes(
        counts_collectives,
        counts_groups_apart,
        refuses_what_it_does_not_know,
        sharded_attention_sends_the_formula,
        models_send_and_keep_the_formulas,
    )


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


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "swiglu"}, {"tied": False, "bias": False, "encoder_layers": 3}],
    ids=["relu", "swiglu", "untied"],
)
def test_flops_and_parameters(options: dict[str, Any]) -> None:
    """Of one process, FlopCounterMode counts those of the formulas, where it counts all pairs."""
    config = replace(CONFIG, **options)
    model = Seq2SeqTransformer(config)
    step = volumes.Step(config, 2, 8, 6)
    blocks = volumes.blocks(step, volumes.Layout())
    assert sum(block.parameters for block in blocks) == sum(
        parameter.numel() for parameter in model.parameters()
    )
    source, target = (torch.randint(3, config.vocabulary, (2, length)) for length in (8, 6))
    padding = torch.zeros(2, 8, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter:
        model(source, target, padding).sum().backward()
    products = 3 * sum(block.products for block in blocks)
    attention = sum(
        replace(attention, causal=False).flops(backward)
        for block in blocks
        for attention in block.attentions
        for backward in (False, True)
    )
    assert counter.get_total_flops() == products + attention
