"""Time of a training step on 1 to 1,024 GPUs, COMPUTED from formulas and the machine's rates.

    python -m benchmarks.scaling --model translator --machine h100
    python -m benchmarks.scaling --width 1024 --heads 16 --machine mi300xx8 --mesh data=4,tensor=8
    python -m benchmarks.scaling --record benchmarks/results

Nothing here is measured but the rates that `benchmarks.machines` marks so. Formulas of FLOPs, bytes
sent and memory are those of `benchmarks.volumes`, which tests compare with counted ones. For every
number of GPUs all meshes and plans are computed; those that do not fit into memory are left out.
What is assumed is listed in docs/pages/scaling.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import plots, volumes
from benchmarks.machines import Group, Machine, machines, read_rows, seconds
from benchmarks.volumes import CONTEXT, SHARDS, TENSOR, Block, Layout, Step, Transfer
from fastattn.distributed import Plan
from fastattn.seq2seq.model import ModelConfig
from fastattn.testing.check import write_json

MOST_RANKS = 1024
# The libraries and their buffers, and what the allocator cannot use.
USABLE_MEMORY = 0.9


@dataclass(frozen=True)
class Time:
    """Seconds of one update of a rank.

    products, attention: of matrix products and attention; streams: of memory-bound kernels;
    optimizer; tensor, context, shards: the exposed part of the transfers in these groups, that is
    while the rank does not compute; overlapped: transfers during computation.
    """

    products: float
    attention: float
    streams: float
    optimizer: float
    tensor: float
    context: float
    shards: float
    overlapped: float

    @property
    def total(self) -> float:
        return sum(vars(self).values()) - self.overlapped

    def __add__(self, other: Time) -> Time:
        mine, theirs = vars(self), vars(other)
        return Time(**{name: mine[name] + theirs[name] for name in mine})


ZERO = Time(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def groups(layout: Layout) -> dict[str, Group]:
    """Ranks of a tensor group are neighbours, then those of a context group, then data."""
    return {
        TENSOR: Group(layout.tensor, 1),
        CONTEXT: Group(layout.context, layout.tensor),
        SHARDS: Group(layout.shards, layout.tensor),
    }


def transfer_seconds(machine: Machine, layout: Layout, transfer: Transfer) -> float:
    group = groups(layout)[transfer.group]
    if not transfer.sent:
        return 0.0
    each = transfer.sent / transfer.count
    return transfer.count * seconds(machine, transfer.operation, group, each)


def step_time(machine: Machine, step: Step, layout: Layout) -> Time:
    """The time of an update: batches of `layout.accumulate`, then the optimizer."""
    micro = replace(step, batch=step.batch // layout.accumulate)
    blocks = volumes.blocks(micro, layout)
    one = _batch_time(machine, micro, layout, blocks)
    own = sum(block.parameters for block in blocks) / layout.shards
    moved = volumes.OPTIMIZER_BYTES * own / machine.bandwidth.value
    return sum([one] * layout.accumulate, replace(ZERO, optimizer=moved))


def _batch_time(machine: Machine, step: Step, layout: Layout, blocks: Sequence[Block]) -> Time:
    """Forward and backward of one batch."""
    different = {id(block): block for block in blocks}

    def of_each(function: Callable[[Block], Any]) -> list[Any]:
        found = {key: function(block) for key, block in different.items()}
        return [found[id(block)] for block in blocks]

    forward = of_each(lambda block: _compute(machine, step, layout, block, backward=False))
    backward = of_each(lambda block: _compute(machine, step, layout, block, backward=True))
    busy = sum([*forward, *backward], ZERO)

    def of_shards(transfer: Transfer) -> float:
        return transfer_seconds(machine, layout, transfer)

    gathers = of_each(lambda block: of_shards(block.gathers(layout)))
    again = of_each(lambda block: of_shards(block.gathers_again(layout)))
    scatters = of_each(lambda block: of_shards(block.scatters(layout)))
    busy_backward = [time.total for time in backward]
    end = _timeline([time.total for time in forward], busy_backward, gathers, again, scatters)
    exposed = end - busy.total
    overlapped = sum(gathers) + sum(again) + sum(scatters) - exposed
    return replace(busy, shards=exposed, overlapped=busy.overlapped + overlapped)


def _timeline(
    forward: Sequence[float],
    backward: Sequence[float],
    gathers: Sequence[float],
    again: Sequence[float],
    scatters: Sequence[float],
) -> float:
    """When the last of all ends, of computations and FSDP2's transfers.

    Computations follow each other, transfers too. A block's parameters are gathered while the block
    before it computes; its gradients are scattered while the next one does.
    """
    computed = transferred = 0.0
    ready = gathers[0]
    transferred = ready
    for i, own in enumerate(forward):
        start = max(computed, ready)
        if i + 1 < len(forward):
            transferred = ready = max(transferred, start) + gathers[i + 1]
        computed = start + own
    last = len(backward) - 1
    transferred = ready = max(transferred, computed) + again[last]
    for i in range(last, -1, -1):
        start = max(computed, ready)
        if i > 0:
            transferred = ready = max(transferred, start) + again[i - 1]
        computed = start + backward[i]
        transferred = max(transferred, computed) + scatters[i]
    return max(computed, transferred)


def _compute(machine: Machine, step: Step, layout: Layout, block: Block, *, backward: bool) -> Time:
    """A block of one rank, with the transfers of its tensor and context groups."""
    products = (2 if backward else 1) * block.products / machine.products[step.dtype].value
    streams = block.streamed[backward] / machine.bandwidth.value
    time = replace(ZERO, products=products, streams=streams)
    for transfer in block.backward if backward else block.forward:
        own = transfer_seconds(machine, layout, transfer)
        time += replace(ZERO, **{transfer.group: own})
    rate = machine.attention[step.dtype].value
    for attention in block.attentions:
        computed = attention.flops(backward) / rate
        sent = sum(transfer_seconds(machine, layout, t) for t in attention.transfers(backward))
        exposed = max(0.0, sent - computed * attention.overlap())
        time += replace(ZERO, attention=computed, context=exposed, overlapped=sent - exposed)
    return time


def hidden_from(machine: Machine) -> dict[str, float]:
    """Tokens of a rank from which transfers in bf16 are hidden, apart from their latency.

    FSDP2: a layer of n parameters computes 2 n FLOPs for each token and receives 4 n bytes. A ring
    without causal restriction: with m tokens, a step of the backward computes 10 m² E FLOPs and
    sends 12 m E bytes, keys, values and their gradients in fp32; that of the forward 4 and 4.
    """
    product, attention = machine.products["bf16"].value, machine.attention["bf16"].value
    link, network = machine.link.value, machine.network.value
    return {
        "FSDP on whole nodes": 2 * product / min(link, machine.node * network),
        "ring in a node": 1.2 * attention / link,
        "ring between nodes": 1.2 * attention / network,
    }


# -- all layouts -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Choice:
    """A layout that fits, with its time and memory."""

    layout: Layout
    time: Time
    memory: float


# Names of plans -> which of a mesh's dimensions they use, and how attention is shared.
PLANS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "data": (("data",), "ring"),
    "data, tensor": (("data", "tensor"), "ring"),
    "data, context by ring": (("data", "context"), "ring"),
    "data, context by all-to-all": (("data", "context"), "all_to_all"),
    "data, tensor, context by ring": (("data", "tensor", "context"), "ring"),
    "data, tensor, context by all-to-all": (("data", "tensor", "context"), "all_to_all"),
}


def layouts(step: Step, ranks: int, plan: str, most_accumulate: int = 64) -> Iterator[Layout]:
    """All meshes of a plan that divide the model and the batch. Every named dimension is used,
    except data, which may be 1.
    """
    dimensions, method = PLANS[plan]
    used = [d for d in dimensions if d != "data"]
    for sizes in itertools.product(*(_powers_of_two(2, ranks) for _ in used)):
        rest, left = divmod(ranks, math.prod(sizes))
        if left or not rest:
            continue
        mesh = dict(zip(used, sizes, strict=True))
        layout = Layout(data=rest, plan=Plan(context=method), **mesh)
        yield from accumulations(step, layout, most_accumulate)


def accumulations(step: Step, layout: Layout, most: int = 64) -> Iterator[Layout]:
    """A layout with gradients accumulated over 1, 2, 4 ... batches, those of which are possible."""
    for accumulate in _powers_of_two(1, most):
        accumulated = replace(layout, accumulate=accumulate)
        if volumes.refusal(step, accumulated) is None:
            yield accumulated


def _powers_of_two(first: int, last: int) -> list[int]:
    return [2**i for i in range(last.bit_length()) if first <= 2**i <= last]


def best(machine: Machine, step: Step, choices: Iterable[Layout]) -> Choice | None:
    """The fastest layout that fits, None if none does."""
    found = None
    for layout in choices:
        memory = volumes.memory(step, layout).total
        if memory > USABLE_MEMORY * machine.memory.value:
            continue
        choice = Choice(layout, step_time(machine, step, layout), memory)
        # Of equally fast ones the first, with the largest batches.
        if found is None or choice.time.total < (1 - 1e-9) * found.time.total:
            found = choice
    return found


def counts_of_ranks(most: int = MOST_RANKS) -> list[int]:
    return _powers_of_two(1, most)


Curves = Mapping[str, Mapping[int, Choice]]


def curves(machine: Machine, step: Step, most: int = MOST_RANKS) -> Curves:
    """The best layout of each plan for each number of ranks; where none fits, there is none."""
    found = {
        plan: {n: best(machine, step, layouts(step, n, plan)) for n in counts_of_ranks(most)}
        for plan in PLANS
    }
    return {
        plan: {ranks: choice for ranks, choice in row.items() if choice is not None}
        for plan, row in found.items()
    }


def best_of_all(found: Curves) -> dict[int, tuple[str, Choice]]:
    """For each number of ranks the fastest plan."""
    result: dict[int, tuple[str, Choice]] = {}
    for plan, row in found.items():
        for ranks, choice in row.items():
            fastest = result[ranks][1].time.total if ranks in result else math.inf
            if choice.time.total < (1 - 1e-9) * fastest:
                result[ranks] = plan, choice
    return dict(sorted(result.items()))


# -- examples --------------------------------------------------------------------------------------
def _model(vocabulary: int, width: int, heads: int, layers: int, ffn: int, longest: int) -> Any:
    return ModelConfig(
        vocabulary, width, heads, layers, layers, ffn, dropout=0.0, max_length=longest
    )


EXAMPLES: Mapping[str, Step] = {
    # The base model of Vaswani et al. 2017 with batches of 128k tokens per language.
    "translator": Step(_model(32768, 512, 8, 6, 2048, 256), 2048, 64, 64, "bf16"),
    # Documents of 128k tokens and their summaries.
    "long": Step(_model(32768, 2048, 16, 16, 8192, 131072), 16, 131072, 2048, "bf16"),
    # 26 billion parameters.
    "large": Step(_model(65536, 6144, 48, 24, 24576, 2048), 1024, 1024, 1024, "bf16"),
}


# -- one device, measured --------------------------------------------------------------------------
@dataclass(frozen=True)
class Check:
    """A training step of `fastattn.nn.Transformer` that was measured, and its computed time."""

    workload: str
    measured: float
    computed: float


def checks() -> list[Check]:
    """On the CPU, whose rates are measured, the rows of training steps."""
    machine = machines()["cpu"]
    found = []
    for row in read_rows():
        if row["op"] != "transformer" or row["cpu"] != machine.device or row["status"] != "ok":
            continue
        if row["impl"] != "fastattn" or row["dtype"] != "fp32":
            continue
        shape = row["shape"]
        B, S, E = shape["src"]
        half = shape["layers"] // 2  # in each stack
        # The smallest vocabulary: these models have neither embeddings nor a head.
        config = ModelConfig(4, E, shape["heads"], half, half, shape["ff"], dropout=0.0)
        step = Step(config, B, S, shape["tgt"][1], "fp32")
        found.append(
            Check(row["workload"], row["ms_median"] / 1e3, step_time(machine, step, Layout()).total)
        )
    return found


# -- output ----------------------------------------------------------------------------------------
PARTS = {
    "products": ("matrix products", "#8e1b4a"),
    "attention": ("attention", "#c8322b"),
    "streams": ("memory-bound kernels", "#e8833a"),
    "optimizer": ("optimizer", "#e0b7a0"),
    "tensor": ("tensor transfers", "#3b6fb6"),
    "context": ("context transfers", "#6fb7c9"),
    "shards": ("FSDP transfers", "#4f9d69"),
}
_PLAN_COLOURS = dict(
    zip(PLANS, ("#c8322b", "#e8833a", "#3b6fb6", "#6fb7c9", "#8e1b4a", "#4f9d69"), strict=True)
)


def plot(name: str, machine: Machine, step: Step, found: Curves, path: Path) -> list[Path]:
    """Time of each plan against the number of ranks, and what the fastest one consists of."""
    figure, axes = plots.make_figure(1, 2, width=5.2, height=4.0)
    times, parts = axes[0]
    for plan, row in found.items():
        ranks = list(row)
        seconds_ = [choice.time.total for choice in row.values()]
        times.plot(ranks, seconds_, color=_PLAN_COLOURS[plan], marker="o", markersize=4, label=plan)
    fastest = best_of_all(found)
    first, (_, choice) = next(iter(fastest.items()))
    times.plot(
        list(fastest), [choice.time.total * first / ranks for ranks in fastest],
        color="#444444", linewidth=1, linestyle="--", label="linear from the first",
    )  # fmt: skip
    times.set_yscale("log")
    times.yaxis.set_major_formatter(lambda value, _: _duration(value))
    times.set_title("time of a step, by plan", fontsize=10)
    bottom = [0.0] * len(fastest)
    places = range(len(fastest))
    for part, (label, ink) in PARTS.items():
        shares = [getattr(c.time, part) / c.time.total for _, c in fastest.values()]
        parts.bar(places, shares, 0.8, bottom=bottom, color=ink, label=label)
        bottom = [x + y for x, y in zip(bottom, shares, strict=True)]
    parts.set_title("the fastest plan: shares of the time", fontsize=10)
    parts.set_xticks(places, [str(ranks) for ranks in fastest], fontsize=8)
    times.set_xscale("log", base=2)
    times.set_xticks(list(fastest), [str(ranks) for ranks in fastest], fontsize=8)
    for axis in (times, parts):
        axis.set_xlabel("devices")
        axis.spines[["top", "right"]].set_visible(False)
    times.grid(axis="y", color="#dddddd", zorder=0)
    title = f"{name} on {machine.device}, {step.dtype}: computed, not measured"
    return plots.save(figure, axes, title, path, columns=4)


def _duration(seconds_: float) -> str:
    return f"{seconds_:g} s" if seconds_ >= 1 else f"{1e3 * seconds_:g} ms"


def _row(ranks: int, plan: str, choice: Choice) -> dict[str, Any]:
    layout = choice.layout
    milliseconds = {name: round(1e3 * value, 4) for name, value in asdict(choice.time).items()}
    return {
        "ranks": ranks,
        "plan": plan,
        "method": layout.plan.context,
        "mesh": {"data": layout.data, "context": layout.context, "tensor": layout.tensor},
        "accumulate": layout.accumulate,
        "ms": round(1e3 * choice.time.total, 4),
        "parts_ms": milliseconds,
        "memory_gb": round(choice.memory / 1e9, 3),
    }


def report(machine: Machine, step: Step, found: Curves) -> dict[str, Any]:
    """What --json writes."""
    return {
        "computed": "from formulas and rates; no time here is measured",
        "machine": {name: asdict(figure) for name, figure in machine.figures().items()},
        "device": machine.device,
        "model": asdict(step.config),
        "batch": step.batch,
        "source": step.source,
        "target": step.target,
        "dtype": step.dtype,
        "rows": [_row(ranks, plan, c) for plan, row in found.items() for ranks, c in row.items()],
        "fastest": [_row(ranks, *choice) for ranks, choice in best_of_all(found).items()],
    }


def _print(machine: Machine, step: Step, found: Curves) -> None:
    print(f"COMPUTED, not measured: {machine.device}, {step.dtype}")
    print(
        f"{step.batch} pairs of {step.source} and {step.target} tokens, "
        f"{parameters(step) / 1e6:.1f} million parameters"
    )
    for name, figure in machine.figures().items():
        print(f"  {name:36} {figure.value:10.4g}  {figure.origin}, {figure.source}")
    print(f"{'devices':>7} {'plan':36} {'data x context x tensor':>23} {'batches':>7} {'ms':>11} "
          f"{'exposed':>7} {'GB':>6}")  # fmt: skip
    for ranks, (plan, choice) in best_of_all(found).items():
        time, mesh = choice.time, choice.layout
        exposed = (time.tensor + time.context + time.shards) / time.total
        sizes = f"{mesh.data} x {mesh.context} x {mesh.tensor}"
        print(
            f"{ranks:7} {plan:36} {sizes:>23} {mesh.accumulate:7} {1e3 * time.total:11.2f} "
            f"{exposed:7.0%} {choice.memory / 1e9:6.1f}"
        )
    if not best_of_all(found):
        print("nothing fits into the memory")


def parameters(step: Step) -> float:
    return sum(block.parameters for block in volumes.blocks(step, Layout()))


# -- command line ----------------------------------------------------------------------------------
RECORDED_MACHINE = "h100"


def record(folder: Path) -> list[Path]:
    """The pictures of docs/pages/scaling.md, and the rows of its tables."""
    machine = machines()[RECORDED_MACHINE]
    paths, reports = [], {}
    for name, step in EXAMPLES.items():
        found = curves(machine, step)
        svg, png = plot(name, machine, step, found, folder / f"scaling-{name}")
        png.unlink()
        paths.append(svg)
        reports[name] = report(machine, step, found)
        del reports[name]["rows"]  # the tables show the fastest
    paths.append(folder / "scaling.json")
    write_json(paths[-1], reports)
    return paths


_POSITIVE = re.compile(r"[1-9][0-9]*").fullmatch


def _positive(text: str) -> int:
    if not _POSITIVE(text):
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _mesh(text: str) -> Layout:
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("data", "context", "tensor") or name in sizes or not _POSITIVE(size):
            raise argparse.ArgumentTypeError(f"must look like data=8,tensor=4, got {text!r}")
        sizes[name] = int(size)
    return Layout(**sizes)


def _machine(text: str) -> Machine:
    """Such as h100 or, with the number of devices in a node, h100x8."""
    name, _, node = text.rpartition("x") if text not in machines() else (text, "", "")
    if name not in machines() or (node and not _POSITIVE(node)):
        known = ", ".join(machines())
        raise argparse.ArgumentTypeError(f"must be one of {known}, or such as h100x8, got {text!r}")
    machine = machines()[name]
    return replace(machine, node=int(node)) if node else machine


def _step(options: argparse.Namespace) -> Step:
    """The example, with what the options replace."""
    step = EXAMPLES[options.model]
    sizes = {
        name: getattr(options, name)
        for name in ("vocabulary", "width", "heads", "encoder_layers", "decoder_layers",
                     "ffn_width", "activation")
        if getattr(options, name) is not None
    }  # fmt: skip
    rest = {
        name: getattr(options, name)
        for name in ("batch", "source", "target", "dtype")
        if getattr(options, name) is not None
    }
    return replace(step, config=replace(step.config, **sizes), **rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=EXAMPLES, default="translator", help="an example")
    for name in ("vocabulary", "width", "heads", "encoder-layers", "decoder-layers", "ffn-width"):
        parser.add_argument(f"--{name}", type=_positive, help="instead of the example's")
    parser.add_argument("--activation", help="of the feed-forward networks")
    parser.add_argument("--batch", type=_positive, help="sentence pairs of an update")
    parser.add_argument("--source", type=_positive, help="source tokens of each")
    parser.add_argument("--target", type=_positive, help="target tokens of each")
    parser.add_argument("--dtype", choices=volumes.BYTES, help="of activations")
    parser.add_argument(
        "--machine", type=_machine, default="h100", help="such as h100, or h100x4: 4 in a node"
    )
    parser.add_argument("--mesh", type=_mesh, help="this one alone, such as data=8,tensor=4")
    parser.add_argument("--most", type=_positive, default=MOST_RANKS, help="devices")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all rows")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw an SVG and a PNG")
    parser.add_argument("--record", metavar="FOLDER", type=Path, help="the pictures of the docs")
    options = parser.parse_args()
    if options.record:
        for path in record(options.record):
            print(path)
        return
    try:
        step, machine = _step(options), options.machine
    except ValueError as error:
        parser.error(str(error))
    if step.dtype not in machine.products:
        parser.error(f"no rate of {machine.device} is known for {step.dtype}")
    found = curves(machine, step, options.most)
    if options.mesh:
        found = _of_mesh(machine, step, options.mesh, parser)
    _print(machine, step, found)
    if options.json:
        write_json(options.json, report(machine, step, found))
    if options.plot:
        plot(options.model, machine, step, found, options.plot)


def _of_mesh(machine: Machine, step: Step, mesh: Layout, parser: argparse.ArgumentParser) -> Curves:
    """Every way to use one mesh."""
    found: dict[str, dict[int, Choice]] = {}
    used = {name for name in ("tensor", "context") if getattr(mesh, name) > 1}
    for plan, (dimensions, method) in PLANS.items():
        if used == {*dimensions} - {"data"}:
            layout = replace(mesh, plan=Plan(context=method))
            if choice := best(machine, step, accumulations(step, layout)):
                found[plan] = {mesh.ranks: choice}
    if not found:
        why = volumes.refusal(step, mesh) or "it does not fit into the memory"
        parser.error(f"the mesh is impossible: {why}")
    return found


if __name__ == "__main__":
    main()
