"""The timing core: candidates side by side, round by round, in rounds long enough for the clock.

A candidate is a sequence of calls, one per copy of its inputs. A round runs them in turn until it
is long against the clock's resolution; candidates take turns, A B A B, so that a drift of the
machine meets all of them. On a GPU a round is one replay of a CUDA graph, behind a short wait that
hides the replay's own launch; on a CPU it is a loop under `perf_counter`. Results live until their
copy's next turn, so that they rotate beyond the cache as inputs do. Nothing here changes a setting
of the machine. `time_side_by_side` is the way in; `ceilings` measures what the machine could do.
"""

import contextlib
import ctypes
import functools
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
# About a millisecond: longer than the host needs to launch a graph, so that the clock starts on a
# full queue.
_QUEUE_CYCLES = 2_000_000
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
    all candidates may take, shared equally; slow candidates get fewer rounds, spread over the
    others' and never under min_rounds. graph: capture CUDA graphs.
    """

    round_ms: float | None = None
    rounds: int = 25
    min_rounds: int = 3
    budget_ms: float = 1500.0
    graph: bool = True


class DeviceLost(RuntimeError):
    """A candidate broke the device for this process: nothing after it can be believed."""

    def __init__(self, candidate: str, error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.candidate = candidate


class _Program(Protocol):
    """One candidate, ready and warm: `round` returns the seconds of all its launches; `taken` is
    what the last round before the measurement took.
    """

    launches: int
    taken: float
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
        self.taken = _grow(self, round_s)

    def round(self) -> float:
        start = time.perf_counter()
        _launch(self.calls, self.launches)
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
        self.taken = _grow(self, round_s)
        self.graph = self._capture() if graph else None
        if self.graph is not None and (taken := self.round()) < 0.7 * round_s:
            # The host had been slower than the GPU, so that fewer launches seemed enough.
            self.launches = _enough_launches(taken / self.launches, round_s, len(calls))
            self.graph = self._capture()
        self.taken = self.round()
        self.clock = "stream" if self.graph is None else "graph"

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                _launch(self.calls, self.launches)
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            torch.cuda.synchronize()  # raises where the device is lost
            _renew_generator()
            cause = error.__context__ or error  # the end of a spoilt capture raises over it
            message = " ".join(str(cause).split())[:200]
            self.note = f"not captured: {type(cause).__name__}: {message}"
            return None
        return graph

    def round(self) -> float:
        torch.cuda._sleep(_QUEUE_CYCLES)
        self.start.record()
        if self.graph is None:
            _launch(self.calls, self.launches)
        else:
            self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


def _renew_generator() -> None:
    """After a capture that failed torch's generator believes itself within it and draws no more."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    seed = generator.initial_seed()
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(seed)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _launch(calls: Sequence[Call], launches: int) -> None:
    """So many calls, each copy's result kept until its next turn."""
    if len(calls) == 1:
        for _ in range(launches):
            calls[0]()
        return
    count = len(calls)
    results: list[Any] = [None] * count
    for i in range(launches):
        results[i % count] = calls[i % count]()


def _grow(program: _Program, round_s: float) -> float:
    """Raises the launches, a copy's worth of them at first, until a round is long enough; returns
    what it takes.
    """
    copies = program.launches
    while True:
        taken = program.round()
        wanted = _enough_launches(taken / program.launches, round_s, copies)
        if wanted <= program.launches:
            return taken
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
        share = plan.budget_ms / 1e3 / max(len(programs), 1)
        rounds = {
            name: min(plan.rounds, max(plan.min_rounds, int(share / max(program.taken, 1e-9))))
            for name, program in programs.items()
        }
        turns = max(rounds.values(), default=0)
        for turn in range(turns):
            for name, program in list(programs.items()):
                if turn * rounds[name] // turns == (turn + 1) * rounds[name] // turns:
                    continue  # a slow candidate, whose rounds are spread over the turns
                announce(name)
                try:
                    taken = program.round()
                except Exception as error:
                    check_device(device, name, error)
                    results[name] = error
                    del programs[name]
                    continue
                seconds.setdefault(name, []).append(taken)
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


def peak_memory(call: Call, device: torch.device) -> int:
    """Bytes that torch's allocator hands out at most during a call, beyond those in use before.

    The call has run before: what a first call sets up is not counted. On a CPU what native code
    allocates for itself is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    in_use = peak = 0
    for _, size in sorted(_allocations(profiled.profiler.kineto_results.experimental_event_tree())):
        in_use += size
        peak = max(peak, in_use)
    return peak


def _allocations(events: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """(when, bytes) of every allocation, negative where memory is given back."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


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
        calls: dict[str, Sequence[Call]] = {
            "gemm": [lambda: torch.mm(a, b, out=out)],
            "copy": [lambda: target.copy_(source)],
        }
        if device.type == "cpu":
            # On some CPUs oneDNN is twice as fast as the library that mm calls. It may be absent.
            linear = torch.ops.mkldnn
            calls["gemm by oneDNN"] = [lambda: linear._linear_pointwise(a, b, None, "none", [], "")]
        timings = time_side_by_side(calls, device, plan)
    for name in ("gemm", "copy"):
        if isinstance(failure := timings[name], Exception):
            raise failure
    # The better rounds: what else runs on the machine is no part of what it can do.
    times = {name: t.quantile(0.1) for name, t in timings.items() if isinstance(t, Timing)}
    copy = times.pop("copy")
    short = str(dtype).removeprefix("torch.")
    return Ceilings(
        2 * n**3 / min(times.values()),
        2 * source.numel() / copy,
        f"{short} matrix product {n}x{n}x{n}",
        f"copy of {megabytes} MiB",
    )


@dataclass(frozen=True)
class GpuState:
    sm_mhz: float
    memory_mhz: float
    power_w: float


def gpu_state(gpu: str) -> GpuState | None:
    """Clocks and power now of the GPU with a UUID ("GPU-..."); None if nobody can say.

    From the driver's management library, in microseconds; by nvidia-smi, which takes a large part
    of a second, where that library refuses.
    """
    return _state_by_library(gpu) or _state_by_command(gpu)


# Of the management library: nvmlClockType_t.
_CLOCK_SM, _CLOCK_MEMORY = 1, 2


@functools.cache
def _management_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _state_by_library(gpu: str) -> GpuState | None:
    library = _management_library()
    if library is None:
        return None
    handle, value = ctypes.c_void_p(), ctypes.c_uint()
    if library.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(handle)) != 0:
        return None
    found = []
    for kind in (_CLOCK_SM, _CLOCK_MEMORY):
        if library.nvmlDeviceGetClockInfo(handle, kind, ctypes.byref(value)) != 0:
            return None
        found.append(float(value.value))
    if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)) != 0:
        return None
    return GpuState(found[0], found[1], value.value / 1e3)  # from milliwatts


@functools.cache
def _command_answers(gpu: str) -> bool:
    """Asked once: a command that fails would fail before and after every group."""
    return _query(gpu) is not None


def _state_by_command(gpu: str) -> GpuState | None:
    return _query(gpu) if _command_answers(gpu) else None


def _query(gpu: str) -> GpuState | None:
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
