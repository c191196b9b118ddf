"""`python -m benchmarks.tune`: times tilings of the Triton kernels and shows the best.

A task of attention is a direction, a feature and a head dim at one sequence length; tasks of the
norms and the feed-forward network are in tune_rows. Its candidates are compiled by several
processes into Triton's cache while one process with the GPU takes those that are ready: it compares
every result with the reference (of attention on single heads), then times it beside a peer where
there is one. A candidate that fails, crashes or hangs costs itself. One JSON object a line goes to
the output folder as results come; the table of winners is printed last.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.tune_rows import NORMS, FfnTask, NormTask, RowCase, RowTask, wrong

FEATURES = (
    "plain", "causal", "window", "lengths", "both_lengths", "mask", "bias", "dropout",
)  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Root-mean-square error against the fp32 reference, relative; four times what correct kernels show.
_TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_HANG_SECONDS = 90.0
_SEED = 1234
_NORM_SHAPES = ((32768, 512), (32768, 1024), (32768, 4096), (8192, 16384))
_FFN_SHAPES = ((16384, 1024), (8192, 4096))


@dataclass(frozen=True)
class Task:
    """direction fwd or bwd; tokens are B * S, and heads * D is `width`."""

    direction: str
    feature: str
    D: int
    S: int
    tokens: int
    width: int
    dtype: str

    unit = "TFLOP/s"

    @property
    def name(self) -> str:
        return f"{self.direction} {self.feature} D{self.D} S{self.S} {self.dtype}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return max(1, self.tokens // self.S), max(1, self.width // self.D), self.S, self.D


# -- candidates -----------------------------------------------------------------------------------

# (BLOCK_M, BLOCK_N, warps, stages, edge_stages, registers a thread or None, overlap), likely first.
_FORWARD = {
    64: (
        (128, 128, 8, 2, 2, None, 1), (128, 64, 8, 3, 2, 128, 2), (128, 64, 8, 3, 2, None, 0),
        (128, 128, 8, 2, 2, None, 2), (128, 64, 8, 3, 2, None, 1), (64, 128, 4, 2, 2, None, 1),
        (64, 128, 4, 2, 2, None, 2), (128, 64, 4, 3, 2, None, 0), (128, 128, 8, 3, 2, None, 0),
        (64, 64, 4, 3, 2, None, 2), (64, 128, 4, 2, 2, None, 0), (128, 64, 8, 2, 2, 128, 2),
        (64, 64, 4, 3, 2, None, 0), (128, 64, 4, 3, 2, None, 2), (128, 128, 8, 3, 2, None, 1),
        (128, 64, 4, 3, 2, 168, 0), (128, 128, 8, 2, 1, None, 1), (128, 64, 8, 4, 2, 128, 2),
        (128, 128, 4, 2, 2, None, 0), (128, 32, 4, 4, 2, None, 0), (256, 64, 8, 2, 2, None, 0),
    ),
    128: (
        (128, 64, 8, 3, 2, None, 1), (128, 128, 8, 2, 2, None, 2), (128, 128, 8, 2, 2, None, 0),
        (128, 64, 8, 2, 2, None, 1), (128, 128, 8, 2, 2, None, 1), (128, 64, 8, 3, 2, None, 2),
        (64, 64, 4, 2, 2, None, 1), (64, 64, 4, 2, 2, None, 2), (128, 64, 8, 3, 2, None, 0),
        (64, 64, 4, 2, 2, None, 0), (128, 32, 8, 3, 2, 128, 1), (64, 64, 4, 3, 2, None, 0),
        (64, 128, 4, 2, 2, None, 1), (128, 32, 8, 4, 2, None, 1), (128, 64, 8, 2, 2, None, 2),
        (128, 64, 8, 3, 1, None, 1), (128, 128, 8, 2, 1, None, 2), (128, 64, 4, 2, 2, None, 0),
    ),
    256: (
        (128, 64, 8, 2, 1, None, 1), (128, 64, 8, 2, 1, None, 0), (128, 64, 8, 2, 1, None, 2),
        (64, 32, 4, 2, 2, None, 1), (64, 32, 4, 2, 2, None, 0), (128, 32, 8, 3, 2, None, 1),
        (64, 64, 4, 2, 1, None, 0), (128, 32, 8, 3, 2, None, 0), (128, 32, 8, 2, 2, None, 1),
        (64, 64, 8, 2, 2, None, 0), (64, 64, 4, 2, 1, None, 1), (64, 32, 4, 3, 2, None, 0),
        (128, 64, 8, 1, 1, None, 0), (64, 64, 4, 1, 1, None, 0),
    ),
}  # fmt: skip
_SINGLE_PRECISION = (
    (64, 32, 4, 2, 1, None), (32, 32, 4, 2, 1, None), (64, 32, 8, 2, 1, None),
    (64, 64, 8, 2, 1, None), (32, 16, 4, 1, 1, None), (128, 32, 8, 2, 1, None),
)  # fmt: skip


def candidates(task: Task | RowTask, arch: str) -> list[Any]:
    """Configs to try, the shipped one first."""
    if not isinstance(task, Task):
        return list(dict.fromkeys(task.candidates(arch)))
    found = _backward(task, arch) if task.direction == "bwd" else _forward(task, arch)
    return list(dict.fromkeys(found))


def _backward(task: Task, arch: str) -> list[Any]:
    from fastattn.ops.attention import config_bwd

    banded, dense = _features(task)
    edges = banded or "lengths" in task.feature
    dtype, D = DTYPES[task.dtype], task.D
    shipped = config_bwd.bwd_config(arch, dtype, D, D, edges, dense)
    return [shipped, *config_bwd.candidates(arch, dtype, D, D, edges, dense)]


def _forward(task: Task, arch: str) -> list[Any]:
    from fastattn.ops.attention.config import Features, ForwardConfig, forward_config

    dtype = DTYPES[task.dtype]
    banded, dense = _features(task)
    features = Features(banded, "lengths" in task.feature, dense, task.feature == "dropout")
    shipped = forward_config(arch, dtype, task.D, task.D, task.S, features)
    if dtype is torch.float32:
        return [shipped] + [
            ForwardConfig(*row[:5], tma=False, maxnreg=row[5], precision=precision)
            for row, precision in itertools.product(_SINGLE_PRECISION, ("tf32x3", "ieee"))
        ]
    width = 64 if task.D <= 64 else 128 if task.D <= 128 else 256
    rows = [
        ForwardConfig(*row[:5], tma=shipped.tma, maxnreg=row[5], overlap=row[6])
        for row in _FORWARD[width]
    ]
    # A list in the way of a load costs it a stage.
    rows = [replace(row, stages=row.stages + 1) for row in rows] if dense else rows
    if shipped.tma:
        rows.insert(6, replace(rows[2], tma=False))
    if shipped.widths(task.D)[1] > 0:  # two tiles a head dim: or one, padded
        rows[1:1] = [replace(row, whole=True) for row in rows[:4]]
    return [shipped, *rows]


def _features(task: Task) -> tuple[bool, bool]:
    """(banded, dense)."""
    return task.feature in ("causal", "window"), task.feature in ("mask", "bias")


def describe(config: Any) -> str:
    """What differs from the class's defaults, short."""
    if not hasattr(config, "BLOCK_M") and not _has_tiles(config):
        return " ".join(f"{f.name}={_short(getattr(config, f.name))}" for f in fields(config))
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
    """Whether some field is a tile of attention's backward."""
    return any(hasattr(getattr(config, field.name), "block_m") for field in fields(config))


def _short(value: Any) -> str:
    """A number as it is; a product of the feed-forward network by its tile."""
    if not hasattr(value, "tile"):
        return str(value)
    if value.tile is None:
        return "library"
    tile = value.tile
    options = [f"{f.name}={getattr(tile, f.name)}" for f in fields(tile)[3:]
               if getattr(tile, f.name) != f.default]  # fmt: skip
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}[{' '.join(options)}]"


# -- inputs ---------------------------------------------------------------------------------------


@dataclass
class Case:
    """A task's tensors: arguments of attention_fwd, its results, and for backward what follows.

    work: FLOPs. first: the first of the results that a launch writes.
    """

    args: tuple[Any, ...]
    results: tuple[Tensor, ...]
    work: float
    first: int = 0


def make(task: Task | RowTask, device: str) -> Case | RowCase:
    if not isinstance(task, Task):
        return task.make(device)
    B, H, S, D = task.shape
    dtype = DTYPES[task.dtype]
    generator = None if device == "meta" else torch.Generator(device).manual_seed(_SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    q, k, v = normal(B, H, S, D), normal(B, H, S, D), normal(B, H, S, D)
    mask = key_lengths = query_lengths = seed = None
    causal, left, p, pairs = 0, -1, 0.0, float(B * S * S)
    if task.feature == "causal":
        causal, pairs = 2, B * S * S / 2
    elif task.feature == "window":
        causal, left = 2, S // 8
        pairs = float(B * (S * (left + 1) - left * (left + 1) / 2))
    elif "lengths" in task.feature:
        spread = [S // 4 + (3 * S // 4) * b // max(1, B - 1) for b in range(B)]
        key_lengths = torch.tensor(spread, dtype=torch.int32, device=device)
        pairs = float(S * sum(spread))
        if task.feature == "both_lengths":
            query_lengths, pairs = key_lengths.clone(), float(sum(n * n for n in spread))
    elif task.feature == "mask":
        mask = torch.rand(1, 1, S, S, device=device, generator=generator) > 0.1
    elif task.feature == "bias":
        mask = normal(1, H, S, S)
    elif task.feature == "dropout":
        p, seed = 0.1, torch.tensor([_SEED], device=device)
    args = (
        q, k, v, mask, None, key_lengths, query_lengths, causal, left, -1, D**-0.5, p, seed, 3,
    )  # fmt: skip
    out, lse = torch.empty_like(q), torch.empty(B, H, S, dtype=torch.float32, device=device)
    results: tuple[Tensor, ...] = (out, lse)
    if task.direction == "bwd":
        dout = normal(B, H, S, D)
        results = (out, lse, dout, *(torch.empty_like(x) for x in (q, k, v)), q.new_empty(0))
    forward = task.direction == "fwd"
    return Case(args, results, (4 if forward else 10) * H * D * pairs, 0 if forward else 3)


def launch(task: Task | RowTask, config: Any, case: Case | RowCase) -> None:
    if not isinstance(task, Task):
        assert isinstance(case, RowCase)
        task.launch(config, case)
        return
    if task.direction == "fwd":
        from fastattn.ops.attention.triton import attention_fwd_with_config

        attention_fwd_with_config(config, *case.args, *case.results)
        return
    from fastattn.ops.attention.triton_bwd import attention_bwd_with_config

    out, lse, dout, *gradients = case.results
    a, needs = case.args, [True, True, True, False]
    attention_bwd_with_config(config, dout, None, *a[:7], out, lse, *a[7:], needs, *gradients)


Job = tuple[int, Task | RowTask, Any]


# -- compiling ahead ------------------------------------------------------------------------------


@contextlib.contextmanager
def collect_kernels(compile_only: bool = False) -> Iterator[list[Any]]:
    """The compiled kernels launched inside; with compile_only Triton caches them and runs none."""
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
    """Tells (number, error or None, seconds) of each job."""
    for number, task, config in jobs:
        start = time.monotonic()
        error = None
        try:
            with collect_kernels(compile_only=True):
                launch(task, config, make(task, "meta"))
        except Exception as caught:
            error = _first_line(caught)
        pipe.send((number, error, time.monotonic() - start))
    pipe.close()


class Compiler:
    """Processes that compile jobs in order. A job that kills its process is blamed for it."""

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
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_compile_worker, args=(theirs, jobs), daemon=True)
        process.start()
        theirs.close()
        self.pending[ours], self.processes[ours] = jobs, process

    def collect(self, seconds: float) -> None:
        """Takes in what has finished, waiting for at most so long."""
        if not self.pending:
            return
        for pipe in wait(list(self.pending), timeout=seconds):
            assert isinstance(pipe, Connection)
            try:
                number, error, taken = pipe.recv()
            except EOFError:
                jobs = self.pending.pop(pipe)
                self.processes.pop(pipe).join()
                if jobs:  # it died on the first of them
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
    """Median of single launches in a full queue."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    call()
    events[0].record()
    call()
    events[1].record()
    torch.cuda.synchronize()
    once = max(events[0].elapsed_time(events[1]), 1e-3)
    count = int(min(200, max(5, budget_ms / once)))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(2_000_000)  # the host gets ahead
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def _head(args: tuple[Any, ...], b: int, h: int) -> tuple[Any, ...]:
    """The arguments of one head, in fp32."""
    q, k, v, mask, _, key_lengths, query_lengths, *rest = args
    data = [x[b : b + 1, h : h + 1].float() for x in (q, k, v)]
    if mask is not None:
        mask = mask[:, min(h, mask.shape[1] - 1)][:, None]
    lengths = [None if x is None else x[b : b + 1] for x in (key_lengths, query_lengths)]
    return (*data, mask, None, *lengths, *rest)


def _wrong(task: Task | RowTask, case: Case | RowCase) -> tuple[float, str | None]:
    """(largest relative error, what is wrong), of attention of the first head and the last."""
    if not isinstance(task, Task):
        assert isinstance(case, RowCase)
        return wrong(case, task.expected(case), _TOLERANCE[DTYPES[task.dtype]])
    from fastattn.ops.attention import reference

    B, H, _, _ = task.shape
    # The bits of dropout belong to a batch and head; the reference counts its heads from 0.
    heads = {(0, 0)} if task.feature == "dropout" else {(0, 0), (B - 1, H - 1)}
    worst = 0.0
    for b, h in sorted(heads):
        args = _head(case.args, b, h)
        one = (slice(b, b + 1), slice(h, h + 1))
        got: Sequence[Tensor]
        expected: Sequence[Tensor | None]
        if task.direction == "fwd":
            got, expected = case.results, reference.attention_fwd(*args)
            names: tuple[str, ...] = ("out", "lse")
        else:
            out, lse, dout, *got = case.results
            backward: tuple[Any, ...] = (
                dout[one].float(), None, *args[:7], out[one].float(), lse[one], *args[7:],
                [True, True, True, False],
            )  # fmt: skip
            expected = reference.attention_bwd(*backward)
            names = ("dq", "dk", "dv")
        for name, x, y in zip(names, got, expected, strict=False):
            assert y is not None
            finite = y.isfinite()
            if not torch.equal(x[one].isfinite(), finite):
                return float("inf"), f"{name}: non-finite values differ"
            difference = torch.where(finite, x[one].float() - y, 0)
            error = float(difference.norm() / torch.where(finite, y, 0).norm().clamp_min(1e-20))
            worst = max(worst, error)
            if not error <= _TOLERANCE[DTYPES[task.dtype]]:
                return worst, f"{name}: relative error {error:.2g}"
    return worst, None


def _peer(task: Task | RowTask, case: Case | RowCase) -> Any | None:
    """A call that computes the same by cuDNN's attention or torch's operator, or None."""
    if not isinstance(task, Task):
        assert isinstance(case, RowCase)
        return task.peer(case)
    if task.feature not in ("plain", "causal", "dropout") or task.dtype == "fp32":
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.detach().requires_grad_(task.direction == "bwd") for x in case.args[:3])
    options = {"dropout_p": case.args[11], "is_causal": task.feature == "causal"}

    def forward() -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    if task.direction == "fwd":
        return forward
    out = forward()
    dout = case.results[2]
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def _forward_results(case: Case | RowCase) -> None:
    """Backward starts from a forward, in the shipped tiling."""
    from fastattn.ops.attention import triton

    spaces = [
        torch.empty(shape, dtype=dtype, device=case.results[0].device)
        for shape, dtype, _ in triton.attention_fwd_workspace(*case.args)
    ]
    triton.attention_fwd(*case.args, *case.results[:2], *spaces)


def _gpu_worker(pipe: Connection) -> None:
    """Answers (task, config, budget_ms) with what it measured, until it is told None."""
    current: Task | RowTask | None = None
    case, peer = None, None
    pipe.send({"gpu": torch.cuda.get_device_name()})
    while (job := pipe.recv()) is not None:
        task, config, budget_ms = job
        row: dict[str, Any] = {}
        try:
            if task != current:
                case = peer = None
                torch.cuda.empty_cache()
                case = make(task, "cuda")
                if isinstance(task, Task) and task.direction == "bwd":
                    _forward_results(case)
                current = task
                with contextlib.suppress(Exception):
                    peer = _peer(task, case)
            assert case is not None
            measure(task, config, case, peer, budget_ms, row)
        except Exception as caught:
            row |= {"status": "failed", "message": _first_line(caught)}
            row["trace"] = traceback.format_exc(limit=-3)
        pipe.send(row)


def measure(
    task: Task | RowTask,
    config: Any,
    case: Case | RowCase,
    peer: Any,
    budget_ms: float,
    row: dict[str, Any],
) -> None:
    """Fills the row of one candidate: correct first, then timed."""
    for x in case.results[case.first :]:
        x.fill_(float("nan"))
    start = time.monotonic()
    with collect_kernels() as kernels:
        launch(task, config, case)
    _synchronize(case)
    row["first_s"] = round(time.monotonic() - start, 2)
    row["registers"] = [getattr(kernel, "n_regs", None) for kernel in kernels]
    row["spills"] = [getattr(kernel, "n_spills", None) for kernel in kernels]
    row["shared"] = [kernel.metadata.shared for kernel in kernels if kernel is not None]
    with torch.no_grad():
        row["error"], wrong = _wrong(task, case)
    if wrong:
        row |= {"status": "wrong", "message": wrong}
        return
    ms = _milliseconds(lambda: launch(task, config, case), budget_ms)
    scale = 1e9 if task.unit == "TFLOP/s" else 1e6
    row |= {"status": "ok", "ms": ms, "rate": case.work / ms / scale, "unit": task.unit}
    if peer is not None:
        with contextlib.suppress(Exception):
            row["peer_rate"] = case.work / _milliseconds(peer, budget_ms) / scale


def _synchronize(case: Case | RowCase) -> None:
    if case.results[0].is_cuda:
        torch.cuda.synchronize()


class Gpu:
    """The process with the GPU, replaced when it dies or hangs."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.name = ""
        self._start()

    def _start(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=_gpu_worker, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.name = self._receive(_HANG_SECONDS).get("gpu", self.name)

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            message = f"silent for {seconds:.0f} s"
        except (EOFError, OSError):
            message = "the process died"
        self.process.kill()
        self.process.join()
        return {"status": "failed", "message": message}

    def measure(self, task: Task | RowTask, config: Any, budget_ms: float) -> dict[str, Any]:
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
    add("--direction", nargs="+", choices=("fwd", "bwd"), default=["fwd"])
    add("--feature", nargs="+", choices=FEATURES, default=["plain", "causal"])
    add("--dim", nargs="+", type=int, default=[64, 128, 256], help="head dims")
    add("--length", nargs="+", type=int, default=[8192], help="queries and keys of a sequence")
    add("--tokens", type=int, default=16384, help="sequences * length")
    add("--width", type=int, default=2048, help="heads * head dim")
    add("--shape", nargs="+", metavar="ROWSxN", help="of norms and ffn; default: the benchmarks'")
    add("--activation", nargs="+", default=["relu", "gelu"], help="of ffn")
    add("--dtype", nargs="+", choices=DTYPES, default=["bf16"])
    add("--seconds", type=float, default=500.0, help="measure no further candidate after this time")
    add("--budget-ms", type=float, default=60.0, help="measuring time of a candidate")
    add("--most", type=int, default=100, help="candidates of a task, the likely ones")
    add("--only", type=int, nargs="+", help="numbers of candidates, as --list shows them")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    add("--out", type=Path, default=Path("build/tune"), help="folder of tune.jsonl")
    add("--list", action="store_true", help="print the candidates and stop")
    add("--arch", default=None, help="architecture whose shipped row is listed; default: the GPU's")
    options = parser.parse_args(arguments)

    from fastattn.ops import _env

    started = time.monotonic()
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

    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "tune.jsonl"
    rows: list[tuple[Task | RowTask, Any, dict[str, Any]]] = []
    compiler, gpu = Compiler(jobs, options.jobs), Gpu()
    try:
        # Task by task, so that a task's tensors are made once, but never idle: what is compiled.
        open_jobs = list(jobs)
        while open_jobs and time.monotonic() - started < options.seconds:
            ready = [job for job in open_jobs if job[0] in compiler.done]
            if not ready:
                compiler.collect(0.2)
                if not compiler.pending:
                    ready = open_jobs[:1]
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
            row |= {"compile_s": round(seconds, 2)}
            rows.append((task, config, row))
            _record(log, task, config, row, gpu.name)
            elapsed = time.monotonic() - started
            print(f"[{elapsed:4.0f} s] {_line(task, config, row)}", flush=True)
    finally:
        compiler.stop()
        gpu.stop()
    print("\n" + _summary(tasks, rows))
    print(f"{len(rows)} of {len(jobs)} candidates, {time.monotonic() - started:.0f} s, {log}")
    return 0 if any(row["status"] == "ok" for _, _, row in rows) else 1


def _tasks(op: str, options: argparse.Namespace) -> Iterator[Task | RowTask]:
    product = itertools.product
    if op == "attention":
        for direction, dtype, D, feature, S in product(
            options.direction, options.dtype, options.dim, options.feature, options.length
        ):
            yield Task(direction, feature, D, S, max(options.tokens, S), options.width, dtype)
        return
    shapes: Sequence[Sequence[int]] = _FFN_SHAPES if op == "ffn" else _NORM_SHAPES
    if options.shape:
        shapes = [[int(size) for size in shape.split("x")] for shape in options.shape]
    for direction, dtype, (rows, N) in product(options.direction, options.dtype, shapes):
        if op == "ffn":
            for activation in options.activation:
                yield FfnTask(direction, rows, N, activation, dtype)
        else:
            yield NormTask(direction, op, rows, N, dtype)


def _record(log: Path, task: Task | RowTask, config: Any, row: dict[str, Any], gpu: str) -> None:
    what: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "torch": torch.__version__,
    }
    what |= {"task": asdict(task), "config": asdict(config)}
    with open(log, "a") as file:
        file.write(json.dumps(what | row) + "\n")


def _line(task: Task | RowTask, config: Any, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"{task.name:34s} {describe(config):42s} {row['status']}: {row['message']}"
    text = f"{task.name:34s} {describe(config):42s} {row['ms']:8.3f} ms"
    text += f" {row['rate']:6.1f} {row['unit']}"
    return text + (f" (peer {row['peer_rate']:.0f})" if "peer_rate" in row else "")


def _summary(
    tasks: Sequence[Task | RowTask], rows: Sequence[tuple[Task | RowTask, Any, dict[str, Any]]]
) -> str:
    """For each task its three best, then how many failed."""
    lines = []
    for task in tasks:
        mine = [(config, row) for t, config, row in rows if t == task]
        good = sorted(
            ((c, r) for c, r in mine if r["status"] == "ok"), key=lambda pair: pair[1]["ms"]
        )
        peers = [r["peer_rate"] for _, r in good if "peer_rate" in r]
        peer = f", peer {median(peers):.0f}" if peers else ""
        bad = len(mine) - len(good)
        lines.append(f"{task.name}: {len(good)} timed, {bad} failed{peer}")
        for config, row in good[:3]:
            lines.append(
                f"    {row['rate']:6.1f} {row['unit']} {row['ms']:8.3f} ms  {describe(config)}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
