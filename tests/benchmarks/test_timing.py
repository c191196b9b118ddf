"""The timing core: candidates alternate, rounds are long enough, a lost GPU is reported."""

import contextlib
import subprocess
import sys
import time
import weakref
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fastattn.testing import timing
from fastattn.testing.timing import (
    DeviceLost,
    Plan,
    Timing,
    copies_beyond_cache,
    peak_memory,
    time_side_by_side,
)

CPU = torch.device("cpu")


def test_candidates_alternate() -> None:
    log: list[str] = []

    def call(name: str) -> Any:
        return lambda: log.append(name)

    announced: list[str] = []
    plan = Plan(round_ms=0.001, rounds=4, min_rounds=4)
    results = time_side_by_side(
        {"a": [call("a0"), call("a1")], "b": [call("b0")]}, CPU, plan, announce=announced.append
    )
    # Preparation in order, then four rounds, A B A B.
    assert announced == ["a", "b"] + ["a", "b"] * 4
    a, b = results["a"], results["b"]
    assert isinstance(a, Timing) and isinstance(b, Timing)
    assert len(a.seconds) == len(b.seconds) == 4
    assert a.launches % 2 == 0 and log.count("a0") == log.count("a1")
    rounds = log[-(a.launches + b.launches) :]
    assert set(rounds[: a.launches]) == {"a0", "a1"} and set(rounds[a.launches :]) == {"b0"}


def test_one_thread_is_timed_by_the_cpu_time_of_the_process_that_computes(monkeypatch):
    """Time that a call waits does not count; `pid` names another process."""

    def wait() -> None:
        time.sleep(0.02)

    plan = Plan(round_ms=1e-3, rounds=3, min_rounds=3, budget_ms=1.0)
    for threads, clock in ((1, "cpu"), (2, "wall")):
        monkeypatch.setattr(timing.torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(timing, "_MAX_LAUNCHES", 2)
        result = time_side_by_side({"wait": [wait]}, CPU, plan)["wait"]
        assert isinstance(result, Timing) and result.clock == clock
        assert (result.quantile(0.0) < 0.01) == (threads == 1)

    busy = "n = sum(range(10**6))\nprint(n, flush=True)\ninput()"
    other = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)  # fmt: skip
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        wait.pid = other.pid  # type: ignore[attr-defined]
        now = timing.cpu_clock(wait)
        before, here = now(), time.process_time()
        sum(range(10**7))  # in this process
        # The other process may still have to reach its `input()`.
        assert before > 0.0 and now() - before < 0.5 * (time.process_time() - here)


class FakeClock:
    """`time` as the timing reads it, advanced by the calls that are timed."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def call(self, seconds: float) -> None:
        self.now += seconds


def test_rounds_are_long_enough_and_slow_candidates_get_fewer(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", clock)
    plan = Plan(round_ms=2.0, rounds=20, min_rounds=3, budget_ms=500.0)
    announced: list[str] = []
    results = time_side_by_side(
        {"fast": [partial(clock.call, 15e-6)], "slow": [partial(clock.call, 0.1)]}, CPU, plan,
        announce=announced.append,
    )  # fmt: skip
    fast, slow = results["fast"], results["slow"]
    assert isinstance(fast, Timing) and isinstance(slow, Timing)
    assert fast.launches == 134 and len(fast.seconds) == 20
    assert fast.seconds == pytest.approx([15e-6] * 20)
    assert slow.launches == 1 and slow.seconds == pytest.approx([0.1] * 3)
    # The slow one's rounds are spread over the others', with one at the end.
    rounds = [i for i, name in enumerate(announced[2:]) if name == "slow"]
    assert rounds[0] > 2 and rounds[-1] == len(announced) - 3
    assert min(b - a for a, b in pairwise(rounds)) > 2


@pytest.mark.parametrize("threads", [1, 2])
def test_idle_threads_of_another_process_sleep_before_each_round(threads, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(timing, "cpu_clock", lambda call: clock.perf_counter)
    starts: list[float] = []

    def call() -> None:
        starts.append(clock.now)
        clock.call(0.25)

    call.pid = 1  # type: ignore[attr-defined]
    plan = Plan(round_ms=1.0, rounds=3, min_rounds=3)
    results = time_side_by_side(
        {"other process": [call], "here": [lambda: clock.call(0.04)]}, CPU, plan
    )
    # A round of 40 ms is too short after a pause.
    wait, launches = (0.3, 3) if threads > 1 else (0.0, 1)
    distance = 0.25 + launches * 0.04 + 2 * wait
    assert [b - a for a, b in pairwise(starts[-3:])] == pytest.approx([distance] * 2)
    for name, one, count in (("other process", 0.25, 1), ("here", 0.04, launches)):
        result = results[name]
        assert isinstance(result, Timing) and result.launches == count
        assert result.seconds == pytest.approx([one] * 3)


class FakeGpu:
    """A GPU and its host in virtual time, with the functions of torch.cuda that timing uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.host = self.free = 0.0  # the time, and when the GPU becomes idle
        self.captured: list[float] | None = None
        self.lost = False
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.free, gpu.host)

            def synchronize(self) -> None:
                gpu.host = max(gpu.host, self.at)

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * (end.at - self.at)

        class Graph:
            kernels: tuple[float, ...] = ()

            def replay(self) -> None:
                gpu.run(sum(self.kernels), host=100e-6)

        @contextlib.contextmanager
        def capture(graph: Graph, *, stream: str, capture_error_mode: str) -> Any:
            assert stream == "side"
            gpu.captured = []
            try:
                yield
                graph.kernels = tuple(gpu.captured)
            except Exception:
                raise ValueError("operation failed due to a previous error during capture")  # noqa: B904
            finally:
                gpu.captured = None

        fakes = {
            "Event": Event, "CUDAGraph": Graph, "graph": capture, "synchronize": self.synchronize,
            "current_stream": lambda: "side", "default_stream": lambda: "default",
            "_sleep": lambda cycles: self.run(cycles / 2e9, host=5e-6),
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(timing.torch.cuda, name, fake)
        self.renewed = 0
        monkeypatch.setattr(timing, "_renew_generator", self._renew)

    def _renew(self) -> None:
        self.renewed += 1

    def run(self, seconds: float, host: float) -> None:
        """A launch, which takes host time, and its kernel."""
        self.host += host
        if self.captured is not None:
            self.captured.append(seconds)
        else:
            self.free = max(self.free, self.host) + seconds

    def synchronize(self, device: Any = None) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")
        self.host = max(self.host, self.free)


def test_graphs_time_kernels_shorter_than_their_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    counts = [0, 0, 0]

    def kernel(copy: int) -> None:
        counts[copy] += gpu.captured is not None
        gpu.run(4e-6, host=50e-6)

    def synchronises() -> None:
        if gpu.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        gpu.run(200e-6, host=300e-6)

    found = time_side_by_side(
        {"kernel": [partial(kernel, i) for i in range(3)], "asks": [synchronises]},
        torch.device("cuda"),
        Plan(rounds=7),
    )
    fast, slow = found["kernel"], found["asks"]
    assert isinstance(fast, Timing) and isinstance(slow, Timing)
    assert fast.clock == "graph" and fast.note == "" and gpu.renewed == 1
    # The launch of the graph is hidden in a round: exact to far below 0.5 %.
    assert fast.seconds == pytest.approx([4e-6] * 7, rel=1e-3)
    assert fast.launches * 4e-6 > 0.7 * 4e-3
    assert fast.launches % 3 == 0 and len(set(counts)) == 1
    assert slow.clock == "stream" and "not permitted" in slow.note
    assert slow.quantile(0.5) == pytest.approx(300e-6, rel=0.25)  # includes host time


def test_a_lost_gpu_names_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def breaks() -> None:
        gpu.lost = gpu.captured is not None
        gpu.run(1e-3, host=1e-5)

    calls = {"fine": [lambda: gpu.run(1e-3, host=1e-5)], "breaks": [breaks]}
    with pytest.raises(DeviceLost, match="illegal memory access") as lost:
        time_side_by_side(calls, torch.device("cuda"), Plan(rounds=3))
    assert lost.value.candidate == "breaks"


def test_results_live_until_their_copy_is_reused() -> None:
    alive: list[int] = []
    results: list[weakref.ref[torch.Tensor]] = []

    def call() -> torch.Tensor:
        alive.append(sum(r() is not None for r in results))
        x = torch.zeros(1)
        results.append(weakref.ref(x))
        return x

    timing._launch([call] * 3, 9)
    assert alive == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    alive.clear(), results.clear()
    timing._launch([call], 4)
    assert alive == [0] * 4


def test_peak_memory_counts_live_tensors() -> None:
    def call() -> torch.Tensor:
        a = torch.zeros(1000)
        b = a + 1  # 8000 bytes
        del a
        return torch.cat([b, b])  # 4000 + 8000

    assert peak_memory(call, CPU) == 12000


def test_clocks_and_power_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing._management_library.cache_clear()
    timing._command_answers.cache_clear()
    monkeypatch.setattr(timing, "_management_library", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert timing.gpu_state("GPU-0") is None
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 1980, 3201, 412.5\n")
    command.chmod(0o755)
    assert timing.gpu_state("GPU-0") is None  # nvidia-smi is called once
    assert timing.gpu_state("GPU-1") == timing.GpuState(1980.0, 3201.0, 412.5)
    timing._command_answers.cache_clear()


def test_a_candidate_that_raises_does_not_affect_others() -> None:
    calls = iter(range(100))

    def later() -> None:
        if next(calls) >= 2:
            raise ValueError("worn out")

    def immediately() -> None:
        raise TypeError("broken")

    plan = Plan(round_ms=0.001, rounds=4, min_rounds=4)
    results = time_side_by_side(
        {"later": [later], "fine": [lambda: None], "immediately": [immediately]}, CPU, plan
    )
    assert isinstance(results["later"], ValueError)
    assert isinstance(results["immediately"], TypeError)
    assert isinstance(results["fine"], Timing)


@pytest.mark.parametrize(
    "footprint, free, copies",
    [(1 << 20, 1 << 37, 240), (64 << 20, 1 << 37, 4), (256 << 20, 1 << 37, 2),
     (1 << 30, 1 << 37, 1), (64 << 20, 1 << 30, 2), (1 << 10, 1 << 37, 256)],
)  # fmt: skip
def test_copies_exceed_the_cache(footprint: int, free: int, copies: int) -> None:
    assert copies_beyond_cache(footprint, 60 << 20, free) == copies


def test_quantiles_interpolate() -> None:
    values = Timing((4.0, 1.0, 3.0, 2.0), 1, "wall")
    assert values.quantile(0.5) == 2.5
    assert values.quantile(0.0) == 1.0 and values.quantile(1.0) == 4.0
    assert Timing((7.0,), 1, "wall").quantile(0.9) == 7.0
