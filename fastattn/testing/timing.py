"""The timing core: candidates side by side, round by round, in rounds long enough for the clock.

A candidate is a sequence of calls, one per copy of its inputs. A round runs them in turn until it
is long against the clock's resolution; candidates take turns, A B A B, so that a drift of the
machine meets all of them. On a GPU a round is one replay of a CUDA graph, behind a short wait that
hides the replay's own launch; on a CPU it is a loop under `perf_counter`. Nothing here changes a
setting of the machine. `time_side_by_side` is the way in; `ceilings` measures what the machine
could do.
"""

import contextlib
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
# A CUDA event is good to about a microsecond and a graph's first node to a few: 0.5 % of 1 ms.
MIN_ROUND_MS = {"cuda": 4.0, "cpu": 10.0}
# Longer than the host needs to launch a graph, so that the clock starts on a full queue.
_QUEUE_CYCLES = 800_000
_MOST_LAUNCHES = 4000
_MOST_COPIES = 256


@dataclass(frozen=True)
class Timing:
    """seconds: per launch, for each round. clock: graph, stream or wall; note: why no graph."""

    seconds: tuple[float, ...]
    launches: int
    clock: str
    note: str = ""

    def quantile(self, share: float) -> float:
        """Seconds that `share` of the rounds stay below, interpolated."""
        ordered = sorted(self.seconds)
        at = share * (len(ordered) - 1)
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    round_ms: at least so long is a round. rounds: at most so many. budget_ms: what all rounds of
    all candidates may take; slow candidates get fewer rounds, never under min_rounds. graph:
    capture CUDA graphs.
    """

    round_ms: float | None = None
    rounds: int = 25
    min_rounds: int = 5
    budget_ms: float = 1500.0
    graph: bool = True


class DeviceLost(RuntimeError):
    """A candidate broke the device for this process: nothing after it can be believed."""

    def __init__(self, candidate: str, error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.candidate = candidate


class _Program(Protocol):
    """One candidate, ready: `round` returns the seconds of all its launches."""

    launches: int
    clock: str
    note: str

    def round(self) -> float: ...


class _WallProgram:
    clock, note = "wall", ""

    def __init__(self, calls: Sequence[Call], round_s: float):
        self.calls = calls
        for call in calls:
            call()
        self.launches = len(calls)
        _grow(self, round_s)

    def round(self) -> float:
        count, calls = len(self.calls), self.calls
        start = time.perf_counter()
        for i in range(self.launches):
            calls[i % count]()
        return time.perf_counter() - start


class _CudaProgram:
    def __init__(self, calls: Sequence[Call], round_s: float, graph: bool):
        self.calls = calls
        self.note = ""
        self.graph: torch.cuda.CUDAGraph | None = None  # None launches from the host
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        for _ in range(2):  # compilation, then what only a second call settles
            for call in calls:
                call()
        self.launches = len(calls)
        torch.cuda.synchronize()
        _grow(self, round_s)
        self.graph = self._capture() if graph else None
        if self.graph is not None and (taken := self.round()) < 0.7 * round_s:
            # The host had been slower than the GPU, so that fewer launches seemed enough.
            self.launches = _enough_launches(taken / self.launches, round_s, len(calls))
            self.graph = self._capture()
        self.clock = "stream" if self.graph is None else "graph"

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._launch()
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            torch.cuda.synchronize()  # raises where the device is lost
            message = " ".join(str(error).split())[:200]
            self.note = f"not captured: {type(error).__name__}: {message}"
            return None
        return graph

    def _launch(self) -> None:
        count, calls = len(self.calls), self.calls
        for i in range(self.launches):
            calls[i % count]()

    def round(self) -> float:
        torch.cuda._sleep(_QUEUE_CYCLES)
        self.start.record()
        if self.graph is None:
            self._launch()
        else:
            self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


def _grow(program: _Program, round_s: float) -> None:
    """Raises the launches, a copy's worth of them at first, until a round is long enough."""
    copies = program.launches
    while True:
        taken = program.round()
        wanted = _enough_launches(taken / program.launches, round_s, copies)
        if wanted <= program.launches:
            return
        # The first rounds are short and so badly timed: no step of more than a factor of 16.
        program.launches = min(wanted, 16 * program.launches)


def _enough_launches(one: float, round_s: float, copies: int) -> int:
    """Launches a round: long enough for the clock, every copy equally often."""
    wanted = min(_MOST_LAUNCHES, math.ceil(round_s / max(one, 1e-9)))
    return copies * math.ceil(wanted / copies)


def time_side_by_side(
    candidates: Mapping[str, Sequence[Call]],
    device: torch.device,
    plan: Plan | None = None,
    *,
    announce: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing | Exception]:
    """Times every candidate; one that raises gets its exception, the others go on.

    candidates: name -> calls, one per copy of the inputs. announce: told a candidate's name before
    each of its turns, so that a watcher knows whom to blame. Raises DeviceLost when a candidate
    leaves the GPU unusable. Backward calls on a GPU must have had their forward in `side_stream`.
    """
    plan = plan or Plan()
    round_s = (plan.round_ms or MIN_ROUND_MS[device.type]) / 1e3
    programs: dict[str, _Program] = {}
    results: dict[str, Timing | Exception] = {}
    seconds: dict[str, list[float]] = {}
    with side_stream(device):
        for name, calls in candidates.items():
            announce(name)
            try:
                programs[name] = (
                    _CudaProgram(calls, round_s, plan.graph)
                    if device.type == "cuda"
                    else _WallProgram(calls, round_s)
                )
            except Exception as error:
                check_device(device, name, error)
                results[name] = error
        rounds = plan.rounds
        for turn in range(1 + plan.rounds):
            if turn > rounds:
                break
            for name, program in list(programs.items()):
                announce(name)
                try:
                    taken = program.round()
                except Exception as error:
                    check_device(device, name, error)
                    results[name] = error
                    del programs[name]
                    continue
                seconds.setdefault(name, []).append(taken)
            if turn == 0:  # a warm-up that also says what a round costs
                total = sum(s[0] for s in seconds.values())
                fit = int(plan.budget_ms / 1e3 / max(total, 1e-9))
                rounds = min(plan.rounds, max(plan.min_rounds, fit))
                seconds = {}
    for name, program in programs.items():
        per_launch = tuple(s / program.launches for s in seconds[name])
        results[name] = Timing(per_launch, program.launches, program.clock, program.note)
    return {name: results[name] for name in candidates}


def check_device(device: torch.device, candidate: str, error: Exception) -> None:
    """After `candidate` raised `error`: raises DeviceLost if the device no longer works in this
    process.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception:
        raise DeviceLost(candidate, error) from error


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A stream that can be captured: the current one, unless that is the default stream."""
    if device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def copies_beyond_cache(footprint: int, cache: int, free: int) -> int:
    """Copies of inputs and outputs of `footprint` bytes that must rotate to leave none in `cache`.

    free: bytes of memory at hand, of which the copies take an eighth at most.
    """
    wanted = max(math.ceil(4 * cache / max(footprint, 1)), 2 if footprint < 8 * cache else 1)
    fits = max(1, free // 8 // max(footprint, 1))
    return min(wanted, fits, _MOST_COPIES)


# -- the machine -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ceilings:
    """What this machine reached on the two plainest tasks: a square matrix product and a copy (read
    + write).
    """

    flops_per_s: float
    bytes_per_s: float
    gemm: str
    copy: str


def ceilings(device: torch.device, dtype: torch.dtype, plan: Plan | None = None) -> Ceilings:
    """Random data: zeros would flatter a GPU's clocks."""
    n, megabytes = (8192, 1024) if device.type == "cuda" else (1024, 64)
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.bfloat16  # CPUs have no matrix product of their own for fp16
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    out = torch.empty_like(a)
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    plan = plan or Plan(rounds=15)
    with side_stream(device):
        if device.type == "cuda":  # some 0.3 s, for the clocks to rise
            for _ in range(200):
                torch.mm(a, b, out=out)
        timings = time_side_by_side(
            {
                "gemm": [lambda: torch.mm(a, b, out=out)],
                "copy": [lambda: target.copy_(source)],
            },
            device,
            plan,
        )
    gemm, copy = timings["gemm"], timings["copy"]
    for result in (gemm, copy):
        if isinstance(result, Exception):
            raise result
    assert isinstance(gemm, Timing) and isinstance(copy, Timing)
    short = str(dtype).removeprefix("torch.")
    return Ceilings(
        2 * n**3 / gemm.quantile(0.5),
        2 * source.numel() / copy.quantile(0.5),
        f"{short} matrix product {n}x{n}x{n}",
        f"copy of {megabytes} MiB",
    )


@dataclass(frozen=True)
class GpuState:
    sm_mhz: float
    memory_mhz: float
    power_w: float


def gpu_state(gpu: str) -> GpuState | None:
    """Clocks and power of an index or UUID as nvidia-smi reads them now; None if it cannot."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", gpu],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        sm, memory, power = (float(x) for x in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return GpuState(sm, memory, power)
