"""The benchmarks judge before they time, survive what candidates do, report what rows say."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cases, report, rows, run
from benchmarks.cases import Group
from benchmarks.implementations import Implementation
from benchmarks.model import MODEL, ModelSubject, _set_dropout
from benchmarks.rows import ROOT, Row
from benchmarks.runner import Runner, Settings
from benchmarks.subject import OpSubject, _judged_rows
from fastattn.testing.spec import Inputs, Workload
from fastattn.testing.timing import Plan, Timing, copies_beyond_cache, time_side_by_side

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
    # Preparation in order, then a warm-up round and four rounds, A B A B.
    assert announced == ["a", "b"] + ["a", "b"] * 5
    a, b = results["a"], results["b"]
    assert isinstance(a, Timing) and isinstance(b, Timing)
    assert len(a.seconds) == len(b.seconds) == 4
    assert a.launches % 2 == 0 and log.count("a0") == log.count("a1")
    rounds = log[-(a.launches + b.launches) :]
    assert set(rounds[: a.launches]) == {"a0", "a1"} and set(rounds[a.launches :]) == {"b0"}


def test_rounds_are_long_enough_and_slow_candidates_get_fewer() -> None:
    plan = Plan(round_ms=2.0, rounds=50, min_rounds=3, budget_ms=40.0)
    results = time_side_by_side(
        {"fast": [lambda: sum(range(1000))], "slow": [lambda: time.sleep(0.02)]}, CPU, plan
    )
    fast, slow = results["fast"], results["slow"]
    assert isinstance(fast, Timing) and isinstance(slow, Timing)
    assert fast.launches > 10  # some 10 us each
    assert slow.launches == 1
    assert len(slow.seconds) == 3
    assert min(slow.seconds) >= 0.02


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
    from fastattn.ops.attention.spec import _workload

    return _workload("tiny", 2, 4, 33, 16, ("cpu",), **options)


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
    assert statuses == {"wrong": "FAIL", "right": "ok"}
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
