"""Tuning starts from the shipped config and times only correct candidates."""

# ruff: noqa: E402  (where Triton is missing, none of the kernels can be imported)

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from subprocesses import environment, python_output

triton = pytest.importorskip("triton")

from benchmarks import tune
from benchmarks.cases import DTYPES
from benchmarks.rows import ROOT
from benchmarks.tune_task import FEATURES, NORMS, Task, compile_kernels
from fastattn.ops import _env
from fastattn.ops.attention.triton.bwd_config import bwd_config
from fastattn.ops.attention.triton.fwd_config import Features, forward_config
from fastattn.ops.attention.triton.tiles import split_width
from fastattn.testing import lines

TUNING = """
import torch
from benchmarks import tune, tune_task
from benchmarks.tune_task import NORMS, Task

CPU = torch.device("cpu")
tasks = [Task(op, d, "fp32", (9, 96)) for op in NORMS for d in ("fwd", "bwd")]
tasks += [Task("ffn", "fwd", "fp32", (8, 16), a) for a in ("relu", "swiglu")]
launcher = Task.launcher
for task in tasks:
    config = task.candidates("sm_90")[0]
    row = tune.measure(task, config, 1.0, CPU)
    assert row["status"] == "ok" and row["rate"] > 0 and row["peer_rate"] > 0, (task, row)

    def wrong(task, call, results):
        launch = launcher(task, call, results)
        return lambda config: (launch(config), [x.flatten()[:8].mul_(1.01) for x in results])

    Task.launcher = wrong
    row = tune.measure(task, config, 1.0, CPU)
    Task.launcher = launcher
    assert row["status"] == "wrong", (task, row)
"""


@pytest.mark.slow
def test_tuning_of_norms_and_ffn_times_only_correct_candidates() -> None:
    python_output("-c", TUNING, cwd=ROOT, env=environment(TRITON_INTERPRET="1"))


def test_tuning_starts_from_what_ships() -> None:
    cases = ((64, "plain", "bf16"), (80, "mask", "fp16"), (128, "bias", "fp32"))
    for D, feature, dtype in (*cases, (96, "causal", "bf16"), (192, "plain", "fp16")):
        task = Task("attention", "fwd", dtype, (2, 16, 8192, D), feature)
        found = task.candidates("sm_90")
        features = Features(dense=feature in ("mask", "bias"))
        assert found[0] == forward_config("sm_90", DTYPES[dtype], D, D, 8192, features)
        assert len(set(found)) == len(found) > 5
        assert len({tune.describe(config) for config in found}) == len(found)
        # Head dims of two tiles are also tried as one padded tile; the rows of fp32 include it.
        padded = D in (80, 96, 192) or dtype == "fp32"
        assert any(config.whole for config in found) == padded


def test_tuning_of_lengths_starts_from_the_row_with_edges() -> None:
    for feature, edges in (("plain", False), ("lengths", True), ("both_lengths", True)):
        task = Task("attention", "bwd", "bf16", (4, 16, 4096, 128), feature)
        shipped = bwd_config("sm_90", torch.bfloat16, 128, 128, edges, False)
        assert task.candidates("sm_90")[0] == shipped


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_tuning_of_fp32_pads_head_dims_both_ways_and_tries_nothing_twice(arch: str) -> None:
    for D in (40, 64, 80, 128, 144, 256):
        found = Task("attention", "fwd", "fp32", (4, 16, 4096, D), "plain").candidates(arch)
        tilings = [(config.widths(D), replace(config, whole=False)) for config in found]
        assert len(set(tilings)) == len(tilings), D
        if split_width(D)[1] > 0:
            assert replace(found[0], whole=not found[0].whole) in found
        # The config shipped for other head dims may be the best for this one.
        for other in (64, 128, 256):
            row = forward_config(arch, torch.float32, other, other, 4096, Features())
            assert (row.widths(D), replace(row, whole=False)) in tilings, (D, other)


@pytest.mark.parametrize(
    ("op", "shape", "feature"),
    [("attention", (2, 4, 256, 64), feature) for feature in FEATURES]
    + [(op, (256, 512), "") for op in NORMS] + [("ffn", (256, 64), "gelu")],
)  # fmt: skip
def test_candidates_are_compiled_without_running(op, shape, feature, monkeypatch):
    compiled = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        assert warmup and tensors and all(x.is_meta for x in tensors)
        compiled.append(self)

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    for direction in ("fwd",) if op == "ffn" else ("fwd", "bwd"):
        task = Task(op, direction, "bf16", shape, feature)
        compiled.clear()
        compile_kernels(task, task.candidates("sm_90")[0])
        assert len(compiled) >= (2 if op == "attention" and direction == "bwd" else 1)


def test_tuning_lists_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", "attention", "layer_norm", "ffn", "--direction", "fwd", "bwd"]
    assert tune.main([*arguments, "--arch", "sm_90", "--list", "--shape", "4096x768"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for task in (
        "attention bwd b2_h32_s8192_d64_causal",
        "layer_norm fwd 4096x768",
        "ffn fwd 4096x768_gelu",
    ):
        assert sum(line.startswith(task) for line in lines) >= 1
    assert len(lines) == len(set(lines)) > 100


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], mock.Mock]:
    """Arguments that tune two candidates on a pretended GPU, which measures each as told."""
    gpu = mock.Mock()

    def run_isolated(function: Any, cases: Any, **_: Any) -> Iterator[tuple[int, Any]]:
        for i, job in enumerate(cases):
            yield i, 0.0 if function is tune.compile_ahead else gpu.measure(job)

    monkeypatch.setattr(tune, "run_isolated", run_isolated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_env, "device_name", lambda device: "Example GPU")
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_90")
    arguments = ["--op", "layer_norm", "--shape", "4x8", "--most", "2", "--arch", "sm_90"]
    return [*arguments, "--out", str(tmp_path)], gpu


@pytest.mark.parametrize("status", ["ok", "wrong"])
def test_tuning_without_a_correct_candidate_fails(status, tmp_path, tuned):
    arguments, gpu = tuned
    gpu.measure.side_effect = lambda *job: _measured(status)
    assert tune.main(arguments) == (0 if status == "ok" else 1)
    rows = (tmp_path / "tune.jsonl").read_text().splitlines()
    assert [json.loads(row)["status"] for row in rows] == [status] * 2


def _measured(status: str) -> dict[str, Any]:
    return {"status": status, "message": "", "ms": 1.0, "rate": 1.0, "unit": "GB/s"}


def test_tuning_continues_where_it_was_interrupted(
    tmp_path: Path, tuned: tuple[list[str], mock.Mock], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    arguments, gpu = tuned
    gpu.measure.side_effect = [_measured("ok"), KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt):
        tune.main(arguments)
    gpu.measure.side_effect = lambda *job: _measured("ok")
    assert tune.main([*arguments, "--resume"]) == 0
    assert gpu.measure.call_count == 3
    assert "1 of 2 candidates were measured before" in capsys.readouterr().out
    rows = [json.loads(row) for row in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and rows[0]["config"] != rows[1]["config"]
    assert tune.main([*arguments, "--resume"]) == 0 and gpu.measure.call_count == 3
    assert "2 timed, 0 failed" in capsys.readouterr().out
    monkeypatch.setattr(lines, "kernels", lambda backend: "other")
    assert tune.main([*arguments, "--resume"]) == 0 and gpu.measure.call_count == 5


def test_nothing_is_tuned_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["--op", "layer_norm", "--direction", "fwd", "bwd", "--out", str(tmp_path)]
    assert tune.main(arguments) == 3
    assert "nothing was tuned: there is no CUDA GPU" in capsys.readouterr().err
    assert json.loads((tmp_path / "tune.jsonl").read_text())["status"] == "refused"
