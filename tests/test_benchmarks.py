"""The benchmarks judge before they time, survive what candidates do, report what rows say."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, generation, grids, report, rows, run, tune
from benchmarks.cases import Group
from benchmarks.generation import Decoded, DecodeSize, GenerationSubject
from benchmarks.implementations import Implementation, Task, can_import
from benchmarks.model import MODEL, ModelSubject, _set_dropout
from benchmarks.rows import ROOT, Row
from benchmarks.runner import Runner, Settings
from benchmarks.subject import OpSubject, _judged_rows
from benchmarks.tune_attention import AttentionTask
from fastattn.ops.attention.spec_workloads import packed_workload, padded_workload
from fastattn.testing import timing
from fastattn.testing.spec import Inputs, Workload
from fastattn.testing.timing import (
    DeviceLost,
    Plan,
    Timing,
    copies_beyond_cache,
    peak_memory,
    time_side_by_side,
)

CPU = torch.device("cpu")
TINY = Plan(round_ms=0.2, rounds=3, min_rounds=2, budget_ms=50.0)
PEERS = '''
"""Candidates that misbehave, each in its own way."""

import dataclasses
import os
import time

import torch.nn.functional as F

from benchmarks.implementations import Implementation


def right(inputs):
    x = inputs["x"]
    return F.layer_norm(x, x.shape[-1:], inputs["weight"], inputs["bias"], inputs["eps"])


def wrong(inputs):
    return right(inputs) * 1.01


def wrong_gradient(inputs):
    y = right(inputs)
    return 2 * y - y.detach()


def dies(inputs):
    os.kill(os.getpid(), 9)


def hangs(inputs):
    time.sleep(1000)


def raises(inputs):
    raise RuntimeError("no good")


def peer(function, name=None, **options):
    name = name or function.__name__
    return Implementation(name, ("layer_norm",), lambda task: function, **options)


PEERS = [
    peer(right),
    peer(wrong),
    peer(wrong_gradient),
    peer(dies),
    peer(hangs),
    peer(raises),
    peer(right, "absent", unavailable=lambda: "is not installed"),
    peer(right, "refuses", unsupported=lambda task: f"has no {task.dtype}"),
]
'''


def _environment(**variables: str) -> dict[str, str]:
    """For a subprocess, which is no worker of pytest-xdist even where this process is one."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return mine | {"OMP_NUM_THREADS": "1"} | variables


# -- timing core -----------------------------------------------------------------------------------
def test_candidates_take_turns() -> None:
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


def test_rounds_are_long_enough_and_slow_candidates_get_fewer() -> None:
    plan = Plan(round_ms=2.0, rounds=20, min_rounds=3, budget_ms=500.0)
    announced: list[str] = []
    results = time_side_by_side(
        {"fast": [lambda: sum(range(1000))], "slow": [lambda: time.sleep(0.1)]},
        CPU,
        plan,
        announce=announced.append,
    )
    fast, slow = results["fast"], results["slow"]
    assert isinstance(fast, Timing) and isinstance(slow, Timing)
    assert fast.launches > 10  # some 10 us each
    assert slow.launches == 1 and len(slow.seconds) == 3 < len(fast.seconds)
    assert min(slow.seconds) >= 0.1
    # The slow one's rounds lie among the others', the last at the end.
    turns = [i for i, name in enumerate(announced[2:]) if name == "slow"]
    assert turns[0] > 2 and turns[-1] == len(announced) - 3
    assert min(b - a for a, b in pairwise(turns)) > 2


class FakeGpu:
    """A GPU and its host in virtual seconds, behind the names of torch.cuda that timing uses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.host = self.free = 0.0  # what time it is; when the GPU will have nothing to do
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
        """A launch, which takes the host some time, and the kernel behind it."""
        self.host += host
        if self.captured is not None:
            self.captured.append(seconds)
        else:
            self.free = max(self.free, self.host) + seconds

    def synchronize(self, device: Any = None) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")
        self.host = max(self.host, self.free)


def test_graphs_time_kernels_that_the_host_is_too_slow_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    counts = [0, 0, 0]

    def kernel(copy: int) -> None:
        counts[copy] += gpu.captured is not None
        gpu.run(4e-6, host=50e-6)

    def asks_the_gpu() -> None:
        if gpu.captured is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        gpu.run(200e-6, host=300e-6)

    found = time_side_by_side(
        {"kernel": [partial(kernel, i) for i in range(3)], "asks": [asks_the_gpu]},
        torch.device("cuda"),
        Plan(rounds=7),
    )
    fast, slow = found["kernel"], found["asks"]
    assert isinstance(fast, Timing) and isinstance(slow, Timing)
    assert fast.clock == "graph" and fast.note == "" and gpu.renewed == 1
    # What the graph's own launch takes of a round is hidden: exact to far below 0.5 %.
    assert fast.seconds == pytest.approx([4e-6] * 7, rel=1e-3)
    assert fast.launches * 4e-6 > 0.7 * 4e-3
    assert fast.launches % 3 == 0 and len(set(counts)) == 1
    assert slow.clock == "stream" and "not permitted" in slow.note
    assert slow.quantile(0.5) == pytest.approx(300e-6, rel=0.25)  # the host's share shows


def test_a_lost_gpu_names_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)

    def breaks() -> None:
        gpu.lost = gpu.captured is not None
        gpu.run(1e-3, host=1e-5)

    calls = {"fine": [lambda: gpu.run(1e-3, host=1e-5)], "breaks": [breaks]}
    with pytest.raises(DeviceLost, match="illegal memory access") as lost:
        time_side_by_side(calls, torch.device("cuda"), Plan(rounds=3))
    assert lost.value.candidate == "breaks"


def test_results_live_until_their_copy_comes_again() -> None:
    """So results rotate through memory as inputs do."""
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


def test_peak_memory_counts_what_lives_at_once() -> None:
    def call() -> torch.Tensor:
        a = torch.zeros(1000)
        b = a + 1  # 8000 bytes
        del a
        return torch.cat([b, b])  # 4000 + 8000

    assert peak_memory(call, CPU) == 12000


def test_clocks_and_power_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the management library is absent, nvidia-smi; where that is too, nothing."""
    timing._management_library.cache_clear()
    timing._command_answers.cache_clear()
    monkeypatch.setattr(timing, "_management_library", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert timing.gpu_state("GPU-0") is None
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 1980, 3201, 412.5\n")
    command.chmod(0o755)
    assert timing.gpu_state("GPU-0") is None  # it was asked once
    assert timing.gpu_state("GPU-1") == timing.GpuState(1980.0, 3201.0, 412.5)
    timing._command_answers.cache_clear()


def test_a_candidate_that_raises_leaves_the_others() -> None:
    calls = iter(range(100))

    def later() -> None:
        if next(calls) >= 2:
            raise ValueError("worn out")

    def at_once() -> None:
        raise TypeError("broken")

    plan = Plan(round_ms=0.001, rounds=4, min_rounds=4)
    results = time_side_by_side(
        {"later": [later], "fine": [lambda: None], "at_once": [at_once]}, CPU, plan
    )
    assert isinstance(results["later"], ValueError)
    assert isinstance(results["at_once"], TypeError)
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


# -- the gate --------------------------------------------------------------------------------------
def _attention_workload(**options: Any) -> Workload:
    return padded_workload("tiny", 2, 4, 33, 16, ("cpu",), **options)


def _candidate(function: Any, **options: Any) -> Implementation:
    return Implementation("candidate", ("attention",), lambda task: function, **options)


def _reference(inputs: Inputs) -> Any:
    return cases.specs()["attention"].function(**inputs, backend="reference")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"K": 2, "padded": "both"},
        {"mask": "float HMN"},
        {"dropout_p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_gate_judges_what_is_timed(
    options: dict[str, Any], sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right candidate passes; one wrong element or a wrong gradient does not."""
    if sliced:
        monkeypatch.setattr("benchmarks.subject._WHOLE", 1)
    subject = OpSubject(
        cases.specs()["attention"], _attention_workload(**options), CPU, torch.float32
    )

    def verdict(function: Any, direction: str) -> Any:
        candidate = _candidate(function)
        subject.build(candidate)
        subject.prepare_oracle(candidate)
        return subject.judge(candidate, direction)

    def off_by_one_element(inputs: Inputs) -> Any:
        out = _reference(inputs).clone()
        out[0, 0, 0, 0] += 1e-3
        return out

    def gradient_twice(inputs: Inputs) -> Any:
        out = _reference(inputs)
        return 2 * out - out.detach()

    def not_finite_elsewhere(inputs: Inputs) -> Any:
        out = _reference(inputs).clone()
        out[1, 1, -1] = float("nan")
        return out

    for direction in ("fwd", "bwd"):
        found = verdict(_reference, direction)
        assert found.ok, found.message
        assert found.error <= found.allowed
    assert "out" in verdict(off_by_one_element, "fwd").message
    assert verdict(gradient_twice, "fwd").ok
    assert "dq" in verdict(gradient_twice, "bwd").message
    assert "not finite" in verdict(not_finite_elsewhere, "fwd").message


def test_peers_may_ignore_padded_rows_and_draw_their_own_dropout() -> None:
    def fills_padded_rows(inputs: Inputs) -> Any:
        return _reference({k: v for k, v in inputs.items() if k != "query_lengths"})

    subject = OpSubject(
        cases.specs()["attention"], _attention_workload(padded="both"), CPU, torch.float32
    )
    for ignores in (False, True):
        candidate = _candidate(fills_padded_rows, ignores_query_lengths=ignores)
        subject.build(candidate)
        subject.prepare_oracle(candidate)
        assert subject.judge(candidate, "fwd").ok == ignores
        assert subject.judge(candidate, "bwd").ok

    def own_dropout(inputs: Inputs) -> Any:
        seed = {"dropout_seed": torch.tensor([99])} if inputs.get("dropout_p") else {}
        return _reference(inputs | seed)

    subject = OpSubject(
        cases.specs()["attention"], _attention_workload(dropout_p=0.3), CPU, torch.float32
    )
    for draws in (False, True):
        candidate = _candidate(own_dropout, draws_dropout=draws)
        subject.build(candidate)
        subject.prepare_oracle(candidate)
        found = subject.judge(candidate, "fwd")
        assert found.ok == draws
        assert (found.message == "judged with dropout off") == draws


def test_judged_rows_keep_the_edges() -> None:
    x = torch.arange(40_000.0)[:, None].expand(-1, 16)
    picked = _judged_rows(x)[:, 0]
    assert len(picked) == 2**18 // 16 and len(picked.unique()) == len(picked)
    assert picked[0] == 0 and picked[31] == 31 and picked[-1] == 39_999 and picked[-32] == 39_968
    assert _judged_rows(x[:1000]).shape == (1000, 16)


def test_model_gate() -> None:
    workload = next(w for w in cases.workloads(MODEL) if "cpu" in w.device_types)
    subject = ModelSubject(workload, CPU, torch.float32)  # type: ignore[arg-type]
    candidates = {c.name: c for c in cases.implementations_of(MODEL, "cpu")}
    for name in ("fastattn", "torch-eager"):
        candidate = candidates[name]
        subject.build(candidate)
        subject.prepare_oracle(candidate)
        found = subject.judge(candidate, "step")
        assert found.ok, f"{name}: {found.message}"
        subject.calls(candidate, "step")[0]()
    module = subject.models["fastattn"].module
    assert _set_dropout(module, 0.1) == 0.1  # the gate put it back
    with torch.no_grad():
        module.encoder.layers[0].norm1.weight[0] += 0.01
    assert not subject.judge(candidates["fastattn"], "step").ok


def test_packed_gate() -> None:
    """The packed op is judged by its own specification, and a decoding shape has no backward."""
    workload = packed_workload("tiny", torch.tensor([5, 17, 1]), 2, 16, ("cpu",))
    subject = OpSubject(cases.specs()["attention_varlen"], workload, CPU, torch.float32)

    def function(inputs: Inputs) -> Any:
        return cases.specs()["attention_varlen"].function(**inputs, backend="reference")

    def one_sequence(inputs: Inputs) -> Any:
        T = inputs["q"].shape[1]
        offsets = torch.tensor([0, T], dtype=torch.int32)
        joined = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return function(inputs | joined | {"max_seqlen_q": T, "max_seqlen_k": T})

    for f, right in ((function, True), (one_sequence, False)):
        candidate = _candidate(f)
        subject.build(candidate)
        subject.prepare_oracle(candidate)
        assert [subject.judge(candidate, d).ok for d in ("fwd", "bwd")] == [right, right]
    decode = padded_workload("tiny", 2, 4, 33, 16, ("cpu",), M=1)
    assert cases.directions("attention", decode) == ("fwd",)
    subject = OpSubject(cases.specs()["attention"], decode, CPU, torch.float32)
    candidate = _candidate(_reference)
    subject.build(candidate)
    subject.prepare_oracle(candidate)
    assert subject.judge(candidate, "fwd").ok
    assert len(subject.calls(candidate, "fwd")) == 1
    assert subject.details(candidate, "fwd")["peak_bytes"] > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_gate(beams: int) -> None:
    """Another token than the likeliest, a wrong log-probability, too few tokens are seen."""
    size = DecodeSize(32, 2, 64, 1, 50, 3, 5, 4, beams)
    workload = generation._workload(size, ("cpu",))
    subject = GenerationSubject(workload, CPU, torch.float32)
    found = cases.implementations_of(generation.GENERATION, "cpu")
    [ours] = [c for c in found if c.name == "fastattn"]

    def verdict(change: Any) -> Any:
        decode = ours.build(subject.task)
        candidate = replace(ours, build=lambda task: lambda inputs: change(decode(inputs)))
        subject.build(candidate)
        subject.prepare_oracle(candidate)
        return subject.judge(candidate, "decode")

    def other_token(d: Decoded) -> Decoded:
        tokens = d.tokens.clone()
        tokens[0, 2] = 3 + (tokens[0, 2] - 2) % 40
        return replace(d, tokens=tokens)

    def improbable(d: Decoded) -> Decoded:
        assert d.log_probabilities is not None
        return replace(d, log_probabilities=d.log_probabilities - 0.1)

    assert verdict(lambda d: d).ok, verdict(lambda d: d).message
    assert not verdict(other_token).ok
    assert "log-probability" in verdict(improbable).message
    assert "tokens: shape" in verdict(lambda d: replace(d, tokens=d.tokens[:, 1:])).message
    assert verdict(lambda d: replace(d, own_weights=True)).message.startswith("own weights")


# -- peers -----------------------------------------------------------------------------------------
def test_absent_peers_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without any of the packages every optional peer is named with its reason, none is run."""
    monkeypatch.setattr("benchmarks.implementations.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("FASTATTN_FA3_LIBRARY", raising=False)
    absent = cases.absent_peers("cuda")
    assert set(absent) >= {
        "fa2", "fa3", "fa4", "xformers", "liger", "quack", "transformer-engine", "marian"
    }  # fmt: skip
    assert all(why.startswith("is not installed: n") for _, why in absent.values())
    assert absent["fa3"][0] == ("attention", "attention_varlen")
    names = {name for g in cases.groups("cuda", every_implementation=True) for name, _ in g.wanted}
    assert not names & absent.keys() and {"sdpa-cudnn", "flex", "eager"} <= names
    monkeypatch.setenv("FASTATTN_FA3_LIBRARY", str(tmp_path / "_C.so"))
    assert "is not at FASTATTN_FA3_LIBRARY" in cases.absent_peers("cuda")["fa3"][1]
    (tmp_path / "_C.so").touch()
    assert "fa3" not in cases.absent_peers("cuda")


def test_modules_are_found_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_kernels"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no GPU')")
    (package / "inner" / "norms.py").touch()
    (package / "_C.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in (
        "some_kernels",
        "some_kernels.inner.norms",
        "some_kernels._C",
        "some_kernels.inner",
    ):
        assert can_import(name), name
    for name in ("some_kernels.norms", "some_kernels.inner.other", "no_kernels", "no_kernels.a"):
        assert not can_import(name), name


def test_peers_refuse_what_they_cannot_do() -> None:
    """In words that follow their name, before anything of theirs is imported."""
    options: list[dict[str, Any]] = [
        {}, {"causal": True}, {"causal": True, "window": 8}, {"mask": "bool BMN"},
        {"mask": "float HMN"}, {"padded": "both"}, {"dropout_p": 0.1}, {"K": 2},
    ]  # fmt: skip
    found: dict[str, list[str]] = {}
    for peer in cases.implementations_of("attention", "cuda"):
        if peer.ours:
            continue
        for n, each in enumerate(options):
            workload = _attention_workload(**each)
            inputs = workload.make(CPU, torch.bfloat16, torch.Generator())
            task = Task("attention", workload, CPU, torch.bfloat16, inputs)
            reason = peer.unsupported(task)
            if reason is not None:
                assert reason.split()[0] in ("has", "takes", "is", "aligns", "writes"), reason
                found.setdefault(peer.name, []).append("-cwmbpdg"[n])
    assert {name: "".join(refused) for name, refused in found.items()} == {
        "eager": "w", "fa2": "mbp", "fa3": "mbpd", "fa4": "mbpd", "flex": "wd", "sdpa-cudnn": "w",
        "sdpa-efficient": "wg", "sdpa-flash": "wmbp", "sdpa-math": "w",
        "transformer-engine": "wmbpd", "xformers": "wmbpg",
    }  # fmt: skip


# -- worker and runner -----------------------------------------------------------------------------
def test_bad_candidates_cost_only_their_own_rows(tmp_path: Path) -> None:
    """Wrong, dying, hanging, raising, absent candidates get a row; the good ones get times."""
    path = tmp_path / "misbehaving.py"
    path.write_text(PEERS)
    names = ("dies", "fastattn-reference", "wrong", "wrong_gradient", "raises", "hangs", "absent",
             "refuses", "right")  # fmt: skip
    wanted = tuple((name, direction) for name in names for direction in ("fwd", "bwd"))
    group = Group("layer_norm", "64x512", "fp32", "cpu", wanted)
    settings = Settings("cpu", threads=1, plan=TINY, stage_seconds=5.0, peer_files=(path,))
    with Runner(settings, tmp_path / "worker.log") as runner:
        runner.ceilings["fp32"] = {"flops_per_s": 1e12, "bytes_per_s": 1e11}
        found = {(r["impl"], r["direction"]): r for batch in runner.run(group) for r in batch}
        starts = runner.starts
    assert found.keys() == set(wanted)
    status = {name: (found[name, "fwd"]["status"], found[name, "bwd"]["status"]) for name in names}
    assert status == {
        "dies": ("FAIL", "FAIL"),
        "fastattn-reference": ("ok", "ok"),
        "wrong": ("FAIL", "FAIL"),
        "wrong_gradient": ("ok", "FAIL"),
        "raises": ("FAIL", "FAIL"),
        "hangs": ("FAIL", "FAIL"),
        "absent": ("refused", "refused"),
        "refuses": ("refused", "refused"),
        "right": ("ok", "ok"),
    }
    assert starts == 3  # one worker died, one hung
    for (name, direction), row in found.items():
        assert set(row) == set(rows.FIELDS)
        timed = row["ms_median"] is not None
        assert timed == (row["status"] == "ok"), (name, direction)
    assert "SIGKILL" in found["dies", "fwd"]["message"]
    assert "no sign of life for 5 s" in found["hangs", "fwd"]["message"]
    assert found["wrong", "fwd"]["message"].startswith("y: ")
    assert found["absent", "fwd"]["message"] == "absent is not installed"
    right, mine = found["right", "fwd"], found["fastattn-reference", "fwd"]
    assert right["error"] <= right["allowed_error"]
    peers = [found[name, "fwd"] for name in ("right", "wrong_gradient")]
    best = min(peers, key=lambda r: r["ms_median"])
    assert mine["best_peer"] == best["impl"]
    assert mine["ratio_best"] == pytest.approx(best["ms_median"] / mine["ms_median"])
    assert mine["gbps"] == pytest.approx(mine["bytes"] / mine["ms_median"] / 1e6)
    assert mine["roof"] == pytest.approx(mine["gbps"] / 100, rel=1e-6)
    assert mine["source_digest"] and right["source_digest"] is None
    assert mine["threads"] == 1 and mine["gpu"] is None and mine["clock"] == "wall"


@pytest.mark.slow
def test_candidates_that_keep_ending_workers_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "misbehaving.py"
    path.write_text(PEERS)
    settings = Settings("cpu", threads=1, plan=TINY, peer_files=(path,))
    found = []
    with Runner(settings, tmp_path / "worker.log") as runner:
        runner.ceilings["fp32"] = {}
        for workload in ("64x512", "2048x512", "512x4096"):
            group = Group("layer_norm", workload, "fp32", "cpu", (("dies", "fwd"),))
            found += [row for batch in runner.run(group) for row in batch]
        assert runner.starts == 2
    assert [r["status"] for r in found] == ["FAIL", "FAIL", "skipped"]
    assert found[2]["message"] == "ended 2 workers before"


def test_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "misbehaving.py"
    path.write_text(PEERS)
    status = run.main(
        ["--device", "cpu", "--out", str(tmp_path / "out"), "--quick", "--op", "layer_norm",
         "--threads", "1", "--dtype", "fp32", "--peer", str(path),
         "--match", "fwd-2048x512.*-(wrong|right|fastattn-cpu)$"]
    )  # fmt: skip
    text = capsys.readouterr().out
    found = list(rows.read([tmp_path / "out" / "results.jsonl"]))
    statuses = {r["impl"]: r["status"] for r in found}
    assert statuses.pop("fastattn-cpu") in ("ok", "refused")  # refused where it is not built
    assert statuses == {"wrong": "FAIL", "right": "ok", "absent": "absent"}
    assert "absent: absent (layer_norm) is not installed" in text
    assert "FAIL layer_norm-fwd-2048x512-fp32-wrong: y: slice" in text
    assert "ceilings fp32" in text
    assert status == 0, text  # a failing peer is not our failure


def test_pytest_benchmark_carries_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "misbehaving.py"
    path.write_text(PEERS)
    out = tmp_path / "benchmark.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks/test_layer_norm.py", "--quick", "-q", "-p",
         "no:xdist", "-p", "no:cacheprovider", "--device", "cpu", "--peer", str(path), "-k",
         "layer_norm-fwd-2048x512-fp32 and (eager or wrong or right) and not add_layer_norm",
         f"--benchmark-json={out}"],
        cwd=ROOT, capture_output=True, text=True, env=_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed, 1 skipped" in done.stdout  # eager, right, wrong_gradient; wrong is skipped
    benchmarks = json.loads(out.read_text())["benchmarks"]
    assert len(benchmarks) == 3
    for each in benchmarks:
        row = each["extra_info"]
        assert row["status"] == "ok" and set(row) == set(rows.FIELDS)
        assert each["name"].endswith(f"[layer_norm-fwd-2048x512-fp32-{row['impl']}]")
        assert each["stats"]["median"] == pytest.approx(row["ms_median"] / 1e3)
        assert each["stats"]["rounds"] == len(row["ms_rounds"])


# -- tuning ----------------------------------------------------------------------------------------
TUNING = """
import sys
import torch
from benchmarks import tune
from benchmarks.tune_rows import NORMS, FfnTask, NormTask

tune._milliseconds = lambda call, budget_ms: call() is None or 1.0
tasks = [NormTask(d, op, 9, 96, "fp32") for op in NORMS for d in ("fwd", "bwd")]
tasks += [FfnTask(d, 8, 16, a, "fp32") for d in ("fwd", "bwd") for a in ("relu", "swiglu")]
for task in tasks:
    case, config = task.make("cpu"), tune.candidates(task, "sm_90")[0]
    row = {}
    tune.measure(task, config, case, task.peer(case), 1.0, row)
    assert row["status"] == "ok" and row["rate"] > 0, (task, row)
    assert tune.describe(config)
    launch = type(task).launch
    type(task).launch = lambda *args: (launch(*args), case.results[0][0, :8].mul_(1.01))
    row = {}
    tune.measure(task, config, case, None, 1.0, row)
    type(task).launch = launch
    assert row["status"] == "wrong", (task, row)
"""


def test_tuning_of_norms_and_ffn_times_only_what_is_right() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TUNING], capture_output=True, text=True, cwd=ROOT,
        env=_environment(TRITON_INTERPRET="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_tuning_of_lengths_starts_from_the_row_with_edges() -> None:
    from fastattn.ops.attention.config_bwd import bwd_config

    for feature, edges in (("plain", False), ("lengths", True), ("both_lengths", True)):
        task = AttentionTask("bwd", feature, 128, 4096, 16384, 2048, "bf16")
        shipped = bwd_config("sm_90", torch.bfloat16, 128, 128, edges, False)
        assert tune.candidates(task, "sm_90")[0] == shipped


def test_tuning_lists_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", "attention", "layer_norm", "ffn", "--direction", "fwd", "bwd"]
    assert tune.main([*arguments, "--arch", "sm_90", "--list", "--shape", "4096x768"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for task in ("bwd causal D64", "layer_norm fwd 4096x768", "ffn bwd 4096x768 gelu"):
        assert sum(line.startswith(task) for line in lines) >= 1
    assert len(lines) == len(set(lines)) > 100


# -- selection -------------------------------------------------------------------------------------
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_quick_runs_show_every_op(device_type: str) -> None:
    quick = cases.groups(device_type, quick=True)
    assert {g.op for g in quick} == set(cases.ops())
    everything = cases.groups(device_type)
    assert len(quick) <= 16 and len(quick) < len(everything)
    names = [name for group in everything for name in group.cases]
    assert len(names) == len(set(names))
    # Every prefix of the spread order covers every op.
    assert {g.op for g in cases.spread(everything)[:16]} == set(cases.ops())


def test_selection_by_name() -> None:
    (group,) = cases.groups(
        "cuda", match="attention-bwd-b1_h16_s16384_d128_causal-bf16-sdpa-cudnn$"
    )
    assert group.wanted == (("sdpa-cudnn", "bwd"),)
    assert group.cases == ["attention-bwd-b1_h16_s16384_d128_causal-bf16-sdpa-cudnn"]
    reference = "attention-fwd-b64_h8_s512_d64-bf16-fastattn-reference"
    assert not any(reference in g.cases for g in cases.groups("cuda"))  # only when asked for
    assert any(reference in g.cases for g in cases.groups("cuda", match="fastattn-reference"))
    assert not cases.groups("cpu", match="no such case")


# -- report ----------------------------------------------------------------------------------------
def _synthetic_rows() -> list[Row]:
    environment = {
        "gpu": "Example GPU",
        "cpu": "Example CPU",
        "threads": 4,
        "torch": "2",
        "triton": "3",
    }
    ceiling = {"flops_per_s": 8e14, "bytes_per_s": 4e12}
    found: list[Row] = []
    for direction in ("fwd", "bwd"):
        for D in (64, 128):
            for causal in (False, True):
                for S in (512, 2048, 8192):
                    batch = []
                    for n, name in enumerate(("fastattn-triton", "sdpa-cudnn", "sdpa-flash")):
                        workload = f"s{S}_d{D}" + "_causal" * causal
                        shape = {"q": [1, 256 // D, S, D]}
                        features = ["causal"] if causal else []
                        flops = 4e11 * (S / 8192) ** 0.2
                        batch.append(
                            _synthetic("attention", direction, workload, name, 1.0 + 0.1 * n, shape,
                                       features, flops)
                        )  # fmt: skip
                    found += rows.complete(batch, environment, ceiling)
    for workload in ("32768x512", "32768x4096"):
        batch = [_synthetic("layer_norm", "fwd", workload, name, ms, {"x": [4, 4]}, [], bytes_=2e9)
                 for name, ms in (("fastattn-triton", 0.6), ("eager", 1.2))]  # fmt: skip
        wrong = _synthetic("layer_norm", "fwd", workload, "compile", 0.0, {"x": [4, 4]}, [])
        wrong = {**wrong, "status": "FAIL", "message": "y: slice [3]: error 2", "ms_median": None}
        found += rows.complete([*batch, wrong], environment, ceiling)
    return found


def _synthetic(
    op: str,
    direction: str,
    workload: str,
    implementation: str,
    ms: float,
    shape: dict[str, Any],
    features: list[str],
    flops: float = 0.0,
    bytes_: float = 0.0,
) -> Row:
    return {
        "op": op, "direction": direction, "workload": workload, "shape": shape, "dtype": "bf16",
        "features": features, "impl": implementation, "status": "ok", "message": "", "flops": flops,
        "bytes": bytes_, "ms_median": ms, "ms_p10": ms, "ms_p90": ms,
        "clocks_mhz": [1900.0, 1980.0],
    }  # fmt: skip


def test_report_renders(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.jsonl"
    synthetic = _synthetic_rows()
    rows.append(path, synthetic[:20])
    rows.append(path, synthetic[10:])  # rows of the same case replace each other
    assert len(list(rows.read([path]))) == len(synthetic)
    assert report.main([str(path)]) == 0
    folder = tmp_path / "report"
    text = (folder / "report.md").read_text()
    assert "Example GPU" in text and "SM clock 1900 to 1980 MHz" in text
    assert "matrix product 800 TFLOP/s, copy 4000 GB/s" in text
    assert "- FAIL layer_norm fwd 32768x512 bf16 compile: y: slice [3]: error 2" in text
    # 4e11 FLOPs in 1 ms; the best peer takes 1.1 ms.
    assert "| s8192_d64 | **400** (×1.10) | 364 | 333 |" in text
    assert "| 32768x512 | **3333** (×2.00) | 1667 | FAIL |" in text
    images = ("attention_bf16_ratios", "attention_fwd_bf16_lengths", "attention_bwd_bf16_lengths",
              "layer_norm_fwd_bf16_bars")  # fmt: skip
    for name in images:
        assert f"({name}.svg)" in text
        svg = (folder / f"{name}.svg").read_text()
        assert "<svg" in svg
        assert (folder / f"{name}.png").stat().st_size > 5000


def test_report_in_one_file(tmp_path: Path) -> None:
    """Tables and pictures in one page that refers to nothing outside itself."""
    pytest.importorskip("matplotlib")
    path, page = tmp_path / "results.jsonl", tmp_path / "report.html"
    found = _synthetic_rows()
    absent = rows.absent("attention", "fa3", "fa3 is not installed")
    found += rows.complete([absent], {"gpu": "Example GPU", "cpu": "Example CPU"}, None)
    for row in found:
        if row["op"] == "attention" and row["status"] == "ok":
            row |= {"peak_bytes": 2**20 * row["shape"]["q"][2], "bytes": 1e9}
    step = [
        _synthetic("transformer", "step", "d512", name, 2.0, {"src": [1]}, [])
        | {"positions": 1000, "real_tokens": 1000, "peak_bytes": 2**30}
        for name in ("fastattn", "torch-eager")
    ]
    found += rows.complete(step, {"gpu": "Example GPU", "cpu": "Example CPU"}, None)
    rows.append(path, found)
    assert report.main([str(path), "--html", str(page)]) == 0
    text = page.read_text()
    assert "fa3 is not installed" in text and "not measured" not in text
    assert "<td>s8192_d64</td><td><b>400</b> (×1.10)</td><td>364</td><td>333</td>" in text
    for title in ("roofline", "memory of attention", "memory of the transformer",
                  "our best against the best peer", "attention against the best peer"):  # fmt: skip
        assert title in text, title
    assert "<svg" in text and not re.search(r'(src|href)="(?!#|data:)', text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)
    assert set(tmp_path.iterdir()) == {path, page}


def test_stale_figures_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    rows.append(path, _synthetic_rows())
    assert report.main([str(path), "--stale"]) == 0
    assert "of the sources at hand" in capsys.readouterr().out
    digest = rows.source_digest
    changed = {"attention": "0123456789ab"}
    for module in (rows, grids):
        monkeypatch.setattr(module, "source_digest", lambda op: changed.get(op) or digest(op))
    assert report.main([str(path), "--stale"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("attention fastattn-triton on Example GPU: 24 of 24 figures")
    assert line.endswith(f"{digest('attention')}, now 0123456789ab")
    table = report.table(grids.grids(rows.read([path]))[0])[-1]
    assert isinstance(table, report.Table) and "†" in table.lines[0][1]


def test_rows_of_record_are_whole_and_in_the_documents() -> None:
    """What is kept in benchmarks/results has every field, no failure of ours, and a machine's
    name; the README holds what the report makes of it.
    """
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    for path in paths:
        found = list(rows.read([path]))
        assert found
        for row in found:
            assert set(row) == set(rows.FIELDS), path
            assert row["gpu"] or row["cpu"], path
            # A peer may miss the budget, as torch's bf16 gradients of parameters do; ours may not.
            assert row["status"] != "FAIL" or not row["impl"].startswith("fastattn"), path
    readme = (ROOT / "README.md").read_text()
    if paths:
        assert report.updated(readme, list(rows.read(paths))) == readme
    else:
        assert f"{report._BEGIN}None are kept yet.\n{report._END}" in readme


def test_summary_is_written_between_the_marks(tmp_path: Path) -> None:
    path, document = tmp_path / "results.jsonl", tmp_path / "README.md"
    rows.append(path, _synthetic_rows())
    document.write_text(f"Before\n{report._BEGIN}old\n{report._END}After\n")
    for _ in range(2):
        assert report.main([str(path), "--update", str(document)]) == 0
        text = document.read_text()
        assert text.startswith(f"Before\n{report._BEGIN}Example GPU, torch 2: the best peer's")
        assert text.endswith(f"|\n{report._END}After\n") and "old" not in text
        assert "| attention, forward, bf16 | 12 | **1.10** | 1.10 | 1.10 | sdpa-cudnn |" in text
        assert "| layer_norm, forward, bf16 | 2 | **2.00** | 2.00 | 2.00 | eager |" in text
    document.write_text("no marks")
    with pytest.raises(ValueError, match="figures: begin"):
        report.updated(document.read_text(), [])


def test_rows_refuse_unknown_fields() -> None:
    bad = _synthetic("ffn", "fwd", "w", "eager", 1.0, {}, []) | {"speed": 3}
    with pytest.raises(ValueError, match="speed"):
        rows.complete([bad], {}, None)


def test_gpu_part_needs_nothing_but_torch(tmp_path: Path) -> None:
    """The plain runner works where pytest, rich and matplotlib are absent."""
    script = tmp_path / "without.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        for name in ("pytest", "rich", "matplotlib"):
            sys.modules[name] = None
        from benchmarks import run, worker
        raise SystemExit(run.main(["--device", "cuda", "--quick", "--list"]))
    """)
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True,
        env=_environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "attention-fwd-b8_h16_s2048_d128-bf16-sdpa-cudnn" in done.stdout.splitlines()
