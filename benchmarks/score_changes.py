"""Time of attention whose scores are changed, on the CPU, as a multiple of plain causal attention.

    python -m benchmarks.score_changes [--json FILE] [--without-peers]

ALiBi, a soft cap, attention sinks and a table of relative positions, constant and learned; forward,
and forward and backward. One thread, process CPU time; all calls of one dtype, length and direction
are timed alternately. Memory: the most that a call has allocated beyond plain attention's. Peers:
PyTorch's attention with the bias as a dense mask, and FlexAttention, which has no backward on a
CPU; their times are multiples of the same plain attention's.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.implementations import Implementation, Task, fastattn_backends, peers
from benchmarks.op_benchmark import draw_inputs
from benchmarks.rows import measured_on
from fastattn.ops import _env
from fastattn.ops.attention.spec_workloads import SCORE_CHANGES, padded_workload
from fastattn.testing.lines import write_json
from fastattn.testing.spec import Inputs, Workload, all_specs
from fastattn.testing.timing import Call, Plan, peak_memory, time_side_by_side

CPU = torch.device("cpu")
SHAPES = ((1, 8, 2048, 64), (1, 2, 8192, 64))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = ("sdpa", "flex")
_PEERS_UP_TO = 2048  # a dense mask of longer sequences takes gigabytes
ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """ratio: the median over rounds of the time divided by plain attention's in the same round."""

    dtype: str
    keys: int
    direction: str
    scores: str
    implementation: str
    ms: float
    ratio: float
    extra_mib: float


def measure(with_peers: bool) -> list[Row]:
    rows = []
    for dtype in DTYPES:
        for shape in SHAPES:
            for backward in (False, True):
                rows += _line(shape, dtype, backward, with_peers)
    return rows


def _line(shape: tuple[int, ...], dtype: str, backward: bool, with_peers: bool) -> list[Row]:
    B, H, S, D = shape
    own = next(c for c in fastattn_backends(all_specs()["attention"], "cpu") if c.backend == "cpu")
    candidates = [own]
    if with_peers and S <= _PEERS_UP_TO:
        candidates += [p for p in peers() if p.name in PEERS and "cpu" in p.device_types]
    calls: dict[tuple[str, str], Call] = {}
    for scores in ("", *SCORE_CHANGES):
        name = f"b{B}_h{H}_s{S}_d{D}_causal_{scores}"
        workload = padded_workload(name, B, H, S, D, ("cpu",), causal=True, scores=scores)
        task = _task(workload, DTYPES[dtype])
        for candidate in candidates:
            direction = "bwd" if backward else "fwd"
            if candidate.why_unsupported(task) is not None or direction not in candidate.directions:
                continue
            if backward and scores == "relative":
                calls["learned table", candidate.name] = _call(candidate, task, workload.gradients)
            wanted = ("q", "k", "v") if backward else ()
            label = {"": "plain", "relative": "table"}.get(scores, scores)
            calls[label, candidate.name] = _call(candidate, task, wanted)
    return _rows(calls, dtype, S, "forward + backward" if backward else "forward", own.name)


def _task(workload: Workload, dtype: torch.dtype) -> Task:
    return Task("attention", workload, CPU, dtype, draw_inputs(workload, CPU, dtype))


def _call(candidate: Implementation, task: Task, gradients: tuple[str, ...]) -> Call:
    forward = candidate.build(task)
    dout = torch.randn_like(task.inputs["q"])

    def call() -> None:
        leaves: Inputs = {n: task.inputs[n].detach().requires_grad_() for n in gradients}
        out: Tensor = forward(task.inputs | leaves)
        if gradients:
            torch.autograd.grad(out, list(leaves.values()), dout)

    call()  # compiles
    return call


def _rows(
    calls: dict[tuple[str, str], Call], dtype: str, keys: int, direction: str, plain: str
) -> list[Row]:
    plan = Plan(rounds=ROUNDS, min_rounds=ROUNDS)
    timings = time_side_by_side({key: [call] for key, call in calls.items()}, CPU, plan)
    memory = {key: peak_memory(call, CPU) / 2**20 for key, call in calls.items()}
    base = timings["plain", plain].seconds
    rows = []
    for (scores, implementation), timing in timings.items():
        ratios = [x / y for x, y in zip(timing.seconds, base, strict=True)]
        extra = memory[scores, implementation] - memory["plain", plain]
        figures = (1e3 * timing.quantile(0.5), statistics.median(ratios), extra)
        ms, ratio, mib = (round(x, 3) for x in figures)
        rows.append(Row(dtype, keys, direction, scores, implementation, ms, ratio, mib))
        print(
            f"{dtype} {keys:5} {direction:18} {scores:13} {implementation:12} {ms:9.2f} "
            f"{ratio:6.2f} {mib:9.1f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the rows and their environment"
    )
    parser.add_argument("--without-peers", action="store_true", help="fastattn alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = _env.device_name(CPU)
    print(f"{where}, one thread, torch {_env.torch_version()}")
    print(f"{'':10} {'':18} {'scores':13} {'':12} {'ms':>9} {'ratio':>6} {'MiB more':>9}")
    rows = measure(not options.without_peers)
    if options.json:
        report = measured_on(where, _env.versions())
        write_json(options.json, report | {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
