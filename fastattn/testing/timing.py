"""Timing: `time_side_by_side` times several candidates; `ceilings` measures the machine's limits.

A candidate is a sequence of calls, one for each copy of its inputs. A round runs them in turn until
it is long compared with the clock's resolution. Rounds of the candidates are interleaved (A B A B),
so that drift of the machine affects all of them. On a GPU a round is one replay of a CUDA graph
after a short wait, which hides the launch of the replay. On a CPU it is a loop, timed by its CPU
time with one thread, which other processes change least, else by `perf_counter`. A result is kept
until its copy's next call, so that results, like inputs, do not stay in the cache. No setting of
the machine is changed.
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
# CUDA events resolve about a microsecond, the start of a graph a few: 0.5 % of 1 ms.
MIN_ROUND_MS = {"cuda": 4.0, "cpu": 10.0}
# The minimum duration of a round after a pause, whose first call finds cold caches and low clocks.
_ROUND_AFTER_PAUSE_MS = 100.0
# About a millisecond: longer than the host needs to launch a graph.
_QUEUE_CYCLES = 2_000_000
_MAX_LAUNCHES = 4000
_MAX_COPIES = 256


@dataclass(frozen=True)
class Timing:
    """seconds: of a launch, in each round. clock: graph, stream, wall or cpu (the CPU time of the
    process). note: why not a graph.
    """

    seconds: tuple[float, ...]
    launches: int
    clock: str
    note: str = ""

    def quantile(self, share: float) -> float:
        """The quantile `share` of the rounds' seconds, interpolated."""
        ordered = sorted(self.seconds)
        at = share * (len(ordered) - 1)
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    round_ms: the minimum duration of a round, longer after a pause. rounds: the maximum number of
    rounds. budget_ms: the duration of all rounds of all candidates, shared equally. Slow candidates
    get fewer rounds, but at least min_rounds. graph: whether to capture CUDA graphs.
    """

    round_ms: float | None = None
    rounds: int = 25
    min_rounds: int = 3
    budget_ms: float = 1500.0
    graph: bool = True


class DeviceLost(RuntimeError):
    """A candidate made the device unusable in this process; later results would be invalid."""

    def __init__(self, candidate: str, error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.candidate = candidate


class _Program(Protocol):
    """A candidate after warm-up. `round` returns the seconds of all its launches; `taken` is the
    duration of the last round before the measurement.
    """

    launches: int
    taken: float
    clock: str
    note: str

    def round(self) -> float: ...


class _HostProgram:
    note = ""

    def __init__(self, calls: Sequence[Call], round_s: float):
        self.calls = calls
        self.clock = "cpu" if torch.get_num_threads() == 1 else "wall"
        self._now = cpu_clock(calls[0]) if self.clock == "cpu" else time.perf_counter
        for call in calls:
            call()
        self.launches = len(calls)
        self.taken = _grow(self, round_s)

    def round(self) -> float:
        start = self._now()
        _launch(self.calls, self.launches)
        return self._now() - start


def cpu_clock(call: Call) -> Callable[[], float]:
    """The CPU time of the process that computes a call: the one that its attribute `pid` names,
    else this one.
    """
    pid = getattr(call, "pid", None)
    if pid is None:
        return time.process_time
    return functools.partial(time.clock_gettime, (~pid << 3) | 2)  # as clock_getcpuclockid(3)


class _CudaProgram:
    def __init__(self, calls: Sequence[Call], round_s: float, graph: bool):
        self.calls = calls
        self.note = ""
        self.graph: torch.cuda.CUDAGraph | None = None  # None launches from the host
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        for _ in range(2):  # the first call compiles, the second may allocate
            for call in calls:
                call()
        self.launches = len(calls)
        torch.cuda.synchronize()
        self.taken = _grow(self, round_s)
        self.graph = self._capture() if graph else None
        if self.graph is not None and (taken := self.round()) < 0.7 * round_s:
            # Without a graph the host was slower than the GPU, and made each launch seem longer.
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
            cause = error.__context__ or error  # ending a failed capture raises another error
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
    """Replaces PyTorch's generator, which stays in capture mode after a failed capture."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    seed = generator.initial_seed()
    fresh = torch.Generator(generator.device)
    fresh.manual_seed(seed)
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _launch(calls: Sequence[Call], launches: int) -> None:
    """Makes `launches` calls; the result of a copy is kept until its next call."""
    if len(calls) == 1:
        for _ in range(launches):
            calls[0]()
        return
    count = len(calls)
    results: list[Any] = [None] * count
    for i in range(launches):
        results[i % count] = calls[i % count]()


def _grow(program: _Program, round_s: float) -> float:
    """Increases the launches, at first one for each copy, until a round is long enough; returns the
    duration of a round.
    """
    copies = program.launches
    while True:
        taken = program.round()
        wanted = _enough_launches(taken / program.launches, round_s, copies)
        if wanted <= program.launches:
            return taken
        # Short rounds are timed inaccurately, so the launches grow by a factor of at most 16.
        program.launches = min(wanted, 16 * program.launches)


def _enough_launches(one: float, round_s: float, copies: int) -> int:
    """Launches for a round of `round_s` if one takes `one` seconds; a multiple of `copies`."""
    wanted = min(_MAX_LAUNCHES, math.ceil(round_s / max(one, 1e-9)))
    return copies * math.ceil(wanted / copies)


def time_side_by_side(
    candidates: Mapping[str, Sequence[Call]],
    device: torch.device,
    plan: Plan | None = None,
    *,
    announce: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing | Exception]:
    """Times every candidate. The result of a candidate that raises is its exception.

    candidates: name -> calls, one for each copy of the inputs. announce: called with a candidate's
    name before each of its rounds, so that a crash can be attributed. Raises DeviceLost if a
    candidate makes the GPU unusable. The forward of a backward call must have run in `side_stream`.
    """
    plan = plan or Plan()
    round_s = (plan.round_ms or MIN_ROUND_MS[device.type]) / 1e3
    pause = _pause(candidates)
    if pause > 0:
        round_s = max(round_s, _ROUND_AFTER_PAUSE_MS / 1e3)
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
                    else _HostProgram(calls, round_s)
                )
            except Exception as error:
                check_device(device, name, error)
                results[name] = error
        share = plan.budget_ms / 1e3 / max(len(programs), 1)
        rounds = {
            name: min(plan.rounds, max(plan.min_rounds, int(share / max(program.taken, 1e-9))))
            for name, program in programs.items()
        }
        most = max(rounds.values(), default=0)
        for i in range(most):
            for name, program in list(programs.items()):
                if i * rounds[name] // most == (i + 1) * rounds[name] // most:
                    continue  # a slow candidate has fewer rounds, spread over those of the others
                announce(name)
                time.sleep(pause)
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


def _pause(candidates: Mapping[str, Sequence[Call]]) -> float:
    """Seconds before each round with several threads of which another process has some: after a
    parallel region its idle threads occupy the cores for up to 0.2 s, the default of LLVM's and
    Intel's OpenMP (KMP_BLOCKTIME).
    """
    elsewhere = any(hasattr(calls[0], "pid") for calls in candidates.values())
    return 0.3 if elsewhere and torch.get_num_threads() > 1 else 0.0


def check_device(device: torch.device, candidate: str, error: Exception) -> None:
    """Called after `candidate` raised `error`; raises DeviceLost if the device no longer works."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception:
        raise DeviceLost(candidate, error) from error


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Inside, the current stream is not the default stream, which cannot be captured."""
    if device.type != "cuda" or torch.cuda.current_stream() != torch.cuda.default_stream():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def copies_beyond_cache(footprint: int, cache: int, free: int) -> int:
    """How many copies of inputs and outputs (`footprint` bytes) to use in turn so that none stays
    in a cache of `cache` bytes. They take at most an eighth of `free`, the bytes of free memory.
    """
    wanted = max(math.ceil(4 * cache / max(footprint, 1)), 2 if footprint < 8 * cache else 1)
    fits = max(1, free // 8 // max(footprint, 1))
    return min(wanted, fits, _MAX_COPIES)


def peak_memory(call: Call, device: torch.device) -> int:
    """The peak of the bytes that PyTorch's allocator has in use during a call, minus those in use
    before it. The call must have run before, as a first call may allocate more. On a CPU,
    allocations by native code are not counted.
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
    """(time, bytes) of every allocation; bytes are negative for a deallocation."""
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)


# -- the machine -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Ceilings:
    """The rates measured for a square matrix product and for a copy (read + write)."""

    flops_per_s: float
    bytes_per_s: float
    gemm: str
    copy: str


def ceilings(device: torch.device, dtype: torch.dtype, plan: Plan | None = None) -> Ceilings:
    """Measures with random data: a GPU runs at higher clocks on zeros."""
    n, megabytes = (8192, 1024) if device.type == "cuda" else (1024, 64)
    if device.type == "cpu" and dtype == torch.float16:
        dtype = torch.bfloat16  # most CPUs have no fp16 matrix instructions
    if device.type == "cpu" and _is_slow_product(dtype):
        n = 256
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    out = torch.empty_like(a)
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    plan = plan or Plan(rounds=15)
    with side_stream(device):
        if device.type == "cuda":  # about 0.3 s, until the clocks have risen
            for _ in range(200):
                torch.mm(a, b, out=out)
        calls: dict[str, Sequence[Call]] = {
            "gemm": [lambda: torch.mm(a, b, out=out)],
            "copy": [lambda: target.copy_(source)],
        }
        if device.type == "cpu":
            # On some CPUs oneDNN, if available, is twice as fast as the library that mm calls.
            linear = torch.ops.mkldnn
            calls["gemm by oneDNN"] = [lambda: linear._linear_pointwise(a, b, None, "none", [], "")]
        timings = time_side_by_side(calls, device, plan)
    for name in ("gemm", "copy"):
        if isinstance(failure := timings[name], Exception):
            raise failure
    # A low quantile of the times excludes interference by other processes.
    times = {name: t.quantile(0.1) for name, t in timings.items() if isinstance(t, Timing)}
    copy = times.pop("copy")
    short = str(dtype).removeprefix("torch.")
    return Ceilings(
        2 * n**3 / min(times.values()),
        2 * source.numel() / copy,
        f"{short} matrix product {n}x{n}x{n}",
        f"copy of {megabytes} MiB",
    )


def _is_slow_product(dtype: torch.dtype) -> bool:
    """Whether PyTorch's products in this dtype take seconds on this CPU: in bf16 without AVX-512
    they run at about 1 GFLOP/s.
    """
    x = torch.randn(256, 256, dtype=dtype)
    torch.mm(x, x)
    start = time.perf_counter()
    torch.mm(x, x)
    return time.perf_counter() - start > 0.005  # 7 GFLOP/s


@dataclass(frozen=True)
class GpuState:
    sm_mhz: float
    memory_mhz: float
    power_w: float


def gpu_state(gpu: str) -> GpuState | None:
    """Current clocks and power of the GPU with this UUID ("GPU-..."), or None if not available.

    They come from the driver's management library (NVML), in microseconds, or, if that fails, from
    nvidia-smi, which takes a large part of a second.
    """
    return _state_by_library(gpu) or _state_by_command(gpu)


# nvmlClockType_t of NVML.
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
    """Cached, so that a command that fails is not repeated for every group."""
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
