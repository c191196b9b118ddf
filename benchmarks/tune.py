"""`python -m benchmarks.tune`: times tilings of the Triton kernels and shows the best.

Several processes compile the candidates into Triton's cache, while one process with the GPU
measures those that are ready: it checks their results as `benchmarks.run` does, then times them,
next to a peer if there is one. A candidate that fails, crashes or hangs does not affect the others.
Results are appended to the output folder, one JSON object per line; the table of winners is printed
last.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cases import DTYPES, implementations_of, specs
from benchmarks.implementations import Implementation
from benchmarks.op_benchmark import OpBenchmark
from benchmarks.tune_task import FEATURES, NORMS, Candidate, Task, compile_kernels
from fastattn.ops import _env
from fastattn.testing import lines
from fastattn.testing.isolation import Lost, run_isolated
from fastattn.testing.timing import Call, Plan, time_side_by_side

_HANGS_S = 90.0
_NORM_SHAPES = ((32768, 512), (32768, 1024), (32768, 4096), (8192, 16384))
_FFN_SHAPES = ((16384, 1024), (8192, 4096))

# A task, a config and the milliseconds of its measurement.
Job = tuple[Task, Any, float]
Row = dict[str, Any]


def describe(config: Any) -> str:
    """The fields that differ from the class's defaults."""
    parts = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            parts.append(f"{field.name}[{describe(value)}]")
        elif value != field.default:
            parts.append(f"{field.name}={value}")
    return " ".join(parts)


# -- in processes of their own --------------------------------------------------------------------


def compile_ahead(job: Job) -> float:
    """Compiles the kernels of a candidate and returns the seconds that it took."""
    start = time.monotonic()
    compile_kernels(*job[:2])
    return time.monotonic() - start


# What the candidates of the last task share: its inputs with their references, and its peer.
_prepared: dict[Task, tuple[OpBenchmark, list[Call]]] = {}


def measure_on_gpu(job: Job) -> Row:
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.Stream())  # of everything that is timed
    return measure(*job, torch.device("cuda", torch.cuda.current_device()))


def measure(task: Task, config: Any, budget_ms: float, device: torch.device) -> Row:
    """The row of one candidate: checked first, then timed."""
    if task not in _prepared:
        _prepared.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _prepared[task] = _prepare(task, device)
    benchmark, peer = _prepared[task]
    candidate = Candidate(task, config)
    with candidate:
        verdict = benchmark.check(_own(task), task.direction)
    kernels = [kernel for kernel in candidate.kernels if kernel is not None]
    row = {"error": verdict.error, "allowed": verdict.allowed}
    row["registers"] = [getattr(kernel, "n_regs", None) for kernel in kernels]
    row["spills"] = [getattr(kernel, "n_spills", None) for kernel in kernels]
    row["shared"] = [kernel.metadata.shared for kernel in kernels]
    if not verdict.ok:
        return row | {"status": "wrong", "message": verdict.message}
    calls: dict[str, Sequence[Call]] = {"ms": [candidate.launch]} | ({"peer": peer} if peer else {})
    plan = Plan(budget_ms=len(calls) * budget_ms, graph=False)
    timings = time_side_by_side(calls, device, plan)
    if isinstance(timings["ms"], Exception):
        raise timings["ms"]
    flops, moved = benchmark.work(task.direction)
    work, unit = (moved / 1e9, "GB/s") if task.op in NORMS else (flops / 1e12, "TFLOP/s")
    seconds = {n: t.quantile(0.5) for n, t in timings.items() if not isinstance(t, Exception)}
    if "peer" in seconds:
        row["peer_rate"] = work / seconds["peer"]
    rate = {"ms": 1e3 * seconds["ms"], "rate": work / seconds["ms"], "unit": unit}
    return row | {"status": "ok"} | rate


def _own(task: Task) -> Implementation:
    """The public function, whose op a `Candidate` computes."""
    function = specs()[task.op].function
    return Implementation("fastattn", (task.op,), lambda _: lambda inputs: function(**inputs))


def _prepare(task: Task, device: torch.device) -> tuple[OpBenchmark, list[Call]]:
    spec, own = specs()[task.op], _own(task)
    benchmark = OpBenchmark(spec, task.workload, device, DTYPES[task.dtype], cold=False)
    benchmark.build(own)
    benchmark.prepare_oracle(own)
    with contextlib.suppress(Exception):  # a peer that fails is left out
        name = "sdpa-cudnn" if task.op == "attention" else "eager"
        peer = next(p for p in implementations_of(task.op, device.type) if p.name == name)
        if benchmark.why_unsupported(peer) is None:
            benchmark.build(peer)
            with torch.set_grad_enabled(task.direction == "bwd"):
                return benchmark, benchmark.calls(peer, task.direction)
    return benchmark, []


# -- the search -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    add = parser.add_argument
    add("--op", nargs="+", choices=("attention", *NORMS, "ffn"), default=["attention"])
    add("--direction", nargs="+", choices=("fwd", "bwd"), default=["fwd"], help="ffn: fwd alone")
    add("--feature", nargs="+", choices=FEATURES, default=["plain", "causal"])
    add("--dim", nargs="+", type=int, default=[64, 128, 256], help="head dims")
    add("--length", nargs="+", type=int, default=[8192], help="queries and keys of a sequence")
    add("--tokens", type=int, default=16384, help="sequences * length")
    add("--width", type=int, default=2048, help="heads * head dim")
    add("--shape", nargs="+", metavar="ROWSxN", help="of norms and ffn; default: the benchmarks'")
    add("--activation", nargs="+", default=["relu", "gelu"], help="of ffn")
    add("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    add("--seconds", type=float, default=500.0, help="measure no further candidate after this time")
    add("--budget-ms", type=float, default=60.0, help="measuring time per candidate")
    add("--most", type=int, default=100, help="number of candidates per task, likely ones first")
    add("--only", type=int, nargs="+", help="numbers of candidates, as shown by --list")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    add("--out", type=Path, default=Path("build/tune"), help="folder of tune.jsonl")
    add("--list", action="store_true", help="print the candidates and exit")
    add("--resume", action="store_true", help="leave out what the folder has rows of, same kernels")
    add("--arch", default=None, help="architecture whose shipped row is listed; default: the GPU's")
    options = parser.parse_args(arguments)

    log = options.out / "tune.jsonl"
    if not options.list and not torch.cuda.is_available():
        why = "there is no CUDA GPU"
        print(f"nothing was tuned: {why}", file=sys.stderr)
        lines.append(log, [{"status": "refused", "message": why}])
        return lines.CANNOT_RUN
    arch = options.arch or _env.architecture("cuda" if torch.cuda.is_available() else "cpu", 0)
    tasks = [task for op in options.op for task in _tasks(op, options)]
    jobs: list[Job] = []
    for task in tasks:
        for i, config in enumerate(task.candidates(arch)[: options.most]):
            if options.only is None or i in options.only:
                jobs.append((task, config, options.budget_ms))
                if options.list:
                    print(f"{task.name:36s} {i:3d} {describe(config)}")
    if options.list:
        return 0

    device, started = torch.device("cuda"), time.monotonic()
    about = {"date": datetime.date.today().isoformat(), "gpu": _env.device_name(device)}
    about |= {"torch": torch.__version__, "applies_to": lines.applies_to(device, "triton")}
    rows: list[tuple[Task, Any, Row]] = []
    total = len(jobs)
    if options.resume:
        known = {
            json.dumps([row["task"], row["config"]]): row
            for row in lines.read(log)
            if row.get("applies_to") == about["applies_to"]
        }
        rows = [(*job[:2], known[_key(job)]) for job in jobs if _key(job) in known]
        jobs = [job for job in jobs if _key(job) not in known]
        print(f"{len(rows)} of {total} candidates were measured before")
    for (task, config, _), row in _measured(jobs, options):
        rows.append((task, config, row))
        lines.append(log, [about | {"task": asdict(task), "config": asdict(config)} | row])
        elapsed = time.monotonic() - started
        print(f"[{elapsed:4.0f} s] {_line(task, config, row)}", flush=True)
    print("\n" + _summary(tasks, rows))
    print(f"{len(rows)} of {total} candidates, {time.monotonic() - started:.0f} s, {log}")
    return 0 if any(row["status"] == "ok" for _, _, row in rows) else 1


def _measured(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[tuple[Job, Row]]:
    """The jobs that were reached, in their order, and their rows."""
    compiled: dict[int, Future[float | Lost]] = {id(job): Future() for job in jobs}

    def compile_all() -> None:
        for index, found in run_isolated(
            compile_ahead, jobs, jobs=options.jobs, seconds=options.seconds,
            limit_s=_HANGS_S,
        ):  # fmt: skip
            compiled[id(jobs[index])].set_result(found)

    def why_not_compiled(job: Job) -> str | None:
        """Waits for the compiler."""
        found = compiled[id(job)].result()
        return found.why if isinstance(found, Lost) else None

    threading.Thread(target=compile_all, daemon=True).start()
    for index, row in run_isolated(
        measure_on_gpu, jobs, jobs=1, seconds=options.seconds, limit_s=_HANGS_S,
        left_out=why_not_compiled,
    ):  # fmt: skip
        made = compiled[id(jobs[index])]
        lost = made.result() if isinstance(row, Lost) and row.left_out else row
        if isinstance(lost, Lost):
            if not lost.reached:  # there was no time
                continue
            row = {"status": "failed", "message": lost.why}
        elif not isinstance(row, Lost):
            row |= {"compile_s": round(made.result(), 2)}
        yield jobs[index], row


def _tasks(op: str, options: argparse.Namespace) -> Iterator[Task]:
    product = itertools.product
    if op == "attention":
        for direction, dtype, D, feature, S in product(
            options.direction, options.dtype, options.dim, options.feature, options.length
        ):
            shape = max(1, options.tokens // S), max(1, options.width // D), S, D
            yield Task(op, direction, dtype, shape, feature)
        return
    shapes: Sequence[tuple[int, ...]] = _FFN_SHAPES if op == "ffn" else _NORM_SHAPES
    if options.shape:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shape]
    for direction, dtype, shape in product(options.direction, options.dtype, shapes):
        if op != "ffn":
            yield Task(op, direction, dtype, shape)
        elif direction == "fwd":
            yield from (Task(op, direction, dtype, shape, a) for a in options.activation)


def _key(job: Job) -> str:
    return json.dumps([asdict(part) for part in job[:2]])


def _line(task: Task, config: Any, row: Row) -> str:
    if row["status"] != "ok":
        return f"{task.name:34s} {describe(config):42s} {row['status']}: {row['message']}"
    text = f"{task.name:34s} {describe(config):42s} {row['ms']:8.3f} ms"
    text += f" {row['rate']:6.1f} {row['unit']}"
    return text + (f" (peer {row['peer_rate']:.0f})" if "peer_rate" in row else "")


def _summary(tasks: Sequence[Task], rows: Sequence[tuple[Task, Any, Row]]) -> str:
    """For each task its three best candidates and the number that failed."""
    lines = []
    for task in tasks:
        of_task = [(config, row) for t, config, row in rows if t == task]
        good = sorted(
            ((c, r) for c, r in of_task if r["status"] == "ok"), key=lambda pair: pair[1]["ms"]
        )
        peers = [r["peer_rate"] for _, r in good if "peer_rate" in r]
        peer = f", peer {median(peers):.0f}" if peers else ""
        bad = len(of_task) - len(good)
        lines.append(f"{task.name}: {len(good)} timed, {bad} failed{peer}")
        for config, row in good[:3]:
            lines.append(
                f"    {row['rate']:6.1f} {row['unit']} {row['ms']:8.3f} ms  {describe(config)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
