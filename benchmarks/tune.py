"""`python -m benchmarks.tune`: times tilings of the Triton kernels and shows the best.

The tasks are in tune_attention and tune_rows. A task's candidates are compiled by several processes
into Triton's cache, while one process with the GPU measures those that are ready: it compares every
result with the reference, then times it, next to a peer if there is one. A candidate that fails,
crashes or hangs does not affect the others. Results are appended to the output folder, one JSON
object per line; the table of winners is printed last.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.tune_attention import FEATURES, AttentionTask
from benchmarks.tune_rows import NORMS, FfnTask, NormTask
from benchmarks.tune_task import DTYPES, Case, Task
from fastattn.testing import lines

_HANG_SECONDS = 90.0
_NORM_SHAPES = ((32768, 512), (32768, 1024), (32768, 4096), (8192, 16384))
_FFN_SHAPES = ((16384, 1024), (8192, 4096))


# -- candidates -----------------------------------------------------------------------------------


def candidates(task: Task, arch: str) -> list[Any]:
    """Configs to try, each once, the shipped one first."""
    return list(dict.fromkeys(task.candidates(arch)))


def describe(config: Any) -> str:
    """The fields that differ from the class's defaults, in short form."""
    if hasattr(config, "tile"):
        return _first_product(config.tile)
    if not hasattr(config, "BLOCK_M") and not _has_tiles(config):
        return " ".join(f"{f.name}={getattr(config, f.name)}" for f in fields(config))
    if not hasattr(config, "BLOCK_M"):
        parts = []
        for field in fields(config):
            value = getattr(config, field.name)
            if hasattr(value, "block_m"):
                options = [f"s{value.stages}"] + [
                    f"{f.name}={getattr(value, f.name)}"
                    for f in fields(value)
                    if f.name not in ("block_m", "block_n", "warps", "stages")
                    and getattr(value, f.name) != f.default
                ]
                tile = f"{value.block_m}x{value.block_n} w{value.warps} {' '.join(options)}"
                parts.append(f"{field.name}[{tile}]")
            elif value != field.default:
                parts.append(f"{field.name}={value}")
        return " ".join(parts)
    text = f"{config.BLOCK_M}x{config.BLOCK_N} w{config.warps} s{config.stages}"
    text += f" e{config.edge_stages}" + (" tma" if config.tma else "")
    text += f" o{config.overlap}" if config.overlap else ""
    text += " whole" if config.whole else ""
    text += f" r{config.maxnreg}" if config.maxnreg else ""
    return text + (f" {config.precision}" if config.precision != "ieee" else "")


def _has_tiles(config: Any) -> bool:
    """Whether some field is a tile of the attention backward."""
    return any(hasattr(getattr(config, field.name), "block_m") for field in fields(config))


def _first_product(tile: Any) -> str:
    """Name of ffn's first product. tile: of the Triton kernel, None for PyTorch's product."""
    if tile is None:
        return "PyTorch's product"
    options = [f"{f.name}={getattr(tile, f.name)}" for f in fields(tile)[3:]
               if getattr(tile, f.name) != f.default]  # fmt: skip
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}[{' '.join(options)}]"


Job = tuple[int, Task, Any]


# -- compiling ahead ------------------------------------------------------------------------------


@contextlib.contextmanager
def collect_kernels(compile_only: bool = False) -> Iterator[list[Any]]:
    """The kernels launched inside; with compile_only Triton compiles and caches without running."""
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []
    run = JITFunction.run

    def collect(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=warmup or compile_only, **options)
        kernels.append(kernel)
        return kernel

    JITFunction.run = collect  # type: ignore[method-assign]
    try:
        yield kernels
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def _compile_worker(pipe: Connection, jobs: Sequence[Job]) -> None:
    """Sends (number, error or None, seconds) for each job."""
    for number, task, config in jobs:
        start = time.monotonic()
        error = None
        try:
            with collect_kernels(compile_only=True):
                task.launch(config, task.make("meta"))
        except Exception as caught:
            error = _first_line(caught)
        pipe.send((number, error, time.monotonic() - start))
    pipe.close()


class Compiler:
    """Processes that compile jobs in order. A job that kills its process is marked as failed."""

    def __init__(self, jobs: Sequence[Job], workers: int):
        self.context = multiprocessing.get_context("spawn")
        self.pending: dict[Connection, list[Job]] = {}
        self.processes: dict[Connection, Any] = {}
        self.done: dict[int, tuple[str | None, float]] = {}
        for i in range(workers):
            self._start(list(jobs[i::workers]))

    def _start(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_compile_worker, args=(sender, jobs), daemon=True)
        process.start()
        sender.close()
        self.pending[receiver], self.processes[receiver] = jobs, process

    def collect(self, seconds: float) -> None:
        """Receives finished jobs, waiting for at most `seconds`."""
        if not self.pending:
            return
        for pipe in wait(list(self.pending), timeout=seconds):
            assert isinstance(pipe, Connection)
            try:
                number, error, taken = pipe.recv()
            except EOFError:
                jobs = self.pending.pop(pipe)
                self.processes.pop(pipe).join()
                if jobs:  # the process died on the first of them
                    self.done[jobs[0][0]] = ("the compiler crashed", 0.0)
                    self._start(jobs[1:])
                continue
            self.done[number] = (error, taken)
            self.pending[pipe] = [job for job in self.pending[pipe] if job[0] != number]

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()


# -- measuring ------------------------------------------------------------------------------------


def _first_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text.splitlines()[0][:200]


def _milliseconds(call: Any, budget_ms: float) -> float:
    """Median time of single launches with a full queue."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    call()
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    once = max(events[0].elapsed_time(events[1]), 1e-3)
    count = int(min(200, max(5, budget_ms / once)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(2_000_000)  # lets the host fill the queue
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def _gpu_worker(pipe: Connection) -> None:
    """Measures each (task, config, budget_ms) that it receives, until it receives None."""
    current: Task | None = None
    case, peer = None, None
    pipe.send({"gpu": torch.cuda.get_device_name()})
    while (job := pipe.recv()) is not None:
        task, config, budget_ms = job
        row: dict[str, Any] = {}
        try:
            if task != current:
                case = peer = None
                torch.cuda.empty_cache()
                case = task.make("cuda")
                task.prepare(case)
                current = task
                with contextlib.suppress(Exception):  # a peer that fails is left out
                    peer = task.peer(case)
            assert case is not None
            measure(task, config, case, peer, budget_ms, row)
        except Exception as caught:
            row |= {"status": "failed", "message": _first_line(caught)}
            row["trace"] = traceback.format_exc(limit=-3)
        pipe.send(row)


def measure(
    task: Task,
    config: Any,
    case: Case,
    peer: Any,
    budget_ms: float,
    row: dict[str, Any],
) -> None:
    """Fills the row of one candidate: checked first, then timed."""
    for x in case.results[case.first :]:
        x.fill_(float("nan"))
    start = time.monotonic()
    with collect_kernels() as kernels:
        task.launch(config, case)
    _synchronize(case)
    row["first_s"] = round(time.monotonic() - start, 2)
    row["registers"] = [getattr(kernel, "n_regs", None) for kernel in kernels]
    row["spills"] = [getattr(kernel, "n_spills", None) for kernel in kernels]
    row["shared"] = [kernel.metadata.shared for kernel in kernels if kernel is not None]
    with torch.no_grad():
        row["error"], wrong = task.wrong(case)
    if wrong:
        row |= {"status": "wrong", "message": wrong}
        return
    ms = _milliseconds(lambda: task.launch(config, case), budget_ms)
    scale = 1e9 if task.unit == "TFLOP/s" else 1e6
    row |= {"status": "ok", "ms": ms, "rate": case.work / ms / scale, "unit": task.unit}
    if peer is not None:
        with contextlib.suppress(Exception):
            row["peer_rate"] = case.work / _milliseconds(peer, budget_ms) / scale


def _synchronize(case: Case) -> None:
    if case.results[0].is_cuda:
        torch.cuda.synchronize()


class Gpu:
    """The process with the GPU, restarted when it dies or hangs."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.name = ""
        self._start()

    def _start(self) -> None:
        self.pipe, child = self.context.Pipe()
        self.process = self.context.Process(target=_gpu_worker, args=(child,), daemon=True)
        self.process.start()
        child.close()
        self.name = self._receive(_HANG_SECONDS).get("gpu", self.name)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            message = f"no result for {seconds:.0f} s"
        except (EOFError, OSError):
            message = "the process died"
        self.process.kill()
        self.process.join()
        return {"status": "failed", "message": message}

    def measure(self, task: Task, config: Any, budget_ms: float) -> dict[str, Any]:
        if not self.process.is_alive():
            self._start()
        try:
            self.pipe.send((task, config, budget_ms))
        except OSError:
            return {"status": "failed", "message": "the process died"}
        return self._receive(_HANG_SECONDS)

    def stop(self) -> None:
        self.process.kill()


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

    from fastattn.ops import _env

    started = time.monotonic()
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
        for i, config in enumerate(candidates(task, arch)[: options.most]):
            if options.only is None or i in options.only:
                jobs.append((len(jobs), task, config))
                if options.list:
                    print(f"{task.name:36s} {i:3d} {describe(config)}")
    if options.list:
        return 0

    rows: list[tuple[Task, Any, dict[str, Any]]] = []
    kernels = lines.applies_to(torch.device("cuda"), "triton")
    if options.resume:
        rows = _measured(log, kernels, jobs)
        print(f"{len(rows)} of {len(jobs)} candidates were measured before")
        finished = {_key(task, config) for task, config, _ in rows}
        jobs = [job for job in jobs if _key(job[1], job[2]) not in finished]
    total = len(rows) + len(jobs)
    compiler, gpu = Compiler(jobs, options.jobs), Gpu()
    try:
        # Task by task, to allocate a task's tensors once, but in the order of compilation.
        open_jobs = list(jobs)
        while open_jobs and time.monotonic() - started < options.seconds:
            ready = [job for job in open_jobs if job[0] in compiler.done]
            if not ready:
                compiler.collect(0.2)
                continue
            compiler.collect(0.0)
            last = rows[-1][0] if rows else None
            number, task, config = next((job for job in ready if job[1] == last), ready[0])
            open_jobs = [job for job in open_jobs if job[0] != number]
            error, seconds = compiler.done[number]
            if error is None:
                row = gpu.measure(task, config, options.budget_ms)
            else:
                row = {"status": "failed", "message": error}
            row |= {"compile_s": round(seconds, 2), "applies_to": kernels}
            rows.append((task, config, row))
            _record(log, task, config, row, gpu.name)
            elapsed = time.monotonic() - started
            print(f"[{elapsed:4.0f} s] {_line(task, config, row)}", flush=True)
    finally:
        compiler.stop()
        gpu.stop()
    print("\n" + _summary(tasks, rows))
    print(f"{len(rows)} of {total} candidates, {time.monotonic() - started:.0f} s, {log}")
    return 0 if any(row["status"] == "ok" for _, _, row in rows) else 1


def _tasks(op: str, options: argparse.Namespace) -> Iterator[Task]:
    product = itertools.product
    if op == "attention":
        for direction, dtype, D, feature, S in product(
            options.direction, options.dtype, options.dim, options.feature, options.length
        ):
            yield AttentionTask(
                direction, feature, D, S, max(options.tokens, S), options.width, dtype
            )
        return
    shapes: Sequence[Sequence[int]] = _FFN_SHAPES if op == "ffn" else _NORM_SHAPES
    if options.shape:
        shapes = [[int(size) for size in shape.split("x")] for shape in options.shape]
    for direction, dtype, (rows, N) in product(options.direction, options.dtype, shapes):
        if op == "ffn":
            for activation in options.activation if direction == "fwd" else ():
                yield FfnTask(rows, N, activation, dtype)
        else:
            yield NormTask(direction, op, rows, N, dtype)


def _key(task: Task, config: Any) -> str:
    return json.dumps([asdict(task), asdict(config)])  # type: ignore[call-overload]


def _measured(
    log: Path, kernels: str, jobs: Sequence[Job]
) -> list[tuple[Task, Any, dict[str, Any]]]:
    """The candidates of which a log has rows of the same kernels."""
    known = {
        json.dumps([row["task"], row["config"]]): row
        for row in lines.read(log)
        if row.get("applies_to") == kernels
    }
    return [
        (task, config, known[_key(task, config)])
        for _, task, config in jobs
        if _key(task, config) in known
    ]


def _record(log: Path, task: Task, config: Any, row: dict[str, Any], gpu: str) -> None:
    what: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "torch": torch.__version__,
    }
    what |= {"task": asdict(task), "config": asdict(config)}
    lines.append(log, [what | row])


def _line(task: Task, config: Any, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{task.name:34s} {describe(config):42s} {row['status']}: {row['message']}"
    text = f"{task.name:34s} {describe(config):42s} {row['ms']:8.3f} ms"
    text += f" {row['rate']:6.1f} {row['unit']}"
    return text + (f" (peer {row['peer_rate']:.0f})" if "peer_rate" in row else "")


def _summary(tasks: Sequence[Task], rows: Sequence[tuple[Task, Any, dict[str, Any]]]) -> str:
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
