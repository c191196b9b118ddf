"""The smallest case of every kernel instance: names, faults, hangs and crashes, runs in parts."""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from native_build import build_script
from small_calls import op_name

from fastattn.ops import _env, _native
from fastattn.ops._op import OPS
from fastattn.testing import instances, isolation, lines
from fastattn.testing.instances import Instance, Row

NAMES = {case.name: case for case in instances.instances()}
_BOTH = ("fwd", "bwd")
needs_library = pytest.mark.skipif(_native.unavailable("cpu") is not None, reason="needs _C_cpu")


# Launches of a call of the Hopper feed-forward network, by direction and whether it is gated.
_PRODUCTS = {
    ("fwd", False): ("up", "down"),
    ("fwd", True): ("up_gated", "down"),
    ("bwd", False): ("dhidden", "dw", "dx"),
    ("bwd", True): ("dhidden_gated", "dw", "dx"),
}


def test_every_hopper_instance_has_a_case() -> None:
    """The table of the build, in the names of its objects; no name twice."""
    tables = build_script().INSTANCES
    wanted = {name for file in tables if "_sm90" in file for name in tables[file]}
    hopper = {case.name: case for case in instances._hopper()}
    kinds = ("splits", "packed", "sorted", "tiles", "scores_mask")
    extra = {name for name in hopper if name.endswith(kinds)}
    launched = {
        f"ffn_product_sm90_{case.dtype}_{product}"
        for case in hopper.values()
        if case.op == "ffn"
        for product in _PRODUCTS[case.direction, case.options["activation"] == "swiglu"]
    }
    attention = {name for name in set(hopper) - extra if hopper[name].op != "ffn"}
    assert len(wanted) == 182 and attention | launched == wanted and len(extra) == 14
    assert len(NAMES) == len(instances.instances())
    # More rows than one warpgroup has, else the bounded instance serves calls of the full one.
    assert instances._SIZES["M"] > 64 and instances._SIZES["N"] % 8 == 0


def test_every_instance_of_the_portable_library_has_a_case() -> None:
    """In each direction, and with both types of parameters."""
    tables = build_script().INSTANCES
    wanted = {name for file in tables if "_cuda" in file for name in tables[file]}
    cases = [case for case in instances._cuda() if case.op == "layer_norm"]
    found = {
        f"norm_{case.direction}_cuda_{case.dtype}_"
        f"{'fp32' if 'wide_parameters' in case.options else case.dtype}"
        for case in cases
    }
    assert found == wanted and len(wanted) == 10
    assert len(cases) == 4 * len(wanted)


def _break(monkeypatch: pytest.MonkeyPatch, op: str, backend: str) -> None:
    launch = OPS[op]._launcher(backend)

    def broken(args: Any) -> Any:
        results = launch(args)
        next(x for x in results if x.numel()).view(-1)[0] += 1.0
        return results

    monkeypatch.setitem(OPS[op]._launchers, backend, broken)


@needs_library
@pytest.mark.parametrize("op", ["attention", "attention_varlen", "add_layer_norm", "ffn", "linear"])
def test_wrong_results_are_those_of_their_direction(op, monkeypatch):
    """A backward does not depend on the backend's forward, which may be wrong or hang."""
    here = [case for case in instances._cpu() if case.op == op and case.dtype == "fp32"]
    # The last ones are of the instruction set that this process uses.
    cases = {direction: [c for c in here if c.direction == direction][-1] for direction in _BOTH}
    assert [instances.run((case, "cpu")).status for case in cases.values()] == ["ok", "ok"]
    for broken, other in (("fwd", "bwd"), ("bwd", "fwd")):
        with monkeypatch.context() as patch:
            _break(patch, op_name(op, broken), "cpu")
            row = instances.run((cases[broken], "cpu"))
            assert row.status == "FAIL" and "value: slice" in row.message
            assert row.error > row.allowed > 0
            assert instances.run((cases[other], "cpu")).status == "ok"


def _misbehave(case: tuple[Instance, str]) -> Row:
    instance, device = case
    kind = instance.options["kind"]
    if kind == "hangs":
        time.sleep(1000)
    if kind == "crashes":
        os.kill(os.getpid(), 11)
    if kind == "raises":
        raise RuntimeError("no kernel image")
    status, message = ("ok", "") if kind == "passes" else ("FAIL", "out value: slice [0]: error 1")
    return Row(instance.name, instance.backend, device, status, message)


@pytest.mark.slow
def test_hangs_and_crashes_are_reported_by_name(tmp_path, monkeypatch, capsys):
    """The other instances run; another run repeats none of them."""
    kinds = ("hangs", "passes", "crashes", "wrong", "raises", "passes_too")
    cases = [
        Instance(f"{kind}_instance", "ffn", "fwd", "cpu", "fp32", {"kind": kind.partition("_")[0]})
        for kind in kinds
    ]
    hopper = Instance("hopper_instance", "ffn", "fwd", "sm90", "bf16", {})
    monkeypatch.setattr(instances, "instances", lambda: [hopper, *cases])
    monkeypatch.setattr(instances, "run", _misbehave)
    monkeypatch.setattr(instances, "_COMPILING_LIMIT_S", 3.0)
    monkeypatch.setattr(_native, "unavailable", lambda library: None)
    file = tmp_path / "rows.jsonl"
    arguments = ["--device=cpu", "--jobs=1", "--resume", f"--json={file}"]
    with monkeypatch.context() as patch:  # the first one is running when the time is over
        patch.setattr(isolation, "GRACE_S", 0.5)
        assert instances.main([*arguments, "--seconds=0.01"]) == 1
    assert "cpu: 0 passed, 0 failed, 0 refused, 6 were not reached" in capsys.readouterr().out
    assert instances.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "refused: 1 instances: backend sm90 runs on cuda tensors, got cpu" in printed
    assert "cpu: 2 passed, 4 failed, 0 refused" in printed
    messages = {
        row["instance"]: row["message"] for row in lines.read(file) if row["status"] == "FAIL"
    }
    assert messages == {
        "hangs_instance": "was still running after 3 s",
        "crashes_instance": "its process died: SIGSEGV",
        "wrong_instance": "out value: slice [0]: error 1",
        "raises_instance": "RuntimeError: no kernel image",
    }
    finished = [row["instance"] for row in lines.read(file) if row["status"] in ("ok", "FAIL")]
    assert len(finished) == 6
    assert instances.main(arguments) == 1
    assert "6 of them ran before" in capsys.readouterr().out
    again = [row["instance"] for row in lines.read(file) if row["status"] in ("ok", "FAIL")]
    assert again == finished
    lines.append(file, [{"primitive": "a", "status": "ok"}])
    with pytest.raises(SystemExit) as ended:
        instances.main(arguments)
    assert ended.value.code == 2 and "must have rows of" in capsys.readouterr().err


def test_on_a_gpu_kernels_of_the_hopper_library_run_alone(tmp_path, monkeypatch, capsys):
    """On a pretended GPU: one process, half of the time and short limits for the library."""
    runs: list[tuple[str, int, int, float, float]] = []

    def isolated(
        function: Any, cases: Any, *, jobs: int, seconds: float, limit_s: float
    ) -> Iterator[tuple[int, Row]]:
        backends = "+".join(dict.fromkeys(case.backend for case, _ in cases))
        runs.append((backends, len(cases), jobs, seconds, limit_s))
        for index, (case, device) in enumerate(cases):
            yield index, Row(case.name, case.backend, device, "ok")

    monkeypatch.setattr(instances, "run_isolated", isolated)
    monkeypatch.setattr(_env, "default_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(_env, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(_env, "architecture", lambda *device: "sm_90")
    monkeypatch.setattr(
        _env, "why_not_on", lambda name, device: "is not for it" if name == "cpu" else None
    )
    monkeypatch.setattr(_native, "unavailable", lambda library: None)
    file = tmp_path / "rows.jsonl"
    assert instances.main(["--jobs=16", "--seconds=100", f"--json={file}"]) == 0
    (hopper, many, alone, half, short), (triton, some, together, rest, long) = runs
    assert (hopper, alone, short) == ("sm90", 1, 20.0)
    assert (triton, together, long) == ("cuda+triton", 16, 120.0)
    norms = len(list(instances._cuda()))
    assert half <= 50.0 < rest <= 100.0 and many == 190
    assert norms == 120 and some > 90 + norms
    printed = capsys.readouterr().out
    assert "sm90: 190 passed, 0 failed, 0 refused" in printed
    assert f"cuda: {norms} passed, 0 failed" in printed
    assert f"triton: {some - norms} passed, 0 failed" in printed
    assert {row["device"] for row in lines.read(file)} == {"cuda"}


def test_what_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_env, "interpreting", lambda: True)
    monkeypatch.setattr(_env, "has_triton", lambda: True)
    cpu = torch.device("cpu")
    half, single = (NAMES[f"attention_fwd_triton_{d}_d64_full"] for d in ("bf16", "fp32"))
    assert instances.unavailable(single, cpu) is None
    assert instances.unavailable(half, cpu) == "computes bf16 as integers in Triton's interpreter"
    assert "cuda" in str(instances.unavailable(NAMES["attention_bwd_sm90_bf16_d64_mask"], cpu))


def test_options_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in ((["--match=nonsense"], "--match must match"),
                             (["--match=["], "must be a regular expression, got '['"),
                             (["--device=cuda"], "--device cuda needs a GPU")):  # fmt: skip
        if "cuda" in arguments[0] and torch.cuda.is_available():
            continue
        with pytest.raises(SystemExit):
            instances.main(arguments)
        assert named in capsys.readouterr().err
    assert instances.main(["--list", "--match=_sm90_.*d128_full"]) == 0
    assert capsys.readouterr().out.split() == [
        "attention_fwd_sm90_bf16_d128_full", "attention_fwd_sm90_fp16_d128_full"
    ]  # fmt: skip
