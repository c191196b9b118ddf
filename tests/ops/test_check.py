"""The checks of `fastattn check`: properties that broken backends lack, the report, the record."""

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cpu_library import ISAS
from torch import Tensor

from fastattn import cli
from fastattn.ops import _env, _native, _verified
from fastattn.ops._op import OPS
from fastattn.testing import all_specs, check, isolation, lines, report
from fastattn.testing.oracle import Oracle, output_gradients
from fastattn.testing.properties import fill_positions

SPECS = all_specs()
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


# -- properties ------------------------------------------------------------------------------------
def _oracle(op: str, sample: str) -> Oracle:
    [found] = [s for s in SPECS[op].samples if s.name == sample]
    return Oracle(SPECS[op], found, torch.float32)


def _judge(op: str, sample: str, backend: str = "reference") -> list[check.Row]:
    return check.check_sample(_oracle(op, sample), backend, CPU)


def _break(monkeypatch: pytest.MonkeyPatch, op: str, backend: str, change: Any) -> None:
    """Calls change(args, results) after the launcher of one torch op."""
    launch = OPS[op]._launcher(backend)

    def broken(args: Any) -> Any:
        results = launch(args)
        change(args, results)
        return results

    monkeypatch.setitem(OPS[op]._launchers, backend, broken)


def _last_bit(x: Tensor) -> None:
    """Larger by one unit in the last place, which is within every budget."""
    x.copy_(torch.nextafter(x, torch.full((), torch.inf)))


def test_properties_apply_to_samples_that_can_show_them() -> None:
    """batch applies to more than one entry, padding to samples with dead positions."""
    kinds = {
        (op, sample): [row.kind for row in _judge(op, sample) if row.kind != "value"]
        for op, sample in [
            ("attention", "plain"), ("attention", "d80"), ("attention", "both_lengths"),
            ("attention", "key_lengths_zero"), ("attention_varlen", "slack"),
            ("layer_norm", "model"), ("layer_norm", "one_row"), ("ffn", "three_dimensions"),
        ]
    }  # fmt: skip
    assert kinds == {
        ("attention", "plain"): ["rerun", "batch"],
        ("attention", "d80"): ["rerun"],
        ("attention", "both_lengths"): ["rerun", "batch", "padding"],
        ("attention", "key_lengths_zero"): ["rerun", "batch", "padding"],
        ("attention_varlen", "slack"): ["rerun", "batch", "padding"],
        ("layer_norm", "model"): ["rerun", "batch"],
        ("layer_norm", "one_row"): ["rerun"],
        ("ffn", "three_dimensions"): ["rerun", "batch"],
    }


def _faults(rows: list[check.Row]) -> dict[tuple[str, str], str]:
    return {(row.kind, row.result): row.message for row in rows if row.status != "ok"}


def _poison_last_row(args: Any, results: Any) -> None:
    results[0][-1] = OPS["rms_norm_fwd"].allocate(args)[0][-1]


def _raise(error: Exception) -> Callable[..., None]:
    def change(args: Any, results: Any) -> None:
        raise error

    return change


def _tiny_gradient_of_dead_pairs(args: Any, results: Any) -> None:
    """Within the budget."""
    if bool(args[0].isnan().any()):
        results[3][..., -1].fill_(1e-30)


def _where(condition: Callable[[Any], bool], change: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """change(the first result) if condition(arguments)."""
    return lambda args, results: change(results[0]) if condition(args) else None


# The op, the sample, the change of the results, the faults that are found. The last bit is within
# every budget, and also the reference must have the same bits in a second run.
FAULTS: dict[str, tuple[str, str, Callable[..., Any], dict[tuple[str, str], str]]] = {
    "small error": (
        "attention_fwd", "gqa", lambda _, results: results[0][1, 1, 5].mul_(1 + 1e-4),
        {("value", "out"): "slice [1, 1]"},
    ),
    "wrong gradient": (
        "layer_norm_bwd", "odd_width", lambda _, results: results[1].mul_(0.999),
        {("value", "dweight"): "slice "},
    ),
    "unwritten elements": (
        "rms_norm_fwd", "odd_width", _poison_last_row,
        # Where y is NaN, the output gradient is 0.
        {("value", "y"): "257 non-finite positions differ", ("value", "dx"): "slice ",
         ("value", "dweight"): "slice "},
    ),
    "crash": (
        "rms_norm_fwd", "odd_width", _raise(IndexError("out of range")),
        {("value", "all"): "IndexError: out of range"},
    ),
    "refusal": (
        "rms_norm_fwd", "odd_width", _raise(NotImplementedError("rms_norm_fwd: backend is tired")),
        {("value", "all"): "backend is tired"},
    ),
    "other entries": (
        "attention_fwd", "plain", _where(lambda args: len(args[0]) == 1, lambda x: x.mul_(1.01)),
        {("batch", "out"): "batch entry 1 computed alone: slice [0, "},
    ),
    "crash of an entry": (
        "layer_norm_fwd", "odd_width",
        lambda args, _: _raise(IndexError("out"))(args, _) if len(args[0]) == 1 else None,
        {("batch", "all"): "IndexError: out"},
    ),
    "finite padding": (
        "attention_fwd", "key_lengths",
        _where(lambda args: bool(args[2].isfinite().all()), _last_bit),
        {("padding", "out"): "finite at dead positions changes it"},
    ),
    "gradients of padding": (
        "attention_bwd", "bias_dead", _tiny_gradient_of_dead_pairs,
        {("padding", "dmask"): "not 0 at dead positions, with NaN there"},
    ),
    "live rows alone": ("attention_bwd", "bias_dead_keys", _tiny_gradient_of_dead_pairs, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, sample, change, expected = FAULTS[name]
    oracle = _oracle(op[:-4], sample)
    assert not _faults(check.check_sample(oracle, "reference", CPU))
    _break(monkeypatch, op, "reference", change)
    found = _faults(check.check_sample(oracle, "reference", CPU))
    assert found.keys() == expected.keys()
    assert all(expected[key] in message for key, message in found.items()), found


def test_bits_that_depend_on_the_batch_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu" in _judge("layer_norm", "odd_width", "cpu")[0].message:
        pytest.skip("the native library is not built")
    change = _where(lambda args: args[1].shape[0] == 1, _last_bit)
    _break(monkeypatch, "layer_norm_bwd", "cpu", change)
    faults = _faults(_judge("layer_norm", "odd_width", "cpu"))
    assert faults == {("batch", "dx"): "rows 0 to 1 computed alone gave other bits"}


def _needs_request(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The reference's backward has the same bits in every run only under deterministic algorithms.
    There, `change` is called with its results.
    """
    runs = itertools.count()

    def adds(args: Any, results: Any) -> None:
        if torch.are_deterministic_algorithms_enabled():
            change(results)
        elif next(runs) % 2:
            _last_bit(results[0])

    _break(monkeypatch, "attention_bwd", "reference", adds)
    monkeypatch.setattr(check, "DETERMINISTIC_ON_REQUEST", ("reference",))


def test_bits_of_a_run_are_compared_under_deterministic_algorithms(monkeypatch):
    oracle = _oracle("attention", SPECS["attention"].samples[0].name)
    _needs_request(monkeypatch, lambda results: None)
    assert not _faults(check.check_sample(oracle, "reference", CPU))
    monkeypatch.setattr(check, "DETERMINISTIC_ON_REQUEST", ())
    faults = _faults(check.check_sample(oracle, "reference", CPU))
    assert faults == {("rerun", "dq"): "a second run gave other bits"}


def test_results_under_deterministic_algorithms_are_compared(monkeypatch):
    oracle = _oracle("attention", SPECS["attention"].samples[0].name)
    _needs_request(monkeypatch, lambda results: results[0].mul_(1.01))
    [(where, message)] = _faults(check.check_sample(oracle, "reference", CPU)).items()
    assert where == ("value", "dq") and message.startswith("with deterministic algorithms: ")


def test_gradients_of_outputs_that_are_not_finite() -> None:
    spec = SPECS["attention"]
    output = torch.tensor([-torch.inf, 1.0, torch.nan, torch.inf])
    (gradient,) = output_gradients(spec, spec.samples[0], (output,))
    assert (gradient != 0).tolist() == [False, True, False, False]


def test_fill_positions_of_repeated_dimensions() -> None:
    """A dimension of stride 0 is filled where all its positions are dead."""
    x = torch.zeros(1, 3).expand(2, 3)
    fill_positions(x, torch.tensor([[True, True, False], [True, False, False]]), 1.0)
    assert x.tolist() == [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


# -- the command -----------------------------------------------------------------------------------
def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    return parser.parse_args(["--device=cpu", "--jobs=1", *arguments])


def test_report(capsys, tmp_path, monkeypatch):
    options = ("--op=attention", "--sample=both_lengths", "--backend=reference", "--dtype=fp32")
    file = tmp_path / "rows.json"
    assert check.run(_options(*options, f"--json={file}")) == 0
    lines = capsys.readouterr().out.splitlines()
    [header] = [line.split() for line in lines if line.startswith("op ")]
    [row] = [line.split() for line in lines if line.startswith("attention ")]
    cells = dict(zip(header, row, strict=True))
    # Two samples: both_lengths and both_lengths_causal, each with out, lse, dq, dk, dv.
    assert cells["results"] == "10" and cells["failed"] == cells["refused"] == "0"
    assert cells["rerun"] == cells["batch"] == cells["padding"] == "2"
    assert lines[-1] == "16 passed, 0 refused, 0 failed"
    rows = json.loads(file.read_text())
    assert len(rows) == 16 and {r["kind"] for r in rows} == {"value", "rerun", "batch", "padding"}

    def change(args: Any, results: Any) -> None:
        _last_bit(results[0]) if bool(args[2].isfinite().all()) else None

    _break(monkeypatch, "attention_fwd", "reference", change)
    assert check.run(_options(*options)) == 1
    out = capsys.readouterr().out
    assert (
        "FAIL    attention reference fp32 both_lengths out padding: "
        "finite at dead positions changes it\n" in out
    )


def test_errors_of_pytorch_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--op=attention", "--sample=both_lengths", "--backend=reference")
    assert check.run(_options(*options, "--dtype=bf16")) == 0
    out = capsys.readouterr().out
    [cells] = [line.split() for line in out.splitlines() if line.startswith("attention ")]
    assert float(cells[5]) > 100
    assert "logsumexp of scores" in out
    assert re.search(rf"^  attention bf16: {re.escape(cells[5])}, lse of both_lengths", out, re.M)
    assert check.run(_options(*options, "--dtype=fp32")) == 0
    assert "logsumexp of scores" not in capsys.readouterr().out


def test_works_without_rich(monkeypatch, capsys):
    for module in ("rich", *(name for name in sys.modules if name.startswith("rich."))):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    command = ["check", "--op=rms_norm", "--sample=odd_width", "--device=cpu", "--jobs=1"]
    assert cli.main([*command, "--dtype=fp32", "--backend=reference"]) == 0
    assert "passed, 0 refused, 0 failed" in capsys.readouterr().out


def test_time_limit_leaves_rows_of_what_was_not_reached(tmp_path: Path) -> None:
    """Twenty samples take longer than a second in one process; those not reached are reported."""
    file = tmp_path / "rows.json"
    arguments = ["check", "--op=ffn", "--backend=reference", "--jobs=1", "--seconds=1"]
    code = cli.main([*arguments, f"--json={file}"])
    rows = json.loads(file.read_text())
    missed = [row for row in rows if row["status"] == "skipped"]
    assert missed and all(row["message"] == "was not reached in 1 s" for row in missed)
    assert code == (1 if len(missed) == len(rows) else 0)


def _exit(case: Any) -> None:
    os._exit(3)


def test_kernels_that_crash_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one dtype, after some samples, as each may take the time of a hang."""
    cases = [
        check._Case("ffn", name, dtype, ("reference",), CPU)
        for dtype in (torch.float32, torch.float16)
        for name in ("relu", "gelu", "silu")
    ]
    monkeypatch.setattr(check, "_check_case", _exit)
    monkeypatch.setattr(check, "_MAX_LOST", 1)
    found = dict(check._check_cases(cases, jobs=1, seconds=99.0))
    statuses = [found[index][0].status for index in range(6)]
    assert statuses == ["FAIL", "refused", "refused"] * 2
    assert "process died" in found[0][0].message
    assert found[5][0].message == "1 samples of it crashed or hung"


def test_on_a_gpu_backends_have_processes_of_their_own() -> None:
    """In the order requested, so that a backend that breaks the GPU affects no other."""
    options = _options("--op=attention", "--sample=lengths", "--backend=triton", "--backend=sm90")
    found = [case.backends for case in check._cases(options, torch.device("cuda"))]
    half = len(found) // 2
    assert half > 9 and found == [("triton",)] * half + [("sm90",)] * half
    together = check._cases(_options("--op=ffn", "--sample=relu"), CPU)
    assert all("reference" in case.backends and len(case.backends) > 1 for case in together)


def _misbehave(case: str) -> str:
    if case == "hangs":
        time.sleep(1000)
    if case == "dies":
        os.kill(os.getpid(), 9)
    if case == "raises":
        raise ValueError("no good")
    if case == "breaks the GPU":
        isolation._gpu_works = lambda: False
    return f"{case} {os.getpid()}"


@pytest.mark.slow
def test_crashed_cases_do_not_affect_others(tmp_path, monkeypatch):
    """Crashes, hangs and GPU errors end their process; the other cases give their results. A script
    that runs them need not keep its processes from running it again.
    """
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    monkeypatch.setitem(sys.modules, "__main__", script)
    cases = ["first", "dies", "second", "breaks the GPU", "third", "raises", "fourth", "hangs"]
    found = dict(isolation.run_isolated(_misbehave, cases, jobs=1, limit_s=3.0))
    assert found.keys() == set(range(len(cases)))
    assert found[1] == isolation.Lost(True, "its process died: SIGKILL")
    assert found[5] == isolation.Lost(True, "ValueError: no good")
    assert found[7] == isolation.Lost(True, "was still running after 3 s")
    results = [str(found[i]).rpartition(" ") for i in (0, 2, 3, 4, 6)]
    assert [r[0] for r in results] == ["first", "second", "breaks the GPU", "third", "fourth"]
    first, second, broken, third, fourth = (r[2] for r in results)
    assert first != second == broken != third == fourth  # the process continues after an exception


def test_time_limit_names_what_was_not_reached() -> None:
    found = isolation.run_isolated(_misbehave, ["one"] * 3, jobs=1, seconds=0.0, limit_s=20.0)
    assert [r for _, r in found] == [isolation.Lost(False, "was not reached in 0 s")] * 3


def test_forward_is_judged_where_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> str:
        return "does not support this"

    oracle = _oracle("attention", "both_lengths")
    module = OPS["attention_fwd"].module("reference")
    monkeypatch.setattr(module, "attention_bwd_unsupported", refuse, raising=False)
    rows = check.check_sample(oracle, "reference", CPU)
    assert [(r.result, r.kind, r.status) for r in rows] == [
        ("out", "value", "ok"), ("lse", "value", "ok"), ("all", "rerun", "ok"),
        ("all", "batch", "ok"), ("all", "padding", "ok"), ("gradients", "value", "refused"),
    ]  # fmt: skip
    assert rows[-1].message == "backend reference does not support this"
    monkeypatch.setattr(module, "attention_fwd_unsupported", refuse, raising=False)
    (row,) = check.check_sample(oracle, "reference", CPU)
    assert (row.result, row.status) == ("all", "refused")


def test_outputs_are_judged_where_gradients_are_known_to_be_wrong() -> None:
    [found] = [s for s in SPECS["attention"].samples if s.name == "plain"]
    sample = dataclasses.replace(found, wrong_gradients=frozenset(("reference",)))
    rows = check.check_sample(Oracle(SPECS["attention"], sample, torch.float32), "reference", CPU)
    assert [r.result for r in rows if r.kind == "value"] == ["out", "lse", "gradients"]
    assert rows[-1].status == "refused"
    assert rows[-1].message.startswith("computes wrong gradients")


def test_drawn_calls_pass(capsys: pytest.CaptureFixture[str]) -> None:
    options = _options("--fuzz=20", "--seed=300", "--device=cpu", "--jobs=1")
    cases = check._cases(options, CPU)
    ops = ("attention", "attention_varlen", "attention_with_weights")
    assert [(c.op, c.sample) for c in cases] == [
        (op, f"drawn_{n}") for op in ops for n in range(300, 320)
    ]
    assert check.run(options) == 0, capsys.readouterr().out
    reasons = [SPECS["attention"].sample(c.sample).reason for c in cases]
    words = ("padding1e+", "whole", "window", "cancelling")
    assert all(any(word in r for r in reasons) for word in words)


@pytest.mark.parametrize("number", [70052, 70612])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_gradients_of_sinks_that_almost_vanish(number: int, backend: str) -> None:
    """One head's gradient is far below the others', or its weights are below 2^-126."""
    spec = SPECS["attention_varlen"]
    sample = spec.sample(f"drawn_{number}")
    rows = check.check_sample(Oracle(spec, sample, *sample.dtypes), backend, CPU)
    judged = [row.status for row in rows if (row.result, row.kind) == ("dsinks", "value")]
    refused = backend == "cpu" and _native.unavailable("cpu") is not None
    assert judged == ([] if refused else ["ok"])


def test_a_drawn_call_that_fails_is_named(monkeypatch, capsys):
    _break(monkeypatch, "attention_fwd", "torch", lambda args, results: results[0].mul_(2))
    options = ("--op=attention", "--backend=torch", "--jobs=1")
    assert check.run(_options("--fuzz=3", "--seed=7", *options)) == 1
    shown = capsys.readouterr().out
    assert "(--op attention --fuzz 1 --seed 7: {'B': " in shown
    row = check.Row("attention", "cpu", "cpu", "fp32", "drawn_7", "lse", "ok", 1, 1, torch_error=2)
    assert "lse of drawn_7 ({'B': " in report._torch_errors([row])[-2]


def test_rows_are_written_as_they_come(tmp_path, capsys, monkeypatch):
    file = tmp_path / "rows.jsonl"
    options = _options("--op=rms_norm", "--sample=odd_width", "--backend=reference",
                       f"--json={file}")  # fmt: skip
    assert check.run(options) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) > 6 and {r["status"] for r in rows} == {"ok"}

    def ends(case: Any) -> list[check.Row]:
        if case.dtype == torch.float16:
            raise KeyboardInterrupt
        return checked(case)

    checked = check._check_case
    monkeypatch.setattr(check, "_check_case", ends)
    with pytest.raises(KeyboardInterrupt):
        check.run(options)
    again = file.read_text().splitlines()[len(rows) :]
    assert {json.loads(line)["dtype"] for line in again} == {"fp32", "bf16"}


def test_a_run_continues_another(tmp_path, capsys, monkeypatch):
    """Samples that a file has rows of, by the same kernels, are not repeated, but reported."""
    file = tmp_path / "rows.jsonl"
    options = _options("--op=rms_norm", "--sample=odd_width", "--backend=reference",
                       f"--json={file}", "--resume")  # fmt: skip
    ran: list[torch.dtype] = []

    def ends(case: Any) -> list[check.Row]:
        ran.append(case.dtype)
        if case.dtype == torch.float16:
            raise KeyboardInterrupt
        return checked(case)

    checked = check._check_case
    monkeypatch.setattr(check, "_check_case", ends)
    with pytest.raises(KeyboardInterrupt):
        check.run(options)
    with file.open("a") as torn:
        torn.write('{"op": "rms_norm", "back')  # as a kill leaves it
    monkeypatch.setattr(check, "_check_case", lambda case: ran.append(case.dtype) or checked(case))
    assert check.run(options) == 0
    assert ran == [torch.float32, torch.bfloat16, torch.float16, torch.float16]
    printed = capsys.readouterr().out
    assert "2 of 3 samples were checked before" in printed
    assert all(f" {dtype} " in printed for dtype in ("fp32", "bf16", "fp16"))
    assert check.run(options) == 0 and len(ran) == 4
    monkeypatch.setattr(lines, "kernels", lambda backend: "other")
    assert check.run(options) == 0 and len(ran) == 7
    others = [isa for isa in ISAS if isa != ISAS[-1]]
    for isa in others:
        file.unlink()
        again = _options("--op=rms_norm", "--sample=odd_width", "--backend=cpu", "--dtype=fp32",
                         f"--json={file}", "--resume", "--jobs=1")  # fmt: skip
        ran.clear()
        assert check.run(again) == 0
        again.isa = isa
        assert check.run(again) == 0 and check.run(again) == 0
        assert len(ran) == 2 and _native.cpu_isa() == ISAS[-1]
    with pytest.raises(ValueError, match=r"--resume must go with --json FILE\.jsonl"):
        check.run(_options("--resume", "--op=rms_norm"))
    file.write_text('{"instance": "a", "status": "ok"}\n')
    with pytest.raises(ValueError, match="must have rows of the same command to be continued"):
        check.run(options)


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(check._progress(iter([(i, []) for i in range(25)]), "checking", 25))) == 25
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[-1].startswith("checking: 25 of 25, ")


@pytest.mark.parametrize("argument, named", [
    ("--op=nonsense", "--op must be one of"),
    ("--backend=nonsense", "--backend must be one of"),
    ("--device=nonsense", "--device"),
    ("--jobs=-3", "--jobs"),
    ("--sample=nonsense", "at least one sample"),
    ("--isa=nonsense", "--isa must be one of"),
    ("--seed=3", "--seed must go with --fuzz N"),
    ("--fuzz=2 --quick", "--quick must go without --fuzz"),
    ("--fuzz=2 --op=ffn", "--op must be one of attention"),
])  # fmt: skip
def test_wrong_options_are_named(argument, named, capsys):
    try:
        code = cli.main(["check", *argument.split()])
    except SystemExit as left:  # argparse exits
        code = left.code
    assert code == 2
    assert named in capsys.readouterr().err


# -- the record of what passed ---------------------------------------------------------------------
@pytest.fixture
def pretended_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of the CPU kernels' record; the checks run on the CPU."""
    checked = check._check_case

    def on_cpu(case: check._Case) -> list[check.Row]:
        return checked(dataclasses.replace(case, device=CPU))

    folder = tmp_path / "cache" / "verified"
    monkeypatch.setenv(_env.RECORD_VARIABLE, str(folder))
    monkeypatch.setattr(_env, "architecture", lambda *_: "sm_90")
    monkeypatch.setattr(_env, "why_not_on", lambda backend, device: None)
    monkeypatch.setattr(_env, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(_verified, "identified", lambda backend: True)  # as GPU libraries are
    monkeypatch.setattr(check, "_check_cases", lambda cases, *_: enumerate(map(on_cpu, cases)))
    _verified.recorded.cache_clear()
    yield folder / "sm_90-cpu.json"
    _verified.recorded.cache_clear()


def _passed() -> frozenset[tuple[str, str, str]]:
    """The records of this user."""
    return frozenset(key for key in _verified.recorded(CUDA)[0] if key[1] == "cpu")


RECORDED = ("--op=rms_norm", "--backend=cpu", "--backend=reference", "--device=cuda", "--record")


def test_what_passes_is_recorded(pretended_gpu, capsys, monkeypatch):
    """Entries of the same kernels are kept where they are of other ops, those of others are not."""
    dtypes = ("float32", "bfloat16", "float16")
    entry = {"op": "ffn", "dtype": "float32", "status": "passed"}
    again = entry | {"op": "rms_norm", "status": "failed"}
    digest, beside = _verified.digest("cpu"), pretended_gpu.with_name("sm_100-cpu.json")
    lines.write_json(pretended_gpu, {"digest": digest, "kernels": [entry, again]})
    lines.write_json(beside, {"digest": "of other kernels", "kernels": [entry]})
    assert check.run(_options(*RECORDED)) == 0
    printed = capsys.readouterr().out
    assert all(f"rms_norm by cpu in {dtype}" in printed for dtype in dtypes)
    expected = {("rms_norm", "cpu", dtype) for dtype in dtypes}
    assert _passed() == expected | {("ffn", "cpu", "float32")}
    record = _verified.read(pretended_gpu)
    kept, *made = record["kernels"]
    assert kept == entry and record["digest"] == digest and "compiler" not in record
    assert all(each["device"] == "a GPU" and each["results"] > 10 for each in made)
    assert all(each["commit"] == lines.commit() and each["date"] for each in made)
    assert _verified.read(beside)["digest"] == "of other kernels"

    lines.write_json(pretended_gpu, record | {"digest": "of other kernels"})
    _verified.recorded.cache_clear()
    _break(monkeypatch, "rms_norm_fwd", "cpu", lambda args, results: results[0].fill_(1.0))
    assert check.run(_options(*RECORDED)) == 1
    assert "from now on: nothing" in capsys.readouterr().out
    assert _passed() == frozenset()
    assert {entry["op"] for entry in _verified.read(pretended_gpu)["kernels"]} == {"rms_norm"}


def test_the_commit_is_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a repository that the package is installed in."""
    assert re.fullmatch(r"[0-9a-f]{12}\+?", lines.commit() or "0" * 12)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "py.typed").touch()
    monkeypatch.setattr(lines, "_PACKAGE", tmp_path)
    assert lines.commit.__wrapped__() is None
    subprocess.run([*git, "add", "py.typed"], check=True)
    assert lines.commit.__wrapped__()[-1] == "+"


def test_rows_depend_on_the_ops_and_the_library(tmp_path, monkeypatch):
    for module in (lines, _verified):
        monkeypatch.setattr(module, "_PACKAGE", tmp_path)
    compute = lines.kernels.__wrapped__
    digests = [compute("sm90")]
    for name in ("ops/_op.py", "ops/ffn/triton.py", "_C_sm90.abi3.so"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        for content in ("first", "other"):
            file.write_text(content)
            digests.append(compute("sm90"))
    assert len(set(digests)) == len(digests)
    (tmp_path / "_C_cpu.abi3.so").write_text("first")
    assert compute("sm90") == digests[-1]


def test_failures_are_recorded(pretended_gpu, monkeypatch, capsys):
    """So that they outweigh a record that ships with the package; each dtype for itself."""

    def change(args: Any, results: Any) -> None:
        if args[0].dtype == torch.float16:
            results[0].fill_(1.0)

    _break(monkeypatch, "rms_norm_fwd", "cpu", change)
    assert check.run(_options(*RECORDED, "--dtype=fp16", "--dtype=bf16")) == 1
    assert _passed() == {("rms_norm", "cpu", "bfloat16")}
    entries = {e["dtype"]: (e["op"], e["status"]) for e in _verified.read(pretended_gpu)["kernels"]}
    assert entries["float16"] == ("rms_norm", "failed")
    message = "not chosen, because samples failed: rms_norm by cpu in float16"
    assert message in capsys.readouterr().out


def test_what_was_not_reached_is_not_decided(pretended_gpu, monkeypatch, capsys):
    """A record made in a limited time holds the dtypes of which every sample was reached."""
    checked, over = check._check_cases, []

    def hurried(cases: Any, *rest: Any) -> Iterator[tuple[int, list[check.Row]]]:
        for index, rows in checked(cases, *rest):
            if cases[index].dtype == torch.float16 and index % 2:
                over.append(index)
                rows = [check._row_of_case(cases[index], "cpu", "skipped", "was not reached")]
            yield index, rows

    monkeypatch.setattr(check, "_check_cases", hurried)
    assert check.run(_options(*RECORDED, "--seconds=99")) == 0 and over
    assert _passed() == {("rms_norm", "cpu", d) for d in ("float32", "bfloat16")}
    printed = capsys.readouterr().out
    assert "not decided, because samples were not reached: rms_norm by cpu in float16" in printed
    assert f"skipped: rms_norm: {len(over)} samples of backend cpu were not reached" in printed


@pytest.mark.parametrize("option", ["--quick", "--sample=odd", "--device=cpu", "--op=attention"])
def test_only_the_whole_suite_is_recorded(pretended_gpu: Path, option: str) -> None:
    with pytest.raises(ValueError, match="--record must go with"):
        check.run(_options(*RECORDED, option))
    assert not pretended_gpu.exists()
