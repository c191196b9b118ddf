"""The benchmarks check results before timing, survive failing candidates, and report rows."""

import json
import queue
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from call_recorder import CallRecorder
from subprocesses import environment, python_output
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cases, generation, implementations, model, rows, run
from benchmarks.cases import Group
from benchmarks.generation import Decoded, DecodeSize, GenerationBenchmark
from benchmarks.implementations import Implementation, Task, can_import
from benchmarks.model import MODEL, ModelBenchmark, _set_dropout
from benchmarks.op_benchmark import OpBenchmark, _checked_rows
from benchmarks.rows import ROOT
from benchmarks.runner import Runner, Settings
from fastattn.ops._select import explaining
from fastattn.ops.attention.spec_workloads import SCORE_CHANGES, packed_workload, padded_workload
from fastattn.testing.spec import Inputs, Workload, all_specs
from fastattn.testing.timing import Plan

CPU = torch.device("cpu")
PEERS = ROOT / "tests/support/failing_peers.py"
TINY = Plan(round_ms=0.2, rounds=3, min_rounds=2, budget_ms=50.0)


# -- workloads -------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "window": 5}, {"padded": "keys"}, {"padded": "both"},
    {"causal": True, "padded": "both"}, {"M": 1, "K": 2},
], ids=str)  # fmt: skip
def test_flops_of_attention_workloads(options: dict[str, Any]) -> None:
    """4 D per head and pair; causal pairs are half of the square, and half of the diagonal."""
    workload = _attention_workload(**options)
    inputs = workload.make(CPU, torch.float32, torch.Generator())
    B, H, M, D = inputs["q"].shape
    N = inputs["k"].shape[2]
    rows, columns = torch.arange(M)[:, None], torch.arange(N)
    pairs = torch.ones(B, M, N, dtype=torch.float64)
    if "window" in inputs:
        pairs *= (columns <= rows) & (columns >= rows - inputs["window"][0])
    elif inputs["causal"]:
        pairs = pairs.tril(-1) + 0.5 * pairs.tril().triu()
    if "key_lengths" in inputs:
        pairs *= columns < inputs["key_lengths"][:, None, None]
    if "query_lengths" in inputs:
        pairs *= rows < inputs["query_lengths"][:, None, None]
    assert workload.flops == 4 * H * D * pairs.sum().item()
    assert workload.backward_flops == 2.5 * workload.flops


def test_flops_of_a_model() -> None:
    """As torch counts a step; attention's backward, which recomputes its scores, is 2.5 times its
    forward, and causal pairs count half.
    """
    size = model.Size(d=16, heads=2, ff=24, layers=3, B=2, S=5)
    workload = model._workload(size, ("cpu",))
    inputs = workload.make(CPU, torch.float32, torch.Generator())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.call(size.module(nn.Transformer, CPU, 0.0), inputs)
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    products = counter.get_total_flops() - attention
    # Three attentions in an encoder and a decoder layer, one of them causal.
    assert workload.flops == 3 * products + 3.5 * attention * 2.5 / 3


def test_summary_of_a_run() -> None:
    """The mean of ratios is geometric: twice as fast and half as fast average to 1."""
    batch = [
        {"op": "ffn", "direction": "fwd", "dtype": "bf16", "impl": "fastattn-cpu", "status": status}
        | {"ratio_best": ratio}
        for status, ratio in (("ok", 0.5), ("ok", 2.0), ("FAIL", None), ("refused", None))
    ]
    _, found = run.summary(batch).splitlines()
    assert found.split() == ["ffn", "fwd", "bf16", "fastattn-cpu", "2", "1", "1",
                             "1.00", "0.50", "2.00"]  # fmt: skip


# -- the gate --------------------------------------------------------------------------------------
def _attention_workload(**options: Any) -> Workload:
    return padded_workload("tiny", 2, 4, 33, 16, ("cpu",), **options)


def _candidate(function: Any, **options: Any) -> Implementation:
    return Implementation("candidate", ("attention",), lambda task: function, **options)


def _reference(inputs: Inputs) -> Any:
    return cases.specs()["attention"].function(**inputs, backend="reference")


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"K": 2, "padded": "both"}, {"mask": "float HMN"},
    {"mask": "bool BMN"}, {"dropout_p": 0.2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("sliced", [False, True], ids=["whole", "sliced"])
def test_check_covers_what_is_timed(options, sliced, monkeypatch):
    if sliced:
        monkeypatch.setattr("benchmarks.op_benchmark._WHOLE", 1)
    benchmark = OpBenchmark(
        cases.specs()["attention"], _attention_workload(**options), CPU, torch.float32
    )

    def verdict(function: Any, direction: str) -> Any:
        candidate = _candidate(function)
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        return benchmark.check(candidate, direction)

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

    benchmark = OpBenchmark(
        cases.specs()["attention"], _attention_workload(padded="both"), CPU, torch.float32
    )
    for ignores in (False, True):
        candidate = _candidate(fills_padded_rows, ignores_query_lengths=ignores)
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        assert benchmark.check(candidate, "fwd").ok == ignores
        assert benchmark.check(candidate, "bwd").ok

    def own_dropout(inputs: Inputs) -> Any:
        seed = {"dropout_seed": torch.tensor([99])} if inputs.get("dropout_p") else {}
        return _reference(inputs | seed)

    benchmark = OpBenchmark(
        cases.specs()["attention"], _attention_workload(dropout_p=0.3), CPU, torch.float32
    )
    for draws in (False, True):
        candidate = _candidate(own_dropout, draws_dropout=draws)
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        found = benchmark.check(candidate, "fwd")
        assert found.ok == draws
        assert (found.message == "checked with dropout off") == draws


def test_checked_rows_keep_the_edges() -> None:
    x = torch.arange(40_000.0)[:, None].expand(-1, 16)
    picked = _checked_rows(x)[:, 0]
    assert len(picked) == 2**18 // 16 and len(picked.unique()) == len(picked)
    assert picked[0] == 0 and picked[31] == 31 and picked[-1] == 39_999 and picked[-32] == 39_968
    assert _checked_rows(x[:1000]).shape == (1000, 16)


def test_model_gate() -> None:
    workload = next(w for w in cases.workloads(MODEL) if "cpu" in w.device_types)
    benchmark = ModelBenchmark(workload, CPU, torch.float32)  # type: ignore[arg-type]
    candidates = {c.name: c for c in cases.implementations_of(MODEL, "cpu")}
    for name in ("fastattn", "torch-eager"):
        candidate = candidates[name]
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        found = benchmark.check(candidate, "step")
        assert found.ok, f"{name}: {found.message}"
        benchmark.calls(candidate, "step")[0]()
    module = benchmark.forwards["fastattn"].module
    assert _set_dropout(module, 0.1) == 0.1  # the check restored it
    with torch.no_grad():
        module.encoder.layers[0].norm1.weight[0] += 0.01
    assert not benchmark.check(candidates["fastattn"], "step").ok


def test_packed_gate() -> None:
    workload = packed_workload("tiny", torch.tensor([5, 17, 1]), 2, 16, ("cpu",))
    benchmark = OpBenchmark(cases.specs()["attention_varlen"], workload, CPU, torch.float32)

    def function(inputs: Inputs) -> Any:
        return cases.specs()["attention_varlen"].function(**inputs, backend="reference")

    def one_sequence(inputs: Inputs) -> Any:
        T = inputs["q"].shape[1]
        offsets = torch.tensor([0, T], dtype=torch.int32)
        joined = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        return function(inputs | joined | {"max_seqlen_q": T, "max_seqlen_k": T})

    for f, right in ((function, True), (one_sequence, False)):
        candidate = _candidate(f)
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        assert [benchmark.check(candidate, d).ok for d in ("fwd", "bwd")] == [right, right]
    decode = padded_workload("tiny", 2, 4, 33, 16, ("cpu",), M=1)
    assert cases.directions("attention", decode) == ("fwd",)
    benchmark = OpBenchmark(cases.specs()["attention"], decode, CPU, torch.float32)
    candidate = _candidate(_reference)
    benchmark.build(candidate)
    benchmark.prepare_oracle(candidate)
    assert benchmark.check(candidate, "fwd").ok
    assert len(benchmark.calls(candidate, "fwd")) == 1
    assert benchmark.details(candidate, "fwd")["peak_bytes"] > 0


def test_automatic_choice_is_a_candidate_where_it_may_be_none_of_the_backends() -> None:
    """A bf16 linear layer on the CPU runs torch's op unless a backend is named."""
    workload = next(w for w in cases.workloads("linear") if w.name == "16x256x768")
    benchmark = OpBenchmark(cases.specs()["linear"], workload, CPU, torch.bfloat16)
    found = cases.implementations_of("linear", "cpu")
    [chosen] = [c for c in found if c.name == "fastattn-automatic"]
    assert chosen.is_fastattn
    benchmark.build(chosen)
    benchmark.prepare_oracle(chosen)
    assert benchmark.check(chosen, "fwd").ok and benchmark.check(chosen, "bwd").ok
    assert not [c for c in cases.implementations_of("ffn", "cpu") if c.name == chosen.name]


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_gate(beams: int) -> None:
    """A token other than the likeliest, a wrong log-probability, too few tokens are detected."""
    size = DecodeSize(32, 2, 64, 1, 50, 3, 5, 4, beams)
    workload = generation._workload(size, ("cpu",))
    benchmark = GenerationBenchmark(workload, CPU, torch.float32)
    found = cases.implementations_of(generation.GENERATION, "cpu")
    [fast] = [c for c in found if c.name == "fastattn"]

    def verdict(change: Any) -> Any:
        decode = fast.build(benchmark.task)
        candidate = replace(fast, build=lambda task: lambda inputs: change(decode(inputs)))
        benchmark.build(candidate)
        benchmark.prepare_oracle(candidate)
        return benchmark.check(candidate, "decode")

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
def test_absent_peers_have_rows_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.implementations.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("FASTATTN_FA3_LIBRARY", raising=False)
    absent = cases.absent_peers("cuda")
    assert set(absent) >= {
        "fa2", "fa3", "fa4", "xformers", "liger", "quack", "transformer-engine", "marian"
    }  # fmt: skip
    assert all(why.startswith("is not installed: n") for _, why in absent.values())
    assert absent["fa3"][0] == ("attention", "attention_varlen")
    assert set(cases.absent_peers("cpu")) >= {"ctranslate2", "onnxruntime", "marian"}
    names = {name for g in cases.groups("cuda", every_implementation=True) for name, _ in g.wanted}
    assert not names & absent.keys() and {"sdpa-cudnn", "flex", "eager"} <= names
    monkeypatch.setenv("FASTATTN_FA3_LIBRARY", str(tmp_path / "_C.so"))
    assert "is not at FASTATTN_FA3_LIBRARY" in cases.absent_peers("cuda")["fa3"][1]
    (tmp_path / "_C.so").touch()
    assert "fa3" not in cases.absent_peers("cuda")


def test_modules_are_found_without_importing(tmp_path, monkeypatch):
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


@pytest.mark.parametrize("page", [None, 16])
def test_the_automatic_choice_is_called_without_its_name(page: int | None) -> None:
    workload = padded_workload("tiny", 2, 2, 32, 16, ("cpu",), M=1, page=page)
    inputs = workload.make(CPU, torch.float32, torch.Generator())
    spec = all_specs()["attention"]
    with torch.no_grad(), explaining() as choices:
        spec.function(**inputs)
    for each in implementations.fastattn_backends(spec, "cpu"):
        forward = each.build(Task("attention", workload, CPU, torch.float32, inputs))
        with torch.no_grad(), CallRecorder() as recorder:
            forward(inputs)
        called = [op._overloadname for op, _, _ in recorder.calls]
        assert called == ["default" if each.backend == choices[0].chosen else "backend"]


def test_peers_refuse_what_they_cannot_do() -> None:
    options: list[dict[str, Any]] = [
        {}, {"causal": True}, {"causal": True, "window": 8}, {"mask": "bool BMN"},
        {"mask": "float HMN"}, {"padded": "both"}, {"dropout_p": 0.1}, {"K": 2},
        *[{"causal": True, "scores": scores} for scores in SCORE_CHANGES],
    ]  # fmt: skip
    found: dict[str, list[str]] = {}
    for peer in cases.implementations_of("attention", "cuda"):
        if peer.is_fastattn:
            continue
        for n, each in enumerate(options):
            workload = _attention_workload(**each)
            inputs = workload.make(CPU, torch.bfloat16, torch.Generator())
            task = Task("attention", workload, CPU, torch.bfloat16, inputs)
            reason = peer.why_unsupported(task)
            if reason is not None:
                assert reason.split()[0] in ("has", "takes", "is", "aligns", "writes"), reason
                found.setdefault(peer.name, []).append("-cwmbpdgaskr"[n])
    assert {name: "".join(refused) for name, refused in found.items()} == {
        "contiguous-keys": "-cwmbpdgaskr", "eager": "waskr", "fa2": "mbpaskr", "fa3": "mbpdaskr",
        "fa4": "mbpdaskr", "flex": "wdk", "sdpa-cudnn": "wsk", "sdpa-efficient": "wgsk",
        "sdpa-flash": "wmbpaskr", "sdpa-math": "wsk", "transformer-engine": "wmbpdaskr",
        "xformers": "wmbpgaskr",
    }  # fmt: skip


# -- worker and runner -----------------------------------------------------------------------------
def test_a_candidate_ends_at_the_time_limit() -> None:
    runner = Runner(Settings("cpu"))
    runner.lines = queue.Queue()
    with pytest.raises(Exception, match="no event for 0 s"):
        runner._next_event("candidate", "timing", time.monotonic())


@pytest.mark.slow
def test_failing_candidates_do_not_affect_others(tmp_path: Path) -> None:
    names = ("dies", "fastattn-reference", "wrong", "wrong_gradient", "raises", "hangs", "absent",
             "refuses", "right")  # fmt: skip
    wanted = tuple((name, direction) for name in names for direction in ("fwd", "bwd"))
    group = Group("layer_norm", "64x512", "fp32", "cpu", wanted)
    settings = Settings("cpu", threads=1, plan=TINY, stage_seconds=5.0, peer_files=(PEERS,))
    with Runner(settings, tmp_path / "worker.log") as runner:
        runner.ceilings["fp32"] = {"flops_per_s": 1e12, "bytes_per_s": 1e11}
        found = {(r["impl"], r["direction"]): r for batch in runner.run(group) for r in batch}
        starts = runner.starts
    assert found.keys() == set(wanted)
    status = {name: (found[name, "fwd"]["status"], found[name, "bwd"]["status"]) for name in names}
    assert status == {
        "dies": ("FAIL", "FAIL"), "fastattn-reference": ("ok", "ok"), "wrong": ("FAIL", "FAIL"),
        "wrong_gradient": ("ok", "FAIL"), "raises": ("FAIL", "FAIL"), "hangs": ("FAIL", "FAIL"),
        "absent": ("refused", "refused"), "refuses": ("refused", "refused"), "right": ("ok", "ok"),
    }  # fmt: skip
    assert starts == 3  # one worker crashed, one hung
    for (name, direction), row in found.items():
        assert set(row) == set(rows.FIELDS)
        timed = row["ms_median"] is not None
        assert timed == (row["status"] == "ok"), (name, direction)
    assert "SIGKILL" in found["dies", "fwd"]["message"]
    assert "no event for 5 s" in found["hangs", "fwd"]["message"]
    assert found["wrong", "fwd"]["message"].startswith("y: ")
    assert found["absent", "fwd"]["message"] == "absent is not installed"
    right, reference = found["right", "fwd"], found["fastattn-reference", "fwd"]
    assert right["error"] <= right["allowed_error"]
    peers = [found[name, "fwd"] for name in ("right", "wrong_gradient")]
    best = min(peers, key=lambda r: r["ms_median"])
    assert reference["best_peer"] == best["impl"]
    assert reference["ratio_best"] == pytest.approx(best["ms_median"] / reference["ms_median"])
    assert reference["gbps"] == pytest.approx(reference["bytes"] / reference["ms_median"] / 1e6)
    assert reference["roof"] == pytest.approx(reference["gbps"] / 100, rel=1e-6)
    assert reference["source_digest"] and right["source_digest"] is None
    assert reference["threads"] == 1 and reference["gpu"] is None and reference["clock"] == "cpu"


def test_ceilings_are_measured_again_when_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows above them come last, with the larger rates; a few repetitions are enough."""
    speeds = iter([1e12, 2e12, 1e12, 3e12])
    measured: list[str] = []

    def next_event(self: Runner, *_: Any) -> dict[str, Any]:
        measured.append("ceilings")
        return {"flops_per_s": next(speeds), "bytes_per_s": 1e12}

    def measure(self: Runner, group: Group, *_: Any) -> Any:
        for name, flops in zip(("fast", "slow"), flops_of_run, strict=True):
            yield [
                {"impl": name, "direction": "fwd", "op": "ffn", "status": "ok", "ms_median": 1e3,
                 "flops": flops, "bytes": 1.0, "workload": "w", "dtype": "fp32"}
            ]  # fmt: skip

    for name, stub in (
        ("start", lambda self: None), ("_request", lambda self, do, **_: None),
        ("_next_event", next_event), ("_measure", measure),
    ):  # fmt: skip
        monkeypatch.setattr(Runner, name, stub)
    group = Group("ffn", "w", "fp32", "cpu", (("fast", "fwd"), ("slow", "fwd")))

    def measured_roofs() -> dict[str, float]:
        return {row["impl"]: row["roof"] for batch in runner.run(group) for row in batch}

    with Runner(Settings("cpu")) as runner:
        flops_of_run = (1.5e12, 0.5e12)
        assert measured_roofs() == {"slow": 0.5, "fast": 0.75} and len(measured) == 2
        flops_of_run = (1.9e12, 1e12)
        assert measured_roofs() == {"fast": 0.95, "slow": 0.5} and len(measured) == 2
        flops_of_run = (9e12, 1e12)
        assert measured_roofs() == {"slow": 0.5, "fast": 4.5} and len(measured) == 3
        assert measured_roofs() == {"slow": 0.5, "fast": 3.0} and len(measured) == 4
        # Enough: the figure is above the ceiling, and run.py says so.
        assert measured_roofs() == {"slow": pytest.approx(1 / 3), "fast": 3.0}
        assert len(measured) == 4


def test_busy_share(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(1000, 900), (1200, 950)])
    monkeypatch.setattr(run, "_cpu_times", lambda: next(times))
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    assert run.busy_share() == 0.75
    monkeypatch.undo()
    assert 0.0 <= (run.busy_share(0.01) or 0.0) <= 1.0


@pytest.mark.slow
def test_candidates_that_keep_ending_workers_are_skipped(tmp_path: Path) -> None:
    settings = Settings("cpu", threads=1, plan=TINY, peer_files=(PEERS,))
    found = []
    with Runner(settings, tmp_path / "worker.log") as runner:
        runner.ceilings["fp32"] = {}
        for workload in ("64x512", "2048x512", "512x4096"):
            group = Group("layer_norm", workload, "fp32", "cpu", (("dies", "fwd"),))
            found += [row for batch in runner.run(group) for row in batch]
        assert runner.starts == 2
    assert [r["status"] for r in found] == ["FAIL", "FAIL", "skipped"]
    assert found[2]["message"] == "ended 2 workers before"


def test_command_writes_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "busy_share", lambda: 0.75)
    status = run.main(
        ["--device", "cpu", "--out", str(tmp_path / "out"), "--quick", "--op", "layer_norm",
         "--threads", "1", "--dtype", "fp32", "--peer", str(PEERS),
         "--match", "fwd-2048x512.*-(wrong|right|fastattn-cpu)$"]
    )  # fmt: skip
    text, warnings = capsys.readouterr()
    found = list(rows.read([tmp_path / "out" / "results.jsonl"]))
    assert "warning: other processes took 75 % of the CPUs' time" in warnings
    assert {row["busy"] for row in found if row["status"] == "ok"} == {0.75}
    statuses = {r["impl"]: r["status"] for r in found}
    assert statuses.pop("fastattn-cpu") in ("ok", "refused")  # refused where it is not built
    assert statuses == {"wrong": "FAIL", "right": "ok", "absent": "absent"}
    assert "absent: absent (layer_norm) is not installed" in text
    assert "FAIL layer_norm-fwd-2048x512-fp32-wrong: y: slice" in text
    assert "ceilings fp32" in text
    assert status == 0, text  # a failing peer is no failure of fastattn


@pytest.mark.slow
def test_pytest_benchmark_has_the_rows(tmp_path: Path) -> None:
    out = tmp_path / "benchmark.json"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "--quick", "-q", "-p",
         "no:xdist", "-p", "no:cacheprovider", "--device", "cpu", "--peer", str(PEERS), "-k",
         "layer_norm-fwd-2048x512-fp32 and (eager or wrong or right) and not add_layer_norm",
         f"--benchmark-json={out}"],
        cwd=ROOT, capture_output=True, text=True, env=environment(),
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


# -- selection -------------------------------------------------------------------------------------
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_quick_runs_show_every_op(device_type: str) -> None:
    quick = cases.groups(device_type, quick=True)
    everything = cases.groups(device_type)
    # A linear layer on a GPU runs torch's op.
    expected = set(cases.ops()) - ({"linear"} if device_type == "cuda" else set())
    assert {g.op for g in quick} == {g.op for g in everything} == expected
    assert len(quick) <= 21 and len(quick) < len(everything)
    names = [name for group in everything for name in group.cases]
    assert len(names) == len(set(names))
    # Every prefix of the spread order covers every op.
    assert {g.op for g in cases.spread(everything)[:18]} == expected


def test_selection_by_name() -> None:
    (group,) = cases.groups(
        "cuda", match="attention-bwd-b1_h16_s16384_d128_causal-bf16-sdpa-cudnn$"
    )
    assert group.wanted == (("sdpa-cudnn", "bwd"),)
    assert group.cases == ["attention-bwd-b1_h16_s16384_d128_causal-bf16-sdpa-cudnn"]
    reference = "attention-fwd-b64_h8_s512_d64-bf16-fastattn-reference"
    assert not any(reference in g.cases for g in cases.groups("cuda"))  # only on request
    assert any(reference in g.cases for g in cases.groups("cuda", match="fastattn-reference"))
    assert not cases.groups("cpu", match="no such case")


def test_a_run_continues_another(tmp_path: Path) -> None:
    """Directions without a current row of every case remain, with all of their cases."""
    names = (("eager", "fwd"), ("fastattn-cpu", "fwd"), ("eager", "bwd"), ("fastattn-cpu", "bwd"))
    groups = [Group("layer_norm", w, "fp32", "cpu", names) for w in ("64x128", "64x256", "64x512")]
    machine = {"gpu": None, "cpu": "a CPU", "threads": 1}
    machine |= {"torch": "2", "triton": "3", "cuda": "absent"}
    file = tmp_path / "results.jsonl"

    def write(workload: str, name: str, direction: str, **other: Any) -> None:
        row = {"op": "layer_norm", "workload": workload, "impl": name, "direction": direction}
        row |= {"dtype": "fp32", "status": "ok"}
        (whole,) = rows.complete([row | {"status": "skipped"}], machine, None)
        rows.append(file, [whole | row | other])

    for implementation, direction in names:
        write("64x128", implementation, direction)
    with file.open("a") as torn:
        torn.write('{"op": "layer_no')  # as a kill leaves it
    write("64x256", "eager", "fwd")
    write("64x256", "fastattn-cpu", "fwd", source_digest="of other sources")
    write("64x256", "eager", "bwd", status="FAIL")
    write("64x256", "fastattn-cpu", "bwd", status="refused")
    write("64x512", "eager", "fwd", status="skipped")
    write("64x512", "eager", "bwd", cpu="another CPU")
    write("64x512", "fastattn-cpu", "bwd", threads=2)
    before, left = run._continued(file, groups, machine)
    assert [(group.workload, group.wanted) for group in left] == [
        ("64x256", names[:2]), ("64x512", names)
    ]  # fmt: skip
    assert len(list(rows.read_all(file))) == 11
    assert [(row["workload"], row["status"]) for row in before] == [
        *[("64x128", "ok")] * 4, ("64x256", "FAIL"), ("64x256", "refused")
    ]  # fmt: skip


def test_the_gpu_part_needs_only_torch(tmp_path: Path) -> None:
    """`benchmarks.run` works without pytest, rich and matplotlib."""
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
    shown = python_output(script, env=environment(PYTHONPATH=str(ROOT)))
    assert "attention-fwd-b8_h16_s2048_d128-bf16-sdpa-cudnn" in shown.splitlines()
